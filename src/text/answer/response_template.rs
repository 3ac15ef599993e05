//! The rules by which a model's answers are read, as `tokenizer_config.json` has them:
//! `response_template`, as Transformers defines it (docs/source/en/chat_response_parsing.md,
//! version 1).
//!
//! A template has fields, each with the marks between which its text stands. One field may have no
//! opening mark: what is in no other is its own. The text of a field is read and given a shape
//! (`region_value.rs`). The fields that mean something here are `content`, `reasoning_content`
//! (`reasoning`, `thinking`) and `tool_calls`; what stands in others is left out.

use serde_json::Value;

use super::pattern::Pattern;
use super::region_value::{Content, Transform};
use super::tag::THINK_TAGS;
use crate::error::{check_room, Context, Error, Result};
use crate::text::special_tokens::parse_config;

/// The most bytes of a template as JSON, of fields, and of texts for a mark.
const MAX_BYTES: usize = 64 << 10;
const MAX_FIELDS: usize = 32;
const MAX_MARKS: usize = 64;
/// More than the expressions of a template take together (`pattern.rs`).
const ROOM_BYTES: usize = 64 << 20;
/// The steps in which the beginning of a turn is looked for.
const ANCHOR_STEPS: u64 = 20_000_000;

/// The role of a field in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Content,
    Reasoning,
    Calls,
    Other,
}

#[derive(Clone, Debug)]
pub(super) struct Field {
    pub name: String,
    pub role: Role,
    /// `None`: text in no other field belongs to this one.
    pub open: Option<Pattern>,
    /// An opening mark, if there is one that is no expression.
    open_text: Option<String>,
    /// `None`: it goes on to the end.
    pub close: Option<Pattern>,
    pub content: Content,
    pub transform: Option<Transform>,
    /// The text between two texts of this field.
    pub join: String,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub struct ResponseTemplate {
    pub(super) fields: Vec<Field>,
    anchor: Pattern,
    /// All texts of the template, in which special tokens are looked for.
    texts: String,
}

impl ResponseTemplate {
    /// Returns the template of a `tokenizer_config.json`; `None` if it has none.
    pub fn from_config(config_json: &[u8]) -> Result<Option<Self>> {
        let config = parse_config(config_json)?;
        check_room(ROOM_BYTES, "a response template")?;
        match config.get("response_template") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => Self::new(value).context(|| "response_template").map(Some),
        }
    }

    /// Reads a template. What is not supported is an error that names the key.
    pub fn new(value: &Value) -> Result<Self> {
        let bytes = value.to_string().len();
        if bytes > MAX_BYTES {
            return Err(Error::unsupported(format!(
                "it has {bytes} bytes, at most {MAX_BYTES} are supported"
            )));
        }
        let known = ["version", "defaults", "fields", "start_anchor", "start_anchor_pattern"];
        check_keys(value, &known)?;
        if value.get("version").is_some_and(|version| *version != 1) {
            return Err(Error::unsupported("version is not 1"));
        }
        let fields = value.get("fields").and_then(Value::as_object).filter(|it| !it.is_empty());
        let fields =
            fields.ok_or_else(|| Error::invalid_file("fields is no object with members"))?;
        if fields.len() > MAX_FIELDS {
            return Err(Error::unsupported(format!(
                "fields has {} members, at most {MAX_FIELDS} are supported",
                fields.len()
            )));
        }
        let mut read = Vec::new();
        for (name, field) in fields {
            let path = || format!("fields.{}", crate::text::shortened(name));
            read.push(Field::new(name, field).context(path)?);
        }
        if read.iter().filter(|field| field.open.is_none()).count() > 1 {
            return Err(Error::invalid_file("fields has two members without an opening mark"));
        }
        let anchor = marks_of(value, "start_anchor", "start_anchor_pattern")?;
        let anchor = anchor.ok_or_else(|| Error::invalid_file("start_anchor is missing"))?;
        let mut texts = String::new();
        push_texts(value, &mut texts);
        Ok(ResponseTemplate { fields: read, anchor, texts })
    }

    /// Returns the names of fields whose text is left out of answers.
    pub fn unknown_fields(&self) -> impl Iterator<Item = &str> {
        let others = self.fields.iter().filter(|field| field.role == Role::Other);
        others.map(|field| field.name.as_str())
    }

