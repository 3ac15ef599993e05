//! Products with 8-bit floats on CPUs that multiply bf16 in vectors. Codes of e4m3 are bf16 numbers exactly,
//! and so are activations that the format quantises; others are rounded to bf16.
//!
//! With `x` the activations in bf16, `s` their scale (1 where they are not quantised), and codes and scales as in
//! [`QuantFormat`](crate::ops::quantised::QuantFormat), the sum of an output over chunks is
//!
//! ```text
//! out[o] = sum over chunks: (sum over i: number(code[o, i]) * x[i]) * s * scale[o]
//! ```
//!
//! added up in f32 from the first chunk to the last. A chunk is what a group of the weight and a group of
//! activations have in common. The bits of a row do not depend on the rows beside it.

use crate::backend::cpu::simd::{Bf16Kernel, Bf16Simd, Element, Operands, PairElement, Vector16};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::tile::{tile_rows, MAX_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer, Streaming};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::made_product::{made_bytes, multiply_made, MadeSums};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::grow;
use crate::ops::common::tile_product::TileEpilogue;
use crate::ops::quantised::activations::{number_inputs, INPUT_GROUP};
use crate::ops::quantised::{Group, QuantisedPanels};
use std::ops::Range;

/// Up to this many rows, numbers are multiplied as they are made, in registers.
const FEW_ROWS: usize = 4;
/// Up to this many rows the next chunk is prefetched.
const PREFETCHED_ROWS: usize = 64;
/// The numbers of 16 columns in a vector.
const VECTORS: usize = PANEL_COLUMNS / 16;
/// The activations of a pair of k.
const PAIR: usize = 2;
/// The elements of a pair of k of a panel, and of the longest chunk.
const PAIR_LEN: usize = PAIR * PANEL_COLUMNS;
const CHUNK_LEN: usize = INPUT_GROUP * PANEL_COLUMNS;

/// Returns the activations from row to row: an odd last one is followed by a zero.
fn row_stride(in_features: usize) -> usize {
    in_features.next_multiple_of(PAIR)
}

/// Returns the number of scales of a row of activations.
fn num_input_groups(in_features: usize) -> usize {
    in_features.div_ceil(INPUT_GROUP)
}

/// Returns the bytes of `num_rows` rows of activations and their scales.
pub(super) fn rows_bytes(num_rows: usize, in_features: usize) -> usize {
    let activations = row_stride(in_features).saturating_mul(size_of::<u32>());
    let scales = num_input_groups(in_features).saturating_mul(size_of::<f32>());
    num_rows.saturating_mul(activations.saturating_add(scales))
}

/// Returns the bytes of scratch that `num_lanes` threads need for products of `num_rows` rows.
pub(super) fn scratch_bytes(num_lanes: usize, num_rows: usize) -> usize {
    made_bytes(num_lanes, num_rows, CHUNK_LEN)
}

/// Passes all sums of x [num_rows, in_features] times `weight`, whose codes are floats, to `epilogue`. There is at
/// least one input, and for a gated epilogue half the `out_features` are whole panels.
pub(super) fn multiply_fp8<P: TileEpilogue>(
    backend: &CpuBackend,
    x: &[f32],
    weight: &QuantisedPanels,
    epilogue: &P,
    activations: &mut HostBuffer,
    scratch: &mut HostBuffer,
) -> Result<()> {
    let in_features = weight.in_features();
    let num_rows = x.len().checked_div(in_features).unwrap_or(0);
    grow::<u8>(activations, rows_bytes(num_rows, in_features), "activations in bf16")?;
    // Scales first, which are aligned as the buffer is.
    let num_groups = num_input_groups(in_features);
    let scales = SendPointer(activations.as_bytes_mut().as_mut_ptr().cast::<f32>());
    let rows = SendPointer(scales.get().wrapping_add(num_rows * num_groups).cast::<u32>());
    backend.parallel_tokens(num_rows, in_features, |tokens| {
        backend.run_bf16(MakeRows {
            x: &x[tokens.start * in_features..tokens.end * in_features],
            weight,
            rows: rows.get().wrapping_add(tokens.start * row_stride(in_features)),
            scales: scales.get().wrapping_add(tokens.start * num_groups),
        });
    })?;
    let streaming = backend.streaming();
    let chunks = Chunks { rows, scales, weight, streaming };
    multiply_made(backend, num_rows, CHUNK_LEN, &chunks, epilogue, scratch)
}

/// Some rows of activations on their way into bf16, in the order of the weight.
struct MakeRows<'a> {
    x: &'a [f32],
    weight: &'a QuantisedPanels,
    /// [rows][row_stride] places of up to four bytes each, of which the element's activations are the first
    /// ones of the rows together.
    rows: *mut u32,
    /// [rows][num_input_groups].
    scales: *mut f32,
}

