//! Rows times the panels of a [`PackedMatrix`]: the loop around the matrix tiles that `linear` and
//! `gemm` share. An [`Epilogue`] decides what is done with the sums.
//!
//! An element is summed over k in one order whatever the number of rows and of threads.

use crate::backend::cpu::simd::{Bf16Kernel, Bf16Simd, Kernel, Simd};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::tile::{tile_rows, Element, Operands, F16, F32, MAX_ROWS, TILE_STEPS};
use crate::backend::cpu::{CpuBackend, SendPointer, Streaming};
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer, Pages, Plain};
use crate::ops::common::packed_matrix::{k_step, PackedMatrix, PairOrder, PANEL_COLUMNS};
use std::sync::atomic::{AtomicUsize, Ordering};

/// From this many rows on, 16-bit panels are widened to f32 once and multiplied from there: the
/// conversion then costs less than in the inner loop, and the bits are the same.
const WIDEN_FROM_ROWS: usize = 4 * MAX_ROWS;
/// The number of rows of a task when there are too few panels to occupy all threads.
const TASK_ROWS: usize = 16 * MAX_ROWS;
/// With many rows, the sums over k are taken in stretches of this length, each for all rows before
/// the next: 512 KiB of an f32 panel stay in the second-level cache while the rows pass by. Longer
/// ones halve the speed at in_features 12288 (Emerald Rapids, 79 of 155 GFLOP/s). Sums are kept in
/// f32 from stretch to stretch, so that the bits are those of one go.
const STRETCH: usize = 2048;
/// Up to this many rows, which are two strips, a panel is multiplied in stretches that stay in the
/// first-level cache, where [`Streaming::has_near_stretches`] says so. With three strips, keeping the
/// sums costs as much as it saves (Zen 5).
const NEAR_ROWS: usize = 2 * MAX_ROWS;
/// The length of such a stretch in bytes. It has whole tiles of steps.
const NEAR_BYTES: usize = 8192;
/// The number of columns of one vector group.
const GROUPS: usize = PANEL_COLUMNS / 16;

/// The buffers of [`multiply`]; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub(crate) struct ProductScratch {
    /// One panel widened to f32 for each thread.
    panels: HostBuffer,
    /// The sums of one panel for each thread: [num_rows, 64].
    sums: HostBuffer,
}

impl ProductScratch {
    /// Returns the number of bytes held.
    pub fn size_bytes(&self) -> usize {
        self.panels.len_bytes() + self.sums.len_bytes()
    }

    /// Makes room for what calls with these needs take.
    pub fn reserve(&mut self, needs: &ProductNeeds) -> Result<()> {
        grow::<f32>(&mut self.panels, needs.panels_len, "widened weights")?;
        grow::<f32>(&mut self.sums, needs.sums_len, "sums of a panel")
    }
}

/// The parts of a [`ProductScratch`] that a product needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProductNeeds {
    /// Whether weights are widened to f32 first.
    widen: bool,
    /// Whether sums are taken in stretches of k.
    in_stretches: bool,
    /// The number of f32 of the widened panels and of the sums of all threads.
    panels_len: usize,
    sums_len: usize,
}

impl ProductNeeds {
    /// Returns the needs for `num_rows` rows and a packed matrix of `in_features` columns.
    pub fn new(
        dtype: DType,
        has_native_bf16: bool,
        num_lanes: usize,
        num_rows: usize,
        in_features: usize,
    ) -> Self {
        let native = dtype == DType::BF16 && has_native_bf16;
        let widen = dtype != DType::F32 && num_rows >= WIDEN_FROM_ROWS && !native;
        let in_stretches = num_rows >= WIDEN_FROM_ROWS && in_features > STRETCH + STRETCH / 2;
        let of = |needed: bool, rows: usize| {
            if needed {
                num_lanes.saturating_mul(rows).saturating_mul(PANEL_COLUMNS)
            } else {
                0
            }
        };
        ProductNeeds {
            widen,
            in_stretches,
            panels_len: of(widen, stepped_k(in_features, dtype)),
            sums_len: of(in_stretches, num_rows),
        }
    }

