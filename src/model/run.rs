//! The steps of a model, wherever it is.

use std::time::{Duration, Instant};

use super::device::limits::STEPS_IN_FLIGHT;
use super::kv_cache::KvCache;
use super::loaded::{Compute, Model};
use super::step::{
    HostSteps, Step, StepResult, StepTime, TokenChoice, WriteMasks, FROM_BATCH, NO_TOKEN,
};
use super::workspace::Workspace;
use crate::backend::cuda::ProfiledPart;
use crate::error::{try_filled, Error, Result};

impl Model {
    /// Returns the number of steps that may be begun before the first is finished.
    pub fn max_steps_in_flight(&self) -> usize {
        match &self.compute {
            Compute::Cpu(_) => 1,
            Compute::Device(_) => STEPS_IN_FLIGHT,
        }
    }

    /// Whether steps can choose tokens in this way. [`TokenChoice::Caller`] always works.
    pub fn can_choose(&self, choice: &TokenChoice) -> bool {
        matches!(choice, TokenChoice::Caller) || matches!(&self.compute, Compute::Device(_))
    }

    /// Begins a step. On the CPU it is also computed here; on a device it is queued after the steps
    /// begun earlier: at once or, if only a long prompt is being processed, just a few layers ahead
    /// of the device. `should_stop` is asked between layers while the pass is computed here or
    /// queued; true ends the step with [`crate::error::ErrorKind::Cancelled`]. After an error the
    /// step has not begun, and the keys and values of its tokens are to be considered unwritten.
    pub fn begin_step(
        &self,
        step: &Step<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let num_rows = step.batch.logits_rows.len();
        if step.choices.len() != num_rows {
            return Err(Error::internal("a step without a choice for each row of logits"));
        }
        if let Some(choice) = step.choices.iter().find(|choice| !self.can_choose(choice)) {
            return Err(Error::internal(format!("a step cannot choose by {choice:?} here")));
        }
        if !step.token_sources.is_empty() && step.token_sources.len() != step.batch.num_tokens() {
            return Err(Error::internal("a step without a source for each token"));
        }
        if let Compute::Device(cuda) = &self.compute {
            let config = self.config();
            if kv.layout() != self.kv_layout() {
                return Err(Error::internal("the KV cache was made for another model"));
            }
            step.batch.validate(config, kv)?;
            let num_tokens = step.batch.num_tokens();
            if num_tokens == 0 {
                return Err(Error::internal("a step without tokens"));
            }
            let workspace = workspace.on_device(cuda, config, num_tokens.max(num_rows))?;
            return cuda.begin_step(config, step, kv, workspace, should_stop);
        }
        if step.token_sources.iter().any(|&source| source != FROM_BATCH) {
            return Err(Error::internal("a token of the step before, which is finished"));
        }
        if !step.masked_rows.is_empty() {
            return Err(no_masks());
        }
        let mut steps = std::mem::take(workspace.host_steps());
        let outcome = self.run_step(step, kv, workspace, &mut steps, should_stop);
        *workspace.host_steps() = steps;
        outcome
    }

    /// Chooses the tokens of the step begun last, which has masked rows: `write_masks` says what
    /// may come there. Nothing else may have been begun since. Not on the CPU, where the caller
    /// chooses. After an error the step is still to be finished, and its tokens mean nothing.
    pub fn choose_masked(
        &self,
        step: &Step<'_>,
        workspace: &mut Workspace,
        write_masks: &mut WriteMasks<'_>,
    ) -> Result<()> {
        let Compute::Device(cuda) = &self.compute else { return Err(no_masks()) };
        let workspace = workspace.on_device(cuda, self.config(), 1)?;
        cuda.choose_masked(self.config(), step, workspace, write_masks)
    }

    fn run_step(
        &self,
        step: &Step<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        steps: &mut HostSteps,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        if steps.pending.len() >= self.max_steps_in_flight() {
            return Err(Error::internal("a step more than may be in flight"));
        }
        let num_rows = step.batch.logits_rows.len();
        let len = num_rows
            .checked_mul(self.config().vocab_size)
            .ok_or_else(|| Error::out_of_memory("logits", usize::MAX))?;
        let mut result = steps.spare.pop().unwrap_or_default();
        if result.logits.len() > len {
            result.logits.truncate(len);
        } else if result.logits.capacity() < len {
            result.logits = try_filled(len, 0.0, "logits")?;
        } else {
            result.logits.resize(len, 0.0);
        }
        result.tokens.clear();
        result
            .tokens
            .try_reserve(num_rows)
            .map_err(|_| Error::out_of_memory("tokens", num_rows * 4))?;
        result.tokens.resize(num_rows, NO_TOKEN);
        let begin = Instant::now();
        let done = self.forward(&step.batch, kv, workspace, &mut result.logits, should_stop);
        let end = Instant::now();
        let idle = steps.last_end.map_or(Duration::ZERO, |last| begin.duration_since(last));
        result.time = StepTime { busy: end.duration_since(begin), idle };
        steps.last_end = Some(end);
        match done {
            Ok(()) => steps.pending.push_back(result),
            Err(_) => steps.spare.push(result),
        }
        done
    }

    /// Starts timing the parts of each step on a device, to find out where the time goes. Steps
    /// take a few percent longer, more in small models. No step may be in flight.
    pub fn start_profile(&self) -> Result<()> {
        match &self.compute {
            Compute::Device(cuda) => cuda.cuda()?.start_profile().map(|_| ()),
            Compute::Cpu(_) => Err(Error::unsupported("profiles are made on CUDA devices only")),
        }
    }

    /// Returns the times of the parts of the last step, in their order. All steps since
    /// [`Model::start_profile`] must have had the same number of sequences and tokens.
    pub fn read_profile(&self) -> Result<Vec<ProfiledPart>> {
        match &self.compute {
            Compute::Device(cuda) => cuda.cuda()?.read_profile(),
            Compute::Cpu(_) => Err(Error::unsupported("profiles are made on CUDA devices only")),
        }
    }

    /// Stops timing steps.
    pub fn stop_profile(&self) -> Result<()> {
        match &self.compute {
            Compute::Device(cuda) => cuda.cuda()?.stop_profile(),
            Compute::Cpu(_) => Ok(()),
        }
    }

    /// Waits for the oldest unfinished step and moves its result to `result`, whose memory is
    /// reused for a later step.
    pub fn finish_step(&self, workspace: &mut Workspace, result: &mut StepResult) -> Result<()> {
        if let Compute::Device(cuda) = &self.compute {
            let workspace = workspace.on_device(cuda, self.config(), 1)?;
            return cuda.finish_step(self.config(), workspace, result);
        }
        let steps = workspace.host_steps();
        let done = steps.pending.pop_front();
        let done = done.ok_or_else(|| Error::internal("no step is under way"))?;
        steps.spare.push(std::mem::replace(result, done));
        Ok(())
    }
}

fn no_masks() -> Error {
    Error::internal("masks for tokens that the caller chooses")
}
