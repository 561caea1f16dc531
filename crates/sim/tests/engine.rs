//! The engine model: what a step costs, who is in it, and what becomes of blocks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::Arc;

use pointsman_sim::engine::{
    Batch, Content, DecodeTotals, Engine, Event, Job, JobId, Kind, LinkId, Nanos, Outbox, Output,
    Refused, Spec,
};
use pointsman_sim::profile::Profile;
use pointsman_sim::rng::mix;
use proptest::prelude::*;

const MS: f64 = 1e6;

fn spec() -> Spec {
    Spec { capacity_blocks: 1000, ..Spec::default() }
}

/// Names of `tokens / 16` full blocks that share their first `shared` with every other seed.
fn content(seed: u64, shared: u32, tokens: u32) -> Arc<Content> {
    let names =
        (0..tokens / 16).map(|at| mix(u64::from(at) + if at < shared { 0 } else { seed << 32 }));
    Arc::new(Content { names: names.collect(), ..Content::default() })
}

fn job(id: u64, prompt: u32, output: u32, kind: Kind) -> Job {
    let content = content(id, 0, prompt + output);
    Job { id: JobId(id), prompt_tokens: prompt, output_tokens: output, kind, content }
}

fn run(engine: &mut Engine) -> Outbox {
    let mut out = Outbox::default();
    engine.advance(0, &mut out);
    while let Some(at) = engine.wakeup() {
        engine.advance(at, &mut out);
        engine.check().unwrap();
    }
    out
}

fn token_times(out: &Outbox, id: u64) -> Vec<Nanos> {
    let of = |output: &Output| match output {
        Output::Token { job, at } if job.0 == id => Some(*at),
        _ => None,
    };
    out.outputs.iter().filter_map(of).collect()
}

fn assert_ms(at: Nanos, expected: f64) {
    assert!((at as f64 / MS - expected).abs() < 1e-5, "{} ms, expected {expected}", at as f64 / MS);
}

#[test]
fn sums_over_steps_keep_prompts_and_decodes_apart_whether_or_not_each_token_is_told() {
    let totals = [true, false].map(|every_token| {
        let mut engine = Engine::new(Spec { every_token, ..spec() });
        engine.submit(job(1, 1000, 3, Kind::Local)).unwrap();
        engine.submit(job(2, 500, 5, Kind::Local)).unwrap();
        assert_eq!(engine.waiting_prefill_tokens(), 1500);
        let out = run(&mut engine);
        assert_eq!(engine.waiting_prefill_tokens(), 0);
        (engine.totals(), token_times(&out, 2))
    });
    let (told, times) = &totals[0];
    assert_eq!(*told, totals[1].0);
    // Both prompts in one step, two steps with both, two with the longer answer alone.
    assert_eq!((told.steps, told.prefilled, told.prefill_time), (5, 1500, times[0]));
    let (both, alone) = (times[2] - times[0], times[4] - times[2]);
    let decode = DecodeTotals {
        steps: 4,
        batch: 2 * 2 + 2,
        batch_squared: 2 * 4 + 2,
        time: both + alone,
        batch_time: 2 * both + alone,
    };
    assert_eq!(told.decode, decode);
}

#[test]
fn what_waits_to_be_computed_is_not_what_is_cached() {
    let mut engine = Engine::new(spec());
    engine.submit(job(1, 160, 2, Kind::Local)).unwrap();
    run(&mut engine);
    let again = Job { id: JobId(2), ..job(1, 200, 2, Kind::Local) };
    engine.submit(again).unwrap();
    engine.submit(job(3, 100, 2, Kind::Pull(LinkId(0)))).unwrap();
    assert_eq!(engine.waiting_prefill_tokens(), 40);
}

