//! The interface through which the engine computes with a model. Tests can put a model of their own
//! in its place.

use crate::error::Result;
use crate::model::{
    BlockCopy, ForwardBatch, KvCache, KvSwap, Model, ScoresOut, Step, StepResult, Workspace,
    WriteMasks,
};

/// Something that computes steps, which are finished in the order in which they were begun.
pub trait StepModel: Send + Sync {
    /// Returns the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Returns the number of steps that may be begun before the first is finished.
    fn max_steps_in_flight(&self) -> usize;

    /// Begins a step. After an error it has not begun, the keys and values of its tokens are
    /// unwritten, and the next step may take no tokens from a step under way. An error of kind
    /// [`crate::error::ErrorKind::OutOfMemory`] means that a smaller step, or the same one at
    /// another time, may find the memory that it needs.
    fn begin_step(
        &self,
        step: &Step<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()>;

    /// Chooses the tokens of the step begun last, which has masked rows, before another one is begun.
    /// After an error that step is still to be finished, and its tokens mean nothing. A step that is
    /// finished without has no tokens.
    fn choose_masked(
        &self,
        step: &Step<'_>,
        workspace: &mut Workspace,
        write_masks: &mut WriteMasks<'_>,
    ) -> Result<()>;

    /// Copies blocks between the KV cache and the host, in order, after the steps that were begun
    /// before and before those that will be begun. After an error none, some or all were done.
    fn copy_blocks(&self, kv: &mut KvCache, swap: &mut KvSwap, copies: &[BlockCopy]) -> Result<()>;

    /// Waits for the oldest step, which is over after this even if its result is an error.
    fn finish_step(&self, workspace: &mut Workspace, result: &mut StepResult) -> Result<()>;

    /// Runs tokens, and writes the logits after some of them: `[num_logits_rows, vocab_size]`. No step
    /// may be under way.
    fn logits(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()>;

    /// Runs tokens, and says how likely given ones are after some of them. No step may be under way.
    fn score(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        out: ScoresOut<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()>;
}

impl StepModel for Model {
    fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    fn max_steps_in_flight(&self) -> usize {
        Model::max_steps_in_flight(self)
    }

    fn begin_step(
        &self,
        step: &Step<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        Model::begin_step(self, step, kv, workspace, should_stop)
    }

    fn choose_masked(
        &self,
        step: &Step<'_>,
        workspace: &mut Workspace,
        write_masks: &mut WriteMasks<'_>,
    ) -> Result<()> {
        Model::choose_masked(self, step, workspace, write_masks)
    }

    fn copy_blocks(&self, kv: &mut KvCache, swap: &mut KvSwap, copies: &[BlockCopy]) -> Result<()> {
        Model::copy_blocks(self, kv, swap, copies)
    }

    fn finish_step(&self, workspace: &mut Workspace, result: &mut StepResult) -> Result<()> {
        Model::finish_step(self, workspace, result)
    }

    fn logits(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        Model::forward(self, batch, kv, workspace, logits, should_stop)
    }

    fn score(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        out: ScoresOut<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        Model::score(self, batch, kv, workspace, out, should_stop)
    }
}
