//! JSON schemas before the crate reads them, and the places of what it refuses in them.

use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use super::classes::precise;
use super::limits;
use super::sentence::Told;
use crate::error::{check_room_for_json, Error, Result};

/// The key under which a schema could tell the crate to leave out what it does not implement.
pub(super) const SWITCHES: &str = "x-guidance";

/// Says which entry of a schema is looked for, by its key and its value.
type IsWanted<'a> = dyn Fn(&str, &Value) -> bool + 'a;

/// Parses a schema, and refuses one that would change how it is read.
pub(super) fn parse(text: &str) -> Result<Value> {
    check_room_for_json(text.as_bytes(), "a JSON schema")?;
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| Error::invalid_argument(format!("it is not JSON: {error}")))?;
    if !schema.is_object() && !schema.is_boolean() {
        return Err(Error::invalid_argument("it is neither an object nor a boolean"));
    }
    if schema.get(SWITCHES).is_some() {
        return Err(Error::invalid_argument(format!("#/{SWITCHES} is not allowed")));
    }
    Ok(schema)
}

/// Refuses a grammar whose JSON schemas could switch checks off. The name may be written with escapes.
pub(super) fn check_grammar(grammar: &str) -> Result<()> {
    let mut plain = String::new();
    let mut rest = grammar;
    while let Some((before, after)) = rest.split_once("\\u") {
        plain.push_str(before);
        let hex = after.get(..4).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        rest = match hex.and_then(char::from_u32) {
            Some(character) => {
                plain.push(character);
                after.get(4..).unwrap_or_default()
            }
            None => after,
        };
    }
    plain.push_str(rest);
    if plain.contains(SWITCHES) {
        Err(Error::invalid_argument(format!("the grammar: {SWITCHES} is not allowed")))
    } else {
        Ok(())
    }
}

/// Adds the place in the schema to a message of the crate, if it can be found. `told`: the same, taken apart.
pub(super) fn located(schema: &Value, message: &str, told: &Told) -> String {
    if let Some(regex) = &told.regex {
        let is_it = |pattern: &str| regex_to_lark(pattern, "dw") == *regex;
        let found = find(schema, &|key, value| match (key, value) {
            ("pattern", Value::String(pattern)) => is_it(&precise(pattern)),
            ("patternProperties", Value::Object(named)) => named.keys().any(|key| is_it(key)),
            _ => false,
        });
        return match found {
            Some(path) => format!("{path}: {}", told.what),
            None => told.in_grammar(),
        };
    }
    if message.contains("oneOf constraints are not supported") {
        let why = "oneOf is supported where no value can be of two of its alternatives, which must show in their types, in \
                   constants or in required properties";
        let mut count = 0;
        each_keyword(schema, &mut String::from("#"), &mut |_, key, _| {
            count += usize::from(key == "oneOf");
        });
        return match find(schema, &|key, _| key == "oneOf") {
            Some(path) if count == 1 => format!("{path}: {why}"),
            // The crate does not say which.
            Some(path) => format!("{path}, or another of {count} oneOf: {why}"),
            None => why.to_owned(),
        };
    }
    let quoted = |text: &str| {
        let mut parts = text.split('"');
        parts.next();
        parts.next().map(str::to_owned)
    };
    let after = |mark: &str| message.split_once(mark).map(|(_, rest)| rest);
    let is_wanted: Box<IsWanted<'_>> = if let Some(rest) = after("Unimplemented keys: ") {
        let Some(name) = quoted(rest) else { return told.what.clone() };
        let Some(path) = find(schema, &|key, _| key == name) else {
            return format!("the keyword {name} is not supported");
        };
        return format!("{path} is not supported");
    } else if let Some(rest) = after("Unknown format: ") {
        let name = rest.lines().next().unwrap_or_default().trim().to_owned();
        Box::new(move |key, value| key == "format" && value.as_str() == Some(&name))
    } else if message.contains("patternProperty regexes") {
        Box::new(|key, value| {
            let names = value.as_object().filter(|_| key == "patternProperties");
            names.is_some_and(|names| {
                names.keys().filter(|name| message.contains(name.as_str())).count() > 1
            })
        })
    } else if let Some(name) = after("Invalid type: ").and_then(|rest| rest.lines().next()) {
        let name = name.trim().to_owned();
        Box::new(move |key, value| key == "type" && value.to_string().contains(&name))
    } else {
        // A keyword in quotation marks, of a value that is not as it should be; or a reference.
        let is_named = |key: &str| {
            message.contains(&format!("'{key}'")) || message.starts_with(&format!("{key} must be"))
        };
        let names: Vec<String> = keywords(schema).into_iter().filter(|key| is_named(key)).collect();
        let message = message.to_owned();
        Box::new(move |key, value| {
            let target = value.as_str().filter(|_| key == "$ref").unwrap_or_default();
            // The message names the file that a reference points to.
            let target = match target.split_once('#') {
                Some((file, _)) if !file.is_empty() => file,
                _ => target.trim_matches(['#', '/']),
            };
            names.iter().any(|name| name == key) || !target.is_empty() && message.contains(target)
        })
    };
    match find(schema, &*is_wanted) {
        Some(path) => format!("{path}: {}", told.what),
        None => told.what.clone(),
    }
}

