//! Products with weights of integers on a unit that multiplies tiles: the counterpart of
//! [`cpu_integers`](super::cpu_integers) for several rows, with the same sums to the bit.
//!
//! The codes of a few segments are decoded into tiles while they stay in the second-level cache, and
//! all rows of a unit of work pass by them. A segment's sum is an integer that every way of adding
//! finds exactly:
//!
//! * In signed bytes ([`cpu_byte_tiles`](super::cpu_byte_tiles)): codes less their zeros, times activations
//!   of 8 bits, or times the upper and the lower bytes of those of 16, in two sums of 32 bits.
//! * In bytes, where codes less their zeros would have more than 8 bits or where few rows multiply codes
//!   of 8 bits as they lie: codes times the upper and the lower bytes of the activations, in two sums,
//!   less the zeros times the total of the activations.
//! * In bf16, for many rows where a segment is so short that f32 holds its sum: codes less their
//!   zeros, times 256 times the upper bytes and the lower bytes, added up in one tile. Codes take
//!   longer to decode, and there is less to do for each sum, which is what costs most where segments
//!   are short.
//!
//! Sums are then scaled and added up in f32, from the first segment to the last.

use super::cpu_byte_tiles::{decode_signed, signed_stretch, SignedRows};
use super::cpu_integer_rows::{
    bf16_of, Form, RowOfTiles, Stretch, TileFactors, TileLayout, BLOCK_BYTES, CODES_BYTES,
    MANY_ROWS, PAIR_ROWS, STEP_BYTES, STRETCH_STEPS,
};
use crate::backend::cpu::dot::{MAX_SUMMED, UNIT};
use crate::backend::cpu::simd::{TileKernel, TileSimd, Vector16};
use crate::backend::cpu::tile::prefetch;
use crate::backend::cpu::tiles::{IntegerOperands, TileOperands, TileUnit, TILE_K, TILE_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::grow;
use crate::ops::common::tile_product::{TileEpilogue, Units, FITTING_BYTES, MAX_UNIT_ROWS};
use crate::ops::quantised::{unit_bytes, Code, PanelDivision, QuantisedPanels};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most panels of a unit of work. Each unit reads the rows anew.
const MAX_UNIT_PANELS: usize = 4;
/// The bytes of a panel for four inputs in bytes, or two in bf16.
const CODES_STRIDE: usize = 4 * PANEL_COLUMNS;

/// The bytes that products of `num_rows` rows on `num_threads` threads need beside activations.
pub(super) fn scratch_bytes(num_threads: usize, num_rows: usize) -> usize {
    num_threads.saturating_mul(size_of::<Stretches>() + sums_len(num_rows) * size_of::<f32>())
}

/// The segments of a stretch.
fn stretch_segments(layout: &TileLayout) -> usize {
    (STRETCH_STEPS / layout.segment_steps).max(1)
}

/// The f32 of the sums of one thread.
fn sums_len(num_rows: usize) -> usize {
    num_rows.min(MAX_UNIT_ROWS).next_multiple_of(PAIR_ROWS) * MAX_UNIT_PANELS * PANEL_COLUMNS
}

type Stretches = [Stretch; MAX_UNIT_PANELS];

/// Passes all sums of x [num_rows, in_features] times a weight of integers to `epilogue`.
///
/// # Safety
/// The backend has tiles, and `layout` is that of `weight` for as many rows. For a gated epilogue,
/// half the `out_features` are whole panels.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn multiply_integer_tiles<P: TileEpilogue>(
    backend: &CpuBackend,
    x: &[f32],
    num_rows: usize,
    weight: &QuantisedPanels,
    layout: TileLayout,
    epilogue: &P,
    activations: &mut HostBuffer,
    scratch: &mut HostBuffer,
) -> Result<()> {
    let division = weight.division();
    let in_features = division.inputs.in_features();
    grow::<u8>(activations, layout.activations_bytes(num_rows), "activations")?;
    let a = SendPointer(activations.as_bytes_mut().as_mut_ptr());
    let row_tiles = num_rows.div_ceil(TILE_ROWS);
    let row_bytes = layout.row_bytes();
    // SAFETY: the buffer has room for these after the tiles, which are whole kilobytes.
    let factors = SendPointer(unsafe { a.get().add(row_tiles * row_bytes).cast::<TileFactors>() });
    backend.parallel_tokens(row_tiles, TILE_ROWS * in_features, |tiles| {
        for tile in tiles {
            let len = TILE_ROWS * in_features;
            backend.run(RowOfTiles {
                x: &x[tile * len..x.len().min((tile + 1) * len)],
                order: weight.order(),
                middle: if weight.format().has_zeros { 1 } else { weight.format().code.middle() },
                division: &division.inputs,
                layout: &layout,
                // SAFETY: there are row_tiles > tile of both.
                tiles: unsafe { a.get().add(tile * row_bytes) },
                // SAFETY: as above.
                factors: unsafe { factors.get().add(tile * layout.num_segments) },
            });
        }
    })?;
    let num_lanes = backend.num_threads();
    let lane_bytes = scratch_bytes(1, num_rows);
    grow::<u8>(scratch, scratch_bytes(num_lanes, num_rows), "sums of panels")?;
    let scratch = SendPointer(scratch.as_bytes_mut().as_mut_ptr());
    let panels_of_each = if P::IS_GATED { 2 } else { 1 };
    let out_features = weight.out_features() / panels_of_each;
    let num_panels = out_features.div_ceil(PANEL_COLUMNS);
    let max_panels = MAX_UNIT_PANELS / panels_of_each;
    let are_cheap = layout.row_bytes().saturating_mul(row_tiles) <= FITTING_BYTES;
    let units = Units::new(num_panels, max_panels, num_rows, num_lanes, are_cheap);
    let next_unit = AtomicUsize::new(0);
    backend.parallel_for(num_lanes.min(units.len()), &|lane| {
        // SAFETY: the buffer has lane_bytes for each of num_lanes > lane, a multiple of 64.
        let memory = unsafe { scratch.get().add(lane * lane_bytes) };
        backend.run_tiles(Lane {
            a: a.get(),
            factors: factors.get(),
            num_rows,
            weight,
            division: &division,
            layout: &layout,
            out_features,
            epilogue,
            stretches: memory.cast(),
            // SAFETY: as above.
            sums: unsafe { memory.add(size_of::<Stretches>()).cast() },
            units: &units,
            next_unit: &next_unit,
        });
    })
}

