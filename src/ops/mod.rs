//! The operators of the forward pass, one folder each: the contract and the checks in `mod.rs`, the
//! CPU half in `cpu*.rs`, the CUDA half in `cuda*.rs`, whose kernels are in `csrc/ops/<operator>`.
//! The parts that several share are in [`common`].
//!
//! Operators round once, at the end, unless the table says that they round after each step: these
//! round each intermediate to the type of the tensors, as Transformers does, so that a model gives
//! the tokens that it gives there. Operators without a C function are parts of the models' forward
//! pass.
//!
//! | operator | forms (files) | C functions | test |
//! |---|---|---|---|
//! | [`activation`] | `cpu` typed slices; `cuda` tensors; `cuda_rounded` GELU rounded after each step | `xserv_op_gelu`, `xserv_op_gelu_tanh`, `xserv_op_silu` | `tests/ops/activation.rs` |
//! | [`adjust_logits`] | `cpu` a row of f32, changed or masked; `cuda` rows of f32, and masks while rows become f32 |  | `tests/ops/adjust_logits.rs` |
//! | [`argmax`] | `cpu` typed slices; `cpu_checked` f32 rows that must be numbers; `cuda` tensors | `xserv_op_argmax` | `tests/ops/argmax.rs` |
//! | [`attention`] | `cpu_naive`, `cpu_flash` typed slices, through `cpu`; `cpu_paged` the paged cache of the CPU, both with `cpu_online_softmax` or, in tiles, `cpu_online_tiles`, and `cpu_widen` for panels of fewer bits; `widened` a cache of 8-bit floats for kernels of wider numbers; `cuda_naive`, `cuda_flash`, `cuda_flash_wgmma`, `cuda_split_kv` tensors, through `choice` and `cuda`, with `cuda_params`; `cuda_fused` with `cuda_fused_kernels`, `cuda_fused_project` one new token a sequence, rounded after each step; `plan` which of them serve a model; `layouts` the structs of the kernels, for the tests | `xserv_op_attention` | `tests/ops/attention/` |
//! | [`copy`] | `mod` both devices | `xserv_op_copy` | `tests/ops/copy.rs` |
//! | [`elementwise`] | `cpu` typed slices; `cuda` tensors; `binary` names the functions | `xserv_op_add`, `xserv_op_mul`, `xserv_op_cast` | `tests/ops/elementwise.rs` |
//! | [`embedding`] | `cpu` typed slices; `cpu_packed` packed weights; `cuda` tensors; `cuda_chosen` tokens that the step before chose, `cuda_quantised` in a quantised table | `xserv_op_embedding` | `tests/ops/embedding.rs` |
//! | [`experts`] | `cpu` tokens in f32, matrices as linear layers take them; `cuda` tokens of a model, through `cuda_routes` and `cuda_products`, with the `matrices` of all experts, rounded after each step |  | `tests/ops/experts.rs` |
//! | [`fill`] | `cpu` typed slices and bytes of files; `cuda` tensors |  | `tests/ops/fill.rs` |
//! | [`gemm`] | `cpu`, `cpu_gemv` typed slices, with `cpu_shape` and `cpu_scale`, and `cpu_tiles` for bf16; `options` what a caller may ask for; `cuda` tensors, through `choice` and `layout`; `backward` gradients | `xserv_op_gemm`, `xserv_op_gemm_backward` | `tests/ops/gemm/` |
//! | [`grad_check`] | `mod` on the host | `xserv_grad_check` | `tests/ops/grad_check.rs` |
//! | [`kv_cache`] | `layout` the blocks of the CPU; `cpu` appends to them; `cuda` appends; `cuda_swap` blocks to the host and back; `widen` blocks of 8-bit floats as wider numbers |  | `tests/ops/kv_cache.rs` |
//! | [`layer_norm`] | `cpu` typed slices; `cuda` tensors | `xserv_op_layer_norm` | `tests/ops/layer_norm.rs` |
//! | [`linear`] | `cpu`, `cpu_quantised`, `cpu_integers`, `cpu_byte_tiles`, `cpu_integer_rows`, `cpu_integer_tiles`, `cpu_fp8`, `cpu_tiles` packed weights, with `cpu_rounded_rows` and `host_matrix`; `cuda_gemv`, `cuda_gemv_mma` one or two tokens, `cuda_narrow` and `cuda_narrow_quantised` up to 8 of narrow models; `cuda_skinny` up to 128 tokens; `cuda_prefill`, `cuda_prefill_heads` more, `cuda_prefill_int8` with integers of 8 bits; `cuda_quantised` any number with quantised weights, `cuda_quantised_few` up to 16, and on Hopper `cuda_quantised_one` a single one of wide models and `cuda_quantised_many` more, with `cuda_quantised_blocks`, and `quantised_kernels` by what a weight is stored as; `cuda_numbers` by the numbers of such weights; `cuda_fp8` any number with activations in FP8, `cuda_fp8_many` many and `cuda_fp8_prefill` prompts on Hopper; all of these rounded after each step; `cuda_parts` how products are divided among multiprocessors; `plan` which of them serve a model, with `matrix` and `residual`; `tensors` a quantised weight of a caller's | `xserv_op_linear_quantised` | `tests/ops/linear/` |
//! | [`log_probs`] | `cpu` a row of f32; `cuda` tensors |  | `tests/ops/log_probs.rs` |
//! | [`qk_norm_rope_append`] | `mod` on a GPU, rounded after each step; `cpu` |  | `tests/ops/qk_norm_rope_append.rs` |
//! | [`quantised`] | `format` what is stored; `matrix` rows on the host; `quantise` makes them, with `four_bits` the search for scales; `panels` the order in which the CPU reads them, `panel_tiles` makes bf16 of them; `tiles` the order in which kernels read them; `activations` activations in FP8, `cuda_activations` on a GPU, `cuda_integers` those in integers; `cuda` tiles on a GPU as dense rows; `tensors` codes, scales and zeros of a caller's | `xserv_op_quantise`, `xserv_op_dequantise` | `tests/ops/quantised/` |
//! | [`rms_norm`] | `cpu` typed slices; `cpu_heads` heads inside rows; `cuda` tensors; `cuda_rounded` rounded after each step; `tensors` the parameters of the sum with a residual | `xserv_op_rms_norm`, `xserv_op_add_rms_norm` | `tests/ops/rms_norm.rs` |
//! | [`rope`] | `cpu` typed slices; `angles` positions, tables and pairs; `cpu_table` a model's table on the CPU; `cuda` tensors; `cuda_rounded` a model's table on a GPU | `xserv_op_rope`, `xserv_op_rope_table` | `tests/ops/rope.rs` |
//! | [`sample`] | `mod` on a GPU; `cpu` a row of f32 |  | `tests/ops/sample.rs` |
//! | [`silu_mul`] | `cpu` typed slices; `cpu_stacked` both halves in a row; `cuda` tensors; `cuda_rounded` rounded after each step | `xserv_op_silu_mul` | `tests/ops/silu_mul.rs` |
//! | [`softmax`] | `cpu` typed slices; `cuda` tensors | `xserv_op_softmax` | `tests/ops/softmax.rs` |
//! | [`top_k`] | `cpu` typed slices; `cuda` tensors | `xserv_op_top_k` | `tests/ops/top_k.rs` |
//! | [`transpose`] | `cpu` typed slices; `mod` tensors on a GPU | `xserv_op_transpose` | `tests/ops/transpose.rs` |
//!
//! A new operator is a folder here with a row above, a folder of kernels in `csrc/ops`, a C
//! function in `src/ffi/ops_*.rs` if C is to see it, and a test that compares it with a reference
//! in f64 (`tests/support/reference.rs`). `tests/abi/layering.rs` holds the table, the tests and
//! the imports between operators to this.

pub mod activation;
pub mod adjust_logits;
pub mod argmax;
pub mod attention;
pub mod common;
pub mod copy;
pub mod elementwise;
pub mod embedding;
pub mod experts;
pub mod fill;
pub mod gemm;
pub mod grad_check;
pub mod kv_cache;
pub mod layer_norm;
#[cfg(test)]
mod layouts;
pub mod linear;
pub mod log_probs;
pub mod qk_norm_rope_append;
pub mod quantised;
pub mod rms_norm;
pub mod rope;
pub mod sample;
pub mod silu_mul;
pub mod softmax;
pub mod top_k;
pub mod transpose;