    /// Returns the end of a prompt that belongs to the answer: what follows the last beginning of a turn, or
    /// nothing if there is none.
    pub fn begun<'a>(&self, prompt: &'a str) -> &'a str {
        let (mut end, mut steps) = (prompt.len(), ANCHOR_STEPS);
        // A prompt that takes more steps has nothing of the answer.
        let found = self.anchor.for_each_match(prompt, &mut steps, |anchor| {
            end = anchor.end;
            true
        });
        found.and_then(|()| prompt.get(end..)).unwrap_or_default()
    }

    /// Returns the assumed beginning of a text whose prompt is not known: the mark of a thought, if
    /// the text has the end of one and not the beginning.
    pub fn begun_before(&self, text: &str) -> String {
        let first = |pattern: &Pattern| {
            let (mut at, mut steps) = (None, ANCHOR_STEPS);
            pattern.for_each_match(text, &mut steps, |found| {
                at = Some(found.start);
                false
            })?;
            at
        };
        let mut thoughts = self.fields.iter().filter(|field| field.role == Role::Reasoning);
        let opened = thoughts.find_map(|field| {
            let end = first(field.close.as_ref()?)?;
            let is_open = field.open.as_ref().and_then(first).is_none_or(|begin| end < begin);
            field.open_text.clone().filter(|_| is_open)
        });
        opened.unwrap_or_default()
    }

    /// Whether thoughts stand between tags that are known without the template, or nowhere.
    pub fn has_known_thoughts(&self) -> bool {
        let mut thoughts = self.fields.iter().filter(|field| field.role == Role::Reasoning);
        thoughts.all(|field| {
            let open = field.open_text.as_deref().map(str::trim);
            THINK_TAGS.iter().any(|(tag, _)| open == Some(*tag))
        })
    }

    /// Whether a special token stands in the template.
    pub(super) fn is_mark(&self, token: &str) -> bool {
        !token.is_empty() && self.texts.contains(token)
    }
}

impl Field {
    fn new(name: &str, value: &Value) -> Result<Self> {
        let known = [
            "open",
            "open_pattern",
            "close",
            "close_pattern",
            "content",
            "content_args",
            "repeats",
            "join",
            "optional",
            "transform",
            "transform_each",
        ];
        check_keys(value, &known)?;
        let role = match name {
            "content" => Role::Content,
            "reasoning_content" | "reasoning" | "thinking" => Role::Reasoning,
            "tool_calls" => Role::Calls,
            _ => Role::Other,
        };
        let open = marks_of(value, "open", "open_pattern")?;
        if open.as_ref().is_some_and(Pattern::matches_nothing) {
            return Err(Error::unsupported("open_pattern matches an empty text"));
        }
        let content = match value.get("content") {
            None => "text",
            Some(kind) => kind.as_str().ok_or_else(|| Error::invalid_file("content is no text"))?,
        };
        let args = value.get("content_args").unwrap_or(&Value::Null);
        let content = Content::new(content, args).context(|| "content")?;
        let each = value.get("transform_each").and_then(Value::as_bool).unwrap_or(false);
        let transform = value.get("transform").filter(|shape| !shape.is_null());
        let transform = transform.map(|shape| Transform::new(shape, each)).transpose();
        let join = value.get("join").and_then(Value::as_str).unwrap_or_default();
        Ok(Field {
            name: name.to_owned(),
            role,
            open,
            open_text: value.get("open").and_then(first_text),
            close: marks_of(value, "close", "close_pattern")?,
            content,
            transform: transform.context(|| "transform")?,
            join: join.to_owned(),
        })
    }
}

fn first_text(mark: &Value) -> Option<String> {
    let first = mark.as_array().map_or(Some(mark), |marks| marks.first());
    first.and_then(Value::as_str).map(str::to_owned)
}

fn check_keys(value: &Value, known: &[&str]) -> Result<()> {
    let members = value.as_object().ok_or_else(|| Error::invalid_file("it is no object"))?;
    match members.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => {
            let key = crate::text::shortened(key);
            Err(Error::unsupported(format!("the key {key:?} is not supported")))
        }
        None => Ok(()),
    }
}

/// Returns a mark: a text or several, or an expression. `None` if there is neither.
fn marks_of(value: &Value, texts: &str, pattern: &str) -> Result<Option<Pattern>> {
    let wrong = |key: &str| Error::invalid_file(format!("{key} is no text or an empty one"));
    match (value.get(texts), value.get(pattern)) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => {
            Err(Error::invalid_file(format!("there are both {texts} and {pattern}")))
        }
        (None, Some(expression)) => {
            let expression = expression.as_str().ok_or_else(|| wrong(pattern))?;
            Pattern::new(expression).context(|| pattern.to_owned()).map(Some)
        }
        (Some(marks), None) => {
            let marks = match marks {
                Value::Array(marks) => marks.as_slice(),
                mark => std::slice::from_ref(mark),
            };
            let marks: Option<Vec<&str>> =
                marks.iter().map(|mark| mark.as_str().filter(|text| !text.is_empty())).collect();
            let is_right = |marks: &Vec<&str>| (1..=MAX_MARKS).contains(&marks.len());
            let marks = marks.filter(is_right).ok_or_else(|| wrong(texts))?;
            Pattern::any_of(&marks).context(|| texts.to_owned()).map(Some)
        }
    }
}

/// Appends all texts of a value, with nothing of how expressions write punctuation.
fn push_texts(value: &Value, to: &mut String) {
    match value {
        Value::String(text) => {
            to.extend(text.chars().filter(|&character| character != '\\'));
            to.push('\n');
        }
        Value::Array(values) => values.iter().for_each(|value| push_texts(value, to)),
        Value::Object(members) => members.values().for_each(|value| push_texts(value, to)),
        _ => {}
    }
}
