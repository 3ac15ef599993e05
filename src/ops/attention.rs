//! Causal attention of new tokens over the paged KV cache, with grouped query heads.
//!
//! `out = softmax(scale * q K^T) V` for each query head h, over kv head `h / (num_heads /
//! num_kv_heads)`; token i of a sequence with q_len new tokens sees keys `0..=context_len - q_len + i`.
//!
//! Online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), in blocks of 32 keys:
//!
//! ```text
//! for each block:  s = scale log2(e) q K^T          masked keys: -inf
//!                  m' = max(m, max s);  p = 2^(s - m');  a = 2^(m - m')
//!                  l = l a + sum p;     o = o a + p V;    m = m'
//! out = o / l
//! ```
//!
//! Blocks begin at absolute positions and a row goes through the same steps whatever rows are beside
//! it, so its bits do not depend on the batch, on how a prompt is cut into chunks, or on threads. With a
//! bf16 cache q and p are rounded to bf16 for the two products; sums are f32 always.

use super::kv_blocks::{KvBlocks, BLOCK_SIZE, MAX_HEAD_DIM};
use super::linear::grow;
use crate::backend::cpu::math::sum_lanes;
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::tile::{tile_rows, Element, Operands, F16, F32, MAX_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows (token, head of the group) of a task. Large, so that converting a 16-bit block to f32
/// is shared by many rows; queries and sums of a tile stay in the L2 cache.
const TILE_ROWS: usize = 16 * MAX_ROWS;
/// From this many rows on 16-bit blocks are widened to f32 once a tile.
const WIDEN_FROM_ROWS: usize = 4 * MAX_ROWS;
/// Fewer blocks of work than this stay on the calling thread.
const PARALLEL_BLOCKS: usize = 12;

/// Which new tokens belong to which sequence, and where its keys and values lie.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBatch<'a> {
    /// [num_seqs + 1]: first token of each sequence; first 0, last num_tokens.
    pub cu_seqlens_q: &'a [u32],
    /// [num_seqs]: tokens of each sequence in the cache, the new ones included.
    pub context_lens: &'a [u32],
    /// [num_seqs, max_blocks_per_seq]: the blocks of each sequence in order.
    pub block_tables: &'a [u32],
    /// Entries of a row of `block_tables`.
    pub max_blocks_per_seq: usize,
}

/// Buffers that [`attention`] needs; they grow to the largest call and are then reused.
#[derive(Debug)]
pub struct AttentionScratch {
    lanes: HostBuffer,
    /// [num_seqs + 1]: first tile of each sequence.
    first_tiles: Vec<usize>,
}

impl Default for AttentionScratch {
    fn default() -> Self {
        AttentionScratch { lanes: HostBuffer::empty(), first_tiles: Vec::new() }
    }
}

