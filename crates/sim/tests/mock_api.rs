//! What the mock's API does with the fields of a request, and when its client leaves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Client, call, chat, complete, get, ids, post, quick, start, until};
use pointsman_sim::mock::{EngineConfig, MockEngine, Role};
use serde_json::{Value, json};

async fn engine() -> MockEngine {
    start(quick(Role::Unified)).await
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn messages(text: &str, more: &Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": user(text)});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_stream_says_what_the_whole_reply_says() {
    let engine = engine().await;
    for more in [json!({}), json!({"n": 3, "seed": 4}), json!({"max_tokens": 5})] {
        let body = messages("tell me", &more);
        let whole = chat(&engine.url(), &body).await.json();
        let mut body = body;
        body["stream"] = json!(true);
        let stream = chat(&engine.url(), &body).await;
        for choice in whole["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            assert_eq!(choice["message"]["content"], stream.said(index));
        }
        assert_eq!(stream.events().last(), Some(&"[DONE]"));
    }
    engine.stop().await;
}

#[tokio::test]
async fn equal_requests_get_equal_answers_from_any_engine_and_other_ones_do_not() {
    let (one, other) = (engine().await, start(quick(Role::Decode)).await);
    let body = json!({"prompt": "once upon", "max_tokens": 9, "n": 2});
    let said = |reply: Value| reply["choices"].clone();
    let first = said(complete(&one.url(), &body).await.json());
    assert_eq!(first, said(complete(&other.url(), &body).await.json()));
    assert_ne!(first[0]["text"], first[1]["text"]);
    let seeded = json!({"prompt": "once upon", "max_tokens": 9, "n": 2, "seed": 1});
    assert_ne!(first, said(complete(&one.url(), &seeded).await.json()));
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn an_answer_tokenises_to_its_own_ids_in_the_next_turn() {
    let engine = engine().await;
    let body =
        messages("start", &json!({"return_token_ids": true, "max_tokens": 40, "ignore_eos": true}));
    let reply = chat(&engine.url(), &body).await.json();
    let ids_of = |value: &Value| -> Vec<u64> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let mut seen = ids_of(&reply["prompt_token_ids"]);
    seen.extend(ids_of(&reply["choices"][0]["token_ids"]));
    let mut turns = user("start").as_array().unwrap().clone();
    turns.push(json!({"role": "assistant", "content": reply["choices"][0]["message"]["content"]}));
    turns.push(json!({"role": "user", "content": "and then"}));
    let next = post(&engine.url(), "/tokenize", &json!({"messages": turns})).await.json();
    assert_eq!(ids_of(&next["tokens"])[..seen.len()], seen);
    let reply = chat(&engine.url(), &json!({"messages": turns, "max_tokens": 1})).await.json();
    // The last generated token has no KV yet; all other whole blocks are found.
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached, (seen.len() as u64 - 1) / 16 * 16);
    engine.stop().await;
}

#[tokio::test]
async fn limits_on_length_are_obeyed() {
    let engine = engine().await;
    let finish = |reply: &Value| {
        let tokens = reply["usage"]["completion_tokens"].as_u64().unwrap();
        (tokens, reply["choices"][0]["finish_reason"].as_str().unwrap().to_owned())
    };
    let natural = finish(&chat(&engine.url(), &messages("x", &json!({}))).await.json());
    assert_eq!(natural.1, "stop");
    assert!((16..96).contains(&natural.0));
    for (more, wanted) in [
        (json!({"max_tokens": 3}), (3, "length")),
        (json!({"max_tokens": 9, "max_completion_tokens": 4}), (4, "length")),
        (json!({"max_tokens": 200, "ignore_eos": true}), (200, "length")),
        (json!({"max_tokens": 1000, "min_tokens": 300}), (301, "stop")),
    ] {
        let reply = chat(&engine.url(), &messages("x", &more)).await.json();
        assert_eq!(finish(&reply), (wanted.0, wanted.1.to_owned()), "{more}");
    }
    let reply = complete(&engine.url(), &json!({"prompt": "x"})).await.json();
    assert_eq!(finish(&reply), (16, "length".to_owned()));
    engine.stop().await;
}

#[tokio::test]
async fn stop_strings_and_stop_tokens_end_an_answer() {
    let engine = engine().await;
    let body = json!({"prompt": "x", "max_tokens": 12, "return_token_ids": true});
    let whole = complete(&engine.url(), &body).await.json();
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    let words: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
    let third = words[3];
    let mut stopped = body.clone();
    stopped["stop"] = json!([third]);
    let reply = complete(&engine.url(), &stopped).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["text"].as_str().unwrap(), &text[..text.find(third).unwrap()]);
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(third)));
    stopped["stream"] = json!(true);
    assert_eq!(complete(&engine.url(), &stopped).await.said(0), choice["text"].as_str().unwrap());
    stopped["stream"] = json!(false);
    stopped["include_stop_str_in_output"] = json!(true);
    let reply = complete(&engine.url(), &stopped).await.json();
    assert!(reply["choices"][0]["text"].as_str().unwrap().ends_with(third));
    let id = whole["choices"][0]["token_ids"][2].clone();
    let reply =
        complete(&engine.url(), &json!({"prompt": "x", "stop_token_ids": [id]})).await.json();
    assert_eq!(reply["choices"][0]["stop_reason"], id);
    assert!(reply["usage"]["completion_tokens"].as_u64().unwrap() <= 3);
    engine.stop().await;
}