impl Bf16Kernel for MakeRows<'_> {
    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        let (in_features, order) = (self.weight.in_features(), self.weight.order());
        let (stride, num_groups) = (row_stride(in_features), num_input_groups(in_features));
        let quantises = self.weight.format().quantises_inputs;
        for (row, x) in self.x.chunks_exact(in_features.max(1)).enumerate() {
            // SAFETY: there are row_stride places and a scale for each group of each row, which are given out
            // once; an activation of bf16 takes up to four bytes.
            let (to, scales) = unsafe {
                type Activation<S> = <<S as Bf16Simd>::Bf16 as Element>::Activation;
                let to = self.rows.add(row * stride).cast::<Activation<S>>();
                let scales = self.scales.add(row * num_groups);
                (
                    std::slice::from_raw_parts_mut(to, stride),
                    std::slice::from_raw_parts_mut(scales, num_groups),
                )
            };
            if let Some(last) = to.get_mut(in_features) {
                *last = S::Bf16::activation(0.0);
            }
            let groups = to.chunks_mut(INPUT_GROUP).zip(scales);
            for ((to, scale), first) in groups.zip((0..in_features).step_by(INPUT_GROUP)) {
                let places = first..in_features.min(first + INPUT_GROUP);
                let mut values = [0.0; INPUT_GROUP];
                if order.is_empty() {
                    values[..places.len()].copy_from_slice(&x[places.clone()]);
                } else {
                    for (value, &input) in values.iter_mut().zip(&order[places.clone()]) {
                        *value = x.get(input as usize).copied().unwrap_or(0.0);
                    }
                }
                *scale = if quantises { number_inputs(&mut values) } else { 1.0 };
                for (to, &value) in to.iter_mut().zip(&values[..places.len()]) {
                    *to = S::Bf16::activation(value);
                }
            }
        }
    }
}

/// Rows times chunks of panels.
struct Chunks<'a> {
    /// See [`MakeRows`].
    rows: SendPointer<u32>,
    scales: SendPointer<f32>,
    weight: &'a QuantisedPanels,
    streaming: Streaming,
}

/// A chunk of a panel, and where its results go.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    group: &'a Group<'a>,
    /// The first of its codes.
    codes: *const u8,
    /// The first of its values of k, and their number.
    first: usize,
    len: usize,
    /// Where its results go: 64 places for each of the rows.
    sums: *mut f32,
    ahead: Ahead,
}

/// The codes beside the last ones of an odd number.
static NO_CODES: [u8; PANEL_COLUMNS] = [0; PANEL_COLUMNS];

impl Chunk<'_> {
    /// Returns the codes of the values of k `k` and `k + 1`, and prefetches what lies `ahead` of them.
    #[inline(always)]
    fn pair(&self, k: usize) -> (*const u8, *const u8) {
        let first = self.codes.wrapping_add(k * PANEL_COLUMNS);
        let second = first.wrapping_add(PANEL_COLUMNS);
        if self.ahead.bytes > 0 {
            self.ahead.prefetch(first);
            self.ahead.prefetch(second);
        }
        (first, if k + 1 == self.len { NO_CODES.as_ptr() } else { second })
    }
}

impl MadeSums for Chunks<'_> {
    fn out_features(&self) -> usize {
        self.weight.out_features()
    }

    #[inline(always)]
    unsafe fn add_up<S: Bf16Simd>(
        &self,
        panel: usize,
        rows: &Range<usize>,
        numbers: *mut u16,
        sums: *mut f32,
    ) {
        let ahead = self.ahead(rows.len());
        for group in self.weight.groups(panel) {
            let places = group.places.clone();
            let mut first = places.start;
            while first < places.end {
                // The next multiple of INPUT_GROUP ends a chunk.
                let end = places.end.min((first / INPUT_GROUP + 1) * INPUT_GROUP);
                let codes = &group.codes()[(first - places.start) * PANEL_COLUMNS..];
                let chunk = Chunk {
                    group: &group,
                    codes: codes.as_ptr(),
                    first,
                    len: end - first,
                    sums,
                    ahead,
                };
                // SAFETY: the chunk has len rows of 64 codes; the rest is passed on to the caller.
                unsafe {
                    match rows.len() {
                        1 => self.few_rows::<S, 1>(&chunk, rows.start),
                        2 => self.few_rows::<S, 2>(&chunk, rows.start),
                        3 => self.few_rows::<S, 3>(&chunk, rows.start),
                        FEW_ROWS => self.few_rows::<S, FEW_ROWS>(&chunk, rows.start),
                        _ => self.many_rows::<S>(&chunk, rows, numbers),
                    }
                }
                first = end;
            }
        }
    }
}

