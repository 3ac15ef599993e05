//! The steps between the projection and the attention on the CPU, in f32: RMSNorm of each head of q and
//! k where a model has it, rotary embedding where it has that, and keys and values into the cache.
//!
//! A few tokens take all steps on one thread before the next do, so that their heads come from memory
//! once. The bits are those of [`rms_norm_heads`](crate::ops::rms_norm::cpu_heads::rms_norm_heads),
//! [`rope`](crate::ops::rope::cpu_table::rope) and
//! [`kv_cache_append`](crate::ops::kv_cache::cpu::kv_cache_append) in turn.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Error, Result};
use crate::ops::common::check::check_strided;
use crate::ops::kv_cache::cpu::Append;
use crate::ops::kv_cache::layout::{KvBlocks, BLOCK_SIZE};
use crate::ops::rms_norm::cpu_heads::HeadsInPlace;
use crate::ops::rope::cpu::Rotate;
use crate::ops::rope::cpu_table::RopeTable;
use crate::ops::rope::RopePairing;
use std::ops::Range;

/// The values of q, k and v that a core's second-level cache is taken to hold: 1 MiB.
const CACHED_VALUES: usize = 1 << 18;

/// What becomes of the heads of the tokens of a batch.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// The number of heads of q.
    pub num_heads: usize,
    /// The weights of the norms of q and of k, [head_dim] each.
    pub norms: Option<(&'a [f32], &'a [f32])>,
    /// The epsilon of the norms, inside the root.
    pub eps: f32,
    /// The angles; pairs are halves apart.
    pub rope: Option<&'a RopeTable>,
    /// The position of each token.
    pub positions: &'a [u32],
    /// Where the keys and values of each token go: block `slot / 32`, place `slot % 32`.
    pub slots: &'a [u32],
}

/// Normalises and rotates the heads of q and k of qkv [num_tokens, num_heads + 2 * num_kv_heads,
/// head_dim] in place, and writes keys and values to `cache`.
pub fn qk_norm_rope_append(
    backend: &CpuBackend,
    qkv: &mut [f32],
    how: &QkNormRope<'_>,
    cache: &mut KvBlocks<'_>,
) -> Result<()> {
    let layout = *cache.layout();
    let (num_kv_heads, head_dim) = (layout.num_kv_heads, layout.head_dim);
    let heads = how.num_heads.saturating_add(2 * num_kv_heads);
    let num_tokens = how.slots.len();
    let stride = heads.saturating_mul(head_dim);
    check_strided("qk_norm_rope_append", qkv.len(), num_tokens, stride, heads, head_dim)?;
    let widths = how.norms.iter().flat_map(|(q, k)| [q.len(), k.len()]);
    let mut widths = widths.chain(how.rope.map(RopeTable::head_dim));
    if how.positions.len() != num_tokens || widths.any(|width| width != head_dim) {
        return Err(Error::internal(format!(
            "qk_norm_rope_append: {} positions for {num_tokens} tokens, heads of {head_dim}",
            how.positions.len()
        )));
    }
    if num_tokens == 0 {
        return Ok(());
    }
    if let Some(table) = how.rope {
        how.positions.iter().try_for_each(|&position| table.prepare(position))?;
    }
    let q = SendPointer(qkv.as_mut_ptr());
    // SAFETY: `check_strided` has found that every token has a row of all heads.
    let append = unsafe {
        let k = q.get().wrapping_add(how.num_heads * head_dim);
        let v = k.wrapping_add(num_kv_heads * head_dim);
        Append::new(k, v, stride, how.slots, cache)?
    };
    let at_once = (CACHED_VALUES / stride.max(1)).max(1);
    let turn = |tokens: Range<usize>| {
        let mut first = tokens.start;
        while first < tokens.end {
            let tokens = first..cut(how.slots, tokens.end.min(first + at_once));
            // SAFETY: a run's tokens lie in qkv, and nobody else uses their rows.
            backend.run(unsafe { TurnHeads::new(q.get(), stride, how, head_dim, tokens.clone()) });
            // SAFETY: no other run has tokens of these blocks, and the rows are not in use otherwise.
            unsafe { append.write(backend, tokens.clone(), 0..num_kv_heads) };
            first = tokens.end;
        }
    };
    let count = backend.runs_of(num_tokens, stride);
    if count <= 1 {
        turn(0..num_tokens);
        return Ok(());
    }
    let ends = runs(count, how.slots)?;
    let begins = |run: usize| run.checked_sub(1).and_then(|before| ends.get(before).copied());
    backend.parallel_for(ends.len(), &|run| turn(begins(run).unwrap_or(0)..ends[run]))
}

