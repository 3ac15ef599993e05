//! Quantised matrices on their way to a device. Each is made on the host, one at a time, and taken
//! there in pieces: brought into the order of the kernels on all threads, in pinned memory, from
//! which the device copies one piece while the next is made.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::geometry::{convert, Geometry};
use super::heads::HeadSpacing;
use super::weights::MatrixPlan;
use super::Loader;
use crate::backend::{ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{try_filled, try_with_capacity, Error, Result};
use crate::memory::{DType, ElementType, HostBuffer, Pages};
use crate::ops::experts;
use crate::ops::linear::{ShardAxis, ShardUnit};
use crate::ops::quantised::tiles::{TileLayout, TileMemory};
use crate::ops::quantised::QuantisedMatrix;

/// The size of a piece in bytes, but for matrices of which a single tile is larger.
const PIECE_BYTES: usize = 16 << 20;

/// Returns the layout in which a matrix lies on a device; `None` if it is dense there. Where heads lie
/// further apart than in files, the matrices of attention are.
pub(in crate::model) fn device_tiles(
    plan: &MatrixPlan,
    spacing: HeadSpacing,
) -> Result<Option<TileLayout>> {
    let of_heads =
        matches!(plan.shard, ShardAxis::Out(ShardUnit::Head) | ShardAxis::In(ShardUnit::Head));
    match plan.quantised {
        Some(format) if !((of_heads && spacing.is_spaced()) || plan.may_be_ordered()) => {
            let layout =
                TileLayout::new(plan.out_features, plan.in_features, format, plan.is_gated)?;
            Ok(Some(layout))
        }
        _ => Ok(None),
    }
}

/// Whether kernels take the matrices of a layer's experts as they are planned: those of gates and ups alike, those
/// of downs alike, and both dense or both in formats, for a type, that there are products for.
pub(in crate::model) fn takes_experts(
    [gate_up, down]: [&[MatrixPlan]; 2],
    element: ElementType,
) -> Result<bool> {
    let is_quantised = |plans: &[MatrixPlan]| -> Result<Option<bool>> {
        let Some(first) = plans.first() else { return Ok(None) };
        let is_like_first = |plan: &MatrixPlan| {
            plan.quantised == first.quantised && plan.may_be_ordered() == first.may_be_ordered()
        };
        if !plans.iter().all(is_like_first) {
            return Ok(None);
        }
        // Experts have no heads, so that the spacing of heads does not matter.
        let Some(format) = first.quantised.filter(|_| !first.may_be_ordered()) else {
            return Ok(Some(false));
        };
        let (rows, columns) = (first.out_features, first.in_features);
        let layout = TileLayout::new(rows, columns, format, first.is_gated)?;
        Ok(experts::has_products(&layout, element).then_some(true))
    };
    let (of_gate_up, of_down) = (is_quantised(gate_up)?, is_quantised(down)?);
    Ok(of_gate_up.is_some() && of_gate_up == of_down)
}

/// The rows of a part of a matrix, on the host.
pub(super) enum PartRows {
    /// The rows of a part that is stored quantised.
    Quantised(QuantisedMatrix),
    /// The rows of one that is not: `[rows, in_features]`.
    Numbers {
        /// Row after row.
        numbers: Vec<f32>,
        /// The length of each row.
        in_features: usize,
    },
}

impl PartRows {
    fn len(&self) -> usize {
        match self {
            PartRows::Quantised(matrix) => matrix.out_features,
            PartRows::Numbers { numbers, in_features } => numbers.len() / (*in_features).max(1),
        }
    }

    fn in_features(&self) -> usize {
        match self {
            PartRows::Quantised(matrix) => matrix.in_features,
            PartRows::Numbers { in_features, .. } => *in_features,
        }
    }

    /// Writes row `row`, `[in_features]`.
    fn row_to_f32(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            PartRows::Quantised(matrix) => matrix.row_to_f32(row, out),
            PartRows::Numbers { numbers, in_features } => {
                let begin = row.saturating_mul(*in_features);
                let found = numbers.get(begin..begin.saturating_add(out.len()));
                let found =
                    found.ok_or_else(|| Error::internal("a row of a weight was not read"))?;
                out.copy_from_slice(found);
                Ok(())
            }
        }
    }
}

/// Rows that are dense on a device although they, or those beside them, are stored quantised.
pub(super) struct DenseRows {
    /// The geometry of the matrix, stored as rows.
    pub geometry: Geometry,
    /// The type of the model.
    pub dtype: DType,
}

impl DenseRows {
    fn row_bytes(&self) -> usize {
        self.geometry.device_columns() * self.dtype.size_bytes()
    }

