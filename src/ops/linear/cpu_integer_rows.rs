//! Rows of activations as integers in tiles, stretches of panels beside them, and which products take
//! tiles ([`cpu_integer_tiles`](super::cpu_integer_tiles)).

use super::cpu_integers::{integers_of, max_activation, segment_values, Factor};
use crate::backend::cpu::dot::MAX_ACTIVATION;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::tiles::{TILE_BYTES, TILE_BYTES_K, TILE_K, TILE_ROWS};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::quantised::{Code, Division, QuantFormat};

/// From this many rows on, tiles are faster than products of rows.
const MIN_ROWS: usize = 8;
/// The same for segments that leave half of a tile of bytes empty, and for codes of 4 bits and activations of 8,
/// of which products of rows are faster than before.
const MIN_SHORT_ROWS: usize = 16;
/// From this many rows on, it pays to bring codes into the form and the place that suit tiles best:
/// bf16 for short segments, and a copy in the second-level cache for bytes.
pub(super) const MANY_ROWS: usize = 64;
/// Segments of fewer inputs leave most of a tile empty.
const MIN_SEGMENT: usize = 16;
/// The bytes of two tiles, of the upper and of the lower bytes of activations.
pub(super) const STEP_BYTES: usize = 2 * TILE_BYTES;

/// The rows that are multiplied by a stretch of a panel before the next panel's.
pub(super) const PAIR_ROWS: usize = 2 * TILE_ROWS;
/// The steps of a stretch: about what codes and rows take of the second-level cache.
pub(super) const STRETCH_STEPS: usize = 8;
/// The bytes of the codes of a panel in a step.
pub(super) const CODES_BYTES: usize = 4096;
/// The bytes of the sums of a block: 16 rows by 32 columns in two parts, or 32 rows by 32 columns.
pub(super) const BLOCK_BYTES: usize = 4096;

/// A stretch of a panel: the codes of each step that had to be decoded, and where those of each segment
/// are, its scales and its zeros.
#[repr(C, align(64))]
pub(super) struct Stretch {
    pub codes: [[u8; CODES_BYTES]; STRETCH_STEPS],
    pub places: [*const u8; STRETCH_STEPS],
    pub scales: [[f32; PANEL_COLUMNS]; STRETCH_STEPS],
    pub zeros: [[i32; PANEL_COLUMNS]; STRETCH_STEPS],
}

/// What the tiles hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Integers of 8 bits.
    Bytes,
    /// Integers of up to 8 bits, and multiples of 256.
    Bf16,
    /// Activations of 8 bits, and codes less their zeros, which have 8 bits.
    Signed,
    /// Activations of 16 bits in two parts, and codes less their zeros, which have 8 bits.
    SignedParts,
}

/// How rows of activations, and stretches of panels, are laid out in tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileLayout {
    pub form: Form,
    /// The segments of a row.
    pub num_segments: usize,
    /// The steps of each.
    pub segment_steps: usize,
    /// See [`max_activation`].
    most: i16,
}

impl TileLayout {
    /// The layout for products of `num_rows` rows; `None` if tiles do not serve them.
    pub fn new(num_rows: usize, division: &Division, format: &QuantFormat) -> Option<Self> {
        let longest = division.segment_places(0).len();
        let code_is_short = format.code == Code::Int4;
        let has_fast_rows = format.quantises_inputs && code_is_short;
        let needs_more = longest < TILE_BYTES_K || has_fast_rows;
        let min_rows = if needs_more { MIN_SHORT_ROWS } else { MIN_ROWS };
        if num_rows < min_rows || longest < MIN_SEGMENT {
            return None;
        }
        // What f32 holds exactly, and so every part of the sum.
        const MAX_EXACT: usize = 1 << 24;
        let largest_code = match (format.code, format.has_zeros) {
            // Some writers of files count zeros from 1 to 16.
            (Code::Int4, true) => 16,
            (Code::Int4, false) => 8,
            (Code::Int8, _) => 255,
            _ => return None,
        };
        let most = longest * largest_code * usize::from(MAX_ACTIVATION.unsigned_abs());
        let is_bf16 = most < MAX_EXACT && num_rows >= MANY_ROWS;
        // Codes of 8 bits are bytes less the middle of all, but not less every zero; few rows multiply them
        // where they lie.
        let is_signed = code_is_short || !format.has_zeros && num_rows >= MANY_ROWS;
        let form = match (format.quantises_inputs, is_signed) {
            (true, true) => Form::Signed,
            (false, _) if is_bf16 => Form::Bf16,
            (false, true) => Form::SignedParts,
            _ => Form::Bytes,
        };
        let step = if form == Form::Bf16 { TILE_K } else { TILE_BYTES_K };
        let segment_steps = longest.div_ceil(step);
        let (num_segments, most) = (division.num_segments(), max_activation(format));
        Some(TileLayout { form, num_segments, segment_steps, most })
    }

    /// The bytes of the tiles of a step of 16 rows.
    fn step_bytes(&self) -> usize {
        if self.form == Form::Signed {
            TILE_BYTES
        } else {
            STEP_BYTES
        }
    }