impl Chunks<'_> {
    /// Returns how far codes are prefetched.
    fn ahead(&self, num_rows: usize) -> Ahead {
        match num_rows {
            0..=FEW_ROWS => self.streaming.codes(num_rows),
            // While rows are multiplied by a chunk, the next one comes into the second-level cache: on a Zen 4
            // 5, 8 and 32 rows of Qwen3-0.6B's shape are 1.2, 1.2 and 1.08 times as fast with it.
            _ if num_rows <= PREFETCHED_ROWS => Ahead::far(CHUNK_LEN),
            _ => Ahead::NONE,
        }
    }

    /// Returns where the activations of a row begin.
    #[inline(always)]
    fn row<E: Element>(&self, row: usize) -> *const E::Activation {
        self.rows.get().wrapping_add(row * row_stride(self.weight.in_features())).cast()
    }

    /// Multiplies `ROWS` rows by a chunk.
    ///
    /// # Safety
    /// As for [`MadeSums::add_up`]; the rows are there.
    #[inline(always)]
    // Indices of constant extent, which the compiler unrolls into registers.
    #[allow(clippy::needless_range_loop)]
    unsafe fn few_rows<S: Bf16Simd, const ROWS: usize>(&self, chunk: &Chunk<'_>, row: usize) {
        // SAFETY: a row of codes is 64 bytes, of which the chunk has `len`; rows have an activation for each
        // value of k, and one more where that is odd; a prefetch may point anywhere.
        unsafe {
            let a: [_; ROWS] =
                std::array::from_fn(|r| self.row::<S::Bf16>(row + r).wrapping_add(chunk.first));
            let mut held = [[S::Vector::zero(); VECTORS]; ROWS];
            for k in (0..chunk.len).step_by(PAIR) {
                let (first, second) = chunk.pair(k);
                let numbers = S::Bf16::load_fp8(first, second);
                for r in 0..ROWS {
                    let activations = S::Bf16::broadcast(a[r].add(k));
                    for v in 0..VECTORS {
                        held[r][v] = S::Bf16::multiply_add(held[r][v], activations, numbers[v]);
                    }
                }
            }
            for r in 0..ROWS {
                self.add::<S>(chunk, row + r, &held[r], r);
            }
        }
    }

    /// Adds the sums of a chunk of a row, scaled, to what the chunks before have left at place `place`.
    ///
    /// # Safety
    /// As for [`MadeSums::add_up`].
    #[inline(always)]
    unsafe fn add<S: Bf16Simd>(
        &self,
        chunk: &Chunk<'_>,
        row: usize,
        products: &[S::Vector; VECTORS],
        place: usize,
    ) {
        // SAFETY: each row has a scale for each group, and 64 sums; vectors are 0 to 3.
        unsafe {
            let num_groups = num_input_groups(self.weight.in_features());
            let scale = *self.scales.get().add(row * num_groups + chunk.first / INPUT_GROUP);
            let scale = S::Vector::splat(scale);
            for (vector, products) in products.iter().enumerate() {
                let to = chunk.sums.add(place * PANEL_COLUMNS + 16 * vector);
                let before = if chunk.first == 0 { S::Vector::zero() } else { S::Vector::load(to) };
                let scales = chunk.group.scales::<S::Vector>(vector);
                products.mul(scale).mul_add(scales, before).store(to);
            }
        }
    }

    /// Multiplies rows by a chunk, whose numbers are made once for all of them.
    ///
    /// # Safety
    /// As for [`MadeSums::add_up`].
    #[inline(always)]
    unsafe fn many_rows<S: Bf16Simd>(
        &self,
        chunk: &Chunk<'_>,
        rows: &Range<usize>,
        numbers: *mut u16,
    ) {
        // SAFETY: as in `few_rows`; there is room for the numbers of a chunk, and for the sums of a strip.
        unsafe {
            for k in (0..chunk.len).step_by(PAIR) {
                let (first, second) = chunk.pair(k);
                let to = numbers.add(k / PAIR * PAIR_LEN);
                for (v, &pairs) in S::Bf16::load_fp8(first, second).iter().enumerate() {
                    S::Bf16::store_pairs(pairs, to.add(v * PAIR_LEN / VECTORS));
                }
            }
            let mut strip = [0.0_f32; MAX_ROWS * PANEL_COLUMNS];
            for row in rows.clone().step_by(MAX_ROWS) {
                let count = (rows.end - row).min(MAX_ROWS);
                let operands = Operands::<S::Bf16> {
                    a: self.row::<S::Bf16>(row).add(chunk.first),
                    a_stride: row_places::<S::Bf16>(self.weight.in_features()),
                    num_steps: chunk.len.div_ceil(PAIR),
                    b: numbers,
                    b_stride: PAIR_LEN,
                    in_tiles: false,
                    ahead: Ahead::NONE,
                    out: strip.as_mut_ptr(),
                    out_stride: PANEL_COLUMNS,
                    accumulate: false,
                };
                tile_rows::<S::Bf16, VECTORS>(count, &operands);
                for (r, sums) in strip.chunks_exact(PANEL_COLUMNS).take(count).enumerate() {
                    let mut products = [S::Vector::zero(); VECTORS];
                    for (v, products) in products.iter_mut().enumerate() {
                        *products = S::Vector::load(sums.as_ptr().add(16 * v));
                    }
                    self.add::<S>(chunk, row + r, &products, row + r - rows.start);
                }
            }
        }
    }
}

/// Returns the activations of an element from row to row.
fn row_places<E: Element>(in_features: usize) -> usize {
    row_stride(in_features) * size_of::<u32>() / size_of::<E::Activation>()
}
