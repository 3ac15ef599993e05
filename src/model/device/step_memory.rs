//! The memory of the steps of a model on a device: their inputs, and where their results arrive.

use std::collections::VecDeque;
use std::sync::Arc;

use super::choice_extras::{ChoiceExtras, LogProbsSlot, UploadedChanges};
use super::graphs::StepGraphs;
use super::lead::Lead;
use super::limits::{PassLimits, MAX_STEP_ROWS, STEPS_IN_FLIGHT};
use super::record::{DeviceRecord, RecordExtras, RecordMemory, RecordShape};
use super::step_clock::StepClock;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::batch::ForwardBatch;
use crate::model::step::{Step, FROM_BATCH};
use crate::ops::sample::{SampleBuffers, SAMPLE_COUNTERS, SAMPLE_PARTIALS};

/// The memory of steps.
pub(in crate::model) struct DeviceSteps {
    context: Arc<ComputeContext>,
    pub(super) record: RecordMemory,
    /// `[MAX_STEP_ROWS]`, the tokens of the step begun last.
    pub chosen: DeviceTensor,
    /// `[PARTIALS]`
    pub(super) partials: DeviceTensor,
    /// `[COUNTERS]`, zero.
    pub(super) counters: DeviceTensor,
    /// The work done outside the graphs: changed logits and log-probabilities.
    pub(super) extras: ChoiceExtras,
    /// One slot for each step that may be in flight.
    pub(super) results: Vec<ResultSlot>,
    /// The slot of the next step.
    pub(super) next: usize,
    /// Slots of the steps in flight, the oldest first.
    pub(super) pending: VecDeque<usize>,
    /// The step begun last, if the choice of its tokens is not queued yet.
    pub(super) unchosen: Option<Unchosen>,
    /// Whether the device chooses the token, for each row of the step begun last.
    pub(super) last_rows: Vec<bool>,
    pub(super) graphs: StepGraphs,
    pub(super) lead: Lead,
    pub(super) clock: StepClock,
}

/// A step whose tokens wait for masks.
pub(super) struct Unchosen {
    pub slot: usize,
    /// The changes to its logits before the choice, if there are any.
    pub changes: Option<UploadedChanges>,
}

/// The host memory at which the results of a step arrive.
pub(super) struct ResultSlot {
    /// `[MAX_STEP_ROWS]`, written by a kernel.
    pub(super) tokens: PinnedBuffer,
    /// Grows to the largest number of rows that a caller asked for.
    pub(super) logits: Option<PinnedBuffer>,
    pub(super) num_rows: usize,
    pub(super) num_copied: usize,
    /// The log-probabilities of its rows.
    pub(super) log_probs: LogProbsSlot,
}

/// Returns the length of the record of the largest steps, in numbers.
fn record_len(limits: &PassLimits) -> Result<usize> {
    let num_tokens = limits.num_tokens.max(1);
    let shape = RecordShape {
        num_tokens,
        num_seqs: limits.rows(),
        num_rows: num_tokens.max(MAX_STEP_ROWS),
        blocks_per_seq: limits.blocks(),
    };
    RecordMemory::len_for(&shape)
}

const PARTIALS: usize = MAX_STEP_ROWS * SAMPLE_PARTIALS;
const COUNTERS: usize = MAX_STEP_ROWS * SAMPLE_COUNTERS;

impl DeviceSteps {
    /// Returns the bytes of device memory for passes within `limits`.
    pub fn device_bytes(limits: &PassLimits, vocab_size: usize) -> Result<usize> {
        let record = Arena::bytes_for(ElementType::I32, &[record_len(limits)?])?;
        let extras = ChoiceExtras::device_bytes(vocab_size)?;
        Ok(record.saturating_add(choice_bytes()?).saturating_add(extras))
    }

