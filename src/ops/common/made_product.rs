//! Rows times panels of bf16 that are made of fewer bytes, on instruction sets that multiply bf16 in
//! vectors: what [`super::tile_product`] is where there is a unit for tiles.
//!
//! The numbers of some steps of a panel are made into a buffer of the thread, and all rows are multiplied by
//! them from the cache before the next ones. Sums are kept in f32 in between, so that an element is summed
//! over k in one order whatever the number of rows and of threads.

use crate::backend::cpu::simd::{Bf16Kernel, Bf16Simd, Element, Operands};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::tile::{tile_rows, MAX_ROWS, TILE_STEPS};
use crate::backend::cpu::tiles::TILE_K;
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{grow, Rows, Units};
use crate::ops::common::tile_product::{TileEpilogue, TileWeight, STEP_LEN};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Up to this many rows the numbers of a panel are made so few at a time that they stay in the first-level
/// cache beside the rows and their sums.
const FEW_ROWS: usize = 4 * MAX_ROWS;
/// The steps of k, of 32 values, that are made at a time for few rows, and for many: then they take 256 KiB of
/// the second-level cache.
const FEW_STEPS: usize = 4;
const MANY_STEPS: usize = 64;

/// Returns the steps of k that are made at a time.
fn made_steps(num_rows: usize) -> usize {
    if num_rows <= FEW_ROWS {
        FEW_STEPS
    } else {
        MANY_STEPS
    }
}

/// The sums of rows times the panels of a weight, whose numbers are made as they are needed.
pub(crate) trait MadeSums: Sync {
    /// Returns the number of columns of the weight.
    fn out_features(&self) -> usize;

    /// Writes the sums of `rows` times a panel to `sums`, [rows][64]. `numbers` is room for this thread, as much
    /// as [`multiply_made`] was asked for.
    ///
    /// # Safety
    /// `S`'s instruction set and the panel are there; the pointers are valid for what is said above.
    unsafe fn add_up<S: Bf16Simd>(
        &self,
        panel: usize,
        rows: &Range<usize>,
        numbers: *mut u16,
        sums: *mut f32,
    );
}

/// Returns the bytes that one thread needs: made numbers, and sums of the two panels that a panel of the
/// result may be made of.
fn lane_bytes(num_rows: usize, num_numbers: usize) -> usize {
    let sums = num_rows.saturating_mul(2 * PANEL_COLUMNS * size_of::<f32>());
    sums.saturating_add(num_numbers * size_of::<u16>())
}

/// Returns the bytes of scratch of [`multiply_made`].
pub(crate) fn made_bytes(num_lanes: usize, num_rows: usize, num_numbers: usize) -> usize {
    num_lanes.saturating_mul(lane_bytes(num_rows, num_numbers))
}

/// Passes all sums of `num_rows` rows, at least one, to `epilogue`. Each thread has room for `num_numbers`
/// numbers in bf16, which take whole lines of the cache. For a gated epilogue, half the `out_features` are whole
/// panels.
pub(crate) fn multiply_made<M: MadeSums, P: TileEpilogue>(
    backend: &CpuBackend,
    num_rows: usize,
    num_numbers: usize,
    sums: &M,
    epilogue: &P,
    scratch: &mut HostBuffer,
) -> Result<()> {
    let num_lanes = backend.num_threads();
    let needed = made_bytes(num_lanes, num_rows, num_numbers);
    grow::<u8>(scratch, needed, "numbers and sums of panels")?;
    let scratch = SendPointer(scratch.as_bytes_mut().as_mut_ptr());
    let out_features = sums.out_features() / if P::IS_GATED { 2 } else { 1 };
    let units = Units::new(out_features.div_ceil(PANEL_COLUMNS), num_rows, num_lanes);
    let next_unit = AtomicUsize::new(0);
    backend.parallel_for(num_lanes.min(units.len()), &|lane| {
        // SAFETY: the buffer has lane_bytes for each of num_lanes > lane.
        let numbers = unsafe { scratch.get().add(lane * lane_bytes(num_rows, num_numbers)) };
        backend.run_bf16(Lane {
            num_rows,
            made: sums,
            out_features,
            epilogue,
            numbers: numbers.cast(),
            // SAFETY: the sums come after the numbers.
            sums: unsafe { numbers.cast::<u16>().add(num_numbers).cast() },
            units: &units,
            next_unit: &next_unit,
        });
    })
}

/// The work of one thread: claims units until none is left.
struct Lane<'a, M, P> {
    num_rows: usize,
    made: &'a M,
    /// The columns of the result.
    out_features: usize,
    epilogue: &'a P,
    /// Numbers that this lane has made.
    numbers: *mut u16,
    /// The sums of this lane alone, [2 panels][num_rows][64].
    sums: *mut f32,
    units: &'a Units,
    next_unit: &'a AtomicUsize,
}

