//! Calls between tags, as JSON objects or as functions with parameters, and objects alone.

use super::call_object::{CallObject, News, Outcome};
use super::event::AnswerPart;
use super::json::is_blank;
use super::tag::{begins, find, Found, CALL, END_OF_CALL, FUNCTION};
use super::tagged_state::{After, State, TaggedParser};
use super::xml::{key_of, Progress, XmlCall};

impl TaggedParser {
    pub(super) fn opened(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.aside.push_str(text.get(..skipped).unwrap_or_default());
        self.state = State::Opened;
        if rest.is_empty() {
            return (skipped, false);
        }
        if rest.starts_with('{') {
            self.state = State::Object(Box::new(CallObject::new(false)), After::Tag);
            return (skipped, true);
        }
        match begins(rest, FUNCTION, is_whole) {
            Some(true) => {
                self.aside.push_str(FUNCTION);
                self.state = State::FunctionName;
                (skipped + FUNCTION.len(), true)
            }
            Some(false) => {
                self.give_back(parts);
                (skipped, true)
            }
            None => (skipped, false),
        }
    }

    pub(super) fn function_name(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        match key_of(text, is_whole) {
            None => {
                self.state = State::FunctionName;
                (0, false)
            }
            Some(name) if name.trim().is_empty() || name.contains(char::is_control) => {
                self.give_back(parts);
                (0, true)
            }
            Some(name) => {
                self.begin_call(name.trim().to_owned(), parts);
                self.state = State::Function(Box::new(XmlCall::new(name.trim().to_owned())));
                (name.len() + 1, true)
            }
        }
    }

    pub(super) fn function(
        &mut self,
        mut call: Box<XmlCall>,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut piece = String::new();
        let (taken, progress) = call.step(text, is_whole, &self.rules.types, &mut piece);
        self.arguments(piece, parts);
        match progress {
            Progress::Over(is_complete) => {
                self.end_call(is_complete, parts);
                self.state = State::Ended(After::Tag);
            }
            Progress::Again | Progress::More => self.state = State::Function(call),
        }
        (taken, progress != Progress::More)
    }

    pub(super) fn object(
        &mut self,
        mut object: Box<CallObject>,
        after: After,
        text: &str,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut news = Vec::new();
        let (taken, outcome) = object.push(text, &mut news);
        for news in news {
            match news {
                News::Begin(name) => self.begin_call(name, parts),
                News::Arguments(piece) => self.arguments(piece, parts),
            }
        }
        match outcome {
            Outcome::More => {
                self.state = State::Object(object, after);
                return (taken, false);
            }
            Outcome::Over => {
                self.end_call(true, parts);
                self.state = State::Ended(after);
            }
            Outcome::Bad | Outcome::Foreign if object.has_begun() => {
                self.end_call(false, parts);
                self.state = if after == After::Tag { State::Skipping } else { State::Content };
            }
            Outcome::Bad => {
                self.aside.push_str(&object.into_text());
                self.give_back(parts);
            }
            Outcome::Foreign => {
                self.state = State::Passing { open: 0, in_string: false, escaped: false };
                let (passed, _) = self.pass(&object.into_text(), (0, false, false), parts);
                debug_assert!(passed > 0);
            }
        }
        (taken, true)
    }

    /// Takes text of an object that is no call, up to its last brace.
    pub(super) fn pass(
        &mut self,
        text: &str,
        (mut open, mut in_string, mut escaped): (usize, bool, bool),
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                b'{' if !in_string => open += 1,
                b'}' if !in_string => open = open.saturating_sub(1),
                _ => {}
            }
            if open == 0 {
                self.content(text.get(..=at).unwrap_or_default(), parts);
                self.state = State::Content;
                return (at + 1, true);
            }
        }
        self.content(text, parts);
        self.state = State::Passing { open, in_string, escaped };
        (text.len(), false)
    }

    pub(super) fn skip(&mut self, text: &str, is_whole: bool) -> (usize, bool) {
        match find(text, &[END_OF_CALL, CALL], is_whole) {
            Found::At(at, 0) => (at + END_OF_CALL.len(), true),
            Found::At(at, _) => (at, true),
            Found::Maybe(at) => {
                self.state = State::Skipping;
                (at, false)
            }
            Found::Nowhere => {
                self.state = State::Skipping;
                (text.len(), false)
            }
        }
    }

    pub(super) fn ended(&mut self, after: After, text: &str, is_whole: bool) -> (usize, bool) {
        if after == After::List {
            self.state = State::List;
            return (0, true);
        }
        let rest = text.trim_start_matches(|c| match after {
            // Models close more braces than they have opened.
            After::Tag => is_blank(c) || c == '}',
            _ => is_blank(c) || c == ';',
        });
        let skipped = text.len() - rest.len();
        self.state = State::Ended(after);
        if rest.is_empty() {
            return (skipped, false);
        }
        let tag =
            if after == After::Tag { begins(rest, END_OF_CALL, is_whole) } else { Some(false) };
        let Some(is_closed) = tag else { return (skipped, false) };
        self.state = State::Content;
        (skipped + if is_closed { END_OF_CALL.len() } else { 0 }, true)
    }
}
