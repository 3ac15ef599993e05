//! Calls after a mark: a list of them, or names with arguments.

use super::call_object::CallObject;
use super::event::AnswerPart;
use super::json::{is_blank, push_control, Scanner, Step};
use super::tag::{begins, ARGUMENTS_MARK, ID_MARK};
use super::tagged_state::{After, State, TaggedParser, MAX_BLANKS};

/// The longest name of a tool, in bytes, where nothing else ends it.
const MAX_NAME_BYTES: usize = 256;
/// The longest id that a model writes before arguments, with its tags.
const MAX_ID_BYTES: usize = 128;

impl TaggedParser {
    pub(super) fn marked(&mut self, text: &str, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.aside.push_str(text.get(..skipped).unwrap_or_default());
        match rest.chars().next() {
            None => {
                self.state = State::Marked;
                (skipped, false)
            }
            Some('[') => {
                self.aside.push('[');
                self.state = State::List;
                (skipped + 1, true)
            }
            Some(c) if is_of_name(c) => {
                self.state = State::MarkedName;
                (skipped, true)
            }
            Some(_) => {
                self.give_back(parts);
                (skipped, true)
            }
        }
    }

    pub(super) fn list(&mut self, text: &str, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let rest = text.trim_start_matches(|c| is_blank(c) || c == ',');
        let skipped = text.len() - rest.len();
        if !self.aside.is_empty() {
            self.aside.push_str(text.get(..skipped).unwrap_or_default());
        }
        match rest.chars().next() {
            None => {
                self.state = State::List;
                (skipped, false)
            }
            Some('{') => {
                self.state = State::Object(Box::new(CallObject::new(false)), After::List);
                (skipped, true)
            }
            Some(']') if self.aside.is_empty() => (skipped + 1, true),
            Some(_) => {
                self.give_back(parts);
                (skipped, true)
            }
        }
    }

    pub(super) fn marked_name(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let after = text.trim_start_matches(is_of_name);
        let name = text.get(..text.len() - after.len()).unwrap_or_default();
        // `None`: more must come to tell where the arguments begin, if they do.
        let arguments = || -> Option<Option<&str>> {
            if after.is_empty() && !is_whole {
                return None;
            }
            let mut rest = after;
            if begins(rest, ID_MARK, is_whole)? {
                let Some(at) = rest.find(ARGUMENTS_MARK) else {
                    return if rest.len() > MAX_ID_BYTES || is_whole { Some(None) } else { None };
                };
                rest = rest.get(at..).filter(|_| at <= MAX_ID_BYTES).unwrap_or_default();
            }
            if begins(rest, ARGUMENTS_MARK, is_whole)? {
                rest = rest.get(ARGUMENTS_MARK.len()..).unwrap_or_default();
            }
            let inside = rest.trim_start_matches(is_blank);
            let is_near = rest.len() - inside.len() <= MAX_BLANKS;
            if inside.is_empty() && is_near && !is_whole {
                return None;
            }
            Some(Some(inside).filter(|inside| is_near && inside.starts_with('{')))
        };
        let found = if name.len() > MAX_NAME_BYTES { Some(None) } else { arguments() };
        match found {
            None => {
                self.state = State::MarkedName;
                (0, false)
            }
            Some(None) => {
                self.give_back(parts);
                (0, true)
            }
            Some(Some(inside)) => {
                self.begin_call(name.to_owned(), parts);
                self.state = State::MarkedArguments(Box::new(Scanner::new()));
                (text.len() - inside.len(), true)
            }
        }
    }

    pub(super) fn marked_arguments(
        &mut self,
        mut scanner: Box<Scanner>,
        text: &str,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut piece = String::new();
        let mut copied = 0;
        for (at, byte) in text.bytes().enumerate() {
            let step = scanner.step(byte);
            if step == Step::Inside {
                continue;
            }
            let end = if step == Step::Last { at + 1 } else { at };
            piece.push_str(text.get(copied..end).unwrap_or_default());
            copied = at + 1;
            if step == Step::Control {
                push_control(&mut piece, byte);
                continue;
            }
            self.arguments(piece, parts);
            self.end_call(step == Step::Last, parts);
            self.state = State::Ended(After::Bare);
            return (end, true);
        }
        piece.push_str(text.get(copied..).unwrap_or_default());
        self.arguments(piece, parts);
        self.state = State::MarkedArguments(scanner);
        (text.len(), false)
    }
}

/// Whether names of tools have this character, where no tag ends them.
fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.' | '/' | ':')
}
