use pointsman_brain::*;
use pointsman_sim::engine::{Content, Spec};
use pointsman_sim::fleet::*;
use pointsman_sim::profile::Profile;
use pointsman_sim::trace;
use std::sync::Arc;
use std::time::Duration;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let file = match args[1].as_str() {
        "conv" => "mooncake_conversation_trace.jsonl",
        "code" => "azure2023_code.csv",
        _ => "agentic_code_synth_200s_seed7.jsonl",
    };
    let tr = trace::open(std::path::Path::new(&format!("/work/shared/traces/{file}"))).unwrap();
    let policy = args[2].as_str();
    let rate: f64 = args[3].parse().unwrap();
    let limit: usize = args.get(4).and_then(|s| s.parse().ok()).unwrap_or(usize::MAX);
    let off: f64 = std::env::var("OFF").ok().and_then(|s| s.parse().ok()).unwrap_or(1.0);
    let block: u32 = 512;
    let spec = |chunk| Spec {
        block_size: block,
        capacity_blocks: 640_000 / block,
        max_num_batched_tokens: chunk,
        noise: 0.05,
        ..Spec::default()
    };
    let load = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    let rule = match policy {
        "predicted" => Rule::Predicted,
        "remote" => Rule::AlwaysRemote,
        "local" => Rule::AlwaysLocal,
        "isl" => Rule::IslBounding(IslBounding::default()),
        "isl_or_load" => Rule::IslOrLoad(IslBounding::default(), load),
        _ => panic!(),
    };
    let mut settings =
        Settings { policy: Policy { rule, bounds: Bounds::default() }, ..Settings::default() };
    if std::env::var("NOBUDGET").is_ok() {
        settings.guards.local_prefill_budget = Budget::Off;
    }
    if std::env::var("NOKV").is_ok() {
        settings.guards.decode_kv = KvGuard::Off;
    }
    settings.profile = settings.profile.faster(off);
    settings.slo = Slo { ttft: None, itl: Some(Duration::from_millis(50)) };
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let workers = roles
        .iter()
        .enumerate()
        .map(|(i, &role)| WorkerPlan {
            role,
            local_prefill: true,
            engine: Spec {
                seed: i as u64 + 1,
                ..spec(if role == Role::Prefill { 8192 } else { 2048 })
            },
        })
        .collect();
    let mut fleet = Fleet::new(FleetPlan {
        workers,
        settings,
        event_lag: 0,
        event_loss: 0.0,
        reading_every: 5_000_000_000,
        seed: 1,
    });
    let profile = Profile::default();
    let n = tr.requests.len().min(limit);
    let mut when: Vec<Option<u64>> = vec![None; n];
    let mut heap = std::collections::BinaryHeap::new();
    use std::cmp::Reverse;
    let mut children: Vec<Vec<(usize, u64)>> = vec![vec![]; n];
    let at = |i: usize| match tr.requests[i].start {
        trace::Start::At(t) => t,
        _ => 0,
    };
    for i in 0..n {
        match tr.requests[i].start {
            trace::Start::At(t) => {
                let t = if args[1] == "conv" {
                    let lo = (0..i).rev().take_while(|&k| at(k) == t).count();
                    let hi = (i..tr.requests.len()).take_while(|&k| at(k) == t).count();
                    t + 3_000_000_000 * lo as u64 / (lo + hi) as u64
                } else {
                    t
                };
                when[i] = Some(t);
                heap.push(Reverse(((t as f64 / rate) as u64, i)));
            }
            trace::Start::After { request, delay } => {
                if request < n {
                    children[request].push((i, (delay as f64 / rate) as u64));
                }
            }
        }
    }
    let mut done = vec![];
    let begun = std::time::Instant::now();
    let mut slo = vec![0.0; n];
    loop {
        let next = heap.peek().map(|Reverse((t, _))| *t);
        let wake = fleet.wakeup();
        match (next, wake) {
            (None, None) => break,
            (Some(t), w) if w.is_none_or(|w| t <= w) => {
                let Reverse((t, i)) = heap.pop().unwrap();
                fleet.advance(t);
                let r = &tr.requests[i];
                let mut pieces = tr.prompt(i);
                pieces
                    .push(trace::Piece { hash_id: (1 << 50) + i as u64, tokens: r.output_tokens });
                let names = trace::block_names(&pieces, block);
                let p = r.input_tokens as f64;
                let un =
                    profile.k0 * (p / 8192.0).ceil() + profile.a1 * p + profile.a2 * p * p / 2.0;
                slo[i] = 0.5 + 2.0 * un;
                fleet.submit(FleetRequest {
                    id: RequestId(i as u64),
                    prompt_tokens: r.input_tokens.max(1),
                    output_tokens: r.output_tokens.max(1),
                    content: Arc::new(Content { names, ..Content::default() }),
                    session: r.session.map(u64::from),
                    slo: Slo { ttft: Some(Duration::from_secs_f64(slo[i])), itl: None },
                });
            }
            _ => {
                fleet.turn();
            }
        }
        for o in fleet.take_outcomes() {
            for &(c, d) in &children[o.id.0 as usize] {
                heap.push(Reverse((fleet.now() + d, c)));
            }
            done.push(o);
        }
    }
    let (mut good, mut local, mut ttfts, mut itls, mut errs, mut miss_t, mut miss_i) =
        (0, 0, vec![], vec![], vec![], 0, 0);
    let mut errl = vec![];
    let mut errr = vec![];
    for o in &done {
        let Some(f) = o.first_token else { continue };
        let ttft = (f - o.arrived) as f64 / 1e9;
        let itl =
            if o.tokens > 1 { (o.ended - f) as f64 / 1e9 / (o.tokens - 1) as f64 } else { 0.0 };
        let (a, b) = (ttft <= slo[o.id.0 as usize], itl <= 0.050);
        if a && b {
            good += 1
        }
        if !a {
            miss_t += 1
        }
        if !b {
            miss_i += 1
        }
        let d = o.decision.unwrap();
        if d.path == Path::Local {
            local += 1
        }
        ttfts.push(ttft);
        itls.push(itl);
        let e = d.ttft_seconds / ttft - 1.0;
        errs.push(e.abs());
        if d.path == Path::Local { errl.push(e) } else { errr.push(e) }
    }
    let q = |v: &mut Vec<f64>, p: f64| {
        v.sort_by(f64::total_cmp);
        if v.is_empty() { 0.0 } else { v[((v.len() - 1) as f64 * p) as usize] }
    };
    println!(
        "{policy} rate {rate}: goodput {:.4} local {:.3} missT {miss_t} missI {miss_i} ttft p50 {:.3} p95 {:.3} itl p50 {:.4} p95 {:.4} err med {:.3} p90 {:.3} | signed local {:.3} remote {:.3}; {} of {n} in {:?}",
        good as f64 / done.len() as f64,
        local as f64 / done.len() as f64,
        q(&mut ttfts, 0.5),
        q(&mut ttfts, 0.95),
        q(&mut itls, 0.5),
        q(&mut itls, 0.95),
        q(&mut errs, 0.5),
        q(&mut errs, 0.9),
        q(&mut errl, 0.5),
        q(&mut errr, 0.5),
        done.len(),
        begun.elapsed()
    );
    if std::env::var("CAL").is_ok() {
        let c = fleet.brain().calibration(Time(fleet.now()));
        for k in &c.constants {
            println!(
                "{:?} {} {:.3e} +- {:.1e} prior {:.3e} x{:.2} n {}",
                k.pool,
                k.name,
                k.value,
                k.deviation,
                k.prior,
                k.value / k.prior,
                k.samples
            );
        }
        for w in &c.workers {
            println!(
                "{} bias {:.3}/{} {:.3}/{} err {:?}",
                w.slot,
                w.prefill_bias,
                w.prefill_samples,
                w.decode_bias,
                w.decode_samples,
                w.ttft_errors.map(|e| (e.relative_error, e.samples))
            );
        }
        println!("osl {}", c.expected_osl_tokens);
    }
}
