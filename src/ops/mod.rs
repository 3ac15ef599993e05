//! The operators of the forward pass, one folder each: the contract and the checks in `mod.rs`, the CPU half in
//! `cpu*.rs`, the CUDA half in `cuda*.rs`, whose kernels are in `csrc/ops/<operator>`. What several are made of is in
//! [`common`].

pub mod activation;
pub mod argmax;
pub mod attention;
pub mod common;
pub mod copy;
pub mod elementwise;
pub mod embedding;
pub mod fill;
pub mod gemm;
pub mod grad_check;
pub mod kv_cache;
pub mod layer_norm;
pub mod linear;
pub mod qk_norm_rope_append;
pub mod rms_norm;
pub mod rope;
pub mod sample;
pub mod silu_mul;
pub mod softmax;
pub mod top_k;
pub mod transpose;
