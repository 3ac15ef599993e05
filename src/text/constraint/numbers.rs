//! Whether the numbers of a schema are kept to the letter: the crate reads bounds and constants as f64, and
//! those of integers as i64 from there.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::schema::{escaped, BY_NAME, DATA};
use crate::error::{Error, Result};

/// The value of 2^63, the first number that is no i64.
const END_OF_I64: f64 = 9_223_372_036_854_775_808.0;
/// Digits that any f64 keeps.
const KEPT_DIGITS: usize = 15;

const MINIMA: [&str; 2] = ["minimum", "exclusiveMinimum"];
const MAXIMA: [&str; 2] = ["maximum", "exclusiveMaximum"];

/// Refuses a schema with a bound or a constant that would not be kept to the letter. `text`: the schema as JSON.
pub(super) fn check(text: &str) -> Result<()> {
    if !may_be_inexact(text) {
        return Ok(());
    }
    // Nothing else fails here: the text is JSON.
    match serde_json::from_str(text) {
        Ok(schema) => check_schema(schema, &mut String::from("#")),
        Err(_) => Ok(()),
    }
}

/// Whether a text has something that looks like a number of more than [`KEPT_DIGITS`] digits or with an exponent.
fn may_be_inexact(text: &str) -> bool {
    let mut digits = 0;
    text.bytes().any(|byte| {
        match byte {
            b'0'..=b'9' => digits += 1,
            b'.' => {}
            b'e' | b'E' if digits > 0 => return true,
            _ => digits = 0,
        }
        digits > KEPT_DIGITS
    })
}

type Members<'a> = BTreeMap<String, &'a RawValue>;

fn check_schema(schema: &RawValue, path: &mut String) -> Result<()> {
    if let Ok(list) = serde_json::from_str::<Vec<&RawValue>>(schema.get()) {
        return list.iter().enumerate().try_for_each(|(place, schema)| {
            at(path, &place.to_string(), |path| check_schema(schema, path))
        });
    }
    let Ok(members) = serde_json::from_str::<Members<'_>>(schema.get()) else { return Ok(()) };
    let is_integer = members.get("type").is_some_and(|it| it.get() == "\"integer\"");
    for (key, value) in members {
        at(path, &key, |path| {
            if key == "const" || key == "enum" {
                check_constant(value, path)
            } else if MINIMA.contains(&key.as_str()) || MAXIMA.contains(&key.as_str()) {
                let is_kept = is_bound_kept(&key, value.get(), is_integer);
                is_kept.then_some(()).ok_or_else(|| inexact(path, value.get()))
            } else if BY_NAME.contains(&key.as_str()) {
                let named: Members<'_> = serde_json::from_str(value.get()).unwrap_or_default();
                named.iter().try_for_each(|(name, schema)| {
                    at(path, name, |path| check_schema(schema, path))
                })
            } else if DATA.contains(&key.as_str()) {
                Ok(())
            } else {
                check_schema(value, path)
            }
        })?;
    }
    Ok(())
}

fn check_constant(value: &RawValue, path: &mut String) -> Result<()> {
    let text = value.get();
    if text.starts_with('[') {
        let list: Vec<&RawValue> = serde_json::from_str(text).unwrap_or_default();
        list.iter().enumerate().try_for_each(|(place, value)| {
            at(path, &place.to_string(), |path| check_constant(value, path))
        })
    } else if text.starts_with('{') {
        let members: Members<'_> = serde_json::from_str(text).unwrap_or_default();
        members
            .iter()
            .try_for_each(|(key, value)| at(path, key, |path| check_constant(value, path)))
    } else if is_constant_kept(text) {
        Ok(())
    } else {
        Err(inexact(path, text))
    }
}

/// Calls `body` with the path of a member.
fn at(path: &mut String, key: &str, body: impl FnOnce(&mut String) -> Result<()>) -> Result<()> {
    let len = path.len();
    path.push('/');
    path.push_str(&escaped(key));
    let outcome = body(path);
    path.truncate(len);
    outcome
}

fn inexact(path: &str, number: &str) -> Error {
    let number = crate::text::shortened(number);
    Error::invalid_argument(format!(
        "{path}: {number} is not supported: it, or an integer beside it, is not exactly a 64-bit floating-point number"
    ))
}

