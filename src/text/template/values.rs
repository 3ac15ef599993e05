//! Conversion of values to text, the way Python writes them, and from JSON.

use super::budget::{fail, Budget, Text, MAX_VALUE_DEPTH};
use minijinja::value::{Value, ValueKind};
use minijinja::Error;
use std::fmt::Write as _;

/// Converts the caller's JSON, which was already checked in size and depth. Returns nothing if it is nested
/// more than `max_depth` deep.
pub(super) fn from_json(json: &serde_json::Value, max_depth: usize) -> Option<Value> {
    Some(match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => {
            let max_depth = max_depth.checked_sub(1)?;
            let items = items.iter().map(|item| from_json(item, max_depth));
            Value::from(items.collect::<Option<Vec<_>>>()?)
        }
        serde_json::Value::Object(map) => {
            let max_depth = max_depth.checked_sub(1)?;
            let pairs = map
                .iter()
                .map(|(key, item)| Some((Value::from(key.as_str()), from_json(item, max_depth)?)));
            Value::from_pairs(pairs.collect::<Option<Vec<_>>>()?)
        }
    })
}

/// Returns the value as Python's `str()` gives it; undefined becomes the empty string.
pub(super) fn to_text(budget: &Budget, value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    write_text(budget, &mut text, value)?;
    Ok(text.into_string())
}

/// Appends the value as Python's `str()` gives it.
pub(super) fn write_text(budget: &Budget, text: &mut Text, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(string) => {
            budget.bytes(string.len())?;
            text.push(string)
        }
        None if value.is_undefined() => Ok(()),
        None => write_repr(budget, text, value, 0),
    }
}

/// Returns the value as Python's `repr()` gives it.
pub(super) fn to_repr(budget: &Budget, value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    write_repr(budget, &mut text, value, 0)?;
    Ok(text.into_string())
}

/// Appends the value as Python's `repr()` gives it.
fn write_repr(budget: &Budget, text: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_VALUE_DEPTH {
        return Err(fail(format!("a value is nested more than {MAX_VALUE_DEPTH} deep")));
    }
    budget.work(40)?;
    match value.kind() {
        ValueKind::Undefined => text.push("Undefined"),
        ValueKind::None => text.push("None"),
        ValueKind::Bool => text.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => text.push(&number(value)),
        ValueKind::String => write_string_repr(budget, text, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ("(", ")") } else { ("[", "]") };
            text.push(open)?;
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    text.push(", ")?;
                }
                write_repr(budget, text, &item, depth + 1)?;
                count += 1;
            }
            if count == 1 && value.is_tuple() {
                text.push(",")?;
            }
            text.push(close)
        }
        ValueKind::Map => {
            text.push("{")?;
            let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
            for (index, (key, item)) in pairs.into_iter().flatten().enumerate() {
                if index > 0 {
                    text.push(", ")?;
                }
                write_repr(budget, text, &key, depth + 1)?;
                text.push(": ")?;
                write_repr(budget, text, &item, depth + 1)?;
            }
            text.push("}")
        }
        _ => text.push("<object>"),
    }
}

fn write_string_repr(budget: &Budget, text: &mut Text, string: &str) -> Result<(), Error> {
    budget.bytes(string.len().saturating_mul(10))?;
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push_char(quote)?;
    for character in string.chars() {
        match character {
            '\\' => text.push("\\\\")?,
            '\n' => text.push("\\n")?,
            '\r' => text.push("\\r")?,
            '\t' => text.push("\\t")?,
            c if c == quote => {
                text.push("\\")?;
                text.push_char(c)?;
            }
            c if c.is_control() => {
                let mut escape = String::new();
                let _ = write!(escape, "\\x{:02x}", u32::from(c));
                text.push(&escape)?;
            }
            c => text.push_char(c)?,
        }
    }
    text.push_char(quote)
}

/// Returns a number as Python writes it, in text and in JSON alike.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

/// Returns the shortest digits that read back as the same number, in Python's layout: positional
/// from 1e-4 to 1e16, otherwise with an exponent of at least two digits.
pub(super) fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let size = float.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let scientific = format!("{float:e}");
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let mut digits = float.to_string();
    if !digits.contains('.') {
        digits.push_str(".0");
    }
    digits
}
