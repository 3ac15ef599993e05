//! Rows times panels of bf16 on a unit that multiplies tiles: the counterpart of
//! [`super::panel_product`] for instruction sets that have one. The panels are those of a
//! [`PackedMatrix`], or are made of fewer bytes a part at a time ([`TileWeight`]).
//!
//! Up to 16 rows are one row of tiles: each panel passes by once, and the time is that of reading
//! it. More rows are taken in blocks of 32 by 32, four tiles of sums at a time, so that each tile
//! that is loaded is used twice. The sums of a block are taken in stretches of k.
//!
//! Where all rows fit into the second-level cache beside a panel, they pass by one panel, and each 32
//! of them are finished before the next: the sums between two stretches stay in the first-level cache.
//! Longer rows pass by in parts of k that fit, each by all panels of a unit before the next part; the
//! sums of the unit wait in memory in between.
//!
//! An element is summed in steps of 32 values of k from the first to the last in every case, and sums
//! are kept in f32 in between, so that its bits depend on its own row and column alone.

use crate::backend::cpu::simd::{Simd, TileKernel, TileSimd};
use crate::backend::cpu::tiles::{
    TileOperands, TileUnit, PANEL_TILES, TILE_BYTES, TILE_K, TILE_LEN, TILE_ROWS,
};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::{PackedMatrix, PANEL_COLUMNS};
use crate::ops::common::panel_product::{grow, Epilogue};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of rows that are multiplied at a time where there are more than one row of tiles.
const PAIR_ROWS: usize = 2 * TILE_ROWS;
/// The most rows of a unit of work.
pub(crate) const MAX_UNIT_ROWS: usize = 512;
/// The most panels of a unit of work. Each unit reads the rows anew.
const MAX_UNIT_PANELS: usize = 8;
/// The most bytes of rows that are taken to fit into the second-level cache.
pub(crate) const FITTING_BYTES: usize = 1 << 20;
/// The steps of k of a part of rows that do not fit: [`MAX_UNIT_ROWS`] of them take as many bytes as
/// fit.
const PART_STEPS: usize = FITTING_BYTES / (MAX_UNIT_ROWS * TILE_K * size_of::<u16>());
/// The steps of k of a stretch: that of 32 rows stays in the first-level cache.
const STRETCH_STEPS: usize = 16;
/// The steps of k of a panel that are made at a time for a single row of tiles: two such stretches
/// stay in the first-level cache.
const FEW_STEPS: usize = 4;
/// Up to this many pairs of rows of tiles, nothing is prefetched from memory. The prefetches of a
/// panel would follow each other so closely that they delay the loads from the second-level cache, and
/// the first pair reads the panel as fast without them. On a Xeon with AMX that saves 3 to 11 % of the
/// time of 48 to 160 rows of Qwen3-0.6B's shape, and nothing with 256 rows.
const UNFETCHED_PAIRS: usize = 5;
/// The elements of a step of a panel, and its lines in the cache.
pub(crate) const STEP_LEN: usize = PANEL_TILES * TILE_LEN;
const PANEL_LINES: usize = PANEL_TILES * TILE_BYTES / LINE_BYTES;
/// Bytes from row to row of the sums of a panel.
const SUMS_STRIDE: usize = PANEL_COLUMNS * 4;
const LINE_BYTES: usize = 64;

/// Takes the finished sums of a panel of the result.
pub(crate) trait TileEpilogue: Sync {
    /// Whether a panel of the result is made of two panels of the weight: the one in its place in
    /// the upper half of the rows and the one in its place in the lower half, which begins with a
    /// panel.
    const IS_GATED: bool;

    /// `sums` is [num_rows, 64] of the one panel; `lower` that of the second, or empty. The first
    /// `columns.len()` of each are columns `columns` of the result, and the rows are those from
    /// `first_row` on. Each element is given out once; calls for different ones come from several
    /// threads.
    fn store<S: Simd>(
        &self,
        sums: &[f32],
        lower: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: Range<usize>,
    );
}

/// The right operand: panels of 64 columns in tiles, or what they are made of.
pub(crate) trait TileWeight: Sync {
    /// Whether panels are made when they are needed, from fewer bytes.
    const IS_MADE: bool;

    /// Returns the number of columns of the right operand.
    fn out_features(&self) -> usize;

