//! `out = x W^T + bias`, or added to `out`.
//!
//! x [num_tokens, in_features] f32, W [out_features, in_features] packed, bias [out_features] f32,
//! out [num_tokens, out_features] f32; sums in f32. With bf16 weights x is rounded to bf16 first, on
//! every instruction set; f32 and f16 weights take x as it is. An output element is summed over k in
//! one order whatever `num_tokens` and the number of threads, so its bits depend on its row of x alone.

use super::packed_matrix::{k_step, PackedMatrix, PANEL_COLUMNS};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::tile::{tile_rows, Element, Operands, F16, F32, MAX_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer, Pages, Plain};
use std::sync::atomic::{AtomicUsize, Ordering};

/// From this many rows on 16-bit panels are widened to f32 once and multiplied from there: the
/// conversion then costs less than in the inner loop, and the bits are the same.
const WIDEN_FROM_ROWS: usize = 4 * MAX_ROWS;
/// Rows of a task when there are too few panels to occupy all threads.
const TASK_ROWS: usize = 16 * MAX_ROWS;
/// With many rows, the sums over k are taken in stretches of this length, each for all rows before the
/// next: 512 KiB of an f32 panel stay in the second-level cache while the rows pass by. Longer ones
/// halve the speed at in_features 12288 (Emerald Rapids, 79 of 155 GFLOP/s). Sums are kept in f32 from
/// stretch to stretch, so that the bits are those of one go.
const STRETCH: usize = 2048;
/// Bytes by which decoding prefetches ahead of its reads.
const PREFETCH_BYTES: usize = 8192;
/// Columns of one vector group.
const GROUPS: usize = PANEL_COLUMNS / 16;

/// What [`linear`] does with what `out` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// The result replaces it.
    Overwrite,
    /// The result is added to it: the residual connection.
    Add,
}

/// Buffers that [`linear`] needs; they grow to the largest call and are then reused.
#[derive(Debug)]
pub struct LinearScratch {
    /// x as the kernels take it: [num_tokens, in_features rounded up to even].
    activations: HostBuffer,
    /// One panel widened to f32 for each thread.
    panels: HostBuffer,
    /// The sums of one panel for each thread: [num_tokens, 64].
    sums: HostBuffer,
}

impl Default for LinearScratch {
    fn default() -> Self {
        LinearScratch {
            activations: HostBuffer::empty(),
            panels: HostBuffer::empty(),
            sums: HostBuffer::empty(),
        }
    }
}

