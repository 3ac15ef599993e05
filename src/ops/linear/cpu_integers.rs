//! Products with weights of integers on the CPU. Activations become integers of 16 bits, or of 8 where
//! the format says so, with a scale for each segment of a row: up to 128 inputs of a group, whose
//! products are summed up exactly.
//!
//! With `q` the activations of a segment, `s` their scale, and codes, zeros and scales as in
//! [`QuantFormat`](crate::ops::quantised::QuantFormat), the sum of an output over segments is
//!
//! ```text
//! out[o] = sum over segments: float(sum over i: (code[o, i] - zero[o]) * q[i]) * s * scale[o]
//! ```
//!
//! added up in f32 from the first segment to the last, whatever the number of rows and of threads.
//! Rounding an activation changes it by at most 1/65024 of the largest one of its segment, or by 1/254.

use crate::backend::cpu::dot::{
    DotKernel, Dots, MAX_ACTIVATION, MAX_BYTE_ACTIVATION, MAX_SUMMED, UNIT,
};
use crate::backend::cpu::simd::{Simd, Vector16};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::{CpuBackend, SendPointer, Streaming};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{grow, Epilogue, Units};
use crate::ops::quantised::{
    unit_bytes, vectors_of, Code, Division, PanelDivision, QuantFormat, QuantisedPanels,
};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The rows that pass by the weights before the sums are stored.
const TILE_ROWS: usize = 32;
/// With more rows than are multiplied at a time, codes of about so many bytes are multiplied by all
/// rows of a tile before the next ones: they stay in the cache meanwhile.
const STRETCH_BYTES: usize = 128 << 10;
/// The same where few rows prefetch codes: these stay in the first-level cache ([`Streaming::integers`]).
const NEAR_STRETCH_BYTES: usize = 4 << 10;
/// The rows from which on they are made integers on all threads.
const MANY_ROWS: usize = 8;

/// The scale of a segment's activations, and their sum.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Factor {
    pub scale: f32,
    pub total: i32,
}

/// What activations are at most, up or down, in products with a weight of integers.
pub(super) fn max_activation(format: &QuantFormat) -> i16 {
    if format.quantises_inputs {
        MAX_BYTE_ACTIVATION
    } else {
        MAX_ACTIVATION
    }
}

/// The bytes of `num_rows` rows as integers.
pub(super) fn integers_bytes(num_rows: usize, division: &Division) -> usize {
    let row = division.num_units().saturating_add(division.num_segments());
    num_rows.saturating_mul(row).saturating_mul(size_of::<u64>())
}

/// Passes all sums of x [num_rows, in_features] times a weight of integers to `epilogue`.
pub(super) fn multiply_integers<P: Epilogue>(
    backend: &CpuBackend,
    x: &[f32],
    num_rows: usize,
    weight: &QuantisedPanels,
    epilogue: &P,
    activations: &mut HostBuffer,
) -> Result<()> {
    let division = weight.division();
    let inputs = &division.inputs;
    let (num_units, num_segments) = (inputs.num_units(), inputs.num_segments());
    grow::<u64>(activations, integers_bytes(num_rows, inputs) / size_of::<u64>(), "integers")?;
    let memory = activations.as_mut_slice::<u64>();
    let Some((units, rest)) = memory.split_at_mut_checked(num_rows * num_units) else {
        return Ok(());
    };
    let Some(factors) = rest.get_mut(..num_rows * num_segments) else { return Ok(()) };
    let (to_units, to_factors) =
        (SendPointer(units.as_mut_ptr()), SendPointer(factors.as_mut_ptr().cast::<Factor>()));
    let make = |rows: Range<usize>| {
        backend.run_dots(MakeIntegers {
            x,
            order: weight.order(),
            division: inputs,
            most: max_activation(&weight.format()),
            rows,
            units: to_units.get(),
            factors: to_factors.get(),
        });
    };
    if num_rows < MANY_ROWS {
        make(0..num_rows);
    } else {
        backend.parallel_tokens(num_rows, inputs.in_features(), make)?;
    }
    let work = Units::new(weight.num_panels(), num_rows, backend.num_threads());
    let next = AtomicUsize::new(0);
    backend.parallel_for(backend.num_threads().min(work.len()), &|_| {
        backend.run_dots(Lane {
            units: to_units.get(),
            factors: to_factors.get(),
            weight,
            division: &division,
            num_units,
            num_segments,
            epilogue,
            streaming: backend.streaming(),
            work: &work,
            next: &next,
        });
    })
}

