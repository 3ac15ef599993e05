//! Products with quantised weights on the CPU. Weights of integers are multiplied as such
//! ([`cpu_integers`](super::cpu_integers), [`cpu_integer_tiles`](super::cpu_integer_tiles)). Those of
//! 8-bit floats become f32 in registers (few rows) or a panel at a time in the cache (many), exactly,
//! and activations stay f32; where a format says that they are quantised, they become what they are
//! in e4m3 first. Where bf16 is multiplied as such and nothing is lost by it, they become bf16 instead
//! ([`cpu_fp8`](super::cpu_fp8)). Products of several rows whose weight may be rounded do not come here
//! if they are faster in bf16 ([`cpu_tiles`](super::cpu_tiles)).
//!
//! Both ways add up the same numbers in the same order, so the bits of a row do not depend on the
//! number of rows.

use super::cpu_fp8::{self, multiply_fp8};
use super::cpu_integer_rows::{TileLayout, MANY_ROWS};
use super::cpu_integer_tiles::{multiply_integer_tiles, scratch_bytes};
use super::cpu_integers::{integers_bytes, multiply_integers};
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::{CpuBackend, Isa, SendPointer, Streaming};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{
    grow, multiply, Epilogue, MakePanel, ProductScratch, Rows, Weight,
};
use crate::ops::common::tile_product::EachPanel;
use crate::ops::quantised::activations::{round_inputs, INPUT_GROUP};
use crate::ops::quantised::{vectors_of, Code, Dequantise, Division, QuantFormat, QuantisedPanels};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Up to this many rows the weights are decoded again for every [`BLOCK_ROWS`]; beyond that, a
/// panel in the cache costs less.
pub(super) const FEW_ROWS: usize = 8;
/// The rows that are multiplied by weights in registers: their sums must stay there too.
const BLOCK_ROWS: usize = 4;

/// The buffers that products of x [num_rows, in_features] need.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuantisedNeeds {
    activations_bytes: usize,
    panels_len: usize,
    tile_bytes: usize,
}

impl QuantisedNeeds {
    pub fn new(
        isa: Isa,
        num_threads: usize,
        num_rows: usize,
        in_features: usize,
        format: &QuantFormat,
        is_ordered: bool,
    ) -> Self {
        if !format.code.is_float() {
            let division = Division::new(in_features, format);
            let layout_of =
                |num_rows| TileLayout::new(num_rows, &division, format).filter(|_| isa.has_tiles());
            let bytes_of = |num_rows| match layout_of(num_rows) {
                Some(layout) => layout.activations_bytes(num_rows),
                None => integers_bytes(num_rows, &division),
            };
            // Fewer rows may take more bytes each.
            let bytes = bytes_of(num_rows).max(bytes_of(num_rows.min(MANY_ROWS - 1)));
            let tile_bytes =
                layout_of(num_rows).map_or(0, |_| scratch_bytes(num_threads, num_rows));
            return QuantisedNeeds { activations_bytes: bytes, panels_len: 0, tile_bytes };
        }
        let changed = num_rows.saturating_mul(in_features).saturating_mul(size_of::<f32>());
        let is_changed = is_ordered || format.quantises_inputs;
        let has_panels = num_rows > FEW_ROWS;
        let panel_rows = num_threads.saturating_mul(PANEL_COLUMNS);
        let needs = QuantisedNeeds {
            activations_bytes: if is_changed { changed } else { 0 },
            panels_len: if has_panels { panel_rows.saturating_mul(in_features) } else { 0 },
            tile_bytes: 0,
        };
        if !isa.has_native_bf16() {
            return needs;
        }
        let in_bf16 = QuantisedNeeds {
            activations_bytes: cpu_fp8::rows_bytes(num_rows, in_features),
            panels_len: 0,
            tile_bytes: cpu_fp8::scratch_bytes(num_threads, num_rows),
        };
        // That activations stay f32 is up to the weight.
        if format.quantises_inputs {
            in_bf16
        } else {
            needs.max(in_bf16)
        }
    }

    pub fn max(self, other: Self) -> Self {
        QuantisedNeeds {
            activations_bytes: self.activations_bytes.max(other.activations_bytes),
            panels_len: self.panels_len.max(other.panels_len),
            tile_bytes: self.tile_bytes.max(other.tile_bytes),
        }
    }

    /// The bytes of activations as integers, in the order of a weight, or rounded to e4m3.
    pub fn activations_bytes(&self) -> usize {
        self.activations_bytes
    }

    /// The bytes that products in tiles need beside activations.
    pub fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// The f32 of the panels of all threads.
    pub fn panels_len(&self) -> usize {
        self.panels_len
    }
}

