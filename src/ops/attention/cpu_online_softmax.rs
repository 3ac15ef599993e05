//! Online softmax over blocks of keys (Milakov and Gimelshein, 2018; Dao et al., 2022): the inner
//! loop that the attention of the model and of tensors share.
//!
//! ```text
//! for each block:  s = scale log2(e) q K^T          keys after the row's, or before its window: -inf
//!                  m' = max(m, max s);  p = 2^(s - m');  a = 2^(m - m')
//!                  l = l a + sum p;     o = o a + p V;    m = m'
//! out = o / l
//! ```

use crate::backend::cpu::math::sum_lanes;
use crate::backend::cpu::simd::Vector16;
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::tile::{tile_rows, Element, Operands, MAX_ROWS};
use crate::ops::kv_cache::layout::{BLOCK_SIZE, MAX_HEAD_DIM};

/// The number of query rows (token, head of the group) of a task. It is large, so that converting a
/// 16-bit block to f32 is shared by many rows; queries and sums of a tile stay in the L2 cache.
pub(crate) const TILE_ROWS: usize = 16 * MAX_ROWS;
/// Calls with fewer blocks of work than this stay on the calling thread.
pub(super) const PARALLEL_BLOCKS: usize = 12;

/// The working memory of one thread, in 32-bit places; 16-bit activations use half of theirs.
#[repr(C, align(64))]
pub(crate) struct Memory {
    pub queries: [f32; TILE_ROWS * MAX_HEAD_DIM],
    sums: [f32; TILE_ROWS * MAX_HEAD_DIM],
    /// The keys and values of a block as f32.
    pub keys: [f32; MAX_HEAD_DIM * BLOCK_SIZE],
    pub values: [f32; MAX_HEAD_DIM * BLOCK_SIZE],
    /// The keys and values of a block of 8-bit floats as bf16.
    pub bf16_keys: [u16; MAX_HEAD_DIM * BLOCK_SIZE],
    pub bf16_values: [u16; MAX_HEAD_DIM * BLOCK_SIZE],
    scores: [f32; MAX_ROWS * BLOCK_SIZE],
    weights: [f32; MAX_ROWS * BLOCK_SIZE],
    /// The last, half-filled pair of value rows.
    last_pair: [f32; MAX_HEAD_DIM],
    row_max: [f32; TILE_ROWS],
    /// The end of the keys of the sequence that each row sees; for no row is it less than for the one
    /// before it.
    pub visible: [usize; TILE_ROWS],
    /// The sums of weights in sixteen lanes, added up at the end.
    row_sum: [[f32; 16]; TILE_ROWS],
}

/// How the scores of a block of keys are computed.
///
/// # Safety
/// `scores` writes `BLOCK_SIZE` scores for each of `count` rows, rows `BLOCK_SIZE` apart. Scores of
/// keys that a row does not see may be anything.
pub(crate) unsafe trait Keys {
    /// The element that multiplies weights and values.
    type Element: Element;
    /// Computes the scores of `count` rows (1 to [`MAX_ROWS`]) of `queries`, [count, head_dim] of
    /// the element's activations.
    /// # Safety
    /// The pointers hold what is stated above; the element's instruction set is there.
    unsafe fn scores(
        &self,
        queries: *const <Self::Element as Element>::Activation,
        head_dim: usize,
        count: usize,
        out: *mut f32,
    );
}

/// A panel [head_dim][32], bf16 [head_dim / 2][32][2].
pub(crate) struct KeyPanel<E: Element> {
    pub start: *const E::Weight,
    /// The distance in bytes from this panel to the one that is read next, which is prefetched
    /// meanwhile; it wraps around if that one lies before. 0: nothing is prefetched.
    pub ahead: usize,
}

impl<E: Element> KeyPanel<E> {
    /// Returns a panel that prefetches no other.
    pub fn alone(start: *const E::Weight) -> Self {
        KeyPanel { start, ahead: 0 }
    }
}

/// A panel [32][value_columns], bf16 [16][value_columns][2].
#[derive(Clone, Copy)]
pub(crate) struct ValuePanel<W> {
    pub start: *const W,
    /// The elements from step to step.
    pub stride: usize,
    /// The distance in bytes to the panel that is read next, as for keys.
    pub ahead: usize,
}

