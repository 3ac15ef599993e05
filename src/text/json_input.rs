//! The JSON that a caller passes to a chat template: messages, tools, variables.
//!
//! Its values are counted before it is built: `[[],[],...]` takes three bytes of text and about a
//! hundred of memory per element.

use crate::error::{check_room, Error, Result};
use crate::threads::{run_apart, STACK_BYTES};
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;

/// The largest JSON argument, in bytes.
pub(super) const MAX_JSON_BYTES: usize = 16 << 20;

/// The most values (strings, numbers, lists, ...) in a JSON argument: with about 150 bytes for
/// each, serde_json's tree and the template's own stay well under 100 MiB.
pub(super) const MAX_JSON_VALUES: usize = 250_000;

/// The bytes that a value takes at most beside its text, while the lists and maps double that it is
/// in.
const ROOM_PER_VALUE: usize = 512;

/// The deepest nesting that is parsed on the stack of the caller: a level takes a kilobyte of it. What is
/// deeper has a thread with a stack of its own.
const MAX_HERE: usize = 24;

/// Parses the conversation, a JSON array of objects. Errors name the index of the bad message.
pub fn parse_messages(json: &[u8]) -> Result<Value> {
    let value = parse("messages", json)?;
    let Value::Array(messages) = &value else {
        return Err(Error::invalid_argument(format!(
            "messages is {}, expected a JSON array of objects",
            kind(&value)
        )));
    };
    check_messages(messages)?;
    Ok(value)
}

/// Parses the tools, a JSON array as `tools` in the chat completion format of hosted services.
pub fn parse_tools(json: &[u8]) -> Result<Value> {
    let value = parse("tools", json)?;
    check_tools(&value)?;
    Ok(value)
}

/// Parses further template variables, such as `enable_thinking`: a JSON object.
pub fn parse_variables(json: &[u8]) -> Result<Map<String, Value>> {
    match parse("template variables", json)? {
        Value::Object(map) => Ok(map),
        other => Err(Error::invalid_argument(format!(
            "template variables are {}, expected a JSON object",
            kind(&other)
        ))),
    }
}

pub(super) fn check_messages(messages: &[Value]) -> Result<()> {
    for (index, message) in messages.iter().enumerate() {
        let Value::Object(message) = message else {
            return Err(Error::invalid_argument(format!(
                "messages[{index}] is {}, expected an object",
                kind(message)
            )));
        };
        match message.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => {
                return Err(Error::invalid_argument(format!(
                    "messages[{index}].role is {}, expected a string",
                    kind(other)
                )))
            }
            None => {
                return Err(Error::invalid_argument(format!("messages[{index}] has no \"role\"")))
            }
        }
    }
    Ok(())
}

pub(super) fn check_tools(tools: &Value) -> Result<()> {
    match tools {
        Value::Array(_) => Ok(()),
        other => {
            Err(Error::invalid_argument(format!("tools is {}, expected a JSON array", kind(other))))
        }
    }
}

fn parse(what: &str, json: &[u8]) -> Result<Value> {
    if json.len() > MAX_JSON_BYTES {
        return Err(Error::invalid_argument(format!(
            "{what} JSON has {} bytes, at most {MAX_JSON_BYTES} are allowed",
            json.len()
        )));
    }
    if is_deep(json) {
        run_apart("xserv-json", STACK_BYTES, || parse_here(what, json))
    } else {
        parse_here(what, json)
    }
}

/// Whether a text has more than [`MAX_HERE`] brackets within each other, those in strings included.
fn is_deep(json: &[u8]) -> bool {
    let mut depth = 0usize;
    json.iter().any(|byte| {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_HERE
    })
}

fn parse_here(what: &str, json: &[u8]) -> Result<Value> {
    let bad = |e: serde_json::Error| Error::invalid_argument(format!("{what} JSON: {e}"));
    let count = Cell::new(0);
    // The parser's copy of a string, which grows by doubling.
    check_room(json.len().saturating_mul(2), what)?;
    let mut counter = serde_json::Deserializer::from_slice(json);
    (Counter { count: &count }).count(&mut counter).map_err(bad)?;
    check_room(room(count.get(), json.len()), what)?;
    serde_json::from_slice(json).map_err(bad)
}

/// Returns the bytes that a tree takes at most while it is built, serde_json's or the template's.
fn room(num_values: usize, num_bytes: usize) -> usize {
    num_values.saturating_mul(ROOM_PER_VALUE).saturating_add(num_bytes.saturating_mul(3))
}

/// Checks that a tree built already has no more values than [`parse_messages`] allows, and that
/// there is memory for the template's copy of it.
pub(super) fn check_size(what: &str, value: &Value) -> Result<()> {
    // An explicit stack, because the tree may come from a caller and be of any depth.
    let mut pending = vec![(value, 1usize)];
    let mut count = 0usize;
    let mut bytes = 0usize;
    while let Some((value, depth)) = pending.pop() {
        count += 1;
        match value {
            Value::String(s) => bytes = bytes.saturating_add(s.len()),
            Value::Array(items) => pending.extend(items.iter().map(|v| (v, depth + 1))),
            Value::Object(map) => {
                bytes = map.keys().fold(bytes, |sum, key| sum.saturating_add(key.len()));
                pending.extend(map.values().map(|v| (v, depth + 1)));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        if depth > 128 {
            return Err(Error::invalid_argument(format!("{what} is nested more than 128 deep")));
        }
        if count > MAX_JSON_VALUES || pending.len() > MAX_JSON_VALUES {
            return Err(Error::invalid_argument(format!(
                "{what} has more than {MAX_JSON_VALUES} values"
            )));
        }
        if bytes > MAX_JSON_BYTES {
            return Err(Error::invalid_argument(format!(
                "{what} has more than {MAX_JSON_BYTES} bytes"
            )));
        }
    }
    check_room(room(count, bytes), what)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Walks JSON without building it. serde_json's own depth limit of 128 applies.
#[derive(Clone, Copy)]
struct Counter<'a> {
    count: &'a Cell<usize>,
}

impl Counter<'_> {
    fn count<'de, D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }

    fn add<E: serde::de::Error>(self) -> std::result::Result<(), E> {
        self.count.set(self.count.get() + 1);
        if self.count.get() > MAX_JSON_VALUES {
            return Err(E::custom(format_args!("more than {MAX_JSON_VALUES} values")));
        }
        Ok(())
    }
}

impl<'de> serde::de::DeserializeSeed<'de> for Counter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<(), D::Error> {
        self.count(deserializer)
    }
}

impl<'de> Visitor<'de> for Counter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<(), E> {
        self.add()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<(), A::Error> {
        self.add()?;
        while seq.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        self.add()?;
        while map.next_key::<IgnoredAny>()?.is_some() {
            map.next_value_seed(self)?;
        }
        Ok(())
    }
}