/// Refuses patterns that have too many repetitions or alternatives together.
pub(super) fn check_patterns(schema: &Value) -> Result<()> {
    const NAME: &str = "its patterns";
    let (mut repetitions, mut alternatives) = (0usize, 0usize);
    let mut count = |pattern: &str| {
        repetitions += limits::num_repetitions(pattern);
        alternatives += limits::num_alternatives(pattern);
    };
    each_keyword(schema, &mut String::from("#"), &mut |_, key, value| match (key, value) {
        ("pattern", Value::String(pattern)) => count(pattern),
        ("patternProperties", Value::Object(named)) => named.keys().for_each(|key| count(key)),
        _ => {}
    });
    limits::check_repetitions(NAME, repetitions)?;
    limits::check_alternatives(NAME, alternatives)
}

/// Keywords whose values are schemas by name, lists of schemas, and schemas (or lists of them).
pub(super) const BY_NAME: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
const SCHEMAS: [&str; 12] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "contains",
];

/// Keywords whose values are examples of what a schema allows.
pub(super) const DATA: [&str; 2] = ["default", "examples"];

/// Returns the path of the first keyword for which `is_wanted` says so: places that are in use come
/// before definitions.
fn find(schema: &Value, is_wanted: &IsWanted<'_>) -> Option<String> {
    let mut path = String::from("#");
    let mut found = None;
    each_keyword(schema, &mut path, &mut |path, key, value| {
        if found.is_none() && is_wanted(key, value) {
            found = Some(format!("{path}/{}", escaped(key)));
        }
    });
    found
}

/// Returns the names of all keywords.
fn keywords(schema: &Value) -> Vec<String> {
    let mut names = Vec::new();
    each_keyword(schema, &mut String::from("#"), &mut |_, key, _| names.push(key.to_owned()));
    names.sort();
    names.dedup();
    names
}

/// Calls `body` with the path of each schema, and a keyword of it and its value.
fn each_keyword(schema: &Value, path: &mut String, body: &mut dyn FnMut(&str, &str, &Value)) {
    let Value::Object(schema) = schema else { return };
    for (key, value) in schema {
        body(path, key, value);
    }
    let (later, first): (Vec<_>, Vec<_>) =
        schema.iter().partition(|(key, _)| *key == "$defs" || *key == "definitions");
    for (key, value) in first.into_iter().chain(later) {
        let len = path.len();
        path.push('/');
        path.push_str(&escaped(key));
        match value {
            Value::Object(named) if BY_NAME.contains(&key.as_str()) => each_of(named, path, body),
            Value::Object(_) if SCHEMAS.contains(&key.as_str()) => each_keyword(value, path, body),
            Value::Array(list) if SCHEMAS.contains(&key.as_str()) => {
                for (place, value) in list.iter().enumerate() {
                    let len = path.len();
                    path.push_str(&format!("/{place}"));
                    each_keyword(value, path, body);
                    path.truncate(len);
                }
            }
            _ => {}
        }
        path.truncate(len);
    }
}

fn each_of(
    named: &Map<String, Value>,
    path: &mut String,
    body: &mut dyn FnMut(&str, &str, &Value),
) {
    for (name, value) in named {
        let len = path.len();
        path.push('/');
        path.push_str(&escaped(name));
        each_keyword(value, path, body);
        path.truncate(len);
    }
}

/// Returns a key as a part of a JSON pointer (RFC 6901).
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn switches_are_refused() {
        assert!(parse(r#"{"x-guidance": {"lenient": true}}"#).is_err());
        assert!(parse(r#"{"x-guidanc\u0065": {"lenient": true}}"#).is_err());
        assert!(check_grammar(r#"start: %json {"x-guidance": {}}"#).is_err());
        assert!(check_grammar(r#"start: %json {"\u0078-guidanc\u0065": {}}"#).is_err());
        assert!(check_grammar(r#"start: "\u" "\u00e9" "\ud800" /x/"#).is_ok());
    }

    #[test]
    fn refusals_say_where() {
        let schema = json!({
            "$defs": { "a": { "not": {} } },
            "properties": { "x/y": { "anyOf": [true, { "uniqueItems": true }] }, "not": {} },
        });
        let message = |text: &str| located(&schema, text, &Told::of(text));
        let expected = "#/properties/x~1y/anyOf/1/uniqueItems is not supported";
        assert_eq!(message("Unimplemented keys: [\"uniqueItems\"]"), expected);
        assert_eq!(message("Unimplemented keys: [\"not\"]"), "#/$defs/a/not is not supported");
        assert_eq!(message("anything else\n  while"), "anything else");
    }
}