impl LinearScratch {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Makes `buffer` hold at least `len` elements of `T`; what it held is lost when it grows.
pub(crate) fn grow<T: Plain>(buffer: &mut HostBuffer, len: usize, what: &str) -> Result<()> {
    let bytes =
        len.checked_mul(size_of::<T>()).ok_or_else(|| Error::out_of_memory(what, usize::MAX))?;
    if buffer.len_bytes() < bytes {
        *buffer = HostBuffer::empty();
        *buffer = HostBuffer::zeroed(bytes, Pages::Huge)?;
    }
    Ok(())
}

/// See the head of the file.
#[allow(clippy::too_many_arguments)]
pub fn linear(
    backend: &CpuBackend,
    x: &[f32],
    num_tokens: usize,
    weight: &PackedMatrix,
    bias: Option<&[f32]>,
    out: &mut [f32],
    store: Store,
    scratch: &mut LinearScratch,
) -> Result<()> {
    let (out_features, in_features) = (weight.out_features(), weight.in_features());
    if num_tokens.checked_mul(in_features) != Some(x.len())
        || num_tokens.checked_mul(out_features) != Some(out.len())
        || bias.is_some_and(|b| b.len() != out_features)
    {
        return Err(Error::internal(format!(
            "linear: {num_tokens} tokens, {} inputs, {} outputs, bias of {:?}, for a weight of \
             {out_features} x {in_features}",
            x.len(),
            out.len(),
            bias.map(<[f32]>::len)
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let is_bf16 = weight.dtype() == DType::BF16;
    let a_stride = in_features.next_multiple_of(k_step(weight.dtype()));
    let LinearScratch { activations, panels, sums } = scratch;
    if is_bf16 {
        grow::<f32>(activations, num_tokens * a_stride, "activations")?;
        let target = SendPointer(activations.as_mut_slice::<f32>().as_mut_ptr());
        let runs = (x.len() / (32 * 1024)).clamp(1, num_tokens).min(4 * backend.num_threads());
        backend.parallel_for(runs, &|run| {
            let (first, end) = (num_tokens * run / runs, num_tokens * (run + 1) / runs);
            let x = &x[first * in_features..end * in_features];
            backend.run(RoundRows { x, in_features, first, target: target.get(), a_stride });
        })?;
    }
    let widen = weight.dtype() != DType::F32
        && num_tokens >= WIDEN_FROM_ROWS
        && !(is_bf16 && backend.has_native_bf16());
    // One lane a thread, so that each has a buffer of its own; a lane claims units of work.
    let num_lanes = backend.num_threads();
    if widen {
        grow::<f32>(panels, num_lanes * weight.panel_len(), "widened weights")?;
    }
    let in_stretches = num_tokens >= WIDEN_FROM_ROWS && in_features > STRETCH + STRETCH / 2;
    let sums_len = num_tokens * PANEL_COLUMNS;
    if in_stretches {
        grow::<f32>(sums, num_lanes.saturating_mul(sums_len), "sums of a panel")?;
    }
    let units = Units::new(weight.num_panels(), num_tokens, num_lanes);
    let next_unit = AtomicUsize::new(0);
    let out_pointer = SendPointer(out.as_mut_ptr());
    let panel_pointer = SendPointer(panels.as_mut_slice::<f32>().as_mut_ptr());
    let sums_pointer = SendPointer(sums.as_mut_slice::<f32>().as_mut_ptr());
    let a: *const u8 = if is_bf16 { activations.as_bytes().as_ptr() } else { x.as_ptr().cast() };
    let a = SendPointer(a.cast_mut());
    let lane = |lane: usize| {
        let kernel = Lane {
            a: a.get(),
            a_stride,
            num_tokens,
            weight,
            bias,
            store,
            // SAFETY: with `widen` the buffer has num_lanes > lane panels; else it is not used.
            widened: widen.then(|| unsafe { panel_pointer.get().add(lane * weight.panel_len()) }),
            // SAFETY: with `in_stretches` the buffer has num_lanes > lane times sums_len; else it is not
            // used.
            sums: in_stretches.then(|| unsafe { sums_pointer.get().add(lane * sums_len) }),
            out: out_pointer.get(),
            units: &units,
            next_unit: &next_unit,
        };
        backend.run(kernel);
    };
    backend.parallel_for(num_lanes.min(units.len()), &lane)
}

/// Rounds rows of x to bf16, in the form in which the instruction set multiplies it. An odd last
/// pair is filled with a zero.
struct RoundRows<'a> {
    x: &'a [f32],
    in_features: usize,
    first: usize,
    target: *mut f32,
    a_stride: usize,
}

impl Kernel for RoundRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        type Activation<S> = <<S as Simd>::Bf16 as Element>::Activation;
        if self.in_features == 0 {
            return;
        }
        let target = self.target.cast::<Activation<S>>();
        for (row, x) in self.x.chunks_exact(self.in_features).enumerate() {
            // SAFETY: the buffer has num_tokens rows of a_stride elements of up to four bytes, and
            // first + row < num_tokens; rows of different tasks do not overlap.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    target.add((self.first + row) * self.a_stride),
                    self.a_stride,
                )
            };
            for (o, &v) in out.iter_mut().zip(x) {
                *o = S::Bf16::activation(v);
            }
            if let Some(last) = out.get_mut(self.in_features) {
                *last = S::Bf16::activation(0.0);
            }
        }
    }
}

/// How a call is cut up: runs of whole panels, and runs of rows when there are too few panels.
struct Units {
    num_panels: usize,
    panel_runs: usize,
    num_tokens: usize,
    row_runs: usize,
}

