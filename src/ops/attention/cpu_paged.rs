//! Causal attention of new tokens over the paged KV cache, with grouped query heads.
//!
//! `out = softmax(scale * q K^T) V` for each query head h, over kv head
//! `h / (num_heads / num_kv_heads)`; token i of a sequence with q_len new tokens sees keys
//! `0..=context_len - q_len + i`, and with a window of these the last `window` alone.
//!
//! The softmax is computed online in blocks of 32 keys; see [`super::cpu_online_softmax`].
//!
//! Where an instruction set multiplies tiles of bf16 it is computed in stretches of 128 keys; see
//! [`super::cpu_online_tiles`].
//!
//! Blocks begin at absolute positions and a row goes through the same steps whatever rows are
//! beside it, so its bits do not depend on the batch, on how a prompt is cut into chunks, or on
//! threads. Where keys and values are computed with as bf16, q and p are rounded to bf16 for the two
//! products; sums are always f32. A block of a cache of 8-bit floats is widened, exactly, for each
//! tile of rows that goes over it.

use crate::backend::cpu::simd::{Bf16Kernel, Bf16Simd, Simd, TileKernel, TileSimd};
use crate::backend::cpu::tile::{prefetch, Element, F16, F32, MAX_ROWS};
use crate::backend::cpu::tiles::TileUnit;
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer};
use crate::ops::attention::cpu_online_softmax::{
    KeyPanel, Memory, Online, ValuePanel, PARALLEL_BLOCKS, TILE_ROWS,
};
use crate::ops::attention::cpu_online_tiles::{OnlineTiles, Panels, TileMemory};
use crate::ops::attention::cpu_widen::{widen_fp8_to_bf16, widen_fp8_to_f32, widen_panel};
use crate::ops::common::panel_product::grow;
use crate::ops::kv_cache::layout::{KvBlocks, KvFormat, BLOCK_SIZE};
use std::sync::atomic::{AtomicUsize, Ordering};

/// From this many rows on, 16-bit blocks are widened to f32 once per tile.
const WIDEN_FROM_ROWS: usize = 4 * MAX_ROWS;
/// The bytes of the working memory of a thread, of whichever kind.
const LANE_BYTES: usize = {
    let (tiles, rows) = (size_of::<TileMemory>(), size_of::<Memory>());
    if tiles > rows {
        tiles
    } else {
        rows
    }
};

/// Which new tokens belong to which sequence, and where its keys and values lie.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBatch<'a> {
    /// The first token of each sequence, [num_seqs + 1]; the first entry is 0, the last num_tokens.
    pub cu_seqlens_q: &'a [u32],
    /// The number of tokens of each sequence in the cache, the new ones included, [num_seqs].
    pub context_lens: &'a [u32],
    /// The blocks of each sequence in order, [num_seqs, max_blocks_per_seq].
    pub block_tables: &'a [u32],
    /// The number of entries of a row of `block_tables`.
    pub max_blocks_per_seq: usize,
}

/// Buffers that [`attention`] needs; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    lanes: HostBuffer,
    /// The first tile of each sequence, [num_seqs + 1].
    first_tiles: Vec<usize>,
}

impl AttentionScratch {
    /// Makes empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of bytes held.
    pub fn size_bytes(&self) -> usize {
        self.lanes.len_bytes() + self.first_tiles.capacity() * size_of::<usize>()
    }

    /// Returns the most bytes held with `num_threads` threads, except for a few words per sequence.
    pub fn bytes_for(num_threads: usize) -> usize {
        num_threads.saturating_mul(LANE_BYTES)
    }
}

