//! Products with quantised weights on the CPU: the weights become f32 in registers (few rows) or a
//! panel at a time in the cache (many), exactly; activations stay f32.
//!
//! Both ways add up the same numbers in the same order, so the bits of a row do not depend on the
//! number of rows.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{
    grow, multiply, Epilogue, MakePanel, ProductScratch, Rows, Weight,
};
use crate::ops::quantised::{vectors_of, Code, Dequantise, QuantisedPanels};

/// Up to this many rows the weights are decoded again for every [`BLOCK_ROWS`]; beyond that, a
/// panel in the cache costs less.
pub(super) const FEW_ROWS: usize = 8;
/// The rows that are multiplied by weights in registers: their sums must stay there too.
const BLOCK_ROWS: usize = 4;

/// The buffers that products of x [num_rows, in_features] need.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuantisedNeeds {
    ordered_len: usize,
    panels_len: usize,
}

impl QuantisedNeeds {
    pub fn new(num_threads: usize, num_rows: usize, in_features: usize, is_ordered: bool) -> Self {
        let has_panels = num_rows > FEW_ROWS;
        let panel_rows = num_threads.saturating_mul(PANEL_COLUMNS);
        QuantisedNeeds {
            ordered_len: if is_ordered { num_rows.saturating_mul(in_features) } else { 0 },
            panels_len: if has_panels { panel_rows.saturating_mul(in_features) } else { 0 },
        }
    }

    pub fn max(self, other: Self) -> Self {
        QuantisedNeeds {
            ordered_len: self.ordered_len.max(other.ordered_len),
            panels_len: self.panels_len.max(other.panels_len),
        }
    }

    /// The bytes of inputs in the order of a weight.
    pub fn ordered_bytes(&self) -> usize {
        self.ordered_len.saturating_mul(size_of::<f32>())
    }

    /// The f32 of the panels of all threads.
    pub fn panels_len(&self) -> usize {
        self.panels_len
    }
}

/// Passes all sums of x [num_rows, in_features] times `weight` to `epilogue`.
pub(super) fn multiply_quantised<P: Epilogue>(
    backend: &CpuBackend,
    x: &[f32],
    num_rows: usize,
    weight: &QuantisedPanels,
    epilogue: &P,
    ordered: &mut HostBuffer,
    product: &mut ProductScratch,
) -> Result<()> {
    let x =
        if weight.order().is_empty() { x } else { gather(backend, x, weight.order(), ordered)? };
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
        backend.run(FewRows { x, num_rows, weight, epilogue, next_panel: &next_panel });
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
                match self.weight.format().code {
                    Code::Int4 => block::<S>(self.weight, panel, x, count, Code::Int4, &mut sums),
                    Code::Int8 => block::<S>(self.weight, panel, x, count, Code::Int8, &mut sums),
                    Code::Fp8 => block::<S>(self.weight, panel, x, count, Code::Fp8, &mut sums),
                }
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
    code: Code,
    sums: &mut [f32; BLOCK_ROWS * PANEL_COLUMNS],
) {
    match count {
        1 => rows::<S, 1>(weight, panel, x, code, sums),
        2 => rows::<S, 2>(weight, panel, x, code, sums),
        3 => rows::<S, 3>(weight, panel, x, code, sums),
        _ => rows::<S, BLOCK_ROWS>(weight, panel, x, code, sums),
    }
}

/// Multiplies `ROWS` rows by a panel, a group and 32 columns at a time: what is summed then stays in
/// registers on every instruction set with sixteen of them, and the codes of a group in the cache.
#[inline(always)]
fn rows<S: Simd, const ROWS: usize>(
    weight: &QuantisedPanels,
    panel: usize,
    x: &[f32],
    code: Code,
    sums: &mut [f32; BLOCK_ROWS * PANEL_COLUMNS],
) {
    let in_features = weight.in_features();
    for group in weight.groups(panel) {
        for pair in 0..2 {
            let columns = vectors_of(code, pair).map(|vector| 16 * vector);
            // SAFETY: `run` is called for an instruction set that is there; the vectors are 0 to 3, so
            // that rows of 64 sums have their columns; places are below in_features, the length of the
            // ROWS rows of x.
            unsafe {
                let (scale_a, zero_a) = group.factors::<S::Vector>(columns[0] / 16);
                let (scale_b, zero_b) = group.factors::<S::Vector>(columns[1] / 16);
                let mut held = [[S::Vector::zero(); 2]; ROWS];
                for (row, held) in held.iter_mut().enumerate() {
                    let sums = sums.as_ptr().add(row * PANEL_COLUMNS);
                    *held = [
                        S::Vector::load(sums.add(columns[0])),
                        S::Vector::load(sums.add(columns[1])),
                    ];
                }
                for place in group.places() {
                    let (codes_a, codes_b) = group.codes::<S::Vector>(code, place, pair);
                    let a = codes_a.sub(zero_a).mul(scale_a);
                    let b = codes_b.sub(zero_b).mul(scale_b);
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