    /// Returns the needs that cover both.
    pub fn max(self, other: Self) -> Self {
        ProductNeeds {
            widen: self.widen || other.widen,
            in_stretches: self.in_stretches || other.in_stretches,
            panels_len: self.panels_len.max(other.panels_len),
            sums_len: self.sums_len.max(other.sums_len),
        }
    }

    /// Returns the needs with panels of at least `len` f32 in all.
    pub fn with_panels(self, len: usize) -> Self {
        ProductNeeds { panels_len: self.panels_len.max(len), ..self }
    }

    /// Returns their size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.panels_len.saturating_add(self.sums_len).saturating_mul(size_of::<f32>())
    }
}

/// Returns `in_features`, rounded up to whole steps of k.
fn stepped_k(in_features: usize, dtype: DType) -> usize {
    in_features.checked_next_multiple_of(k_step(dtype)).unwrap_or(usize::MAX)
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

/// Takes the finished sums.
pub(crate) trait Epilogue: Sync {
    /// `sums` is [num_rows, 64], of which the first `columns.len()` are columns `columns` of the
    /// result and the rows are those from `first_row` on. Each element is given out once; calls for
    /// different ones come from several threads.
    fn store<S: Simd>(
        &self,
        sums: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: std::ops::Range<usize>,
    );
}

/// Makes panels of a right operand that is not packed, [in_features][64] f32.
pub(crate) trait MakePanel: Sync {
    /// Fills `to` with panel `panel`, padding included.
    fn make<S: Simd>(&self, panel: usize, to: &mut [f32]);
}

/// Makes a panel.
struct MakeOne<'a, M> {
    maker: &'a M,
    panel: usize,
    to: &'a mut [f32],
}

impl<M: MakePanel> Kernel for MakeOne<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        self.maker.make::<S>(self.panel, self.to);
    }
}

/// A maker for right operands that are packed, which need none.
pub(crate) enum Packed {}

impl MakePanel for Packed {
    #[inline(always)]
    fn make<S: Simd>(&self, _panel: usize, _to: &mut [f32]) {}
}

/// The right operand.
pub(crate) enum Weight<'a, M> {
    /// It has been packed once and for all.
    Packed(&'a PackedMatrix),
    /// Its panels are made as they are needed, into a buffer of the thread: each is used at once,
    /// and only it is in the cache beside the rows.
    Made { out_features: usize, in_features: usize, maker: &'a M },
}

impl<M> Weight<'_, M> {
    fn dtype(&self) -> DType {
        match self {
            Weight::Packed(matrix) => matrix.dtype(),
            Weight::Made { .. } => DType::F32,
        }
    }

    fn out_features(&self) -> usize {
        match self {
            Weight::Packed(matrix) => matrix.out_features(),
            Weight::Made { out_features, .. } => *out_features,
        }
    }

    fn in_features(&self) -> usize {
        match self {
            Weight::Packed(matrix) => matrix.in_features(),
            Weight::Made { in_features, .. } => *in_features,
        }
    }

    fn panel_len(&self) -> usize {
        match self {
            Weight::Packed(matrix) => matrix.panel_len(),
            Weight::Made { .. } => self.own_panel_len(),
        }
    }

    fn is_in_tiles(&self) -> bool {
        matches!(self, Weight::Packed(matrix) if matrix.is_in_tiles())
    }

    /// Returns the elements of a panel that is widened or made.
    fn own_panel_len(&self) -> usize {
        stepped_k(self.in_features(), self.dtype()) * PANEL_COLUMNS
    }
}

/// The left operand.
pub(crate) struct Rows {
    /// The rows, [num_rows, a_stride] of the activation type of the matrix's element.
    pub a: SendPointer<u8>,
    /// The distance between rows: at least the steps of a panel times the k of a step.
    pub a_stride: usize,
    pub num_rows: usize,
}

