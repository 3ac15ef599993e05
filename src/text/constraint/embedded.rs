//! The JSON schemas in a grammar in Lark's EBNF.

use std::ops::Range;

use serde_json::value::RawValue;

use super::numbers;
use super::rewritten::rewritten;
use crate::error::{Context, Error, Result};

/// The word before a schema.
const MARK: &str = "%json";

/// Returns a grammar in which each schema is as the crate is to get it. Lines stay where they are.
pub(super) fn with_rewritten_schemas(grammar: &str) -> Result<String> {
    let mut found = String::new();
    let mut copied = 0;
    for place in schemas(grammar) {
        let text = grammar.get(place.clone()).unwrap_or_default();
        let schema = of_schema(text).context(|| format!("the schema {}", shown(text)))?;
        found.push_str(grammar.get(copied..place.start).unwrap_or_default());
        let (first, rest) = schema.split_at(schema.len().min(1));
        found.push_str(first);
        // Messages about the grammar name the lines of what follows.
        found.extend(text.matches('\n'));
        found.push_str(rest);
        copied = place.end;
    }
    found.push_str(grammar.get(copied..).unwrap_or_default());
    Ok(found)
}

fn of_schema(text: &str) -> Result<String> {
    numbers::check(text)?;
    let schema = serde_json::from_str(text)
        .map_err(|error| Error::invalid_argument(format!("it is not JSON: {error}")))?;
    Ok(rewritten(&schema)?.to_string())
}

/// Returns the beginning of a schema, for a message.
fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Returns where the schemas are that are objects: not within strings, regular expressions, special tokens and
/// comments. What is no grammar is told by the crate.
fn schemas(grammar: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = grammar.get(at..).filter(|rest| !rest.is_empty()) {
        at += match rest.as_bytes() {
            [b'"', ..] => quoted_len(rest, '"'),
            [b'#', ..] | [b'/', b'/', ..] => rest.find('\n').unwrap_or(rest.len()),
            [b'/', ..] => quoted_len(rest, '/'),
            [b'<', ..] => special_len(rest),
            [b'%', ..] if rest.starts_with(MARK) => {
                let after = rest.get(MARK.len()..).unwrap_or_default();
                let begin = rest.len() - after.trim_start().len();
                let text = rest.get(begin..).unwrap_or_default();
                match json_len(text).filter(|_| text.starts_with('{')) {
                    Some(len) => {
                        found.push(at + begin..at + begin + len);
                        begin + len
                    }
                    None => MARK.len(),
                }
            }
            _ => rest.chars().next().map_or(1, char::len_utf8),
        };
    }
    found
}

/// Returns the length of a text up to a second `quote` that no backslash is before.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == quote => return at + character.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of a special token, or of the "<" that begins none.
fn special_len(text: &str) -> usize {
    let inside = text.get(1..).unwrap_or_default();
    let end = inside.find(|it: char| it == '<' || it == '>' || it.is_whitespace());
    match end {
        Some(end) if inside.get(end..).is_some_and(|rest| rest.starts_with('>')) => end + 2,
        _ => 1,
    }
}

/// Returns the length of the JSON value that a text begins with.
fn json_len(text: &str) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    values.next()?.ok().map(|value| value.get().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_found() {
        let grammar = concat!(
            "start: \"%json {}\" a <%json{}> /%json {}\"/ // %json {}\n",
            "a: %json {\"a\":\n \"}\"} b %json\n{} %json true # \"\n",
            "b: \"\\\"\" %json{\"b\": {}}"
        );
        let found: Vec<&str> = schemas(grammar).into_iter().map(|it| &grammar[it]).collect();
        assert_eq!(found, ["{\"a\":\n \"}\"}", "{}", "{\"b\": {}}"]);
    }

    #[test]
    fn lines_stay_where_they_are() {
        let grammar = "start: %json {\n\"type\":\n\"object\",\n\"required\": [\"a\"]} b\nb: c";
        let new = with_rewritten_schemas(grammar).unwrap();
        assert_eq!(new.lines().count(), grammar.lines().count());
        assert!(new.ends_with("}} b\nb: c") && new.contains("x-guidance"), "{new}");
        let error = with_rewritten_schemas("start: %json {\"const\": 9007199254740993}");
        let error = error.unwrap_err().to_string();
        assert!(error.contains("{\"const\": 9007199254740993}: #/const: "), "{error}");
    }
}