impl<M: MadeSums, P: TileEpilogue> Bf16Kernel for Lane<'_, M, P> {
    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        let lower_sums = self.sums.wrapping_add(self.num_rows * PANEL_COLUMNS);
        loop {
            let unit = self.next_unit.fetch_add(1, Ordering::Relaxed);
            if unit >= self.units.len() {
                return;
            }
            let (panels, rows) = self.units.get(unit);
            for panel in panels {
                let first_column = panel * PANEL_COLUMNS;
                let columns = first_column..self.out_features.min(first_column + PANEL_COLUMNS);
                // SAFETY: kernels run where S is there; there is room for the numbers, and for the sums of all
                // rows and two panels, of which those of `rows` are written before they are read.
                unsafe {
                    self.made.add_up::<S>(panel, &rows, self.numbers, self.sums);
                    let sums = std::slice::from_raw_parts(self.sums, rows.len() * PANEL_COLUMNS);
                    let mut lower = &[][..];
                    if P::IS_GATED {
                        let panel = self.out_features / PANEL_COLUMNS + panel;
                        self.made.add_up::<S>(panel, &rows, self.numbers, lower_sums);
                        lower = std::slice::from_raw_parts(lower_sums, sums.len());
                    }
                    self.epilogue.store::<S>(sums, lower, rows.start, rows.len(), columns);
                }
            }
        }
    }
}

/// Returns the numbers of a thread for products of `num_rows` rows.
fn num_numbers(num_rows: usize) -> usize {
    made_steps(num_rows) * STEP_LEN
}

/// Returns the bytes of scratch that `num_lanes` threads need for [`multiply`] of `num_rows` rows.
pub(crate) fn scratch_bytes(num_lanes: usize, num_rows: usize) -> usize {
    made_bytes(num_lanes, num_rows, num_numbers(num_rows))
}

/// Passes all sums of `rows` times `weight` to `epilogue`.
///
/// # Safety
/// `rows.a` holds activations in the form of the instruction set's element of bf16, as many as its fields
/// say. Panels of `weight` are made. For a gated epilogue, half its `out_features` are whole panels.
pub(crate) unsafe fn multiply<W: TileWeight, P: TileEpilogue>(
    backend: &CpuBackend,
    rows: Rows,
    weight: &W,
    epilogue: &P,
    scratch: &mut HostBuffer,
) -> Result<()> {
    let num_rows = rows.num_rows;
    let sums = Stretches { rows, weight };
    multiply_made(backend, num_rows, num_numbers(num_rows), &sums, epilogue, scratch)
}

/// Rows times stretches of panels.
struct Stretches<'a, W> {
    /// In the form of the element of bf16.
    rows: Rows,
    weight: &'a W,
}

impl<W: TileWeight> MadeSums for Stretches<'_, W> {
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
        let a = self.rows.a.get().cast::<<S::Bf16 as Element>::Activation>();
        let a_stride = self.rows.a_stride;
        let in_features = self.weight.in_features();
        let num_steps = in_features.div_ceil(TILE_K);
        let at_a_time = made_steps(self.rows.num_rows);
        for first in (0..num_steps).step_by(at_a_time) {
            let steps = first..num_steps.min(first + at_a_time);
            let first_k = first * TILE_K;
            let num_k = in_features.min(steps.end * TILE_K) - first_k;
            // SAFETY: the caller vouches for the panel and the instruction set, and there is room for so many
            // steps. A strip has rows below num_rows, each with a_stride activations, which are at least as
            // many as there are values of k in whole steps of the element; its sums are below those of `rows`.
            unsafe {
                let b = self.weight.steps::<S>(panel, &steps, numbers);
                for row in rows.clone().step_by(MAX_ROWS) {
                    let operands = Operands::<S::Bf16> {
                        a: a.add(row * a_stride + first_k),
                        a_stride,
                        num_steps: num_k.div_ceil(<S::Bf16 as Element>::K_STEP),
                        b,
                        b_stride: TILE_STEPS * PANEL_COLUMNS * <S::Bf16 as Element>::K_STEP,
                        in_tiles: true,
                        ahead: Ahead::NONE,
                        out: sums.add((row - rows.start) * PANEL_COLUMNS),
                        out_stride: PANEL_COLUMNS,
                        accumulate: first > 0,
                    };
                    tile_rows::<S::Bf16, 4>((rows.end - row).min(MAX_ROWS), &operands);
                }
            }
        }
    }
}
