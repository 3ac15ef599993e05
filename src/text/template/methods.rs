//! Methods of Python's strings, dictionaries and lists, as templates call them.
//!
//! Those that only read are minijinja-contrib's `pycompat`, after the price of a walk has been
//! paid; those that build something are here. Methods that change an object do not exist:
//! Transformers renders in Jinja's immutable sandbox, where they are errors too.

use super::budget::{fail, Budget, Text, MAX_OUTPUT_BYTES};
use super::kinds::to_list;
use super::operators::{arg, split_args};
use minijinja::formatting::{format, FormatStyle};
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::collections::HashSet;
use std::sync::Arc;

/// The ends of a string that `strip` works on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
    Both,
}

pub(super) fn register(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    let budget = Arc::clone(budget);
    env.set_unknown_method_callback(move |state, value, method, args| {
        budget.work(60)?;
        match value.as_str() {
            Some(text) => string_method(&budget, state, value, text, method, args),
            None => match value.kind() {
                ValueKind::Map => map_method(&budget, value, method, args),
                ValueKind::Seq | ValueKind::Iterable => list_method(&budget, value, method, args),
                _ => Err(Error::from(ErrorKind::UnknownMethod)),
            },
        }
    });
}

fn string_method(
    budget: &Budget,
    state: &mut State<'_, '_>,
    value: &Value,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    budget.bytes(text.len())?;
    let string_arg = |index: usize| -> Result<&str, Error> {
        let arg = arg(args, index)?;
        arg.as_str()
            .ok_or_else(|| fail(format!("{method}: argument {} must be a string", index + 1)))
    };
    match method {
        "strip" => strip(budget, text, args.first(), Side::Both),
        "lstrip" => strip(budget, text, args.first(), Side::Left),
        "rstrip" => strip(budget, text, args.first(), Side::Right),
        "removeprefix" => {
            let prefix = string_arg(0)?;
            budget.string(text.strip_prefix(prefix).unwrap_or(text).to_owned())
        }
        "removesuffix" => {
            let suffix = string_arg(0)?;
            budget.string(text.strip_suffix(suffix).unwrap_or(text).to_owned())
        }
        "replace" => {
            let count = match args.get(2) {
                Some(count) => usize::try_from(count.as_i64().unwrap_or(-1)).ok(),
                None => None,
            };
            replace(budget, text, string_arg(0)?, string_arg(1)?, count)
        }
        "split" | "rsplit" => split(budget, text, method == "rsplit", args),
        "partition" | "rpartition" => {
            let separator = string_arg(0)?;
            if separator.is_empty() {
                return Err(fail("partition: empty separator"));
            }
            let found = match method {
                "partition" => text.split_once(separator),
                _ => text.rsplit_once(separator),
            };
            let parts = match (found, method) {
                (Some((before, after)), _) => [before, separator, after],
                (None, "partition") => [text, "", ""],
                (None, _) => ["", "", text],
            };
            let parts = parts.iter().map(|part| budget.string((*part).to_owned()));
            Ok(Value::from(Tuple::new(parts.collect::<Result<Vec<_>, _>>()?)))
        }
        "splitlines" => splitlines(budget, text, args),
        "join" => {
            let mut joined = Text::default();
            let items = to_list(budget, arg(args, 0)?)?;
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    budget.bytes(text.len())?;
                    joined.push(text)?;
                }
                let item = item
                    .as_str()
                    .ok_or_else(|| fail(format!("join: element {index} is not a string")))?;
                budget.bytes(item.len())?;
                joined.push(item)?;
            }
            budget.string(joined.into_string())
        }
        "title" => title(budget, text),
        "find" | "rfind" | "index" | "rindex" => find(budget, text, method, args),
        "upper" | "lower" | "capitalize" | "swapcase" => {
            // Changing the case makes a text up to three times longer.
            if !text.is_ascii() && text.len() > MAX_OUTPUT_BYTES / 3 {
                return Err(fail(format!("{method}: the string is too long")));
            }
            budget.bytes(text.len().saturating_mul(16))?;
            budget.result(unknown_method_callback(state, value, method, args)?)
        }
        "format" => {
            check_format(budget, text, args)?;
            budget.result(format(FormatStyle::StrFormat, text, args).map(Value::from)?)
        }
        "ljust" | "rjust" | "center" | "zfill" => justify(budget, text, method, args),
        _ => {
            for arg in args {
                budget.walk(arg)?;
            }
            budget.bytes(text.len().saturating_mul(4))?;
            budget.result(unknown_method_callback(state, value, method, args)?)
        }
    }
}