    /// Returns the number of values of k.
    fn in_features(&self) -> usize;

    /// Returns the elements of some steps of a panel. If they are made, it is in `room`, to which no
    /// reference is held.
    ///
    /// # Safety
    /// The panel and the steps are there, `S`'s instruction set is, and `room` has [`STEP_LEN`] places for
    /// each of the steps if panels are made.
    unsafe fn steps<S: Simd>(
        &self,
        panel: usize,
        steps: &Range<usize>,
        room: *mut u16,
    ) -> *const u16;

    /// Returns where step `step` of a panel is or would be: it may be the end of all panels or past it.
    fn address(&self, panel: usize, step: usize) -> *const u8;
}

impl TileWeight for PackedMatrix {
    const IS_MADE: bool = false;

    #[inline(always)]
    fn out_features(&self) -> usize {
        self.out_features()
    }

    #[inline(always)]
    fn in_features(&self) -> usize {
        self.in_features()
    }

    #[inline(always)]
    unsafe fn steps<S: Simd>(
        &self,
        panel: usize,
        steps: &Range<usize>,
        _room: *mut u16,
    ) -> *const u16 {
        let len = self.panel_len();
        self.panels::<u16>()[panel * len + steps.start * STEP_LEN..(panel + 1) * len].as_ptr()
    }

    #[inline(always)]
    fn address(&self, panel: usize, step: usize) -> *const u8 {
        let element = panel * self.panel_len() + step * STEP_LEN;
        self.panels::<u16>().as_ptr().wrapping_add(element).cast()
    }
}

/// An [`Epilogue`] of single panels.
pub(crate) struct EachPanel<P>(pub P);

impl<P: Epilogue> TileEpilogue for EachPanel<P> {
    const IS_GATED: bool = false;

    #[inline(always)]
    fn store<S: Simd>(
        &self,
        sums: &[f32],
        _lower: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: Range<usize>,
    ) {
        self.0.store::<S>(sums, first_row, num_rows, columns);
    }
}

/// Whether rows of so many values fit into the second-level cache beside a panel.
fn do_fit(num_rows: usize, in_features: usize) -> bool {
    num_rows.saturating_mul(in_features).saturating_mul(size_of::<u16>()) <= FITTING_BYTES
}

/// Returns the number of f32 that one thread needs for the sums of `num_rows` rows.
fn lane_sums_len(num_rows: usize) -> usize {
    if num_rows <= TILE_ROWS {
        return 0;
    }
    let rows = num_rows.min(MAX_UNIT_ROWS).next_multiple_of(PAIR_ROWS);
    MAX_UNIT_PANELS * rows * PANEL_COLUMNS
}

/// Returns the number of u16 that one thread needs for steps of panels that are made: those of a panel of
/// the result that is made of two.
fn lane_made_len(is_made: bool, num_rows: usize) -> usize {
    match is_made {
        false => 0,
        true if num_rows <= TILE_ROWS => 2 * FEW_STEPS * STEP_LEN,
        true => 2 * PART_STEPS * STEP_LEN,
    }
}

/// Returns the bytes of scratch that one thread needs, a multiple of 64.
fn lane_bytes(is_made: bool, num_rows: usize) -> usize {
    lane_sums_len(num_rows) * size_of::<f32>() + lane_made_len(is_made, num_rows) * size_of::<u16>()
}

/// Returns the bytes of scratch that `num_lanes` threads need for products of `num_rows` rows, with panels
/// that are made or not.
pub(crate) fn scratch_bytes(num_lanes: usize, num_rows: usize, is_made: bool) -> usize {
    num_lanes.saturating_mul(lane_bytes(is_made, num_rows))
}