impl<W> ValuePanel<W> {
    /// Returns a panel that prefetches no other.
    pub fn alone(start: *const W, stride: usize) -> Self {
        ValuePanel { start, stride, ahead: 0 }
    }
}

// SAFETY: the tile writes 32 columns of each row.
unsafe impl<E: Element> Keys for KeyPanel<E> {
    type Element = E;

    #[inline(always)]
    unsafe fn scores(
        &self,
        queries: *const E::Activation,
        head_dim: usize,
        count: usize,
        out: *mut f32,
    ) {
        let operands = Operands::<E> {
            a: queries,
            a_stride: head_dim,
            num_steps: head_dim / E::K_STEP,
            b: self.start,
            b_stride: BLOCK_SIZE * E::K_STEP,
            in_tiles: false,
            ahead: Ahead::far(self.ahead),
            out,
            out_stride: BLOCK_SIZE,
            accumulate: false,
        };
        // SAFETY: the panel has head_dim / K_STEP steps of 32 columns; the rest is passed on to the
        // caller.
        unsafe { tile_rows::<E, { BLOCK_SIZE / 16 }>(count, &operands) }
    }
}

/// The rows of a tile on their way over the blocks of keys.
pub(crate) struct Online<'a> {
    pub memory: &'a mut Memory,
    num_rows: usize,
    head_dim: usize,
    /// The head_dim rounded up to 16.
    value_columns: usize,
    /// The factor of the scores times log2(e), because weights are powers of two.
    scale: f32,
    /// The most keys that a row sees, which are those before the end of its `visible`.
    window: usize,
}

impl<'a> Online<'a> {
    pub fn new(memory: &'a mut Memory, head_dim: usize, scale: f32, window: Option<usize>) -> Self {
        Online {
            memory,
            num_rows: 0,
            head_dim,
            value_columns: head_dim.next_multiple_of(16),
            scale: scale * std::f32::consts::LOG2_E,
            window: window.unwrap_or(usize::MAX),
        }
    }

    /// Returns the keys that any of the rows sees: the first block of them begins with the first of
    /// these numbers, and the last key is before the second.
    #[inline(always)]
    pub fn keys(&self) -> (usize, usize) {
        let (first, last) = (self.memory.visible[0], self.memory.visible[self.num_rows - 1]);
        (first.saturating_sub(self.window) / BLOCK_SIZE * BLOCK_SIZE, last)
    }

    /// Begins with `num_rows` rows, whose `queries` and `visible` are in the memory.
    #[inline(always)]
    pub fn start(&mut self, num_rows: usize) {
        self.num_rows = num_rows;
        self.memory.sums[..num_rows * self.value_columns].fill(0.0);
        self.memory.row_max[..num_rows].fill(f32::NEG_INFINITY);
        self.memory.row_sum[..num_rows].fill([0.0; 16]);
    }

    /// Returns the weighted sum of values of a row, and the factor that is still missing.
    #[inline(always)]
    pub fn finished(&self, row: usize) -> (&[f32], f32) {
        let sums = &self.memory.sums[row * self.value_columns..][..self.value_columns];
        (sums, 1.0 / sum_lanes(self.memory.row_sum[row]))
    }

