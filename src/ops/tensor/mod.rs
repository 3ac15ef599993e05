//! The operators over tensors, on any device: contract, checks, CPU half, CUDA half; one file an op.
//!
//! Every function checks its arguments once and says in one sentence what does not fit. Tensors may have
//! any strides: a kernel that needs another layout gets a copy in memory of the context, and a result is
//! copied to where it belongs. A result may be the same view as an input where the function says so, and
//! must not overlap an input otherwise. Tensors without elements are valid and nothing happens.
//!
//! On the CPU the work is done on return; on CUDA it is queued on the context's stream. The host kernels
//! are in [`super::host`], the CUDA kernels in `csrc/ops`.

mod activation;
mod attention;
mod check;
mod copy;
mod elementwise;
mod embedding;
mod gemm;
mod grad_check;
mod layer_norm;
mod rms_norm;
mod rope;
mod row_kernels;
mod selection;
mod softmax;
mod staging;
mod strided;
mod transpose;

pub use activation::{activation, silu_mul};
pub use attention::{attention, attention_scratch_bytes, AttentionBackend, AttentionOptions};
pub use copy::copy;
pub use elementwise::{add, cast, mul};
pub use embedding::embedding;
pub(crate) use gemm::cublas_workspace_for;
pub use gemm::{
    gemm, gemm_backward, gemm_scratch_bytes, GemmBackend, GemmOptions, SumOrder, WeightShape,
};
pub use grad_check::{grad_check, GradCheck, GradCheckResult};
pub use layer_norm::layer_norm;
pub use rms_norm::{add_rms_norm, rms_norm, AddRmsNorm};
pub use rope::{rope, rope_table, RopeHeads};
pub use selection::{argmax, top_k};
pub use softmax::softmax;
pub use transpose::transpose;

use crate::error::{Error, Result};
use crate::memory::{RowLayout, Tensor};

/// The kernel of a family that serves an element type: `csrc/common/dtype.cuh` gives them their names.
macro_rules! kernel_name {
    ($stem:literal, $dtype:expr) => {
        match $dtype {
            crate::memory::DType::F32 => concat!("xserv_", $stem, "_f32"),
            crate::memory::DType::F16 => concat!("xserv_", $stem, "_f16"),
            crate::memory::DType::BF16 => concat!("xserv_", $stem, "_bf16"),
        }
    };
}
use kernel_name;

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
use with_storage;

/// How many blocks of `per_block` units cover `units`, for a grid; `None` beyond what a grid can have.
fn num_blocks(units: i64, per_block: i64) -> Option<u32> {
    let blocks = (units as u64).div_ceil(per_block as u64);
    u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32)
}

/// The rows of a tensor as `csrc/common/rows.cuh` takes them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct KernelRows {
    inner: i64,
    outer_stride: i64,
    inner_stride: i64,
}
const _: () = assert!(size_of::<KernelRows>() == 24);

/// True for tensors whose rows the CUDA kernels find by themselves.
fn fits_rows(tensor: &Tensor) -> bool {
    tensor.rows().is_some()
}

/// The rows of a tensor that `fits_rows`. A plain matrix has one row to an outer step.
fn row_layout(tensor: &Tensor) -> Result<KernelRows> {
    let RowLayout { num_rows, inner, outer_stride, inner_stride, .. } =
        tensor.rows().ok_or_else(|| Error::internal("a tensor without rows"))?;
    Ok(match inner >= num_rows {
        true => KernelRows { inner: 1, outer_stride: inner_stride, inner_stride: 0 },
        false => KernelRows { inner, outer_stride, inner_stride },
    })
}

/// True if every row begins at a multiple of 16 bytes and is a whole number of them.
fn rows_are_vectors(tensor: &Tensor) -> bool {
    let Some(rows) = tensor.rows() else { return false };
    let vector = 16 / tensor.element().size_bytes() as i64;
    (tensor.data() as usize).is_multiple_of(16)
        && [rows.width, rows.outer_stride, rows.inner_stride].iter().all(|n| n % vector == 0)
}
