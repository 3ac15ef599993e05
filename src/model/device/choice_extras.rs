//! The work of some steps besides the choice of tokens: logits that change before it, and
//! log-probabilities after it. Neither is part of a graph, so steps without them are as they were.

use std::sync::Arc;

use super::limits::{MAX_STEP_ROWS, STEPS_IN_FLIGHT};
use super::mask_uploads::MaskUploads;
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::step::{
    LogProbs, LogProbsWanted, ScoresOut, Step, TokenChoice, TokenLogProb, TokenScore,
    MAX_TOP_LOG_PROBS,
};
use crate::ops::adjust_logits::{AdjustedRow, ADJUSTED_ROW_WORDS, ADJUSTMENT_WORDS};
use crate::ops::argmax::argmax;
use crate::ops::log_probs::cuda::{log_probs, LogProbsList};
use crate::ops::sample::LEAST_TEMPERATURE;
use crate::ops::top_k::top_k;

/// The number of adjustments that there is room for from the start; it grows for more.
const FIRST_ADJUSTMENTS: usize = 1 << 16;
const FIRST_WORDS: usize =
    MAX_STEP_ROWS * ADJUSTED_ROW_WORDS + FIRST_ADJUSTMENTS * ADJUSTMENT_WORDS;
/// The initial number of words on the host.
const FIRST_HOST_WORDS: usize = 1 << 14;

const MAX_TOP: usize = MAX_TOP_LOG_PROBS as usize;
/// The most tokens of a step whose log-probabilities are told beside those that were chosen.
const TOP_LEN: usize = MAX_STEP_ROWS * MAX_TOP;

/// The two kinds of log-probabilities: of the model's own logits, and of processed ones.
const KINDS: [bool; 2] = [false, true];
/// The bytes of one kind in [`LogProbsSlot::host`]: of the chosen tokens, ids and those of the ids.
const KIND_BYTES: usize = (MAX_STEP_ROWS + 2 * TOP_LEN) * 4;

/// The memory for it, beside [`DeviceWorkspace::logits_f32`](super::workspace::DeviceWorkspace).
pub(super) struct ChoiceExtras {
    context: Arc<ComputeContext>,
    /// The rows and the adjustments of a step.
    words: DeviceTensor,
    /// `[MAX_STEP_ROWS]`
    temperatures: DeviceTensor,
    pub(super) masks: MaskUploads,
    /// One for each step in flight.
    host: Vec<PinnedBuffer>,
    next: usize,
    /// `[TOP_LEN]` of the model's dtype and of f32.
    top_values: [DeviceTensor; 2],
    /// `[TOP_LEN]`
    top_ids: DeviceTensor,
    /// `[MAX_STEP_ROWS]`
    chosen_log_probs: DeviceTensor,
    /// `[TOP_LEN]`
    top_log_probs: DeviceTensor,
}

/// The changes of a step on the device.
pub(super) struct UploadedChanges {
    /// `[num_rows, ADJUSTED_ROW_WORDS]`
    pub rows: DeviceTensor,
    /// `[at least 1, ADJUSTMENT_WORDS]`
    pub adjustments: DeviceTensor,
}

/// The memory in which the log-probabilities of a step arrive.
#[derive(Default)]
pub(super) struct LogProbsSlot {
    host: Option<PinnedBuffer>,
    /// Those of each row; empty if none is wanted.
    wanted: Vec<Option<LogProbsWanted>>,
    /// The number of likeliest tokens of each row, by kind.
    counts: [usize; 2],
}

const F32: ElementType = ElementType::Float(DType::F32);

/// Returns the sizes of the tensors on the device, in the order of [`ChoiceExtras::new`].
fn sizes(dtype: DType, vocab_size: usize) -> [(ElementType, usize); 8] {
    [
        (ElementType::I32, FIRST_WORDS),
        (F32, MAX_STEP_ROWS),
        (ElementType::I32, MaskUploads::len(vocab_size)),
        (ElementType::Float(dtype), TOP_LEN),
        (F32, TOP_LEN),
        (ElementType::I32, TOP_LEN),
        (F32, MAX_STEP_ROWS),
        (F32, TOP_LEN),
    ]
}