const WEATHER: &str = r#"{"type":"function","function":{"name":"get_weather","parameters":{
    "type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}}}}"#;

#[tokio::test]
async fn tools_are_called_when_asked_for() {
    let engine = engine().await;
    let tool: Value = serde_json::from_str(WEATHER).unwrap();
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for (text, choice, finish) in [
        ("hello", json!("required"), "tool_calls"),
        ("hello", named, "stop"),
        ("please use get_weather", json!("auto"), "tool_calls"),
    ] {
        let body = messages(text, &json!({"tools": [tool], "tool_choice": choice}));
        let reply = chat(&engine.url(), &body).await.json();
        let message = &reply["choices"][0]["message"];
        assert_eq!(reply["choices"][0]["finish_reason"], finish);
        assert_eq!(message["content"], Value::Null);
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["name"], "get_weather");
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let parsed: Value = serde_json::from_str(arguments).unwrap();
        assert!(parsed["city"].is_string() && parsed["days"].is_u64());
        let mut streamed = body;
        streamed["stream"] = json!(true);
        let chunks = chat(&engine.url(), &streamed).await.chunks();
        let calls: Vec<&Value> =
            chunks.iter().map(|c| &c["choices"][0]["delta"]["tool_calls"][0]).collect();
        let pieces: String =
            calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
        assert_eq!(pieces, arguments);
        assert_eq!(calls[1]["id"], call["id"]);
        assert_eq!(calls[2]["id"], Value::Null);
    }
    for choice in ["none", "auto"] {
        let body = messages("hello", &json!({"tools": [tool], "tool_choice": choice}));
        let reply = chat(&engine.url(), &body).await.json();
        assert!(reply["choices"][0]["message"]["content"].is_string());
    }
    engine.stop().await;
}

#[tokio::test]
async fn usage_in_a_stream_comes_when_asked_for() {
    let engine = engine().await;
    let with = |options: Value| {
        json!({
            "prompt": "x", "max_tokens": 3, "stream": true, "stream_options": options,
        })
    };
    let none =
        complete(&engine.url(), &json!({"prompt": "x", "max_tokens": 3, "stream": true})).await;
    assert!(none.chunks().iter().all(|chunk| chunk["usage"].is_null()));
    let last = complete(&engine.url(), &with(json!({"include_usage": true}))).await.chunks();
    assert!(last[..3].iter().all(|chunk| chunk["usage"].is_null()));
    assert_eq!((last.len(), &last[3]["usage"]["completion_tokens"]), (4, &json!(3)));
    assert_eq!(last[3]["choices"], json!([]));
    let all = json!({"include_usage": true, "continuous_usage_stats": true});
    let all = complete(&engine.url(), &with(all)).await.chunks();
    let counts: Vec<u64> =
        all.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [1, 2, 3, 3]);
    engine.stop().await;
}