/// Passes all sums of `num_rows` rows, arranged in tiles, times `weight` to `epilogue`.
///
/// # Safety
/// The backend has tiles, `weight` lies in tiles or is made so, and `tiles` holds `num_rows` rows of its
/// `in_features`, at least one of each, as [`make_tiles`](super::tile_rows::make_tiles) arranges them; what
/// fills up the last row of tiles may be anything. For a gated epilogue, half its `out_features` are whole
/// panels.
pub(crate) unsafe fn multiply<W: TileWeight, P: TileEpilogue>(
    backend: &CpuBackend,
    tiles: &[u16],
    num_rows: usize,
    weight: &W,
    epilogue: &P,
    scratch: &mut HostBuffer,
) -> Result<()> {
    let num_lanes = backend.num_threads();
    let lane_bytes = lane_bytes(W::IS_MADE, num_rows);
    let needed = scratch_bytes(num_lanes, num_rows, W::IS_MADE);
    grow::<u8>(scratch, needed, "sums of panels")?;
    let scratch = SendPointer(scratch.as_bytes_mut().as_mut_ptr());
    let panels_of_each = if P::IS_GATED { 2 } else { 1 };
    let out_features = weight.out_features() / panels_of_each;
    let max_panels = MAX_UNIT_PANELS / panels_of_each;
    let num_panels = out_features.div_ceil(PANEL_COLUMNS);
    let are_cheap = do_fit(num_rows.min(MAX_UNIT_ROWS), weight.in_features());
    let units = Units::new(num_panels, max_panels, num_rows, num_lanes, are_cheap);
    let next_unit = AtomicUsize::new(0);
    backend.parallel_for(num_lanes.min(units.len()), &|lane| {
        // SAFETY: the buffer has lane_bytes for each of num_lanes > lane.
        let memory = unsafe { scratch.get().add(lane * lane_bytes) };
        backend.run_tiles(Lane {
            a: tiles.as_ptr(),
            num_rows,
            weight,
            out_features,
            epilogue,
            sums: memory.cast(),
            // SAFETY: the sums come before it.
            made: unsafe { memory.cast::<f32>().add(lane_sums_len(num_rows)).cast() },
            units: &units,
            next_unit: &next_unit,
        });
    })
}

/// How a call is cut up: runs of panels of the result, and blocks of whole pairs of rows of tiles.
pub(crate) struct Units {
    num_panels: usize,
    panel_runs: usize,
    num_pairs: usize,
    row_blocks: usize,
}

impl Units {
    /// `are_cheap` says that a unit's rows are read from the second-level cache, however few its panels.
    pub fn new(
        num_panels: usize,
        max_panels: usize,
        num_rows: usize,
        num_lanes: usize,
        are_cheap: bool,
    ) -> Self {
        // Several units per thread even out cores that are slowed by others.
        let of_each = if are_cheap { 4 } else { 2 };
        let wanted = if num_lanes == 1 { 1 } else { of_each * num_lanes };
        let num_pairs = num_rows.div_ceil(PAIR_ROWS);
        if num_rows <= TILE_ROWS {
            let panel_runs = num_panels.min(wanted);
            return Units { num_panels, panel_runs, num_pairs, row_blocks: 1 };
        }
        let row_blocks =
            num_rows.div_ceil(MAX_UNIT_ROWS).max(wanted.div_ceil(num_panels.max(1))).min(num_pairs);
        let panels = (num_panels * row_blocks / wanted).clamp(1, max_panels);
        Units { num_panels, panel_runs: num_panels.div_ceil(panels), num_pairs, row_blocks }
    }

    pub fn len(&self) -> usize {
        self.panel_runs * self.row_blocks
    }

    /// Returns the panels of the result and the pairs of rows of tiles of unit `unit`.
    #[inline(always)]
    pub fn get(&self, unit: usize) -> (Range<usize>, Range<usize>) {
        let (run, block) = (unit / self.row_blocks, unit % self.row_blocks);
        let cut = |n: usize, part: usize, parts: usize| n * part / parts;
        (
            cut(self.num_panels, run, self.panel_runs)
                ..cut(self.num_panels, run + 1, self.panel_runs),
            cut(self.num_pairs, block, self.row_blocks)
                ..cut(self.num_pairs, block + 1, self.row_blocks),
        )
    }
}

/// The work of one thread: claims units until none is left.
struct Lane<'a, W, P> {
    /// The rows, [rows of tiles][steps] tiles.
    a: *const u16,
    num_rows: usize,
    weight: &'a W,
    /// The columns of the result.
    out_features: usize,
    epilogue: &'a P,
    /// The sums of this lane alone, [panels of the weight in a unit][rows of a unit, in pairs][64].
    sums: *mut f32,
    /// Steps of panels that this lane has made, see [`lane_made_len`].
    made: *mut u16,
    units: &'a Units,
    next_unit: &'a AtomicUsize,
}

