//! Thoughts, and the text of answers up to the calls in it.

use super::call_object::CallObject;
use super::event::AnswerPart;
use super::json::is_blank;
use super::rules::ToolForm;
use super::tag::{begins, find, Found, CALL, CODE_MARK, FUNCTION, MARK, THINK_TAGS};
use super::tagged_state::{After, State, TaggedParser, MAX_BLANKS};

impl TaggedParser {
    pub(super) fn start(&mut self, text: &str, is_open: bool, is_whole: bool) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.blanks.push_str(text.get(..skipped).unwrap_or_default());
        self.state = State::Start(is_open);
        if rest.is_empty() && !is_whole {
            return (skipped, false);
        }
        for (tag, _) in THINK_TAGS {
            match begins(rest, tag, is_whole) {
                Some(true) => {
                    self.state = State::Thought;
                    self.trim();
                    return (skipped + tag.len(), true);
                }
                Some(false) => {}
                None => return (skipped, false),
            }
        }
        self.state = if is_open { State::Thought } else { State::Content };
        (skipped, true)
    }

    pub(super) fn thought(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let [(_, close), (_, other_close)] = THINK_TAGS;
        let tags = match self.rules.form {
            ToolForm::XmlTags => &[close, other_close, CALL] as &[&str],
            _ => &[close, other_close],
        };
        self.state = State::Thought;
        let (at, number) = match find(text, tags, is_whole) {
            Found::At(at, number) => (at, number),
            Found::Maybe(at) => {
                self.text(text.get(..at).unwrap_or_default(), true, parts);
                return (at, false);
            }
            Found::Nowhere => {
                self.text(text, true, parts);
                return (text.len(), false);
            }
        };
        let (before, rest) = text.split_at(at);
        let tag = tags.get(number).map_or(0, |tag| tag.len());
        if number < THINK_TAGS.len() {
            self.text(before, true, parts);
            self.trim();
            self.state = State::Content;
            return (at + tag, true);
        }
        // Some models call a tool while they think, and do not say that the thought is over. A thought
        // about such tags goes on.
        let after = rest.get(tag..).unwrap_or_default();
        let call = after.trim_start_matches(is_blank);
        let is_near = after.len() - call.len() <= MAX_BLANKS;
        match begins(call, FUNCTION, is_whole).filter(|_| is_near).or((!is_near).then_some(false)) {
            Some(true) => {
                self.text(before, true, parts);
                self.trim();
                self.is_unclosed = true;
                self.state = State::Content;
                (at, true)
            }
            Some(false) => {
                self.text(text.get(..at + tag).unwrap_or_default(), true, parts);
                (at + tag, true)
            }
            None => {
                self.text(before, true, parts);
                (at, false)
            }
        }
    }

    pub(super) fn take_content(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let close = THINK_TAGS[0].1;
        let mut tags = match self.rules.form {
            ToolForm::None => Vec::new(),
            ToolForm::JsonTags => vec![CALL],
            ToolForm::XmlTags => vec![CALL, FUNCTION],
            ToolForm::MarkedJson => vec![MARK],
            ToolForm::BareJson => vec![CODE_MARK, "{"],
        };
        if self.is_unclosed {
            tags.push(close);
        }
        let (at, tag) = match find(text, &tags, is_whole) {
            Found::At(at, number) => (at, tags.get(number).copied().unwrap_or_default()),
            Found::Maybe(at) => {
                self.content(text.get(..at).unwrap_or_default(), parts);
                return (at, false);
            }
            Found::Nowhere => {
                self.content(text, parts);
                return (text.len(), false);
            }
        };
        self.content(text.get(..at).unwrap_or_default(), parts);
        match tag {
            CALL => {
                self.aside.push_str(tag);
                self.state = State::Opened;
            }
            FUNCTION => {
                self.aside.push_str(tag);
                self.state = State::FunctionName;
            }
            MARK => self.state = State::Marked,
            "{" => {
                self.state = State::Object(Box::new(CallObject::new(true)), After::Bare);
                return (at, true);
            }
            CODE_MARK => {}
            _ => {
                self.is_unclosed = false;
                self.trim();
            }
        }
        (at + tag.len(), true)
    }
}
