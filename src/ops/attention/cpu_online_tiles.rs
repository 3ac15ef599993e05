//! Online softmax over stretches of keys, with both products on a unit that multiplies tiles of
//! bf16: the counterpart of [`super::cpu_online_softmax`], whose formulas it computes, for 128 keys
//! at a time.
//!
//! Stretches begin at absolute positions. A row is multiplied with whole blocks of 32 keys, and the
//! weights of keys that it does not see are zero, so its bits do not depend on the rows beside it.

use crate::backend::cpu::math::sum_lanes;
use crate::backend::cpu::simd::{TileSimd, Vector16};
use crate::backend::cpu::tiles::{TileOperands, TileUnit, TILE_K, TILE_LEN, TILE_ROWS};
use crate::ops::attention::cpu_online_softmax::TILE_ROWS as MAX_ROWS;
use crate::ops::attention::cpu_widen::widen_fp8_to_bf16;
use crate::ops::common::tile_rows::store_row;
use crate::ops::kv_cache::layout::{KvLayout, BLOCK_SIZE, MAX_HEAD_DIM};

/// The number of blocks of keys of a stretch.
const STRETCH_BLOCKS: usize = 4;
/// The number of keys of a stretch.
const STRETCH: usize = STRETCH_BLOCKS * BLOCK_SIZE;
/// The rows that are multiplied at a time: two tiles.
const PAIR_ROWS: usize = 2 * TILE_ROWS;
/// The elements of a step of a key panel: [16 pairs][32 keys][2].
const KEY_STEP: usize = TILE_K * BLOCK_SIZE;

/// The working memory of one thread.
#[repr(C, align(64))]
pub(super) struct TileMemory {
    /// [tiles of rows][steps of head_dim] tiles.
    queries: [u16; MAX_ROWS * MAX_HEAD_DIM],
    /// [rows][value_columns].
    sums: [f32; MAX_ROWS * MAX_HEAD_DIM],
    scores: [f32; PAIR_ROWS * STRETCH],
    /// [2 tiles of rows][blocks of the stretch] tiles.
    weights: [u16; PAIR_ROWS * STRETCH],
    /// The last step of a key panel whose head_dim is no multiple of 32, filled up with zeros.
    last_keys: [u16; KEY_STEP],
    /// Keys and values of a stretch of 8-bit floats as bf16.
    bf16_keys: [[u16; BLOCK_SIZE * MAX_HEAD_DIM]; STRETCH_BLOCKS],
    bf16_values: [[u16; BLOCK_SIZE * MAX_HEAD_DIM]; STRETCH_BLOCKS],
    /// The value panel of the last block, without what lies after the last key.
    last_values: [u16; BLOCK_SIZE * MAX_HEAD_DIM],
    row_max: [f32; MAX_ROWS],
    /// The sums of weights in sixteen lanes, added up at the end.
    row_sum: [[f32; 16]; MAX_ROWS],
    /// The end of the keys that each row sees; for no row is it less than for the one before it.
    visible: [usize; MAX_ROWS],
}

// A block of keys is one step of the product with values.
const _: () = assert!(
    MAX_ROWS.is_multiple_of(PAIR_ROWS) && BLOCK_SIZE == TILE_K && BLOCK_SIZE == 2 * TILE_ROWS
);

/// The keys and the values of a block as they are stored.
pub(super) enum Panels<'a> {
    Bf16((&'a [u16], &'a [u16])),
    Fp8((&'a [u8], &'a [u8])),
}

/// The rows of a tile of queries on their way over the keys.
pub(super) struct OnlineTiles<'a> {
    memory: &'a mut TileMemory,
    num_rows: usize,
    head_dim: usize,
    /// The steps of k of a query.
    num_steps: usize,
    /// The head_dim rounded up to 16.
    value_columns: usize,
    /// The factor of the scores times log2(e), because weights are powers of two.
    scale: f32,
    /// The most keys that a row sees, which are those before the end of its `visible`.
    window: usize,
}

impl<'a> OnlineTiles<'a> {
    pub fn new(
        memory: &'a mut TileMemory,
        layout: KvLayout,
        scale: f32,
        window: Option<usize>,
    ) -> Self {
        OnlineTiles {
            memory,
            num_rows: 0,
            head_dim: layout.head_dim,
            num_steps: layout.head_dim.div_ceil(TILE_K),
            value_columns: layout.value_columns(),
            scale: scale * std::f32::consts::LOG2_E,
            window: window.unwrap_or(usize::MAX),
        }
    }

