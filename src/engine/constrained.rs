//! Keeps the text of a sequence to the constraint of its request: a matcher that follows the
//! sequence's tokens, and the mask of the next one.
//!
//! The matcher takes each token once, when it is known; a sequence that is preempted, or whose step is
//! abandoned, goes on with the same matcher. The mask is computed when all tokens before are known: on the
//! CPU where the token is chosen, for a device beside the pass whose logits it masks.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::sampler::none_left;
use crate::error::{Error, Result};
use crate::text::{GrammarCompiler, GrammarMatcher, Progress, TokenMask, Tokenizer};

/// The compiler of a model's constraints, which is made when the first request needs it.
#[derive(Default)]
pub(super) struct LazyCompiler {
    made: OnceLock<GrammarCompiler>,
    /// Held by the thread that makes it.
    making: Mutex<()>,
}

impl LazyCompiler {
    /// Returns the compiler. After a failure, for lack of memory say, the next request tries again.
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
    /// Why there is no mask of the next token, which cannot be taken then.
    failed: Option<Error>,
}

impl Constrained {
    /// Returns the constraint of a sequence that `ends` end, before its first token.
    pub fn new(matcher: GrammarMatcher, tokenizer: Arc<Tokenizer>, ends: Arc<Vec<u32>>) -> Self {
        Constrained { matcher, tokenizer, ends, has_mask: false, failed: None }
    }

    /// Returns another sequence in the same state.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Constrained {
            matcher: self.matcher.try_clone()?,
            tokenizer: self.tokenizer.clone(),
            ends: self.ends.clone(),
            has_mask: false,
            failed: None,
        })
    }

    /// Returns which tokens may come next.
    pub fn mask(&mut self) -> Result<TokenMask<'_>> {
        if !self.has_mask {
            self.matcher.mask(&self.ends, |id| self.tokenizer.is_special(id))?;
            self.has_mask = true;
        }
        Ok(self.matcher.last_mask())
    }

    /// Writes the mask of the next token to `row`, as words in the machine's byte order. If there is none,
    /// all tokens may come, and whichever does is not taken.
    pub fn write_mask(&mut self, row: &mut [u8]) {
        match self.mask() {
            Ok(mask) => {
                for (bytes, word) in row.chunks_exact_mut(4).zip(mask.words) {
                    bytes.copy_from_slice(&word.to_ne_bytes());
                }
            }
            Err(error) => {
                self.failed = Some(error);
                row.fill(u8::MAX);
            }
        }
    }

    /// Whether a token ends the sequence.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// Takes the next token; an end says nothing about the text. Fails if it may not come.
    pub fn consume(&mut self, token: u32) -> Result<Progress> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if std::mem::take(&mut self.has_mask) && !self.matcher.last_mask().allows(token) {
            return Err(none_left());
        }
        if self.is_end(token) {
            return Ok(Progress::Open);
        }
        self.matcher.consume(token)
    }
}
