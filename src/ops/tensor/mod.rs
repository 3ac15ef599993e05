//! The operators over tensors, on any device: contract, checks, CPU half, CUDA half; one file an op.
//!
//! Every function checks its arguments once and says in one sentence what does not fit. Tensors may have
//! any strides: a kernel that needs another layout gets a copy in memory of the context, and a result is
//! copied to where it belongs. A result may be the same view as an input where the function says so, and
//! must not overlap an input otherwise. Tensors without elements are valid and nothing happens.
//!
//! On the CPU the work is done on return; on CUDA it is queued on the context's stream. The host kernels
//! are in [`super::host`], the CUDA kernels in `csrc/ops`.

mod check;
mod copy;
mod staging;
mod strided;

pub use copy::copy;

use crate::memory::DType;

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
pub(self) use kernel_name;

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
pub(self) use with_storage;

/// How many blocks of `per_block` units cover `units`, for a grid; `None` beyond what a grid can have.
fn num_blocks(units: i64, per_block: i64) -> Option<u32> {
    let blocks = (units as u64).div_ceil(per_block as u64);
    u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32)
}

/// Bytes of an element, for kernels that only move them.
fn bytes_of(dtype: DType) -> i64 {
    dtype.size_bytes() as i64
}
