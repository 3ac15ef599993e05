//! Special tokens that are written in a conversation, as plain text.
//!
//! A chat template puts the contents of messages between special tokens, and the tokenizer cannot
//! tell a `<|im_end|>` of the template from one that a user has typed. So a mark, a character that
//! occurs nowhere in the conversation, is put into each spelling in the conversation before it is
//! rendered: the tokenizer then finds the template's own, and the marks are taken out of the text
//! between them before it is split into words. Text without such spellings is not changed, and has
//! the tokens that it always has.
//!
//! A mark goes after the first character of a spelling, so that what templates do at the ends of
//! texts (trim, split at line breaks) is not disturbed. Half a spelling at the end of a text gets one too,
//! for templates that put several texts together.
//!
//! Not covered are templates that take something out of the middle of texts or change their letters (`replace`, `lower`), and
//! special tokens that are found after a normalizer that does: they can make a spelling of a text that had none.

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

use super::tokenizer_file::AddedTokenEntry;
use crate::error::{Error, Result};

/// Characters that Unicode keeps free for such purposes: no text has them.
const CANDIDATES: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A conversation, read from JSON.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// An array of messages.
    pub messages: Value,
    /// An array of tools.
    pub tools: Option<Value>,
    /// Further variables of the template. They are the program's own, and never marked.
    pub variables: Option<Map<String, Value>>,
}

/// The marks in a rendered text: none, or one character. In place of special tokens that are one
/// character each, which have no inside, there are further ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    mark: Option<char>,
    substitutes: Vec<(char, String)>,
}

impl Marks {
    /// Returns the replacement of each mark, for when the special tokens have been found.
    pub(super) fn replacements(&self) -> impl Iterator<Item = (char, &str)> {
        let substitutes = self.substitutes.iter().map(|(mark, text)| (*mark, text.as_str()));
        self.mark.map(|mark| (mark, "")).into_iter().chain(substitutes)
    }
}

/// The spellings that are special in a tokenizer.
pub(super) struct Spellings {
    /// All that say how text is meant: special tokens, and others in the form of a tag, such as
    /// `<tool_call>`.
    all: Option<Finder>,
    /// Only those that end and begin turns: assistants write the others themselves.
    special: Option<Finder>,
}

struct Finder {
    /// Finds every spelling, those within others included.
    automaton: AhoCorasick,
    /// Sorted.
    texts: Vec<String>,
}

impl Finder {
    fn new(mut texts: Vec<String>) -> Result<Option<Self>> {
        texts.sort();
        texts.dedup();
        if texts.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::new(&texts)
            .map_err(|e| Error::unsupported(format!("tokenizer.json: the added tokens: {e}")))?;
        Ok(Some(Finder { automaton, texts }))
    }

    /// Whether a spelling begins with this text.
    fn begins_one(&self, text: &str) -> bool {
        let at = self.texts.partition_point(|spelling| spelling.as_str() < text);
        self.texts.get(at).is_some_and(|spelling| spelling.starts_with(text))
    }

    /// Returns the places in a text where spellings begin, ascending, with those that are one character long;
    /// half a spelling at its end counts.
    fn places(&self, text: &str) -> Vec<(usize, Option<&str>)> {
        let mut places: Vec<(usize, Option<&str>)> = self
            .automaton
            .find_overlapping_iter(text)
            .map(|found| {
                let spelling = self.texts.get(found.pattern().as_usize()).map(String::as_str);
                (found.start(), spelling.filter(|spelling| is_single(spelling)))
            })
            .collect();
        let longest = self.texts.iter().map(String::len).max().unwrap_or(0);
        let tail = text.len().saturating_sub(longest.saturating_sub(1));
        let ends = (tail..text.len()).filter_map(|at| Some((at, text.get(at..)?)));
        let halves = ends.filter(|(_, end)| self.begins_one(end));
        places.extend(halves.map(|(at, _)| (at, None)));
        // If two have the same place, the one with a spelling of one character is kept.
        places.sort_by_key(|(at, single)| (*at, single.is_none()));
        places.dedup_by_key(|(at, _)| *at);
        places
    }
}

fn is_single(spelling: &str) -> bool {
    spelling.chars().nth(1).is_none()
}

