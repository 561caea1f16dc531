//! Reads the captures.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use serde_json::Value;

pub(crate) fn text(path: &str) -> String {
    let whole = format!("{}/tests/fixtures/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&whole).unwrap_or_else(|error| panic!("{whole}: {error}"))
}

pub(crate) fn json(path: &str) -> Value {
    serde_json::from_str(&text(path)).unwrap()
}

pub(crate) fn hex(value: &Value) -> Vec<u8> {
    let digits = value.as_str().unwrap().as_bytes();
    let digit = |byte: u8| u8::try_from(char::from(byte).to_digit(16).unwrap()).unwrap();
    digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Status and raw body of an exchange.
pub(crate) fn response(exchange: &Value) -> (u16, String) {
    let response = exchange.get("response").unwrap_or(exchange);
    let status = response["status"].as_u64().unwrap().try_into().unwrap();
    (status, response["body_raw"].as_str().unwrap().to_owned())
}
