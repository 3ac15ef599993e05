//! The log-probabilities of a request's prompt.

use crate::error::{try_filled, try_with_capacity, Result};
use crate::model::TokenLogProb;

/// The log-probabilities of the tokens of a prompt, each after those before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogProbs {
    /// The ids of the prompt.
    pub token_ids: Vec<u32>,
    /// The log-probability of each; NaN for the first one, which comes after nothing, and for those of
    /// a request that ended before.
    pub log_probs: Vec<f32>,
    /// The likeliest tokens in the place of each, `num_top` for each, the likeliest first; those of the
    /// first are empty: token 0 with NaN.
    pub top: Vec<TokenLogProb>,
    /// The number of likeliest tokens of a token.
    pub num_top: usize,
}

/// The placeholder where there is none.
pub(super) const EMPTY: TokenLogProb = TokenLogProb { token_id: 0, log_prob: f32::NAN };

impl PromptLogProbs {
    /// Returns room for those of a prompt.
    pub(super) fn new(token_ids: &[u32], num_top: usize) -> Result<Self> {
        let len = token_ids.len();
        let mut ids = try_with_capacity(len, "a prompt's tokens")?;
        ids.extend_from_slice(token_ids);
        Ok(PromptLogProbs {
            token_ids: ids,
            log_probs: try_filled(len, f32::NAN, "log-probabilities")?,
            top: try_filled(len.saturating_mul(num_top), EMPTY, "log-probabilities")?,
            num_top,
        })
    }

    /// Takes over those of some tokens.
    pub(super) fn put(&mut self, piece: &PromptPiece) {
        let end = piece.first.saturating_add(piece.log_probs.len());
        if let Some(room) = self.log_probs.get_mut(piece.first..end) {
            room.copy_from_slice(&piece.log_probs);
        }
        let places = piece.first.saturating_mul(self.num_top)..end.saturating_mul(self.num_top);
        if let Some(room) = self.top.get_mut(places).filter(|it| it.len() == piece.top.len()) {
            room.copy_from_slice(&piece.top);
        }
    }
}

/// The log-probabilities of some tokens of a prompt.
#[derive(Clone, Debug)]
pub(super) struct PromptPiece {
    /// The index of the first one.
    pub first: usize,
    pub log_probs: Vec<f32>,
    pub top: Vec<TokenLogProb>,
}
