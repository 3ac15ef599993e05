//! Fields of generation_config.json: numbers, and the errors for values that are none.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Returns the error for a value of a config that is none of those expected.
pub(super) fn wrong(key: &str, expected: &str, found: &Value) -> Error {
    let mut shown: String = found.to_string().chars().take(60).collect();
    if shown.is_empty() {
        shown.push_str("nothing");
    }
    Error::invalid_file(format!("{key} must be {expected}, found {shown}"))
}

/// Returns a number of a config; `None` where it is silent.
pub(super) fn float(
    json: &Map<String, Value>,
    key: &str,
    valid: impl Fn(f32) -> bool,
    expected: &str,
) -> Result<Option<f32>> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64().map(|v| v as f32) {
            Some(v) if v.is_finite() && valid(v) => Ok(Some(v)),
            _ => Err(wrong(key, expected, value)),
        },
    }
}

/// Returns a count of a config; `None` where it is silent.
pub(super) fn count(json: &Map<String, Value>, key: &str) -> Result<Option<u32>> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            // u32::MAX stands for "not set" at the C interface; such a count is no limit anyway.
            Some(v) => Ok(Some(u32::try_from(v).unwrap_or(u32::MAX).min(u32::MAX - 1))),
            None => Err(wrong(key, "a whole number, at least 0", value)),
        },
    }
}
