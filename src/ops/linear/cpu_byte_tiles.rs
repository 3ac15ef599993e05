//! Products in tiles of activations and codes less their zeros, of which every one is a signed byte: the
//! part of [`cpu_integer_tiles`](super::cpu_integer_tiles) where sums need no zeros. Activations of 16
//! bits are two bytes, whose sums are added up.
//!
//! A block is 32 columns of one segment by 32 rows, or by the two parts of 16. What costs most is not its
//! product but scaling its sums, so that longer groups of a weight are faster.

use super::cpu_integer_rows::{
    Stretch, TileFactors, TileLayout, BLOCK_BYTES, CODES_BYTES, PAIR_ROWS,
};
use crate::backend::cpu::dot::UNIT;
use crate::backend::cpu::simd::{TileSimd, Vector16};
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
    /// [rows of tiles][segments][steps] tiles, or twice as many: upper bytes, lower bytes.
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

/// Multiplies rows by a stretch of some panels, whose segments are `segments`. `PARTS` is the number of
/// bytes of an activation.
///
/// # Safety
/// The instruction set is there, and the pointers of `rows` are valid for its rows and the segments;
/// `sums` has a place for each panel, with as many rows as make whole pairs of rows of tiles.
#[inline(always)]
pub(super) unsafe fn signed_stretch<S: TileSimd, const PARTS: usize>(
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
    let step_bytes = PARTS * TILE_BYTES;
    let mut block = Block([0; BLOCK_BYTES]);
    let sums_of_block = block.0.as_mut_ptr().cast::<i32>();
    for row in (0..num_rows).step_by(PAIR_ROWS) {
        let tile = (rows.first_row + row) / TILE_ROWS;
        let rows_left = num_rows - row;
        let is_pair = rows_left > TILE_ROWS;
        for (place, panel) in panels.iter().enumerate() {
            for (index, segment) in segments.clone().enumerate() {
                for half in 0..2 {
                    // SAFETY: row tiles are below those of num_rows, segments below num_segments, and
                    // each has segment_steps steps of PARTS tiles; the stretch has the codes of as many
                    // for each of its segments; the block and the sums have room for whole pairs of
                    // rows of tiles.
                    unsafe {
                        let a = rows.tiles.add(tile * row_bytes);
                        let a = a.add(segment * segment_steps * step_bytes);
                        let codes = panel.codes.as_ptr().add(index * segment_steps).cast::<i8>();
                        let factors = rows.factors.add(tile * num_segments + segment);
                        let column = half * PANEL_COLUMNS / 2;
                        let sums = sums.as_mut_ptr().add(place * panel_sums);
                        let sums = sums.add(row * PANEL_COLUMNS + column);
                        let mut operands = ByteOperands {
                            a: a.cast(),
                            a_stride: if PARTS == 2 { TILE_BYTES } else { row_bytes },
                            a_step: step_bytes,
                            b: codes.add(2 * half * TILE_BYTES),
                            num_steps: segment_steps,
                            out: sums_of_block,
                        };
                        let scales = panel.scales[index][column..].as_ptr();
                        let to = Scaled {
                            scales: [S::Vector::load(scales), S::Vector::load(scales.add(16))],
                            is_first: segment == 0,
                            sums,
                        };
                        let second = Scaled { sums: sums.add(TILE_ROWS * PANEL_COLUMNS), ..to };
                        let num_rows = rows_left.min(TILE_ROWS);
                        let num_second = rows_left.saturating_sub(TILE_ROWS).min(TILE_ROWS);
                        if PARTS == 2 {
                            unit.byte_block::<2>(&operands);
                            to.finish::<S, 2>(sums_of_block, &*factors, num_rows);
                            if is_pair {
                                operands.a = operands.a.add(row_bytes);
                                unit.byte_block::<2>(&operands);
                                let factors = &*factors.add(num_segments);
                                second.finish::<S, 2>(sums_of_block, factors, num_second);
                            }
                        } else if is_pair {
                            unit.byte_block::<2>(&operands);
                            to.finish::<S, 1>(sums_of_block, &*factors, num_rows);
                            let block = sums_of_block.add(TILE_ROWS * PANEL_COLUMNS / 2);
                            second.finish::<S, 1>(block, &*factors.add(num_segments), num_second);
                        } else {
                            unit.byte_block::<1>(&operands);
                            to.finish::<S, 1>(sums_of_block, &*factors, num_rows);
                        }
                    }
                }
            }
        }
    }
}

/// The way of sums of a segment into the result.
#[derive(Clone, Copy)]
struct Scaled<V> {
    /// Those of 32 columns.
    scales: [V; 2],
    /// Whether nothing has been added up before.
    is_first: bool,
    /// Rows a panel's columns apart.
    sums: *mut f32,
}

impl<V: Vector16> Scaled<V> {
    /// Scales the sums of a segment of up to 16 rows and adds them to those of the segments before.
    ///
    /// # Safety
    /// The instruction set is there; `block` is valid for `PARTS` times 16 rows of 32 sums, and `sums` for
    /// as many rows as are finished.
    #[inline(always)]
    unsafe fn finish<S: TileSimd<Vector = V>, const PARTS: usize>(
        self,
        block: *const i32,
        factors: &TileFactors,
        num_rows: usize,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for (row, &factor) in factors.scales.iter().enumerate() {
                if row >= num_rows {
                    break;
                }
                let factor = V::splat(factor);
                for (vector, &scales) in self.scales.iter().enumerate() {
                    let block = block.add(row * PANEL_COLUMNS / 2 + 16 * vector);
                    let total = if PARTS == 2 {
                        V::load_parts(block, block.add(TILE_ROWS * PANEL_COLUMNS / 2), 0)
                    } else {
                        V::load_integers(block)
                    };
                    let sum = self.sums.add(row * PANEL_COLUMNS + 16 * vector);
                    let before = if self.is_first { V::zero() } else { V::load(sum) };
                    total.mul(factor).mul_add(scales, before).store(sum);
                }
            }
        }
    }
}