/// Computes attention. q is [num_tokens, num_heads, head_dim] with token rows `q_stride` elements
/// apart; out is [num_tokens, num_heads * head_dim]. The keys and values of the new tokens are in
/// `cache` already. `window` is the most keys that a token sees, itself included; `None`: all.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    backend: &CpuBackend,
    q: &[f32],
    q_stride: usize,
    cache: &KvBlocks<'_>,
    batch: &AttentionBatch<'_>,
    num_heads: usize,
    (scale, window): (f32, Option<usize>),
    out: &mut [f32],
    scratch: &mut AttentionScratch,
) -> Result<()> {
    let layout = *cache.layout();
    let group = num_heads / layout.num_kv_heads;
    let num_tokens = check(q, q_stride, cache, batch, num_heads, out)?;
    if window == Some(0) {
        return Err(Error::internal("attention: a window of no keys"));
    }
    if num_tokens == 0 || num_heads == 0 {
        return Ok(());
    }
    let num_seqs = batch.context_lens.len();
    let AttentionScratch { lanes, first_tiles } = scratch;
    first_tiles.clear();
    first_tiles
        .try_reserve(num_seqs + 1)
        .map_err(|_| Error::out_of_memory("attention tiles", 8 * (num_seqs + 1)))?;
    let (mut num_tiles, mut num_blocks) = (0, 0);
    first_tiles.push(0);
    for (ends, &context_len) in batch.cu_seqlens_q.windows(2).zip(batch.context_lens) {
        let q_len = (ends[1] - ends[0]) as usize;
        let tiles = (q_len * group).div_ceil(TILE_ROWS);
        num_tiles += tiles;
        let most_seen = (context_len as usize).min(window.unwrap_or(usize::MAX));
        num_blocks += tiles * most_seen.div_ceil(BLOCK_SIZE);
        first_tiles.push(num_tiles);
    }
    let num_tasks = num_tiles * layout.num_kv_heads;
    let num_lanes = match num_blocks * layout.num_kv_heads {
        0..PARALLEL_BLOCKS => 1,
        _ => backend.num_threads().min(num_tasks),
    };
    grow::<u8>(lanes, num_lanes * LANE_BYTES, "attention scratch")?;
    let memory = SendPointer(lanes.as_bytes_mut().as_mut_ptr());
    let out_pointer = SendPointer(out.as_mut_ptr());
    let next_task = AtomicUsize::new(0);
    let work = Work {
        q,
        q_stride,
        cache,
        batch,
        num_heads,
        group,
        out: out_pointer,
        first_tiles,
        next_task: &next_task,
        num_tasks,
    };
    let in_tiles = layout.dtype == DType::BF16 && backend.has_tiles();
    backend.parallel_for(num_lanes, &|lane| {
        // SAFETY: `lanes` has room for num_lanes of either kind of memory, 64-byte aligned; lane
        // numbers are given out once.
        let memory = unsafe { memory.get().add(lane * LANE_BYTES) };
        if in_tiles {
            // SAFETY: the memory is zeroed at first, and any bits are numbers; this is the only
            // reference.
            let memory = unsafe { &mut *memory.cast::<TileMemory>() };
            let tiles = OnlineTiles::new(memory, layout, scale, window);
            backend.run_tiles(TileLane { work: &work, tiles });
        } else {
            // SAFETY: the memory is zeroed at first, and any bits are floats; this is the only
            // reference.
            let memory = unsafe { &mut *memory.cast::<Memory>() };
            let online = Online::new(memory, layout.head_dim, scale, window);
            backend.run_bf16(Lane { work: &work, online });
        }
    })
}