    /// The bytes of the tiles of 16 rows.
    pub fn row_bytes(&self) -> usize {
        self.num_segments.saturating_mul(self.segment_steps).saturating_mul(self.step_bytes())
    }

    /// The bytes of the activations of `num_rows` rows.
    pub fn activations_bytes(&self, num_rows: usize) -> usize {
        let factors = self.num_segments.saturating_mul(size_of::<TileFactors>());
        num_rows.div_ceil(TILE_ROWS).saturating_mul(self.row_bytes().saturating_add(factors))
    }
}

/// What the sums of a segment of 16 rows are multiplied by, and the totals of their activations: times
/// the middle of codes, where that is the zero of all columns.
#[repr(C)]
pub(super) struct TileFactors {
    pub scales: [f32; TILE_ROWS],
    pub totals: [i32; TILE_ROWS],
}

/// Up to 16 rows on their way into tiles. Both pointers are valid for all segments of the layout, and
/// nobody else uses what they point to.
pub(super) struct RowOfTiles<'a> {
    pub x: &'a [f32],
    pub order: &'a [u32],
    /// What totals are multiplied by.
    pub middle: u8,
    pub division: &'a Division,
    pub layout: &'a TileLayout,
    /// [segments][steps][upper, lower] tiles, or a single one where activations have 8 bits.
    pub tiles: *mut u8,
    /// [segments].
    pub factors: *mut TileFactors,
}

impl Kernel for RowOfTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let in_features = self.division.in_features();
        let TileLayout { form, num_segments, segment_steps, most } = *self.layout;
        let num_rows = self.x.len() / in_features.max(1);
        let step_bytes = self.layout.step_bytes();
        let segment_bytes = segment_steps * step_bytes;
        let part = |segment: usize| {
            // SAFETY: there are tiles and factors for all segments, and no two parts are in use at once.
            unsafe {
                let tiles = self.tiles.add(segment * segment_bytes);
                let factors = &mut *self.factors.add(segment);
                (std::slice::from_raw_parts_mut(tiles, segment_bytes), factors)
            }
        };
        let step = if form == Form::Bf16 { TILE_K } else { TILE_BYTES_K };
        for segment in 0..num_segments {
            let places = self.division.segment_places(segment);
            if num_rows < TILE_ROWS || places.len() < segment_steps * step {
                let (tiles, factors) = part(segment);
                tiles.fill(0);
                *factors = TileFactors { scales: [0.0; TILE_ROWS], totals: [0; TILE_ROWS] };
            }
        }
        // Row by row, since they come from memory.
        for (row, x) in self.x.chunks_exact(in_features.max(1)).enumerate() {
            for segment in 0..num_segments {
                let (tiles, factors) = part(segment);
                let places = self.division.segment_places(segment);
                let values = segment_values(x, self.order, places.clone());
                let (integers, Factor { scale, total }) = integers_of(&values, places.len(), most);
                factors.scales[row] = scale;
                factors.totals[row] = total.wrapping_mul(i32::from(self.middle));
                let to = tiles.chunks_exact_mut(step_bytes);
                match form {
                    Form::Signed => {
                        for (from, to) in integers.chunks_exact(TILE_BYTES_K).zip(to) {
                            let to = &mut to[row * TILE_BYTES_K..][..TILE_BYTES_K];
                            for (to, &a) in to.iter_mut().zip(from) {
                                *to = a as u8;
                            }
                        }
                    }
                    Form::Bytes | Form::SignedParts => {
                        for (from, to) in integers.chunks_exact(TILE_BYTES_K).zip(to) {
                            let (upper, lower) = to.split_at_mut(STEP_BYTES / 2);
                            let upper = &mut upper[row * TILE_BYTES_K..][..TILE_BYTES_K];
                            let lower = &mut lower[row * TILE_BYTES_K..][..TILE_BYTES_K];
                            for ((upper, lower), &a) in upper.iter_mut().zip(lower).zip(from) {
                                *upper = upper_byte(a) as u8;
                                *lower = a as u8;
                            }
                        }
                    }
                    Form::Bf16 => {
                        for (from, to) in integers.chunks_exact(TILE_K).zip(to) {
                            let (upper, lower) = to.split_at_mut(STEP_BYTES / 2);
                            let upper = &mut upper[row * 2 * TILE_K..][..2 * TILE_K];
                            let lower = &mut lower[row * 2 * TILE_K..][..2 * TILE_K];
                            let to = upper.chunks_exact_mut(2).zip(lower.chunks_exact_mut(2));
                            for ((upper, lower), &a) in to.zip(from) {
                                let bits = bf16_of(256 * i32::from(upper_byte(a)));
                                upper.copy_from_slice(&(bits as u16).to_ne_bytes());
                                let bits = bf16_of(i32::from(a as i8));
                                lower.copy_from_slice(&(bits as u16).to_ne_bytes());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What is left of an activation when its lower byte is a signed number.
#[inline(always)]
fn upper_byte(a: i16) -> i8 {
    ((i32::from(a) - i32::from(a as i8)) >> 8) as i8
}

/// The bits of an integer that bf16 holds.
#[inline(always)]
pub(super) fn bf16_of(integer: i32) -> u32 {
    (integer as f32).to_bits() >> 16
}
