//! The values that regions of an answer have by a response template: how their text is read, and the shape
//! that it is given.

use serde_json::{Map, Number, Value};

use super::call_list::call_list;
use super::pattern::Pattern;
use crate::error::{Context, Error, Result};

/// The reader of a region's text.
#[derive(Clone, Debug)]
pub(super) struct Content {
    kind: Kind,
    /// Whether white space at both ends is left out.
    strips: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    Text,
    Integer,
    Number,
    Truth,
    Json {
        /// Whether names of members may stand without quotes.
        unquoted_keys: bool,
        /// The delimiters that strings may have, besides quotes.
        delimiters: Vec<(String, String)>,
        /// Whether what is no JSON is text.
        allows_text: bool,
    },
    /// Tags one after the other, each a key and a value.
    Tags {
        pattern: Box<Pattern>,
        value: Option<Box<Content>>,
        merges: bool,
    },
    /// Lines, each a key and a value.
    Lines {
        between_lines: String,
        between: String,
        value: Option<Box<Content>>,
    },
    /// Calls as Python writes them.
    Calls,
}

impl Content {
    /// Reads `content` and `content_args` of a field.
    pub fn new(name: &str, args: &Value) -> Result<Self> {
        let is_set = |key: &str, default| args.get(key).and_then(Value::as_bool).unwrap_or(default);
        let text = |key: &str, default: &str| match args.get(key) {
            None => Ok(default.to_owned()),
            Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
            Some(_) => Err(Error::unsupported(format!("{key} is no text or an empty one"))),
        };
        let value = || match args.get("value_parser") {
            None | Some(Value::Null) => Ok(None),
            Some(parser) => {
                // Depth is bounded by that of the JSON.
                let name = parser.get("name").map_or(Some("text"), Value::as_str);
                let name =
                    name.ok_or_else(|| Error::unsupported("value_parser.name is no text"))?;
                let args = parser.get("args").unwrap_or(&Value::Null);
                let content = Content::new(name, args).context(|| "value_parser")?;
                Ok(Some(Box::new(content)))
            }
        };
        let kind = match name {
            "text" => Kind::Text,
            "int" => Kind::Integer,
            "float" => Kind::Number,
            "bool" => Kind::Truth,
            "json" => Kind::Json {
                unquoted_keys: is_set("unquoted_keys", false),
                delimiters: delimiters_of(args.get("string_delims"))?,
                allows_text: is_set("allow_non_json", false),
            },
            "xml-inline" => {
                let pattern = args.get("tag_pattern").and_then(Value::as_str);
                let pattern = pattern
                    .ok_or_else(|| Error::unsupported("tag_pattern is missing or no text"))?;
                let pattern = Pattern::new(pattern).context(|| "tag_pattern")?;
                if !pattern.group_names().any(|name| name == "key") {
                    return Err(Error::unsupported("tag_pattern has no group \"key\""));
                }
                let merges = is_set("merge_duplicates", false);
                Kind::Tags { pattern: Box::new(pattern), value: value()?, merges }
            }
            "kv-lines" => Kind::Lines {
                between_lines: text("line_sep", "\n")?,
                between: text("kv_sep", ":")?,
                value: value()?,
            },
            "python-call-list" => Kind::Calls,
            _ => return Err(Error::unsupported("it is no kind of content that is known")),
        };
        Ok(Content { kind, strips: is_set("strip", true) })
    }

    /// Whether the value is the text itself, which can be told before its end is there; if so,
    /// whether white space at its ends is left out.
    pub fn as_text(&self) -> Option<bool> {
        matches!(self.kind, Kind::Text).then_some(self.strips)
    }

    /// Whether a text that has been cut cannot be read, or else is the same as a whole one.
    pub fn says_its_end(&self) -> bool {
        matches!(self.kind, Kind::Json { allows_text: false, .. } | Kind::Calls)
    }