/// Whether the crate allows a constant and nothing else. Other values than numbers are kept.
fn is_constant_kept(text: &str) -> bool {
    if !text.starts_with(|it: char| it == '-' || it.is_ascii_digit()) {
        return true;
    }
    match text.parse::<i64>() {
        // It ends in an endless recursion of the crate.
        Ok(i64::MIN) => false,
        Ok(integer) => is_integer_kept(integer),
        Err(_) => is_decimal_kept(text),
    }
}

/// Whether the crate allows no number beyond a bound, and all up to it that it can write.
fn is_bound_kept(key: &str, text: &str, is_integer: bool) -> bool {
    let Ok(bound) = text.parse::<f64>() else { return true };
    // Bounds of integers end at the greatest i64, which is within such a bound or is not.
    if bound.abs() >= END_OF_I64 && text.parse::<i64>().is_err() {
        return (MAXIMA.contains(&key) && bound > 0.0) && (is_integer || is_decimal_kept(text));
    }
    match text.parse::<i64>() {
        Ok(i64::MIN) => false,
        // The crate adds 1 to it, or takes 1 from it, as f64.
        Ok(integer) if key.starts_with("exclusive") => integer.unsigned_abs() < 1 << 53,
        Ok(integer) if is_integer => is_integer_kept(integer),
        _ => is_decimal_kept(text),
    }
}

/// Whether an integer is the same after it was f64; the crate's conversion ends at the greatest i64.
fn is_integer_kept(integer: i64) -> bool {
    integer as f64 as i64 == integer
}

/// Whether the shortest decimal number that is read as the same f64, as which the crate writes it, is this one.
fn is_decimal_kept(text: &str) -> bool {
    let Ok(number) = text.parse::<f64>() else { return true };
    decimal(text).is_some_and(|it| Some(it) == decimal(&format!("{number:e}")))
}

/// Returns the digits of a number from the first to the last that is not zero, and the power of ten of the last.
fn decimal(text: &str) -> Option<(bool, String, i64)> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let is_negative = whole.starts_with('-');
    let all = format!("{}{fraction}", whole.trim_start_matches('-'));
    let digits = all.trim_end_matches('0');
    let num_zeros = i64::try_from(all.len() - digits.len()).ok()?;
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some((false, String::new(), 0));
    }
    let exponent: i64 = exponent.parse().ok()?;
    let point = i64::try_from(fraction.len()).ok()?;
    let power = exponent.checked_sub(point)?.checked_add(num_zeros)?;
    Some((is_negative, digits.to_owned(), power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_compared_as_numbers() {
        for kept in ["0.9690406502940995", "1e30", "1E-7", "100.50", "0", "-0.0", "1e0", "5e-324"] {
            assert!(is_decimal_kept(kept), "{kept}");
        }
        for lost in ["0.30000000000000001", "18446744073709551616", "1e-400", "9007199254740993"] {
            assert!(!is_decimal_kept(lost), "{lost}");
        }
    }

    #[test]
    fn numbers_that_change_are_refused_by_their_path() {
        let kept = [
            r#"{"maximum": 9007199254740992, "type": "integer", "default": 9007199254740993}"#,
            r#"{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}"#,
            r#"{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}"#,
            r#"{"const": 9223372036854775807}"#,
            r#"{"properties": {"const": {"description": "12345678901234567890123"}}}"#,
            r#"{"enum": ["9007199254740993", 0.9690406502940995]}"#,
        ];
        kept.iter().for_each(|schema| check(schema).unwrap());
        let lost = [
            (r#"{"const": 9007199254740993}"#, "#/const: 9007199254740993 "),
            (r#"{"const": -9223372036854775808}"#, "#/const: -9223372036854775808 "),
            (r#"{"c\u006fnst": {"a/b": [18446744073709551615]}}"#, "#/const/a~1b/0: "),
            (r#"{"items": [{"enum": [1, 123456789012345678901]}]}"#, "#/items/0/enum/1: "),
            (r#"{"type": "integer", "minimum": 9007199254740993}"#, "#/minimum: "),
            (r#"{"type": "integer", "minimum": 1e20}"#, "#/minimum: "),
            (r#"{"minimum": -9223372036854775808}"#, "#/minimum: "),
            (
                r#"{"type": "integer", "exclusiveMinimum": 9007199254740992}"#,
                "#/exclusiveMinimum: ",
            ),
            (
                r#"{"properties": {"x": {"maximum": 0.30000000000000001}}}"#,
                "#/properties/x/maximum: ",
            ),
        ];
        for (schema, message) in lost {
            let error = check(schema).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains("not supported"), "{error}");
        }
    }
}