/// Checks all shapes and indices; returns num_tokens.
fn check(
    q: &[f32],
    q_stride: usize,
    cache: &KvBlocks<'_>,
    batch: &AttentionBatch<'_>,
    num_heads: usize,
    out: &[f32],
) -> Result<usize> {
    let layout = cache.layout();
    let wrong = |what: String| Err(Error::internal(format!("attention: {what}")));
    if !num_heads.is_multiple_of(layout.num_kv_heads) {
        return wrong(format!("{num_heads} heads over {} kv heads", layout.num_kv_heads));
    }
    let num_seqs = batch.context_lens.len();
    if batch.cu_seqlens_q.len() != num_seqs + 1
        || num_seqs.checked_mul(batch.max_blocks_per_seq) != Some(batch.block_tables.len())
        || batch.cu_seqlens_q[0] != 0
    {
        return wrong(format!(
            "{} sequence ends and {} block table entries for {num_seqs} sequences",
            batch.cu_seqlens_q.len(),
            batch.block_tables.len()
        ));
    }
    for (seq, &context_len) in batch.context_lens.iter().enumerate() {
        let (start, end) = (batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]);
        let used = (context_len as usize).div_ceil(BLOCK_SIZE);
        if start > end || end - start > context_len || used > batch.max_blocks_per_seq {
            return wrong(format!(
                "sequence {seq}: tokens {start}..{end}, context of {context_len}, {} blocks",
                batch.max_blocks_per_seq
            ));
        }
        let table = &batch.block_tables[seq * batch.max_blocks_per_seq..][..used];
        if let Some(block) = table.iter().find(|&&block| block as usize >= cache.num_blocks()) {
            return wrong(format!("sequence {seq}: block {block} of {}", cache.num_blocks()));
        }
    }
    let num_tokens = batch.cu_seqlens_q[num_seqs] as usize;
    crate::ops::common::check::check_strided(
        "attention",
        q.len(),
        num_tokens,
        q_stride,
        num_heads,
        layout.head_dim,
    )?;
    if num_tokens * num_heads * layout.head_dim != out.len() {
        return wrong(format!("{num_tokens} tokens into {} values", out.len()));
    }
    Ok(num_tokens)
}

/// What all threads work on: tiles, which they claim until none is left.
struct Work<'a, 'b> {
    q: &'a [f32],
    q_stride: usize,
    cache: &'a KvBlocks<'b>,
    batch: &'a AttentionBatch<'a>,
    num_heads: usize,
    group: usize,
    out: SendPointer<f32>,
    first_tiles: &'a [usize],
    next_task: &'a AtomicUsize,
    num_tasks: usize,
}

/// Up to TILE_ROWS query rows of one kv head. Row r is token `r / group` of the sequence's new
/// tokens and head `r % group` of the group.
#[derive(Clone, Copy)]
struct Tile<'a> {
    kv_head: usize,
    first_row: usize,
    num_rows: usize,
    /// The index of the sequence's first new token in the batch.
    first_token: usize,
    /// The position of the first new token.
    first_position: usize,
    context_len: usize,
    block_table: &'a [u32],
}

impl<'a> Work<'a, '_> {
    /// Claims a tile.
    #[inline(always)]
    fn next(&self) -> Option<Tile<'a>> {
        let task = self.next_task.fetch_add(1, Ordering::Relaxed);
        // The order is from the last to the first: late tiles see more keys, and small ones shall
        // end the call.
        (task < self.num_tasks).then(|| self.tile(self.num_tasks - 1 - task))
    }

    fn tile(&self, task: usize) -> Tile<'a> {
        // All tiles of a head after each other: its keys and values stay in the second-level cache.
        let num_tiles = self.num_tasks / self.cache.layout().num_kv_heads;
        let (kv_head, tile) = (task / num_tiles, task % num_tiles);
        let seq = self.first_tiles.partition_point(|&first| first <= tile) - 1;
        let first_row = (tile - self.first_tiles[seq]) * TILE_ROWS;
        let first_token = self.batch.cu_seqlens_q[seq] as usize;
        let q_len = self.batch.cu_seqlens_q[seq + 1] as usize - first_token;
        let context_len = self.batch.context_lens[seq] as usize;
        let max_blocks = self.batch.max_blocks_per_seq;
        Tile {
            kv_head,
            first_row,
            num_rows: (q_len * self.group - first_row).min(TILE_ROWS),
            first_token,
            first_position: context_len - q_len,
            context_len,
            block_table: &self.batch.block_tables[seq * max_blocks..(seq + 1) * max_blocks],
        }
    }

    /// Returns the token in the batch and the head of a row.
    #[inline(always)]
    fn place(&self, tile: Tile<'_>, row: usize) -> (usize, usize) {
        let row = tile.first_row + row;
        (tile.first_token + row / self.group, tile.kv_head * self.group + row % self.group)
    }

    /// Returns the query of a row, and the end of the keys that it sees.
    #[inline(always)]
    fn query(&self, tile: Tile<'_>, row: usize) -> (&'a [f32], usize) {
        let head_dim = self.cache.layout().head_dim;
        let (token, head) = self.place(tile, row);
        let query = &self.q[token * self.q_stride + head * head_dim..][..head_dim];
        (query, tile.first_position + token - tile.first_token + 1)
    }

    /// Writes the result of a row: `sums` times `scale`.
    #[inline(always)]
    fn finish(&self, tile: Tile<'_>, row: usize, (sums, scale): (&[f32], f32)) {
        let head_dim = self.cache.layout().head_dim;
        let (token, head) = self.place(tile, row);
        // SAFETY: token < num_tokens and head < num_heads, so this lies in `out`; no other tile has
        // this token and head, and a tile is claimed once.
        let out = unsafe {
            std::slice::from_raw_parts_mut(
                self.out.get().add((token * self.num_heads + head) * head_dim),
                head_dim,
            )
        };
        for (o, &sum) in out.iter_mut().zip(sums) {
            *o = sum * scale;
        }
    }
}

