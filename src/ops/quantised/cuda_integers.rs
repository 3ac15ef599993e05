//! Integers of 8 bits on a GPU: activations with a scale for each token, and the rows of a matrix:
//! `csrc/ops/quantised/integers.cu`.
//!
//! ```text
//! scale = max |x| / 127 of a token, code = round(x / scale)
//! ```
//!
//! This is what configs of int8 with `dynamic` activations of strategy `token` ask for
//! (compressed-tensors, W8A8). Activations that are not finite make their scale so, and with it every
//! result of the token.

use super::cuda::{scale_number, QuantisedTiles};
use super::tiles::{TileLayout, TILE_ROWS};
use super::Code;
use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct IntegersParams {
        x: *mut u8,
        tokens: *mut u8,
        x_scales: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        rows: *mut u8,
        row_scales: *mut u8,
        num_tokens: i32,
        k: i32,
        num_chunks: i32,
        tile_blocks: i32,
        scale_type: i32,
        are_pieces: i32,
    }
}

const THREADS: u32 = 256;
/// The chunks of a block's part of a tile.
const BLOCK_CHUNKS: usize = 8;
/// The number of inputs of a row is a multiple of this.
const INPUTS: usize = 16;
/// The alignment of the scales in bytes.
const ALIGNMENT: usize = 256;

/// Rows of integers of 8 bits, `[num_rows, in_features]`, and a scale in f32 for each of them.
#[derive(Debug)]
pub struct IntegerRows {
    memory: DeviceTensor,
    num_rows: usize,
    in_features: usize,
}

/// Returns the device memory of `num_rows` rows; `usize::MAX` if that cannot be counted.
pub fn integer_rows_bytes(num_rows: usize, in_features: usize) -> usize {
    let bytes = first_scale(num_rows, in_features).and_then(|codes| {
        num_rows
            .checked_mul(size_of::<f32>())?
            .checked_add(codes)?
            .checked_next_multiple_of(ALIGNMENT)
    });
    bytes.unwrap_or(usize::MAX)
}

/// Returns the byte at which the scales begin.
fn first_scale(num_rows: usize, in_features: usize) -> Option<usize> {
    num_rows.checked_mul(in_features)?.checked_next_multiple_of(ALIGNMENT)
}

impl IntegerRows {
    /// Takes memory for rows, whose contents are undefined.
    fn new(context: &ComputeContext, num_rows: usize, in_features: usize) -> Result<Self> {
        let words = integer_rows_bytes(num_rows, in_features) / size_of::<i32>();
        let what = "integers of 8 bits";
        let memory = DeviceTensor::temporary(context, ElementType::I32, &[words], what)?;
        Ok(IntegerRows { memory, num_rows, in_features })
    }

    /// Returns the rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Returns the inputs of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// All of the memory as words: the codes, four a word, and the scales.
    pub fn words(&self) -> &DeviceTensor {
        &self.memory
    }

    /// Returns the byte at which the scales begin.
    pub fn scales_start(&self) -> usize {
        first_scale(self.num_rows, self.in_features).unwrap_or(0)
    }

    /// Returns the codes.
    pub(in crate::ops) fn codes(&self) -> *mut u8 {
        self.memory.data()
    }

    /// Returns the scales.
    pub(in crate::ops) fn scales(&self) -> *mut u8 {
        self.memory.data().wrapping_add(self.scales_start())
    }
}

/// Whether [`integers`] serves a matrix: rows of 8-bit integers with one scale each and no zeros.
pub fn has_integers(layout: &TileLayout) -> bool {
    let format = layout.format();
    format.code == Code::Int8
        && !format.has_zeros
        && format.group_size >= layout.in_features()
        && layout.in_features().is_multiple_of(INPUTS)
}

/// Quantises x `[num_tokens, in_features]`, of f16 or bf16, and returns its rows, and those of such a matrix
/// in the order of its tiles, where gate and up alternate every eight rows, filled up to whole tiles. What
/// is queued next may begin earlier, and finds both when it has waited.
pub fn integers(
    context: &ComputeContext,
    x: &Tensor,
    weight: &QuantisedTiles<'_>,
) -> Result<(IntegerRows, IntegerRows)> {
    let dtype = float("x", x)?;
    let layout = weight.layout();
    let (k, num_tiles) = (layout.in_features(), layout.num_tiles());
    let num_tokens = x.shape().first().map_or(0, |&n| n as usize);
    check("x", x, x.element(), &[num_tokens as i64, k as i64])?;
    let tile_blocks = layout.num_chunks().div_ceil(BLOCK_CHUNKS);
    let blocks = num_tiles.checked_mul(tile_blocks).and_then(|rows| rows.checked_add(num_tokens));
    let blocks = blocks.and_then(|blocks| i32::try_from(blocks).ok());
    let is_served = has_integers(layout) && (x.data() as usize).is_multiple_of(16);
    let (true, Some(blocks), Ok(inputs)) = (is_served, blocks, i32::try_from(k)) else {
        return Err(Error::internal(format!(
            "integers of {num_tokens} tokens at {:?} and {layout:?}",
            x.data()
        )));
    };
    let tokens = IntegerRows::new(context, num_tokens, k)?;
    let rows = IntegerRows::new(context, num_tiles * TILE_ROWS, k)?;
    if blocks == 0 || k == 0 {
        return Ok((tokens, rows));
    }
    let kernel = kernels::INTEGERS.of_half(dtype)?;
    let regions = weight.regions();
    let params = IntegersParams {
        x: x.data(),
        tokens: tokens.codes(),
        x_scales: tokens.scales(),
        codes: regions.codes,
        scales: regions.scales,
        rows: rows.codes(),
        row_scales: rows.scales(),
        num_tokens: num_tokens as i32,
        k: inputs,
        num_chunks: layout.num_chunks() as i32,
        tile_blocks: tile_blocks as i32,
        scale_type: scale_number(layout.format().scale),
        are_pieces: layout.has_pieces().into(),
    };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it reads x, which has these rows, and the regions of the tiles, and
    // writes a row of codes and a scale for each token and each row of a tile, for which there is memory.
    unsafe {
        let launch = Launch::linear(blocks as u32, THREADS);
        cuda(context)?.launch(kernel, launch, arguments)?;
    }
    Ok((tokens, rows))
}
