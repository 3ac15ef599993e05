//! Quantised matrices on the host, as they are read or quantised, before they take the layout of kernels.
//! One matrix is there at a time.

use std::marker::PhantomData;

use super::device_quantised::PartRows;
use super::files::{WeightFiles, PIECE_BYTES};
use super::geometry::convert_run;
use super::kept::{Kept, PieceSums};
use super::loader::{piece_rows, Loader};
use super::weights::{MatrixPart, MatrixPlan, PartSource};
use crate::backend::cpu::SendPointer;
use crate::error::{try_filled, try_with_capacity, Context, Error, Result};
use crate::memory::DType;
use crate::model::checkpoint::{RawTensor, Tensor};
use crate::model::quantised::{QuantModule, ROWS_AT_ONCE};
use crate::ops::fill::cpu::mix;
use crate::ops::linear::MatrixLayout;
use crate::ops::quantised::{quantise_row, QuantFormat, QuantisedMatrix, RowOut};

/// The rows of a matrix that several threads fill, each its own.
pub(super) struct Rows<'m> {
    matrix: PhantomData<&'m mut QuantisedMatrix>,
    format: QuantFormat,
    num_rows: usize,
    row_bytes: usize,
    num_groups: usize,
    codes: SendPointer<u8>,
    scales: SendPointer<f32>,
    zeros: Option<SendPointer<u8>>,
}

impl<'m> Rows<'m> {
    fn of(matrix: &'m mut QuantisedMatrix) -> Self {
        Rows {
            matrix: PhantomData,
            format: matrix.format,
            num_rows: matrix.out_features,
            row_bytes: matrix.format.code.row_bytes(matrix.in_features),
            num_groups: matrix.num_groups(),
            codes: SendPointer(matrix.codes.as_mut_ptr()),
            scales: SendPointer(matrix.scales.as_mut_ptr()),
            zeros: if matrix.format.has_zeros {
                Some(SendPointer(matrix.zeros.as_mut_ptr()))
            } else {
                None
            },
        }
    }

    /// Returns the bytes of the codes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Gives out rows `first..last`, which are cut to those that there are.
    ///
    /// # Safety
    /// No row is in two of the slices.
    unsafe fn get(&self, first: usize, last: usize) -> RowOut<'_> {
        let last = last.min(self.num_rows);
        let first = first.min(last);
        let rows = last - first;
        // SAFETY: the vectors of the matrix have num_rows rows of these lengths, of which these are
        // some; the caller has them given out once.
        unsafe {
            let (codes, groups) = (first * self.row_bytes, first * self.num_groups);
            let num_groups = rows * self.num_groups;
            let codes = self.codes.get().add(codes);
            RowOut {
                codes: std::slice::from_raw_parts_mut(codes, rows * self.row_bytes),
                scales: std::slice::from_raw_parts_mut(self.scales.get().add(groups), num_groups),
                zeros: match &self.zeros {
                    Some(zeros) => {
                        std::slice::from_raw_parts_mut(zeros.get().add(groups), num_groups)
                    }
                    None => &mut [],
                },
            }
        }
    }
}

