//! Products in tiles of activations of 8 bits and codes less their zeros, of which every one is a
//! signed byte: the part of [`cpu_integer_tiles`](super::cpu_integer_tiles) where a product of bytes
//! is the whole sum.
//!
//! A block is 32 rows by 32 columns of one segment. What costs most is not its product but scaling
//! its sums, so that longer groups of a weight are faster.

use super::cpu_integer_rows::{
    Stretch, TileFactors, TileLayout, BLOCK_BYTES, CODES_BYTES, PAIR_ROWS,
};
use crate::backend::cpu::dot::UNIT;
use crate::backend::cpu::simd::{Simd, Vector16};
use crate::backend::cpu::tiles::{ByteOperands, TileUnit, ROW_BYTES, TILE_BYTES, TILE_ROWS};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::quantised::{unit_bytes, Code};
use std::ops::Range;

/// The bytes of a unit of inputs for all columns.
const UNIT_BYTES: usize = UNIT * PANEL_COLUMNS;

/// Decodes the codes of a segment of a panel, less their zeros, into tiles: for each step those of 16
/// columns each, one after the other. What lies in the last step behind the segment is left: activations
/// are zero there.
#[inline(always)]
pub(super) fn decode_signed(code: Code, codes: &[u8], zeros: &[u8; PANEL_COLUMNS], to: &mut [u8]) {
    let mut unit_zeros = [0; UNIT_BYTES];
    for (to, &zero) in unit_zeros.chunks_exact_mut(UNIT).zip(zeros) {
        to.fill(zero);
    }
    let mut units = codes.chunks_exact(unit_bytes(code));
    for step in to.chunks_exact_mut(CODES_BYTES) {
        for (row, unit) in units.by_ref().take(TILE_ROWS).enumerate() {
            let mut bytes = [0; UNIT_BYTES];
            if code == Code::Int4 {
                let (low, high) = bytes.split_at_mut(UNIT_BYTES / 2);
                for ((low, high), &codes) in low.iter_mut().zip(high).zip(unit) {
                    *low = codes & 15;
                    *high = codes >> 4;
                }
            } else {
                bytes.copy_from_slice(unit);
            }
            let tiles = step.chunks_exact_mut(TILE_BYTES);
            let parts = bytes.chunks_exact(ROW_BYTES).zip(unit_zeros.chunks_exact(ROW_BYTES));
            for (tile, (bytes, zeros)) in tiles.zip(parts) {
                let to = &mut tile[row * ROW_BYTES..][..ROW_BYTES];
                for ((to, &byte), &zero) in to.iter_mut().zip(bytes).zip(zeros) {
                    *to = byte.wrapping_sub(zero);
                }
            }
        }
    }
}

/// Rows of activations in tiles, and which of them a stretch is multiplied by.
pub(super) struct SignedRows<'a> {
    /// [rows of tiles][segments][steps] tiles.
    pub tiles: *const u8,
    /// [rows of tiles][segments].
    pub factors: *const TileFactors,
    pub layout: &'a TileLayout,
    /// The first row, that of a row of tiles.
    pub first_row: usize,
    pub num_rows: usize,
}

/// The sums of a block.
#[repr(align(64))]
struct Block([u8; BLOCK_BYTES]);

/// Multiplies rows by a stretch of some panels, whose segments are `segments`.
///
/// # Safety
/// The instruction set is there, and the pointers of `rows` are valid for its rows and the segments;
/// `sums` has a place for each panel, with as many rows as make whole pairs of rows of tiles.
#[inline(always)]
pub(super) unsafe fn signed_stretch<S: Simd>(
    unit: &mut S::Tiles,
    rows: &SignedRows<'_>,
    segments: Range<usize>,
    panels: &[Stretch],
    sums: &mut [f32],
) {
    let SignedRows { layout, num_rows, .. } = *rows;
    let TileLayout { num_segments, segment_steps, .. } = *layout;
    let panel_sums = num_rows.next_multiple_of(PAIR_ROWS) * PANEL_COLUMNS;
    let row_bytes = layout.row_bytes();
    let mut block = Block([0; BLOCK_BYTES]);
    let parts = block.0.as_mut_ptr().cast::<i32>();
    for row in (0..num_rows).step_by(PAIR_ROWS) {
        let tile = (rows.first_row + row) / TILE_ROWS;
        let rows_left = num_rows - row;
        for (place, panel) in panels.iter().enumerate() {
            for (index, segment) in segments.clone().enumerate() {
                // SAFETY: row tiles are below those of num_rows, segments below num_segments, and each
                // has segment_steps steps; the stretch has the codes of as many for each of its
                // segments; the block and the sums have room for whole pairs of rows of tiles.
                unsafe {
                    let a = rows.tiles.add(tile * row_bytes + segment * segment_steps * TILE_BYTES);
                    let codes = panel.codes.as_ptr().add(index * segment_steps).cast::<i8>();
                    let factors = rows.factors.add(tile * num_segments + segment);
                    let sums = sums.as_mut_ptr().add(place * panel_sums + row * PANEL_COLUMNS);
                    for half in 0..2 {
                        let column = half * PANEL_COLUMNS / 2;
                        let operands = ByteOperands {
                            a: a.cast(),
                            a_stride: row_bytes,
                            b: codes.add(2 * half * TILE_BYTES),
                            num_steps: segment_steps,
                            out: parts,
                        };
                        let scales = panel.scales[index][column..].as_ptr();
                        let scales = [S::Vector::load(scales), S::Vector::load(scales.add(16))];
                        let sums = sums.add(column);
                        let is_first = segment == 0;
                        if rows_left <= TILE_ROWS {
                            unit.byte_block::<1>(&operands);
                        } else {
                            unit.byte_block::<2>(&operands);
                            let (factors, parts) = (
                                &*factors.add(num_segments),
                                parts.add(TILE_ROWS * PANEL_COLUMNS / 2),
                            );
                            let sums = sums.add(TILE_ROWS * PANEL_COLUMNS);
                            let num_rows = (rows_left - TILE_ROWS).min(TILE_ROWS);
                            finish::<S>(parts, factors, num_rows, scales, is_first, sums);
                        }
                        let num_rows = rows_left.min(TILE_ROWS);
                        finish::<S>(parts, &*factors, num_rows, scales, is_first, sums);
                    }
                }
            }
        }
    }
}

/// Scales the sums of a segment of up to 16 rows and adds them to those of the segments before.
///
/// # Safety
/// The instruction set is there; `parts` is valid for 16 rows of 32 sums, and `sums` for 16 rows of
/// 32, each a panel's columns apart.
#[inline(always)]
unsafe fn finish<S: Simd>(
    parts: *const i32,
    factors: &TileFactors,
    num_rows: usize,
    scales: [S::Vector; 2],
    is_first: bool,
    sums: *mut f32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        for (row, &factor) in factors.scales.iter().take(num_rows).enumerate() {
            let factor = S::Vector::splat(factor);
            for (vector, scales) in scales.into_iter().enumerate() {
                let part =
                    S::Vector::load_integers(parts.add(row * PANEL_COLUMNS / 2 + 16 * vector));
                let sum = sums.add(row * PANEL_COLUMNS + 16 * vector);
                let before = if is_first { S::Vector::zero() } else { S::Vector::load(sum) };
                part.mul(factor).mul_add(scales, before).store(sum);
            }
        }
    }
}