/// The work of one thread: claims units until none is left.
struct Lane<'a, P> {
    a: *const u8,
    factors: *const TileFactors,
    num_rows: usize,
    weight: &'a QuantisedPanels,
    division: &'a PanelDivision,
    layout: &'a TileLayout,
    /// The columns of the result.
    out_features: usize,
    epilogue: &'a P,
    stretches: *mut Stretch,
    /// The sums of this lane alone, [panels of the weight in a unit][rows of a unit, in pairs][64].
    sums: *mut f32,
    units: &'a Units,
    next_unit: &'a AtomicUsize,
}

/// The sums of two blocks: one is finished while the next is multiplied.
#[repr(align(64))]
struct Blocks([[u8; BLOCK_BYTES]; 2]);

/// Sums of 16 rows by 32 columns that are not finished.
struct Pending {
    parts: *const u8,
    num_rows: usize,
    factors: *const TileFactors,
    scales: *const f32,
    zeros: *const i32,
    sums: *mut f32,
    /// Whether nothing has been added up before.
    is_first: bool,
}

impl<P: TileEpilogue> TileKernel for Lane<'_, P> {
    #[inline(always)]
    fn run<S: TileSimd>(self) {
        // SAFETY: `run` is called for an instruction set that is there, and this lane is the only
        // user of the unit on this thread.
        let Some(mut unit) = (unsafe { S::Tiles::ready() }) else { return };
        loop {
            let index = self.next_unit.fetch_add(1, Ordering::Relaxed);
            if index >= self.units.len() {
                return;
            }
            let (panels, pairs) = self.units.get(index);
            // Of few rows a panel is read in one go.
            let at_a_time = if self.num_rows <= TILE_ROWS { 1 } else { panels.len().max(1) };
            for first in panels.clone().step_by(at_a_time) {
                let panels = first..panels.end.min(first + at_a_time);
                match (self.layout.form, self.weight.format().has_zeros) {
                    (Form::Signed, _) => {
                        self.panels::<S, 1, true, false>(&mut unit, panels, &pairs);
                    }
                    (Form::SignedParts, _) => {
                        self.panels::<S, 2, true, false>(&mut unit, panels, &pairs);
                    }
                    (Form::Bf16, _) => {
                        self.panels::<S, 0, false, false>(&mut unit, panels, &pairs);
                    }
                    (Form::Bytes, false) => {
                        self.panels::<S, 0, true, false>(&mut unit, panels, &pairs);
                    }
                    (Form::Bytes, true) => {
                        self.panels::<S, 0, true, true>(&mut unit, panels, &pairs);
                    }
                }
            }
        }
    }
}

