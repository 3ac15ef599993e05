//! Steps that are under way on a device: what they were told, and where their results arrive.

use std::collections::VecDeque;
use std::sync::Arc;

use super::graphs::{row_bucket, table_bucket, GraphKey, StepGraphs};
use super::lead::Lead;
use super::limits::PassLimits;
use super::record::{DeviceRecord, RecordExtras, RecordMemory, RecordShape};
use super::step_clock::StepClock;
use super::workspace::{copy_floats, DeviceWorkspace, COPIED_ROWS, MAX_STEP_ROWS};
use super::DeviceModel;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::batch::ForwardBatch;
use crate::model::config::ModelConfig;
use crate::model::decoder::device::{rows_of, DevicePass, Wanted};
use crate::model::kv_cache::KvCache;
use crate::model::step::{Step, StepResult, TokenChoice, FROM_BATCH, NO_TOKEN};
use crate::ops::attention::DecodeScratch;
use crate::ops::copy::copy;
use crate::ops::elementwise::cast;
use crate::ops::sample::{sample, SampleBuffers, SAMPLE_COUNTERS, SAMPLE_PARTIALS};

/// Steps that may be under way: the host prepares one while the device computes another.
pub(in crate::model) const STEPS_IN_FLIGHT: usize = 2;

/// The most sequences whose decoding is a graph, where it is not the chain.
const MAX_PORTABLE_GRAPH_ROWS: usize = 8;

/// The memory behind steps.
pub(in crate::model) struct DeviceSteps {
    context: Arc<ComputeContext>,
    record: RecordMemory,
    /// `[MAX_STEP_ROWS]`, the tokens of the step begun last.
    pub chosen: DeviceTensor,
    /// `[PARTIALS]`
    partials: DeviceTensor,
    /// `[COUNTERS]`, zero.
    counters: DeviceTensor,
    /// Of the steps in flight.
    results: Vec<ResultSlot>,
    /// The slot of the next step.
    next: usize,
    /// Slots of the steps in flight, the oldest first.
    pending: VecDeque<usize>,
    /// For each row of the step begun last: does the device choose its token?
    last_rows: Vec<bool>,
    graphs: StepGraphs,
    pub(super) lead: Lead,
    clock: StepClock,
}

/// Where the results of a step arrive.
struct ResultSlot {
    /// `[MAX_STEP_ROWS]`, written by a kernel.
    tokens: PinnedBuffer,
    /// Grows to the most rows that a caller wanted.
    logits: Option<PinnedBuffer>,
    num_rows: usize,
    num_copied: usize,
}