/// The layout in tiles of products of `num_rows` rows with a weight of integers; `None` where they are
/// multiplied otherwise.
pub(super) fn tile_layout(
    backend: &CpuBackend,
    num_rows: usize,
    weight: &QuantisedPanels,
) -> Option<TileLayout> {
    let inputs = weight.division().inputs;
    TileLayout::new(num_rows, &inputs, &weight.format()).filter(|_| backend.has_tiles())
}

/// Whether a weight's floats, and activations, are multiplied as bf16: if activations may be rounded to it, or
/// are numbers of e4m3.
pub(super) fn is_in_bf16(backend: &CpuBackend, weight: &QuantisedPanels) -> bool {
    let format = weight.format();
    backend.has_native_bf16()
        && weight.in_features() > 0
        && format.code.is_float()
        && (format.quantises_inputs || weight.is_rounded())
}

/// Passes all sums of x [num_rows, in_features] times `weight` to `epilogue`.
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_quantised<P: Epilogue>(
    backend: &CpuBackend,
    x: &[f32],
    num_rows: usize,
    weight: &QuantisedPanels,
    epilogue: P,
    activations: &mut HostBuffer,
    product: &mut ProductScratch,
    tiles: &mut HostBuffer,
) -> Result<()> {
    if let Some(layout) = tile_layout(backend, num_rows, weight) {
        let epilogue = &EachPanel(epilogue);
        // SAFETY: the backend has tiles, and the layout is that of this product.
        return unsafe {
            multiply_integer_tiles(
                backend,
                x,
                num_rows,
                weight,
                layout,
                epilogue,
                activations,
                tiles,
            )
        };
    }
    if is_in_bf16(backend, weight) {
        return multiply_fp8(backend, x, weight, &EachPanel(epilogue), activations, tiles);
    }
    let epilogue = &epilogue;
    if !weight.format().code.is_float() {
        return multiply_integers(backend, x, num_rows, weight, epilogue, activations);
    }
    let x = match weight.order() {
        [] if weight.format().quantises_inputs => {
            round(backend, x, weight.in_features(), activations)?
        }
        [] => x,
        order => gather(backend, x, order, activations)?,
    };
    if num_rows > FEW_ROWS {
        let (out_features, in_features) = (weight.out_features(), weight.in_features());
        let a = SendPointer(x.as_ptr().cast_mut().cast());
        let rows = Rows { a, a_stride: in_features, num_rows };
        let made = Weight::Made { out_features, in_features, maker: weight };
        // SAFETY: x has num_rows rows of in_features activations, which are f32 as panels are.
        return unsafe { multiply(backend, &rows, &made, epilogue, product) };
    }
    let next_panel = AtomicUsize::new(0);
    let lane = |_: usize| {
        let streaming = backend.streaming();
        backend.run(FewRows { x, num_rows, weight, epilogue, streaming, next_panel: &next_panel });
    };
    backend.parallel_for(backend.num_threads().min(weight.num_panels()), &lane)
}

/// Brings the inputs of every row into the order of the weight's places.
fn gather<'b>(
    backend: &CpuBackend,
    x: &[f32],
    order: &[u32],
    buffer: &'b mut HostBuffer,
) -> Result<&'b [f32]> {
    grow::<f32>(buffer, x.len(), "inputs in the order of a weight")?;
    let to = buffer.as_mut_slice::<f32>().get_mut(..x.len()).unwrap_or_default();
    backend.parallel_rows(to, order.len(), |first, rows| {
        let from = x.chunks_exact(order.len()).skip(first);
        for (row, from) in rows.chunks_exact_mut(order.len()).zip(from) {
            for (to, &input) in row.iter_mut().zip(order) {
                *to = from.get(input as usize).copied().unwrap_or(0.0);
            }
        }
    })?;
    Ok(buffer.as_slice::<f32>().get(..x.len()).unwrap_or_default())
}

/// Rounds every row to e4m3 with a scale for each group of inputs.
fn round<'b>(
    backend: &CpuBackend,
    x: &[f32],
    in_features: usize,
    buffer: &'b mut HostBuffer,
) -> Result<&'b [f32]> {
    grow::<f32>(buffer, x.len(), "activations in e4m3")?;
    let to = buffer.as_mut_slice::<f32>().get_mut(..x.len()).unwrap_or_default();
    // Rows of whole groups can be divided among threads, even a single one.
    let is_whole = in_features.is_multiple_of(INPUT_GROUP);
    let width = if is_whole { INPUT_GROUP } else { in_features };
    backend.parallel_rows(to, width, |first, rows| {
        let from = x.chunks_exact(width).skip(first);
        for (row, from) in rows.chunks_exact_mut(width).zip(from) {
            round_inputs(from, row);
        }
    })?;
    Ok(buffer.as_slice::<f32>().get(..x.len()).unwrap_or_default())
}