impl<P: TileEpilogue> Lane<'_, P> {
    /// Makes some panels of the result for pairs of rows of tiles. `SIGNED` is the number of bytes of an
    /// activation where codes are signed bytes, otherwise zero.
    #[inline(always)]
    fn panels<S: TileSimd, const SIGNED: usize, const BYTES: bool, const ZEROS: bool>(
        &self,
        unit: &mut S::Tiles,
        panels: Range<usize>,
        pairs: &Range<usize>,
    ) {
        let first_row = pairs.start * PAIR_ROWS;
        let num_rows = self.num_rows.min(pairs.end * PAIR_ROWS) - first_row;
        let num_panels = panels.len();
        let lower = panels.clone().map(|panel| self.out_features / PANEL_COLUMNS + panel);
        let all_panels = panels.clone().chain(lower.filter(|_| P::IS_GATED));
        let panel_sums = num_rows.next_multiple_of(PAIR_ROWS) * PANEL_COLUMNS;
        let num_all = if P::IS_GATED { 2 * num_panels } else { num_panels };
        // SAFETY: the lane has sums for MAX_UNIT_PANELS panels of the rows of a unit, and num_all is
        // no more than that; nobody else uses them.
        let sums = unsafe { std::slice::from_raw_parts_mut(self.sums, num_all * panel_sums) };
        let num_segments = self.layout.num_segments;
        for first in (0..num_segments).step_by(stretch_segments(self.layout)) {
            let segments = first..num_segments.min(first + stretch_segments(self.layout));
            for (place, panel) in all_panels.clone().enumerate() {
                // SAFETY: as for the sums.
                let stretch = unsafe { &mut *self.stretches.add(place) };
                self.decode::<S, SIGNED>(panel, segments.clone(), stretch);
            }
            // SAFETY: the rows, the stretches and the sums are there, as above.
            unsafe {
                if SIGNED > 0 {
                    let rows = SignedRows {
                        tiles: self.a,
                        factors: self.factors,
                        layout: self.layout,
                        first_row,
                        num_rows,
                    };
                    let stretches = std::slice::from_raw_parts(self.stretches, num_all);
                    signed_stretch::<S, SIGNED>(unit, &rows, segments, stretches, sums);
                    continue;
                }
                self.stretch::<S, BYTES, ZEROS>(unit, first_row, num_rows, segments, num_all, sums);
            }
        }
        for (place, panel) in panels.enumerate() {
            let sums_of = |place: usize| &sums[place * panel_sums..][..num_rows * PANEL_COLUMNS];
            let lower = if P::IS_GATED { sums_of(num_panels + place) } else { &[] };
            let first = panel * PANEL_COLUMNS;
            let columns = first..self.out_features.min(first + PANEL_COLUMNS);
            self.epilogue.store::<S>(sums_of(place), lower, first_row, num_rows, columns);
        }
    }

    /// Multiplies rows by a stretch of some panels.
    ///
    /// # Safety
    /// The lane has `num_panels` stretches of these segments; `sums` has a place for each panel.
    #[inline(always)]
    unsafe fn stretch<S: TileSimd, const BYTES: bool, const ZEROS: bool>(
        &self,
        unit: &mut S::Tiles,
        first_row: usize,
        num_rows: usize,
        segments: Range<usize>,
        num_panels: usize,
        sums: &mut [f32],
    ) {
        let TileLayout { num_segments, segment_steps, .. } = *self.layout;
        let panel_sums = num_rows.next_multiple_of(PAIR_ROWS) * PANEL_COLUMNS;
        let row_bytes = self.layout.row_bytes();
        let mut blocks = Blocks([[0; BLOCK_BYTES]; 2]);
        let blocks = blocks.0.as_mut_ptr();
        let mut turn = 0;
        let mut pending: [Option<Pending>; 2] = [None, None];
        let sums = sums.as_mut_ptr();
        for row in (0..num_rows).step_by(PAIR_ROWS) {
            let tile = (first_row + row) / TILE_ROWS;
            let tiles = (num_rows - row).div_ceil(TILE_ROWS).min(2);
            for place in 0..num_panels {
                for (index, segment) in segments.clone().enumerate() {
                    for half in 0..2 {
                        // SAFETY: row tiles are below those of num_rows, segments below
                        // num_segments, and each has segment_steps steps; the stretch has `index`
                        // of them; blocks and sums have room for what is written, sums in whole
                        // pairs of rows of tiles.
                        unsafe {
                            let stretch = &*self.stretches.add(place);
                            let codes = stretch.places[index].add(half * CODES_STRIDE / 2);
                            let a = self.a.add(tile * row_bytes);
                            let a = a.add(segment * segment_steps * STEP_BYTES);
                            let column = half * PANEL_COLUMNS / 2;
                            let sums = sums.add(place * panel_sums + row * PANEL_COLUMNS + column);
                            let pending_of = |i: usize, parts: *const u8| Pending {
                                parts,
                                num_rows: (num_rows - row - i * TILE_ROWS).min(TILE_ROWS),
                                factors: self.factors.add((tile + i) * num_segments + segment),
                                scales: stretch.scales[index][column..].as_ptr(),
                                zeros: stretch.zeros[index][column..].as_ptr(),
                                sums: sums.add(i * TILE_ROWS * PANEL_COLUMNS),
                                is_first: segment == 0,
                            };
                            if BYTES {
                                for i in 0..tiles {
                                    let parts = blocks.add(turn).cast::<u8>();
                                    unit.integer_block(&IntegerOperands {
                                        a: a.add(i * row_bytes).cast(),
                                        b: codes,
                                        b_stride: CODES_STRIDE,
                                        num_steps: segment_steps,
                                        out: parts.cast(),
                                    });
                                    if let Some(pending) = &pending[0] {
                                        pending.finish::<S, true, ZEROS>();
                                    }
                                    pending[0] = Some(pending_of(i, parts));
                                    turn ^= 1;
                                }
                                continue;
                            }
                            let parts = blocks.add(turn).cast::<u8>();
                            // Upper and lower bytes are steps of their own, with the same codes.
                            let steps: [*const u16; 2 * MAX_BF16_STEPS] =
                                std::array::from_fn(|i| {
                                    codes.wrapping_add(i / 2 * CODES_BYTES).cast()
                                });
                            let steps = &steps[..2 * segment_steps];
                            let operands = TileOperands {
                                a: a.cast(),
                                a_stride: row_bytes,
                                b: codes.cast(),
                                b_stride: CODES_STRIDE,
                                num_steps: steps.len(),
                                out: parts.cast(),
                                out_stride: PANEL_COLUMNS / 2 * size_of::<f32>(),
                                accumulate: 0,
                                prefetch: std::ptr::null(),
                                prefetch_lines: 0,
                            };
                            if tiles > 1 {
                                unit.gathered_block::<2, 2>(&operands, steps);
                            } else {
                                unit.gathered_block::<1, 2>(&operands, steps);
                            }
                            for pending in pending.iter().flatten() {
                                pending.finish::<S, false, false>();
                            }
                            pending[0] = Some(pending_of(0, parts));
                            pending[1] =
                                (tiles > 1).then(|| pending_of(1, parts.add(BLOCK_BYTES / 2)));
                            turn ^= 1;
                        }
                    }
                }
            }
        }
        for pending in pending.iter().flatten() {
            // SAFETY: as above.
            unsafe { pending.finish::<S, BYTES, ZEROS>() };
        }
    }

    /// Decodes some segments of a panel.
    #[inline(always)]
    fn decode<S: TileSimd, const SIGNED: usize>(
        &self,
        panel: usize,
        segments: Range<usize>,
        to: &mut Stretch,
    ) {
        let code = self.weight.format().code;
        let segment_steps = self.layout.segment_steps;
        for (index, segment) in segments.enumerate() {
            let Some(segment) = self.weight.segment(self.division, panel, segment) else { return };
            for vector in 0..PANEL_COLUMNS / 16 {
                // SAFETY: `run` is called for an instruction set that is there; vectors are 0 to 3,
                // and there are 64 scales.
                unsafe {
                    let scales = segment.group.scales::<S::Vector>(vector);
                    scales.store(to.scales[index].as_mut_ptr().add(16 * vector));
                }
            }
            let zeros: &[u8; PANEL_COLUMNS] = segment.group.zeros().try_into().unwrap_or(&[0; 64]);
            for (to, &zero) in to.zeros[index].iter_mut().zip(zeros) {
                *to = i32::from(zero);
            }
            let steps = index * segment_steps..(index + 1) * segment_steps;
            let Some(to_steps) = to.codes.get_mut(steps) else { return };
            let bytes = to_steps.as_flattened_mut();
            to.places[index] = bytes.as_ptr();
            let units = segment.codes.chunks_exact(unit_bytes(code));
            let num_units = units.len();
            let ahead = segment.codes.len() * stretch_segments(self.layout);
            for line in segment.codes.chunks(64) {
                prefetch(line.as_ptr().wrapping_add(ahead));
            }
            if SIGNED > 0 {
                decode_signed(code, segment.codes, zeros, bytes);
                continue;
            }
            let is_tiles = code == Code::Int8 && segment.codes.len() == bytes.len();
            if is_tiles && self.num_rows < MANY_ROWS {
                to.places[index] = segment.codes.as_ptr();
                continue;
            }
            let is_bf16 = self.layout.form == Form::Bf16;
            let unit_to = if is_bf16 { 2 * CODES_STRIDE } else { CODES_STRIDE };
            for (unit, to) in units.zip(bytes.chunks_exact_mut(unit_to)) {
                if is_bf16 {
                    nibbles_to_bf16(unit, zeros, to);
                } else {
                    to.copy_from_slice(unit);
                }
            }
            // Zeros of activations times what is no number would not be zero.
            bytes[num_units * unit_to..].fill(0);
        }
    }
}