    /// Allocates memory for steps within `limits`.
    pub fn new(
        context: &Arc<ComputeContext>,
        limits: &PassLimits,
        dtype: DType,
        vocab_size: usize,
    ) -> Result<Self> {
        let record = RecordMemory::new(context, record_len(limits)?, STEPS_IN_FLIGHT)?;
        let mut arena = Arena::new(context, choice_bytes()?, "the choice of tokens")?;
        let chosen = arena.tensor(ElementType::I32, &[MAX_STEP_ROWS])?;
        let partials = arena.tensor(ElementType::I64, &[PARTIALS])?;
        let counters = arena.tensor(ElementType::I32, &[COUNTERS])?;
        counters.zero(context)?;
        chosen.zero(context)?;
        let lead = match context.backend() {
            ContextBackend::Cuda(cuda) => Lead::new(cuda)?,
            ContextBackend::Cpu { .. } => {
                return Err(Error::internal("steps of a device on the CPU"))
            }
        };
        let mut results = try_with_capacity(STEPS_IN_FLIGHT, "steps")?;
        for _ in 0..STEPS_IN_FLIGHT {
            let tokens = PinnedBuffer::new(context, MAX_STEP_ROWS * 4, "tokens")?;
            results.push(ResultSlot {
                tokens,
                logits: None,
                num_rows: 0,
                num_copied: 0,
                log_probs: LogProbsSlot::default(),
            });
        }
        Ok(DeviceSteps {
            context: context.clone(),
            record,
            chosen,
            partials,
            counters,
            extras: ChoiceExtras::new(context, dtype, vocab_size)?,
            results,
            next: 0,
            pending: VecDeque::with_capacity(STEPS_IN_FLIGHT),
            unchosen: None,
            last_rows: try_with_capacity(MAX_STEP_ROWS, "steps")?,
            graphs: StepGraphs::default(),
            lead,
            clock: StepClock::default(),
        })
    }

    /// Queues the copy of a record to the device and returns its arrays there.
    pub(super) fn upload(
        &mut self,
        shape: &RecordShape,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
    ) -> Result<DeviceRecord> {
        let len = RecordMemory::len_for(shape)?;
        if len > self.record.len() {
            // Twice what is needed, because block tables grow with the context. Steps in flight
            // read the old one.
            self.context.synchronize()?;
            self.graphs.clear();
            self.record = RecordMemory::new(&self.context, len.saturating_mul(2), STEPS_IN_FLIGHT)?;
        }
        self.record.upload(shape, batch, extras)?;
        if let ContextBackend::Cuda(cuda) = self.context.backend() {
            self.clock.begin(cuda)?;
        }
        self.record.arrays(shape)
    }

    /// Whether there are steps that were begun and not finished.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether no caller waits for tokens of the steps in flight.
    pub(super) fn may_lag(&self) -> bool {
        let mut results = self.pending.iter().filter_map(|&slot| self.results.get(slot));
        results.all(|result| result.num_rows == 0)
    }

    /// Returns the buffers with which the kernels choose the tokens of a record.
    pub(super) fn buffers<'a>(&'a self, record: &'a DeviceRecord) -> SampleBuffers<'a> {
        SampleBuffers {
            rows: &record.sample_rows,
            tokens: &self.chosen,
            host_tokens: &record.host_tokens,
            partials: &self.partials,
            counters: &self.counters,
        }
    }

    /// Checks that the tokens taken from the previous step are chosen by the device.
    pub(super) fn check_sources(&self, step: &Step<'_>) -> Result<()> {
        let is_known = |&source: &u32| {
            source == FROM_BATCH || self.last_rows.get(source as usize).copied().unwrap_or(false)
        };
        if step.token_sources.iter().all(is_known) {
            Ok(())
        } else {
            Err(Error::internal("a token that the step before does not choose"))
        }
    }
}

fn choice_bytes() -> Result<usize> {
    let chosen = Arena::bytes_for(ElementType::I32, &[MAX_STEP_ROWS])?;
    let counters = Arena::bytes_for(ElementType::I32, &[COUNTERS])?;
    Ok(chosen + counters + Arena::bytes_for(ElementType::I64, &[PARTIALS])?)
}

pub(super) fn no_slot() -> Error {
    Error::internal("no room for the results of a step")
}