    /// Returns the value of a text, or `None` if it has none or that takes more steps than
    /// `budget`.
    pub fn value(&self, text: &str, budget: &mut u64) -> Option<Value> {
        match &self.kind {
            Kind::Text => Some(self.stripped(text).into()),
            Kind::Integer => integer(text.trim_matches(is_space)).map(Value::Number),
            Kind::Number => {
                let number: f64 = text.trim_matches(is_space).parse().ok()?;
                Number::from_f64(number).map(Value::Number)
            }
            Kind::Truth => {
                let text = self.stripped(text).to_lowercase();
                Some(matches!(text.as_str(), "true" | "1").into())
            }
            Kind::Json { unquoted_keys, delimiters, allows_text } => {
                match json(text, *unquoted_keys, delimiters) {
                    None if *allows_text => Some(self.stripped(text).into()),
                    value => value,
                }
            }
            Kind::Tags { pattern, value, merges } => {
                let mut found = Map::new();
                let mut merged = Vec::new();
                let mut pairs = Vec::new();
                pattern.for_each_match(text, budget, |it| {
                    let group = |wanted: &str| {
                        let mut groups = it.groups(pattern);
                        groups.find_map(|(name, at)| (name == wanted).then_some(at))
                    };
                    pairs.push((group("key"), group("value")));
                    true
                })?;
                for (key, inside) in pairs {
                    let key = text.get(key?)?;
                    let inside = inside.map_or(Some(""), |at| text.get(at))?;
                    let value = value_by(value, inside, budget)?;
                    match found.get_mut(key).filter(|_| *merges) {
                        Some(Value::Array(values)) if merged.iter().any(|it| it == key) => {
                            values.push(value);
                        }
                        Some(first) => {
                            *first = Value::Array(vec![first.take(), value]);
                            merged.push(key.to_owned());
                        }
                        None => {
                            found.insert(key.to_owned(), value);
                        }
                    }
                }
                Some(Value::Object(found))
            }
            Kind::Lines { between_lines, between, value } => {
                let mut found = Map::new();
                for line in text.split(between_lines.as_str()) {
                    let Some((key, inside)) = self.stripped(line).split_once(between.as_str())
                    else {
                        continue;
                    };
                    let value = value_by(value, self.stripped(inside), budget)?;
                    found.insert(self.stripped(key).to_owned(), value);
                }
                Some(Value::Object(found))
            }
            Kind::Calls => call_list(text),
        }
    }

    fn stripped<'a>(&self, text: &'a str) -> &'a str {
        match self.strips {
            true => text.trim_matches(is_space),
            false => text,
        }
    }
}

fn value_by(content: &Option<Box<Content>>, text: &str, budget: &mut u64) -> Option<Value> {
    match content {
        Some(content) => content.value(text, budget),
        None => Some(text.into()),
    }
}

/// Whether Python's `strip` takes a character away.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

fn delimiters_of(pairs: Option<&Value>) -> Result<Vec<(String, String)>> {
    let wrong = || Error::unsupported("string_delims is no list of pairs of texts");
    let pairs = match pairs {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(pairs) => pairs.as_array().ok_or_else(wrong)?,
    };
    let mut found = Vec::new();
    for pair in pairs {
        match pair.as_array().map(Vec::as_slice) {
            Some([Value::String(open), Value::String(close)])
                if !(open.is_empty() || close.is_empty()) =>
            {
                found.push((open.clone(), close.clone()));
            }
            _ => return Err(wrong()),
        }
    }
    Ok(found)
}

/// Returns an integer as Python's `int` takes it, within 64 bits.
fn integer(text: &str) -> Option<Number> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_grouped = !(digits.starts_with('_') || digits.ends_with('_') || digits.contains("__"));
    let plain = text.replace('_', "");
    let plain = plain.strip_prefix('+').unwrap_or(&plain);
    let signed = plain.parse::<i64>().map(Number::from);
    signed.or_else(|_| plain.parse::<u64>().map(Number::from)).ok().filter(|_| is_grouped)
}

/// Marks the place of a string that has been taken out. JSON has neither outside of strings.
const OPEN: char = '\x01';
const CLOSE: char = '\x02';

fn json(text: &str, unquoted_keys: bool, delimiters: &[(String, String)]) -> Option<Value> {
    if delimiters.is_empty() && !unquoted_keys {
        return serde_json::from_str(text).ok();
    }
    if !delimiters.is_empty() && text.contains([OPEN, CLOSE]) {
        return None;
    }
    let mut strings = Vec::new();
    let mut working = text.to_owned();
    for (open, close) in delimiters {
        let mut replaced = String::with_capacity(working.len());
        let mut rest = working.as_str();
        while let Some((before, after)) = rest.split_once(open.as_str()) {
            let Some((inside, after)) = after.split_once(close.as_str()) else { break };
            replaced.push_str(before);
            replaced.push_str(&format!("{OPEN}{}{CLOSE}", strings.len()));
            strings.push(inside.to_owned());
            rest = after;
        }
        replaced.push_str(rest);
        working = replaced;
    }
    if unquoted_keys {
        working = with_quoted_keys(&working);
    }
    let mut whole = String::with_capacity(working.len());
    let mut rest = working.as_str();
    while let Some((before, after)) = rest.split_once(OPEN) {
        let (number, after) = after.split_once(CLOSE)?;
        whole.push_str(before);
        let string = strings.get(number.parse::<usize>().ok()?)?;
        whole.push_str(&Value::from(string.as_str()).to_string());
        rest = after;
    }
    whole.push_str(rest);
    serde_json::from_str(&whole).ok()
}