/// The most steps of a segment that is multiplied in bf16.
const MAX_BF16_STEPS: usize = MAX_SUMMED / TILE_K;

/// Decodes four inputs of a panel to bf16, less the zeros: two pairs, one after the other.
#[inline(always)]
fn nibbles_to_bf16(unit: &[u8], zeros: &[u8; PANEL_COLUMNS], to: &mut [u8]) {
    let (first, second) = to.split_at_mut(CODES_STRIDE);
    for half in 0..2 {
        let zeros = &zeros[half * PANEL_COLUMNS / 2..][..PANEL_COLUMNS / 2];
        let first = &mut first[half * CODES_STRIDE / 2..][..CODES_STRIDE / 2];
        let second = &mut second[half * CODES_STRIDE / 2..][..CODES_STRIDE / 2];
        let to = first.chunks_exact_mut(4).zip(second.chunks_exact_mut(4));
        for ((codes, &zero), (first, second)) in unit.chunks_exact(UNIT).zip(zeros).zip(to) {
            let codes = u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]);
            let codes = codes >> (4 * half);
            let float = |i: u32| bf16_of((codes >> (8 * i) & 15) as i32 - i32::from(zero));
            first.copy_from_slice(&(float(0) | float(1) << 16).to_le_bytes());
            second.copy_from_slice(&(float(2) | float(3) << 16).to_le_bytes());
        }
    }
}