    /// Writes rows of a matrix to `out`, on all threads.
    fn write(
        &self,
        loader: &Loader<'_>,
        part: &PartRows,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let in_features = part.in_features();
        let row_bytes = self.row_bytes();
        let out = out.get_mut(..rows.len() * row_bytes).unwrap_or_default();
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        loader.backend.parallel_rows(out, row_bytes, |first, out| {
            let mut write = || -> Result<()> {
                let mut row = try_filled(in_features, 0.0_f32, "a row of a weight")?;
                let mut bytes =
                    try_with_capacity(in_features * size_of::<f32>(), "a row of a weight")?;
                for (index, out) in (rows.start + first..).zip(out.chunks_exact_mut(row_bytes)) {
                    part.row_to_f32(index, &mut row)?;
                    bytes.clear();
                    bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
                    convert(&bytes, DType::F32, out, self.dtype, &self.geometry);
                }
                Ok(())
            };
            if let Err(error) = write() {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        })?;
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Pinned memory for pieces.
pub(super) struct Upload<'c> {
    context: &'c Arc<ComputeContext>,
    /// The one that was used longest ago comes first.
    buffers: Vec<PinnedBuffer>,
}

impl<'c> Upload<'c> {
    /// Allocates nothing yet.
    pub fn new(context: &'c Arc<ComputeContext>) -> Self {
        Upload { context, buffers: Vec::new() }
    }

    /// Returns the next buffer of at least `len_bytes`, whose last copies may still be under way.
    fn next(&mut self, len_bytes: usize) -> Result<PinnedBuffer> {
        let is_large = |buffer: &PinnedBuffer| buffer.len_bytes() >= len_bytes;
        if self.buffers.len() < 2 || !self.buffers.iter().all(is_large) {
            self.buffers.clear();
            let size = len_bytes.max(PIECE_BYTES).next_multiple_of(4096);
            let memory = HostBuffer::zeroed(size.saturating_mul(2), Pages::Huge)?;
            self.buffers = PinnedBuffer::parts(self.context, memory, size, "reading weights")?;
        }
        if self.buffers.is_empty() {
            return Err(Error::internal("no pinned memory for weights"));
        }
        Ok(self.buffers.remove(0))
    }

    /// Takes a matrix to `target`, from its byte `place` on, as tiles.
    pub fn tiles(
        &mut self,
        loader: &Loader<'_>,
        matrix: &QuantisedMatrix,
        layout: &TileLayout,
        target: &DeviceTensor,
        place: usize,
    ) -> Result<()> {
        let bytes_of = |tiles: Range<usize>| {
            let place = layout.place(tiles);
            place.codes.len() + place.scales.len() + place.zeros.len()
        };
        let tile_bytes = bytes_of(0..1).max(1);
        let per_piece = (PIECE_BYTES / tile_bytes).max(1);
        for first in (0..layout.num_tiles()).step_by(per_piece) {
            let tiles = first..layout.num_tiles().min(first + per_piece);
            let mut buffer = self.next(bytes_of(tiles.clone()))?;
            pack(loader, matrix, layout, tiles.clone(), buffer.bytes()?)?;
            let to = layout.place(tiles);
            let mut from = 0;
            for region in [to.codes, to.scales, to.zeros] {
                if !region.is_empty() {
                    buffer.upload(from..from + region.len(), target, place + region.start)?;
                }
                from += region.len();
            }
            buffer.fence()?;
            self.buffers.push(buffer);
        }
        Ok(())
    }

    /// Takes a part to the rows from `first_row` on of a matrix in `target`, from its byte `place` on,
    /// as dense rows of the model's type with heads spaced.
    pub fn rows(
        &mut self,
        loader: &Loader<'_>,
        part: &PartRows,
        dense: &DenseRows,
        first_row: usize,
        target: &DeviceTensor,
        place: usize,
    ) -> Result<()> {
        let row_bytes = dense.row_bytes();
        let per_piece = (PIECE_BYTES / row_bytes.max(1)).max(1);
        for first in (0..part.len()).step_by(per_piece) {
            let last = part.len().min(first + per_piece);
            let mut buffer = self.next((last - first) * row_bytes)?;
            dense.write(loader, part, first..last, buffer.bytes()?)?;
            let (begin, end) = (first_row + first, first_row + last);
            for (row, device_row, rows) in dense.geometry.runs(begin, end) {
                let from = (row - begin) * row_bytes;
                buffer.upload(
                    from..from + rows * row_bytes,
                    target,
                    place + device_row * row_bytes,
                )?;
            }
            buffer.fence()?;
            self.buffers.push(buffer);
        }
        Ok(())
    }
}

/// Takes the first `len` bytes of a slice away from it.
fn split_off<'b>(from: &mut &'b mut [u8], len: usize) -> Option<&'b mut [u8]> {
    let (part, rest) = std::mem::take(from).split_at_mut_checked(len)?;
    *from = rest;
    Some(part)
}

/// Packs tiles on all threads into `out`: their codes, then their scales, then their zeros.
fn pack(
    loader: &Loader<'_>,
    matrix: &QuantisedMatrix,
    layout: &TileLayout,
    tiles: Range<usize>,
    out: &mut [u8],
) -> Result<()> {
    let whole = layout.place(tiles.clone());
    let lost = || Error::internal("a piece of a quantised weight was lost");
    let mut rest = out;
    let [codes, scales, zeros] = [&whole.codes, &whole.scales, &whole.zeros]
        .map(|region| split_off(&mut rest, region.len()));
    let (mut codes, mut scales, mut zeros) =
        (codes.ok_or_else(lost)?, scales.ok_or_else(lost)?, zeros.ok_or_else(lost)?);
    let num_shares = (4 * loader.backend.num_threads()).min(tiles.len()).max(1);
    let mut shares = try_with_capacity(num_shares, "shares of a weight")?;
    for share in 0..num_shares {
        let at = |share: usize| tiles.start + tiles.len() * share / num_shares;
        let mine = at(share)..at(share + 1);
        let place = layout.place(mine.clone());
        let memory = TileMemory {
            codes: split_off(&mut codes, place.codes.len()).ok_or_else(lost)?,
            scales: split_off(&mut scales, place.scales.len()).ok_or_else(lost)?,
            zeros: split_off(&mut zeros, place.zeros.len()).ok_or_else(lost)?,
        };
        shares.push(Mutex::new(Some((mine, memory))));
    }
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    loader.backend.parallel_for(shares.len(), &|index| {
        let share = shares
            .get(index)
            .and_then(|share| share.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some((tiles, memory)) = share {
            if let Err(error) = layout.pack(matrix, tiles, memory) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    })?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
