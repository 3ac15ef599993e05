//! Operators on typed slices, f32, f16 or bf16: the CPU half of the tensor operators.
//!
//! Tensors are row-major and contiguous unless a stride is passed. Every function checks all shapes
//! once, before anything is computed. Kernels read the storage type, compute in f32 and round once to
//! nearest even. Sums have a fixed order: results do not depend on the number of threads.

pub mod activation;
pub mod argmax;
pub mod attention;
mod attention_flash;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
mod gemv;
pub mod index;
pub mod layer_norm;
pub mod rms_norm;
pub mod rope;
mod rows;
pub mod softmax;
pub mod storage;
pub mod transpose;

pub use activation::{
    activation, activation_in_place, gelu_erf, gelu_tanh, silu, silu_mul, Activation,
};
pub use argmax::{argmax, top_k};
pub use attention::{attention_naive, Attention, HeadStrides, Sequences};
pub use attention_flash::{attention_flash, FlashScratch};
pub use elementwise::{add, cast, mul};
pub use embedding::embedding;
pub use gemm::{gemm, gemm_naive, Gemm, GemmScratch};
pub use index::Index;
pub use layer_norm::layer_norm;
pub use rms_norm::{add_rms_norm, rms_norm};
pub use rope::rope;
pub use softmax::softmax;
pub use storage::Storage;
pub use transpose::transpose;