/// Whether a step's logits change before its tokens are chosen, which is not part of its graph then.
pub(super) fn changes_logits(step: &Step<'_>) -> bool {
    needs_upload(step) || !step.masked_rows.is_empty()
}

/// Whether a step needs what [`ChoiceExtras::upload`] uploads, beside masks.
pub(super) fn needs_upload(step: &Step<'_>) -> bool {
    !step.adjusted_rows.is_empty() || step.log_probs.iter().flatten().any(|it| it.processed)
}

impl ChoiceExtras {
    /// Returns the bytes of device memory, whatever the model's dtype.
    pub fn device_bytes(vocab_size: usize) -> Result<usize> {
        sizes(DType::F32, vocab_size).iter().try_fold(0usize, |sum, &(element, len)| {
            Ok(sum.saturating_add(Arena::bytes_for(element, &[len])?))
        })
    }

    /// Allocates the memory for steps of a model of this dtype.
    pub fn new(context: &Arc<ComputeContext>, dtype: DType, vocab_size: usize) -> Result<Self> {
        let bytes = Self::device_bytes(vocab_size)?;
        let mut arena = Arena::new(context, bytes, "the choice of tokens")?;
        let mut sizes = sizes(dtype, vocab_size).into_iter();
        let mut next = || {
            let (element, len) =
                sizes.next().ok_or_else(|| Error::internal("a tensor too many"))?;
            arena.tensor(element, &[len])
        };
        let (words, temperatures, masks) = (next()?, next()?, next()?);
        let top_values = [next()?, next()?];
        let mut host = try_with_capacity(STEPS_IN_FLIGHT, "steps")?;
        for _ in 0..STEPS_IN_FLIGHT {
            host.push(PinnedBuffer::new(context, FIRST_HOST_WORDS * 4, WHAT)?);
        }
        Ok(ChoiceExtras {
            context: context.clone(),
            words,
            temperatures,
            masks: MaskUploads::new(context, masks, vocab_size)?,
            host,
            next: 0,
            top_values,
            top_ids: next()?,
            chosen_log_probs: next()?,
            top_log_probs: next()?,
        })
    }

    /// Queues the copy of a step's changes and temperatures to the device.
    pub fn upload(&mut self, step: &Step<'_>) -> Result<UploadedChanges> {
        let num_rows = step.choices.len();
        let (row_words, count) = (num_rows * ADJUSTED_ROW_WORDS, step.adjustments.len());
        let words = row_words.saturating_add(count.max(1).saturating_mul(ADJUSTMENT_WORDS));
        if words > self.words.num_elements() as usize {
            // Steps in flight read the old one.
            self.context.synchronize()?;
            let len = words.next_power_of_two();
            let bytes = Arena::bytes_for(ElementType::I32, &[len])?;
            self.words =
                Arena::new(&self.context, bytes, WHAT)?.tensor(ElementType::I32, &[len])?;
        }
        let (words_bytes, bytes) = (words * 4, (words + num_rows) * 4);
        self.next = (self.next + 1) % self.host.len().max(1);
        let host = self.host.get_mut(self.next);
        let host = host.ok_or_else(|| Error::internal("no memory for changed logits"))?;
        if bytes > host.len_bytes() {
            *host = PinnedBuffer::new(&self.context, bytes.next_power_of_two(), WHAT)?;
        }
        let room = host.bytes()?;
        let rows =
            step.adjusted_rows.iter().copied().chain(std::iter::repeat(AdjustedRow::UNCHANGED));
        let rows = rows.take(num_rows).flat_map(|row| row.words());
        let adjustments = step.adjustments.iter().flat_map(|adjustment| adjustment.words());
        let temperatures = step.choices.iter().map(|choice| match choice {
            TokenChoice::Draw(draw) => draw.temperature.max(LEAST_TEMPERATURE).to_bits(),
            TokenChoice::Greedy | TokenChoice::Caller => 1f32.to_bits(),
        });
        let (first, rest) = room.split_at_mut_checked(row_words * 4).unwrap_or_default();
        put(first, rows);
        put(rest, adjustments);
        put(room.get_mut(words_bytes..bytes).unwrap_or_default(), temperatures);
        host.upload(0..words_bytes, &self.words, 0)?;
        host.upload(words_bytes..bytes, &self.temperatures, 0)?;
        host.fence()?;
        Ok(UploadedChanges {
            rows: self.words.view(0, &[num_rows, ADJUSTED_ROW_WORDS], None)?,
            adjustments: self.words.view(row_words, &[count.max(1), ADJUSTMENT_WORDS], None)?,
        })
    }