/// Returns the next token from `at` on whose block is not that of the token before it.
fn cut(slots: &[u32], at: usize) -> usize {
    let block_of = |token: usize| slots.get(token).map(|&slot| slot as usize / BLOCK_SIZE);
    let mut at = at;
    while 0 < at && at < slots.len() && block_of(at) == block_of(at - 1) {
        at += 1;
    }
    at
}

/// Divides tokens into about `count` runs such that no block belongs to two of them; returns where each
/// ends.
fn runs(count: usize, slots: &[u32]) -> Result<Vec<usize>> {
    let mut ends = try_with_capacity(count.max(1), "runs of tokens")?;
    for run in 1..count {
        let end = cut(slots, slots.len() * run / count);
        if ends.last().is_none_or(|&last| last < end) && end < slots.len() {
            ends.push(end);
        }
    }
    ends.push(slots.len());
    if ends.len() > 1 {
        // The first token of each stretch of tokens in one block.
        let mut firsts = try_with_capacity(slots.len(), "blocks of tokens")?;
        let mut token = 0;
        while token < slots.len() {
            firsts.push((slots[token] as usize / BLOCK_SIZE, token));
            token = cut(slots, token + 1);
        }
        firsts.sort_unstable();
        let run_of = |token: usize| ends.partition_point(|&end| end <= token);
        let is_shared = |pair: &[(usize, usize)]| {
            pair[0].0 == pair[1].0 && run_of(pair[0].1) != run_of(pair[1].1)
        };
        if firsts.windows(2).any(is_shared) {
            ends.clear();
            ends.push(slots.len());
        }
    }
    Ok(ends)
}

/// Normalises and rotates the heads of some tokens.
struct TurnHeads<'a> {
    rows: &'a mut [f32],
    stride: usize,
    how: &'a QkNormRope<'a>,
    head_dim: usize,
    num_kv_heads: usize,
    positions: &'a [u32],
}

impl<'a> TurnHeads<'a> {
    /// # Safety
    /// `q` has a row of `stride` values for each of `tokens`, which nobody else uses while this lives.
    unsafe fn new(
        q: *mut f32,
        stride: usize,
        how: &'a QkNormRope<'a>,
        head_dim: usize,
        tokens: Range<usize>,
    ) -> Self {
        // SAFETY: passed on to the caller.
        let rows = unsafe {
            std::slice::from_raw_parts_mut(q.add(tokens.start * stride), tokens.len() * stride)
        };
        let num_kv_heads = (stride / head_dim.max(1) - how.num_heads) / 2;
        let positions = how.positions.get(tokens).unwrap_or_default();
        TurnHeads { rows, stride, how, head_dim, num_kv_heads, positions }
    }
}

impl Kernel for TurnHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let QkNormRope { num_heads, norms, eps, rope, .. } = *self.how;
        let (q_len, k_len) = (num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        for (row, &position) in self.rows.chunks_exact_mut(self.stride).zip(self.positions) {
            let (row, _) = row.split_at_mut(q_len + k_len);
            if let Some((q_weight, k_weight)) = norms {
                let (q, k) = row.split_at_mut(q_len);
                HeadsInPlace { x: q, weight: q_weight, eps }.run::<S>();
                HeadsInPlace { x: k, weight: k_weight, eps }.run::<S>();
            }
            if let Some(table) = rope {
                let (cos, sin) = table.angles(position);
                Rotate { row, cos, sin, pairing: RopePairing::SplitHalf }.run::<S>();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_blocks_do() {
        let slots: Vec<u32> = (40..140).collect();
        // Blocks end after 24, 56 and 88 tokens.
        assert_eq!(runs(4, &slots).unwrap(), [56, 88, 100]);
        assert_eq!(runs(1, &slots).unwrap(), [100]);
    }

    #[test]
    fn blocks_of_two_runs_make_one() {
        // Every other token goes to block 0.
        let slots: Vec<u32> =
            (0..60).map(|i| if i % 2 == 0 { i / 2 } else { 32 * (i + 1) }).collect();
        assert_eq!(runs(4, &slots).unwrap(), [60]);
    }
}
