//! Quantised panels as the bf16 tiles that a unit multiplies: numbers times their scales, rounded once.
//!
//! That is what products of several rows take where their bits may depend on the number of rows: the
//! numbers of a panel are made once for all of them, and nothing is left to be done for each sum.

use super::format::{Code, QuantFormat};
use super::panels::{unit_bytes, Group, QuantisedPanels};
use crate::backend::cpu::dot::UNIT;
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::tile::prefetch;
use crate::backend::cpu::tiles::{TILE_BYTES, TILE_K, TILE_LEN};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::tile_product::{TileWeight, STEP_LEN};
use std::ops::Range;

/// How far ahead codes are prefetched.
const AHEAD_BYTES: usize = 2048;
/// The elements of a pair of k of the 16 columns of a tile.
const PAIR_LEN: usize = 32;

/// Whether panels can be made into tiles: groups begin with a step of 32 values of k.
pub(crate) fn can_make_tiles(format: &QuantFormat, in_features: usize) -> bool {
    in_features > 0
        && (format.group_size.is_multiple_of(TILE_K) && format.group_size > 0
            || format.group_size >= in_features)
}

impl TileWeight for QuantisedPanels {
    const IS_MADE: bool = true;

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
        room: *mut u16,
    ) -> *const u16 {
        // SAFETY: passed on to the caller.
        unsafe { S::run(MakeSteps { panels: self, panel, steps, room }) }
        room
    }

    /// The bytes of a panel are read when it is made.
    #[inline(always)]
    fn address(&self, _panel: usize, _step: usize) -> *const u8 {
        std::ptr::null()
    }
}

/// Makes some steps of a panel into tiles, in `room` for as many.
struct MakeSteps<'a> {
    panels: &'a QuantisedPanels,
    panel: usize,
    steps: &'a Range<usize>,
    room: *mut u16,
}

impl Kernel for MakeSteps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let MakeSteps { panels, panel, steps, room } = self;
        let (division, in_features) = (panels.division(), panels.in_features());
        let places = steps.start * TILE_K..in_features.min(steps.end * TILE_K);
        let group_size = panels.format().group_size.clamp(1, in_features.max(1));
        // SAFETY: `run` is called for an instruction set that is there, and there is room for the steps. The last one is filled up where
        // the inputs end; groups begin with a step, and none goes beyond `places`.
        unsafe {
            if !places.end.is_multiple_of(TILE_K) && !steps.is_empty() {
                room.add((steps.len() - 1) * STEP_LEN).write_bytes(0, STEP_LEN);
            }
            for index in places.start / group_size..places.end.div_ceil(group_size) {
                let Some(group) = panels.group(&division, panel, index) else { break };
                let first = group.places.start.max(places.start);
                let part = first..group.places.end.min(places.end);
                let to = room.add((first / TILE_K - steps.start) * STEP_LEN);
                match panels.format().code {
                    Code::Int4 => integers::<S, true>(&group, part, to),
                    Code::Int8 => integers::<S, false>(&group, part, to),
                    Code::Fp8 => floats::<S>(&group, part, to),
                }
            }
        }
    }
}