    /// Queues the computation of the log-probabilities that a step wants, and their copies to `slot`.
    /// `logits` and `changed` (if [`needs_upload`]) are `[num_rows, vocab_size]`, `chosen` has its tokens.
    pub fn queue_log_probs(
        &self,
        step: &Step<'_>,
        logits: &DeviceTensor,
        changed: &DeviceTensor,
        chosen: &DeviceTensor,
        slot: &mut LogProbsSlot,
    ) -> Result<()> {
        if step.log_probs.iter().all(Option::is_none) {
            return Ok(());
        }
        let no_memory = |_| Error::out_of_memory(WHAT, size_of_val(step.log_probs));
        slot.wanted.try_reserve(step.log_probs.len()).map_err(no_memory)?;
        let mut host = match slot.host.take() {
            Some(host) => host,
            None => PinnedBuffer::new(&self.context, KINDS.len() * KIND_BYTES, WHAT)?,
        };
        let num_rows = step.choices.len();
        let vocab_size = logits.width() as usize;
        for (kind, processed) in KINDS.into_iter().enumerate() {
            let wanted = step.log_probs.iter().flatten().filter(|it| it.processed == processed);
            let Some(count) = wanted.map(|it| it.num_top as usize).max() else { continue };
            let count = count.min(MAX_TOP).min(vocab_size);
            let (source, temperatures) = if processed {
                (changed, Some(self.temperatures.view(0, &[num_rows], None)?))
            } else {
                (logits, None)
            };
            let temperatures = temperatures.as_deref();
            let at = kind * KIND_BYTES;
            let ids = chosen.view(0, &[num_rows, 1], None)?;
            let out = self.chosen_log_probs.view(0, &[num_rows, 1], None)?;
            let list = LogProbsList { ids: &ids, out: &out };
            if let Some(place) = slot.counts.get_mut(kind) {
                *place = count;
            }
            if count == 0 {
                log_probs(&self.context, source, temperatures, list, None)?;
                host.download(&out, at)?;
                continue;
            }
            let values = self.top_values.get(usize::from(processed));
            let values = values.ok_or_else(|| Error::internal("no memory for logits"))?;
            let values = values.view(0, &[num_rows, count], None)?;
            let top_ids = self.top_ids.view(0, &[num_rows, count], None)?;
            let top_out = self.top_log_probs.view(0, &[num_rows, count], None)?;
            top_k(&self.context, source, &values, &top_ids)?;
            let top = LogProbsList { ids: &top_ids, out: &top_out };
            log_probs(&self.context, source, temperatures, list, Some(top))?;
            host.download(&out, at)?;
            host.download(&top_ids, at + MAX_STEP_ROWS * 4)?;
            host.download(&top_out, at + (MAX_STEP_ROWS + TOP_LEN) * 4)?;
        }
        host.fence()?;
        slot.host = Some(host);
        slot.wanted.extend_from_slice(step.log_probs);
        Ok(())
    }

