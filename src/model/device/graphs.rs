//! The graphs of steps, and the key of each.

use super::record::RecordShape;
use crate::backend::GraphCache;

/// The step that a graph was recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub shape: RecordShape,
    /// The address at which the KV cache begins.
    pub cache: usize,
    /// Whether it chooses the tokens, or ends with the logits.
    pub chooses: bool,
    /// The profile that the graph belongs to; 0 if none.
    pub profile: u64,
}

/// The recorded graphs of steps, by key.
pub(super) type StepGraphs = GraphCache<GraphKey>;
