//! Linear layers: `out = x W^T + b`, or the result of an [`Epilogue`].
//!
//! On the CPU a layer is [`cpu::linear`], over packed weights. On a device a [`LinearPlan`] decides
//! once, when a model is loaded, which kernels serve its weights; the layers of a pass are then
//! those of a [`LinearPass`], which also decides which neighbours (norms, gates and the sum into
//! the residual stream) are fused into one kernel.

pub mod cpu;
mod cpu_byte_tiles;
mod cpu_fp8;
mod cpu_integer_rows;
mod cpu_integer_tiles;
mod cpu_integers;
mod cpu_quantised;
mod cpu_rounded_rows;
mod cpu_tiles;
pub mod cuda_fp8;
pub mod cuda_fp8_many;
pub mod cuda_fp8_prefill;
pub mod cuda_gemv;
pub mod cuda_gemv_mma;
pub mod cuda_narrow;
pub mod cuda_narrow_quantised;
pub mod cuda_numbers;
mod cuda_parts;
pub mod cuda_prefill;
pub mod cuda_prefill_heads;
pub mod cuda_prefill_int8;
pub mod cuda_quantised;
pub mod cuda_quantised_blocks;
mod cuda_quantised_few;
pub mod cuda_quantised_many;
pub mod cuda_quantised_one;
pub mod cuda_skinny;
mod host_matrix;
mod matrix;
mod plan;
mod quantised_kernels;
mod residual;
pub mod tensors;

pub use cuda_numbers::scratch_bytes;
pub use host_matrix::{HostMatrix, HostWeight};
pub use matrix::{Matrix, MatrixLayout, ShardAxis, ShardUnit, WeightFormat};
pub use plan::{
    library_workspace_bytes, DecoderSizes, Layer, LinearPass, LinearPlan, Product, MAX_CHAIN_ROWS,
};
pub use residual::{Norm, ResidualStream};

/// What is done with the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `out = round(W x)`
    Store,
    /// `out = round(out + round(W x))`. Devices that share W along its input features add up their
    /// products between the two roundings.
    AddResidual,
    /// `out = round(round(silu(round(G x))) * round(U x))`, where W is G on top of U.
    SwiGlu,
}
