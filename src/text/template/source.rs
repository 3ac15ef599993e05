//! What is done to the text of a template before minijinja parses it.

use crate::error::{Error, ErrorKind, Result};

/// Returns a source that minijinja reads as Jinja reads the given one:
///
/// - Every line break is `\n`.
/// - `{% generation %}` and `{% endgeneration %}`, which Transformers uses to mark the model's words for training, are a
///   scope (`{% with %}`); rendering is unchanged. The trimming marks (`{%-`) of the tags are kept.
/// - Escapes in string literals that minijinja does not know, or not so, are others in their place.
pub(super) fn prepared(source: &str) -> Result<String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut result = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = next_tag(rest) {
        let (before, tag) = rest.split_at(at + 2);
        result.push_str(before);
        if before.ends_with("{#") {
            rest = copy_until(tag.find("#}"), tag, &mut result);
            continue;
        }
        if before.ends_with("{%") {
            let Some(end) = tag.find("%}") else {
                rest = tag;
                break;
            };
            let inside = tag.get(..end).unwrap_or_default();
            let replacement = match inside.trim_matches(['-', '+']).trim() {
                "raw" => {
                    rest = copy_until(end_of_raw(tag), tag, &mut result);
                    continue;
                }
                "generation" => Some("with"),
                "endgeneration" => Some("endwith"),
                _ => None,
            };
            if let Some(replacement) = replacement {
                let is_mark = |character: &char| matches!(character, '-' | '+');
                result.extend(inside.chars().next().filter(is_mark));
                result.push(' ');
                result.push_str(replacement);
                result.push(' ');
                result.extend(inside.chars().next_back().filter(is_mark));
                rest = tag.get(end..).unwrap_or_default();
                continue;
            }
        }
        rest = copy_expression(tag, &mut result)?;
    }
    result.push_str(rest);
    Ok(result)
}

/// Returns the place of the next `{{`, `{%` or `{#`.
fn next_tag(text: &str) -> Option<usize> {
    let is_tag =
        |(at, _): &(usize, &str)| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    text.match_indices('{').find(is_tag).map(|(at, _)| at)
}

/// Copies the text up to a place, or all of it, and returns the rest.
fn copy_until<'a>(end: Option<usize>, text: &'a str, result: &mut String) -> &'a str {
    let (copied, rest) = text.split_at_checked(end.unwrap_or(text.len())).unwrap_or((text, ""));
    result.push_str(copied);
    rest
}

/// Returns the place of the `{% endraw %}`.
fn end_of_raw(text: &str) -> Option<usize> {
    let is_end = |at: &usize| {
        let inside = text.get(at + 2..).unwrap_or_default().trim_start_matches(['-', '+']);
        inside.trim_start().starts_with("endraw")
    };
    text.match_indices("{%").map(|(at, _)| at).find(is_end)
}

/// Copies the rest of a tag, up to its end, and returns what follows.
fn copy_expression<'a>(tag: &'a str, result: &mut String) -> Result<&'a str> {
    let mut rest = tag;
    let mut depth = 0usize;
    while let Some(character) = rest.chars().next() {
        match character {
            '"' | '\'' => {
                rest = copy_string(rest, character, result)?;
                continue;
            }
            '{' | '(' | '[' => depth += 1,
            // In a list or a map these are no end.
            '}' | '%' if depth == 0 && rest.get(1..2) == Some("}") => return Ok(rest),
            '}' | ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        result.push(character);
        rest = rest.get(character.len_utf8()..).unwrap_or_default();
    }
    Ok(rest)
}

/// Copies a string literal with its quotes, and returns what follows.
fn copy_string<'a>(text: &'a str, quote: char, result: &mut String) -> Result<&'a str> {
    result.push(quote);
    let mut characters = text.chars();
    characters.next();
    while let Some(character) = characters.next() {
        if character != '\\' {
            result.push(character);
            if character == quote {
                break;
            }
            continue;
        }
        match characters.next() {
            // A line that goes on.
            Some('\n') => {}
            Some('a') => result.push_str("\\x07"),
            Some('v') => result.push_str("\\x0b"),
            Some('/') => result.push_str("\\\\/"),
            Some('U') => {
                let digits = characters.as_str().get(..8);
                let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
                let Some(character) = code.and_then(char::from_u32) else {
                    return Err(refused("\\U without the eight digits of a character"));
                };
                characters = characters.as_str().get(8..).unwrap_or_default().chars();
                match character {
                    '\\' | '\'' | '"' => result.extend(['\\', character]),
                    other => result.push(other),
                }
            }
            Some('N') => return Err(refused("\\N, which names a character")),
            Some(other) => result.extend(['\\', other]),
            None => result.push('\\'),
        }
    }
    Ok(characters.as_str())
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::Template, format!("chat template: a string has {what}"))
}
