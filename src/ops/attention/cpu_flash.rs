//! Attention without a matrix of scores: blocks of 32 keys and an online softmax, see
//! [`super::cpu_online_softmax`].
//!
//! A tile is up to 96 rows (query, head of the group) of one kv head. Many rows share a copy of
//! each block: keys transposed into a panel for the matrix tiles, values side by side. Few rows, as
//! in decoding, read keys and values once where they lie. A row's result depends on its tile's size
//! alone.

use crate::backend::cpu::math::LANES;
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::tile::{prefetch, Element, F32, MAX_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Result};
use crate::memory::HostBuffer;
use crate::ops::attention::cpu_naive::{resolve, Attention, Sequence};
use crate::ops::attention::cpu_online_softmax::{
    KeyPanel, Keys, Memory, Online, ValuePanel, PARALLEL_BLOCKS, TILE_ROWS,
};
use crate::ops::common::cpu_turn::{Turn, Widen};
use crate::ops::common::panel_product::grow;
use crate::ops::common::storage::Storage;
use crate::ops::kv_cache::layout::BLOCK_SIZE;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Up to this many rows, keys are multiplied where they lie: transposing them costs more.
const FEW_ROWS: usize = 2 * MAX_ROWS;

/// Buffers that [`attention_flash`] needs; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub struct FlashScratch {
    lanes: HostBuffer,
}

impl FlashScratch {
    /// Makes empty buffers.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Computes attention; `out` lies as `attention.out_strides` says.
pub fn attention_flash<T: Storage>(
    backend: &CpuBackend,
    attention: &Attention<'_, T>,
    out: &mut [T],
    scratch: &mut FlashScratch,
) -> Result<()> {
    let sequences = resolve(attention, out.len())?;
    let group = attention.num_heads / attention.num_kv_heads;
    if group == 0 {
        return Ok(());
    }
    let mut first_tiles = try_with_capacity(sequences.len(), "attention tiles")?;
    let (mut num_tiles, mut num_blocks) = (0usize, 0usize);
    for sequence in &sequences {
        first_tiles.push(num_tiles);
        let tiles = (sequence.q_len * group).div_ceil(TILE_ROWS);
        num_tiles += tiles;
        let most_seen = attention.window.map_or(sequence.kv_len, |w| w.min(sequence.kv_len));
        num_blocks += tiles * most_seen.div_ceil(BLOCK_SIZE);
    }
    let num_tasks = num_tiles * attention.num_kv_heads;
    let num_lanes = match num_blocks * attention.num_kv_heads {
        0..PARALLEL_BLOCKS => 1,
        _ => backend.num_threads().min(num_tasks),
    };
    grow::<u8>(&mut scratch.lanes, num_lanes * size_of::<Memory>(), "attention scratch")?;
    let memory = SendPointer(scratch.lanes.as_bytes_mut().as_mut_ptr().cast::<Memory>());
    let out = SendPointer(out.as_mut_ptr());
    let next_task = AtomicUsize::new(0);
    backend.parallel_for(num_lanes, &|lane| {
        // SAFETY: `lanes` holds num_lanes of them, 64-byte aligned and zeroed at first (any bits
        // are floats); lane numbers are given out once, so this is the only reference.
        let memory = unsafe { &mut *memory.get().add(lane) };
        let Attention { head_dim, scale, window, .. } = *attention;
        let online = Online::new(memory, head_dim, scale, window);
        backend.run(Lane {
            attention,
            group,
            sequences: &sequences,
            first_tiles: &first_tiles,
            online,
            out: &out,
            next_task: &next_task,
            num_tasks,
        });
    })
}

/// The work of one thread: claims tiles until none is left.
struct Lane<'a, T> {
    attention: &'a Attention<'a, T>,
    group: usize,
    sequences: &'a [Sequence<'a>],
    /// The first tile of each sequence, [num_seqs].
    first_tiles: &'a [usize],
    online: Online<'a>,
    out: &'a SendPointer<T>,
    next_task: &'a AtomicUsize,
    num_tasks: usize,
}

impl<T: Storage> Kernel for Lane<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self) {
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= self.num_tasks {
                return;
            }
            // The order is from the last to the first: late tiles see more keys, and small ones
            // shall end the call.
            let task = self.num_tasks - 1 - task;
            // All tiles of a head after each other: its keys and values stay in the second-level cache.
            let num_tiles = self.num_tasks / self.attention.num_kv_heads;
            let (kv_head, tile) = (task / num_tiles, task % num_tiles);
            // Sequences without queries have the same first tile as the next.
            let index = self.first_tiles.partition_point(|&first| first <= tile) - 1;
            let first_row = (tile - self.first_tiles[index]) * TILE_ROWS;
            self.attend::<S>(&self.sequences[index], kv_head, first_row);
        }
    }
}

