//! The filter `tojson` as Transformers defines it: `json.dumps(x, ensure_ascii=False, ...)`.
//!
//! Unlike Jinja's own, it does not escape for HTML. Key order is kept unless `sort_keys`.

use super::budget::{fail, Budget, Text, MAX_VALUE_DEPTH};
use super::values::{float_repr, number};
use minijinja::value::{Value, ValueKind};
use minijinja::Error;
use std::fmt::Write as _;

/// The options of `json.dumps` that templates use.
pub(super) struct JsonStyle {
    /// The text of one level of indentation; `None` for all in one line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

/// Appends `value` as JSON.
pub(super) fn write_json(
    budget: &Budget,
    text: &mut Text,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    if depth > MAX_VALUE_DEPTH {
        return Err(fail(format!("tojson: a value is nested more than {MAX_VALUE_DEPTH} deep")));
    }
    budget.work(40)?;
    match value.kind() {
        ValueKind::None => text.push("null"),
        ValueKind::Bool => text.push(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => text.push(&number(value)),
        ValueKind::String => {
            write_string(budget, text, value.as_str().unwrap_or_default(), style.ensure_ascii)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            text.push("[")?;
            let mut is_empty = true;
            for item in value.try_iter()? {
                if !is_empty {
                    text.push(&style.item_separator)?;
                }
                is_empty = false;
                line_break(text, style, depth + 1)?;
                write_json(budget, text, &item, style, depth + 1)?;
            }
            if !is_empty {
                line_break(text, style, depth)?;
            }
            text.push("]")
        }
        ValueKind::Map => write_object(budget, text, value, style, depth),
        ValueKind::Undefined => Err(fail("tojson: the value is undefined")),
        kind => Err(fail(format!("tojson: a value of type {kind} has no JSON form"))),
    }
}

fn write_object(
    budget: &Budget,
    text: &mut Text,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    let mut pairs = Vec::new();
    for (key, item) in
        value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
    {
        budget.structure(80)?;
        let key = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
            ValueKind::None => "null".to_owned(),
            ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
            ValueKind::Number if key.is_integer() => number(&key),
            ValueKind::Number => float_repr(f64::try_from(key).unwrap_or(f64::NAN)),
            kind => return Err(fail(format!("tojson: a key of type {kind}"))),
        };
        budget.bytes(key.len())?;
        pairs.push((key, item));
    }
    if style.sort_keys {
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
    }
    text.push("{")?;
    for (index, (key, item)) in pairs.iter().enumerate() {
        if index > 0 {
            text.push(&style.item_separator)?;
        }
        line_break(text, style, depth + 1)?;
        write_string(budget, text, key, style.ensure_ascii)?;
        text.push(&style.key_separator)?;
        write_json(budget, text, item, style, depth + 1)?;
    }
    if !pairs.is_empty() {
        line_break(text, style, depth)?;
    }
    text.push("}")
}

fn line_break(text: &mut Text, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    match &style.indent {
        Some(indent) => {
            text.push("\n")?;
            text.push_repeated(indent, depth)
        }
        None => Ok(()),
    }
}

fn write_string(
    budget: &Budget,
    text: &mut Text,
    string: &str,
    ensure_ascii: bool,
) -> Result<(), Error> {
    budget.bytes(string.len().saturating_mul(10))?;
    text.push("\"")?;
    for character in string.chars() {
        match character {
            '"' => text.push("\\\"")?,
            '\\' => text.push("\\\\")?,
            '\n' => text.push("\\n")?,
            '\r' => text.push("\\r")?,
            '\t' => text.push("\\t")?,
            '\u{8}' => text.push("\\b")?,
            '\u{c}' => text.push("\\f")?,
            c if u32::from(c) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                let mut escape = String::new();
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(escape, "\\u{unit:04x}");
                }
                text.push(&escape)?;
            }
            c => text.push_char(c)?,
        }
    }
    text.push("\"")
}