impl Loader<'_> {
    /// Reads a matrix and brings it into `format`.
    pub(in crate::model) fn quantised(
        &mut self,
        plan: &MatrixPlan,
        format: QuantFormat,
    ) -> Result<QuantisedMatrix> {
        let mut matrix = QuantisedMatrix::empty(plan.out_features, plan.in_features, format)?;
        let rows = Rows::of(&mut matrix);
        let mut first = 0;
        let mut order: Option<Vec<u32>> = None;
        for part in &plan.parts {
            match &part.source {
                PartSource::Quantised(module) => {
                    let found = self.decode_rows(module, first, &rows)?;
                    match &order {
                        None => order = Some(found),
                        Some(others) if *others == found => {}
                        Some(_) => {
                            return Err(Error::unsupported(format!(
                                "{} has its inputs in another order (g_idx) than the weights that \
                                 are multiplied by the same inputs",
                                module.name
                            )))
                        }
                    }
                }
                PartSource::Dense(tensor) => {
                    self.dense_part(tensor, plan, part.out_features, first, &rows)?;
                }
            }
            first += part.out_features;
        }
        matrix.order = order.unwrap_or_default();
        Ok(matrix)
    }

    /// Quantises a part that is stored dense to the rows from `first_row` on, unless the result is kept.
    fn dense_part(
        &mut self,
        tensor: &Tensor,
        plan: &MatrixPlan,
        num_rows: usize,
        first_row: usize,
        target: &Rows<'_>,
    ) -> Result<()> {
        let kept = self.kept.clone();
        if let Kept::Read(kept) = &kept {
            return self.read_kept(kept, tensor, num_rows, first_row, target);
        }
        self.files.open(tensor)?;
        let is_kept = matches!(kept, Kept::Write(_));
        let in_features = plan.in_features;
        let read = match plan.layout {
            MatrixLayout::Rows => {
                self.quantise_rows(tensor, num_rows, in_features, first_row, target, is_kept)?
            }
            MatrixLayout::Columns => {
                self.quantise_columns(tensor, num_rows, in_features, first_row, target, is_kept)?
            }
        };
        match (&kept, read) {
            (Kept::Write(kept), Some(read)) => {
                self.write_kept(kept, tensor, num_rows, first_row, target, &read)
            }
            _ => Ok(()),
        }
    }

    /// Calls `task` with all rows from `first_row` on of a part of `num_rows`, `rows_at_once` at a
    /// time, on all threads, and with the position of the first of them in the part. Reports
    /// progress of `bytes_each` for each row.
    pub(super) fn in_rows(
        &mut self,
        num_rows: usize,
        rows_at_once: usize,
        bytes_each: usize,
        first_row: usize,
        target: &Rows<'_>,
        task: &(dyn Fn(&WeightFiles<'_>, usize, RowOut<'_>) -> Result<()> + Sync),
    ) -> Result<()> {
        self.in_pieces(num_rows, rows_at_once, bytes_each, &|files, first, last| {
            // SAFETY: pieces have rows of their own.
            let rows = unsafe { target.get(first_row + first, first_row + last) };
            task(files, first, rows)
        })
    }

    /// Reads a part that is stored quantised.
    pub(in crate::model) fn decode(&mut self, module: &QuantModule) -> Result<QuantisedMatrix> {
        let (rows, columns) = (module.out_features, module.in_features);
        let mut matrix = QuantisedMatrix::empty(rows, columns, module.format)?;
        let target = Rows::of(&mut matrix);
        matrix.order = self.decode_rows(module, 0, &target)?;
        Ok(matrix)
    }

    /// Reads a part of a matrix that is stored as rows, quantised or not.
    pub(super) fn part_rows(&mut self, part: &MatrixPart, in_features: usize) -> Result<PartRows> {
        match &part.source {
            PartSource::Quantised(module) => self.decode(module).map(PartRows::Quantised),
            PartSource::Dense(tensor) => {
                self.files.open(tensor)?;
                let len = part.out_features * in_features * tensor.dtype.size_bytes();
                let numbers = floats(&self.files, tensor, 0, len, None)?;
                self.advance(len)?;
                Ok(PartRows::Numbers { numbers, in_features })
            }
        }
    }

    /// Reads a part that is stored quantised to the rows from `first_row` on of a matrix whose format
    /// holds the part's. Returns the order of its inputs.
    fn decode_rows(
        &mut self,
        module: &QuantModule,
        first_row: usize,
        target: &Rows<'_>,
    ) -> Result<Vec<u32>> {
        let mut tensors = try_with_capacity(8, "the tensors of a weight")?;
        for tensor in module.tensors() {
            tensors.push((tensor, self.read_whole(tensor)?));
        }
        let bytes = module.bytes(|wanted| {
            let found = tensors.iter().find(|(tensor, _)| tensor.name == wanted.name);
            found
                .map(|(_, bytes)| bytes.as_slice())
                .ok_or_else(|| Error::internal(format!("tensor {} was not read", wanted.name)))
        })?;
        let num_rows = module.out_features;
        // A thread has some units of rows, so that words of several rows are read together.
        let share = num_rows.div_ceil(4 * self.backend.num_threads());
        let rows = share.next_multiple_of(ROWS_AT_ONCE).max(ROWS_AT_ONCE);
        let has_zeros = module.format.has_zeros;
        self.in_pieces(num_rows, rows, 0, &|_, first, last| {
            // SAFETY: pieces have rows of their own.
            let out = unsafe { target.get(first_row + first, first_row + last) };
            // Zeros of a matrix of which another part has them.
            out.zeros.fill(module.format.code.middle());
            let zeros = if has_zeros { out.zeros } else { &mut [] };
            module.decode_rows(&bytes, first..last, out.codes, out.scales, zeros)
        })?;
        Ok(bytes.order)
    }

    /// Reads all bytes of a tensor, on all threads.
    fn read_whole(&mut self, tensor: &RawTensor) -> Result<Vec<u8>> {
        self.files.open(tensor)?;
        let len = usize::try_from(tensor.len_bytes)
            .map_err(|_| Error::out_of_memory(&tensor.name, usize::MAX))?;
        let mut bytes = try_filled(len, 0_u8, "a quantised weight")?;
        let start = SendPointer(bytes.as_mut_ptr());
        self.in_pieces(len, PIECE_BYTES, 1, &|files, first, last| {
            // SAFETY: the vector has `len` bytes and outlives this call; pieces do not overlap.
            let out =
                unsafe { std::slice::from_raw_parts_mut(start.get().add(first), last - first) };
            files.read_into(tensor, first, out)
        })?;
        Ok(bytes)
    }

    /// Quantises a part stored `[out_features, in_features]` to the rows from `first_row` on. Returns the
    /// checksum of what was read if it is `wanted`.
    fn quantise_rows(
        &mut self,
        tensor: &Tensor,
        num_rows: usize,
        in_features: usize,
        first_row: usize,
        target: &Rows<'_>,
        wanted: bool,
    ) -> Result<Option<PieceSums>> {
        let row_bytes = in_features * tensor.dtype.size_bytes();
        // Not more than a thread's share of a matrix.
        let share = num_rows.div_ceil(self.backend.num_threads());
        let rows = piece_rows(MatrixLayout::Rows, row_bytes).min(share).max(1);
        let sums = || PieceSums::new(num_rows * row_bytes, rows * row_bytes);
        let sums = wanted.then(sums).transpose()?;
        let backend = self.backend;
        self.in_pieces(num_rows, rows, row_bytes, &|files, first, last| {
            let (begin, len) = (first * row_bytes, (last - first) * row_bytes);
            let numbers = floats(files, tensor, begin, len, sums.as_ref())?;
            for (row, numbers) in (first_row + first..).zip(numbers.chunks_exact(in_features)) {
                // SAFETY: pieces have rows of their own.
                let out = unsafe { target.get(row, row + 1) };
                quantise_row(backend, numbers, &target.format, out)
                    .context(|| format!("tensor {}, row {}", tensor.name, row - first_row))?;
            }
            Ok(())
        })?;
        Ok(sums)
    }

    /// The same of a part stored `[in_features, out_features]`.
    fn quantise_columns(
        &mut self,
        tensor: &Tensor,
        out_features: usize,
        in_features: usize,
        first_row: usize,
        target: &Rows<'_>,
        wanted: bool,
    ) -> Result<Option<PieceSums>> {
        let row_bytes = out_features * tensor.dtype.size_bytes();
        let len = in_features * row_bytes;
        let sums = wanted.then(|| PieceSums::new(len, len)).transpose()?;
        let numbers = floats(&self.files, tensor, 0, len, sums.as_ref())?;
        let backend = self.backend;
        let what = "a row of a weight";
        self.in_pieces(
            out_features,
            64,
            in_features * tensor.dtype.size_bytes(),
            &|_, first, last| {
                let mut row = try_filled(in_features, 0.0_f32, what)?;
                for column in first..last {
                    let stored = numbers.iter().skip(column).step_by(out_features);
                    row.iter_mut().zip(stored).for_each(|(to, &from)| *to = from);
                    // SAFETY: pieces have rows of their own.
                    let out = unsafe { target.get(first_row + column, first_row + column + 1) };
                    quantise_row(backend, &row, &target.format, out)
                        .context(|| format!("tensor {}, column {column}", tensor.name))?;
                }
                Ok(())
            },
        )?;
        Ok(sums)
    }

    /// Makes up a matrix: codes that are random, and one scale that keeps the magnitude of activations.
    pub(in crate::model) fn random_quantised(
        &mut self,
        plan: &MatrixPlan,
        format: QuantFormat,
        seed: u64,
    ) -> Result<QuantisedMatrix> {
        let mut matrix = QuantisedMatrix::empty(plan.out_features, plan.in_features, format)?;
        let (mask, std) = (format.code.random_mask(), format.code.random_std());
        let scale = 1.0 / (std * (plan.in_features.max(1) as f32).sqrt());
        matrix.scales.fill(half::bf16::from_f32(scale).to_f32());
        matrix.zeros.fill(format.code.middle());
        let row_bytes = format.code.row_bytes(plan.in_features);
        self.backend.parallel_rows(&mut matrix.codes, row_bytes, |first, rows| {
            for (row, codes) in (first as u64..).zip(rows.chunks_mut(row_bytes)) {
                let seed = mix(seed, row);
                for (index, bytes) in (0..).zip(codes.chunks_mut(8)) {
                    let random = mix(seed, index).to_le_bytes();
                    bytes.iter_mut().zip(random).for_each(|(to, from)| *to = from & mask);
                }
            }
        })?;
        let stored = plan.stored_bytes();
        self.advance(stored as usize)?;
        Ok(matrix)
    }
}

/// Reads bytes of a part as f32, and fills in their checksum if it is wanted.
fn floats(
    files: &WeightFiles<'_>,
    tensor: &Tensor,
    begin: usize,
    len: usize,
    sums: Option<&PieceSums>,
) -> Result<Vec<f32>> {
    let num = len / tensor.dtype.size_bytes();
    let mut numbers = try_filled(num, 0.0_f32, "numbers to quantise")?;
    // SAFETY: f32 are bytes, any of which make an f32.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u8>(), num * size_of::<f32>())
    };
    files.with_bytes(tensor, begin, len, |stored| {
        if let Some(sums) = sums {
            sums.set(begin, stored);
        }
        convert_run(stored, tensor.dtype, bytes, DType::F32);
        Ok(())
    })?;
    Ok(numbers)
}