/// Keys of a block that lie one token stride apart.
#[derive(Clone, Copy)]
struct Run {
    /// The index in the block of 32.
    start: usize,
    len: usize,
    /// The position of the first key's elements in k and v.
    k: usize,
    v: usize,
}

impl<T: Storage> Lane<'_, T> {
    #[inline(always)]
    fn attend<S: Simd>(&mut self, sequence: &Sequence<'_>, kv_head: usize, first_row: usize) {
        let attention = self.attention;
        let Attention { head_dim, causal, q_strides, out_strides, .. } = *attention;
        let num_rows = (sequence.q_len * self.group - first_row).min(TILE_ROWS);
        // The query and head of a row.
        let group = self.group;
        let place = |row: usize| {
            let row = first_row + row;
            (row / group, kv_head * group + row % group)
        };
        let memory = &mut *self.online.memory;
        for row in 0..num_rows {
            let (i, head) = place(row);
            memory.visible[row] = sequence.visible(causal, i);
            let q = sequence.q_start + i * q_strides.token + head * q_strides.head;
            let to = &mut memory.queries[row * head_dim..(row + 1) * head_dim];
            T::widen::<S>(&attention.q[q..q + head_dim], to);
        }
        self.online.start(num_rows);
        let (begin, end) = self.online.keys();
        for first_key in (begin..end).step_by(BLOCK_SIZE) {
            self.block::<S>(sequence, kv_head, first_key, num_rows);
        }
        for row in 0..num_rows {
            let (i, head) = place(row);
            let at = sequence.out_start + i * out_strides.token + head * out_strides.head;
            // SAFETY: `resolve` has found that this lies in `out` and shares nothing with other
            // tokens and heads; each is in one tile.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), head_dim) };
            if self.online.memory.visible[row] == 0 {
                out.fill(T::from_f32(0.0));
                continue;
            }
            let (sums, scale) = self.online.finished(row);
            crate::ops::common::storage::scaled::<S, T>(&sums[..head_dim], scale, out);
        }
    }

    /// Goes over keys and values from `first_key` on, for all rows of the tile.
    #[inline(always)]
    fn block<S: Simd>(
        &mut self,
        sequence: &Sequence<'_>,
        kv_head: usize,
        first_key: usize,
        num_rows: usize,
    ) {
        let attention = self.attention;
        let Attention { head_dim, k, v, k_strides, v_strides, .. } = *attention;
        let len = (sequence.kv_len - first_key).min(BLOCK_SIZE);
        let mut runs = [Run { start: 0, len: 0, k: 0, v: 0 }; BLOCK_SIZE];
        let (mut num_runs, mut start) = (0, 0);
        while start < len {
            let (k, v, follow) = sequence.key(attention, first_key + start);
            let run = Run {
                start,
                len: follow.min(len - start),
                k: k + kv_head * k_strides.head,
                v: v + kv_head * v_strides.head,
            };
            runs[num_runs] = run;
            start += run.len;
            num_runs += 1;
        }
        let runs = &runs[..num_runs];
        let few = num_rows <= FEW_ROWS && head_dim.is_multiple_of(LANES);
        let columns = head_dim.next_multiple_of(LANES);
        let in_place = few && num_runs == 1;
        let memory = &mut *self.online.memory;
        if !in_place {
            for run in runs {
                for i in 0..run.len {
                    let from = &v[run.v + i * v_strides.token..][..head_dim];
                    let to = &mut memory.values[(run.start + i) * columns..][..columns];
                    T::widen::<S>(from, &mut to[..head_dim]);
                    to[head_dim..].fill(0.0);
                }
            }
        }
        let wide_values = memory.values.as_ptr();
        let context_len = sequence.kv_len;
        if few {
            // The places of the block after the last key show the last key.
            let mut rows = [k.as_ptr(); BLOCK_SIZE];
            let (mut key, mut last) = (0, k.as_ptr());
            for run in runs {
                for i in 0..run.len {
                    last = k[run.k + i * k_strides.token..][..head_dim].as_ptr();
                    rows[key] = last;
                    key += 1;
                }
            }
            rows[key..].fill(last);
            let ahead = BLOCK_SIZE * k_strides.token;
            // SAFETY: `rows` are keys of head_dim elements, a multiple of 16. In place, the run's
            // values lie a token stride apart and have head_dim columns each; otherwise they have
            // been copied. All elements are f32 mathematics on S's vectors, and kernels run where S
            // is there.
            unsafe {
                if in_place {
                    type Weights<S, T> = <T as Storage>::Weights<<S as Simd>::Vector>;
                    let keys =
                        KeyRows::<T, Weights<S, T>> { rows, len, ahead, _element: PhantomData };
                    let (start, stride) = (v[runs[0].v..].as_ptr().cast(), v_strides.token);
                    let values = ValuePanel::alone(start, stride);
                    self.online.block::<F32<S::Vector>, _>(first_key, context_len, &keys, values);
                } else {
                    let keys =
                        KeyRows::<T, F32<S::Vector>> { rows, len, ahead, _element: PhantomData };
                    let values = ValuePanel::alone(wide_values, columns);
                    self.online.block::<F32<S::Vector>, _>(first_key, context_len, &keys, values);
                }
            }
            return;
        }
        for run in runs {
            Turn::<T, f32, Widen<T>> {
                from: &k[run.k..],
                from_stride: k_strides.token,
                rows: run.len,
                columns: head_dim,
                to: &mut memory.keys[run.start..],
                to_stride: BLOCK_SIZE,
                _element: PhantomData,
            }
            .run::<S>();
        }
        let keys = KeyPanel::<F32<S::Vector>>::alone(memory.keys.as_ptr());
        // SAFETY: the panels have been written, but for keys that no row sees; queries are f32.
        unsafe {
            let values = ValuePanel::alone(wide_values, columns);
            self.online.block::<F32<S::Vector>, _>(first_key, context_len, &keys, values);
        }
    }
}