/// Makes some rows of activations integers.
struct MakeIntegers<'a> {
    x: &'a [f32],
    order: &'a [u32],
    division: &'a Division,
    /// See [`max_activation`].
    most: i16,
    rows: Range<usize>,
    /// [num_rows][num_units], in the form of the instruction set.
    units: *mut u64,
    /// [num_rows][num_segments].
    factors: *mut Factor,
}

impl DotKernel for MakeIntegers<'_> {
    #[inline(always)]
    fn run<S: Simd, D: Dots<Vector = S::Vector>>(self) {
        let division = self.division;
        let in_features = division.in_features();
        let (num_units, num_segments) = (division.num_units(), division.num_segments());
        for row in self.rows.clone() {
            let x = self.x.get(row * in_features..(row + 1) * in_features).unwrap_or_default();
            for segment in 0..num_segments {
                let places = division.segment_places(segment);
                let segment_units = places.len().div_ceil(UNIT);
                let values = segment_values(x, self.order, places.clone());
                let (integers, factor) = integers_of(&values, places.len(), self.most);
                let first = row * num_units + division.first_unit(segment);
                for (i, unit) in integers.chunks_exact(UNIT).take(segment_units).enumerate() {
                    let unit = D::unit([unit[0], unit[1], unit[2], unit[3]]);
                    // SAFETY: a row has room for the units of all its segments, and each row is given
                    // out once.
                    unsafe { self.units.add(first + i).write(unit) };
                }
                // SAFETY: as above.
                unsafe { self.factors.add(row * num_segments + segment).write(factor) };
            }
        }
    }
}

/// Returns the activations of a segment of a row, in the order of the weight, and zeros after them.
#[inline(always)]
pub(super) fn segment_values(x: &[f32], order: &[u32], places: Range<usize>) -> [f32; MAX_SUMMED] {
    let mut values = [0.0_f32; MAX_SUMMED];
    if order.is_empty() {
        let from = x.get(places).unwrap_or_default();
        for (to, &value) in values.iter_mut().zip(from) {
            *to = value;
        }
    } else {
        let order = order.get(places).unwrap_or_default();
        for (to, &input) in values.iter_mut().zip(order) {
            *to = x.get(input as usize).copied().unwrap_or(0.0);
        }
    }
    values
}

/// Makes the activations of a segment of `count` integers up to `most`, to nearest even; after them are
/// zeros, as in `values`. Activations that are not finite make a scale that is none either; those below
/// 1e-30 count as zeros.
#[inline(always)]
pub(super) fn integers_of(
    values: &[f32; MAX_SUMMED],
    count: usize,
    most: i16,
) -> ([i16; MAX_SUMMED], Factor) {
    // Whole vectors, of which short segments have few.
    let values = values.get(..count.next_multiple_of(16)).unwrap_or(values);
    // The bits of numbers that are not negative are in the order of the numbers, and NaN comes last.
    let mut largest = 0;
    for value in values {
        let bits = value.to_bits() & 0x7fff_ffff;
        largest = if bits > largest { bits } else { largest };
    }
    let largest = f32::from_bits(largest);
    let mut integers = [0; MAX_SUMMED];
    if !largest.is_finite() {
        return (integers, Factor { scale: f32::NAN, total: 0 });
    }
    if largest < 1e-30 {
        return (integers, Factor { scale: 0.0, total: 0 });
    }
    // Adding this leaves no room for a fraction.
    const WHOLE: f32 = (3 << 22) as f32;
    let most = f32::from(most);
    let inverse = most / largest;
    let mut total = 0;
    for (to, value) in integers.iter_mut().zip(values) {
        let integer = (value * inverse + WHOLE).to_bits() as i32 - WHOLE.to_bits() as i32;
        total += integer;
        *to = integer as i16;
    }
    (integers, Factor { scale: largest / most, total })
}

