//! Weights into device memory: row-major `[out_features, in_features]` in the model's element type, one arena
//! for all.
//!
//! The files are read in pieces by several threads, converted into pinned memory and copied from there. There
//! are two pinned buffers: while one is being copied the other is filled.

use std::sync::{Arc, Mutex, PoisonError};

use super::heads::HeadSpacing;
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::checkpoint::Tensor;
use crate::model::load::{Loader, PIECE_BYTES};
use crate::model::weights::{
    HeadAxis, MatrixLayout, MatrixPlan, VectorPlan, WeightReader, WeightsPlan,
};

/// The most threads that read: more do not make a file faster, but take pinned memory.
const MAX_READERS: usize = 16;

/// Rows and row lengths of a weight, in the file and on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    rows: usize,
    columns: usize,
    spacing: HeadSpacing,
    heads_along_rows: bool,
    heads_along_columns: bool,
}

impl Geometry {
    fn new(rows: usize, columns: usize, heads: HeadAxis, spacing: HeadSpacing) -> Self {
        Geometry {
            rows,
            columns,
            spacing,
            heads_along_rows: heads == HeadAxis::Rows,
            heads_along_columns: heads == HeadAxis::Columns,
        }
    }

    /// Rows on the device.
    fn device_rows(&self) -> usize {
        if self.heads_along_rows {
            self.spacing.spaced(self.rows)
        } else {
            self.rows
        }
    }

    /// Columns on the device.
    fn device_columns(&self) -> usize {
        if self.heads_along_columns {
            self.spacing.spaced(self.columns)
        } else {
            self.columns
        }
    }

    /// The runs of rows `first..last` that stay together: (first row, first row on the device, rows).
    fn runs(&self, first: usize, last: usize) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let head = match self.heads_along_rows && self.spacing.is_spaced() {
            true => self.spacing.head_dim,
            false => usize::MAX,
        };
        let mut row = first;
        std::iter::from_fn(move || {
            let rows = (last.checked_sub(row)?).min(head - row % head);
            let run =
                (row, if head == usize::MAX { row } else { self.spacing.spaced_index(row) }, rows);
            row += rows;
            (rows > 0).then_some(run)
        })
    }
}

fn matrix_geometry(plan: &MatrixPlan, spacing: HeadSpacing) -> Geometry {
    Geometry::new(plan.out_features, plan.in_features, plan.heads, spacing)
}

fn vector_geometry(plan: &VectorPlan, spacing: HeadSpacing) -> Geometry {
    Geometry::new(plan.len, 1, plan.heads, spacing)
}

/// Adds up what the weights take of an arena.
struct DeviceBytes {
    element: ElementType,
    spacing: HeadSpacing,
    bytes: usize,
}

impl DeviceBytes {
    fn add(&mut self, shape: &[usize]) -> Result<()> {
        let bytes = Arena::bytes_for(self.element, shape)?;
        let sum = self.bytes.checked_add(bytes);
        self.bytes = sum.ok_or_else(|| Error::out_of_memory("the weights", usize::MAX))?;
        Ok(())
    }
}

impl WeightReader for DeviceBytes {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let geometry = matrix_geometry(plan, self.spacing);
        self.add(&[geometry.device_rows(), geometry.device_columns()])
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<()> {
        self.add(&[vector_geometry(plan, self.spacing).device_rows()])
    }

    /// Taken on trust, as in [`crate::model::weights::Totals`].
    fn same(&mut self, _: &MatrixPlan, _: &MatrixPlan) -> Result<bool> {
        Ok(true)
    }
}

/// Bytes of device memory that the weights take, if a tied output matrix that is stored all the same equals
/// the embedding.
pub(super) fn device_bytes(
    plan: &WeightsPlan,
    dtype: DType,
    spacing: HeadSpacing,
) -> Result<usize> {
    let mut total = DeviceBytes { element: ElementType::Float(dtype), spacing, bytes: 0 };
    plan.read(&mut total)?;
    Ok(total.bytes)
}

/// Turns plans into tensors on a device.
pub(super) struct DeviceReader<'a, 'b> {
    loader: &'b mut Loader<'a>,
    context: Arc<ComputeContext>,
    arena: Arena,
    dtype: DType,
    spacing: HeadSpacing,
    /// Kept from one weight to the next.
    buffers: Option<[PinnedBuffer; 2]>,
    num_readers: usize,
}

impl<'a, 'b> DeviceReader<'a, 'b> {
    /// A reader into `arena`, whose tensors have element type `dtype`.
    pub(super) fn new(
        loader: &'b mut Loader<'a>,
        context: &Arc<ComputeContext>,
        arena: Arena,
        dtype: DType,
        spacing: HeadSpacing,
    ) -> Result<Self> {
        if spacing.is_spaced() {
            // What lies between the heads.
            arena.whole(ElementType::Float(dtype))?.zero(context)?;
        }
        let num_readers = loader.backend.num_threads().clamp(1, MAX_READERS);
        let context = context.clone();
        Ok(DeviceReader { loader, context, arena, dtype, spacing, buffers: None, num_readers })
    }

