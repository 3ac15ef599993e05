//! The steps of a model on a device, which are begun, computed and finished in the same order.

use super::choice_extras::{changes_logits, needs_upload, UploadedChanges};
use super::graphs::{is_filtered, Ending, GraphKey};
use super::limits::{row_bucket, table_bucket, COPIED_ROWS, STEPS_IN_FLIGHT};
use super::mask_uploads::UploadedMasks;
use super::model::DeviceModel;
use super::record::{RecordExtras, RecordShape};
use super::step_memory::{no_slot, DeviceSteps, Unchosen};
use super::workspace::{copy_floats, DeviceWorkspace};
use crate::backend::PinnedBuffer;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::batch::ForwardBatch;
use crate::model::config::ModelConfig;
use crate::model::decoder::device::{rows_of, DevicePass, Wanted};
use crate::model::kv_cache::KvCache;
use crate::model::step::{Step, StepResult, TokenChoice, WriteMasks, NO_TOKEN};
use crate::ops::adjust_logits::cuda::{adjust_logits, mask_logits, masks_in_place};
use crate::ops::attention::DecodeScratch;
use crate::ops::copy::copy;
use crate::ops::elementwise::cast;
use crate::ops::sample::sample;

/// The maximum number of sequences whose decoding is a graph, where it is not the chain.
const MAX_PORTABLE_GRAPH_ROWS: usize = 8;