/// Makes the integers of a part of a group, which begins with a step, into tiles.
///
/// # Safety
/// The instruction set is there, `part` lies in the group, and `to` has room for its steps.
#[inline(always)]
unsafe fn integers<S: Simd, const ARE_NIBBLES: bool>(
    group: &Group<'_>,
    part: Range<usize>,
    to: *mut u16,
) {
    let code = if ARE_NIBBLES { Code::Int4 } else { Code::Int8 };
    let unit_bytes = unit_bytes(code);
    let first_unit = (part.start - group.places.start) / UNIT;
    let num_units = part.len().div_ceil(UNIT);
    // SAFETY: passed on to the caller; a unit has 64 bytes for each 16 columns, or for 32 that share them.
    // Units are two pairs of k, and a step has eight of them.
    unsafe {
        let mut codes = group.codes().as_ptr().add(first_unit * unit_bytes);
        let columns = [
            Columns::of::<S>(group, 0),
            Columns::of::<S>(group, 1),
            Columns::of::<S>(group, 2),
            Columns::of::<S>(group, 3),
        ];
        for unit in 0..num_units {
            let step = to.add(unit / (TILE_K / UNIT) * STEP_LEN);
            let pair = step.add(unit % (TILE_K / UNIT) * 2 * PAIR_LEN);
            prefetch(codes.wrapping_add(AHEAD_BYTES));
            if ARE_NIBBLES {
                prefetch(codes.wrapping_add(AHEAD_BYTES + 64));
                // Bytes are shared with the columns 32 further.
                for vector in 0..2 {
                    let words = codes.add(64 * vector).cast::<u32>();
                    let (low, high) = (columns[vector], columns[vector + 2]);
                    let pair = pair.add(vector * TILE_LEN);
                    let a = low.numbers(S::Vector::load_bits::<0, 15>(words));
                    let b = low.numbers(S::Vector::load_bits::<8, 15>(words));
                    S::store_bf16_pairs(a, b, pair);
                    let a = low.numbers(S::Vector::load_bits::<16, 15>(words));
                    let b = low.numbers(S::Vector::load_bits::<24, 15>(words));
                    S::store_bf16_pairs(a, b, pair.add(PAIR_LEN));
                    let pair = pair.add(2 * TILE_LEN);
                    let a = high.numbers(S::Vector::load_bits::<4, 15>(words));
                    let b = high.numbers(S::Vector::load_bits::<12, 15>(words));
                    S::store_bf16_pairs(a, b, pair);
                    let a = high.numbers(S::Vector::load_bits::<20, 15>(words));
                    let b = high.numbers(S::Vector::load_bits::<28, 15>(words));
                    S::store_bf16_pairs(a, b, pair.add(PAIR_LEN));
                }
            } else {
                for line in 1..4 {
                    prefetch(codes.wrapping_add(AHEAD_BYTES + 64 * line));
                }
                for (vector, columns) in columns.iter().enumerate() {
                    let words = codes.add(64 * vector).cast::<u32>();
                    let pair = pair.add(vector * TILE_LEN);
                    let a = columns.numbers(S::Vector::load_bits::<0, 255>(words));
                    let b = columns.numbers(S::Vector::load_bits::<8, 255>(words));
                    S::store_bf16_pairs(a, b, pair);
                    let a = columns.numbers(S::Vector::load_bits::<16, 255>(words));
                    let b = columns.numbers(S::Vector::load_bits::<24, 255>(words));
                    S::store_bf16_pairs(a, b, pair.add(PAIR_LEN));
                }
            }
            codes = codes.add(unit_bytes);
        }
    }
}

/// What makes numbers of the codes of 16 columns, rounded once.
#[derive(Clone, Copy)]
struct Columns<V> {
    zeros: V,
    scales: V,
}

impl<V: Vector16> Columns<V> {
    /// Returns those of columns `16 * vector..`.
    ///
    /// # Safety
    /// The instruction set is there, and `vector` is less than 4.
    #[inline(always)]
    unsafe fn of<S: Simd<Vector = V>>(group: &Group<'_>, vector: usize) -> Self {
        let mut zeros = [0.0; 16];
        for (to, &zero) in zeros.iter_mut().zip(group.zeros().iter().skip(16 * vector)) {
            *to = f32::from(zero);
        }
        // SAFETY: passed on to the caller.
        unsafe { Columns { zeros: V::load(zeros.as_ptr()), scales: group.scales::<V>(vector) } }
    }

    /// Returns the numbers of codes.
    ///
    /// # Safety
    /// The instruction set is there.
    #[inline(always)]
    unsafe fn numbers(self, codes: V) -> V {
        // SAFETY: passed on to the caller.
        unsafe { codes.sub(self.zeros).mul(self.scales) }
    }
}

/// Makes the floats of a part of a group, which begins with a step, into tiles.
///
/// # Safety
/// As for [`integers`].
#[inline(always)]
unsafe fn floats<S: Simd>(group: &Group<'_>, part: Range<usize>, to: *mut u16) {
    // SAFETY: passed on to the caller; vectors are 0 to 3.
    unsafe {
        let scales = [
            group.scales::<S::Vector>(0),
            group.scales::<S::Vector>(1),
            group.scales::<S::Vector>(2),
            group.scales::<S::Vector>(3),
        ];
        for (pair, place) in part.clone().step_by(2).enumerate() {
            let pair_to = to.add(pair / (TILE_K / 2) * STEP_LEN + pair % (TILE_K / 2) * PAIR_LEN);
            let codes =
                group.codes().as_ptr().wrapping_add(PANEL_COLUMNS * (place - group.places.start));
            prefetch(codes.wrapping_add(AHEAD_BYTES));
            prefetch(codes.wrapping_add(AHEAD_BYTES + PANEL_COLUMNS));
            for (vector, &scales) in scales.iter().enumerate() {
                let first = group.floats::<S::Vector>(place, vector).mul(scales);
                let second = if place + 1 < part.end {
                    group.floats::<S::Vector>(place + 1, vector).mul(scales)
                } else {
                    S::Vector::zero()
                };
                S::store_bf16_pairs(first, second, pair_to.add(vector * TILE_LEN));
            }
        }
    }
}

const _: () = assert!(TILE_BYTES == TILE_K / 2 * PAIR_LEN * size_of::<u16>());