impl Units {
    fn new(num_panels: usize, num_tokens: usize, num_lanes: usize) -> Self {
        // Four units a thread even out cores that are slowed by others; longer runs of panels are
        // one contiguous stream. A single thread needs no cuts.
        let wanted = if num_lanes == 1 { 1 } else { 4 * num_lanes };
        let panel_runs = num_panels.min(wanted);
        let row_runs = wanted.div_ceil(panel_runs).min(num_tokens.div_ceil(TASK_ROWS)).max(1);
        Units { num_panels, panel_runs, num_tokens, row_runs }
    }

    fn len(&self) -> usize {
        self.panel_runs * self.row_runs
    }

    /// The panels and the rows of unit `unit`.
    #[inline(always)]
    fn get(&self, unit: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (p, r) = (unit / self.row_runs, unit % self.row_runs);
        let cut = |n: usize, part: usize, parts: usize| n * part / parts;
        (
            cut(self.num_panels, p, self.panel_runs)..cut(self.num_panels, p + 1, self.panel_runs),
            cut(self.num_tokens, r, self.row_runs)..cut(self.num_tokens, r + 1, self.row_runs),
        )
    }
}

/// The work of one thread: claims units until none is left.
struct Lane<'a> {
    /// [num_tokens, a_stride] of the element's activation type.
    a: *const u8,
    a_stride: usize,
    num_tokens: usize,
    weight: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    store: Store,
    /// [panel_len] for this lane alone, when panels shall be widened.
    widened: Option<*mut f32>,
    /// [num_tokens, 64] for this lane alone, when sums shall be taken in stretches.
    sums: Option<*mut f32>,
    /// [num_tokens, out_features]
    out: *mut f32,
    units: &'a Units,
    next_unit: &'a AtomicUsize,
}

impl Kernel for Lane<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `linear` has checked the shapes: `a` holds num_tokens rows of a_stride activations of
        // the type that `RoundRows` wrote (bf16) or f32; the matrix holds panels of its own dtype; `run`
        // is called for an instruction set that is there.
        unsafe {
            match self.weight.dtype() {
                DType::F32 => self.units::<F32<S::Vector>, F32<S::Vector>>(),
                DType::F16 => self.units::<F16<S::Vector>, F32<S::Vector>>(),
                DType::BF16 => self.units::<S::Bf16, F32<S::Vector>>(),
            }
        }
    }
}