/// Keys where they lie: 32 of head_dim elements, a multiple of 16.
struct KeyRows<T, E> {
    rows: [*const T; BLOCK_SIZE],
    /// The number of them that are keys of the sequence.
    len: usize,
    /// The distance in elements from a key to that of the next block, to prefetch it; any number
    /// will do, as it is only a hint.
    ahead: usize,
    /// The element that multiplies weights and values.
    _element: PhantomData<E>,
}

// SAFETY: writes 32 scores of each row, or the first 16 when no row sees more.
unsafe impl<T: Storage, E: Element<Activation = f32>> Keys for KeyRows<T, E> {
    type Element = E;

    #[inline(always)]
    unsafe fn scores(&self, queries: *const f32, head_dim: usize, count: usize, out: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe {
            match count {
                1 => self.dots::<1>(queries, head_dim, out),
                2 => self.dots::<2>(queries, head_dim, out),
                3 => self.dots::<3>(queries, head_dim, out),
                4 => self.dots::<4>(queries, head_dim, out),
                5 => self.dots::<5>(queries, head_dim, out),
                _ => self.dots::<6>(queries, head_dim, out),
            }
        }
    }
}

impl<T: Storage, E: Element<Activation = f32>> KeyRows<T, E> {
    /// # Safety
    /// The requirements are those of [`Keys::scores`].
    #[inline(always)]
    // Indices of constant extent, which the compiler unrolls into registers.
    #[allow(clippy::needless_range_loop)]
    unsafe fn dots<const R: usize>(&self, queries: *const f32, head_dim: usize, out: *mut f32) {
        for first in (0..self.len).step_by(LANES) {
            // SAFETY: every key has head_dim elements, and so has every one of R queries; `out` has
            // 32 scores a row.
            unsafe {
                let mut partial = [[E::Vector::zero(); LANES]; R];
                for key in 0..LANES {
                    let row = self.rows[first + key];
                    let mut sums = [E::Vector::zero(); R];
                    for i in (0..head_dim).step_by(LANES) {
                        prefetch(row.wrapping_add(self.ahead + i).cast());
                        let x = T::load::<E::Vector>(row.add(i));
                        for r in 0..R {
                            let q = E::Vector::load(queries.add(r * head_dim + i));
                            sums[r] = q.mul_add(x, sums[r]);
                        }
                    }
                    for r in 0..R {
                        partial[r][key] = sums[r];
                    }
                }
                for r in 0..R {
                    // Lane l of row k becomes lane k of row l: adding the rows gives the scores.
                    let mut lanes = E::Vector::transpose(partial[r]);
                    let mut width = LANES / 2;
                    while width > 0 {
                        for l in 0..width {
                            lanes[l] = lanes[l].add(lanes[l + width]);
                        }
                        width /= 2;
                    }
                    lanes[0].store(out.add(r * BLOCK_SIZE + first));
                }
            }
        }
    }
}