    /// Goes over the keys from `first_key` on for all rows that see any of them. Keys from
    /// `context_len` on do not belong to this sequence.
    ///
    /// `C` is the element to whose precision weights are rounded; the element of `K`, which
    /// multiplies, is C or, for widened panels, f32.
    ///
    /// # Safety
    /// `values` is for K's element, whose steps with visible keys are readable, and
    /// `memory.queries` holds activations for it; so does `keys` as its trait says.
    #[inline(always)]
    pub unsafe fn block<C: Element, K: Keys>(
        &mut self,
        first_key: usize,
        context_len: usize,
        keys: &K,
        values: ValuePanel<<K::Element as Element>::Weight>,
    ) {
        // Rows whose token lies before the block see nothing of it, and neither do those whose window
        // begins after it.
        let visible = &self.memory.visible[..self.num_rows];
        let mut row = visible.partition_point(|&visible| visible <= first_key);
        let end_key = first_key.saturating_add(BLOCK_SIZE);
        let end = visible.partition_point(|&end| end.saturating_sub(self.window) < end_key);
        while row < end {
            let count = (end - row).min(MAX_ROWS);
            // SAFETY: rows row..row + count of `queries`; `scores` has MAX_ROWS rows of 32.
            unsafe {
                let queries = self.memory.queries.as_ptr();
                let queries = queries.cast::<<K::Element as Element>::Activation>();
                let scores = self.memory.scores.as_mut_ptr();
                keys.scores(queries.add(row * self.head_dim), self.head_dim, count, scores);
            }
            // SAFETY: as for this function; the elements of C and K have activations of one type.
            unsafe { self.weigh::<C>(row, count, first_key) };
            let visible = (self.memory.visible[row + count - 1] - first_key).min(BLOCK_SIZE);
            let at_end = first_key + visible == context_len;
            // SAFETY: as for this function.
            unsafe { self.add_values::<K::Element>(row, count, visible, at_end, values) };
            row += count;
        }
    }

    /// Turns the scores of `count` rows into weights and rescales the rows' sums.
    ///
    /// # Safety
    /// The instruction set of `C` is there.
    #[inline(always)]
    unsafe fn weigh<C: Element>(&mut self, first: usize, count: usize, first_key: usize) {
        let value_columns = self.value_columns;
        let scale = self.scale;
        for strip_row in 0..count {
            let row = first + strip_row;
            // The fields are taken one by one: a reference to the whole would end the pointers into
            // its panels.
            let visible = self.memory.visible[row] - first_key;
            let scores =
                &mut self.memory.scores[strip_row * BLOCK_SIZE..(strip_row + 1) * BLOCK_SIZE];
            if visible < BLOCK_SIZE {
                scores[visible..].fill(f32::NEG_INFINITY);
            }
            if visible > self.window {
                let hidden = (visible - self.window).min(BLOCK_SIZE);
                scores[..hidden].fill(f32::NEG_INFINITY);
            }
            // SAFETY: all reads and writes are of 16 elements inside the row's 32 scores, 32
            // weights and 16 lanes of the sum; value_columns is a multiple of 16.
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
                // The maximum stays the same in most blocks; the factor would be exactly one.
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

    /// Computes `sums += weights V` for `count` rows and the first `visible` keys of a block.
    /// `at_end` says that the places after them hold no keys of this sequence.
    ///
    /// # Safety
    /// The requirements are those of `block`.
    #[inline(always)]
    unsafe fn add_values<E: Element>(
        &mut self,
        row: usize,
        count: usize,
        visible: usize,
        at_end: bool,
        values: ValuePanel<E::Weight>,
    ) {
        let value_columns = self.value_columns;
        let mut operands = Operands::<E> {
            a: self.memory.weights.as_ptr().cast::<E::Activation>(),
            a_stride: BLOCK_SIZE,
            num_steps: visible.div_ceil(E::K_STEP),
            b: values.start,
            b_stride: values.stride,
            in_tiles: false,
            ahead: Ahead::far(values.ahead),
            out: self.memory.sums[row * value_columns..].as_mut_ptr(),
            out_stride: value_columns,
            accumulate: true,
        };
        // A weight of zero times what a former owner of the block left there would be NaN if that
        // was not finite, so the last pair is multiplied from a copy without it.
        let half_pair = at_end && !visible.is_multiple_of(E::K_STEP);
        // SAFETY: rows row..row + count of `sums`; up to 32 / K_STEP steps of value_columns.
        unsafe {
            if half_pair {
                operands.num_steps -= 1;
                add_columns(count, value_columns, operands);
                let from = values.start.add(operands.num_steps * operands.b_stride);
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

/// Computes a tile of `num_columns` columns, a multiple of 16.
///
/// # Safety
/// The requirements are those of [`Operands`].
#[inline(always)]
unsafe fn add_columns<E: Element>(count: usize, num_columns: usize, mut operands: Operands<E>) {
    let mut left = num_columns / 16;
    while left > 0 {
        let groups = if left >= 4 { 4 } else { left.min(2) };
        // SAFETY: at least `groups` more groups of columns are left.
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
