//! The one input of the forward pass: a ragged batch of sequences.
//!
//! Prefill, decode, chunked prefill and any mixture of them are values of this struct.

use super::config::ModelConfig;
use super::kv_cache::KvCache;
use crate::error::{Error, Result};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// The tokens to run, sequence after sequence, and where each sequence's keys and values lie.
///
/// Sequence `s` contributes the tokens `cu_seqlens_q[s]..cu_seqlens_q[s + 1]`, the last ones of its
/// `context_lens[s]` tokens; the keys and values of the ones before are in the cache already.
#[derive(Clone, Copy, Debug)]
pub struct ForwardBatch<'a> {
    /// `[num_tokens]`, each below `vocab_size`.
    pub token_ids: &'a [u32],
    /// `[num_tokens]`, the position of each token in its sequence, from 0.
    pub positions: &'a [u32],
    /// `[num_tokens]`, where the token's key and value go: `block * BLOCK_SIZE + offset`.
    pub slot_mapping: &'a [u32],
    /// `[num_seqs + 1]`, first 0, last `num_tokens`.
    pub cu_seqlens_q: &'a [u32],
    /// `[num_seqs]`, tokens of the sequence up to and including this batch.
    pub context_lens: &'a [u32],
    /// `[num_seqs, max_blocks_per_seq]`, the cache blocks of each sequence in order; entries after
    /// the blocks that `context_lens` needs are ignored.
    pub block_tables: &'a [u32],
    /// Row length of `block_tables`.
    pub max_blocks_per_seq: usize,
    /// The rows of the batch whose logits are wanted, in the order wanted.
    pub logits_rows: &'a [u32],
}

impl ForwardBatch<'_> {
    /// Returns the number of tokens of all sequences.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Returns the most rows that a layer has: the tokens or, after the last attention, the rows whose
    /// logits are wanted, any of them several times.
    pub fn max_rows(&self) -> usize {
        self.num_tokens().max(self.logits_rows.len())
    }

    /// Returns the number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.context_lens.len()
    }

    /// Checks everything that the forward pass relies on.
    pub fn validate(&self, config: &ModelConfig, kv: &KvCache) -> Result<()> {
        let refuse = |what: String| Err(Error::invalid_argument(what));
        let num_tokens = self.num_tokens();
        if self.positions.len() != num_tokens || self.slot_mapping.len() != num_tokens {
            return refuse(format!(
                "the batch has {num_tokens} tokens, {} positions and {} slots",
                self.positions.len(),
                self.slot_mapping.len()
            ));
        }
        for (row, &id) in self.token_ids.iter().enumerate() {
            if id as usize >= config.vocab_size {
                return refuse(format!(
                    "token id {id} at row {row} is not below the vocabulary size {}",
                    config.vocab_size
                ));
            }
        }
        if let Some(row) = self.logits_rows.iter().find(|&&row| row as usize >= num_tokens) {
            return refuse(format!("logits are wanted of row {row} of {num_tokens}"));
        }
        let ends = self.cu_seqlens_q.get(1..).unwrap_or_default();
        if self.cu_seqlens_q.first() != Some(&0)
            || ends.len() != self.num_seqs()
            || self.cu_seqlens_q.last().map(|&end| end as usize) != Some(num_tokens)
        {
            return refuse(format!(
                "cu_seqlens_q does not divide {num_tokens} tokens among {} sequences",
                self.num_seqs()
            ));
        }
        let table_len = self.num_seqs().checked_mul(self.max_blocks_per_seq);
        if table_len != Some(self.block_tables.len()) {
            return refuse(format!(
                "block_tables has {} entries for {} sequences of at most {} blocks",
                self.block_tables.len(),
                self.num_seqs(),
                self.max_blocks_per_seq
            ));
        }
        let bounds = self.cu_seqlens_q.iter().zip(ends).zip(self.context_lens).enumerate();
        for (seq, ((&begin, &end), &context_len)) in bounds {
            self.validate_sequence(seq, begin, end, context_len, config, kv)
                .map_err(|e| Error::new(e.kind(), format!("sequence {seq}: {}", e.message())))?;
        }
        Ok(())
    }

    fn validate_sequence(
        &self,
        seq: usize,
        begin: u32,
        end: u32,
        context_len: u32,
        config: &ModelConfig,
        kv: &KvCache,
    ) -> Result<()> {
        let refuse = |what: String| Err(Error::invalid_argument(what));
        if end < begin || end - begin > context_len {
            return refuse(format!(
                "its tokens {begin}..{end} are not the last ones of its {context_len}"
            ));
        }
        if context_len as usize > config.max_context_tokens {
            return refuse(format!(
                "{context_len} tokens exceed the model's context of {}",
                config.max_context_tokens
            ));
        }
        let num_blocks = (context_len as usize).div_ceil(BLOCK_SIZE);
        let first = seq * self.max_blocks_per_seq;
        let blocks = match self.block_tables.get(first..first + num_blocks) {
            Some(blocks) if num_blocks <= self.max_blocks_per_seq => blocks,
            _ => {
                return refuse(format!(
                    "{context_len} tokens do not fit into {} blocks",
                    self.max_blocks_per_seq
                ))
            }
        };
        if let Some(block) = blocks.iter().find(|&&block| block as usize >= kv.num_blocks()) {
            return refuse(format!("block {block} of {} in the cache", kv.num_blocks()));
        }
        let rows = begin as usize..end as usize;
        let places = self.positions.get(rows.clone()).zip(self.slot_mapping.get(rows));
        let Some((positions, slots)) = places else {
            return refuse(format!("its tokens {begin}..{end} are outside the batch"));
        };
        for (index, (&position, &slot)) in positions.iter().zip(slots).enumerate() {
            let at = (context_len - (end - begin)) as usize + index;
            let expected = blocks
                .get(at / BLOCK_SIZE)
                .map(|&block| block as usize * BLOCK_SIZE + at % BLOCK_SIZE);
            if position as usize != at || expected != Some(slot as usize) {
                return refuse(format!(
                    "its token {at} has position {position} and slot {slot}, expected slot {expected:?}"
                ));
            }
        }
        Ok(())
    }
}