/// Returns the text without the given characters, or white space, at its ends.
pub(super) fn strip(
    budget: &Budget,
    text: &str,
    characters: Option<&Value>,
    side: Side,
) -> Result<Value, Error> {
    budget.bytes(text.len())?;
    let stripped = match characters.filter(|value| !value.is_none()) {
        None => match side {
            Side::Both => text.trim_matches(is_space),
            Side::Left => text.trim_start_matches(is_space),
            Side::Right => text.trim_end_matches(is_space),
        },
        Some(value) => {
            let characters =
                value.as_str().ok_or_else(|| fail("strip: the characters must be a string"))?;
            budget.bytes(text.len().saturating_add(characters.len()).saturating_mul(16))?;
            // A set is used: with a long string of characters the plain search would be quadratic.
            let mut ascii = [false; 128];
            for byte in characters.bytes() {
                if let Some(contained) = ascii.get_mut(usize::from(byte)) {
                    *contained = true;
                }
            }
            let others: HashSet<char> = characters.chars().filter(|c| !c.is_ascii()).collect();
            let contains = |character: char| match ascii.get(character as usize) {
                Some(contained) => *contained,
                None => others.contains(&character),
            };
            match side {
                Side::Both => text.trim_matches(contains),
                Side::Left => text.trim_start_matches(contains),
                Side::Right => text.trim_end_matches(contains),
            }
        }
    };
    budget.string(stripped.to_owned())
}

/// Returns the text with the first `count` (or all) occurrences of `old` replaced.
pub(super) fn replace(
    budget: &Budget,
    text: &str,
    old: &str,
    new: &str,
    count: Option<usize>,
) -> Result<Value, Error> {
    budget.bytes(text.len().saturating_mul(2))?;
    let mut result = Text::default();
    let mut copied = 0;
    for (position, found) in text.match_indices(old).take(count.unwrap_or(usize::MAX)) {
        budget.bytes(new.len())?;
        result.push(text.get(copied..position).unwrap_or_default())?;
        result.push(new)?;
        copied = position + found.len();
    }
    result.push(text.get(copied..).unwrap_or_default())?;
    budget.string(result.into_string())
}

/// Implements `split` and `rsplit`, with a separator or at white space, at most `maxsplit` times.
fn split(budget: &Budget, text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let option = |name: &str, index: usize| match positional.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let separator = option("sep", 0)?.filter(|value| !value.is_none());
    let max_splits = option("maxsplit", 1)?.and_then(|value| value.as_i64()).unwrap_or(-1);
    let max_splits = usize::try_from(max_splits).ok();
    let at_white_space = separator.is_none();
    budget.bytes(text.len().saturating_mul(2))?;
    let mut parts = Vec::new();
    let mut keep = |part: &str| -> Result<(), Error> {
        // For an element of the list and the header of a string.
        budget.structure(48)?;
        parts.push(budget.string(part.to_owned())?);
        Ok(())
    };
    match separator {
        Some(separator) => {
            let separator =
                separator.as_str().ok_or_else(|| fail("split: the separator must be a string"))?;
            if separator.is_empty() {
                return Err(fail("split: empty separator"));
            }
            match (max_splits.and_then(|count| count.checked_add(1)), from_right) {
                (None, _) => text.split(separator).try_for_each(&mut keep)?,
                (Some(count), false) => text.splitn(count, separator).try_for_each(&mut keep)?,
                (Some(count), true) => text.rsplitn(count, separator).try_for_each(&mut keep)?,
            }
        }
        None => {
            // The end that is not split off last keeps its white space, as in Python.
            let mut rest = trimmed(text, from_right);
            let mut splits = 0;
            while !rest.is_empty() {
                let cut = match (max_splits.is_some_and(|max| splits >= max), from_right) {
                    (true, _) => None,
                    (false, false) => rest.find(is_space).map(|at| rest.split_at(at)),
                    (false, true) => rest
                        .char_indices()
                        .rev()
                        .find(|(_, character)| is_space(*character))
                        .map(|(at, character)| rest.split_at(at + character.len_utf8()))
                        .map(|(before, last)| (last, before)),
                };
                let (part, remaining) = cut.unwrap_or((rest, ""));
                keep(part)?;
                rest = trimmed(remaining, from_right);
                splits += 1;
            }
        }
    }
    if from_right && (at_white_space || max_splits.is_some()) {
        parts.reverse();
    }
    Ok(Value::from(parts))
}

