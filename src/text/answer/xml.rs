//! Reads the inside of `<function=NAME>...</function>`, whose parameters are plain text between tags.
//!
//! Nothing is escaped there, and values mention tags: code that is about them. So a tag ends a value
//! only where what comes next goes on as a call does, and not within a string of a list or an object.

use super::json::{is_blank, push_escaped, Scanner, Step};
use super::tag::{begins, find, Found};
use super::types::{Kind, Kinds, ToolTypes};

/// The longest name of a parameter, in bytes.
const MAX_KEY_BYTES: usize = 256;
/// White space between two tags, in bytes, beyond which they do not belong together.
const MAX_BLANKS: usize = 64;

pub(super) const END_OF_VALUE: &str = "</parameter>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const END_OF_FUNCTION: &str = "</function>";
const END_OF_CALL: &str = "</tool_call>";

/// The outcome of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// There is more to do with the text.
    Again,
    /// More text is needed.
    More,
    /// The call has ended; whether by its own end.
    Over(bool),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Between parameters.
    Between,
    Key,
    /// At the beginning of a value, where a line break does not count.
    Value,
    /// Within a value whose kinds are these: told as it comes if it is text, else when it is whole.
    Inside(Kinds),
}

/// See the module's description.
#[derive(Clone, Debug)]
pub(super) struct XmlCall {
    tool: String,
    key: String,
    place: Place,
    num_parameters: usize,
    /// Whether something was not understood and left out.
    is_damaged: bool,
    /// Whether the value has no text so far that was told.
    is_fresh: bool,
    /// The bytes of the value in which its end is not.
    searched: usize,
    /// The value as a list or an object of JSON, while it can be one, and how many bytes of it were read as such.
    structure: Option<(Scanner, usize)>,
}

impl XmlCall {
    pub fn new(tool: String) -> Self {
        XmlCall {
            tool,
            key: String::new(),
            place: Place::Between,
            num_parameters: 0,
            is_damaged: false,
            is_fresh: true,
            searched: 0,
            structure: None,
        }
    }

    /// Takes the beginning of `text`; returns how many bytes of it. Appends to `out` what they mean
    /// as JSON. `is_whole`: nothing follows the text.
    pub fn step(
        &mut self,
        text: &str,
        is_whole: bool,
        types: &ToolTypes,
        out: &mut String,
    ) -> (usize, Progress) {
        match self.place.clone() {
            Place::Between => self.between(text, is_whole, out),
            Place::Key => self.take_key(text, is_whole, out),
            Place::Value => {
                if text.is_empty() && !is_whole {
                    return (0, Progress::More);
                }
                let kinds = types.of_parameter(&self.tool, &self.key);
                if kinds.is_text_alone() {
                    out.push('"');
                }
                (self.is_fresh, self.searched) = (true, 0);
                let may_be = kinds.tried().contains(&Kind::Structure);
                self.structure = may_be.then(|| (Scanner::new(), 0));
                self.place = Place::Inside(kinds);
                (usize::from(text.starts_with('\n')), Progress::Again)
            }
            Place::Inside(kinds) if kinds.is_text_alone() => {
                self.tell_value(text, is_whole, types, out)
            }
            Place::Inside(kinds) => self.hold_value(text, is_whole, types, &kinds, out),
        }
    }

    fn between(&mut self, text: &str, is_whole: bool, out: &mut String) -> (usize, Progress) {
        let tags = [PARAMETER, END_OF_FUNCTION, END_OF_CALL, "<tool_call>", "<function="];
        let found = find(text, &tags, is_whole);
        let (skipped, progress) = match found {
            Found::At(at, 0) => {
                self.place = Place::Key;
                (at, Progress::Again)
            }
            Found::At(at, 1) => (at, Progress::Over(true)),
            Found::At(at, 2) => (at, Progress::Over(true)),
            Found::At(at, _) => (at, Progress::Over(false)),
            Found::Maybe(at) => (at, Progress::More),
            Found::Nowhere if is_whole => (text.len(), Progress::Over(false)),
            Found::Nowhere => (text.len(), Progress::More),
        };
        self.is_damaged |= !text.get(..skipped).unwrap_or_default().trim().is_empty();
        let taken = match found {
            Found::At(at, 0) => at + PARAMETER.len(),
            Found::At(at, 1) => at + END_OF_FUNCTION.len(),
            _ => skipped,
        };
        match progress {
            Progress::Over(is_complete) => {
                out.push_str(if self.num_parameters == 0 { "{}" } else { "}" });
                (taken, Progress::Over(is_complete && !self.is_damaged))
            }
            other => (taken, other),
        }
    }

    fn take_key(&mut self, text: &str, is_whole: bool, out: &mut String) -> (usize, Progress) {
        match key_of(text, is_whole) {
            None => (0, Progress::More),
            Some("") => {
                self.is_damaged = true;
                self.place = Place::Between;
                (0, Progress::Again)
            }
            Some(key) => {
                out.push_str(if self.num_parameters == 0 { "{\"" } else { ", \"" });
                push_escaped(out, key);
                out.push_str("\": ");
                self.num_parameters += 1;
                self.key = key.to_owned();
                self.place = Place::Value;
                (key.len() + 1, Progress::Again)
            }
        }
    }

