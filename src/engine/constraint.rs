//! The constraints of requests on their way in.

use std::sync::Arc;

use super::constrained::Constrained;
use super::engine::Engine;
use super::request::Request;
use super::tool_choice::constraint_of;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::text::{after_thought, AnswerStart, GrammarMatcher, Progress, ANSWER};

impl Engine {
    /// Compiles the constraint of a request, if it has one or must be the call of a tool; `prompt` is what
    /// the answer goes on with, `ends` are the tokens that end it. The first
    /// tokens of the request must fit.
    pub(super) fn constrain(
        &self,
        request: &Request<'_>,
        prompt: &[u32],
        ends: &Arc<Vec<u32>>,
    ) -> Result<Option<Constrained>> {
        let calls = self.call_grammar(request, || self.answer_start(prompt))?;
        let Some(constraint) = constraint_of(request, calls.as_deref()) else { return Ok(None) };
        let tokenizer = self.tokenizer()?;
        let compiler = self.constraints.get(tokenizer, self.shape().vocab_size)?;
        // If answers are taken apart, the content has this form, which begins after a thought that
        // the prompt has begun. The grammar of a call has its own thought.
        let is_apart = request.answer_format.is_some() && calls.is_none();
        let around = match is_apart && self.answer_start(prompt)? == AnswerStart::InThought {
            true => after_thought(AnswerStart::InThought, tokenizer, ANSWER),
            false => None,
        };
        let matcher = compiler.compile_within(&constraint, around.as_deref())?;
        if !request.first_tokens.is_empty() {
            follow(matcher.try_clone()?, request.first_tokens, ends)?;
        }
        Ok(Some(Constrained::new(matcher, tokenizer.clone(), ends.clone())))
    }
}

/// Refuses first tokens that a constraint does not allow.
fn follow(mut matcher: GrammarMatcher, tokens: &[u32], ends: &[u32]) -> Result<()> {
    let mut progress = Progress::Open;
    for (place, &id) in tokens.iter().enumerate() {
        let refused = |why: &str| {
            Err(Error::invalid_argument(format!(
                "first_tokens[{place}] is {id}, which the constraint does not allow there{why}"
            )))
        };
        if ends.contains(&id) {
            // Nothing comes after it.
            return if progress == Progress::Complete || matcher.is_complete()? {
                Ok(())
            } else {
                refused(": the text is not complete")
            };
        }
        if progress == Progress::Complete {
            return refused(": the text is complete");
        }
        progress = match matcher.consume(id) {
            Ok(progress) => progress,
            Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                return refused("");
            }
            error => error.context(|| format!("first_tokens[{place}] is {id}"))?,
        };
    }
    Ok(())
}