impl AttentionScratch {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Working memory of one thread. 32-bit places; 16-bit activations use half of theirs.
#[repr(C, align(64))]
struct LaneMemory {
    queries: [f32; TILE_ROWS * MAX_HEAD_DIM],
    sums: [f32; TILE_ROWS * MAX_HEAD_DIM],
    /// A block's keys and values as f32.
    keys: [f32; MAX_HEAD_DIM * BLOCK_SIZE],
    values: [f32; MAX_HEAD_DIM * BLOCK_SIZE],
    scores: [f32; MAX_ROWS * BLOCK_SIZE],
    weights: [f32; MAX_ROWS * BLOCK_SIZE],
    /// The last, half-filled pair of value rows.
    last_pair: [f32; MAX_HEAD_DIM],
    row_max: [f32; TILE_ROWS],
    /// How many keys of the sequence each row sees.
    visible: [usize; TILE_ROWS],
    /// Sums of weights in sixteen lanes, added up at the end.
    row_sum: [[f32; 16]; TILE_ROWS],
}

/// q is [num_tokens, num_heads, head_dim] with token rows `q_stride` elements apart; out is
/// [num_tokens, num_heads * head_dim]. The keys and values of the new tokens are in `cache` already.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    backend: &CpuBackend,
    q: &[f32],
    q_stride: usize,
    cache: &KvBlocks<'_>,
    batch: &AttentionBatch<'_>,
    num_heads: usize,
    scale: f32,
    out: &mut [f32],
    scratch: &mut AttentionScratch,
) -> Result<()> {
    let layout = *cache.layout();
    let group = num_heads / layout.num_kv_heads;
    let num_tokens = check(q, q_stride, cache, batch, num_heads, out)?;
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
        num_blocks += tiles * (context_len as usize).div_ceil(BLOCK_SIZE);
        first_tiles.push(num_tiles);
    }
    let num_tasks = num_tiles * layout.num_kv_heads;
    let num_lanes = match num_blocks * layout.num_kv_heads {
        0..PARALLEL_BLOCKS => 1,
        _ => backend.num_threads().min(num_tasks),
    };
    grow::<u8>(lanes, num_lanes * size_of::<LaneMemory>(), "attention scratch")?;
    let memory = SendPointer(lanes.as_bytes_mut().as_mut_ptr().cast::<LaneMemory>());
    let out_pointer = SendPointer(out.as_mut_ptr());
    let next_task = AtomicUsize::new(0);
    backend.parallel_for(num_lanes, &|lane| {
        let lane = Lane {
            q,
            q_stride,
            cache,
            batch,
            num_heads,
            group,
            scale: scale * std::f32::consts::LOG2_E,
            out: out_pointer.get(),
            // SAFETY: `lanes` holds num_lanes of them, 64-byte aligned and zeroed at first (any bits
            // are floats); lane numbers are given out once, so this is the only reference.
            memory: unsafe { &mut *memory.get().add(lane) },
            first_tiles,
            next_task: &next_task,
            num_tasks,
        };
        backend.run(lane);
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
    super::check_strided("attention", q.len(), num_tokens, q_stride, num_heads, layout.head_dim)?;
    if num_tokens * num_heads * layout.head_dim != out.len() {
        return wrong(format!("{num_tokens} tokens into {} values", out.len()));
    }
    Ok(num_tokens)
}

/// The work of one thread: claims tiles until none is left.
struct Lane<'a, 'b> {
    q: &'a [f32],
    q_stride: usize,
    cache: &'a KvBlocks<'b>,
    batch: &'a AttentionBatch<'a>,
    num_heads: usize,
    group: usize,
    /// Times log2(e): weights are powers of two.
    scale: f32,
    out: *mut f32,
    memory: &'a mut LaneMemory,
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
    /// Index of the sequence's first new token in the batch.
    first_token: usize,
    /// Position of the first new token.
    first_position: usize,
    context_len: usize,
    block_table: &'a [u32],
}

impl Kernel for Lane<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self) {
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= self.num_tasks {
                return;
            }
            // From the last to the first: late tiles see more keys, and small ones shall end the call.
            let tile = self.tile(self.num_tasks - 1 - task);
            // SAFETY: the element is that of the cache's type, and `run` is called for an instruction
            // set that is there.
            unsafe {
                match self.cache.layout().dtype {
                    DType::F32 => self.attend::<S, F32<S::Vector>>(tile),
                    DType::F16 => self.attend::<S, F16<S::Vector>>(tile),
                    DType::BF16 => self.attend::<S, S::Bf16>(tile),
                }
            }
        }
    }
}