    /// Sets the query of a row, and the end of the keys that it sees.
    #[inline(always)]
    pub fn set_query<S: TileSimd>(&mut self, row: usize, query: &[f32], visible: usize) {
        self.memory.visible[row] = visible;
        let first = row / TILE_ROWS * self.num_steps * TILE_LEN + row % TILE_ROWS * TILE_K;
        store_row::<S>(query, &mut self.memory.queries[first..]);
    }

    /// Begins with `num_rows` rows, whose queries are set.
    #[inline(always)]
    pub fn start(&mut self, num_rows: usize) {
        self.num_rows = num_rows;
        let all = num_rows.next_multiple_of(TILE_ROWS) * self.value_columns;
        self.memory.sums[..all].fill(0.0);
        self.memory.row_max[..num_rows].fill(f32::NEG_INFINITY);
        self.memory.row_sum[..num_rows].fill([0.0; 16]);
    }

    /// Returns the weighted sum of values of a row, and the factor that is still missing.
    #[inline(always)]
    pub fn finished(&self, row: usize) -> (&[f32], f32) {
        let sums = &self.memory.sums[row * self.value_columns..][..self.value_columns];
        (sums, 1.0 / sum_lanes(self.memory.row_sum[row]))
    }

    /// Goes over all keys that any row sees. `panels(i)` are the keys and the values of block i;
    /// keys from `context_len` on do not belong to this sequence.
    ///
    /// # Safety
    /// The unit is that of the instruction set, and the panels are of the layout of `new`.
    #[inline(always)]
    pub unsafe fn attend<'p, S: TileSimd>(
        &mut self,
        unit: &mut S::Tiles,
        context_len: usize,
        panels: impl Fn(usize) -> Panels<'p>,
    ) {
        let most_visible = self.memory.visible[self.num_rows - 1];
        let begin = self.memory.visible[0].saturating_sub(self.window) / STRETCH * STRETCH;
        for first_key in (begin..most_visible).step_by(STRETCH) {
            let end = most_visible.min(first_key + STRETCH);
            let first_block = first_key / BLOCK_SIZE;
            let num_blocks = (end - first_key).div_ceil(BLOCK_SIZE);
            let mut keys = [std::ptr::null::<u16>(); STRETCH_BLOCKS];
            let mut values = keys;
            for block in 0..num_blocks {
                let (key_panel, value_panel) = match panels(first_block + block) {
                    Panels::Bf16(panels) => panels,
                    Panels::Fp8((key_panel, value_panel)) => {
                        let wide_keys = &mut self.memory.bf16_keys[block];
                        let wide_values = &mut self.memory.bf16_values[block];
                        // SAFETY: the instruction set is that of the caller.
                        unsafe {
                            widen_fp8_to_bf16::<S>(key_panel, wide_keys);
                            widen_fp8_to_bf16::<S>(value_panel, wide_values);
                        }
                        (&wide_keys[..], &wide_values[..])
                    }
                };
                keys[block] = key_panel.as_ptr();
                let block_key = first_key + block * BLOCK_SIZE;
                values[block] = if block_key + BLOCK_SIZE <= context_len {
                    value_panel.as_ptr()
                } else {
                    let to = &mut self.memory.last_values[..BLOCK_SIZE * self.value_columns];
                    keep_values(to, self.value_columns, value_panel, context_len - block_key)
                };
            }
            // Rows whose token lies before the stretch see nothing of it, and neither do those whose
            // window begins after it.
            let seeing = &self.memory.visible[..self.num_rows];
            let first_row = seeing.partition_point(|&visible| visible <= first_key);
            let end_row = seeing.partition_point(|&visible| {
                visible.saturating_sub(self.window) < first_key + STRETCH
            });
            for pair in (first_row / PAIR_ROWS * PAIR_ROWS..end_row).step_by(PAIR_ROWS) {
                let count = (self.num_rows - pair).min(PAIR_ROWS);
                let visible = self.memory.visible[pair + count - 1] - first_key;
                let num_blocks = visible.div_ceil(BLOCK_SIZE).min(num_blocks);
                // SAFETY: passed on to the caller.
                unsafe {
                    self.scores::<S>(unit, pair, count, &keys[..num_blocks]);
                    self.weigh::<S>(pair, count, first_key, num_blocks);
                    self.add_values::<S>(unit, pair, count, &values[..num_blocks]);
                }
            }
        }
    }

    /// Computes the scores of up to 32 rows from `first` on, [32][128].
    ///
    /// # Safety
    /// As for [`OnlineTiles::attend`].
    #[inline(always)]
    unsafe fn scores<S: TileSimd>(
        &mut self,
        unit: &mut S::Tiles,
        first: usize,
        count: usize,
        keys: &[*const u16],
    ) {
        let whole_steps = self.head_dim / TILE_K;
        let queries = self.memory.queries[first * self.num_steps * TILE_K..].as_ptr();
        for (block, &keys) in keys.iter().enumerate() {
            let mut operands = TileOperands {
                a: queries,
                a_stride: self.num_steps * TILE_LEN * size_of::<u16>(),
                b: keys,
                b_stride: BLOCK_SIZE * 2 * size_of::<u16>(),
                num_steps: whole_steps,
                out: self.memory.scores[block * BLOCK_SIZE..].as_mut_ptr(),
                out_stride: STRETCH * size_of::<f32>(),
                accumulate: 0,
                prefetch: keys.cast(),
                prefetch_lines: 0,
            };
            // SAFETY: the queries have num_steps tiles for each tile of rows, the panel whole_steps
            // steps and what is copied; there is a place for the scores of 32 rows.
            unsafe {
                if whole_steps > 0 {
                    rows::<S>(unit, count, &operands);
                }
                if whole_steps < self.num_steps {
                    let left = self.head_dim % TILE_K * BLOCK_SIZE;
                    let from = keys.add(whole_steps * KEY_STEP);
                    let last = &mut self.memory.last_keys;
                    last[..left].copy_from_slice(std::slice::from_raw_parts(from, left));
                    last[left..].fill(0);
                    operands.a = operands.a.add(whole_steps * TILE_LEN);
                    operands.b = last.as_ptr();
                    operands.num_steps = 1;
                    operands.accumulate = usize::from(whole_steps > 0);
                    rows::<S>(unit, count, &operands);
                }
            }
        }
    }

    /// Turns the scores of `count` rows into weights and rescales the rows' sums.
    ///
    /// # Safety
    /// The instruction set is there.
    #[inline(always)]
    unsafe fn weigh<S: TileSimd>(
        &mut self,
        first: usize,
        count: usize,
        first_key: usize,
        num_blocks: usize,
    ) {
        let (value_columns, width) = (self.value_columns, num_blocks * BLOCK_SIZE);
        for pair_row in 0..count {
            let row = first + pair_row;
            // The fields are taken one by one: a reference to the whole would end the pointer to
            // the last values.
            let tile = pair_row / TILE_ROWS * STRETCH_BLOCKS * TILE_LEN;
            let weights = &mut self.memory.weights[tile + pair_row % TILE_ROWS * TILE_K..];
            let visible = self.memory.visible[row].saturating_sub(first_key);
            let hidden = visible.saturating_sub(self.window);
            if visible == 0 || hidden >= width {
                let places = weights.chunks_mut(TILE_LEN).take(num_blocks);
                places.for_each(|place| place[..TILE_K].fill(0));
                continue;
            }
            let scores = &mut self.memory.scores[pair_row * STRETCH..][..width];
            if visible < width {
                scores[visible..].fill(f32::NEG_INFINITY);
            }
            scores[..hidden].fill(f32::NEG_INFINITY);
            // SAFETY: all reads and writes are of 16 elements inside the row's scores, its sums and
            // its 32 places of a tile of weights.
            unsafe {
                let scale = S::Vector::splat(self.scale);
                let mut largest = S::Vector::splat(f32::NEG_INFINITY);
                for scores in scores.chunks_exact(16) {
                    largest = S::Vector::load(scores.as_ptr()).mul(scale).max(largest);
                }
                let old_max = self.memory.row_max[row];
                let stretch_max = largest.max_lane();
                let new_max = if stretch_max > old_max { stretch_max } else { old_max };
                let row_sum = self.memory.row_sum[row].as_mut_ptr();
                let mut sum = S::Vector::load(row_sum);
                // The maximum stays the same in most stretches; the factor would be exactly one.
                if new_max != old_max {
                    self.memory.row_max[row] = new_max;
                    let factor = S::Vector::splat(old_max - new_max).exp2_negative();
                    sum = sum.mul(factor);
                    let sums = &mut self.memory.sums[row * value_columns..][..value_columns];
                    for sums in sums.chunks_exact_mut(16) {
                        S::Vector::load(sums.as_ptr()).mul(factor).store(sums.as_mut_ptr());
                    }
                }
                let minus_max = S::Vector::splat(-new_max);
                for (scores, place) in
                    scores.chunks_exact(BLOCK_SIZE).zip(weights.chunks_mut(TILE_LEN))
                {
                    let place = place[..TILE_K].as_mut_ptr();
                    let low = S::Vector::load(scores.as_ptr()).mul_add(scale, minus_max);
                    let high = S::Vector::load(scores.as_ptr().add(16)).mul_add(scale, minus_max);
                    let (low, high) = (low.exp2_negative(), high.exp2_negative());
                    sum = sum.add(low.add(high));
                    S::store_bf16(low, high, place);
                }
                sum.store(row_sum);
            }
        }
    }

    /// Computes `sums += weights V` for up to 32 rows from `first` on.
    ///
    /// # Safety
    /// As for [`OnlineTiles::attend`].
    #[inline(always)]
    unsafe fn add_values<S: TileSimd>(
        &mut self,
        unit: &mut S::Tiles,
        first: usize,
        count: usize,
        values: &[*const u16],
    ) {
        let value_columns = self.value_columns;
        for column in (0..value_columns).step_by(2 * TILE_ROWS) {
            let mut steps = [std::ptr::null::<u16>(); STRETCH_BLOCKS];
            for (step, values) in steps.iter_mut().zip(values) {
                *step = values.wrapping_add(2 * column);
            }
            let steps = &steps[..values.len()];
            let operands = TileOperands {
                a: self.memory.weights.as_ptr(),
                a_stride: STRETCH_BLOCKS * TILE_LEN * size_of::<u16>(),
                b: std::ptr::null(),
                b_stride: value_columns * 2 * size_of::<u16>(),
                num_steps: steps.len(),
                out: self.memory.sums[first * value_columns + column..].as_mut_ptr(),
                out_stride: value_columns * size_of::<f32>(),
                accumulate: 1,
                prefetch: std::ptr::null(),
                prefetch_lines: 0,
            };
            // SAFETY: a weight for each key of the blocks, panels of 16 pairs of value_columns, and
            // places for the sums of all rows of the tiles.
            unsafe {
                match (count > TILE_ROWS, value_columns - column > TILE_ROWS) {
                    (true, true) => unit.gathered_block::<2, 2>(&operands, steps),
                    (true, false) => unit.gathered_block::<2, 1>(&operands, steps),
                    (false, true) => unit.gathered_block::<1, 2>(&operands, steps),
                    (false, false) => unit.gathered_block::<1, 1>(&operands, steps),
                }
            }
        }
    }
}

/// Copies the values of the first `num_keys` keys of a block and fills up with zeros: a weight of
/// zero times what a former owner of the block left there would be NaN if that was not finite.
#[inline(always)]
fn keep_values(
    to: &mut [u16],
    value_columns: usize,
    values: &[u16],
    num_keys: usize,
) -> *const u16 {
    let pair_len = 2 * value_columns;
    let whole = num_keys / 2 * pair_len;
    to[..whole].copy_from_slice(&values[..whole]);
    to[whole..].fill(0);
    if num_keys % 2 == 1 {
        let pair = to[whole..][..pair_len].chunks_exact_mut(2);
        pair.zip(values[whole..].chunks_exact(2)).for_each(|(to, from)| to[0] = from[0]);
    }
    to.as_ptr()
}

/// Multiplies one tile of rows, or two, by the two tiles of columns of a block of keys.
///
/// # Safety
/// As for [`TileUnit::block`].
#[inline(always)]
unsafe fn rows<S: TileSimd>(unit: &mut S::Tiles, count: usize, operands: &TileOperands) {
    // SAFETY: passed on to the caller.
    unsafe {
        if count > TILE_ROWS {
            unit.block::<2, 2>(operands);
        } else {
            unit.block::<1, 2>(operands);
        }
    }
}