#[tokio::test]
async fn echo_batches_and_ids_are_answered() {
    let engine = engine().await;
    let echoed =
        complete(&engine.url(), &json!({"prompt": "hello", "echo": true, "max_tokens": 2})).await;
    assert!(echoed.json()["choices"][0]["text"].as_str().unwrap().starts_with("hello "));
    let batch = json!({"prompt": [ids(0, 20), ids(5, 30)], "n": 2, "max_tokens": 2});
    let reply = complete(&engine.url(), &batch).await.json();
    let indexes: Vec<u64> =
        reply["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    let usage = (&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]);
    assert_eq!(usage, (&json!(50), &json!(8)));
    engine.stop().await;
}

#[tokio::test]
async fn adapters_are_models_with_caches_of_their_own() {
    let config = EngineConfig { adapters: vec!["sql".to_owned()], ..quick(Role::Unified) };
    let engine = start(config).await;
    let ask = |model: &str| json!({"model": model, "prompt": ids(0, 40), "max_tokens": 1});
    let mut cached = Vec::new();
    for model in ["tiny", "sql", "sql"] {
        let reply = complete(&engine.url(), &ask(model)).await.json();
        assert_eq!(reply["model"], model);
        let details = &reply["usage"]["prompt_tokens_details"];
        cached.push(details["cached_tokens"].as_u64().unwrap());
    }
    assert_eq!(cached, [0, 0, 32]);
    let models = get(&engine.url(), "/v1/models").await;
    let models = pointsman_wire::discovery::models(&models.body).unwrap();
    let names: Vec<_> = models.iter().map(|m| (m.id.as_str(), m.parent.as_deref())).collect();
    assert_eq!(names, [("tiny", None), ("sql", Some("tiny"))]);
    assert_eq!(models[0].max_model_len, Some(8192));
    assert_eq!(complete(&engine.url(), &ask("other")).await.status, 404);
    engine.stop().await;
}

#[tokio::test]
async fn embeddings_depend_on_their_input_alone() {
    let engine = engine().await;
    let body = json!({"model": "tiny", "input": ["one", "two", "one"]});
    let reply = post(&engine.url(), "/v1/embeddings", &body).await.json();
    let data = &reply["data"];
    assert_eq!(data[0]["embedding"], data[2]["embedding"]);
    assert_ne!(data[0]["embedding"], data[1]["embedding"]);
    assert_eq!(post(&engine.url(), "/v1/embeddings", &json!({"input": [1, 2]})).await.status, 200);
    assert_eq!(post(&engine.url(), "/v1/embeddings", &json!({})).await.status, 400);
    engine.stop().await;
}

#[tokio::test]
async fn text_and_tokens_turn_into_each_other() {
    let engine = engine().await;
    let body = json!({"prompt": "hello world", "add_special_tokens": false});
    let tokens = post(&engine.url(), "/tokenize", &body).await.json()["tokens"].clone();
    let text = post(&engine.url(), "/detokenize", &json!({"tokens": tokens})).await.json();
    assert_eq!(text["prompt"], "hello world");
    engine.stop().await;
}

#[tokio::test]
async fn metrics_tell_the_load_and_where_prompts_came_from() {
    let config = EngineConfig { speed: 0.01, ..quick(Role::Unified) };
    let engine = start(config).await;
    let mut client = Client::connect(&engine.url()).await.unwrap();
    let body = json!({"prompt": ids(0, 160), "stream": true}).to_string();
    client.send("POST", "/v1/completions", &[], &body).await;
    until(&engine, |stats| stats["running"] == 1).await;
    let page = get(&engine.url(), "/metrics").await;
    let load = pointsman_wire::load::read_vllm(page.text(), 0);
    assert_eq!((load.running, load.waiting), (Some(1.0), Some(0.0)));
    assert_eq!((load.kv_usage, load.num_gpu_blocks), (Some(0.01), Some(1000)));
    assert_eq!((load.block_size, load.prompt_local_compute), (Some(16), Some(160.0)));
    engine.stop().await;
}

#[tokio::test]
async fn metrics_tell_how_long_steps_and_prompts_took_by_the_engines_own_clock() {
    let engine = start(EngineConfig { speed: 10.0, ..quick(Role::Unified) }).await;
    let body = json!({"prompt": ids(0, 160), "max_tokens": 20, "ignore_eos": true});
    post(&engine.url(), "/v1/completions", &body).await;
    let page = get(&engine.url(), "/metrics").await;
    let load = pointsman_wire::load::read_vllm(page.text(), 0);
    assert_eq!(
        (load.prefill_tokens, load.steps, load.decode_tokens),
        (Some(160.0), Some(20.0), Some(19.0))
    );
    // What the profile says of one prompt, and of 19 steps of one sequence of some 170 tokens.
    let by = EngineConfig::default().profile;
    let prompt = (by.k0 + by.a1 * 160.0 + by.a2 * 160.0 * 80.0) / 10.0;
    let steps = 19.0 * (by.c0 + by.c1 + by.c2 * 170.0) / 10.0;
    for (told, expected) in [(load.prefill_seconds, prompt), (load.decode_seconds, steps)] {
        let told = told.unwrap();
        assert!((told / expected - 1.0).abs() < 0.01, "{told} and not {expected}");
    }
    engine.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_before_any_header_frees_its_blocks() {
    for stream in [false, true] {
        let engine = start(EngineConfig { speed: 0.001, ..quick(Role::Unified) }).await;
        let mut client = Client::connect(&engine.url()).await.unwrap();
        let body = json!({"prompt": ids(0, 160), "stream": stream}).to_string();
        client.send("POST", "/v1/completions", &[], &body).await;
        until(&engine, |stats| stats["used_blocks"] == 10).await;
        drop(client);
        let stats =
            until(&engine, |stats| stats["used_blocks"] == 0 && stats["in_flight"] == 0).await;
        assert_eq!(stats["aborted"], 1);
        assert_eq!(stats["broken_invariants"], json!([]));
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_a_stream_frees_its_blocks() {
    let engine = start(EngineConfig { speed: 2.0, ..quick(Role::Unified) }).await;
    let mut client = Client::connect(&engine.url()).await.unwrap();
    let body = json!({"prompt": "x", "stream": true, "max_tokens": 4000, "ignore_eos": true});
    client.send("POST", "/v1/completions", &[], &body.to_string()).await;
    client.head().await;
    client.chunk().await.unwrap();
    drop(client);
    let stats = until(&engine, |stats| stats["used_blocks"] == 0 && stats["in_flight"] == 0).await;
    assert_eq!((&stats["aborted"], &stats["finished"]), (&json!(1), &json!(0)));
    engine.stop().await;
}

#[tokio::test]
async fn steps_take_the_time_of_the_profile_divided_by_the_speed() {
    let engine = start(EngineConfig { speed: 10.0, ..quick(Role::Unified) }).await;
    let before = std::time::Instant::now();
    let body = json!({"prompt": ids(0, 100), "max_tokens": 50, "ignore_eos": true});
    complete(&engine.url(), &body).await;
    // 12.5 ms of prefill and 49 steps of 10.4 ms.
    let expected = std::time::Duration::from_micros((12_450 + 49 * 10_440) / 10);
    assert!(before.elapsed() >= expected, "{:?}", before.elapsed());
    engine.stop().await;
}

#[tokio::test]
async fn the_last_requests_are_kept_as_they_came() {
    let engine = start(EngineConfig { keep_requests: 2, ..quick(Role::Unified) }).await;
    let body = "{\"prompt\":\"x\",  \"temperature\":1.50,\"max_tokens\":1}";
    for path in ["/v1/embeddings", "/v1/completions", "/v1/completions"] {
        call(&engine.url(), "POST", path, &[("X-Mark", "7")], body).await;
    }
    let requests = get(&engine.url(), "/mock/stats").await.json()["requests"].clone();
    assert_eq!(requests.as_array().unwrap().len(), 2);
    assert_eq!(requests[1]["body"], body);
    assert_eq!(
        (&requests[1]["headers"]["x-mark"], &requests[1]["leg"]),
        (&json!("7"), &json!("local"))
    );
    engine.stop().await;
}

#[tokio::test]
async fn settings_that_make_no_sense_are_named() {
    for (config, key) in [
        (EngineConfig { speed: f64::NAN, ..quick(Role::Unified) }, "speed"),
        (EngineConfig { ranks: 0, ..quick(Role::Unified) }, "ranks"),
        (EngineConfig { block_size: 0, ..quick(Role::Unified) }, "block_size"),
    ] {
        let Err(error) = MockEngine::start(config).await else { panic!("{key}") };
        assert!(error.to_string().contains(key), "{error}");
    }
}