impl<'a> Lane<'a, '_> {
    fn tile(&self, task: usize) -> Tile<'a> {
        let num_kv_heads = self.cache.layout().num_kv_heads;
        let (tile, kv_head) = (task / num_kv_heads, task % num_kv_heads);
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

    /// # Safety
    /// `E` is the element of the cache's type; its instruction set is there.
    #[inline(always)]
    unsafe fn attend<S: Simd, E: Element>(&mut self, tile: Tile<'_>) {
        let head_dim = self.cache.layout().head_dim;
        let value_columns = self.cache.layout().value_columns();
        let queries = self.memory.queries.as_mut_ptr().cast::<E::Activation>();
        for row in 0..tile.num_rows {
            let (token, head) = self.place(tile, row);
            self.memory.visible[row] = tile.first_position + token - tile.first_token + 1;
            let q = &self.q[token * self.q_stride + head * head_dim..][..head_dim];
            // SAFETY: row < TILE_ROWS and head_dim <= MAX_HEAD_DIM; activations take up to 4 bytes.
            let to =
                unsafe { std::slice::from_raw_parts_mut(queries.add(row * head_dim), head_dim) };
            for (to, &q) in to.iter_mut().zip(q) {
                *to = E::activation(q);
            }
        }
        self.memory.sums[..tile.num_rows * value_columns].fill(0.0);
        self.memory.row_max[..tile.num_rows].fill(f32::NEG_INFINITY);
        self.memory.row_sum[..tile.num_rows].fill([0.0; 16]);

        let widen =
            E::IS_F32_MATH && size_of::<E::Weight>() == 2 && tile.num_rows >= WIDEN_FROM_ROWS;
        for block in 0..self.memory.visible[tile.num_rows - 1].div_ceil(BLOCK_SIZE) {
            let (keys, values) =
                self.cache.panels::<E::Weight>(tile.block_table[block] as usize, tile.kv_head);
            // SAFETY: panels are those of `E` (or widened from them); `memory` has room for both.
            unsafe {
                if widen {
                    let wide_keys = self.memory.keys.as_mut_ptr();
                    let wide_values = self.memory.values.as_mut_ptr();
                    widen_panel::<E>(keys, BLOCK_SIZE, wide_keys);
                    widen_panel::<E>(values, value_columns, wide_values);
                    self.block::<E, F32<S::Vector>>(tile, block, wide_keys, wide_values);
                } else {
                    self.block::<E, E>(tile, block, keys.as_ptr(), values.as_ptr());
                }
            }
        }

        for row in 0..tile.num_rows {
            let (token, head) = self.place(tile, row);
            let scale = 1.0 / sum_lanes(self.memory.row_sum[row]);
            // SAFETY: token < num_tokens and head < num_heads, so this lies in `out`; no other tile has
            // this token and head.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    self.out.add((token * self.num_heads + head) * head_dim),
                    head_dim,
                )
            };
            for (o, &sum) in out.iter_mut().zip(&self.memory.sums[row * value_columns..]) {
                *o = sum * scale;
            }
        }
    }

    /// Token in the batch and head of a row.
    #[inline(always)]
    fn place(&self, tile: Tile<'_>, row: usize) -> (usize, usize) {
        let row = tile.first_row + row;
        (tile.first_token + row / self.group, tile.kv_head * self.group + row % self.group)
    }

    /// One block of keys for all rows of the tile that see it.
    ///
    /// `C` is the element of the cache, to whose precision weights are rounded; `E` multiplies, and is C
    /// or, for widened panels, f32.
    ///
    /// # Safety
    /// `keys` and `values` are panels for `E`, and `memory.queries` activations for `E`.
    #[inline(always)]
    unsafe fn block<C: Element, E: Element>(
        &mut self,
        tile: Tile<'_>,
        block: usize,
        keys: *const E::Weight,
        values: *const E::Weight,
    ) {
        let first_key = block * BLOCK_SIZE;
        let head_dim = self.cache.layout().head_dim;
        // Rows whose token lies before the block see nothing of it.
        let unseen = first_key.saturating_sub(tile.first_position) * self.group;
        let mut row = unseen.saturating_sub(tile.first_row);
        while row < tile.num_rows {
            let count = (tile.num_rows - row).min(MAX_ROWS);
            // SAFETY: rows row..row + count of `queries`; the key panel has head_dim / K_STEP steps of 32
            // columns; `scores` has MAX_ROWS rows of 32.
            unsafe {
                let operands = Operands::<E> {
                    a: self.memory.queries.as_ptr().cast::<E::Activation>().add(row * head_dim),
                    a_stride: head_dim,
                    num_steps: head_dim / E::K_STEP,
                    b: keys,
                    b_stride: BLOCK_SIZE * E::K_STEP,
                    prefetch_bytes: 0,
                    out: self.memory.scores.as_mut_ptr(),
                    out_stride: BLOCK_SIZE,
                    accumulate: false,
                };
                tile_rows::<E, { BLOCK_SIZE / 16 }>(count, &operands);
            }
            // SAFETY: as this function's; C and E have activations of one type.
            unsafe { self.weigh::<C>(row, count, first_key) };
            let visible = (self.memory.visible[row + count - 1] - first_key).min(BLOCK_SIZE);
            // SAFETY: as this function's.
            unsafe {
                self.add_values::<E>(
                    row,
                    count,
                    visible,
                    first_key + visible == tile.context_len,
                    values,
                );
            }
            row += count;
        }
    }

    /// Scores of `count` rows to weights; rescales the rows' sums.
    ///
    /// # Safety
    /// The instruction set of `C` is there.
    #[inline(always)]
    unsafe fn weigh<C: Element>(&mut self, first: usize, count: usize, first_key: usize) {
        let value_columns = self.cache.layout().value_columns();
        let scale = self.scale;
        for strip_row in 0..count {
            let row = first + strip_row;
            // Field by field: a reference to the whole would end the pointers into its panels.
            let visible = self.memory.visible[row] - first_key;
            let scores =
                &mut self.memory.scores[strip_row * BLOCK_SIZE..(strip_row + 1) * BLOCK_SIZE];
            if visible < BLOCK_SIZE {
                scores[visible..].fill(f32::NEG_INFINITY);
            }
            // SAFETY: all reads and writes are of 16 elements inside the row's 32 scores, 32 weights and
            // 16 lanes of the sum; value_columns is a multiple of 16.
            unsafe {
                let scale = C::Vector::splat(scale);
                let low = C::Vector::load(scores.as_ptr()).mul(scale);
                let high = C::Vector::load(scores.as_ptr().add(16)).mul(scale);
                let old_max = self.memory.row_max[row];
                let block_max = low.max(high).max_lane();
                let new_max = if block_max > old_max { block_max } else { old_max };
                let max = C::Vector::splat(new_max);
                let (low, high) = (low.sub(max).exp2_negative(), high.sub(max).exp2_negative());
                let row_sum = self.memory.row_sum[row].as_mut_ptr();
                let mut sum = C::Vector::load(row_sum);
                // The maximum stands in most blocks; the factor would be exactly one.
                if new_max != old_max {
                    self.memory.row_max[row] = new_max;
                    let factor = C::Vector::splat(old_max - new_max).exp2_negative();
                    sum = sum.mul(factor);
                    let sums =
                        self.memory.sums[row * value_columns..][..value_columns].as_mut_ptr();
                    for column in (0..value_columns).step_by(16) {
                        C::Vector::load(sums.add(column)).mul(factor).store(sums.add(column));
                    }
                }
                sum.add(low.add(high)).store(row_sum);
                let weights = self.memory.weights.as_mut_ptr().cast::<C::Activation>();
                let weights = weights.add(strip_row * BLOCK_SIZE);
                C::store_activations(low, weights);
                C::store_activations(high, weights.add(16));
            }
        }
    }

    /// `sums += weights V` for `count` rows and the first `visible` keys of a block. `at_end` says that
    /// the places after them hold no keys of this sequence.
    ///
    /// # Safety
    /// As for `block`.
    #[inline(always)]
    unsafe fn add_values<E: Element>(
        &mut self,
        row: usize,
        count: usize,
        visible: usize,
        at_end: bool,
        values: *const E::Weight,
    ) {
        let value_columns = self.cache.layout().value_columns();
        let mut operands = Operands::<E> {
            a: self.memory.weights.as_ptr().cast::<E::Activation>(),
            a_stride: BLOCK_SIZE,
            num_steps: visible.div_ceil(E::K_STEP),
            b: values,
            b_stride: value_columns * E::K_STEP,
            prefetch_bytes: 0,
            out: self.memory.sums[row * value_columns..].as_mut_ptr(),
            out_stride: value_columns,
            accumulate: true,
        };
        // A weight of zero times what a former owner of the block left there would be NaN if that
        // was not finite: the last pair is multiplied from a copy without it.
        let half_pair = at_end && !visible.is_multiple_of(E::K_STEP);
        // SAFETY: rows row..row + count of `sums`; up to 32 / K_STEP steps of value_columns.
        unsafe {
            if half_pair {
                operands.num_steps -= 1;
                add_columns(count, value_columns, operands);
                let from = values.add(operands.num_steps * operands.b_stride);
                let to = self.memory.last_pair.as_mut_ptr().cast::<E::Weight>();
                for i in 0..value_columns {
                    *to.add(2 * i) = *from.add(2 * i);
                    *to.add(2 * i + 1) = E::ZERO_WEIGHT;
                }
                operands.a = operands.a.add(operands.num_steps * E::K_STEP);
                operands.b = to;
                operands.num_steps = 1;
            }
            add_columns(count, value_columns, operands);
        }
    }
}