impl MakePanel for QuantisedPanels {
    #[inline(always)]
    fn make<S: Simd>(&self, panel: usize, to: &mut [f32]) {
        Dequantise { panels: self, panel, to }.run::<S>();
    }
}

/// The work of one thread: claims panels until none is left.
struct FewRows<'a, P> {
    x: &'a [f32],
    num_rows: usize,
    weight: &'a QuantisedPanels,
    epilogue: &'a P,
    streaming: Streaming,
    next_panel: &'a AtomicUsize,
}

impl<P: Epilogue> Kernel for FewRows<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (in_features, out_features) = (self.weight.in_features(), self.weight.out_features());
        loop {
            let panel = self.next_panel.fetch_add(1, Ordering::Relaxed);
            if panel >= self.weight.num_panels() {
                return;
            }
            let first = panel * PANEL_COLUMNS;
            let columns = first..out_features.min(first + PANEL_COLUMNS);
            for row in (0..self.num_rows).step_by(BLOCK_ROWS) {
                let count = BLOCK_ROWS.min(self.num_rows - row);
                let x = &self.x[row * in_features..(row + count) * in_features];
                let mut sums = [0.0_f32; BLOCK_ROWS * PANEL_COLUMNS];
                // Later blocks find what the first one has asked for.
                let ahead = match row {
                    0 => self.streaming.codes(self.num_rows),
                    _ => Ahead::NONE,
                };
                block::<S>(self.weight, panel, x, count, ahead, &mut sums);
                self.epilogue.store::<S>(&sums, row, count, columns.clone());
            }
        }
    }
}

/// Multiplies `count` rows by a panel.
#[inline(always)]
fn block<S: Simd>(
    weight: &QuantisedPanels,
    panel: usize,
    x: &[f32],
    count: usize,
    ahead: Ahead,
    sums: &mut [f32; BLOCK_ROWS * PANEL_COLUMNS],
) {
    match count {
        1 => rows::<S, 1>(weight, panel, x, ahead, sums),
        2 => rows::<S, 2>(weight, panel, x, ahead, sums),
        3 => rows::<S, 3>(weight, panel, x, ahead, sums),
        _ => rows::<S, BLOCK_ROWS>(weight, panel, x, ahead, sums),
    }
}

/// Multiplies `ROWS` rows by a panel, a group and 32 columns at a time: what is summed then stays in
/// registers on every instruction set with sixteen of them, and the codes of a group in the cache.
#[inline(always)]
fn rows<S: Simd, const ROWS: usize>(
    weight: &QuantisedPanels,
    panel: usize,
    x: &[f32],
    ahead: Ahead,
    sums: &mut [f32; BLOCK_ROWS * PANEL_COLUMNS],
) {
    let in_features = weight.in_features();
    for group in weight.groups(panel) {
        for pair in 0..2 {
            let columns = vectors_of(Code::Fp8, pair).map(|vector| 16 * vector);
            // SAFETY: `run` is called for an instruction set that is there; the vectors are 0 to 3, so
            // that rows of 64 sums have their columns; places are below in_features, the length of the
            // ROWS rows of x.
            unsafe {
                let scales = columns.map(|column| group.scales::<S::Vector>(column / 16));
                let mut held = [[S::Vector::zero(); 2]; ROWS];
                for (row, held) in held.iter_mut().enumerate() {
                    let sums = sums.as_ptr().add(row * PANEL_COLUMNS);
                    *held = [
                        S::Vector::load(sums.add(columns[0])),
                        S::Vector::load(sums.add(columns[1])),
                    ];
                }
                for (place, codes) in group.places.clone().zip(group.codes().chunks(PANEL_COLUMNS))
                {
                    if pair == 0 && ahead.bytes > 0 {
                        ahead.prefetch(codes.as_ptr());
                    }
                    let a = group.floats::<S::Vector>(place, columns[0] / 16).mul(scales[0]);
                    let b = group.floats::<S::Vector>(place, columns[1] / 16).mul(scales[1]);
                    for (row, held) in held.iter_mut().enumerate() {
                        let value = S::Vector::splat(*x.as_ptr().add(row * in_features + place));
                        *held = [value.mul_add(a, held[0]), value.mul_add(b, held[1])];
                    }
                }
                for (row, held) in held.iter().enumerate() {
                    let sums = sums.as_mut_ptr().add(row * PANEL_COLUMNS);
                    held[0].store(sums.add(columns[0]));
                    held[1].store(sums.add(columns[1]));
                }
            }
        }
    }
}
