//! The memory that forward passes work in.

use super::batch_builder::BatchBuilder;
use crate::model::{KvCache, KvSwap, Workspace};

/// Everything that a forward pass needs besides the model. There is one of it, and one pass at a
/// time has it.
pub(super) struct StepResources {
    pub kv: KvCache,
    pub swap: KvSwap,
    pub workspace: Workspace,
    pub builder: BatchBuilder,
}
