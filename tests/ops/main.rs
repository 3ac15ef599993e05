//! The operators, one file each, against f64 references and golden vectors, on every instruction
//! set of this machine. One op: `cargo test --test ops rms_norm`.

#[path = "../support/mod.rs"]
mod support;

mod activation;
mod adjust_logits;
mod argmax;
mod attention;
mod compute_context;
mod copy;
mod elementwise;
mod embedding;
mod experts;
mod fill;
mod gemm;
mod golden;
mod grad_check;
mod kv_cache;
mod layer_norm;
mod linear;
mod log_probs;
mod pool;
mod qk_norm_rope_append;
mod quantised;
mod rms_norm;
mod rope;
mod sample;
mod self_test;
mod silu_mul;
mod softmax;
mod top_k;
mod transpose;
