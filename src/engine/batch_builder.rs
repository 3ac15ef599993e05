//! The index arrays of a step, whose memory is kept from one step to the next.

use std::ops::Range;

use super::step_size::Limits;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::{ForwardBatch, LogProbsWanted, Step, TokenChoice, FROM_BATCH};
use crate::ops::adjust_logits::{AdjustedRow, Adjustment};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// A sequence's part of a step.
pub(super) struct Part<'a> {
    /// Its tokens from the first one of this step.
    pub token_ids: &'a [u32],
    /// Position of the first one.
    pub start: usize,
    /// All its blocks.
    pub blocks: &'a [u32],
    /// If set, the one token is the one that this row of the step before gives; `token_ids` is then
    /// any valid id.
    pub source: Option<u32>,
}

/// Makes a [`ForwardBatch`] of sequences.
#[derive(Default)]
pub(super) struct BatchBuilder {
    token_ids: Vec<u32>,
    token_sources: Vec<u32>,
    any_source: bool,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    cu_seqlens_q: Vec<u32>,
    context_lens: Vec<u32>,
    block_tables: Vec<u32>,
    max_blocks_per_seq: usize,
    logits_rows: Vec<u32>,
    choices: Vec<TokenChoice>,
    adjusted_rows: Vec<AdjustedRow>,
    adjustments: Vec<Adjustment>,
    log_probs: Vec<Option<LogProbsWanted>>,
    masked_rows: Vec<u32>,
}

impl BatchBuilder {
    /// Returns a builder that never grows for steps within `limits` of sequences of at most
    /// `max_blocks_per_seq` blocks.
    pub fn with_room(limits: &Limits, max_blocks_per_seq: usize) -> Result<Self> {
        let mut builder = BatchBuilder::default();
        for array in [
            &mut builder.token_ids,
            &mut builder.token_sources,
            &mut builder.positions,
            &mut builder.slot_mapping,
        ] {
            room(array, limits.max_step_tokens())?;
        }
        for array in
            [&mut builder.cu_seqlens_q, &mut builder.context_lens, &mut builder.logits_rows]
        {
            room(array, limits.max_sequences.saturating_add(1))?;
        }
        // Only the part that is used is committed.
        room(&mut builder.block_tables, limits.max_sequences.saturating_mul(max_blocks_per_seq))?;
        builder.choices = try_with_capacity(limits.max_sequences, "batch metadata")?;
        Ok(builder)
    }

    /// Begins a batch of sequences of at most `max_blocks_per_seq` blocks.
    pub fn clear(&mut self, max_blocks_per_seq: usize) -> Result<()> {
        self.token_ids.clear();
        self.token_sources.clear();
        self.any_source = false;
        self.positions.clear();
        self.slot_mapping.clear();
        self.cu_seqlens_q.clear();
        self.context_lens.clear();
        self.block_tables.clear();
        self.max_blocks_per_seq = max_blocks_per_seq;
        self.logits_rows.clear();
        self.choices.clear();
        self.adjusted_rows.clear();
        self.adjustments.clear();
        self.log_probs.clear();
        self.masked_rows.clear();
        room(&mut self.cu_seqlens_q, 1)?;
        self.cu_seqlens_q.push(0);
        Ok(())
    }