impl Lane<'_> {
    /// # Safety
    /// As in `run`: `E` is the element of the matrix and of `a`, `W` f32 of the same vector type.
    #[inline(always)]
    unsafe fn units<E: Element, W: Element<Weight = f32>>(&self) {
        let panel_len = self.weight.panel_len();
        let panels = self.weight.panels::<E::Weight>();
        loop {
            let unit = self.next_unit.fetch_add(1, Ordering::Relaxed);
            if unit >= self.units.len() {
                return;
            }
            let (panel_range, rows) = self.units.get(unit);
            for panel in panel_range {
                let weights = &panels[panel * panel_len..(panel + 1) * panel_len];
                if let Some(widened) = self.widened {
                    // SAFETY: `widened` has panel_len elements and belongs to this lane; E is 16-bit
                    // with f32 math, whose activations are f32 as W's are.
                    unsafe {
                        widen_panel::<E>(weights, widened);
                        let a = self.a.cast::<W::Activation>();
                        self.rows::<W>(a, widened, panel, rows.clone());
                    }
                } else {
                    // SAFETY: the panel's steps are those of E, and so are the activations.
                    unsafe {
                        let a = self.a.cast::<E::Activation>();
                        self.rows::<E>(a, weights.as_ptr(), panel, rows.clone());
                    }
                }
            }
        }
    }

    /// All given rows of x times one panel.
    ///
    /// # Safety
    /// `a` and `b` hold num_tokens rows and one panel for the element `E`; see `run`.
    #[inline(always)]
    unsafe fn rows<E: Element>(
        &self,
        a: *const E::Activation,
        b: *const E::Weight,
        panel: usize,
        rows: std::ops::Range<usize>,
    ) {
        let num_steps = self.weight.panel_len() / (PANEL_COLUMNS * E::K_STEP);
        let b_stride = PANEL_COLUMNS * E::K_STEP;
        let few_rows = self.num_tokens < WIDEN_FROM_ROWS;
        // The strip of up to MAX_ROWS rows from `row` on, summed over some steps into `out`.
        let strip = |row: usize, steps: std::ops::Range<usize>, out: *mut f32| {
            let count = (rows.end - row).min(MAX_ROWS);
            // SAFETY: rows row..row + count < num_tokens of `a`; num_steps * K_STEP <= a_stride; the panel
            // has num_steps steps, of which `steps` are some; `out` has `count` rows of 64.
            unsafe {
                let operands = Operands::<E> {
                    a: a.add(row * self.a_stride + steps.start * E::K_STEP),
                    a_stride: self.a_stride,
                    num_steps: steps.len(),
                    b: b.add(steps.start * b_stride),
                    b_stride,
                    prefetch_bytes: if few_rows { PREFETCH_BYTES } else { 0 },
                    out,
                    out_stride: PANEL_COLUMNS,
                    accumulate: steps.start > 0,
                };
                tile_rows::<E, GROUPS>(count, &operands);
            }
            count
        };
        let Some(sums) = self.sums else {
            let mut sums = [0.0f32; MAX_ROWS * PANEL_COLUMNS];
            let mut row = rows.start;
            while row < rows.end {
                let count = strip(row, 0..num_steps, sums.as_mut_ptr());
                self.store(&sums, row, count, panel);
                row += count;
            }
            return;
        };
        let stretch = STRETCH / E::K_STEP;
        for first_step in (0..num_steps).step_by(stretch) {
            let steps = first_step..(first_step + stretch).min(num_steps);
            for row in rows.clone().step_by(MAX_ROWS) {
                let offset = (row - rows.start) * PANEL_COLUMNS;
                // SAFETY: `sums` has a row of 64 for each of num_tokens >= rows.len() rows.
                strip(row, steps.clone(), unsafe { sums.add(offset) });
            }
        }
        // SAFETY: as above; every row has been written.
        let sums = unsafe { std::slice::from_raw_parts(sums, rows.len() * PANEL_COLUMNS) };
        self.store(sums, rows.start, rows.len(), panel);
    }

    /// Adds the bias to a finished tile and writes it, or adds it, to `out`.
    #[inline(always)]
    fn store(&self, sums: &[f32], first_row: usize, num_rows: usize, panel: usize) {
        let out_features = self.weight.out_features();
        let first_column = panel * PANEL_COLUMNS;
        let columns = (out_features - first_column).min(PANEL_COLUMNS);
        for (row, sums) in sums.chunks_exact(PANEL_COLUMNS).take(num_rows).enumerate() {
            // SAFETY: first_row + row < num_tokens and first_column + columns <= out_features, so this
            // lies in `out`; no other unit has this panel and row.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    self.out.add((first_row + row) * out_features + first_column),
                    columns,
                )
            };
            if let Some(bias) = self.bias {
                let bias = &bias[first_column..first_column + columns];
                match self.store {
                    Store::Overwrite => {
                        for ((o, &s), &b) in out.iter_mut().zip(sums).zip(bias) {
                            *o = s + b;
                        }
                    }
                    Store::Add => {
                        for ((o, &s), &b) in out.iter_mut().zip(sums).zip(bias) {
                            *o += s + b;
                        }
                    }
                }
            } else {
                match self.store {
                    Store::Overwrite => out.copy_from_slice(&sums[..columns]),
                    Store::Add => out.iter_mut().zip(sums).for_each(|(o, &s)| *o += s),
                }
            }
        }
    }
}

/// Converts a 16-bit panel to an f32 panel [in_features][64].
///
/// # Safety
/// `widened` has room for as many f32 as `panel` has elements; `E` has f32 math.
#[inline(always)]
unsafe fn widen_panel<E: Element>(panel: &[E::Weight], widened: *mut f32) {
    let step = 16 * E::K_STEP;
    let mut from = panel.as_ptr();
    let mut to = widened;
    for _ in 0..panel.len() / (GROUPS * step) {
        for group in 0..GROUPS {
            // SAFETY: a step of a group is 16 * K_STEP weights; its k values go to rows 64 apart.
            unsafe { E::widen(from.add(group * step), to.add(16 * group), PANEL_COLUMNS) };
        }
        from = from.wrapping_add(GROUPS * step);
        to = to.wrapping_add(PANEL_COLUMNS * E::K_STEP);
    }
}