impl Pending {
    /// Scales the sums of a segment and adds them to those of the segments before.
    ///
    /// # Safety
    /// The instruction set is there, and the pointers are valid for 16 rows of 32 columns.
    #[inline(always)]
    unsafe fn finish<S: TileSimd, const BYTES: bool, const ZEROS: bool>(&self) {
        // SAFETY: passed on to the caller; a row is 32 numbers of a block and 64 sums.
        unsafe {
            let scales = [S::Vector::load(self.scales), S::Vector::load(self.scales.add(16))];
            let factors = &*self.factors;
            for row in 0..self.num_rows {
                let factor = S::Vector::splat(factors.scales[row]);
                let part = self.parts.add(row * 4 * (PANEL_COLUMNS / 2));
                for (vector, &scales) in scales.iter().enumerate() {
                    let part = part.add(64 * vector);
                    let products = if BYTES && ZEROS {
                        let (lower, zeros) =
                            (part.add(BLOCK_BYTES / 2), self.zeros.add(16 * vector));
                        let total = factors.totals[row];
                        S::Vector::load_parts_less(part.cast(), lower.cast(), zeros, total)
                    } else if BYTES {
                        let lower = part.add(BLOCK_BYTES / 2);
                        S::Vector::load_parts(part.cast(), lower.cast(), factors.totals[row])
                    } else {
                        S::Vector::load(part.cast())
                    };
                    let sum = self.sums.add(row * PANEL_COLUMNS + 16 * vector);
                    let before =
                        if self.is_first { S::Vector::zero() } else { S::Vector::load(sum) };
                    products.mul(factor).mul_add(scales, before).store(sum);
                }
            }
        }
    }
}