/// Whether Python counts a character as white space: it also has the separators of ASCII.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Returns the text without the white space at one end.
fn trimmed(text: &str, from_right: bool) -> &str {
    match from_right {
        true => text.trim_end_matches(is_space),
        false => text.trim_start_matches(is_space),
    }
}

/// Whether a line ends with this character, in Python.
fn ends_line(character: char) -> bool {
    matches!(character, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn splitlines(budget: &Budget, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let keep_ends = match positional.first() {
        Some(flag) => flag.is_true(),
        None => kwargs.get::<Option<bool>>("keepends")?.unwrap_or(false),
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        budget.structure(48)?;
        let at = rest.find(ends_line).unwrap_or(rest.len());
        let (line, after) = rest.split_at(at);
        let ending = match after.starts_with("\r\n") {
            true => 2,
            false => after.chars().next().map_or(0, char::len_utf8),
        };
        let line = if keep_ends { rest.get(..at + ending).unwrap_or(rest) } else { line };
        lines.push(budget.string(line.to_owned())?);
        rest = after.get(ending..).unwrap_or_default();
    }
    Ok(Value::from(lines))
}

/// Begins each run of letters with a capital, as Python does: after an apostrophe too.
fn title(budget: &Budget, text: &str) -> Result<Value, Error> {
    budget.bytes(text.len().saturating_mul(16))?;
    let mut result = Text::default();
    let mut is_within = false;
    for character in text.chars() {
        if is_within {
            character.to_lowercase().try_for_each(|lower| result.push_char(lower))?;
        } else {
            let mut upper = character.to_uppercase();
            upper.next().map_or(Ok(()), |first| result.push_char(first))?;
            // The second letter of one that becomes two is a small one.
            upper.flat_map(char::to_lowercase).try_for_each(|lower| result.push_char(lower))?;
        }
        is_within = character.is_lowercase() || character.is_uppercase();
    }
    budget.string(result.into_string())
}

/// Implements `find`, `rfind`, `index` and `rindex`, whose places are numbers of characters.
fn find(budget: &Budget, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let wanted = arg(args, 0)?.as_str();
    let wanted = wanted.ok_or_else(|| fail(format!("{method}: the argument must be a string")))?;
    budget.bytes(text.len().saturating_add(wanted.len()).saturating_mul(8))?;
    let len = text.chars().count();
    let bound = |index: usize, missing: usize| match args.get(index).filter(|it| !it.is_none()) {
        None => Ok(missing),
        Some(value) => {
            let bound = value.as_i64();
            let bound =
                bound.ok_or_else(|| fail(format!("{method}: a bound must be an integer")))?;
            let from_end =
                || len.saturating_sub(usize::try_from(bound.unsigned_abs()).unwrap_or(len));
            Ok::<_, Error>(usize::try_from(bound).unwrap_or_else(|_| from_end()))
        }
    };
    let (start, end) = (bound(1, 0)?, bound(2, len)?.min(len));
    let place = |number: usize| text.char_indices().nth(number).map_or(text.len(), |(at, _)| at);
    let from = place(start);
    // Nothing is found after the end, not even nothing.
    let searched = if start > end { None } else { text.get(from..place(end)) };
    let found = searched.and_then(|searched| match method {
        "find" | "index" => searched.find(wanted),
        _ => searched.rfind(wanted),
    });
    match found.and_then(|found| text.get(..from + found)) {
        Some(before) => Ok(Value::from(before.chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(fail(format!("{method}: the text does not contain it"))),
    }
}

/// Pads to a width. The width is bounded by the longest string allowed.
fn justify(budget: &Budget, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let width = usize::try_from(arg(args, 0)?.as_i64().unwrap_or(0)).unwrap_or(0);
    let fill = match (method, args.get(1)) {
        ("zfill", _) => "0",
        (_, None) => " ",
        (_, Some(fill)) => fill
            .as_str()
            .filter(|fill| fill.chars().count() == 1)
            .ok_or_else(|| fail(format!("{method}: the fill must be one character")))?,
    };
    let missing = width.saturating_sub(text.chars().count());
    let (left, right) = match method {
        "ljust" => (0, missing),
        "rjust" | "zfill" => (missing, 0),
        // Python puts the odd blank to the left if the width is odd.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
    };
    let mut padded = Text::default();
    let (sign, digits) = match (method, text.chars().next()) {
        ("zfill", Some('+' | '-')) => text.split_at(1),
        _ => ("", text),
    };
    padded.push(sign)?;
    padded.push_repeated(fill, left)?;
    padded.push(digits)?;
    padded.push_repeated(fill, right)?;
    budget.string(padded.into_string())
}

/// Refuses formats with excessive widths, before minijinja pads anything.
fn check_format(budget: &Budget, format: &str, args: &[Value]) -> Result<(), Error> {
    let mut longest_number = 0usize;
    let mut number = 0usize;
    let mut num_fields = 0usize;
    let mut is_open = false;
    // Doubled braces are ordinary text.
    for byte in format.replace("{{", "").replace("}}", "").bytes() {
        number = match byte {
            b'0'..=b'9' => number.saturating_mul(10).saturating_add(usize::from(byte - b'0')),
            _ => 0,
        };
        longest_number = longest_number.max(number);
        match byte {
            b'{' if is_open => return Err(fail("format: nested fields are not supported")),
            b'{' => {
                num_fields += 1;
                is_open = true;
            }
            b'}' => is_open = false,
            _ => {}
        }
    }
    if longest_number > 1000 {
        return Err(fail("format: a width is over 1000"));
    }
    let mut largest = 0;
    for arg in args {
        largest = largest.max(budget.walk(arg)?);
    }
    // An escape in a repr takes up to ten characters for one.
    let each = largest.saturating_mul(10).saturating_add(1100);
    let bytes = num_fields.saturating_mul(each).saturating_add(format.len());
    if bytes > MAX_OUTPUT_BYTES {
        return Err(fail("format: the result could be too long"));
    }
    budget.bytes(bytes)
}

fn map_method(
    budget: &Budget,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(object) = value.as_object() else {
        return Err(Error::from(ErrorKind::UnknownMethod));
    };
    match method {
        "keys" => Ok(Value::from(to_list(budget, value)?)),
        "values" => {
            budget.list(value.len().unwrap_or(0))?;
            let pairs = object.try_iter_pairs().into_iter().flatten();
            Ok(Value::from(pairs.map(|(_, item)| item).collect::<Vec<_>>()))
        }
        "items" => items(budget, value),
        "get" => {
            let key = arg(args, 0)?;
            budget.walk(key)?;
            let missing = || args.get(1).cloned().unwrap_or_else(|| Value::from(()));
            Ok(object.get_value(key).unwrap_or_else(missing))
        }
        "copy" => Ok(value.clone()),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Returns the pairs of a map as a list of tuples.
pub(super) fn items(budget: &Budget, value: &Value) -> Result<Value, Error> {
    let Some(pairs) = value.as_object().and_then(|object| object.try_iter_pairs()) else {
        return Err(fail(format!("items: expected a map, got {}", value.kind())));
    };
    budget.structure(value.len().unwrap_or(0).saturating_mul(120).saturating_add(64))?;
    let pairs = pairs.map(|(key, item)| Value::from(Tuple::new(vec![key, item])));
    Ok(Value::from(pairs.collect::<Vec<_>>()))
}

fn list_method(
    budget: &Budget,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match method {
        "count" | "index" => {
            let wanted = arg(args, 0)?;
            budget.walk(value)?;
            budget.walk(wanted)?;
            let mut equal = value.try_iter()?.enumerate().filter(|(_, item)| item == wanted);
            if method == "count" {
                return Ok(Value::from(equal.count()));
            }
            let first = equal.next().map(|(index, _)| index);
            first.map(Value::from).ok_or_else(|| fail("index: the value is not in the list"))
        }
        "copy" => Ok(value.clone()),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
