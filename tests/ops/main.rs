//! The operators against f64 references and golden vectors, on every instruction set of this
//! machine. One op: `cargo test --test ops rms_norm`.

#[path = "../support/mod.rs"]
mod support;

mod attention;
mod compute_context;
mod elementwise;
mod fill;
mod golden;
mod host_attention;
mod host_elementwise;
mod host_gemm;
mod host_support;
mod linear;
mod pool;
mod tensor_attention;
mod tensor_copy;
mod tensor_elementwise;
mod tensor_gemm;
mod tensor_grad_check;
mod tensor_norms;
mod tensor_rows;
mod tensor_softmax;
