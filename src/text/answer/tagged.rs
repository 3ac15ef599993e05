//! Takes answers apart in which tags that are known say what is what: thoughts and content in
//! `tagged_prose.rs`, calls in `tagged_calls.rs` and `tagged_marked.rs`.

use super::event::{append, AnswerPart};
use super::tagged_state::State;
pub(super) use super::tagged_state::TaggedParser;

impl TaggedParser {
    /// Takes the next piece of text, and appends what became certain with it.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.advance(piece, false, parts);
    }

    /// Ends the answer: what could have become a tag is text. The parser takes no more.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        self.advance("", true, parts);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Object(object, _) if !object.has_begun() => self.aside += &object.into_text(),
            State::Object(..) | State::MarkedArguments(_) => self.end_call(false, parts),
            State::Thought => self.blanks.clear(),
            _ => {}
        }
        let aside = std::mem::take(&mut self.aside);
        self.content(&aside, parts);
        let blanks = std::mem::take(&mut self.blanks);
        if !blanks.is_empty() {
            append(parts, AnswerPart::Content(blanks));
        }
    }

    fn advance(&mut self, piece: &str, is_whole: bool, parts: &mut Vec<AnswerPart>) {
        let mut held = std::mem::take(&mut self.held);
        held.push_str(piece);
        let mut at = 0;
        loop {
            let (taken, goes_on) = self.step(held.get(at..).unwrap_or_default(), is_whole, parts);
            at += taken;
            if !goes_on {
                break;
            }
        }
        held.drain(..at.min(held.len()));
        self.held = held;
    }

    /// Takes the beginning of `text`: returns how many bytes of it, and whether there is more to be
    /// done before more text comes.
    fn step(&mut self, text: &str, is_whole: bool, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start(is_open) => self.start(text, is_open, is_whole),
            State::Thought => self.thought(text, is_whole, parts),
            State::Content => self.take_content(text, is_whole, parts),
            State::Opened => self.opened(text, is_whole, parts),
            State::FunctionName => self.function_name(text, is_whole, parts),
            State::Function(call) => self.function(call, text, is_whole, parts),
            State::Object(object, after) => self.object(object, after, text, parts),
            State::Passing { open, in_string, escaped } => {
                self.pass(text, (open, in_string, escaped), parts)
            }
            State::Skipping => self.skip(text, is_whole),
            State::Ended(after) => self.ended(after, text, is_whole),
            State::Marked => self.marked(text, parts),
            State::List => self.list(text, parts),
            State::MarkedName => self.marked_name(text, is_whole, parts),
            State::MarkedArguments(scanner) => self.marked_arguments(scanner, text, parts),
        }
    }
}