/// The work of one thread: claims units until none is left.
struct Lane<'a, P> {
    units: *const u64,
    factors: *const Factor,
    weight: &'a QuantisedPanels,
    division: &'a PanelDivision,
    num_units: usize,
    num_segments: usize,
    epilogue: &'a P,
    streaming: Streaming,
    work: &'a Units,
    next: &'a AtomicUsize,
}

impl<P: Epilogue> DotKernel for Lane<'_, P> {
    #[inline(always)]
    fn run<S: Simd, D: Dots<Vector = S::Vector>>(self) {
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            if unit >= self.work.len() {
                return;
            }
            let (panels, rows) = self.work.get(unit);
            for panel in panels {
                for first in rows.clone().step_by(TILE_ROWS) {
                    let tile = first..rows.end.min(first + TILE_ROWS);
                    let format = self.weight.format();
                    match (format.code, format.quantises_inputs) {
                        (Code::Int4, false) => self.tile::<S, D, false>(Code::Int4, panel, tile),
                        (Code::Int4, true) => self.tile::<S, D, true>(Code::Int4, panel, tile),
                        (Code::Int8, false) => self.tile::<S, D, false>(Code::Int8, panel, tile),
                        (Code::Int8, true) => self.tile::<S, D, true>(Code::Int8, panel, tile),
                        // Floats have kernels of their own.
                        (Code::Fp8, _) => {}
                    }
                }
            }
        }
    }
}