#[test]
fn a_cold_prompt_takes_the_formula_of_prefill_and_each_token_that_of_decode() {
    let mut engine = Engine::new(spec());
    engine.submit(job(1, 1000, 3, Kind::Local)).unwrap();
    let times = token_times(&run(&mut engine), 1);
    let prefill = 8.0 + 0.0445 * 1000.0 + 9.8e-7 * 1000.0 * 1000.0;
    assert_ms(times[0], prefill);
    assert_ms(times[1], prefill + 10.4 + 0.038 + 2.9e-5 * 1001.0);
    assert_ms(times[2], prefill + 2.0 * (10.4 + 0.038) + 2.9e-5 * 2003.0);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_of_the_token_budget() {
    let mut engine = Engine::new(Spec { max_num_batched_tokens: 600, ..spec() });
    engine.submit(job(1, 1000, 1, Kind::Local)).unwrap();
    let times = token_times(&run(&mut engine), 1);
    let first = 8.0 + 0.0445 * 600.0 + 9.8e-7 * 600.0 * 600.0;
    let second = 8.0 + 0.0445 * 400.0 + 9.8e-7 * 400.0 * 1000.0;
    assert_ms(times[0], first + second);
    assert_eq!(engine.totals().steps, 2);
}

#[test]
fn running_sequences_decode_before_prompts_get_the_rest_of_the_budget() {
    let mut engine = Engine::new(Spec { max_num_batched_tokens: 100, ..spec() });
    let mut out = Outbox::default();
    engine.submit(job(1, 50, 20, Kind::Local)).unwrap();
    engine.advance(0, &mut out);
    engine.submit(job(2, 199, 1, Kind::Local)).unwrap();
    out.outputs.extend(run(&mut engine).outputs);
    // 50 of the second prompt join the first step? No: the first step had begun. Then 99, 99, 1.
    let (first, second) = (token_times(&out, 1), token_times(&out, 2));
    assert_eq!(second[0], first[3], "99 + 99 + 1 tokens beside three decodes");
}

#[test]
fn prompts_are_computed_in_order_of_arrival() {
    let mut engine = Engine::new(Spec { max_num_batched_tokens: 128, ..spec() });
    for id in 1..=3 {
        engine.submit(job(id, 300, 1, Kind::Local)).unwrap();
    }
    let out = run(&mut engine);
    let firsts: Vec<_> = (1..=3).map(|id| token_times(&out, id)[0]).collect();
    assert!(firsts.is_sorted(), "{firsts:?}");
}

#[test]
fn a_prefix_seen_before_is_not_computed_again() {
    let mut engine = Engine::new(spec());
    let shared =
        |id, prompt| Job { content: content(9, 0, 4096), ..job(id, prompt, 1, Kind::Local) };
    engine.submit(shared(1, 1000)).unwrap();
    run(&mut engine);
    engine.submit(shared(2, 1200)).unwrap();
    let out = run(&mut engine);
    // 1000 prompt tokens fill 62 blocks; the one generated token has no KV.
    assert!(matches!(out.outputs[0], Output::Started { cached_tokens: 992, .. }), "{out:?}");
    assert_eq!(engine.totals().local_cache_hit, 992);
    assert_eq!(engine.totals().local_compute, 1000 + 208);
}

#[test]
fn a_fully_cached_prompt_still_computes_its_last_block() {
    let mut engine = Engine::new(spec());
    let same = |id| Job { content: content(9, 0, 4096), ..job(id, 320, 1, Kind::Local) };
    engine.submit(same(1)).unwrap();
    run(&mut engine);
    engine.submit(same(2)).unwrap();
    let out = run(&mut engine);
    assert!(matches!(out.outputs[0], Output::Started { cached_tokens: 304, .. }), "{out:?}");
    assert!(out.batches.is_empty() || resident(&out.batches, HashMap::new()).len() == 1);
}

#[test]
fn generated_tokens_that_fill_a_block_are_announced() {
    let mut engine = Engine::new(spec());
    engine.submit(job(1, 30, 20, Kind::Local)).unwrap();
    let out = run(&mut engine);
    // 49 of the 50 tokens have KV: blocks 0 (prompt), 1 and 2 (filled while generating).
    let stored: Vec<(u32, u32)> = out.batches.iter().flat_map(|b| &b.events).map(stored).collect();
    assert_eq!(stored, [(0, 1), (1, 1), (2, 1)]);
}

fn stored(event: &Event) -> (u32, u32) {
    match event {
        Event::Stored { first, count, .. } => (*first, *count),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_least_recently_used_leaf_is_evicted_first() {
    let mut engine = Engine::new(Spec { capacity_blocks: 10, ..spec() });
    engine.submit(job(1, 64, 1, Kind::Local)).unwrap();
    run(&mut engine);
    engine.submit(job(2, 48, 1, Kind::Local)).unwrap();
    run(&mut engine);
    // 4 + 3 blocks are cached; five more need the 3 nameless ones and the last two of job 1.
    engine.submit(job(3, 80, 1, Kind::Local)).unwrap();
    let out = run(&mut engine);
    let removed: Vec<u64> = out.batches[0].events.iter().filter_map(removed).collect();
    let old = content(1, 0, 65);
    assert_eq!(removed, [old.names[3], old.names[2]]);
}

fn removed(event: &Event) -> Option<u64> {
    match event {
        Event::Removed { name } => Some(*name),
        _ => None,
    }
}

#[test]
fn a_sequence_that_runs_out_of_blocks_puts_the_youngest_back_and_all_finish() {
    let mut engine = Engine::new(Spec { capacity_blocks: 12, ..spec() });
    for id in 1..=2 {
        engine.submit(job(id, 64, 80, Kind::Local)).unwrap();
    }
    let out = run(&mut engine);
    assert!(engine.totals().preemptions > 0);
    assert_eq!(token_times(&out, 1).len(), 80);
    assert_eq!(token_times(&out, 2).len(), 80);
    assert!(token_times(&out, 1)[79] < token_times(&out, 2)[79]);
}

#[test]
fn a_sequence_that_can_never_fit_is_refused() {
    let mut engine = Engine::new(Spec { capacity_blocks: 4, ..spec() });
    let refused = engine.submit(job(1, 60, 6, Kind::Local));
    assert_eq!(refused, Err(Refused::TooLarge { needed: 5, capacity: 4 }));
    engine.submit(job(2, 60, 5, Kind::Local)).unwrap();
}

#[test]
fn a_handed_off_prompt_stays_pinned_until_it_is_pulled() {
    let mut engine = Engine::new(spec());
    engine.submit(job(1, 100, 1, Kind::HandOff)).unwrap();
    let mut out = Outbox::default();
    engine.advance(0, &mut out);
    let done = engine.wakeup().unwrap();
    engine.advance(done, &mut out);
    assert!(
        matches!(&out.outputs[2], Output::Finished { pinned: Some(blocks), .. } if blocks.len() == 7)
    );
    assert_eq!(engine.load().pinned_blocks, 7);
    assert!(engine.unpin(JobId(1)));
    assert!(!engine.unpin(JobId(1)));
    assert_eq!(engine.load().used_blocks, 0);
    engine.check().unwrap();
}

#[test]
fn a_pin_ends_with_its_lease_and_a_held_lease_does_not_end() {
    let mut engine = Engine::new(spec());
    let mut out = Outbox::default();
    for id in 1..=2 {
        engine.submit(job(id, 100, 1, Kind::HandOff)).unwrap();
    }
    engine.advance(0, &mut out);
    engine.advance(1_000_000_000, &mut out);
    assert!(engine.set_lease(JobId(2), Nanos::MAX));
    engine.advance(3_600_000_000_000, &mut out);
    let expired = |output: &&Output| matches!(output, Output::Expired { .. });
    let expired: Vec<_> = out.outputs.iter().filter(expired).collect();
    assert!(matches!(expired[..], [Output::Expired { job: JobId(1), .. }]), "{expired:?}");
    assert_eq!(engine.load().pins, 1);
    assert_eq!(engine.wakeup(), None);
}

#[test]
fn pulls_reserve_their_blocks_first_and_share_a_link_in_order() {
    let mut engine = Engine::new(spec());
    let mut out = Outbox::default();
    for (id, link) in [(1, 7), (2, 7), (3, 8)] {
        engine.submit(job(id, 160, 1, Kind::Pull(LinkId(link)))).unwrap();
    }
    engine.advance(0, &mut out);
    assert_eq!(engine.load().used_blocks, 30);
    assert_eq!(engine.load().pulling, 3);
    let out = run(&mut engine);
    let busy = 160.0 * 327_680.0 / 40e9 * 1e3;
    let arrival = |id: u64| {
        let of = |output: &Output| match output {
            Output::Pulled { job, at, blocks: 10 } if job.0 == id => Some(*at),
            _ => None,
        };
        out.outputs.iter().find_map(of).unwrap()
    };
    assert_ms(arrival(1), 10.0 + busy);
    assert_ms(arrival(2), 10.0 + 2.0 * busy);
    assert_ms(arrival(3), 10.0 + busy);
    // The pulled prompt's last token is computed here, in one decode step.
    assert_eq!(engine.totals().external_kv_transfer, 480);
    assert_eq!(engine.totals().local_compute, 0);
}

#[test]
fn only_the_blocks_that_are_lacking_are_pulled_and_they_are_announced() {
    let mut engine = Engine::new(spec());
    let of = |id, prompt, kind| Job { content: content(9, 0, 4096), ..job(id, prompt, 4, kind) };
    engine.submit(of(1, 96, Kind::Local)).unwrap();
    run(&mut engine);
    engine.submit(of(2, 200, Kind::Pull(LinkId(1)))).unwrap();
    let out = run(&mut engine);
    assert!(matches!(out.outputs[0], Output::Started { cached_tokens: 96, .. }));
    assert!(matches!(out.outputs[1], Output::Pulled { blocks: 7, .. }), "{:?}", out.outputs);
    assert_eq!(stored(&out.batches[0].events[0]), (6, 6));
}

#[test]
fn an_infinitely_fast_engine_is_done_at_once() {
    let mut engine =
        Engine::new(Spec { profile: Profile::default().faster(f64::INFINITY), ..spec() });
    engine.submit(job(1, 500, 100, Kind::Local)).unwrap();
    engine.submit(job(2, 500, 100, Kind::Pull(LinkId(1)))).unwrap();
    let mut out = Outbox::default();
    engine.advance(5, &mut out);
    assert_eq!(token_times(&out, 1), [5; 100]);
    assert_eq!(token_times(&out, 2), [5; 100]);
    assert_eq!(engine.wakeup(), None);
}

#[test]
fn an_abort_frees_the_blocks_at_any_stage() {
    for (kind, millis) in [(Kind::Local, 1), (Kind::Local, 70), (Kind::Pull(LinkId(1)), 1)] {
        let mut engine = Engine::new(spec());
        let mut out = Outbox::default();
        engine.submit(job(1, 1000, 50, kind)).unwrap();
        engine.advance(0, &mut out);
        engine.advance(millis * 1_000_000, &mut out);
        assert!(engine.load().used_blocks > 0);
        assert!(engine.abort(JobId(1)));
        engine.check().unwrap();
        assert_eq!(engine.load().used_blocks, 0);
        assert!(!engine.abort(JobId(1)));
    }
}

#[test]
fn a_cache_reset_is_refused_in_use_and_told_with_the_next_step() {
    let mut engine = Engine::new(spec());
    let mut out = Outbox::default();
    engine.submit(job(1, 100, 5, Kind::Local)).unwrap();
    engine.advance(0, &mut out);
    assert!(!engine.reset_cache());
    run(&mut engine);
    assert!(engine.reset_cache());
    assert_eq!(engine.load().cached_blocks, 0);
    engine.submit(job(2, 100, 1, Kind::Local)).unwrap();
    let out = run(&mut engine);
    assert_eq!(out.batches[0].events[0], Event::Cleared);
}

#[test]
fn a_lost_cache_is_not_told_and_what_runs_is_not_announced_any_more() {
    let mut engine = Engine::new(spec());
    let mut out = Outbox::default();
    engine.submit(job(1, 40, 60, Kind::Local)).unwrap();
    engine.advance(0, &mut out);
    engine.lose_cache();
    assert!(run(&mut engine).batches.is_empty());
    assert!(engine.cached_chains().is_empty());
}

/// Mean time per output token of a closed loop of `concurrency` requests, in ms; the first ones
/// come one after the other so that the loop is out of step from the start, as in a real run.
fn closed_loop_tpot(
    profile: &str,
    concurrency: u64,
    input: u32,
    output: u32,
    expected: f64,
) -> f64 {
    let profile = Profile::named(profile).unwrap();
    let mut engine = Engine::new(Spec { profile, capacity_blocks: 1 << 20, ..Spec::default() });
    let (mut out, mut first, mut gaps, mut done) = (Outbox::default(), HashMap::new(), 0.0, 0u64);
    let (mut next, mut opened, mut now) = (0, 0, 0);
    let stagger = (f64::from(output) * expected * MS) as u64 / concurrency;
    while done < 4 * concurrency {
        let due = (opened < concurrency).then_some(opened * stagger);
        now = engine.wakeup().into_iter().chain(due).min().unwrap().max(now);
        engine.advance(now, &mut out);
        let mut arrivals = u64::from(due.is_some_and(|due| due <= now));
        opened += arrivals;
        for event in std::mem::take(&mut out.outputs) {
            match event {
                Output::Token { job, at } => {
                    first.entry(job).or_insert(at);
                }
                Output::Finished { job, at, .. } => {
                    arrivals += 1;
                    // The first waves are not in steady state.
                    if job.0 >= 4 * concurrency {
                        gaps += (at - first[&job]) as f64 / f64::from(output - 1);
                        done += 1;
                    }
                }
                _ => {}
            }
        }
        for _ in 0..arrivals {
            engine.submit(job(next, input, output, Kind::Local)).unwrap();
            next += 1;
        }
        engine.advance(now, &mut out);
    }
    gaps / done as f64 / MS
}

/// Measured on real GPUs: profile, input, output, and per concurrency the TPOT in ms.
type Measured = (&'static str, u32, u32, &'static [(u64, f64)]);

/// How far off the model may be.
const WITHIN: f64 = 0.06;

const MEASURED: [Measured; 2] = [
    (
        "llama-3.1-70b-fp8-h100-tp4",
        8192,
        1024,
        &[(4, 13.3), (8, 15.8), (16, 21.1), (32, 32.8), (64, 53.5)],
    ),
    ("qwen3-32b", 4096, 128, &[(8, 26.0), (16, 43.0), (32, 75.0), (64, 140.0)]),
];

#[test]
fn the_model_reproduces_the_time_per_output_token_of_real_gpus() {
    for (profile, input, output, rows) in MEASURED {
        for &(concurrency, measured) in rows {
            let tpot = closed_loop_tpot(profile, concurrency, input, output, measured);
            let off = tpot / measured - 1.0;
            assert!(off.abs() < WITHIN, "{profile} at {concurrency}: {tpot} ms, is {measured}");
        }
    }
}

/// Copies of each block after these events.
fn resident(batches: &[Batch], mut copies: HashMap<u64, u32>) -> HashMap<u64, u32> {
    for event in batches.iter().flat_map(|batch| &batch.events) {
        match event {
            Event::Stored { content, first, count } => {
                for &name in &content.names[*first as usize..(first + count) as usize] {
                    *copies.entry(name).or_default() += 1;
                }
            }
            Event::Removed { name } => {
                let left = copies.get_mut(name).expect("removed but never stored");
                *left -= 1;
                if *left == 0 {
                    copies.remove(name);
                }
            }
            Event::Cleared => copies.clear(),
        }
    }
    copies
}

#[derive(Clone, Debug)]
enum Op {
    Submit { family: u64, prompt: u32, output: u32, kind: u8 },
    Advance { micros: u64 },
    Abort { nth: usize },
    Unpin { nth: usize },
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4u64, 1..200u32, 1..40u32, 0..3u8)
            .prop_map(|(family, prompt, output, kind)| Op::Submit { family, prompt, output, kind }),
        6 => (0..60_000u64).prop_map(|micros| Op::Advance { micros }),
        1 => any::<usize>().prop_map(|nth| Op::Abort { nth }),
        1 => any::<usize>().prop_map(|nth| Op::Unpin { nth }),
        1 => Just(Op::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_block_is_accounted_for_and_events_tell_the_truth(
        ops in prop::collection::vec(op(), 1..80),
        capacity in 16..64u32,
        budget in 8..300u32,
        max_num_seqs in 1..6u32,
        instant in any::<bool>(),
    ) {
        let speed = if instant { f64::INFINITY } else { 1.0 };
        let mut engine = Engine::new(Spec {
            profile: Profile::default().faster(speed),
            capacity_blocks: capacity,
            max_num_batched_tokens: budget,
            max_num_seqs,
            lease: 200_000_000,
            ..Spec::default()
        });
        let mut quiet = Engine::new(Spec { every_token: false, ..*engine.spec() });
        let mut told_by_quiet = Outbox::default();
        let (mut now, mut ids, mut copies) = (0, Vec::new(), HashMap::new());
        let (mut out, mut next) = (Outbox::default(), 0u64);
        for op in ops {
            quiet.cut_run(now);
            match op {
                Op::Submit { family, prompt, output, kind } => {
                    next += 1;
                    let kind = [Kind::Local, Kind::HandOff, Kind::Pull(LinkId(family))][kind as usize];
                    let content = content(family, 3, prompt + output);
                    let job = Job { content, ..job(next, prompt, output, kind) };
                    let taken = quiet.submit(job.clone());
                    prop_assert_eq!(&engine.submit(job), &taken);
                    if taken.is_ok() {
                        ids.push(JobId(next));
                    }
                }
                Op::Advance { micros } => now += micros * 1000,
                Op::Abort { nth } if !ids.is_empty() => {
                    engine.abort(ids[nth % ids.len()]);
                    quiet.abort(ids[nth % ids.len()]);
                }
                Op::Unpin { nth } if !ids.is_empty() => {
                    engine.unpin(ids[nth % ids.len()]);
                    quiet.unpin(ids[nth % ids.len()]);
                }
                Op::Reset => {
                    engine.reset_cache();
                    quiet.reset_cache();
                }
                Op::Abort { .. } | Op::Unpin { .. } => {}
            }
            engine.check().map_err(TestCaseError::fail)?;
            engine.advance(now, &mut out);
            engine.check().map_err(TestCaseError::fail)?;
            quiet.advance(now, &mut told_by_quiet);
            quiet.check().map_err(TestCaseError::fail)?;
            let (mut all, mut some) = (HashMap::new(), HashMap::new());
            engine.progress(now, |job, tokens, _| { all.insert(job, tokens); });
            quiet.progress(now, |job, tokens, _| { some.insert(job, tokens); });
            prop_assert_eq!(all, some);
        }
        while let Some(at) = quiet.wakeup() {
            quiet.advance(at, &mut told_by_quiet);
            quiet.check().map_err(TestCaseError::fail)?;
        }
        while let Some(at) = engine.wakeup() {
            engine.advance(at, &mut out);
            engine.check().map_err(TestCaseError::fail)?;
        }
        // Runs of steps change nothing but which tokens are told.
        prop_assert_eq!(first_tokens(&told_by_quiet), first_tokens(&out));
        prop_assert_eq!(quiet.totals(), engine.totals());
        let load = engine.load();
        prop_assert_eq!((load.running, load.waiting, load.pulling, load.pins), (0, 0, 0, 0));
        prop_assert_eq!(load.used_blocks, 0);
        // One more step flushes what an abort or a reset left to tell.
        engine.submit(job(next + 1, 1, 1, Kind::Local)).unwrap();
        engine.advance(now + 1_000_000_000_000, &mut out);
        copies = resident(&out.batches, copies);
        let told: u32 = copies.values().sum();
        prop_assert_eq!(told, engine.load().cached_blocks);
        for chain in engine.cached_chains() {
            prop_assert!(chain.iter().all(|name| copies.contains_key(name)));
        }
        prop_assert!(out.outputs.is_sorted_by_key(time_of));
    }
}

/// What came out, but for tokens that are not the first of their job.
fn first_tokens(out: &Outbox) -> Vec<Output> {
    let mut begun = std::collections::HashSet::new();
    let is_told = |output: &&Output| match output {
        Output::Token { job, .. } => begun.insert(*job),
        _ => true,
    };
    out.outputs.iter().filter(is_told).cloned().collect()
}

fn time_of(output: &Output) -> Nanos {
    match *output {
        Output::Started { at, .. }
        | Output::Pulled { at, .. }
        | Output::Token { at, .. }
        | Output::Finished { at, .. }
        | Output::Expired { at, .. } => at,
    }
}
