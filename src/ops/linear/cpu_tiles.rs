//! Weights whose products are taken in bf16: dense ones that lie in tiles, and quantised ones that are made
//! so a panel at a time where several rows share the work. A unit multiplies tiles where there is one, and
//! otherwise instructions for bf16 do.
//!
//! The bits of a row then depend on whether the rows are few or many, which is for the weight to allow
//! ([`QuantisedPanels::rounding`]).

use super::cpu_rounded_rows::{round_rows, rounded_bytes, rounded_stride};
use super::host_matrix::HostWeight;
use crate::backend::cpu::tiles::TILE_BYTES_K;
use crate::backend::cpu::{CpuBackend, Isa, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::made_product;
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::common::panel_product::Rows;
use crate::ops::common::tile_product::{self, TileEpilogue};
use crate::ops::common::tile_rows::{make_tiles, tiles_bytes, Inputs, Round};
use crate::ops::quantised::activations::round_inputs;
use crate::ops::quantised::{can_make_tiles, QuantFormat, QuantisedPanels};

/// From this many rows on, making tiles of a quantised weight is faster than multiplying its codes: those
/// of floats, those of integers in groups that leave half of a tile of bytes empty, and others. Beside
/// activations of 8 bits, codes of whole tiles are always multiplied as they are.
const MIN_FLOAT_ROWS: usize = 4;
const MIN_SHORT_ROWS: usize = 12;
const MIN_LONG_ROWS: usize = 32;
/// The same without tiles, for weights of integers: instructions multiply two numbers of bf16 in the time of one
/// code and one activation of 16 bits, and the sums of groups need not be scaled.
const MIN_SHORT_VECTOR_ROWS: usize = 24;
const MIN_LONG_VECTOR_ROWS: usize = 64;

/// Whether products of `num_rows` rows with a quantised weight may be taken in bf16 that is made.
pub(super) fn are_made(
    isa: Isa,
    num_rows: usize,
    in_features: usize,
    format: &QuantFormat,
) -> bool {
    let is_short = format.group_size.min(in_features) < TILE_BYTES_K;
    let min_rows = if isa.has_tiles() {
        match (format.code.is_float(), is_short) {
            (true, _) => MIN_FLOAT_ROWS,
            (false, true) => MIN_SHORT_ROWS,
            (false, false) if format.quantises_inputs => return false,
            (false, false) => MIN_LONG_ROWS,
        }
    } else if isa.has_native_bf16() && !format.code.is_float() && !format.quantises_inputs {
        if is_short {
            MIN_SHORT_VECTOR_ROWS
        } else {
            MIN_LONG_VECTOR_ROWS
        }
    } else {
        return false;
    };
    num_rows >= min_rows && can_make_tiles(format, in_features)
}

/// Returns the bytes that such products need, of activations and beside them.
pub(super) fn made_bytes(
    isa: Isa,
    num_threads: usize,
    num_rows: usize,
    in_features: usize,
) -> (usize, usize) {
    if isa.has_tiles() {
        let scratch = tile_product::scratch_bytes(num_threads, num_rows, true);
        (tiles_bytes(num_rows, in_features), scratch)
    } else {
        let scratch = made_product::scratch_bytes(num_threads, num_rows);
        (rounded_bytes(num_rows, in_features), scratch)
    }
}

/// A weight whose products with some rows are taken in bf16, in tiles or by a panel that is made.
#[derive(Clone, Copy)]
pub(super) enum TiledWeight<'a> {
    Dense(&'a PackedMatrix),
    Made(&'a QuantisedPanels),
}

impl<'a> TiledWeight<'a> {
    /// Returns the weight if its products with `num_rows` rows are taken so.
    pub fn new(backend: &CpuBackend, num_rows: usize, weight: HostWeight<'a>) -> Option<Self> {
        if num_rows == 0 || weight.in_features() == 0 {
            return None;
        }
        match weight {
            HostWeight::Dense(weight) => {
                let is_tiled = backend.has_tiles() && weight.is_in_tiles();
                is_tiled.then_some(TiledWeight::Dense(weight))
            }
            HostWeight::Quantised(weight) => {
                let is_made = weight.is_rounded()
                    && are_made(backend.isa(), num_rows, weight.in_features(), &weight.format());
                is_made.then_some(TiledWeight::Made(weight))
            }
        }
    }

    /// Rounds rows of x to bf16 and arranges them as the weight takes them: in tiles where there are such.
    pub fn make_rows(self, backend: &CpuBackend, x: &[f32], tiles: &mut HostBuffer) -> Result<()> {
        match self {
            TiledWeight::Dense(weight) => {
                make_tiles(backend, x, weight.in_features(), Inputs::default(), tiles)
            }
            TiledWeight::Made(weight) if !backend.has_tiles() => {
                round_rows(backend, x, weight.in_features(), weight.order(), tiles)?;
                Ok(())
            }
            TiledWeight::Made(weight) => {
                let format = weight.format();
                let is_rounded = format.has_fp8_inputs();
                let round = is_rounded.then_some(round_inputs as Round);
                let inputs = Inputs { order: weight.order(), round };
                make_tiles(backend, x, weight.in_features(), inputs, tiles)
            }
        }
    }

    /// Whether rows in tiles are nothing but their values, in bf16.
    pub fn takes_plain_rows(self) -> bool {
        match self {
            TiledWeight::Dense(_) => true,
            TiledWeight::Made(weight) => {
                weight.order().is_empty() && !weight.format().quantises_inputs
            }
        }
    }

    /// Passes all sums of `num_rows` rows times the weight to `epilogue`.
    ///
    /// # Safety
    /// `tiles` holds as many rows as those that [`TiledWeight::new`] was asked for, and the backend is the
    /// same. For a gated epilogue, half the `out_features` are whole panels.
    pub unsafe fn multiply<P: TileEpilogue>(
        self,
        backend: &CpuBackend,
        tiles: &[u16],
        num_rows: usize,
        epilogue: &P,
        scratch: &mut HostBuffer,
    ) -> Result<()> {
        // SAFETY: the backend has tiles, and the weight lies in them or is made so; the rest is passed on to
        // the caller.
        unsafe {
            match self {
                TiledWeight::Dense(weight) => {
                    tile_product::multiply(backend, tiles, num_rows, weight, epilogue, scratch)
                }
                TiledWeight::Made(weight) if backend.has_tiles() => {
                    tile_product::multiply(backend, tiles, num_rows, weight, epilogue, scratch)
                }
                TiledWeight::Made(weight) => {
                    let a = SendPointer(tiles.as_ptr().cast_mut().cast());
                    let a_stride = rounded_stride(weight.in_features());
                    let rows = Rows { a, a_stride, num_rows };
                    made_product::multiply(backend, rows, weight, epilogue, scratch)
                }
            }
        }
    }
}
