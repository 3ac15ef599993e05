//! Chooses which kernel of a family works on rows of a tensor, and with which blocks: the norms and
//! softmax have the same forms.

use crate::backend::cuda::Launch;
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::launch::rows_are_vectors;

/// The most threads of a block of these kernels.
const MAX_BLOCK: i64 = 1024;

/// The form in which a kernel goes over a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum RowForm {
    /// Holds it in the registers of a block, with this number of elements per thread.
    Registers(i64),
    /// Reads it twice, 16 bytes at a time.
    Loop,
    /// Reads it twice, an element at a time: any width and alignment.
    Scalar,
}

impl RowForm {
    /// Returns the fastest form for rows of `width`: the first of `per_thread` (ascending numbers
    /// of elements) with which a block covers a row. `aligned` says that all rows begin and end at
    /// multiples of 16 bytes.
    pub(in crate::ops) fn new(width: i64, aligned: bool, per_thread: &[i64]) -> Self {
        if !aligned {
            return RowForm::Scalar;
        }
        let covers = |&&elements: &&i64| width <= elements * MAX_BLOCK;
        per_thread
            .iter()
            .find(covers)
            .map_or(RowForm::Loop, |&elements| RowForm::Registers(elements))
    }

    /// Returns the threads of a block, for elements of `element_bytes`.
    pub(in crate::ops) fn block(self, width: i64, element_bytes: usize) -> u32 {
        let per_thread = match self {
            RowForm::Registers(elements) => elements,
            RowForm::Loop => 16 / element_bytes as i64,
            RowForm::Scalar => 1,
        };
        let threads = (width as u64).div_ceil(per_thread as u64).clamp(1, MAX_BLOCK as u64);
        (threads as u32).next_multiple_of(32)
    }
}

/// Whether the rows of all tensors are whole, aligned vectors of 16 bytes.
pub(in crate::ops) fn all_vectors(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|tensor| rows_are_vectors(tensor))
}

/// Whether the rows of a tensor all lie the same distance apart.
pub(in crate::ops) fn fits_matrix(tensor: &Tensor) -> bool {
    row_stride(tensor).is_some()
}

fn row_stride(tensor: &Tensor) -> Option<i64> {
    tensor.rows().filter(|rows| rows.inner >= rows.num_rows).map(|rows| rows.inner_stride)
}

/// Returns the distance in elements from one row to the next of a tensor that `fits_matrix`.
pub(in crate::ops) fn matrix_stride(tensor: &Tensor) -> Result<i64> {
    row_stride(tensor).ok_or_else(|| Error::internal("rows at uneven distances"))
}

/// Returns the rows and width of a tensor with elements, where one launch takes them.
pub(in crate::ops) fn rows_and_width(op: &str, tensor: &Tensor) -> Result<(u32, i32)> {
    let width = tensor.width();
    let rows = tensor.num_elements() / width.max(1);
    let in_i32 = |n: i64| i32::try_from(n).ok();
    match (in_i32(rows), in_i32(width)) {
        (Some(rows), Some(width)) => Ok((rows as u32, width)),
        _ => Err(Error::unsupported(format!(
            "{op}: {rows} rows of {width} elements, but at most 2^31 - 1 of both are supported on CUDA"
        ))),
    }
}

/// Returns a launch with one block for each row.
pub(in crate::ops) fn block_per_row(form: RowForm, rows: u32, tensor: &Tensor) -> Launch {
    Launch::linear(rows, form.block(tensor.width(), tensor.element().size_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_cover_rows() {
        let form = |width, aligned| RowForm::new(width, aligned, &[16, 32]);
        assert_eq!(form(8, true), RowForm::Registers(16));
        assert_eq!(form(16 * 1024, true), RowForm::Registers(16));
        assert_eq!(form(16 * 1024 + 8, true), RowForm::Registers(32));
        assert_eq!(form(32 * 1024 + 8, true), RowForm::Loop);
        assert_eq!(form(4096, false), RowForm::Scalar);
        for width in [1, 7, 8, 33, 504, 4096, 16_376, 32_760, 151_936] {
            for aligned in [false, true] {
                for bytes in [2, 4] {
                    let form = form(width, aligned);
                    let block = i64::from(form.block(width, bytes));
                    assert!(
                        block % 32 == 0 && (32..=MAX_BLOCK).contains(&block),
                        "{width}: {block}"
                    );
                    if let RowForm::Registers(elements) = form {
                        assert!(block * elements >= width, "{width}: {block}");
                    }
                }
            }
        }
    }
}