/// One thread.
struct Lane<'a, 'b> {
    work: &'a Work<'a, 'b>,
    online: Online<'a>,
}

impl Bf16Kernel for Lane<'_, '_> {
    #[inline(always)]
    fn run<S: Bf16Simd>(mut self) {
        while let Some(tile) = self.work.next() {
            // SAFETY: the element is that of the cache's type, and `run` is called for an
            // instruction set that is there.
            unsafe {
                match self.work.cache.layout().dtype {
                    DType::F32 => self.attend::<S, F32<S::Vector>>(tile),
                    DType::F16 => self.attend::<S, F16<S::Vector>>(tile),
                    DType::BF16 => self.attend::<S, S::Bf16>(tile),
                }
            }
        }
    }
}

impl Lane<'_, '_> {
    /// # Safety
    /// `E` is the element of the cache's type; its instruction set is there.
    #[inline(always)]
    unsafe fn attend<S: Simd, E: Element>(&mut self, tile: Tile<'_>) {
        let head_dim = self.work.cache.layout().head_dim;
        let value_columns = self.work.cache.layout().value_columns();
        let queries = self.online.memory.queries.as_mut_ptr().cast::<E::Activation>();
        for row in 0..tile.num_rows {
            let (q, visible) = self.work.query(tile, row);
            self.online.memory.visible[row] = visible;
            // SAFETY: row < TILE_ROWS and head_dim <= MAX_HEAD_DIM; activations take up to 4 bytes.
            let to =
                unsafe { std::slice::from_raw_parts_mut(queries.add(row * head_dim), head_dim) };
            for (to, &q) in to.iter_mut().zip(q) {
                *to = E::activation(q);
            }
        }
        self.online.start(tile.num_rows);

        let is_fp8 = self.work.cache.layout().format == KvFormat::Fp8;
        let widen =
            E::IS_F32_MATH && size_of::<E::Weight>() == 2 && tile.num_rows >= WIDEN_FROM_ROWS;
        let (first_key, end_key) = self.online.keys();
        let num_blocks = end_key.div_ceil(BLOCK_SIZE);
        for block in first_key / BLOCK_SIZE..num_blocks {
            let block_id = tile.block_table[block] as usize;
            let first_key = block * BLOCK_SIZE;
            // Few rows wait for memory, and blocks lie anywhere: the next one is fetched while they
            // pass by this one.
            let is_last = block + 1 == num_blocks || tile.num_rows >= WIDEN_FROM_ROWS;
            let next_id = if is_last { block_id } else { tile.block_table[block + 1] as usize };
            let wide_keys = self.online.memory.keys.as_mut_ptr();
            let wide_values = self.online.memory.values.as_mut_ptr();
            // Panels of 8-bit floats become panels of bf16 pairs where those are multiplied, and of
            // f32 otherwise.
            if is_fp8 && E::K_STEP == 1 {
                let (keys, values) = self.work.cache.panels::<u8>(block_id, tile.kv_head);
                self.prefetch_fp8(tile.kv_head, block_id, next_id);
                // SAFETY: `memory` has room for the panels of the longest heads; the instruction set
                // is there.
                unsafe {
                    widen_fp8_to_f32::<S>(keys, wide_keys);
                    widen_fp8_to_f32::<S>(values, wide_values);
                    let keys = KeyPanel::<F32<S::Vector>>::alone(wide_keys);
                    let values = ValuePanel::alone(wide_values, value_columns);
                    self.online.block::<E, _>(first_key, tile.context_len, &keys, values);
                }
                continue;
            }
            let mut ahead = 0;
            let (keys, values): (*const E::Weight, *const E::Weight) = if is_fp8 {
                let (keys, values) = self.work.cache.panels::<u8>(block_id, tile.kv_head);
                self.prefetch_fp8(tile.kv_head, block_id, next_id);
                let memory = &mut *self.online.memory;
                // SAFETY: as above.
                unsafe {
                    widen_fp8_to_bf16::<S>(keys, &mut memory.bf16_keys);
                    widen_fp8_to_bf16::<S>(values, &mut memory.bf16_values);
                }
                (memory.bf16_keys.as_ptr().cast(), memory.bf16_values.as_ptr().cast())
            } else {
                let (keys, values) = self.work.cache.panels::<E::Weight>(block_id, tile.kv_head);
                let (next, _) = self.work.cache.panels::<E::Weight>(next_id, tile.kv_head);
                ahead = (next.as_ptr() as usize).wrapping_sub(keys.as_ptr() as usize);
                (keys.as_ptr(), values.as_ptr())
            };
            // SAFETY: panels are those of `E` (or widened from them); `memory` has room for both.
            unsafe {
                if widen {
                    widen_panel::<E>(keys, head_dim, BLOCK_SIZE, wide_keys);
                    widen_panel::<E>(values, BLOCK_SIZE, value_columns, wide_values);
                    let keys = KeyPanel::<F32<S::Vector>>::alone(wide_keys);
                    let values = ValuePanel::alone(wide_values, value_columns);
                    self.online.block::<E, _>(first_key, tile.context_len, &keys, values);
                } else {
                    let keys = KeyPanel::<E> { start: keys, ahead };
                    let stride = value_columns * E::K_STEP;
                    let values = ValuePanel { start: values, stride, ahead };
                    self.online.block::<E, _>(first_key, tile.context_len, &keys, values);
                }
            }
        }

        for row in 0..tile.num_rows {
            self.work.finish(tile, row, self.online.finished(row));
        }
    }

