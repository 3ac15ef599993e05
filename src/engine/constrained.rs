//! What keeps the text of a sequence to the constraint of its request: a matcher that follows the
//! sequence's tokens, and the mask of the next one.
//!
//! The matcher takes each token once, when it is handed out; a sequence that is preempted, or whose step
//! is abandoned, goes on with the same matcher. The mask is computed when all tokens before are known.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::Result;
use crate::text::{GrammarCompiler, GrammarMatcher, Progress, TokenMask, Tokenizer};

/// The compiler of a model's constraints, which is made when the first request needs it.
#[derive(Default)]
pub(super) struct LazyCompiler {
    made: OnceLock<GrammarCompiler>,
    /// Held by the thread that makes it.
    making: Mutex<()>,
}

impl LazyCompiler {
    /// The compiler. After a failure, for want of memory say, the next request tries again.
    pub fn get(&self, tokenizer: &Tokenizer, vocab_size: usize) -> Result<&GrammarCompiler> {
        let _making = match self.made.get() {
            Some(made) => return Ok(made),
            None => self.making.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let compiler = GrammarCompiler::new(tokenizer, vocab_size)?;
        Ok(self.made.get_or_init(|| compiler))
    }
}

/// The constraint of one sequence.
pub(super) struct Constrained {
    matcher: GrammarMatcher,
    tokenizer: Arc<Tokenizer>,
    /// Tokens that end the sequence.
    ends: Arc<Vec<u32>>,
    /// Whether `matcher` has the mask of the next token.
    has_mask: bool,
}

impl Constrained {
    /// The constraint of a sequence that `ends` end, before its first token.
    pub fn new(matcher: GrammarMatcher, tokenizer: Arc<Tokenizer>, ends: Arc<Vec<u32>>) -> Self {
        Constrained { matcher, tokenizer, ends, has_mask: false }
    }

    /// Another sequence in the same state.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Constrained {
            matcher: self.matcher.try_clone()?,
            tokenizer: self.tokenizer.clone(),
            ends: self.ends.clone(),
            has_mask: false,
        })
    }

    /// Which tokens may come next.
    pub fn mask(&mut self) -> Result<TokenMask<'_>> {
        if !self.has_mask {
            self.matcher.mask(&self.ends, |id| self.tokenizer.is_special(id))?;
            self.has_mask = true;
        }
        Ok(self.matcher.last_mask())
    }

    /// Takes the next token; an end says nothing about the text. Fails if it may not come.
    pub fn consume(&mut self, token: u32) -> Result<Progress> {
        self.has_mask = false;
        if self.ends.contains(&token) {
            return Ok(Progress::Open);
        }
        self.matcher.consume(token)
    }
}