    /// Waits for the last copies.
    pub(super) fn finish(self) -> Result<()> {
        self.context.synchronize()
    }

    /// The next part of the arena; a further arena for a weight that was not planned (an output matrix
    /// that is declared to be the embedding, but is not).
    fn tensor(&mut self, shape: &[usize]) -> Result<DeviceTensor> {
        let element = ElementType::Float(self.dtype);
        if let Ok(tensor) = self.arena.tensor(element, shape) {
            return Ok(tensor);
        }
        let bytes = Arena::bytes_for(element, shape)?;
        Arena::new(&self.context, bytes, "a weight matrix")?.tensor(element, shape)
    }

    /// Two buffers of at least `bytes`.
    fn take_buffers(&mut self, bytes: usize) -> Result<[PinnedBuffer; 2]> {
        match self.buffers.take() {
            Some(buffers) if buffers.iter().all(|buffer| buffer.len_bytes() >= bytes) => {
                Ok(buffers)
            }
            _ => {
                let new = || PinnedBuffer::new(&self.context, bytes, "reading weights");
                Ok([new()?, new()?])
            }
        }
    }

    /// Reads the tensor of a file to the rows of `target` from `first_row` (of the file's) on.
    fn upload(
        &mut self,
        source: &Tensor,
        rows: usize,
        first_row: usize,
        geometry: &Geometry,
        target: &DeviceTensor,
    ) -> Result<()> {
        self.loader.files.open(source)?;
        let from = geometry.columns * source.dtype.size_bytes();
        let to = geometry.device_columns() * self.dtype.size_bytes();
        if rows == 0 || from == 0 {
            return Ok(());
        }
        let rows_per_piece = (PIECE_BYTES / from.max(to)).clamp(1, rows);
        let piece_bytes = rows_per_piece * to;
        let rows_per_group = rows_per_piece * self.num_readers;
        let group_bytes = piece_bytes.saturating_mul(self.num_readers);
        let [mut buffer, mut other] = self.take_buffers(group_bytes)?;
        let dtype = self.dtype;
        let mut begin = 0;
        while begin < rows {
            let end = rows.min(begin + rows_per_group);
            let bytes = buffer.bytes()?;
            let mut pieces = try_with_capacity(self.num_readers, "pieces of a weight file")?;
            pieces.extend(bytes.chunks_mut(piece_bytes).take(self.num_readers).map(Mutex::new));
            let failure: Mutex<Option<Error>> = Mutex::new(None);
            let files = &self.loader.files;
            let num_pieces = (end - begin).div_ceil(rows_per_piece);
            self.loader.backend.parallel_for(num_pieces, &|index| {
                let first = begin + index * rows_per_piece;
                let last = end.min(first + rows_per_piece);
                let Some(piece) = pieces.get(index) else { return };
                let mut piece = piece.lock().unwrap_or_else(PoisonError::into_inner);
                let done = files.with_bytes(source, first * from, (last - first) * from, |bytes| {
                    convert(bytes, source.dtype, &mut piece, dtype, geometry);
                    Ok(())
                });
                if let Err(error) = done {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            })?;
            drop(pieces);
            if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
                return Err(error);
            }
            // The copies from the other buffer went on while this one was filled.
            other.wait()?;
            // Pieces follow each other without gaps: a whole number of rows each.
            for (row, device_row, len) in geometry.runs(first_row + begin, first_row + end) {
                let start = (row - first_row - begin) * to;
                buffer.upload(start..start + len * to, target, device_row * to)?;
            }
            std::mem::swap(&mut buffer, &mut other);
            self.loader.advance((end - begin) * from)?;
            begin = end;
        }
        self.buffers = Some([buffer, other]);
        Ok(())
    }
}

impl WeightReader for DeviceReader<'_, '_> {
    type Matrix = DeviceTensor;
    type Vector = DeviceTensor;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<DeviceTensor> {
        if plan.layout != MatrixLayout::Rows {
            return Err(Error::unsupported("matrices stored by columns on CUDA"));
        }
        let geometry = matrix_geometry(plan, self.spacing);
        let tensor = self.tensor(&[geometry.device_rows(), geometry.device_columns()])?;
        let mut first = 0;
        for part in &plan.parts {
            self.upload(&part.tensor, part.out_features, first, &geometry, &tensor)?;
            first += part.out_features;
        }
        Ok(tensor)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let geometry = vector_geometry(plan, self.spacing);
        let tensor = self.tensor(&[geometry.device_rows()])?;
        let mut first = 0;
        for part in &plan.parts {
            let len = usize::try_from(part.len_bytes)
                .map_err(|_| Error::out_of_memory(&part.name, usize::MAX))?
                / part.dtype.size_bytes();
            self.upload(part, len, first, &geometry, &tensor)?;
            first += len;
        }
        Ok(tensor)
    }

