//! The state of one text on its way through a constraint.

use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use llguidance::{Matcher, TokenParser};

use super::kept::Home;
use super::sentence::sentence;
use crate::error::{Error, ErrorKind, Result};
use crate::text::guarded;

/// The tokens that may come next, one bit each.
#[derive(Clone, Copy, Debug)]
pub struct TokenMask<'a> {
    /// The bit `id % 32` of the word `id / 32` is set for an id that may come; all ids of the
    /// vocabulary have one, and bits beyond them are not set.
    pub words: &'a [u32],
}

impl TokenMask<'_> {
    /// Whether a token may come.
    pub fn allows(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

/// The progress of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More may come.
    Open,
    /// The text is complete, and nothing can follow.
    Complete,
}

/// Follows one text. Once it has failed it fails for ever, so nothing comes out unconstrained.
pub struct GrammarMatcher {
    matcher: Matcher,
    vocab_size: usize,
    /// The mask that was computed last.
    words: Vec<u32>,
    /// The cache that its automaton returns to.
    home: Option<Home>,
}

impl Drop for GrammarMatcher {
    fn drop(&mut self) {
        if let (Some(home), false) = (self.home.take(), self.matcher.is_error()) {
            home.leave();
        }
    }
}

impl GrammarMatcher {
    /// Returns a matcher that begins with `start`, a parser that has begun and taken no token.
    pub(super) fn new(start: TokenParser, vocab_size: usize, home: Option<Home>) -> Self {
        GrammarMatcher { matcher: Matcher::new(Ok(start)), vocab_size, words: Vec::new(), home }
    }

    /// Returns a matcher of its own in the same state.
    pub fn try_clone(&self) -> Result<Self> {
        guarded(ErrorKind::Internal, "the constraint", || {
            Ok(GrammarMatcher {
                matcher: self.matcher.deep_clone(),
                vocab_size: self.vocab_size,
                words: Vec::new(),
                home: None,
            })
        })
    }

    /// Computes which tokens may come next. Those of `ends`, which end the text, may exactly if it is
    /// complete; so may special tokens that the grammar itself asks for in this place. `is_special` says
    /// which ids are special tokens.
    pub fn mask(
        &mut self,
        ends: &[u32],
        is_special: impl Fn(u32) -> bool,
    ) -> Result<TokenMask<'_>> {
        let matcher = &mut self.matcher;
        let mask = guarded(ErrorKind::Internal, "the constraint", || {
            matcher.compute_mask().map_err(|error| broken(&error.to_string()))
        })?;
        self.keep(&mask)?;
        let is_complete = mask.is_allowed(u32::try_from(self.vocab_size).unwrap_or(u32::MAX));
        for &id in ends {
            let Some(word) = self.words.get_mut(id as usize / 32) else { continue };
            let bit = 1 << (id % 32);
            if is_complete {
                *word |= bit;
            } else if !is_special(id) {
                *word &= !bit;
            }
        }
        Ok(TokenMask { words: &self.words })
    }

    /// Copies the bits of the vocabulary.
    fn keep(&mut self, mask: &SimpleVob) -> Result<()> {
        let len = self.vocab_size.div_ceil(32);
        let no_memory = |_| Error::out_of_memory("the mask of a constraint", len * 4);
        self.words.clear();
        self.words.try_reserve(len).map_err(no_memory)?;
        self.words.extend(mask.as_slice().iter().take(len));
        self.words.resize(len, 0);
        let used = self.vocab_size % 32;
        if let (Some(last), true) = (self.words.last_mut(), used > 0) {
            *last &= (1u32 << used) - 1;
        }
        Ok(())
    }

    /// Returns the mask that was computed last.
    pub fn last_mask(&self) -> TokenMask<'_> {
        TokenMask { words: &self.words }
    }

    /// Takes a token, which is not an end. Fails if it may not come.
    pub fn consume(&mut self, id: u32) -> Result<Progress> {
        let matcher = &mut self.matcher;
        guarded(ErrorKind::Internal, "the constraint", || match matcher.try_consume_tokens(&[id]) {
            Ok(1) if matcher.stop_reason() == StopReason::NotStopped => Ok(Progress::Open),
            Ok(1) => Ok(Progress::Complete),
            Ok(_) => Err(Error::invalid_argument("the constraint does not allow the token")),
            Err(error) => Err(broken(&error.to_string())),
        })
    }

    /// Whether the text could end here.
    pub fn is_complete(&mut self) -> Result<bool> {
        let matcher = &mut self.matcher;
        guarded(ErrorKind::Internal, "the constraint", || {
            matcher.is_accepting().map_err(|error| broken(&error.to_string()))
        })
    }
}

/// Returns the error of a matcher that cannot go on, with the crate's reason.
fn broken(message: &str) -> Error {
    let message = sentence(message);
    Error::unsupported(format!("the constraint cannot be followed any more: {message}"))
}
