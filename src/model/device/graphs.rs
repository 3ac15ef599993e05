//! What a graph of a step was recorded for.

use super::record::RecordShape;
use crate::backend::GraphCache;

/// What a graph was recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub shape: RecordShape,
    /// Where the KV cache begins.
    pub cache: usize,
    /// The profile that it is for; 0: none.
    pub profile: u64,
}

/// Graphs of steps, by their shapes.
pub(super) type StepGraphs = GraphCache<GraphKey>;
