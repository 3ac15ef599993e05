//! Weights whose products are taken in tiles of bf16: dense ones that lie so, and quantised ones that are
//! made so a panel at a time where several rows share the work.
//!
//! The bits of a row then depend on whether the rows are few or many, which is for the weight to allow
//! ([`QuantisedPanels::rounding`]).

use super::host_matrix::HostWeight;
use crate::backend::cpu::tiles::TILE_BYTES_K;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::common::tile_product::{multiply, TileEpilogue};
use crate::ops::common::tile_rows::{make_tiles, Inputs, Round};
use crate::ops::quantised::activations::round_inputs;
use crate::ops::quantised::{can_make_tiles, QuantFormat, QuantisedPanels};

/// From this many rows on, making tiles of a quantised weight is faster than multiplying its codes: those
/// of floats, those of integers in groups that leave half of a tile of bytes empty, and others. Beside
/// activations of 8 bits, codes of whole tiles are always multiplied as they are.
const MIN_FLOAT_ROWS: usize = 4;
const MIN_SHORT_ROWS: usize = 12;
const MIN_LONG_ROWS: usize = 32;

/// Whether products of `num_rows` rows with a quantised weight may be taken in tiles that are made.
pub(super) fn are_made(num_rows: usize, in_features: usize, format: &QuantFormat) -> bool {
    let is_short = format.group_size.min(in_features) < TILE_BYTES_K;
    let min_rows = match (format.code.is_float(), is_short) {
        (true, _) => MIN_FLOAT_ROWS,
        (false, true) => MIN_SHORT_ROWS,
        (false, false) if format.quantises_inputs => return false,
        (false, false) => MIN_LONG_ROWS,
    };
    num_rows >= min_rows && can_make_tiles(format, in_features)
}

/// A weight whose products with some rows are taken in tiles.
#[derive(Clone, Copy)]
pub(super) enum TiledWeight<'a> {
    Dense(&'a PackedMatrix),
    Made(&'a QuantisedPanels),
}

impl<'a> TiledWeight<'a> {
    /// Returns the weight if its products with `num_rows` rows are taken in tiles.
    pub fn new(backend: &CpuBackend, num_rows: usize, weight: HostWeight<'a>) -> Option<Self> {
        if !backend.has_tiles() || num_rows == 0 || weight.in_features() == 0 {
            return None;
        }
        match weight {
            HostWeight::Dense(weight) => weight.is_in_tiles().then_some(TiledWeight::Dense(weight)),
            HostWeight::Quantised(weight) => {
                let is_made = weight.is_rounded()
                    && are_made(num_rows, weight.in_features(), &weight.format());
                is_made.then_some(TiledWeight::Made(weight))
            }
        }
    }

    /// Arranges rows of x in tiles, as the weight takes them.
    pub fn make_rows(self, backend: &CpuBackend, x: &[f32], tiles: &mut HostBuffer) -> Result<()> {
        match self {
            TiledWeight::Dense(weight) => {
                make_tiles(backend, x, weight.in_features(), Inputs::default(), tiles)
            }
            TiledWeight::Made(weight) => {
                let format = weight.format();
                let is_rounded = format.quantises_inputs && format.code.is_float();
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
                    multiply(backend, tiles, num_rows, weight, epilogue, scratch)
                }
                TiledWeight::Made(weight) => {
                    multiply(backend, tiles, num_rows, weight, epilogue, scratch)
                }
            }
        }
    }
}