impl<P: Epilogue> Lane<'_, P> {
    /// Multiplies up to [`TILE_ROWS`] rows by a panel. `BYTES` says that activations have 8 bits.
    #[inline(always)]
    fn tile<S: Simd, D: Dots<Vector = S::Vector>, const BYTES: bool>(
        &self,
        code: Code,
        panel: usize,
        rows: Range<usize>,
    ) {
        // Only what the rows need becomes zero: a single one has no time for more.
        let mut room = [const { MaybeUninit::<f32>::uninit() }; TILE_ROWS * PANEL_COLUMNS];
        let Some(room) = room.get_mut(..rows.len() * PANEL_COLUMNS) else { return };
        for place in room.iter_mut() {
            place.write(0.0);
        }
        // SAFETY: all of them have just been written.
        let sums = unsafe { &mut *(std::ptr::from_mut(room) as *mut [f32]) };
        let most_rows = match code {
            _ if BYTES => D::MAX_BYTE_ROWS,
            Code::Int4 => D::MAX_NIBBLE_ROWS,
            _ => D::MAX_ROWS,
        };
        let num_blocks = rows.len().div_ceil(most_rows).max(1);
        let block_rows = rows.len().div_ceil(num_blocks).max(1);
        let num_segments = self.num_segments;
        let ahead = match rows.len() {
            0..TILE_ROWS => {
                let are_waiting = block_rows <= 2 && code == Code::Int8;
                self.streaming.integers(rows.len(), are_waiting)
            }
            _ => Ahead::NONE,
        };
        let stretch = if num_blocks == 1 {
            num_segments
        } else if ahead.bytes > 0 {
            let segment_inputs = self.division.inputs.segment_places(0).len();
            NEAR_STRETCH_BYTES / (segment_inputs.div_ceil(UNIT).max(1) * unit_bytes(code))
        } else {
            STRETCH_BYTES / ((MAX_SUMMED / UNIT) * unit_bytes(code))
        };
        let stretch = stretch.max(1);
        for first in (0..num_segments).step_by(stretch) {
            let segments = first..num_segments.min(first + stretch);
            let sums = sums.chunks_mut(block_rows * PANEL_COLUMNS);
            for (row, sums) in rows.clone().step_by(block_rows).zip(sums) {
                let segments = segments.clone();
                // Later blocks find what the first one has asked for.
                let ahead = if row == rows.start { ahead } else { Ahead::NONE };
                match (rows.end - row).min(block_rows) {
                    1 => self.rows::<S, D, 1, BYTES>(code, panel, row, segments, ahead, sums),
                    2 => self.rows::<S, D, 2, BYTES>(code, panel, row, segments, ahead, sums),
                    3 => self.rows::<S, D, 3, BYTES>(code, panel, row, segments, ahead, sums),
                    _ => self.rows::<S, D, 4, BYTES>(code, panel, row, segments, ahead, sums),
                }
            }
        }
        let first = panel * PANEL_COLUMNS;
        let columns = first..self.weight.out_features().min(first + PANEL_COLUMNS);
        self.epilogue.store::<S>(sums, rows.start, rows.len(), columns);
    }

    /// Multiplies `ROWS` rows by some segments of a panel.
    #[inline(always)]
    // Indices of constant extent, which the compiler unrolls into registers.
    #[allow(clippy::needless_range_loop)]
    fn rows<S: Simd, D: Dots<Vector = S::Vector>, const ROWS: usize, const BYTES: bool>(
        &self,
        code: Code,
        panel: usize,
        row: usize,
        segments: Range<usize>,
        ahead: Ahead,
        sums: &mut [f32],
    ) {
        let most_rows = if BYTES { D::MAX_BYTE_ROWS } else { D::MAX_ROWS };
        if ROWS > most_rows || sums.len() < ROWS * PANEL_COLUMNS {
            return;
        }
        let (num_units, num_segments) = (self.num_units, self.num_segments);
        let pair_bytes = unit_bytes(code) / 2;
        for segment in segments {
            let index = row * num_segments + segment;
            let Some(segment) = self.weight.segment(self.division, panel, segment) else { return };
            let first = row * num_units + segment.first_unit;
            if ahead.bytes > 0 {
                // Codes are prefetched one by one; the lines between them must not be missing.
                for line in segment.group.head().chunks(64) {
                    ahead.prefetch(line.as_ptr());
                }
            }
            for first_pair in (0..2).step_by(D::PAIRS) {
                let pairs = first_pair..first_pair + D::PAIRS;
                // SAFETY: `run_dots` has chosen an instruction set that is there. A unit has 64 bytes of
                // codes for a vector, or for two if they share bytes, and pairs are 0 and 1; the caller
                // gives rows that there are, with all their units and segments; there are 64 zeros; a
                // prefetch may point anywhere.
                unsafe {
                    let mut held = [[[D::zero(); 2]; 2]; ROWS];
                    let mut x = self.units.add(first);
                    for codes in segment.codes.chunks_exact(unit_bytes(code)) {
                        let codes = codes.as_ptr();
                        if ahead.bytes > 0 && first_pair == 0 {
                            for line in (0..2 * pair_bytes).step_by(64) {
                                ahead.prefetch(codes.wrapping_add(line));
                            }
                        }
                        for pair in pairs.clone() {
                            let codes = codes.add(pair * pair_bytes);
                            let (a, b) = match code {
                                Code::Int4 => D::load_nibbles(codes),
                                _ => (D::load(codes), D::load(codes.add(64))),
                            };
                            for row in 0..ROWS {
                                let unit = x.wrapping_add(row * num_units);
                                let held = &mut held[row][pair - first_pair];
                                if BYTES {
                                    held[0] = held[0].add_byte_products(a, unit);
                                    held[1] = held[1].add_byte_products(b, unit);
                                } else {
                                    held[0] = held[0].add_products(a, unit);
                                    held[1] = held[1].add_products(b, unit);
                                }
                            }
                        }
                        x = x.add(1);
                    }
                    let zeros = segment.group.zeros().as_ptr();
                    for pair in pairs {
                        for (side, vector) in vectors_of(code, pair).into_iter().enumerate() {
                            let scales = segment.group.scales::<S::Vector>(vector);
                            for row in 0..ROWS {
                                let factor = *self.factors.add(index + row * num_segments);
                                let held = held[row][pair - first_pair][side];
                                let products = held.finish(zeros.add(16 * vector), factor.total);
                                let products = products.mul(S::Vector::splat(factor.scale));
                                let sum = sums.as_mut_ptr().add(row * PANEL_COLUMNS + 16 * vector);
                                products.mul_add(scales, S::Vector::load(sum)).store(sum);
                            }
                        }
                    }
                }
            }
        }
    }
}
