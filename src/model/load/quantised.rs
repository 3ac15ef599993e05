//! Quantised matrices on the host, as they are read or quantised, before they take the layout of kernels.
//! One matrix is there at a time.

use super::files::WeightFiles;
use super::geometry::convert_run;
use super::loader::{piece_rows, Loader};
use super::weights::{MatrixPart, MatrixPlan};
use crate::backend::cpu::SendPointer;
use crate::error::{try_filled, Context, Result};
use crate::memory::DType;
use crate::ops::fill::cpu::mix;
use crate::ops::linear::MatrixLayout;
use crate::ops::quantised::{quantise_row, Code, QuantFormat, QuantisedMatrix, RowOut};

/// The rows of a matrix that several threads fill, each its own.
struct Rows {
    format: QuantFormat,
    num_rows: usize,
    row_bytes: usize,
    num_groups: usize,
    codes: SendPointer<u8>,
    scales: SendPointer<f32>,
    zeros: Option<SendPointer<u8>>,
}

impl Rows {
    fn of(matrix: &mut QuantisedMatrix) -> Self {
        Rows {
            format: matrix.format,
            num_rows: matrix.out_features,
            row_bytes: matrix.format.code.row_bytes(matrix.in_features),
            num_groups: matrix.num_groups(),
            codes: SendPointer(matrix.codes.as_mut_ptr()),
            scales: SendPointer(matrix.scales.as_mut_ptr()),
            zeros: matrix.format.has_zeros.then(|| SendPointer(matrix.zeros.as_mut_ptr())),
        }
    }

    /// Gives out rows `first..last`, which are cut to those that there are.
    ///
    /// # Safety
    /// The matrix that this was made of outlives the slices, and no row is in two of them.
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
        for part in &plan.parts {
            self.files.open(&part.tensor)?;
            match plan.layout {
                MatrixLayout::Rows => self.quantise_rows(part, plan.in_features, first, &rows)?,
                MatrixLayout::Columns => {
                    self.quantise_columns(part, plan.in_features, first, &rows)?
                }
            }
            first += part.out_features;
        }
        Ok(matrix)
    }

    /// Quantises a part stored `[out_features, in_features]` to the rows from `first_row` on.
    fn quantise_rows(
        &mut self,
        part: &MatrixPart,
        in_features: usize,
        first_row: usize,
        target: &Rows,
    ) -> Result<()> {
        let row_bytes = in_features * part.tensor.dtype.size_bytes();
        // Not more than a thread's share of a matrix.
        let share = part.out_features.div_ceil(self.backend.num_threads());
        let rows = piece_rows(MatrixLayout::Rows, row_bytes).min(share).max(1);
        let backend = self.backend;
        self.in_pieces(part.out_features, rows, row_bytes, &|files, first, last| {
            let (begin, len) = (first * row_bytes, (last - first) * row_bytes);
            let numbers = floats(files, part, begin, len)?;
            for (row, numbers) in (first_row + first..).zip(numbers.chunks_exact(in_features)) {
                // SAFETY: the matrix outlives this call, and pieces have rows of their own.
                let out = unsafe { target.get(row, row + 1) };
                quantise_row(backend, numbers, &target.format, out)
                    .context(|| format!("tensor {}, row {}", part.tensor.name, row - first_row))?;
            }
            Ok(())
        })
    }

    /// Quantises a part stored `[in_features, out_features]`.
    fn quantise_columns(
        &mut self,
        part: &MatrixPart,
        in_features: usize,
        first_row: usize,
        target: &Rows,
    ) -> Result<()> {
        let out_features = part.out_features;
        let row_bytes = out_features * part.tensor.dtype.size_bytes();
        let numbers = floats(&self.files, part, 0, in_features * row_bytes)?;
        let backend = self.backend;
        let what = "a row of a weight";
        self.in_pieces(
            out_features,
            64,
            in_features * part.tensor.dtype.size_bytes(),
            &|_, first, last| {
                let mut row = try_filled(in_features, 0.0_f32, what)?;
                for column in first..last {
                    let stored = numbers.iter().skip(column).step_by(out_features);
                    row.iter_mut().zip(stored).for_each(|(to, &from)| *to = from);
                    // SAFETY: the matrix outlives this call, and pieces have rows of their own.
                    let out = unsafe { target.get(first_row + column, first_row + column + 1) };
                    quantise_row(backend, &row, &target.format, out)
                        .context(|| format!("tensor {}, column {column}", part.tensor.name))?;
                }
                Ok(())
            },
        )
    }

    /// Makes up a matrix: codes that are random, and one scale that keeps the magnitude of activations.
    pub(in crate::model) fn random_quantised(
        &mut self,
        plan: &MatrixPlan,
        format: QuantFormat,
        seed: u64,
    ) -> Result<QuantisedMatrix> {
        let mut matrix = QuantisedMatrix::empty(plan.out_features, plan.in_features, format)?;
        // The standard deviation of the values that random codes stand for.
        let (std, mask, zero) = match format.code {
            Code::Int4 => (4.6_f32, u64::MAX, 8),
            Code::Int8 => (73.9, u64::MAX, 128),
            // Without the upper half of the exponents.
            Code::Fp8 => (0.61, 0xbfbf_bfbf_bfbf_bfbf, 0),
        };
        let scale = 1.0 / (std * (plan.in_features.max(1) as f32).sqrt());
        matrix.scales.fill(half::bf16::from_f32(scale).to_f32());
        matrix.zeros.fill(zero);
        let row_bytes = format.code.row_bytes(plan.in_features);
        self.backend.parallel_rows(&mut matrix.codes, row_bytes, |first, rows| {
            for (row, codes) in (first as u64..).zip(rows.chunks_mut(row_bytes)) {
                let seed = mix(seed, row);
                for (index, bytes) in (0..).zip(codes.chunks_mut(8)) {
                    let random = (mix(seed, index) & mask).to_le_bytes();
                    bytes.iter_mut().zip(random).for_each(|(to, from)| *to = from);
                }
            }
        })?;
        let stored: u64 = plan.parts.iter().map(|part| part.tensor.len_bytes).sum();
        self.advance(stored as usize)?;
        Ok(matrix)
    }
}

/// Reads bytes of a part as f32.
fn floats(
    files: &WeightFiles<'_>,
    part: &MatrixPart,
    begin: usize,
    len: usize,
) -> Result<Vec<f32>> {
    let num = len / part.tensor.dtype.size_bytes();
    let mut numbers = try_filled(num, 0.0_f32, "numbers to quantise")?;
    // SAFETY: f32 are bytes, any of which make an f32.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u8>(), num * size_of::<f32>())
    };
    files.with_bytes(&part.tensor, begin, len, |stored| {
        convert_run(stored, part.tensor.dtype, bytes, DType::F32);
        Ok(())
    })?;
    Ok(numbers)
}
