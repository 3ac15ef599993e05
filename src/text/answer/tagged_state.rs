//! The state of an answer that is being taken apart by tags, and the parts that are reported of it.

use super::call_object::CallObject;
use super::event::{append, AnswerPart};
use super::json::{is_blank, Scanner};
use super::rules::{AnswerRules, AnswerStart};
use super::xml::XmlCall;

/// White space between two tags, in bytes, beyond which they do not belong together.
pub(super) const MAX_BLANKS: usize = 64;

/// The text that follows a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// A closing tag.
    Tag,
    /// The rest of a list.
    List,
    /// Another call without tags, perhaps after a semicolon.
    Bare,
}

/// The state of a parser.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Before the first text; whether the prompt has opened a thought.
    Start(bool),
    Thought,
    Content,
    /// After the opening tag of a call.
    Opened,
    /// In the name of a function.
    FunctionName,
    Function(Box<XmlCall>),
    Object(Box<CallObject>, After),
    /// In an object that is no call: how many braces are open, and whether this is in a string,
    /// after a backslash.
    Passing {
        open: usize,
        in_string: bool,
        escaped: bool,
    },
    /// In the rest of a damaged call.
    Skipping,
    Ended(After),
    /// After the mark before calls.
    Marked,
    List,
    MarkedName,
    MarkedArguments(Box<Scanner>),
}

/// Takes the text of an answer in pieces, and reports its parts.
#[derive(Clone, Debug)]
pub(super) struct TaggedParser {
    pub rules: AnswerRules,
    pub state: State,
    /// Text that was not understood yet.
    pub held: String,
    /// White space that is left out if a tag follows.
    pub blanks: String,
    /// Whether white space is left out until there is text.
    pub trims: bool,
    /// The text read of a call that has not begun, which is content if it never does.
    pub aside: String,
    /// Whether a closing tag is to come for a thought that has ended without.
    pub is_unclosed: bool,
    pub num_calls: usize,
}

impl TaggedParser {
    /// Returns a parser at the beginning of an answer.
    pub fn new(rules: AnswerRules) -> Self {
        let state = match rules.start {
            AnswerStart::Open => State::Start(false),
            AnswerStart::InThought => State::Start(true),
            AnswerStart::AfterThought => State::Content,
        };
        let trims = rules.start != AnswerStart::Open;
        TaggedParser {
            rules,
            state,
            held: String::new(),
            blanks: String::new(),
            trims,
            aside: String::new(),
            is_unclosed: false,
            num_calls: 0,
        }
    }

    /// Returns the rules that it follows.
    pub fn rules(&self) -> &AnswerRules {
        &self.rules
    }

    /// Reports text of the answer or, if `is_thought`, of a thought.
    pub(super) fn text(&mut self, text: &str, is_thought: bool, parts: &mut Vec<AnswerPart>) {
        let text = if self.trims { text.trim_start_matches(is_blank) } else { text };
        let body = text.trim_end_matches(is_blank);
        if !body.is_empty() {
            self.trims = false;
            self.blanks.push_str(body);
            let told = std::mem::take(&mut self.blanks);
            append(
                parts,
                if is_thought { AnswerPart::Reasoning(told) } else { AnswerPart::Content(told) },
            );
        }
        self.blanks.push_str(text.get(body.len()..).unwrap_or_default());
    }

    pub(super) fn content(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        self.text(text, false, parts);
    }

    /// Turns what was taken for the beginning of a call into content.
    pub(super) fn give_back(&mut self, parts: &mut Vec<AnswerPart>) {
        let aside = std::mem::take(&mut self.aside);
        self.content(&aside, parts);
        self.state = State::Content;
    }

    /// Leaves out the white space around a tag.
    pub(super) fn trim(&mut self) {
        self.blanks.clear();
        self.trims = true;
    }

    pub(super) fn begin_call(&mut self, name: String, parts: &mut Vec<AnswerPart>) {
        self.trim();
        self.aside.clear();
        let (index, id) = (self.num_calls, self.rules.id_of(self.num_calls));
        self.num_calls += 1;
        parts.push(AnswerPart::CallBegin { index, id, name });
    }

    pub(super) fn arguments(&self, piece: String, parts: &mut Vec<AnswerPart>) {
        if !piece.is_empty() {
            let index = self.num_calls.saturating_sub(1);
            append(parts, AnswerPart::Arguments { index, piece });
        }
    }

    pub(super) fn end_call(&self, is_complete: bool, parts: &mut Vec<AnswerPart>) {
        let index = self.num_calls.saturating_sub(1);
        parts.push(AnswerPart::CallEnd { index, is_complete });
    }
}