    /// Scores one token for each row of `logits` `[num_rows, vocab_size]`, at most MAX_STEP_ROWS of
    /// them, and waits for the scores.
    pub fn read_scores(&mut self, logits: &DeviceTensor, out: ScoresOut<'_>) -> Result<()> {
        const LOG_PROBS_AT: usize = MAX_STEP_ROWS * 4;
        const TOP_AT: usize = 2 * MAX_STEP_ROWS * 4;
        let num_top = out.num_top();
        let ScoresOut { tokens, scores, top } = out;
        let num_rows = tokens.len();
        let bytes = TOP_AT + 2 * top.len() * 4;
        let host = self.host.get_mut(self.next);
        let host = host.ok_or_else(|| Error::internal("no memory for scores"))?;
        if bytes > host.len_bytes() {
            *host = PinnedBuffer::new(&self.context, bytes.next_power_of_two(), WHAT)?;
        }
        put(host.bytes()?, tokens.iter().copied());
        host.upload(0..num_rows * 4, &self.words, 0)?;
        let ids = self.words.view(0, &[num_rows, 1], None)?;
        let likeliest = self.words.view(MAX_STEP_ROWS, &[num_rows], None)?;
        let chosen = self.chosen_log_probs.view(0, &[num_rows, 1], None)?;
        let list = LogProbsList { ids: &ids, out: &chosen };
        argmax(&self.context, logits, &likeliest)?;
        if num_top == 0 {
            log_probs(&self.context, logits, None, list, None)?;
        } else {
            let shape = [num_rows, num_top];
            let of_type = |values: &&DeviceTensor| values.element() == logits.element();
            let values = self.top_values.iter().find(of_type);
            let values = values.ok_or_else(|| Error::internal("no memory for logits"))?;
            let values = values.view(0, &shape, None)?;
            let top_ids = self.top_ids.view(0, &shape, None)?;
            let top_out = self.top_log_probs.view(0, &shape, None)?;
            top_k(&self.context, logits, &values, &top_ids)?;
            let list_of_top = LogProbsList { ids: &top_ids, out: &top_out };
            log_probs(&self.context, logits, None, list, Some(list_of_top))?;
            host.download(&top_ids, TOP_AT)?;
            host.download(&top_out, TOP_AT + top.len() * 4)?;
        }
        host.download(&likeliest, 0)?;
        host.download(&chosen, LOG_PROBS_AT)?;
        host.fence()?;
        let bytes = host.bytes()?;
        for (row, (score, &token)) in scores.iter_mut().zip(tokens).enumerate() {
            *score = TokenScore {
                log_prob: f32::from_bits(word(bytes, LOG_PROBS_AT + row * 4)),
                is_likeliest: word(bytes, row * 4) == token,
            };
        }
        let log_probs_at = TOP_AT + top.len() * 4;
        for (place, to) in top.iter_mut().enumerate() {
            *to = TokenLogProb {
                token_id: word(bytes, TOP_AT + place * 4),
                log_prob: f32::from_bits(word(bytes, log_probs_at + place * 4)),
            };
        }
        Ok(())
    }
}

impl LogProbsSlot {
    /// Drops what an earlier step left, which may never have been taken.
    pub fn forget(&mut self) {
        self.wanted.clear();
    }

    /// Waits for the log-probabilities of the step that was begun with this slot, and moves them to
    /// `out`, which is empty if none were wanted.
    pub fn take(&mut self, out: &mut Vec<Option<Box<LogProbs>>>) -> Result<()> {
        out.clear();
        let Some(host) = self.host.as_mut().filter(|_| !self.wanted.is_empty()) else {
            return Ok(());
        };
        let bytes = host.bytes()?;
        let word = |at: usize| word(bytes, at);
        let no_memory = |_| Error::out_of_memory(WHAT, self.wanted.len() * 8);
        out.try_reserve(self.wanted.len()).map_err(no_memory)?;
        for (row, wanted) in self.wanted.iter().enumerate() {
            let Some(wanted) = wanted else {
                out.push(None);
                continue;
            };
            let kind = usize::from(wanted.processed);
            let (at, count) = (kind * KIND_BYTES, self.counts.get(kind).copied().unwrap_or(0));
            let len = count.min(wanted.num_top as usize);
            let mut top = try_with_capacity(len, WHAT)?;
            for place in row * count..row * count + len {
                let id_at = at + (MAX_STEP_ROWS + place) * 4;
                top.push(TokenLogProb {
                    token_id: word(id_at),
                    log_prob: f32::from_bits(word(id_at + TOP_LEN * 4)),
                });
            }
            out.push(Some(Box::new(LogProbs { chosen: f32::from_bits(word(at + row * 4)), top })));
        }
        self.wanted.clear();
        Ok(())
    }
}

/// The purpose of the memory, for error messages.
const WHAT: &str = "log-probabilities and changed logits";

/// Returns the number at a place of some bytes.
fn word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at.saturating_add(4)) {
        Some(&[a, b, c, d]) => u32::from_ne_bytes([a, b, c, d]),
        _ => 0,
    }
}

/// Writes numbers to bytes, as far as there is room.
fn put(bytes: &mut [u8], values: impl Iterator<Item = u32>) {
    for (word, value) in bytes.chunks_exact_mut(4).zip(values) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}