/// A tile of `num_columns` columns, a multiple of 16.
///
/// # Safety
/// As [`Operands`] says.
#[inline(always)]
unsafe fn add_columns<E: Element>(count: usize, num_columns: usize, mut operands: Operands<E>) {
    let mut left = num_columns / 16;
    while left > 0 {
        let groups = if left >= 4 { 4 } else { left.min(2) };
        // SAFETY: `groups` more groups of columns are left.
        unsafe {
            match groups {
                4 => tile_rows::<E, 4>(count, &operands),
                2 => tile_rows::<E, 2>(count, &operands),
                _ => tile_rows::<E, 1>(count, &operands),
            }
        }
        operands.b = operands.b.wrapping_add(16 * E::K_STEP * groups);
        operands.out = operands.out.wrapping_add(16 * groups);
        left -= groups;
    }
}

/// Converts a 16-bit panel of `columns` columns to f32, [k][columns].
///
/// # Safety
/// `wide` has room for as many elements as `panel` has; `E` has f32 math.
#[inline(always)]
unsafe fn widen_panel<E: Element>(panel: &[E::Weight], columns: usize, wide: *mut f32) {
    let step = columns * E::K_STEP;
    for (index, step) in panel.chunks_exact(step).enumerate() {
        for (group, weights) in step.chunks_exact(16 * E::K_STEP).enumerate() {
            // SAFETY: 16 * K_STEP weights, to rows `columns` apart inside the wide panel.
            unsafe {
                let to = wide.add(index * step.len() + 16 * group);
                E::widen(weights.as_ptr(), to, columns);
            }
        }
    }
}