/// Passes all sums of `rows` times `weight` to `epilogue`.
///
/// # Safety
/// `rows.a` is readable as its fields say (the last row need not be longer than the k of a panel).
pub(crate) unsafe fn multiply<P: Epilogue, M: MakePanel>(
    backend: &CpuBackend,
    rows: &Rows,
    weight: &Weight<'_, M>,
    epilogue: &P,
    scratch: &mut ProductScratch,
) -> Result<()> {
    let ProductScratch { panels, sums } = scratch;
    let num_rows = rows.num_rows;
    // There is one lane per thread, so that each has a buffer of its own; a lane claims units of
    // work.
    let num_lanes = backend.num_threads();
    let ProductNeeds { widen, in_stretches, .. } = ProductNeeds::new(
        weight.dtype(),
        backend.has_native_bf16(),
        num_lanes,
        num_rows,
        weight.in_features(),
    );
    let own_panel = widen || matches!(weight, Weight::Made { .. });
    if own_panel {
        grow::<f32>(panels, num_lanes.saturating_mul(weight.own_panel_len()), "widened weights")?;
    }
    let sums_len = num_rows * PANEL_COLUMNS;
    if in_stretches {
        grow::<f32>(sums, num_lanes.saturating_mul(sums_len), "sums of a panel")?;
    }
    let units = Units::new(weight.out_features().div_ceil(PANEL_COLUMNS), num_rows, num_lanes);
    let next_unit = AtomicUsize::new(0);
    let panel_pointer = SendPointer(panels.as_mut_slice::<f32>().as_mut_ptr());
    let sums_pointer = SendPointer(sums.as_mut_slice::<f32>().as_mut_ptr());
    let lane = |lane: usize| {
        let kernel = Lane {
            a: rows.a.get(),
            a_stride: rows.a_stride,
            num_rows,
            weight,
            epilogue,
            // SAFETY: with `own_panel` the buffer has num_lanes > lane panels; else it is not used.
            own_panel: own_panel
                .then(|| unsafe { panel_pointer.get().add(lane * weight.own_panel_len()) }),
            // SAFETY: with `in_stretches` the buffer has num_lanes > lane times sums_len; else it
            // is not used.
            sums: in_stretches.then(|| unsafe { sums_pointer.get().add(lane * sums_len) }),
            streaming: backend.streaming(),
            units: &units,
            next_unit: &next_unit,
        };
        backend.run_bf16(kernel);
    };
    backend.parallel_for(num_lanes.min(units.len()), &lane)
}

/// How a call is cut up: runs of whole panels, and runs of rows when there are too few panels.
pub(crate) struct Units {
    num_panels: usize,
    panel_runs: usize,
    num_rows: usize,
    row_runs: usize,
}

impl Units {
    pub fn new(num_panels: usize, num_rows: usize, num_lanes: usize) -> Self {
        // Four units per thread even out cores that are slowed by others; longer runs of panels are
        // one contiguous stream. A single thread needs no cuts.
        let wanted = if num_lanes == 1 { 1 } else { 4 * num_lanes };
        let panel_runs = num_panels.min(wanted);
        let row_runs = wanted.div_ceil(panel_runs).min(num_rows.div_ceil(TASK_ROWS)).max(1);
        Units { num_panels, panel_runs, num_rows, row_runs }
    }

    pub fn len(&self) -> usize {
        self.panel_runs * self.row_runs
    }

    /// Returns the panels and the rows of unit `unit`.
    #[inline(always)]
    pub fn get(&self, unit: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (p, r) = (unit / self.row_runs, unit % self.row_runs);
        let cut = |n: usize, part: usize, parts: usize| n * part / parts;
        (
            cut(self.num_panels, p, self.panel_runs)..cut(self.num_panels, p + 1, self.panel_runs),
            cut(self.num_rows, r, self.row_runs)..cut(self.num_rows, r + 1, self.row_runs),
        )
    }
}

/// The work of one thread: claims units until none is left.
struct Lane<'a, P, M> {
    /// The rows, [num_rows, a_stride] of the element's activation type.
    a: *const u8,
    a_stride: usize,
    num_rows: usize,
    weight: &'a Weight<'a, M>,
    epilogue: &'a P,
    /// The buffer of this lane alone, [panel_len], when panels are to be widened or made.
    own_panel: Option<*mut f32>,
    /// The sums of this lane alone, [num_rows, 64], when they are to be taken in stretches.
    sums: Option<*mut f32>,
    streaming: Streaming,
    units: &'a Units,
    next_unit: &'a AtomicUsize,
}