/// Numbers in the record of the largest steps.
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
    /// Bytes of device memory, for passes within `limits`.
    pub fn device_bytes(limits: &PassLimits) -> Result<usize> {
        let record = Arena::bytes_for(ElementType::I32, &[record_len(limits)?])?;
        Ok(record.saturating_add(choice_bytes()?))
    }

    /// Memory for steps within `limits`.
    pub fn new(context: &Arc<ComputeContext>, limits: &PassLimits) -> Result<Self> {
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
            results.push(ResultSlot { tokens, logits: None, num_rows: 0, num_copied: 0 });
        }
        Ok(DeviceSteps {
            context: context.clone(),
            record,
            chosen,
            partials,
            counters,
            results,
            next: 0,
            pending: VecDeque::with_capacity(STEPS_IN_FLIGHT),
            last_rows: try_with_capacity(MAX_STEP_ROWS, "steps")?,
            graphs: StepGraphs::default(),
            lead,
            clock: StepClock::default(),
        })
    }

    /// Queues a record on its way to the device and says where its arrays lie there.
    pub(super) fn upload(
        &mut self,
        shape: &RecordShape,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
    ) -> Result<DeviceRecord> {
        let len = RecordMemory::len_for(shape)?;
        if len > self.record.len() {
            // Twice what is needed: block tables grow with the context. Steps under way read the old one.
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

    /// Are there steps that were begun and not finished?
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Does nobody wait for tokens of the steps in flight?
    pub(super) fn may_lag(&self) -> bool {
        let mut results = self.pending.iter().filter_map(|&slot| self.results.get(slot));
        results.all(|result| result.num_rows == 0)
    }

    /// How the kernels choose the tokens of a record.
    fn buffers<'a>(&'a self, record: &'a DeviceRecord) -> SampleBuffers<'a> {
        SampleBuffers {
            rows: &record.sample_rows,
            tokens: &self.chosen,
            host_tokens: &record.host_tokens,
            partials: &self.partials,
            counters: &self.counters,
        }
    }

    /// Checks that tokens of the step before were chosen by the device.
    fn check_sources(&self, step: &Step<'_>) -> Result<()> {
        let is_known = |&source: &u32| {
            source == FROM_BATCH || self.last_rows.get(source as usize).copied().unwrap_or(false)
        };
        match step.token_sources.iter().all(is_known) {
            true => Ok(()),
            false => Err(Error::internal("a token that the step before does not choose")),
        }
    }
}

fn choice_bytes() -> Result<usize> {
    let chosen = Arena::bytes_for(ElementType::I32, &[MAX_STEP_ROWS])?;
    let counters = Arena::bytes_for(ElementType::I32, &[COUNTERS])?;
    Ok(chosen + counters + Arena::bytes_for(ElementType::I64, &[PARTIALS])?)
}

impl DeviceModel {
    /// See [`crate::model::Model::begin_step`]; the batch was checked.
    pub fn begin_step(
        &self,
        config: &ModelConfig,
        step: &Step<'_>,
        kv: &KvCache,
        workspace: &mut DeviceWorkspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let batch = &step.batch;
        let num_rows = batch.logits_rows.len();
        if num_rows > workspace.step_rows() {
            return Err(Error::unsupported(format!(
                "a step with {num_rows} rows of logits: {} is the most",
                workspace.step_rows()
            )));
        }
        let steps = &mut workspace.steps;
        steps.check_sources(step)?;
        if steps.pending.len() >= STEPS_IN_FLIGHT {
            return Err(Error::internal("a step more than may be in flight"));
        }
        let slot = steps.next;
        // Until the step has begun nobody may ask for its tokens, nor for those that it writes over.
        steps.last_rows.clear();
        let result = steps.results.get(slot).ok_or_else(no_slot)?;
        let extras = RecordExtras {
            token_sources: step.token_sources,
            choices: step.choices,
            host_tokens: result.tokens.device_address(0),
            spare_block: kv.spare_block(),
        };
        let entered = self.cuda()?.enter()?;
        let queued = self
            .queue_step(config, batch, &extras, kv, workspace, should_stop)
            .and_then(|()| self.queue_copies(config, step.choices, slot, workspace));
        let steps = &mut workspace.steps;
        let result = steps.results.get_mut(slot).ok_or_else(no_slot)?;
        // Kernels may write there even if not all of the step was queued.
        let marked = result.tokens.set_in_use();
        queued.and(marked)?;
        result.num_rows = num_rows;
        steps.clock.end(self.cuda()?)?;
        steps.pending.push_back(slot);
        steps.next = (slot + 1) % STEPS_IN_FLIGHT;
        steps.last_rows.clear();
        let chosen = step.choices.iter().map(|choice| *choice != TokenChoice::Caller);
        steps.last_rows.extend(chosen);
        drop(entered);
        Ok(())
    }

    /// The forward pass, and the choice of tokens.
    fn queue_step(
        &self,
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
        kv: &KvCache,
        workspace: &mut DeviceWorkspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let num_rows = batch.logits_rows.len();
        if !is_decode(batch) || num_rows > self.max_graph_rows() {
            let shape = RecordShape::of(batch);
            let record = workspace.steps.upload(&shape, batch, extras)?;
            let wanted = if is_decode(batch) && self.attention.is_fused() {
                Wanted::of_decode(config, &record, &self.attention)
            } else {
                Wanted::of(config, batch, &record, &self.attention)?
            };
            let linear = self.linear.apart(&self.context)?;
            let pass = self.pass(config, &record, &wanted, linear, workspace, should_stop)?;
            return self.choose(&pass, kv, workspace);
        }
        // Steps of about the same size are one graph.
        let rows = row_bucket(num_rows).min(workspace.step_rows());
        let shape = RecordShape {
            num_tokens: rows,
            num_seqs: rows,
            num_rows: rows,
            blocks_per_seq: table_bucket(batch.max_blocks_per_seq),
        };
        let record = workspace.steps.upload(&shape, batch, extras)?;
        let key = GraphKey {
            shape,
            cache: kv.device_layer(0)?.k.data() as usize,
            profile: self.cuda()?.profile_generation(),
        };
        let mut graphs = std::mem::take(&mut workspace.steps.graphs);
        let queue = || {
            let wanted = Wanted::of_decode(config, &record, &self.attention);
            let linear = self.linear.chain(&self.context, rows)?;
            let pass = self.pass(config, &record, &wanted, linear, workspace, &|| false)?;
            let queue = || self.choose(&pass, kv, workspace);
            linear.with_memory_divided(config.hidden_size, rows, queue)
        };
        // Each stands for the allocation that it is a part of. (One may be there several times: this is run for every
        // token, and a list of its own would be allocated each time.)
        let cache = &kv.device_layer(0)?.k;
        let partials = workspace.attention_partials.as_ref().map(DecodeScratch::memory);
        let [weights, tables] = self.allocations();
        let tensors = [
            weights,
            tables,
            partials.unwrap_or(weights),
            cache,
            &workspace.hidden,
            &workspace.steps.chosen,
            &record.slots,
        ];
        let done = graphs.run(&self.context, key, &tensors, queue);
        workspace.steps.graphs = graphs;
        done
    }

    /// The most sequences whose decoding is a graph.
    fn max_graph_rows(&self) -> usize {
        self.linear.max_chain_rows().unwrap_or(MAX_PORTABLE_GRAPH_ROWS)
    }

    /// Queues a pass, the logits of the rows that are wanted, and the choice of their tokens.
    fn choose(
        &self,
        pass: &DevicePass<'_>,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
    ) -> Result<()> {
        let Some(mut act) = pass.run(kv, workspace)? else { return Ok(()) };
        let logits = rows_of(&workspace.logits, act.stream.num_rows())?;
        pass.logits(&mut act, &logits)?;
        sample(&self.context, &logits, &workspace.steps.buffers(pass.record))?;
        pass.cuda.mark("sample", 0, 0.0)
    }

    /// Queues the logits that the caller wants on their way to the host.
    fn queue_copies(
        &self,
        config: &ModelConfig,
        choices: &[TokenChoice],
        slot: usize,
        workspace: &mut DeviceWorkspace,
    ) -> Result<()> {
        let vocab_size = config.vocab_size;
        let is_wanted = |choice: &TokenChoice| *choice == TokenChoice::Caller;
        let num_copied = choices.iter().filter(|choice| is_wanted(choice)).count();
        let result = workspace.steps.results.get_mut(slot).ok_or_else(no_slot)?;
        result.num_copied = num_copied;
        if num_copied == 0 {
            return Ok(());
        }
        // Few sizes: pinned memory is kept for good.
        let room = num_copied.next_power_of_two();
        let bytes = room.saturating_mul(vocab_size).saturating_mul(4);
        let mut host = match result.logits.take().filter(|host| host.len_bytes() >= bytes) {
            Some(host) => host,
            None => PinnedBuffer::new(&self.context, bytes, "logits")?,
        };
        let wanted = choices.iter().enumerate().filter(|(_, choice)| is_wanted(choice));
        for (index, (row, _)) in wanted.enumerate() {
            let source = workspace.logits.view(row * vocab_size, &[1, vocab_size], None)?;
            let place = index % COPIED_ROWS.min(workspace.copied_rows());
            let floats = workspace.logits_f32.view(place * vocab_size, &[1, vocab_size], None)?;
            match self.dtype() {
                DType::F32 => copy(&self.context, &source, &floats)?,
                _ => cast(&self.context, &source, &floats)?,
            }
            host.download(&floats, index * vocab_size * 4)?;
        }
        host.fence()?;
        let result = workspace.steps.results.get_mut(slot).ok_or_else(no_slot)?;
        result.logits = Some(host);
        Ok(())
    }

    /// See [`crate::model::Model::finish_step`].
    pub fn finish_step(
        &self,
        config: &ModelConfig,
        workspace: &mut DeviceWorkspace,
        out: &mut StepResult,
    ) -> Result<()> {
        let steps = &mut workspace.steps;
        let slot = steps.pending.pop_front();
        let slot = slot.ok_or_else(|| Error::internal("no step is under way"))?;
        let result = steps.results.get_mut(slot).ok_or_else(no_slot)?;
        let num_rows = result.num_rows;
        let no_memory = |_| Error::out_of_memory("the result of a step", num_rows * 4);
        out.tokens.clear();
        out.tokens.try_reserve(num_rows).map_err(no_memory)?;
        let timed = steps.clock.finish(self.cuda()?);
        let bytes = result.tokens.bytes()?;
        self.cuda()?.take_fault()?;
        out.time = timed?;
        out.tokens.extend(bytes.chunks_exact(4).take(num_rows).map(|word| match *word {
            [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]),
            _ => NO_TOKEN,
        }));
        let len = result.num_copied.saturating_mul(config.vocab_size);
        out.logits.clear();
        if let (Some(host), true) = (&mut result.logits, len > 0) {
            let no_memory = |_| Error::out_of_memory("logits", len.saturating_mul(4));
            out.logits.try_reserve(len).map_err(no_memory)?;
            out.logits.resize(len, 0.0);
            copy_floats(host.bytes()?, &mut out.logits);
        }
        Ok(())
    }
}

fn no_slot() -> Error {
    Error::internal("no room for the results of a step")
}

/// Does every sequence have one token, whose logits are wanted?
fn is_decode(batch: &ForwardBatch<'_>) -> bool {
    let num_tokens = batch.num_tokens() as u32;
    batch.cu_seqlens_q.iter().copied().eq(0..=num_tokens)
        && batch.logits_rows.iter().copied().eq(0..num_tokens)
}