    /// Adds a sequence. If its last token's logits are wanted, `choice` says how the next token is
    /// chosen.
    pub fn push(&mut self, part: &Part<'_>, choice: Option<TokenChoice>) -> Result<()> {
        let num_new = part.token_ids.len();
        for array in [
            &mut self.token_ids,
            &mut self.token_sources,
            &mut self.positions,
            &mut self.slot_mapping,
        ] {
            room(array, num_new)?;
        }
        room(&mut self.block_tables, self.max_blocks_per_seq)?;
        for array in [&mut self.cu_seqlens_q, &mut self.context_lens, &mut self.logits_rows] {
            room(array, 1)?;
        }
        let no_memory = |_| Error::out_of_memory("batch metadata", size_of::<TokenChoice>());
        self.choices.try_reserve(1).map_err(no_memory)?;

        self.token_ids.extend_from_slice(part.token_ids);
        let source = part.source.unwrap_or(FROM_BATCH);
        self.any_source |= part.source.is_some();
        self.token_sources.extend(std::iter::repeat_n(source, num_new));
        let end = part.start + num_new;
        for position in part.start..end {
            let block = part.blocks.get(position / BLOCK_SIZE).copied();
            let block = block.ok_or_else(|| Error::internal("a position has no KV block"))?;
            self.positions.push(position as u32);
            self.slot_mapping.push(block * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        self.cu_seqlens_q.push(self.token_ids.len() as u32);
        self.context_lens.push(end as u32);
        let blocks = part.blocks.get(..end.div_ceil(BLOCK_SIZE)).unwrap_or_default();
        let padding = self.max_blocks_per_seq.checked_sub(blocks.len());
        let padding = padding.ok_or_else(|| Error::internal("a sequence has too many blocks"))?;
        self.block_tables.extend_from_slice(blocks);
        self.block_tables.extend(std::iter::repeat_n(0, padding));
        if let Some(choice) = choice {
            self.logits_rows.push(self.token_ids.len() as u32 - 1);
            self.choices.push(choice);
        }
        Ok(())
    }

    /// Has the model change the logits of the row that was added last, before it chooses the token.
    pub fn adjust(&mut self, row: AdjustedRow, adjustments: &[Adjustment]) -> Result<()> {
        let (num_rows, first) = (self.logits_rows.len(), self.adjustments.len());
        let missing = num_rows.saturating_sub(self.adjusted_rows.len());
        let no_memory = |_| Error::out_of_memory("batch metadata", size_of_val(adjustments));
        self.adjusted_rows.try_reserve(missing).map_err(no_memory)?;
        self.adjustments.try_reserve(adjustments.len()).map_err(no_memory)?;
        self.adjustments.extend_from_slice(adjustments);
        self.adjusted_rows.resize(num_rows, AdjustedRow::default());
        if let Some(last) = self.adjusted_rows.last_mut() {
            *last = AdjustedRow { first: first as u32, count: adjustments.len() as u32, ..row };
        }
        Ok(())
    }

    /// Asks for log-probabilities of the row that was added last.
    pub fn want_log_probs(&mut self, wanted: LogProbsWanted) -> Result<()> {
        let num_rows = self.logits_rows.len();
        let missing = num_rows.saturating_sub(self.log_probs.len());
        let no_memory = |_| Error::out_of_memory("batch metadata", missing * 16);
        self.log_probs.try_reserve(missing).map_err(no_memory)?;
        self.log_probs.resize(num_rows, None);
        if let Some(last) = self.log_probs.last_mut() {
            *last = Some(wanted);
        }
        Ok(())
    }

    /// Has the token of the row that was added last kept to a mask, which comes later.
    pub fn mask(&mut self) -> Result<()> {
        room(&mut self.masked_rows, 1)?;
        self.masked_rows.extend((self.logits_rows.len() as u32).checked_sub(1));
        Ok(())
    }

    /// Asks for the logits of these tokens, which are numbered from the first one added; after those
    /// that were asked for before.
    pub fn want_rows(&mut self, rows: Range<usize>) -> Result<()> {
        room(&mut self.logits_rows, rows.len())?;
        self.logits_rows.extend(rows.start as u32..rows.end as u32);
        Ok(())
    }

    /// Returns the step.
    pub fn step(&self) -> Step<'_> {
        Step {
            batch: ForwardBatch {
                token_ids: &self.token_ids,
                positions: &self.positions,
                slot_mapping: &self.slot_mapping,
                cu_seqlens_q: &self.cu_seqlens_q,
                context_lens: &self.context_lens,
                block_tables: &self.block_tables,
                max_blocks_per_seq: self.max_blocks_per_seq,
                logits_rows: &self.logits_rows,
            },
            token_sources: if self.any_source { &self.token_sources } else { &[] },
            choices: &self.choices,
            adjusted_rows: &self.adjusted_rows,
            adjustments: &self.adjustments,
            log_probs: &self.log_probs,
            masked_rows: &self.masked_rows,
        }
    }
}

fn room(array: &mut Vec<u32>, more: usize) -> Result<()> {
    array.try_reserve(more).map_err(|_| Error::out_of_memory("batch metadata", more * 4))
}