impl<P: Epilogue, M: MakePanel> Bf16Kernel for Lane<'_, P, M> {
    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        // SAFETY: the caller of `multiply` vouches for `a`: num_rows rows of a_stride activations
        // of the element; the matrix holds panels of its own dtype; `run` is called for an
        // instruction set that is there.
        unsafe {
            match self.weight.dtype() {
                DType::F32 => self.units::<S, F32<S::Vector>, F32<S::Vector>>(),
                DType::F16 => self.units::<S, F16<S::Vector>, F32<S::Vector>>(),
                DType::BF16 => self.units::<S, S::Bf16, F32<S::Vector>>(),
            }
        }
    }
}

impl<P: Epilogue, M: MakePanel> Lane<'_, P, M> {
    /// # Safety
    /// As in `run`: `E` is the element of the matrix and of `a`, `W` f32 of the same vector type.
    #[inline(always)]
    unsafe fn units<S: Bf16Simd, E: Element, W: Element<Weight = f32>>(&self) {
        let panel_len = self.weight.panel_len();
        let num_k = self.weight.in_features().next_multiple_of(E::K_STEP);
        loop {
            let unit = self.next_unit.fetch_add(1, Ordering::Relaxed);
            if unit >= self.units.len() {
                return;
            }
            let (panel_range, rows) = self.units.get(unit);
            for panel in panel_range {
                match (self.weight, self.own_panel) {
                    (Weight::Made { maker, .. }, Some(to)) => {
                        // SAFETY: the buffer has panel_len elements and belongs to this lane.
                        let to = unsafe { std::slice::from_raw_parts_mut(to, panel_len) };
                        // SAFETY: `run` is called for an instruction set that is there.
                        unsafe { S::run(MakeOne { maker: *maker, panel, to: &mut *to }) };
                        // SAFETY: `a` holds f32 activations, as W's are, and the panel is f32.
                        unsafe {
                            let a = self.a.cast::<W::Activation>();
                            self.rows::<S, W>(a, to.as_ptr(), panel, &rows);
                        }
                    }
                    // This does not occur: `multiply` gives every lane a buffer to make panels in.
                    (Weight::Made { .. }, None) => {}
                    (Weight::Packed(matrix), widened) => {
                        let panels = matrix.panels::<E::Weight>();
                        let weights = &panels[panel * panel_len..(panel + 1) * panel_len];
                        // SAFETY: the panel's steps are those of E, and so are the activations.
                        // Widened, the buffer has panel_len elements and belongs to this lane; E is
                        // 16-bit with f32 math, whose activations are f32 as W's are.
                        unsafe {
                            if let Some(widened) = widened {
                                widen_panel::<E>(weights, matrix.order(), widened, num_k);
                                let a = self.a.cast::<W::Activation>();
                                self.rows::<S, W>(a, widened, panel, &rows);
                            } else {
                                let a = self.a.cast::<E::Activation>();
                                self.rows::<S, E>(a, weights.as_ptr(), panel, &rows);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Multiplies all given rows of x by one panel.
    ///
    /// # Safety
    /// `a` and `b` hold num_rows rows and one panel for the element `E`; see `run`.
    #[inline(always)]
    unsafe fn rows<S: Simd, E: Element>(
        &self,
        a: *const E::Activation,
        b: *const E::Weight,
        panel: usize,
        rows: &std::ops::Range<usize>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { S::run(PanelRows::<P, M, E> { lane: self, a, b, panel, rows: rows.clone() }) }
    }
}

/// The rows `rows` of x and a panel: `a` and `b` hold num_rows rows and one panel for the element `E`.
struct PanelRows<'a, P, M, E: Element> {
    lane: &'a Lane<'a, P, M>,
    a: *const E::Activation,
    b: *const E::Weight,
    panel: usize,
    rows: std::ops::Range<usize>,
}

impl<P: Epilogue, M: MakePanel, E: Element> Kernel for PanelRows<'_, P, M, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let PanelRows { lane, a, b, panel, rows } = self;
        let num_steps = lane.weight.in_features().div_ceil(E::K_STEP);
        // Widened panels do not lie in tiles.
        let in_tiles = E::K_STEP > 1 && lane.weight.is_in_tiles();
        let step_len = PANEL_COLUMNS * E::K_STEP;
        let b_stride = if in_tiles { TILE_STEPS * step_len } else { step_len };
        let first_column = panel * PANEL_COLUMNS;
        let columns = first_column..lane.weight.out_features().min(first_column + PANEL_COLUMNS);
        let few_rows = lane.num_rows < WIDEN_FROM_ROWS;
        // A panel of this lane's is in the cache already.
        let comes_from_memory = few_rows && lane.own_panel.is_none();
        let ahead =
            if comes_from_memory { lane.streaming.floats(lane.num_rows) } else { Ahead::NONE };
        // This computes the strip of up to MAX_ROWS rows from `row` on, summed over some steps,
        // into `out`.
        let strip = |row: usize, steps: std::ops::Range<usize>, out: *mut f32| {
            let count = (rows.end - row).min(MAX_ROWS);
            // SAFETY: rows row..row + count < num_rows of `a`; num_steps * K_STEP <= a_stride; the
            // panel has num_steps steps, of which `steps` are some; `out` has `count` rows of 64.
            unsafe {
                let operands = Operands::<E> {
                    a: a.add(row * lane.a_stride + steps.start * E::K_STEP),
                    a_stride: lane.a_stride,
                    num_steps: steps.len(),
                    // Stretches begin with a tile.
                    b: b.add(steps.start * step_len),
                    b_stride,
                    in_tiles,
                    // Later strips find what the first one has asked for.
                    ahead: if row == rows.start { ahead } else { Ahead::NONE },
                    out,
                    out_stride: PANEL_COLUMNS,
                    accumulate: steps.start > 0,
                };
                tile_rows::<E, GROUPS>(count, &operands);
            }
            count
        };
        let Some(sums) = lane.sums else {
            let near_rows = MAX_ROWS + 1..=NEAR_ROWS;
            if near_rows.contains(&rows.len()) && lane.streaming.has_near_stretches() {
                let stretch = NEAR_BYTES / (step_len * size_of::<E::Weight>());
                let mut sums = [0.0f32; NEAR_ROWS * PANEL_COLUMNS];
                for first_step in (0..num_steps).step_by(stretch) {
                    let steps = first_step..(first_step + stretch).min(num_steps);
                    let sums = sums.chunks_mut(MAX_ROWS * PANEL_COLUMNS);
                    for (row, sums) in rows.clone().step_by(MAX_ROWS).zip(sums) {
                        strip(row, steps.clone(), sums.as_mut_ptr());
                    }
                }
                lane.epilogue.store::<S>(&sums, rows.start, rows.len(), columns);
                return;
            }
            let mut sums = [0.0f32; MAX_ROWS * PANEL_COLUMNS];
            let mut row = rows.start;
            while row < rows.end {
                let count = strip(row, 0..num_steps, sums.as_mut_ptr());
                lane.epilogue.store::<S>(&sums, row, count, columns.clone());
                row += count;
            }
            return;
        };
        let stretch = STRETCH / E::K_STEP;
        for first_step in (0..num_steps).step_by(stretch) {
            let steps = first_step..(first_step + stretch).min(num_steps);
            for row in rows.clone().step_by(MAX_ROWS) {
                let offset = (row - rows.start) * PANEL_COLUMNS;
                // SAFETY: `sums` has a row of 64 for each of num_rows >= rows.len() rows.
                strip(row, steps.clone(), unsafe { sums.add(offset) });
            }
        }
        // SAFETY: as above; every row has been written.
        let sums = unsafe { std::slice::from_raw_parts(sums, rows.len() * PANEL_COLUMNS) };
        lane.epilogue.store::<S>(sums, rows.start, rows.len(), columns);
    }
}

/// Converts the first `num_k` values of k of a 16-bit panel to an f32 panel [num_k][64].
///
/// # Safety
/// The panel has `num_k` values of k, a multiple of `E::K_STEP`, and `widened` room for as many rows of
/// 64; `E` has f32 math.
#[inline(always)]
unsafe fn widen_panel<E: Element>(
    panel: &[E::Weight],
    order: PairOrder,
    widened: *mut f32,
    num_k: usize,
) {
    for step in 0..num_k / E::K_STEP {
        for group in 0..GROUPS {
            let place = order.place(step, 16 * group);
            // SAFETY: a step of a group is 16 * K_STEP weights; its k values go to rows 64 apart.
            unsafe {
                let to = widened.add(step * E::K_STEP * PANEL_COLUMNS + 16 * group);
                E::widen(panel.as_ptr().add(place * E::K_STEP), to, PANEL_COLUMNS);
            }
        }
    }
}