impl DeviceModel {
    /// Begins a step, as [`crate::model::Model::begin_step`] does. The batch must be valid.
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
        if steps.unchosen.is_some() {
            return Err(Error::internal("a step before the tokens of the last one are chosen"));
        }
        steps.extras.masks.reserve(step)?;
        let slot = steps.next;
        // Until the step has begun, no step may use its tokens, nor those that it overwrites.
        steps.last_rows.clear();
        let result = steps.results.get(slot).ok_or_else(no_slot)?;
        let extras = RecordExtras {
            token_sources: step.token_sources,
            choices: step.choices,
            host_tokens: result.tokens.device_address(0),
            spare_block: kv.spare_block(),
        };
        let ending = if changes_logits(step) {
            Ending::Logits
        } else {
            Ending::Tokens { is_filtered: is_filtered(step.choices) }
        };
        let entered = self.cuda()?.enter()?;
        let queued = self
            .queue_step(config, batch, &extras, kv, workspace, ending, should_stop)
            .and_then(|()| self.queue_extras(config, step, slot, workspace))
            .and_then(|()| self.queue_copies(config, step.choices, slot, workspace));
        let steps = &mut workspace.steps;
        let result = steps.results.get_mut(slot).ok_or_else(no_slot)?;
        // Kernels may write there even if only part of the step was queued.
        let marked = result.tokens.set_in_use();
        if let Err(error) = queued.and(marked) {
            steps.unchosen = None;
            return Err(error);
        }
        result.num_rows = num_rows;
        if steps.unchosen.is_none() {
            steps.clock.end(self.cuda()?)?;
        }
        steps.pending.push_back(slot);
        steps.next = (slot + 1) % STEPS_IN_FLIGHT;
        steps.last_rows.clear();
        let chosen = step.choices.iter().map(|choice| *choice != TokenChoice::Caller);
        steps.last_rows.extend(chosen);
        drop(entered);
        Ok(())
    }

    /// Queues the forward pass and its `ending`.
    #[allow(clippy::too_many_arguments)] // the parts of one step
    fn queue_step(
        &self,
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
        kv: &KvCache,
        workspace: &mut DeviceWorkspace,
        ending: Ending,
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
            let linear = self.linear.of_rows(&self.context, batch.max_rows())?;
            let pass = self.pass(config, &record, &wanted, linear, workspace, should_stop)?;
            return self.finish_pass(&pass, kv, workspace, ending);
        }
        // Steps of about the same size share a graph.
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
            ending,
            profile: self.cuda()?.profile_generation(),
        };
        let mut graphs = std::mem::take(&mut workspace.steps.graphs);
        let queue = || {
            let wanted = Wanted::of_decode(config, &record, &self.attention);
            let linear = self.linear.chain(&self.context, rows)?;
            let pass = self.pass(config, &record, &wanted, linear, workspace, &|| false)?;
            let queue = || self.finish_pass(&pass, kv, workspace, ending);
            linear.with_memory_divided(config.hidden_size, rows, queue)
        };
        // Each stands for the allocation that it is a part of. (One may occur several times: this
        // runs for every token, and a list without repetitions would be allocated each time.)
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

    /// Returns the maximum number of sequences whose decoding is a graph.
    fn max_graph_rows(&self) -> usize {
        self.linear.max_chain_rows().unwrap_or(MAX_PORTABLE_GRAPH_ROWS)
    }

    /// Queues a pass, the logits of the wanted rows and the `ending`.
    fn finish_pass(
        &self,
        pass: &DevicePass<'_>,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
        ending: Ending,
    ) -> Result<()> {
        let Some(mut act) = pass.run(kv, workspace)? else { return Ok(()) };
        let logits = rows_of(&workspace.logits, act.stream.num_rows())?;
        pass.logits(&mut act, &logits)?;
        let Ending::Tokens { is_filtered } = ending else { return Ok(()) };
        sample(&self.context, &logits, &workspace.steps.buffers(pass.record), is_filtered)?;
        pass.cuda.mark("sample", 0, 0.0)
    }

    /// Queues what a step needs besides: the choice of tokens from changed logits, and
    /// log-probabilities.
    fn queue_extras(
        &self,
        config: &ModelConfig,
        step: &Step<'_>,
        slot: usize,
        workspace: &mut DeviceWorkspace,
    ) -> Result<()> {
        let steps = &mut workspace.steps;
        steps.results.get_mut(slot).ok_or_else(no_slot)?.log_probs.forget();
        if step.choices.is_empty() {
            return Ok(());
        }
        let changes = needs_upload(step).then(|| steps.extras.upload(step)).transpose()?;
        if step.masked_rows.is_empty() {
            return self.queue_choice(config, step, slot, workspace, changes, None);
        }
        steps.unchosen = Some(Unchosen { slot, changes });
        Ok(())
    }

    /// Queues the choice of tokens from logits that change, as `changes` and `masks` say, and
    /// log-probabilities.
    fn queue_choice(
        &self,
        config: &ModelConfig,
        step: &Step<'_>,
        slot: usize,
        workspace: &mut DeviceWorkspace,
        changes: Option<UploadedChanges>,
        masks: Option<UploadedMasks>,
    ) -> Result<()> {
        let (context, cuda) = (&*self.context, self.cuda()?);
        let shape = [step.choices.len(), config.vocab_size];
        let logits = workspace.logits.view(0, &shape, None)?;
        // The model's own logits are needed again for log-probabilities alone.
        let stay = changes.is_none()
            && masks_in_place(self.dtype())
            && step.log_probs.iter().all(Option::is_none);
        let changed = match (&changes, &masks) {
            (None, None) => logits.view(0, &shape, None)?,
            (None, Some(_)) if stay => logits.view(0, &shape, None)?,
            _ => workspace.logits_f32.view(0, &shape, None)?,
        };
        if changes_logits(step) {
            let steps = &mut workspace.steps;
            let mut source = &logits;
            let adjusts = !step.adjusted_rows.is_empty() || masks.is_none();
            if let Some(changes) = changes.as_ref().filter(|_| adjusts) {
                match self.dtype() {
                    DType::F32 => copy(context, &logits, &changed)?,
                    _ => cast(context, &logits, &changed)?,
                }
                let (rows, adjustments) = (&changes.rows, &changes.adjustments);
                adjust_logits(context, &changed, rows, adjustments, &steps.chosen)?;
                cuda.mark("adjust", 0, 0.0)?;
                source = &changed;
            }
            if let Some(UploadedMasks { indices, masks }) = &masks {
                mask_logits(context, source, &changed, indices, masks)?;
                steps.extras.masks.set_used()?;
                cuda.mark("mask", 0, 0.0)?;
            }
            let record = steps.record.arrays(&RecordShape::of(&step.batch))?;
            sample(context, &changed, &steps.buffers(&record), is_filtered(step.choices))?;
            cuda.mark("sample", 0, 0.0)?;
        }
        if step.log_probs.iter().any(Option::is_some) {
            let DeviceSteps { extras, chosen, results, .. } = &mut workspace.steps;
            let slot = &mut results.get_mut(slot).ok_or_else(no_slot)?.log_probs;
            extras.queue_log_probs(step, &logits, &changed, chosen, slot)?;
            cuda.mark("log_probs", 0, 0.0)?;
        }
        Ok(())
    }

    /// Chooses the tokens of a step with masked rows, as
    /// [`crate::model::Model::choose_masked`] does.
    pub fn choose_masked(
        &self,
        config: &ModelConfig,
        step: &Step<'_>,
        workspace: &mut DeviceWorkspace,
        write_masks: &mut WriteMasks<'_>,
    ) -> Result<()> {
        let steps = &mut workspace.steps;
        let unchosen = steps.unchosen.take();
        let Unchosen { slot, changes } =
            unchosen.ok_or_else(|| Error::internal("no step waits for masks"))?;
        let _entered = self.cuda()?.enter()?;
        let uploaded = steps.extras.masks.upload(step, write_masks);
        let queued = uploaded.and_then(|masks| {
            self.queue_choice(config, step, slot, workspace, changes, Some(masks))
        });
        let steps = &mut workspace.steps;
        let result = steps.results.get_mut(slot).ok_or_else(no_slot)?;
        // Whatever was queued, kernels may write there, and the step ends here.
        let marked = result.tokens.set_in_use();
        let ended = steps.clock.end(self.cuda()?);
        queued.and(marked).and(ended)
    }

    /// Queues the copies to the host of the logits that the caller asks for.
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
        // Powers of two, for few sizes: pinned memory is kept for good.
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

    /// Finishes a step, as [`crate::model::Model::finish_step`] does.
    pub fn finish_step(
        &self,
        config: &ModelConfig,
        workspace: &mut DeviceWorkspace,
        out: &mut StepResult,
    ) -> Result<()> {
        let steps = &mut workspace.steps;
        let slot = steps.pending.pop_front();
        let slot = slot.ok_or_else(|| Error::internal("no step is under way"))?;
        let was_chosen = steps.unchosen.take_if(|unchosen| unchosen.slot == slot).is_none();
        if !was_chosen {
            // Its tokens are not wanted any more.
            steps.clock.end(self.cuda()?)?;
        }
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
            [a, b, c, d] if was_chosen => u32::from_ne_bytes([a, b, c, d]),
            _ => NO_TOKEN,
        }));
        result.log_probs.take(&mut out.log_probs)?;
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

/// Whether every sequence has one token, whose logits are wanted.
fn is_decode(batch: &ForwardBatch<'_>) -> bool {
    let num_tokens = batch.num_tokens() as u32;
    batch.cu_seqlens_q.iter().copied().eq(0..=num_tokens)
        && batch.logits_rows.iter().copied().eq(0..num_tokens)
}