/// The sums of one row of tiles and one panel.
#[repr(align(64))]
struct OneTileRow([f32; TILE_ROWS * PANEL_COLUMNS]);

impl<W: TileWeight, P: TileEpilogue> TileKernel for Lane<'_, W, P> {
    #[inline(always)]
    fn run<S: TileSimd>(self) {
        // SAFETY: `run` is called for an instruction set that is there, and this lane is the only
        // user of the unit on this thread.
        let Some(mut tiles) = (unsafe { S::Tiles::ready() }) else { return };
        loop {
            let unit = self.next_unit.fetch_add(1, Ordering::Relaxed);
            if unit >= self.units.len() {
                return;
            }
            let (panels, pairs) = self.units.get(unit);
            // SAFETY: passed on to the caller of `multiply`.
            unsafe {
                if self.num_rows <= TILE_ROWS {
                    // In a closure it would be compiled without the instruction set.
                    for panel in panels {
                        self.one_tile_row::<S>(&mut tiles, panel);
                    }
                } else {
                    self.pairs::<S>(&mut tiles, panels, pairs);
                }
            }
        }
    }
}

impl<W: TileWeight, P: TileEpilogue> Lane<'_, W, P> {
    /// The number of steps of k.
    #[inline(always)]
    fn steps(&self) -> usize {
        self.weight.in_features().div_ceil(TILE_K)
    }

    /// Returns the columns of the result that a panel makes.
    #[inline(always)]
    fn columns(&self, panel: usize) -> Range<usize> {
        let first = panel * PANEL_COLUMNS;
        first..self.out_features.min(first + PANEL_COLUMNS)
    }

    /// Returns the panel of the weight that is the second one of a panel of the result.
    #[inline(always)]
    fn lower(&self, panel: usize) -> usize {
        self.out_features / PANEL_COLUMNS + panel
    }

    /// Makes a panel of the result for up to 16 rows.
    ///
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn one_tile_row<S: TileSimd>(&self, tiles: &mut S::Tiles, panel: usize) {
        let mut sums = OneTileRow([0.0; TILE_ROWS * PANEL_COLUMNS]);
        let mut lower = OneTileRow([0.0; TILE_ROWS * PANEL_COLUMNS]);
        // SAFETY: passed on to the caller.
        unsafe { self.times_panel::<S>(tiles, panel, &mut sums) };
        let columns = self.columns(panel);
        if P::IS_GATED {
            // SAFETY: as above.
            unsafe { self.times_panel::<S>(tiles, self.lower(panel), &mut lower) };
            self.epilogue.store::<S>(&sums.0, &lower.0, 0, self.num_rows, columns);
        } else {
            self.epilogue.store::<S>(&sums.0, &[], 0, self.num_rows, columns);
        }
    }

    /// Multiplies up to 16 rows by a panel of the weight.
    ///
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn times_panel<S: TileSimd>(
        &self,
        tiles: &mut S::Tiles,
        panel: usize,
        sums: &mut OneTileRow,
    ) {
        let num_steps = self.steps();
        let at_a_time = if W::IS_MADE { FEW_STEPS } else { num_steps };
        let stretch = |first: usize| first..num_steps.min(first + at_a_time);
        // Steps are made before those before them are multiplied, so that nobody waits for their stores.
        let mut room = self.made;
        // SAFETY: passed on to the caller; where steps are made there is room for two stretches.
        let mut b = unsafe { self.weight.steps::<S>(panel, &stretch(0), room) };
        let mut first = 0;
        while first < num_steps {
            let steps = stretch(first);
            let mut next = std::ptr::null();
            if steps.end < num_steps {
                let other = self.made.wrapping_add(FEW_STEPS * STEP_LEN);
                room = if room == self.made { other } else { self.made };
                // SAFETY: as above.
                next = unsafe { self.weight.steps::<S>(panel, &stretch(steps.end), room) };
            }
            let operands = TileOperands {
                a: self.a.wrapping_add(first * TILE_LEN),
                a_stride: 0,
                b,
                b_stride: 0,
                num_steps: steps.len(),
                out: sums.0.as_mut_ptr(),
                out_stride: SUMS_STRIDE,
                accumulate: usize::from(first > 0),
                // A step takes its tiles in turn; touching their lines in order just before helps the
                // prefetchers of the processor, which follow one stream best.
                prefetch: b.cast(),
                prefetch_lines: if W::IS_MADE { 0 } else { PANEL_LINES },
            };
            // SAFETY: a row of tiles and a panel of as many steps.
            unsafe {
                if W::IS_MADE {
                    tiles.panel_block::<1, 4>(&operands);
                } else {
                    tiles.few_rows(self.num_rows, &operands);
                }
            }
            (first, b) = (steps.end, next);
        }
    }

    /// Makes some panels of the result for pairs of rows of tiles.
    ///
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn pairs<S: TileSimd>(
        &self,
        tiles: &mut S::Tiles,
        panels: Range<usize>,
        pairs: Range<usize>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            let fits = do_fit(pairs.len() * PAIR_ROWS, self.steps() * TILE_K);
            if fits && (!W::IS_MADE || self.steps() <= PART_STEPS) {
                self.fitting_pairs::<S>(tiles, panels, pairs);
            } else {
                self.pairs_in_parts::<S>(tiles, panels, pairs);
            }
        }
    }

    /// The same for rows that fit into the second-level cache: each pair is finished before the next.
    ///
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn fitting_pairs<S: TileSimd>(
        &self,
        tiles: &mut S::Tiles,
        panels: Range<usize>,
        pairs: Range<usize>,
    ) {
        let steps = 0..self.steps();
        let of_each = if P::IS_GATED { 2 } else { 1 };
        for panel in panels {
            let weights = [panel, self.lower(panel)];
            let mut elements = [std::ptr::null(); 2];
            for (place, elements) in elements.iter_mut().enumerate().take(of_each) {
                let room = self.made.wrapping_add(place * PART_STEPS * STEP_LEN);
                // SAFETY: passed on to the caller; there is room for the steps of two parts.
                *elements = unsafe { self.weight.steps::<S>(weights[place], &steps, room) };
            }
            for pair in pairs.clone() {
                let first_row = pair * PAIR_ROWS;
                let num_rows = (self.num_rows - first_row).min(PAIR_ROWS);
                let mut sums = [&[][..]; 2];
                for (place, &weight) in weights.iter().enumerate().take(of_each) {
                    let to = self.sums.wrapping_add(place * PAIR_ROWS * PANEL_COLUMNS);
                    let next = self.weight.address(weight + 1, 0);
                    let next = self.fetch(next, pair, &pairs, &steps);
                    // SAFETY: passed on to the caller; the sums have a place for two panels. The part
                    // writes all sums of these rows.
                    sums[place] = unsafe {
                        self.part::<S>(tiles, elements[place], pair, &steps, to, next);
                        std::slice::from_raw_parts(to, num_rows * PANEL_COLUMNS)
                    };
                }
                let [sums, lower] = sums;
                self.epilogue.store::<S>(sums, lower, first_row, num_rows, self.columns(panel));
            }
        }
    }

    /// The same for longer rows: a part of k of all of them after the other.
    ///
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn pairs_in_parts<S: TileSimd>(
        &self,
        tiles: &mut S::Tiles,
        panels: Range<usize>,
        pairs: Range<usize>,
    ) {
        let num_steps = self.steps();
        let num_panels = panels.len();
        let num_all = if P::IS_GATED { 2 * num_panels } else { num_panels };
        // The panel of the weight in a place of the unit.
        let weight = |place: usize| match place.checked_sub(num_panels) {
            Some(place) => self.lower(panels.start + place),
            None => panels.start + place,
        };
        let panel_sums = pairs.len() * PAIR_ROWS * PANEL_COLUMNS;
        for first_step in (0..num_steps).step_by(PART_STEPS) {
            let steps = first_step..num_steps.min(first_step + PART_STEPS);
            for place in 0..num_all {
                let next = if place + 1 < num_all {
                    self.weight.address(weight(place + 1), first_step)
                } else if steps.end < num_steps {
                    self.weight.address(weight(0), steps.end)
                } else {
                    self.weight.address(panels.end, 0)
                };
                // SAFETY: passed on to the caller; there is room for the steps of a part.
                let elements = unsafe { self.weight.steps::<S>(weight(place), &steps, self.made) };
                for pair in pairs.clone() {
                    let row = (pair - pairs.start) * PAIR_ROWS;
                    let to = self.sums.wrapping_add(place * panel_sums + row * PANEL_COLUMNS);
                    let next = self.fetch(next, pair, &pairs, &steps);
                    // SAFETY: passed on to the caller; the sums have a place for each panel and pair
                    // of a unit.
                    unsafe { self.part::<S>(tiles, elements, pair, &steps, to, next) };
                }
            }
        }
        let first_row = pairs.start * PAIR_ROWS;
        let num_rows = self.num_rows.min(pairs.end * PAIR_ROWS) - first_row;
        // SAFETY: as above; all these rows have been written.
        let sums_of = |place: usize| unsafe {
            let start = self.sums.add(place * panel_sums);
            std::slice::from_raw_parts(start, num_rows * PANEL_COLUMNS)
        };
        for (place, panel) in panels.enumerate() {
            let lower = if P::IS_GATED { sums_of(num_panels + place) } else { &[] };
            let columns = self.columns(panel);
            self.epilogue.store::<S>(sums_of(place), lower, first_row, num_rows, columns);
        }
    }

    /// Returns where a pair begins to prefetch and how many lines a step each of its blocks does, so
    /// that all `pairs` together prefetch as many steps of a panel from `start` on as they multiply; none
    /// where that does not pay.
    #[inline(always)]
    fn fetch(
        &self,
        start: *const u8,
        pair: usize,
        pairs: &Range<usize>,
        steps: &Range<usize>,
    ) -> (*const u8, usize) {
        if W::IS_MADE || pairs.len() <= UNFETCHED_PAIRS {
            return (start, 0);
        }
        let lines = PANEL_LINES.div_ceil(2 * pairs.len());
        let steps_before = (pair - pairs.start) * steps.len();
        (start.wrapping_add(2 * steps_before * lines * LINE_BYTES), lines)
    }

    /// Multiplies a pair by some steps of a panel of the weight, whose elements are `elements`: adds to the
    /// sums [32, 64] of the steps before, if there are any.
    ///
    /// # Safety
    /// As for [`multiply`]; `sums` has room for a pair.
    #[inline(always)]
    unsafe fn part<S: TileSimd>(
        &self,
        tiles: &mut S::Tiles,
        elements: *const u16,
        pair: usize,
        steps: &Range<usize>,
        sums: *mut f32,
        (mut prefetch, prefetch_lines): (*const u8, usize),
    ) {
        let num_steps = self.steps();
        for step in steps.clone().step_by(STRETCH_STEPS) {
            let stretch = step..steps.end.min(step + STRETCH_STEPS);
            let operands = TileOperands {
                a: self.a.wrapping_add((2 * pair * num_steps + step) * TILE_LEN),
                a_stride: num_steps * TILE_BYTES,
                b: elements.wrapping_add((step - steps.start) * STEP_LEN),
                b_stride: 0,
                num_steps: stretch.len(),
                out: sums,
                out_stride: SUMS_STRIDE,
                accumulate: usize::from(step > 0),
                prefetch,
                prefetch_lines,
            };
            // SAFETY: the pair has one or two rows of tiles of num_steps steps, and the panel has the
            // steps of the stretch.
            unsafe { self.pair::<S>(tiles, pair, &operands) };
            prefetch = prefetch.wrapping_add(2 * stretch.len() * prefetch_lines * LINE_BYTES);
        }
    }

    /// Multiplies a pair of rows of tiles, or the last one that is alone, by a stretch of a panel.
    ///
    /// # Safety
    /// `operands` covers the rows and 64 columns.
    #[inline(always)]
    unsafe fn pair<S: TileSimd>(&self, tiles: &mut S::Tiles, pair: usize, operands: &TileOperands) {
        // SAFETY: passed on to the caller.
        unsafe {
            if pair * PAIR_ROWS + TILE_ROWS >= self.num_rows {
                tiles.panel_block::<1, 4>(operands);
                return;
            }
            tiles.panel_block::<2, 2>(operands);
            let fetched = operands.num_steps * operands.prefetch_lines * LINE_BYTES;
            tiles.panel_block::<2, 2>(&TileOperands {
                b: operands.b.wrapping_add(2 * TILE_LEN),
                out: operands.out.wrapping_add(PAIR_ROWS),
                prefetch: operands.prefetch.wrapping_add(fetched),
                ..*operands
            });
        }
    }
}