/// Puts quotes around names of members that have none: words between a brace or a comma and a colon,
/// outside of strings.
fn with_quoted_keys(text: &str) -> String {
    let mut found = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(at) = rest.find(['"', '{', ',']) {
        let (before, from) = rest.split_at(at);
        found.push_str(before);
        if let Some(inside) = from.strip_prefix('"') {
            let len = string_len(inside).map_or(1, |len| len + 1);
            found.push_str(from.get(..len).unwrap_or(from));
            rest = from.get(len..).unwrap_or_default();
            continue;
        }
        found.push_str(from.get(..1).unwrap_or_default());
        rest = from.get(1..).unwrap_or_default();
        let word = rest.trim_start_matches(is_space);
        let after_word = word.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        let len = word.len() - after_word.len();
        if len > 0 && after_word.trim_start_matches(is_space).starts_with(':') {
            found.push('"');
            found.push_str(word.get(..len).unwrap_or_default());
            found.push('"');
            rest = after_word;
        }
    }
    found.push_str(rest);
    found
}

/// Returns the bytes of a string after its opening quote, with the closing one.
fn string_len(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The shape that a value is put into, in which `{name}` stands for a value.
#[derive(Clone, Debug)]
pub(super) struct Transform {
    shape: Value,
    /// Whether each element of a list is put into one, with its members as the values.
    each: bool,
}

impl Transform {
    /// Reads `transform`. Texts with a placeholder and something else are refused.
    pub fn new(shape: &Value, each: bool) -> Result<Self> {
        check_placeholders(shape)?;
        Ok(Transform { shape: shape.clone(), each })
    }

    /// Returns the value in its shape, or `None` if a placeholder stands for nothing.
    pub fn apply(&self, value: Value, groups: &[(String, String)]) -> Option<Value> {
        let mut scope = Map::new();
        for (name, text) in groups {
            scope.insert(name.clone(), Value::from(text.as_str()));
        }
        if !self.each {
            scope.insert("content".to_owned(), value);
            return filled(&self.shape, &scope);
        }
        let Value::Array(items) = value else { return None };
        let mut shaped = Vec::new();
        for item in items {
            let Value::Object(members) = item else { return None };
            let mut scope = scope.clone();
            scope.extend(members);
            shaped.push(filled(&self.shape, &scope)?);
        }
        Some(Value::Array(shaped))
    }
}

fn filled(shape: &Value, scope: &Map<String, Value>) -> Option<Value> {
    match shape {
        Value::Object(members) => {
            let members =
                members.iter().map(|(key, part)| Some((key.clone(), filled(part, scope)?)));
            members.collect::<Option<Map<_, _>>>().map(Value::Object)
        }
        Value::Array(parts) => {
            parts.iter().map(|part| filled(part, scope)).collect::<Option<_>>().map(Value::Array)
        }
        Value::String(text) => match placeholder(text) {
            Some(path) => {
                let mut names = path.split('.');
                let root = scope.get(names.next()?)?;
                names.try_fold(root, |value, name| value.as_object()?.get(name)).cloned()
            }
            None => Some(shape.clone()),
        },
        _ => Some(shape.clone()),
    }
}

/// Returns the names between the braces, if the whole text is a placeholder.
fn placeholder(text: &str) -> Option<&str> {
    let path = text.strip_prefix('{')?.strip_suffix('}')?;
    let is_name =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    path.split('.').all(is_name).then_some(path)
}

fn check_placeholders(shape: &Value) -> Result<()> {
    match shape {
        Value::Object(members) => members.values().try_for_each(check_placeholders),
        Value::Array(parts) => parts.iter().try_for_each(check_placeholders),
        Value::String(text) if placeholder(text).is_none() => {
            let mut inside = text.match_indices('{').filter_map(|(at, _)| {
                let from = text.get(at..)?;
                placeholder(from.get(..=from.find('}')?)?)
            });
            match inside.next() {
                Some(_) => {
                    Err(Error::unsupported("a text is neither a placeholder nor without one"))
                }
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}
