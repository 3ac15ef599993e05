//! The graphs of steps, and the key of each.

use super::record::RecordShape;
use crate::backend::GraphCache;
use crate::model::step::TokenChoice;

/// The step that a graph was recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub shape: RecordShape,
    /// The address at which the KV cache begins.
    pub cache: usize,
    pub ending: Ending,
    /// The profile that the graph belongs to; 0 if none.
    pub profile: u64,
}

/// The work that follows the logits of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    /// Nothing: tokens are chosen from other logits, or by the caller.
    Logits,
    /// The choice of tokens, with top-k, top-p or typical-p for some of them if `is_filtered`.
    Tokens { is_filtered: bool },
}

/// Whether top-k, top-p or typical-p may remove tokens before one of these choices.
pub(super) fn is_filtered(choices: &[TokenChoice]) -> bool {
    choices.iter().any(|choice| matches!(choice, TokenChoice::Draw(draw) if draw.is_filtered()))
}

/// The recorded graphs of steps, by key.
pub(super) type StepGraphs = GraphCache<GraphKey>;