impl Spellings {
    pub fn of(tokens: &[AddedTokenEntry]) -> Result<Self> {
        let is_tag = |text: &str| {
            (text.starts_with('<') && text.ends_with('>'))
                || (text.starts_with('[') && text.ends_with(']'))
        };
        let texts = |is_wanted: &dyn Fn(&AddedTokenEntry) -> bool| {
            let wanted =
                tokens.iter().filter(|token| !token.content.is_empty() && is_wanted(token));
            wanted.map(|token| token.content.clone()).collect()
        };
        Ok(Spellings {
            all: Finder::new(texts(&|token| token.special || is_tag(&token.content)))?,
            special: Finder::new(texts(&|token| token.special))?,
        })
    }

    /// Puts marks into a conversation.
    pub fn mark(&self, conversation: &mut Conversation) -> Result<Marks> {
        let mut used = Used::default();
        let Conversation { messages, tools, variables } = conversation;
        let mut is_needed = false;
        let mut look = |finder: Option<&Finder>, text: &str| {
            used.add(text);
            is_needed |= finder.is_some_and(|finder| !finder.places(text).is_empty());
        };
        self.each(messages, tools.as_mut(), &mut |finder, text| look(finder, text));
        for (key, value) in variables.iter_mut().flatten() {
            look(None, key);
            each_text(value, &mut |text| look(None, text));
        }
        if !is_needed {
            return Ok(Marks::default());
        }
        let mut free = CANDIDATES.filter(|mark| !used.has(*mark));
        let mut take = || {
            free.next().ok_or_else(|| {
                Error::invalid_argument(
                    "the messages have all of the noncharacters U+FDD0 to U+FDEF, which no text has: \
                     special tokens in them cannot be told from the template's",
                )
            })
        };
        let mut marks = Marks { mark: Some(take()?), substitutes: Vec::new() };
        let texts = self.all.iter().flat_map(|finder| &finder.texts);
        for single in texts.filter(|text| is_single(text)) {
            marks.substitutes.push((take()?, single.clone()));
        }
        self.each(messages, tools.as_mut(), &mut |finder, text| {
            if let Some(finder) = finder {
                marks.put(finder, text);
            }
        });
        Ok(marks)
    }

    /// Calls `f` for every text, with what finds spellings that are to be marked in it.
    fn each(
        &self,
        messages: &mut Value,
        tools: Option<&mut Value>,
        f: &mut dyn FnMut(Option<&Finder>, &mut String),
    ) {
        for message in messages.as_array_mut().into_iter().flatten() {
            let is_own = message.get("role").and_then(Value::as_str) == Some("assistant");
            let finder = if is_own { self.special.as_ref() } else { self.all.as_ref() };
            each_text(message, &mut |text| f(finder, text));
        }
        if let Some(tools) = tools {
            each_text(tools, &mut |text| f(self.all.as_ref(), text));
        }
    }
}

impl Marks {
    fn put(&self, finder: &Finder, text: &mut String) {
        let Some(mark) = self.mark else { return };
        let places = finder.places(text);
        if places.is_empty() {
            return;
        }
        let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut from = 0;
        for (at, single) in places {
            marked.push_str(text.get(from..at).unwrap_or_default());
            let first = text.get(at..).and_then(|rest| rest.chars().next());
            from = at + first.map_or(0, char::len_utf8);
            let substitute =
                self.substitutes.iter().find(|(_, text)| single == Some(text.as_str()));
            match (substitute, first) {
                (Some((substitute, _)), _) => marked.push(*substitute),
                (None, Some(first)) => marked.extend([first, mark]),
                (None, None) => {}
            }
        }
        marked.push_str(text.get(from..).unwrap_or_default());
        *text = marked;
    }
}

/// Calls `f` for every text in a value, keys included. (The depth is that of the JSON that it was read from.)
fn each_text(value: &mut Value, f: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(text) => f(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, f)),
        Value::Object(map) => {
            let before = std::mem::take(map);
            for (mut key, mut value) in before {
                f(&mut key);
                each_text(&mut value, f);
                map.insert(key, value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The candidates that texts have.
#[derive(Default)]
struct Used(u32);

impl Used {
    fn bit(mark: char) -> u32 {
        1 << (u32::from(mark) - u32::from(*CANDIDATES.start()))
    }

    fn add(&mut self, text: &str) {
        for mark in text.chars().filter(|c| CANDIDATES.contains(c)) {
            self.0 |= Self::bit(mark);
        }
    }

    fn has(&self, mark: char) -> bool {
        self.0 & Self::bit(mark) != 0
    }
}
