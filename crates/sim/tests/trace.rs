//! Traces: formats are told apart, what does not fit is named, and prompts repeat where they should.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::Path;

use pointsman_sim::trace::{
    Format, Piece, Start, Trace, TraceError, block_names, open, read, tokens,
};
use proptest::prelude::*;

fn fixture(name: &str) -> Trace {
    open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces").join(name)).unwrap()
}

fn error(text: &str) -> String {
    read(text.as_bytes()).unwrap_err().to_string()
}

fn starts(trace: &Trace) -> Vec<u64> {
    let at = |request: &pointsman_sim::trace::Request| match request.start {
        Start::At(at) => at,
        Start::After { .. } => panic!("a turn"),
    };
    trace.requests.iter().map(at).collect()
}

#[test]
fn a_mooncake_trace_is_read_and_its_buckets_are_spread() {
    let trace = fixture("mooncake_first40.jsonl");
    assert_eq!((trace.format, trace.requests.len()), (Format::Mooncake, 40));
    let first = &trace.requests[0];
    assert_eq!((first.input_tokens, first.output_tokens, first.pieces.len()), (6758, 500, 14));
    assert_eq!(first.pieces[13].tokens, 6758 - 13 * 512);
    // Ten requests came at 0 ms, sixteen at 3000 ms.
    let starts = starts(&trace);
    assert_eq!(starts[..3], [0, 300_000_000, 600_000_000]);
    assert_eq!(starts[10], 3_000_000_000);
    assert_eq!(starts[11] - starts[10], 2_999_000_000 / 16);
    assert!(starts.is_sorted());
}

#[test]
fn an_azure_trace_is_read_and_nothing_in_it_repeats() {
    let trace = fixture("azure_first11.csv");
    assert_eq!((trace.format, trace.requests.len()), (Format::Azure, 11));
    let first = &trace.requests[0];
    assert_eq!((first.input_tokens, first.output_tokens), (4808, 10));
    assert_eq!(starts(&trace)[..3], [0, 52_000_000, 98_189_000]);
    let mut seen = HashMap::new();
    for piece in trace.requests.iter().flat_map(|request| request.pieces.iter()) {
        assert!(seen.insert(piece.hash_id, ()).is_none());
    }
}

#[test]
fn turns_of_a_session_follow_each_other_and_their_prompts_grow() {
    let trace = fixture("session_first3x3.jsonl");
    assert_eq!((trace.format, trace.requests.len()), (Format::Session, 9));
    let sessions: Vec<_> = trace.requests.iter().map(|r| r.session.unwrap()).collect();
    assert_eq!(sessions, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    assert_eq!(trace.requests[0].start, Start::At(0));
    assert_eq!(trace.requests[1].start, Start::After { request: 0, delay: 4_146_400_000 });
    assert_eq!(trace.requests[1].input_tokens, 55_663 + 880);
    for at in [1, 2, 4, 5, 7, 8] {
        let (before, now) = (trace.prompt(at - 1), trace.prompt(at));
        assert_eq!(now[..before.len()], before[..]);
        let length: u32 = now.iter().map(|piece| piece.tokens).sum();
        assert_eq!(length, trace.requests[at].input_tokens);
    }
}

#[test]
fn dates_across_months_and_leap_days_are_in_order() {
    let days = ["2023-12-31", "2024-01-01", "2024-02-28", "2024-02-29", "2024-03-01"];
    let rows: String = days.iter().map(|day| format!("{day} 00:00:00,10,1\n")).collect();
    let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}");
    let trace = read(text.as_bytes()).unwrap();
    let days: Vec<u64> = starts(&trace).iter().map(|at| at / 86_400_000_000_000).collect();
    assert_eq!(days, [0, 1, 59, 60, 61]);
}

#[test]
fn what_does_not_fit_is_named_with_its_line() {
    assert!(matches!(read(&b"hello\n"[..]), Err(TraceError::Unknown)));
    assert!(matches!(read(&b"\n\n"[..]), Err(TraceError::Empty)));
    let good = r#"{"timestamp": 5, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#;
    let line = |bad: &str| error(&format!("{good}\n\n{bad}\n"));
    assert_eq!(line(&good.replace("[1]", "[1,2]")), "line 3: 2 hash ids for 5 tokens");
    assert_eq!(
        line(&good.replace("\": 5, \"input", "\": 4, \"input")),
        "line 3: timestamps go backwards"
    );
    assert_eq!(line(&good.replace("\"timestamp\": 5, ", "")), "line 3: `timestamp` is missing");
    assert_eq!(
        line(&good.replace("[1]", "[]").replace("length\": 5,", "length\": 0,")),
        "line 3: a prompt of 0 tokens"
    );
    assert!(line("{").starts_with("line 3: EOF"));
    assert!(
        error("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-01 00:00:00,1,1")
            .starts_with("line 2: `TIMESTAMP`")
    );
    assert!(
        error("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-01 00:00:00,x,1")
            .starts_with("line 2: `ContextTokens`")
    );
    let turn =
        r#"{"session_id":"a","input_length":5,"output_length":5,"hash_ids":[1],"timestamp":0}"#;
    assert_eq!(error(&format!("{turn}\n{turn}")), "line 2: `delay` is missing");
}

#[test]
fn prompts_of_a_trace_share_as_many_tokens_as_hash_ids() {
    let trace = fixture("mooncake_first40.jsonl");
    let vocabulary: Vec<u32> = (100..1100).collect();
    let prompts: Vec<Vec<u32>> = (0..40).map(|at| tokens(&trace.prompt(at), &vocabulary)).collect();
    for (request, prompt) in trace.requests.iter().zip(&prompts) {
        assert_eq!(prompt.len(), request.input_tokens as usize);
    }
    let common = prompts[0].iter().zip(&prompts[1]).take_while(|(a, b)| a == b).count();
    assert_eq!(common, 512, "both begin with the same hash id, then differ");
}

fn piece() -> impl Strategy<Value = Piece> {
    (0..6u64, 1..40u32).prop_map(|(hash_id, tokens)| Piece { hash_id, tokens })
}

proptest! {
    #[test]
    fn block_names_are_equal_exactly_where_tokens_are(
        shared in prop::collection::vec(piece(), 0..6),
        one in prop::collection::vec(piece(), 0..4),
        other in prop::collection::vec(piece(), 0..4),
        block_size in 1..20u32,
    ) {
        let vocabulary: Vec<u32> = (0..50_000).collect();
        let of = |rest: &[Piece]| {
            let pieces: Vec<Piece> = shared.iter().chain(rest).copied().collect();
            (block_names(&pieces, block_size), tokens(&pieces, &vocabulary), pieces)
        };
        let ((a, a_tokens, a_pieces), (b, b_tokens, b_pieces)) = (of(&one), of(&other));
        prop_assert_eq!(a.len(), a_tokens.len() / block_size as usize);
        let same_pieces =
            a_pieces.iter().zip(&b_pieces).take_while(|(a, b)| a == b).map(|(p, _)| p.tokens).sum::<u32>();
        for at in 0..a.len().min(b.len()) {
            let end = (at + 1) * block_size as usize;
            if a[at] == b[at] {
                prop_assert_eq!(&a_tokens[..end], &b_tokens[..end]);
            } else {
                prop_assert!(end as u32 > same_pieces, "equal pieces, other names");
            }
        }
    }
}