    fn tell_value(
        &mut self,
        text: &str,
        is_whole: bool,
        types: &ToolTypes,
        out: &mut String,
    ) -> (usize, Progress) {
        match self.end_of_value(text, is_whole, types) {
            End::At { value, next } => {
                push_escaped(out, text.get(..value).unwrap_or_default());
                out.push('"');
                self.place = Place::Between;
                (next, Progress::Again)
            }
            End::Maybe(at) => {
                let told = without_line_break(text, at);
                push_escaped(out, text.get(..told).unwrap_or_default());
                self.is_fresh &= told == 0;
                (told, Progress::More)
            }
        }
    }

    fn hold_value(
        &mut self,
        text: &str,
        is_whole: bool,
        types: &ToolTypes,
        kinds: &Kinds,
        out: &mut String,
    ) -> (usize, Progress) {
        match self.end_of_value(text, is_whole, types) {
            End::At { value, next } => {
                kinds.push_value(out, text.get(..value).unwrap_or_default());
                self.place = Place::Between;
                (next, Progress::Again)
            }
            End::Maybe(at) => {
                self.searched = at;
                (0, Progress::More)
            }
        }
    }

    /// Returns where the value ends, and where the text goes on after the tag that ends it; or from where on it may
    /// end. The line break before the tag is no part of the value.
    fn end_of_value(&mut self, text: &str, is_whole: bool, types: &ToolTypes) -> End {
        let unsearched = text.get(self.searched..).unwrap_or_default();
        for (offset, _) in unsearched.match_indices('<') {
            let at = self.searched + offset;
            if self.is_in_string(text, at) {
                continue;
            }
            let (before, rest) = text.split_at(at);
            let is_line = if before.is_empty() { self.is_fresh } else { before.ends_with('\n') };
            match self.tag_ends(rest, is_line, is_whole, types) {
                None => return End::Maybe(at),
                Some(None) => {}
                Some(Some(tag)) => {
                    return End::At { value: without_line_break(text, at), next: at + tag }
                }
            }
        }
        if is_whole {
            End::At { value: without_line_break(text, text.len()), next: text.len() }
        } else {
            End::Maybe(text.len())
        }
    }

    /// Whether a byte of the value is in a string of a list or an object.
    fn is_in_string(&mut self, text: &str, at: usize) -> bool {
        let Some((scanner, read)) = &mut self.structure else { return false };
        let is_structure = text.trim_start_matches(is_blank).starts_with(['{', '[']);
        let unread = text.as_bytes().get(*read..at).unwrap_or_default();
        *read = at;
        // A line break in a string is no JSON: its end was forgotten, or it is no string.
        if is_structure && unread.iter().all(|byte| scanner.step(*byte) == Step::Inside) {
            return scanner.is_in_string();
        }
        self.structure = None;
        false
    }

    /// Whether a value ends before `rest`, which begins with "<": the bytes of the tag that is taken
    /// with it. `None`: that depends on what follows.
    fn tag_ends(
        &self,
        rest: &str,
        is_line: bool,
        is_whole: bool,
        types: &ToolTypes,
    ) -> Option<Option<usize>> {
        if begins(rest, END_OF_VALUE, is_whole)? {
            let follow = [PARAMETER, END_OF_FUNCTION, END_OF_CALL];
            let after = rest.get(END_OF_VALUE.len()..).unwrap_or_default();
            return Some(goes_on(after, &follow, is_whole)?.then_some(END_OF_VALUE.len()));
        }
        if begins(rest, END_OF_FUNCTION, is_whole)? {
            let after = rest.get(END_OF_FUNCTION.len()..).unwrap_or_default();
            return Some(goes_on(after, &[END_OF_CALL], is_whole)?.then_some(0));
        }
        if is_line && begins(rest, PARAMETER, is_whole)? {
            let key = key_of(rest.get(PARAMETER.len()..).unwrap_or_default(), is_whole)?;
            let is_new = !key.is_empty() && key != self.key && types.may_have(&self.tool, key);
            return Some(is_new.then_some(0));
        }
        Some(None)
    }
}

enum End {
    At { value: usize, next: usize },
    Maybe(usize),
}

/// Whether a text goes on with one of the tags, or ends. `None`: more must come.
fn goes_on(text: &str, tags: &[&str], is_whole: bool) -> Option<bool> {
    let rest = text.trim_start();
    if text.len() - rest.len() > MAX_BLANKS {
        return Some(false);
    }
    if rest.is_empty() {
        return is_whole.then_some(true);
    }
    let mut is_open = false;
    for tag in tags {
        match begins(rest, tag, is_whole) {
            Some(true) => return Some(true),
            Some(false) => {}
            None => is_open = true,
        }
    }
    (!is_open).then_some(false)
}

/// Returns the name before ">" at the beginning of a text, empty if there is none. `None`: more
/// must come.
pub(super) fn key_of(text: &str, is_whole: bool) -> Option<&str> {
    match text.find(['>', '<', '\n']) {
        Some(end) if end <= MAX_KEY_BYTES && text.as_bytes().get(end) == Some(&b'>') => {
            text.get(..end)
        }
        None if text.len() <= MAX_KEY_BYTES && !is_whole => None,
        _ => Some(""),
    }
}

/// Returns the end of a text up to `end`, less a line break there.
fn without_line_break(text: &str, end: usize) -> usize {
    let value = text.get(..end).unwrap_or_default();
    value.strip_suffix('\n').map_or(end, str::len)
}
