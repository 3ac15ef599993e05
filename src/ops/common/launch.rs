//! Shared parts of launches of kernels over rows: names by element type, grids, and rows as kernels
//! find them.

use crate::backend::cuda::kernel_struct;
use crate::error::{Error, Result};
use crate::memory::{RowLayout, Tensor};

/// Runs an expression with `T` standing for the host type of a `DType`.
macro_rules! with_storage {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            crate::memory::DType::F32 => {
                type $T = f32;
                $body
            }
            crate::memory::DType::F16 => {
                type $T = half::f16;
                $body
            }
            crate::memory::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
        }
    };
}
pub(in crate::ops) use with_storage;

/// Returns how many blocks of `per_block` units cover `units`, for a grid; `None` beyond what a
/// grid can have.
pub(in crate::ops) fn num_blocks(units: i64, per_block: i64) -> Option<u32> {
    let blocks = (units as u64).div_ceil(per_block as u64);
    u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32)
}

kernel_struct! {
    /// The rows of a tensor as `csrc/common/rows.cuh` takes them.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::ops) struct KernelRows {
        pub inner: i64,
        pub outer_stride: i64,
        pub inner_stride: i64,
    }
}

/// Whether the CUDA kernels find the rows of a tensor by themselves.
pub(in crate::ops) fn fits_rows(tensor: &Tensor) -> bool {
    tensor.rows().is_some()
}

/// Returns the rows of a tensor that `fits_rows`. A plain matrix has one row per outer step.
pub(in crate::ops) fn row_layout(tensor: &Tensor) -> Result<KernelRows> {
    let RowLayout { num_rows, inner, outer_stride, inner_stride, .. } =
        tensor.rows().ok_or_else(|| Error::internal("a tensor without rows"))?;
    Ok(if inner >= num_rows {
        KernelRows { inner: 1, outer_stride: inner_stride, inner_stride: 0 }
    } else {
        KernelRows { inner, outer_stride, inner_stride }
    })
}

/// Whether every row begins at a multiple of 16 bytes and is a whole number of them.
pub(in crate::ops) fn rows_are_vectors(tensor: &Tensor) -> bool {
    let Some(rows) = tensor.rows() else { return false };
    let vector = 16 / tensor.element().size_bytes() as i64;
    (tensor.data() as usize).is_multiple_of(16)
        && [rows.width, rows.outer_stride, rows.inner_stride].iter().all(|n| n % vector == 0)
}

/// Whether the rows of a tensor all have the same distance.
pub(in crate::ops) fn one_stride(tensor: &Tensor) -> bool {
    row_layout(tensor).is_ok_and(|rows| rows.inner == 1)
}

/// Returns the start of a row.
pub(in crate::ops) fn row_start<T>(tensor: &Tensor, rows: &RowLayout, row: usize) -> *mut T {
    let (row, inner) = (row as i64, rows.inner.max(1));
    let offset = (row / inner) * rows.outer_stride + (row % inner) * rows.inner_stride;
    tensor.data().cast::<T>().wrapping_add(offset as usize)
}

pub(in crate::ops) fn too_wide(x: &Tensor) -> Error {
    Error::unsupported(format!(
        "x has shape {}: its rows are too wide for 32-bit indices",
        x.shape()
    ))
}

/// Whether rows begin at multiples of 16 bytes, whatever their width.
pub(in crate::ops) fn rows_are_aligned(x: &Tensor) -> Result<bool> {
    let bytes = row_layout(x)?.outer_stride * x.element().size_bytes() as i64;
    Ok((x.data() as usize).is_multiple_of(16) && bytes % 16 == 0)
}

/// Whether models are to take only the kernels that every device has: `XSERV_CUDA_PORTABLE=1` in the
/// environment, for comparing and testing.
pub(in crate::ops) fn is_portable() -> bool {
    std::env::var_os("XSERV_CUDA_PORTABLE").is_some_and(|value| value == "1")
}
