//! The parts of an answer, from its tokens on.

use crate::error::Result;
use crate::text::{
    Answer, AnswerParser, AnswerPart, AnswerRules, Detokenizer, StopMatcher, Tokenizer,
};

/// Takes an answer apart while it is generated.
///
/// It has a detokenizer of its own: some models write calls between special tokens, which are left
/// out of the text that is shown.
pub(super) struct AnswerOutput {
    parser: AnswerParser,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// Whether special tokens are left out, except those that say what the text around them is.
    skips_special: bool,
    /// Whether a stop string came.
    is_stopped: bool,
    answer: Answer,
}

impl AnswerOutput {
    /// Returns the output for an answer. `detokenizer` leaves no token out.
    pub fn new(
        rules: AnswerRules,
        detokenizer: Detokenizer,
        stop: StopMatcher,
        skips_special: bool,
    ) -> Self {
        AnswerOutput {
            parser: AnswerParser::new(rules),
            detokenizer,
            stop,
            skips_special,
            is_stopped: false,
            answer: Answer::default(),
        }
    }

    /// Takes a token that is no end token, and appends what became certain.
    pub fn push(&mut self, token: u32, parts: &mut Vec<AnswerPart>) -> Result<()> {
        if self.is_left_out(token) {
            return Ok(());
        }
        let piece = self.detokenizer.push(token)?;
        self.take(&piece, parts)
    }

    /// Ends the answer, and appends what was held back. `is_stopped`: a stop string has ended it.
    pub fn finish(&mut self, is_stopped: bool, parts: &mut Vec<AnswerPart>) -> Result<()> {
        let rest = self.detokenizer.finish()?;
        self.take(&rest, parts)?;
        let from = parts.len();
        if !is_stopped && !self.is_stopped {
            let held = self.stop.finish();
            self.parser.push(&held, parts);
        }
        self.parser.finish(parts);
        self.note(parts.get(from..).unwrap_or_default());
        Ok(())
    }

    /// Returns the parts so far, put together.
    pub fn into_answer(self) -> Answer {
        self.answer
    }

    fn take(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) -> Result<()> {
        let output = self.stop.push(piece)?;
        self.is_stopped |= output.matched.is_some();
        let from = parts.len();
        self.parser.push(&output.text, parts);
        self.note(parts.get(from..).unwrap_or_default());
        Ok(())
    }

    fn note(&mut self, parts: &[AnswerPart]) {
        parts.iter().for_each(|part| self.answer.add(part));
    }

    fn is_left_out(&self, token: u32) -> bool {
        let tokenizer: &Tokenizer = self.detokenizer.tokenizer();
        self.skips_special
            && tokenizer.is_special(token)
            && !tokenizer.id_to_token(token).is_some_and(|text| self.parser.needs(&text))
    }
}