    /// Prefetches the panels of a block of 8-bit floats, unless it is the one that is read now.
    #[inline(always)]
    fn prefetch_fp8(&self, kv_head: usize, block_id: usize, next_id: usize) {
        if next_id != block_id {
            let (keys, values) = self.work.cache.panels::<u8>(next_id, kv_head);
            for line in keys.chunks(64).chain(values.chunks(64)) {
                prefetch(line.as_ptr());
            }
        }
    }
}

/// One thread, with a unit that multiplies tiles.
struct TileLane<'a, 'b> {
    work: &'a Work<'a, 'b>,
    tiles: OnlineTiles<'a>,
}

impl TileKernel for TileLane<'_, '_> {
    #[inline(always)]
    fn run<S: TileSimd>(mut self) {
        // SAFETY: `run` is called for an instruction set that is there, and this lane is the only
        // user of the unit on this thread.
        let Some(mut unit) = (unsafe { S::Tiles::ready() }) else { return };
        while let Some(tile) = self.work.next() {
            for row in 0..tile.num_rows {
                let (query, visible) = self.work.query(tile, row);
                self.tiles.set_query::<S>(row, query, visible);
            }
            self.tiles.start(tile.num_rows);
            let cache = self.work.cache;
            let panels = |block: usize| {
                let block = tile.block_table[block] as usize;
                match cache.layout().format {
                    KvFormat::Dense => Panels::Bf16(cache.panels(block, tile.kv_head)),
                    KvFormat::Fp8 => Panels::Fp8(cache.panels(block, tile.kv_head)),
                }
            };
            // SAFETY: the unit is ready; the panels are of the layout that `tiles` has.
            unsafe { self.tiles.attend::<S>(&mut unit, tile.context_len, panels) };
            for row in 0..tile.num_rows {
                self.work.finish(tile, row, self.tiles.finished(row));
            }
        }
    }
}
