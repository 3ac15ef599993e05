//! Quantised matrices on a GPU, and their numbers as a dense matrix:
//! `csrc/ops/quantised/dequantise.cu`.

use std::ops::Range;

use super::tiles::{TileLayout, TILE_ROWS};
use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct DequantiseParams {
        codes: *mut u8,
        scales: *mut u8,
        zeros: *mut u8,
        out: *mut u8,
        first_tile: i32,
        first_row: i32,
        num_rows: i32,
        k: i32,
        num_chunks: i32,
        num_groups: i32,
        group_size: i32,
        tile_rows: i32,
        pair_rows: i32,
        pairs_end: i32,
        code: i32,
        scale_type: i32,
        are_pieces: i32,
    }
}

/// The threads of a block.
const THREADS: u32 = 256;
/// The chunks of a block: 32 lanes have either half of one.
const BLOCK_CHUNKS: usize = 4;

/// The tiles of a quantised matrix in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedTiles<'a> {
    layout: TileLayout,
    memory: &'a Tensor,
}

/// The regions of tiles on a GPU; `zeros` is null without any.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Regions {
    pub codes: *mut u8,
    pub scales: *mut u8,
    pub zeros: *mut u8,
}

impl<'a> QuantisedTiles<'a> {
    /// Returns the tiles that lie in `memory`, a contiguous tensor of any type that begins at a
    /// multiple of 16 bytes.
    pub fn new(layout: TileLayout, memory: &'a Tensor) -> Result<Self> {
        let is_aligned = (memory.data() as usize).is_multiple_of(16) && memory.is_contiguous();
        if !is_aligned || memory.size_bytes() < layout.len_bytes() {
            return Err(Error::internal(format!(
                "{} bytes for the tiles of {layout:?}, aligned: {is_aligned}",
                memory.size_bytes()
            )));
        }
        Ok(QuantisedTiles { layout, memory })
    }

    /// Returns the layout of the tiles.
    pub fn layout(&self) -> &TileLayout {
        &self.layout
    }

    pub(in crate::ops) fn regions(&self) -> Regions {
        let place = self.layout.place(0..self.layout.num_tiles());
        let at = |offset: usize| self.memory.data().wrapping_add(offset);
        let has_zeros = self.layout.format().has_zeros;
        Regions {
            codes: at(place.codes.start),
            scales: at(place.scales.start),
            zeros: if has_zeros { at(place.zeros.start) } else { std::ptr::null_mut() },
        }
    }
}

/// Returns the number by which kernels know the type of scales.
pub(in crate::ops) fn scale_number(scale: DType) -> i32 {
    match scale {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
    }
}

/// Whether the build has the kernel that dequantises.
pub fn has_dequantise(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    cuda.has_kernel(kernels::DEQUANTISE.bf16)
}

/// Returns the tiles that have some of these rows.
fn tiles_of(layout: &TileLayout, rows: &Range<usize>) -> Range<usize> {
    if !layout.is_gated() {
        return rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
    }
    let (width, half) = (layout.out_features() / 2, TILE_ROWS / 2);
    let gate = rows.start..rows.end.min(width);
    let up = rows.start.max(width) - width..rows.end.max(width) - width;
    let part = |rows: &Range<usize>| rows.start / half..rows.end.div_ceil(half);
    match (gate.is_empty(), up.is_empty()) {
        (false, true) => part(&gate),
        (true, false) => part(&up),
        _ => 0..layout.num_tiles(),
    }
}

/// Computes the numbers of rows `rows` of a quantised matrix, as
/// [`QuantisedMatrix::row_to_f32`](super::QuantisedMatrix::row_to_f32) does, rounded to the type of
/// `out` `[rows, in_features]`. Rows are in the order of the matrix, inputs in that of their places.
pub fn dequantise(
    context: &ComputeContext,
    tiles: &QuantisedTiles<'_>,
    rows: Range<usize>,
    out: &Tensor,
) -> Result<()> {
    let dtype = float("out", out)?;
    let layout = tiles.layout();
    let (k, num_rows) = (layout.in_features(), rows.len());
    check("out", out, out.element(), &[num_rows as i64, k as i64])?;
    if rows.end > layout.out_features() || !(out.data() as usize).is_multiple_of(16) {
        return Err(Error::internal(format!(
            "rows {rows:?} of a quantised matrix of {} x {k} to {:?}",
            layout.out_features(),
            out.data()
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let too_large = || Error::unsupported(format!("a quantised matrix of {rows:?} rows x {k}"));
    let int = |value: usize| i32::try_from(value).map_err(|_| too_large());
    let touched = tiles_of(layout, &rows);
    let regions = tiles.regions();
    let width = layout.out_features() / 2;
    let (tile_rows, pair_rows, pairs_end) = if layout.is_gated() {
        (int(TILE_ROWS / 2)?, int(width)?, int(width)?)
    } else {
        (int(TILE_ROWS)?, int(TILE_ROWS / 2)?, int(layout.out_features())?)
    };
    let params = DequantiseParams {
        codes: regions.codes,
        scales: regions.scales,
        zeros: regions.zeros,
        out: out.data(),
        first_tile: int(touched.start)?,
        first_row: int(rows.start)?,
        num_rows: int(num_rows)?,
        k: int(k)?,
        num_chunks: int(layout.num_chunks())?,
        num_groups: int(layout.num_groups())?,
        group_size: int(layout.group_size())?,
        tile_rows,
        pair_rows,
        pairs_end,
        code: layout.format().code.number(),
        scale_type: scale_number(layout.format().scale),
        are_pieces: layout.has_pieces().into(),
    };
    let chunk_blocks = u16::try_from(layout.num_chunks().div_ceil(BLOCK_CHUNKS));
    let chunk_blocks = u32::from(chunk_blocks.map_err(|_| too_large())?);
    let grid = (int(touched.len())? as u32, chunk_blocks, 1);
    let launch = Launch { grid, block: THREADS, shared_bytes: 0 };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it reads the regions of the tiles, which lie in their memory,
    // and writes rows below num_rows and columns below k of `out`.
    unsafe {
        let kernel = kernels::DEQUANTISE.of(dtype);
        cuda(context)?.launch(kernel, launch, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::{Code, QuantFormat};

    #[test]
    fn the_tiles_of_rows_are_those_that_have_them() {
        let scale = DType::F32;
        let format = QuantFormat {
            code: Code::Int8,
            group_size: 64,
            has_zeros: false,
            scale,
            quantises_inputs: false,
        };
        for (out_features, is_gated) in [(72, false), (72, true), (20, true)] {
            let layout = TileLayout::new(out_features, 64, format, is_gated).unwrap();
            for start in 0..out_features {
                for end in start + 1..=out_features {
                    let tiles = tiles_of(&layout, &(start..end));
                    let needs = |tile: usize| {
                        let rows = (0..TILE_ROWS).filter_map(|row| layout.row(tile, row));
                        rows.into_iter().any(|row| (start..end).contains(&row))
                    };
                    let mut needed = (0..layout.num_tiles()).filter(|&tile| needs(tile));
                    assert!(needed.all(|tile| tiles.contains(&tile)), "{start}..{end}: {tiles:?}");
                    assert!(tiles.end <= layout.num_tiles());
                }
            }
        }
    }
}