    fn same(&mut self, a: &MatrixPlan, b: &MatrixPlan) -> Result<bool> {
        self.loader.same(a, b)
    }
}

/// Writes whole rows of a file as rows of the device, heads spaced out.
fn convert(bytes: &[u8], from: DType, out: &mut [u8], to: DType, geometry: &Geometry) {
    let (columns, device_columns) = (geometry.columns, geometry.device_columns());
    if columns == device_columns {
        return convert_run(bytes, from, out, to);
    }
    let spacing = geometry.spacing;
    let rows = bytes.chunks_exact(columns * from.size_bytes());
    let out_rows = out.chunks_exact_mut(device_columns * to.size_bytes());
    for (row, out_row) in rows.zip(out_rows) {
        let heads = row.chunks_exact(spacing.head_dim * from.size_bytes());
        let out_heads = out_row.chunks_exact_mut(spacing.stride * to.size_bytes());
        for (head, out_head) in heads.zip(out_heads) {
            let (used, gap) = out_head.split_at_mut(spacing.head_dim * to.size_bytes());
            convert_run(head, from, used, to);
            gap.fill(0);
        }
    }
}

/// Little-endian numbers to numbers of the machine.
fn convert_run(bytes: &[u8], from: DType, out: &mut [u8], to: DType) {
    if from == to && cfg!(target_endian = "little") {
        if let Some(out) = out.get_mut(..bytes.len()) {
            out.copy_from_slice(bytes);
        }
        return;
    }
    match from {
        DType::F32 => narrow(words(bytes).map(f32::from_le_bytes), out, to),
        DType::F16 => {
            let value = |b| half::f16::from_le_bytes(b).to_f32();
            narrow(words(bytes).map(value), out, to)
        }
        DType::BF16 => {
            let value = |b| half::bf16::from_le_bytes(b).to_f32();
            narrow(words(bytes).map(value), out, to)
        }
    }
}

fn narrow(values: impl Iterator<Item = f32>, out: &mut [u8], to: DType) {
    match to {
        DType::F32 => fill(out, values.map(f32::to_ne_bytes)),
        DType::F16 => fill(out, values.map(|x| half::f16::from_f32(x).to_ne_bytes())),
        DType::BF16 => fill(out, values.map(|x| half::bf16::from_f32(x).to_ne_bytes())),
    }
}

fn fill<const N: usize>(out: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    out.chunks_exact_mut(N).zip(values).for_each(|(out, value)| out.copy_from_slice(&value));
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).map(|word| {
        let mut value = [0; N];
        value.copy_from_slice(word);
        value
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn rows_of_heads_are_spaced_out() {
        let spacing = HeadSpacing { head_dim: 48, stride: 64 };
        let geometry = Geometry::new(144, 5, HeadAxis::Rows, spacing);
        assert_eq!((geometry.device_rows(), geometry.device_columns()), (192, 5));
        let runs: Vec<_> = geometry.runs(40, 100).collect();
        assert_eq!(runs, [(40, 40, 8), (48, 64, 48), (96, 128, 4)]);
        assert_eq!(geometry.runs(7, 7).count(), 0);
        let whole = Geometry::new(144, 5, HeadAxis::None, spacing);
        assert_eq!(whole.runs(40, 100).collect::<Vec<_>>(), [(40, 40, 60)]);
        let same = HeadSpacing { head_dim: 64, stride: 64 };
        let geometry = Geometry::new(144, 5, HeadAxis::Rows, same);
        assert_eq!(geometry.runs(0, 144).collect::<Vec<_>>(), [(0, 0, 144)]);
    }

    #[test]
    fn columns_of_heads_are_spaced_out() {
        let spacing = HeadSpacing { head_dim: 2, stride: 3 };
        let geometry = Geometry::new(2, 4, HeadAxis::Columns, spacing);
        assert_eq!((geometry.device_rows(), geometry.device_columns()), (2, 6));
        let mut out = vec![9; 2 * 6 * 4];
        let bytes = f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        convert(&bytes, DType::F32, &mut out, DType::F32, &geometry);
        assert_eq!(out, f32s(&[1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 5.0, 6.0, 0.0, 7.0, 8.0, 0.0]));
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest() {
        let values = [1.0, -3.25, 65504.0, 1e-8, f32::INFINITY];
        for to in [DType::F32, DType::F16, DType::BF16] {
            let mut out = vec![0; values.len() * to.size_bytes()];
            convert_run(&f32s(&values), DType::F32, &mut out, to);
            let mut back = vec![0; values.len() * 4];
            convert_run(&out, to, &mut back, DType::F32);
            let expected: Vec<f32> = values
                .iter()
                .map(|&x| match to {
                    DType::F32 => x,
                    DType::F16 => half::f16::from_f32(x).to_f32(),
                    DType::BF16 => half::bf16::from_f32(x).to_f32(),
                })
                .collect();
            assert_eq!(back, f32s(&expected));
        }
    }
}
