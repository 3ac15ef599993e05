//! The kernels of `csrc` as constants. A launch takes such a constant, so a name that the compiler of
//! the kernels did not produce does not compile here either.
//!
//! A constant is called like the kernel, without `xserv_`, in capitals. Kernels whose names differ in
//! the dtype at their end share one constant: `xserv_add_vec_f16` is `ADD_VEC.f16`.
//!
//! The list is generated: `XSERV_BLESS=1 cargo build` rewrites it where there is nvcc, and a build with
//! nvcc fails if it differs from what was compiled (`csrc/kernel_list.rs`).

use crate::error::{Error, Result};
use crate::memory::DType;

/// A kernel and the source that it is compiled from. Only this file makes values of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    source: &'static str,
    name: &'static str,
}

impl Kernel {
    /// Returns the source: its path without `csrc/ops/` and the extension.
    pub(super) fn source(self) -> &'static str {
        self.source
    }

    /// Returns the name of the kernel, such as `xserv_mark`.
    pub(super) fn name(self) -> &'static str {
        self.name
    }
}

/// The same kernel for each dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelByDType {
    pub f32: Kernel,
    pub f16: Kernel,
    pub bf16: Kernel,
}

impl KernelByDType {
    /// Returns the kernel for a dtype.
    pub(crate) const fn of(self, dtype: DType) -> Kernel {
        match dtype {
            DType::F32 => self.f32,
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
        }
    }
}

/// The same kernel for both 16-bit dtypes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelByHalf {
    pub f16: Kernel,
    pub bf16: Kernel,
}

impl KernelByHalf {
    /// Returns the kernel for a dtype; `None` for f32.
    pub(crate) const fn of(self, dtype: DType) -> Option<Kernel> {
        match dtype {
            DType::F32 => None,
            DType::F16 => Some(self.f16),
            DType::BF16 => Some(self.bf16),
        }
    }

    /// The same for callers that have excluded f32, which is an internal error here.
    pub(crate) fn of_half(self, dtype: DType) -> Result<Kernel> {
        self.of(dtype)
            .ok_or_else(|| Error::internal(format!("{} has no variant for f32", self.f16.name)))
    }
}

/// One constant: a kernel, or a family with the dtypes that it has.
macro_rules! constant {
    ($source:literal $constant:ident $name:literal) => {
        pub(crate) const $constant: Kernel = Kernel { source: $source, name: $name };
    };
    ($source:literal $constant:ident $stem:literal f16 bf16) => {
        pub(crate) const $constant: KernelByHalf = KernelByHalf {
            f16: Kernel { source: $source, name: concat!($stem, "_f16") },
            bf16: Kernel { source: $source, name: concat!($stem, "_bf16") },
        };
    };
    ($source:literal $constant:ident $stem:literal f32 f16 bf16) => {
        pub(crate) const $constant: KernelByDType = KernelByDType {
            f32: Kernel { source: $source, name: concat!($stem, "_f32") },
            f16: Kernel { source: $source, name: concat!($stem, "_f16") },
            bf16: Kernel { source: $source, name: concat!($stem, "_bf16") },
        };
    };
}

/// The list: sources, and under each the constants, names and dtypes of its kernels.
macro_rules! kernels {
    ($($source:literal { $($constant:ident $name:literal $($dtype:ident)*;)* })*) => {
        $($(constant! { $source $constant $name $($dtype)* })*)*
    };
}

kernels! {
    "activation/activation" {
        GELU_ERF_SCALAR "xserv_gelu_erf_scalar" f32 f16 bf16;
        GELU_ERF_VEC "xserv_gelu_erf_vec" f32 f16 bf16;
        GELU_TANH_SCALAR "xserv_gelu_tanh_scalar" f32 f16 bf16;
        GELU_TANH_VEC "xserv_gelu_tanh_vec" f32 f16 bf16;
        SILU_SCALAR "xserv_silu_scalar" f32 f16 bf16;
        SILU_VEC "xserv_silu_vec" f32 f16 bf16;
    }
    "activation/gelu_tanh_rounded" {
        GELU_TANH_ROUNDED_SCALAR "xserv_gelu_tanh_rounded_scalar" f32 f16 bf16;
        GELU_TANH_ROUNDED_VEC "xserv_gelu_tanh_rounded_vec" f32 f16 bf16;
    }
    "adjust_logits/adjust_logits" {
        ADJUST_LOGITS "xserv_adjust_logits";
    }
    "adjust_logits/mask_logits" {
        MASK_IN_PLACE_BF16 "xserv_mask_in_place_bf16";
        MASK_LOGITS "xserv_mask_logits" f32 f16 bf16;
    }
    "argmax/argmax" {
        ARGMAX_I32 "xserv_argmax_i32" f32 f16 bf16;
        ARGMAX_I64 "xserv_argmax_i64" f32 f16 bf16;
        ARGMAX_MERGE_I32 "xserv_argmax_merge_i32";
        ARGMAX_MERGE_I64 "xserv_argmax_merge_i64";
        ARGMAX_SCALAR_I32 "xserv_argmax_scalar_i32" f32 f16 bf16;
        ARGMAX_SCALAR_I64 "xserv_argmax_scalar_i64" f32 f16 bf16;
    }
    "attention/flash" {
        ATTENTION_FLASH_D128 "xserv_attention_flash_d128" f32 f16 bf16;
        ATTENTION_FLASH_D128_SHORT "xserv_attention_flash_d128_short" f16 bf16;
        ATTENTION_FLASH_D128_SHORT_WINDOW "xserv_attention_flash_d128_short_window" f16 bf16;
        ATTENTION_FLASH_D128_WINDOW "xserv_attention_flash_d128_window" f16 bf16;
        ATTENTION_FLASH_D256 "xserv_attention_flash_d256" f32 f16 bf16;
        ATTENTION_FLASH_D256_WINDOW "xserv_attention_flash_d256_window" f16 bf16;
        ATTENTION_FLASH_D64 "xserv_attention_flash_d64" f32 f16 bf16;
        ATTENTION_FLASH_D64_SHORT "xserv_attention_flash_d64_short" f16 bf16;
        ATTENTION_FLASH_D64_SHORT_WINDOW "xserv_attention_flash_d64_short_window" f16 bf16;
        ATTENTION_FLASH_D64_WINDOW "xserv_attention_flash_d64_window" f16 bf16;
        ATTENTION_FLASH_D80 "xserv_attention_flash_d80" f32 f16 bf16;
        ATTENTION_FLASH_D80_WINDOW "xserv_attention_flash_d80_window" f16 bf16;
        ATTENTION_FLASH_D96 "xserv_attention_flash_d96" f32 f16 bf16;
        ATTENTION_FLASH_D96_WINDOW "xserv_attention_flash_d96_window" f16 bf16;
    }
    "attention/flash_wgmma" {
        ATTENTION_FLASH_WGMMA_128 "xserv_attention_flash_wgmma_128" f16 bf16;
        ATTENTION_FLASH_WGMMA_128_EARLY "xserv_attention_flash_wgmma_128_early" f16 bf16;
        ATTENTION_FLASH_WGMMA_128_SHORT "xserv_attention_flash_wgmma_128_short" f16 bf16;
        ATTENTION_FLASH_WGMMA_128_SHORT_WINDOW "xserv_attention_flash_wgmma_128_short_window" f16 bf16;
        ATTENTION_FLASH_WGMMA_128_WINDOW "xserv_attention_flash_wgmma_128_window" f16 bf16;
        ATTENTION_FLASH_WGMMA_64 "xserv_attention_flash_wgmma_64" f16 bf16;
        ATTENTION_FLASH_WGMMA_64_EARLY "xserv_attention_flash_wgmma_64_early" f16 bf16;
        ATTENTION_FLASH_WGMMA_64_SHORT "xserv_attention_flash_wgmma_64_short" f16 bf16;
        ATTENTION_FLASH_WGMMA_64_SHORT_WINDOW "xserv_attention_flash_wgmma_64_short_window" f16 bf16;
        ATTENTION_FLASH_WGMMA_64_WINDOW "xserv_attention_flash_wgmma_64_window" f16 bf16;
        ATTENTION_FLASH_WGMMA_MERGE "xserv_attention_flash_wgmma_merge" f16 bf16;
        ATTENTION_FLASH_WGMMA_SEGMENTS "xserv_attention_flash_wgmma_segments" f16 bf16;
        ATTENTION_FLASH_WGMMA_SEGMENTS_SHORT "xserv_attention_flash_wgmma_segments_short" f16 bf16;
        ATTENTION_FLASH_WGMMA_SEGMENTS_SHORT_WINDOW "xserv_attention_flash_wgmma_segments_short_window" f16 bf16;
        ATTENTION_FLASH_WGMMA_SEGMENTS_WINDOW "xserv_attention_flash_wgmma_segments_window" f16 bf16;
    }
    "attention/fused" {
        ATTENTION_FUSED_CHUNKED_D128 "xserv_attention_fused_chunked_d128" f16 bf16;
        ATTENTION_FUSED_CHUNKED_D256 "xserv_attention_fused_chunked_d256" f16 bf16;
        ATTENTION_FUSED_CHUNKED_D64 "xserv_attention_fused_chunked_d64" f16 bf16;
        ATTENTION_FUSED_CHUNKED_D80 "xserv_attention_fused_chunked_d80" f16 bf16;
        ATTENTION_FUSED_CHUNKED_D96 "xserv_attention_fused_chunked_d96" f16 bf16;
        ATTENTION_FUSED_CHUNKED_FP8_D128 "xserv_attention_fused_chunked_fp8_d128" f16 bf16;
        ATTENTION_FUSED_CHUNKED_FP8_D256 "xserv_attention_fused_chunked_fp8_d256" f16 bf16;
        ATTENTION_FUSED_CHUNKED_FP8_D64 "xserv_attention_fused_chunked_fp8_d64" f16 bf16;
        ATTENTION_FUSED_CHUNKED_FP8_D80 "xserv_attention_fused_chunked_fp8_d80" f16 bf16;
        ATTENTION_FUSED_CHUNKED_FP8_D96 "xserv_attention_fused_chunked_fp8_d96" f16 bf16;
        ATTENTION_FUSED_CLUSTER_D128 "xserv_attention_fused_cluster_d128" f16 bf16;
        ATTENTION_FUSED_CLUSTER_D256 "xserv_attention_fused_cluster_d256" f16 bf16;
        ATTENTION_FUSED_CLUSTER_D64 "xserv_attention_fused_cluster_d64" f16 bf16;
        ATTENTION_FUSED_CLUSTER_D80 "xserv_attention_fused_cluster_d80" f16 bf16;
        ATTENTION_FUSED_CLUSTER_D96 "xserv_attention_fused_cluster_d96" f16 bf16;
        ATTENTION_FUSED_CLUSTER_FP8_D128 "xserv_attention_fused_cluster_fp8_d128" f16 bf16;
        ATTENTION_FUSED_CLUSTER_FP8_D256 "xserv_attention_fused_cluster_fp8_d256" f16 bf16;
        ATTENTION_FUSED_CLUSTER_FP8_D64 "xserv_attention_fused_cluster_fp8_d64" f16 bf16;
        ATTENTION_FUSED_CLUSTER_FP8_D80 "xserv_attention_fused_cluster_fp8_d80" f16 bf16;
        ATTENTION_FUSED_CLUSTER_FP8_D96 "xserv_attention_fused_cluster_fp8_d96" f16 bf16;
    }
    "attention/fused_project" {
        ATTENTION_FUSED_PROJECT_2 "xserv_attention_fused_project_2" f16 bf16;
        ATTENTION_FUSED_PROJECT_3 "xserv_attention_fused_project_3" f16 bf16;
        ATTENTION_FUSED_PROJECT_FP8_2 "xserv_attention_fused_project_fp8_2" f16 bf16;
        ATTENTION_FUSED_PROJECT_FP8_3 "xserv_attention_fused_project_fp8_3" f16 bf16;
    }
    "attention/naive" {
        ATTENTION_NAIVE_OUTPUT "xserv_attention_naive_output" f32 f16 bf16;
        ATTENTION_NAIVE_SCORES "xserv_attention_naive_scores" f32 f16 bf16;
        ATTENTION_NAIVE_SOFTMAX "xserv_attention_naive_softmax";
    }
    "attention/split_kv" {
        ATTENTION_SPLIT_KV_D128 "xserv_attention_split_kv_d128" f32 f16 bf16;
        ATTENTION_SPLIT_KV_D256 "xserv_attention_split_kv_d256" f32 f16 bf16;
        ATTENTION_SPLIT_KV_D64 "xserv_attention_split_kv_d64" f32 f16 bf16;
        ATTENTION_SPLIT_KV_D80 "xserv_attention_split_kv_d80" f32 f16 bf16;
        ATTENTION_SPLIT_KV_D96 "xserv_attention_split_kv_d96" f32 f16 bf16;
        ATTENTION_SPLIT_KV_FP8_D128 "xserv_attention_split_kv_fp8_d128" f32 f16 bf16;
        ATTENTION_SPLIT_KV_FP8_D256 "xserv_attention_split_kv_fp8_d256" f32 f16 bf16;
        ATTENTION_SPLIT_KV_FP8_D64 "xserv_attention_split_kv_fp8_d64" f32 f16 bf16;
        ATTENTION_SPLIT_KV_FP8_D80 "xserv_attention_split_kv_fp8_d80" f32 f16 bf16;
        ATTENTION_SPLIT_KV_FP8_D96 "xserv_attention_split_kv_fp8_d96" f32 f16 bf16;
    }
    "backend/mark" {
        MARK "xserv_mark";
    }
    "copy/copy" {
        COPY_STRIDED_B16 "xserv_copy_strided_b16";
        COPY_STRIDED_B2 "xserv_copy_strided_b2";
        COPY_STRIDED_B4 "xserv_copy_strided_b4";
        COPY_STRIDED_B8 "xserv_copy_strided_b8";
    }
    "elementwise/cast" {
        CAST_BF16_F16 "xserv_cast_bf16_f16";
        CAST_BF16_F32 "xserv_cast_bf16_f32";
        CAST_F16_BF16 "xserv_cast_f16_bf16";
        CAST_F16_F32 "xserv_cast_f16_f32";
        CAST_F32_BF16 "xserv_cast_f32_bf16";
        CAST_F32_F16 "xserv_cast_f32_f16";
        CAST_STRIDED_BF16_F16 "xserv_cast_strided_bf16_f16";
        CAST_STRIDED_BF16_F32 "xserv_cast_strided_bf16_f32";
        CAST_STRIDED_F16_BF16 "xserv_cast_strided_f16_bf16";
        CAST_STRIDED_F16_F32 "xserv_cast_strided_f16_f32";
        CAST_STRIDED_F32_BF16 "xserv_cast_strided_f32_bf16";
        CAST_STRIDED_F32_F16 "xserv_cast_strided_f32_f16";
    }
    "elementwise/elementwise" {
        ADD_SCALAR "xserv_add_scalar" f32 f16 bf16;
        ADD_STRIDED "xserv_add_strided" f32 f16 bf16;
        ADD_STRIDED_VEC "xserv_add_strided_vec" f32 f16 bf16;
        ADD_VEC "xserv_add_vec" f32 f16 bf16;
        MUL_SCALAR "xserv_mul_scalar" f32 f16 bf16;
        MUL_STRIDED "xserv_mul_strided" f32 f16 bf16;
        MUL_STRIDED_VEC "xserv_mul_strided_vec" f32 f16 bf16;
        MUL_VEC "xserv_mul_vec" f32 f16 bf16;
    }
    "embedding/chosen" {
        EMBEDDING_CHOSEN_B16 "xserv_embedding_chosen_b16";
        EMBEDDING_CHOSEN_B2 "xserv_embedding_chosen_b2";
    }
    "embedding/embedding" {
        EMBEDDING_I32_B16 "xserv_embedding_i32_b16";
        EMBEDDING_I32_B2 "xserv_embedding_i32_b2";
        EMBEDDING_I32_B4 "xserv_embedding_i32_b4";
        EMBEDDING_I64_B16 "xserv_embedding_i64_b16";
        EMBEDDING_I64_B2 "xserv_embedding_i64_b2";
        EMBEDDING_I64_B4 "xserv_embedding_i64_b4";
    }
    "embedding/quantised" {
        EMBEDDING_QUANTISED "xserv_embedding_quantised" f32 f16 bf16;
    }
    "experts/combine" {
        EXPERTS_COMBINE_ONE "xserv_experts_combine_one" f32 f16 bf16;
        EXPERTS_COMBINE_VEC "xserv_experts_combine_vec" f32 f16 bf16;
    }
    "experts/normed_route" {
        EXPERTS_NORMED_ROUTE "xserv_experts_normed_route" f16 bf16;
    }
    "experts/quantised" {
        EXPERTS_QUANTISED_FP8_32 "xserv_experts_quantised_fp8_32" f16 bf16;
        EXPERTS_QUANTISED_FP8_64 "xserv_experts_quantised_fp8_64" f16 bf16;
        EXPERTS_QUANTISED_FP8_8 "xserv_experts_quantised_fp8_8" f16 bf16;
        EXPERTS_QUANTISED_INT4_32 "xserv_experts_quantised_int4_32" f16 bf16;
        EXPERTS_QUANTISED_INT4_64 "xserv_experts_quantised_int4_64" f16 bf16;
        EXPERTS_QUANTISED_INT4_8 "xserv_experts_quantised_int4_8" f16 bf16;
        EXPERTS_QUANTISED_INT8_32 "xserv_experts_quantised_int8_32" f16 bf16;
        EXPERTS_QUANTISED_INT8_64 "xserv_experts_quantised_int8_64" f16 bf16;
        EXPERTS_QUANTISED_INT8_8 "xserv_experts_quantised_int8_8" f16 bf16;
    }
    "experts/route" {
        EXPERTS_ROUTE "xserv_experts_route" f32 f16 bf16;
        EXPERTS_SORT "xserv_experts_sort";
    }
    "experts/tiled" {
        EXPERTS_TILED_PLAIN "xserv_experts_tiled_plain" f32 f16 bf16;
        EXPERTS_TILED_SWIGLU "xserv_experts_tiled_swiglu" f32 f16 bf16;
    }
    "experts/wgmma" {
        EXPERTS_PLAIN_128X16 "xserv_experts_plain_128x16" f16 bf16;
        EXPERTS_PLAIN_128X64 "xserv_experts_plain_128x64" f16 bf16;
        EXPERTS_PLAIN_256X128 "xserv_experts_plain_256x128" f16 bf16;
        EXPERTS_SWIGLU_128X16 "xserv_experts_swiglu_128x16" f16 bf16;
        EXPERTS_SWIGLU_128X64 "xserv_experts_swiglu_128x64" f16 bf16;
        EXPERTS_SWIGLU_256X128 "xserv_experts_swiglu_256x128" f16 bf16;
    }
    "fill/fill" {
        FILL "xserv_fill" f32 f16 bf16;
    }
    "gemm/gemv" {
        GEMV_M1 "xserv_gemv_m1" f32 f16 bf16;
        GEMV_M2 "xserv_gemv_m2" f32 f16 bf16;
        GEMV_M4 "xserv_gemv_m4" f32 f16 bf16;
        GEMV_M8 "xserv_gemv_m8" f32 f16 bf16;
        GEMV_NN_M1 "xserv_gemv_nn_m1" f32 f16 bf16;
        GEMV_NN_M8 "xserv_gemv_nn_m8" f32 f16 bf16;
        GEMV_TENSOR_CORE "xserv_gemv_tensor_core" f16 bf16;
    }
    "gemm/tensor_core" {
        GEMM_SPLIT_K_REDUCE "xserv_gemm_split_k_reduce" f16 bf16;
        GEMM_TENSOR_CORE_128X128_NN "xserv_gemm_tensor_core_128x128_nn" f16 bf16;
        GEMM_TENSOR_CORE_128X128_NT "xserv_gemm_tensor_core_128x128_nt" f16 bf16;
        GEMM_TENSOR_CORE_128X128_TN "xserv_gemm_tensor_core_128x128_tn" f16 bf16;
        GEMM_TENSOR_CORE_128X128_TT "xserv_gemm_tensor_core_128x128_tt" f16 bf16;
        GEMM_TENSOR_CORE_128X256_NN "xserv_gemm_tensor_core_128x256_nn" f16 bf16;
        GEMM_TENSOR_CORE_128X256_NT "xserv_gemm_tensor_core_128x256_nt" f16 bf16;
        GEMM_TENSOR_CORE_128X256_TN "xserv_gemm_tensor_core_128x256_tn" f16 bf16;
        GEMM_TENSOR_CORE_128X256_TT "xserv_gemm_tensor_core_128x256_tt" f16 bf16;
        GEMM_TENSOR_CORE_64X128_NN "xserv_gemm_tensor_core_64x128_nn" f16 bf16;
        GEMM_TENSOR_CORE_64X128_NT "xserv_gemm_tensor_core_64x128_nt" f16 bf16;
        GEMM_TENSOR_CORE_64X128_TN "xserv_gemm_tensor_core_64x128_tn" f16 bf16;
        GEMM_TENSOR_CORE_64X128_TT "xserv_gemm_tensor_core_64x128_tt" f16 bf16;
        GEMM_TENSOR_CORE_64X64_NN "xserv_gemm_tensor_core_64x64_nn" f16 bf16;
        GEMM_TENSOR_CORE_64X64_NT "xserv_gemm_tensor_core_64x64_nt" f16 bf16;
        GEMM_TENSOR_CORE_64X64_TN "xserv_gemm_tensor_core_64x64_tn" f16 bf16;
        GEMM_TENSOR_CORE_64X64_TT "xserv_gemm_tensor_core_64x64_tt" f16 bf16;
    }
    "gemm/tiled" {
        GEMM_NAIVE "xserv_gemm_naive" f32 f16 bf16;
        GEMM_SIMT_NN_F32 "xserv_gemm_simt_nn_f32";
        GEMM_SIMT_NT_F32 "xserv_gemm_simt_nt_f32";
        GEMM_SIMT_TN_F32 "xserv_gemm_simt_tn_f32";
        GEMM_SIMT_TT_F32 "xserv_gemm_simt_tt_f32";
        GEMM_TILED "xserv_gemm_tiled" f32 f16 bf16;
    }
    "gemm/wgmma" {
        GEMM_WGMMA_128X128_NN "xserv_gemm_wgmma_128x128_nn" f16 bf16;
        GEMM_WGMMA_128X128_NT "xserv_gemm_wgmma_128x128_nt" f16 bf16;
        GEMM_WGMMA_128X128_PARTS_NT "xserv_gemm_wgmma_128x128_parts_nt" f16 bf16;
        GEMM_WGMMA_128X128_TN "xserv_gemm_wgmma_128x128_tn" f16 bf16;
        GEMM_WGMMA_128X128_TT "xserv_gemm_wgmma_128x128_tt" f16 bf16;
        GEMM_WGMMA_128X256_NN "xserv_gemm_wgmma_128x256_nn" f16 bf16;
        GEMM_WGMMA_128X256_NT "xserv_gemm_wgmma_128x256_nt" f16 bf16;
        GEMM_WGMMA_128X256_TN "xserv_gemm_wgmma_128x256_tn" f16 bf16;
        GEMM_WGMMA_128X256_TT "xserv_gemm_wgmma_128x256_tt" f16 bf16;
    }
    "kv_cache/append" {
        KV_CACHE_APPEND "xserv_kv_cache_append";
        KV_CACHE_APPEND_FP8 "xserv_kv_cache_append_fp8" f32 f16 bf16;
    }
    "kv_cache/swap" {
        KV_CACHE_SWAP "xserv_kv_cache_swap";
    }
    "kv_cache/widen" {
        KV_CACHE_WIDEN "xserv_kv_cache_widen" f32 f16 bf16;
    }
    "layer_norm/layer_norm" {
        LAYER_NORM_LOOP "xserv_layer_norm_loop" f32 f16 bf16;
        LAYER_NORM_ROW "xserv_layer_norm_row" f32 f16 bf16;
        LAYER_NORM_SCALAR "xserv_layer_norm_scalar" f32 f16 bf16;
        LAYER_NORM_WALK "xserv_layer_norm_walk" f32 f16 bf16;
    }
    "linear/fp8" {
        LINEAR_FP8_16 "xserv_linear_fp8_16" f16 bf16;
        LINEAR_FP8_32 "xserv_linear_fp8_32" f16 bf16;
        LINEAR_FP8_4 "xserv_linear_fp8_4" f16 bf16;
        LINEAR_FP8_64 "xserv_linear_fp8_64" f16 bf16;
        LINEAR_FP8_8 "xserv_linear_fp8_8" f16 bf16;
        LINEAR_FP8_OWN_2 "xserv_linear_fp8_own_2" f16 bf16;
        LINEAR_FP8_OWN_3 "xserv_linear_fp8_own_3" f16 bf16;
    }
    "linear/fp8_many" {
        LINEAR_FP8_MANY_128X2 "xserv_linear_fp8_many_128x2" f16 bf16;
        LINEAR_FP8_MANY_128X3 "xserv_linear_fp8_many_128x3" f16 bf16;
        LINEAR_FP8_MANY_32X2 "xserv_linear_fp8_many_32x2" f16 bf16;
        LINEAR_FP8_MANY_32X3 "xserv_linear_fp8_many_32x3" f16 bf16;
        LINEAR_FP8_MANY_64X2 "xserv_linear_fp8_many_64x2" f16 bf16;
        LINEAR_FP8_MANY_64X3 "xserv_linear_fp8_many_64x3" f16 bf16;
        LINEAR_FP8_MANY_96X2 "xserv_linear_fp8_many_96x2" f16 bf16;
        LINEAR_FP8_MANY_96X3 "xserv_linear_fp8_many_96x3" f16 bf16;
    }
    "linear/fp8_prefill" {
        LINEAR_FP8_PREFILL_128X2 "xserv_linear_fp8_prefill_128x2" f16 bf16;
        LINEAR_FP8_PREFILL_128X3 "xserv_linear_fp8_prefill_128x3" f16 bf16;
        LINEAR_FP8_PREFILL_192X2 "xserv_linear_fp8_prefill_192x2" f16 bf16;
        LINEAR_FP8_PREFILL_256X2 "xserv_linear_fp8_prefill_256x2" f16 bf16;
    }
    "linear/gemv" {
        LINEAR_GEMV_BOUNDED_NORM_1 "xserv_linear_gemv_bounded_norm_1" f16 bf16;
        LINEAR_GEMV_BOUNDED_NORM_2 "xserv_linear_gemv_bounded_norm_2" f16 bf16;
        LINEAR_GEMV_BOUNDED_NORM_4 "xserv_linear_gemv_bounded_norm_4" f16 bf16;
        LINEAR_GEMV_BOUNDED_NORM_8 "xserv_linear_gemv_bounded_norm_8" f16 bf16;
        LINEAR_GEMV_BOUNDED_RESIDUAL_1 "xserv_linear_gemv_bounded_residual_1" f16 bf16;
        LINEAR_GEMV_BOUNDED_RESIDUAL_16 "xserv_linear_gemv_bounded_residual_16" f16 bf16;
        LINEAR_GEMV_BOUNDED_RESIDUAL_2 "xserv_linear_gemv_bounded_residual_2" f16 bf16;
        LINEAR_GEMV_BOUNDED_RESIDUAL_4 "xserv_linear_gemv_bounded_residual_4" f16 bf16;
        LINEAR_GEMV_BOUNDED_RESIDUAL_8 "xserv_linear_gemv_bounded_residual_8" f16 bf16;
        LINEAR_GEMV_BOUNDED_SWIGLU_2 "xserv_linear_gemv_bounded_swiglu_2" f16 bf16;
        LINEAR_GEMV_BOUNDED_SWIGLU_4 "xserv_linear_gemv_bounded_swiglu_4" f16 bf16;
        LINEAR_GEMV_BOUNDED_SWIGLU_8 "xserv_linear_gemv_bounded_swiglu_8" f16 bf16;
        LINEAR_GEMV_NORM_1_1 "xserv_linear_gemv_norm_1_1" f16 bf16;
        LINEAR_GEMV_NORM_1_2 "xserv_linear_gemv_norm_1_2" f16 bf16;
        LINEAR_GEMV_NORM_2_1 "xserv_linear_gemv_norm_2_1" f16 bf16;
        LINEAR_GEMV_RESIDUAL_1_1 "xserv_linear_gemv_residual_1_1" f16 bf16;
        LINEAR_GEMV_RESIDUAL_1_2 "xserv_linear_gemv_residual_1_2" f16 bf16;
        LINEAR_GEMV_RESIDUAL_1_3 "xserv_linear_gemv_residual_1_3" f16 bf16;
        LINEAR_GEMV_RESIDUAL_1_4 "xserv_linear_gemv_residual_1_4" f16 bf16;
        LINEAR_GEMV_RESIDUAL_2_1 "xserv_linear_gemv_residual_2_1" f16 bf16;
        LINEAR_GEMV_RESIDUAL_2_3 "xserv_linear_gemv_residual_2_3" f16 bf16;
        LINEAR_GEMV_RESIDUAL_2_4 "xserv_linear_gemv_residual_2_4" f16 bf16;
        LINEAR_GEMV_SWIGLU_1_1 "xserv_linear_gemv_swiglu_1_1" f16 bf16;
        LINEAR_GEMV_SWIGLU_1_2 "xserv_linear_gemv_swiglu_1_2" f16 bf16;
        LINEAR_GEMV_SWIGLU_2_1 "xserv_linear_gemv_swiglu_2_1" f16 bf16;
    }
    "linear/gemv_mma" {
        LINEAR_GEMV_MMA_NORM "xserv_linear_gemv_mma_norm" f16 bf16;
        LINEAR_GEMV_MMA_RESIDUAL "xserv_linear_gemv_mma_residual" f16 bf16;
        LINEAR_GEMV_MMA_SUMS_SWIGLU "xserv_linear_gemv_mma_sums_swiglu" f16 bf16;
    }
    "linear/narrow" {
        LINEAR_NARROW_NORM_16 "xserv_linear_narrow_norm_16" f16 bf16;
        LINEAR_NARROW_NORM_8 "xserv_linear_narrow_norm_8" f16 bf16;
        LINEAR_NARROW_RESIDUAL_16 "xserv_linear_narrow_residual_16" f16 bf16;
        LINEAR_NARROW_RESIDUAL_8 "xserv_linear_narrow_residual_8" f16 bf16;
        LINEAR_NARROW_SWIGLU_16 "xserv_linear_narrow_swiglu_16" f16 bf16;
    }
    "linear/narrow_quantised" {
        LINEAR_NARROW_FP8_NORM "xserv_linear_narrow_fp8_norm" f16 bf16;
        LINEAR_NARROW_FP8_RESIDUAL "xserv_linear_narrow_fp8_residual" f16 bf16;
        LINEAR_NARROW_FP8_SWIGLU "xserv_linear_narrow_fp8_swiglu" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_FP8_1 "xserv_linear_narrow_quantised_norm_fp8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_FP8_2 "xserv_linear_narrow_quantised_norm_fp8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_FP8_4 "xserv_linear_narrow_quantised_norm_fp8_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT4_1 "xserv_linear_narrow_quantised_norm_int4_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT4_2 "xserv_linear_narrow_quantised_norm_int4_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT4_4 "xserv_linear_narrow_quantised_norm_int4_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT8_1 "xserv_linear_narrow_quantised_norm_int8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT8_2 "xserv_linear_narrow_quantised_norm_int8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_NORM_INT8_4 "xserv_linear_narrow_quantised_norm_int8_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_1 "xserv_linear_narrow_quantised_residual_fp8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_2 "xserv_linear_narrow_quantised_residual_fp8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_4 "xserv_linear_narrow_quantised_residual_fp8_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_1 "xserv_linear_narrow_quantised_residual_int4_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_2 "xserv_linear_narrow_quantised_residual_int4_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_4 "xserv_linear_narrow_quantised_residual_int4_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_1 "xserv_linear_narrow_quantised_residual_int8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_2 "xserv_linear_narrow_quantised_residual_int8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_4 "xserv_linear_narrow_quantised_residual_int8_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_FP8_1 "xserv_linear_narrow_quantised_swiglu_fp8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_FP8_2 "xserv_linear_narrow_quantised_swiglu_fp8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_FP8_4 "xserv_linear_narrow_quantised_swiglu_fp8_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT4_1 "xserv_linear_narrow_quantised_swiglu_int4_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT4_2 "xserv_linear_narrow_quantised_swiglu_int4_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT4_4 "xserv_linear_narrow_quantised_swiglu_int4_4" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT8_1 "xserv_linear_narrow_quantised_swiglu_int8_1" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT8_2 "xserv_linear_narrow_quantised_swiglu_int8_2" f16 bf16;
        LINEAR_NARROW_QUANTISED_SWIGLU_INT8_4 "xserv_linear_narrow_quantised_swiglu_int8_4" f16 bf16;
    }
    "linear/prefill" {
        LINEAR_PREFILL_HEADS_128X128_M "xserv_linear_prefill_heads_128x128_m" f16 bf16;
        LINEAR_PREFILL_HEADS_128X128_N "xserv_linear_prefill_heads_128x128_n" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X128_M "xserv_linear_prefill_plain_128x128_m" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X128_N "xserv_linear_prefill_plain_128x128_n" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X192_M "xserv_linear_prefill_plain_128x192_m" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X192_N "xserv_linear_prefill_plain_128x192_n" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X256_M "xserv_linear_prefill_plain_128x256_m" f16 bf16;
        LINEAR_PREFILL_PLAIN_128X256_N "xserv_linear_prefill_plain_128x256_n" f16 bf16;
        LINEAR_PREFILL_PLAIN_64X128_M "xserv_linear_prefill_plain_64x128_m" f16 bf16;
        LINEAR_PREFILL_PLAIN_64X128_M_S2 "xserv_linear_prefill_plain_64x128_m_s2" f16 bf16;
        LINEAR_PREFILL_PLAIN_64X64_N_S2 "xserv_linear_prefill_plain_64x64_n_s2" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X128_M "xserv_linear_prefill_swiglu_128x128_m" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X128_N "xserv_linear_prefill_swiglu_128x128_n" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X192_M "xserv_linear_prefill_swiglu_128x192_m" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X192_N "xserv_linear_prefill_swiglu_128x192_n" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X256_M "xserv_linear_prefill_swiglu_128x256_m" f16 bf16;
        LINEAR_PREFILL_SWIGLU_128X256_N "xserv_linear_prefill_swiglu_128x256_n" f16 bf16;
    }
    "linear/prefill_int8" {
        LINEAR_PREFILL_INT8_PLAIN_128X128_M "xserv_linear_prefill_int8_plain_128x128_m" f16 bf16;
        LINEAR_PREFILL_INT8_PLAIN_128X128_N "xserv_linear_prefill_int8_plain_128x128_n" f16 bf16;
        LINEAR_PREFILL_INT8_PLAIN_128X192_M "xserv_linear_prefill_int8_plain_128x192_m" f16 bf16;
        LINEAR_PREFILL_INT8_PLAIN_128X192_N "xserv_linear_prefill_int8_plain_128x192_n" f16 bf16;
        LINEAR_PREFILL_INT8_PLAIN_128X256_M "xserv_linear_prefill_int8_plain_128x256_m" f16 bf16;
        LINEAR_PREFILL_INT8_PLAIN_128X256_N "xserv_linear_prefill_int8_plain_128x256_n" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X128_M "xserv_linear_prefill_int8_swiglu_128x128_m" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X128_N "xserv_linear_prefill_int8_swiglu_128x128_n" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X192_M "xserv_linear_prefill_int8_swiglu_128x192_m" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X192_N "xserv_linear_prefill_int8_swiglu_128x192_n" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X256_M "xserv_linear_prefill_int8_swiglu_128x256_m" f16 bf16;
        LINEAR_PREFILL_INT8_SWIGLU_128X256_N "xserv_linear_prefill_int8_swiglu_128x256_n" f16 bf16;
    }
    "linear/quantised" {
        LINEAR_QUANTISED_FP8_1_16 "xserv_linear_quantised_fp8_1_16" f16 bf16;
        LINEAR_QUANTISED_FP8_1_32 "xserv_linear_quantised_fp8_1_32" f16 bf16;
        LINEAR_QUANTISED_FP8_1_64 "xserv_linear_quantised_fp8_1_64" f16 bf16;
        LINEAR_QUANTISED_FP8_1_8 "xserv_linear_quantised_fp8_1_8" f16 bf16;
        LINEAR_QUANTISED_FP8_2_16 "xserv_linear_quantised_fp8_2_16" f16 bf16;
        LINEAR_QUANTISED_FP8_2_32 "xserv_linear_quantised_fp8_2_32" f16 bf16;
        LINEAR_QUANTISED_FP8_2_64 "xserv_linear_quantised_fp8_2_64" f16 bf16;
        LINEAR_QUANTISED_FP8_2_8 "xserv_linear_quantised_fp8_2_8" f16 bf16;
        LINEAR_QUANTISED_INT4_1_16 "xserv_linear_quantised_int4_1_16" f16 bf16;
        LINEAR_QUANTISED_INT4_1_32 "xserv_linear_quantised_int4_1_32" f16 bf16;
        LINEAR_QUANTISED_INT4_1_64 "xserv_linear_quantised_int4_1_64" f16 bf16;
        LINEAR_QUANTISED_INT4_1_8 "xserv_linear_quantised_int4_1_8" f16 bf16;
        LINEAR_QUANTISED_INT4_2_16 "xserv_linear_quantised_int4_2_16" f16 bf16;
        LINEAR_QUANTISED_INT4_2_32 "xserv_linear_quantised_int4_2_32" f16 bf16;
        LINEAR_QUANTISED_INT4_2_64 "xserv_linear_quantised_int4_2_64" f16 bf16;
        LINEAR_QUANTISED_INT4_2_8 "xserv_linear_quantised_int4_2_8" f16 bf16;
        LINEAR_QUANTISED_INT8_1_16 "xserv_linear_quantised_int8_1_16" f16 bf16;
        LINEAR_QUANTISED_INT8_1_32 "xserv_linear_quantised_int8_1_32" f16 bf16;
        LINEAR_QUANTISED_INT8_1_64 "xserv_linear_quantised_int8_1_64" f16 bf16;
        LINEAR_QUANTISED_INT8_1_8 "xserv_linear_quantised_int8_1_8" f16 bf16;
        LINEAR_QUANTISED_INT8_2_16 "xserv_linear_quantised_int8_2_16" f16 bf16;
        LINEAR_QUANTISED_INT8_2_32 "xserv_linear_quantised_int8_2_32" f16 bf16;
        LINEAR_QUANTISED_INT8_2_64 "xserv_linear_quantised_int8_2_64" f16 bf16;
        LINEAR_QUANTISED_INT8_2_8 "xserv_linear_quantised_int8_2_8" f16 bf16;
    }
    "linear/quantised_few" {
        LINEAR_QUANTISED_FEW_FP8_1_16 "xserv_linear_quantised_few_fp8_1_16" f16 bf16;
        LINEAR_QUANTISED_FEW_FP8_1_8 "xserv_linear_quantised_few_fp8_1_8" f16 bf16;
        LINEAR_QUANTISED_FEW_FP8_2_16 "xserv_linear_quantised_few_fp8_2_16" f16 bf16;
        LINEAR_QUANTISED_FEW_FP8_2_8 "xserv_linear_quantised_few_fp8_2_8" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_1_16 "xserv_linear_quantised_few_int4_1_16" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_1_8 "xserv_linear_quantised_few_int4_1_8" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_2_16 "xserv_linear_quantised_few_int4_2_16" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_2_8 "xserv_linear_quantised_few_int4_2_8" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_4_16 "xserv_linear_quantised_few_int4_4_16" f16 bf16;
        LINEAR_QUANTISED_FEW_INT4_4_8 "xserv_linear_quantised_few_int4_4_8" f16 bf16;
        LINEAR_QUANTISED_FEW_INT8_1_16 "xserv_linear_quantised_few_int8_1_16" f16 bf16;
        LINEAR_QUANTISED_FEW_INT8_1_8 "xserv_linear_quantised_few_int8_1_8" f16 bf16;
        LINEAR_QUANTISED_FEW_INT8_2_16 "xserv_linear_quantised_few_int8_2_16" f16 bf16;
        LINEAR_QUANTISED_FEW_INT8_2_8 "xserv_linear_quantised_few_int8_2_8" f16 bf16;
    }
    "linear/quantised_many" {
        LINEAR_QUANTISED_MANY_FP8_32_128X2 "xserv_linear_quantised_many_fp8_32_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_32_32X4 "xserv_linear_quantised_many_fp8_32_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_32_64X3 "xserv_linear_quantised_many_fp8_32_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_128X2 "xserv_linear_quantised_many_fp8_64_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_32X2 "xserv_linear_quantised_many_fp8_64_32x2" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_32X3 "xserv_linear_quantised_many_fp8_64_32x3" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_32X4 "xserv_linear_quantised_many_fp8_64_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_64X2 "xserv_linear_quantised_many_fp8_64_64x2" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_64X3 "xserv_linear_quantised_many_fp8_64_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_FP8_64_96X2 "xserv_linear_quantised_many_fp8_64_96x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_32_128X2 "xserv_linear_quantised_many_int4_32_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_32_32X4 "xserv_linear_quantised_many_int4_32_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_32_64X3 "xserv_linear_quantised_many_int4_32_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_128X2 "xserv_linear_quantised_many_int4_64_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_32X2 "xserv_linear_quantised_many_int4_64_32x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_32X3 "xserv_linear_quantised_many_int4_64_32x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_32X4 "xserv_linear_quantised_many_int4_64_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_64X2 "xserv_linear_quantised_many_int4_64_64x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_64X3 "xserv_linear_quantised_many_int4_64_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT4_64_96X2 "xserv_linear_quantised_many_int4_64_96x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_32_128X2 "xserv_linear_quantised_many_int8_32_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_32_32X4 "xserv_linear_quantised_many_int8_32_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_32_64X3 "xserv_linear_quantised_many_int8_32_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_128X2 "xserv_linear_quantised_many_int8_64_128x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_32X2 "xserv_linear_quantised_many_int8_64_32x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_32X3 "xserv_linear_quantised_many_int8_64_32x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_32X4 "xserv_linear_quantised_many_int8_64_32x4" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_64X2 "xserv_linear_quantised_many_int8_64_64x2" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_64X3 "xserv_linear_quantised_many_int8_64_64x3" f16 bf16;
        LINEAR_QUANTISED_MANY_INT8_64_96X2 "xserv_linear_quantised_many_int8_64_96x2" f16 bf16;
    }
    "linear/quantised_one" {
        LINEAR_QUANTISED_ONE_FP8_1 "xserv_linear_quantised_one_fp8_1" f16 bf16;
        LINEAR_QUANTISED_ONE_INT4_1 "xserv_linear_quantised_one_int4_1" f16 bf16;
        LINEAR_QUANTISED_ONE_INT4_2 "xserv_linear_quantised_one_int4_2" f16 bf16;
        LINEAR_QUANTISED_ONE_INT4_4 "xserv_linear_quantised_one_int4_4" f16 bf16;
        LINEAR_QUANTISED_ONE_INT8_1 "xserv_linear_quantised_one_int8_1" f16 bf16;
        LINEAR_QUANTISED_ONE_INT8_2 "xserv_linear_quantised_one_int8_2" f16 bf16;
        LINEAR_QUANTISED_ONE_INT8_4 "xserv_linear_quantised_one_int8_4" f16 bf16;
    }
    "linear/skinny" {
        LINEAR_SKINNY_PLAIN_128X128 "xserv_linear_skinny_plain_128x128" f16 bf16;
        LINEAR_SKINNY_PLAIN_128X64 "xserv_linear_skinny_plain_128x64" f16 bf16;
        LINEAR_SKINNY_PLAIN_128X96 "xserv_linear_skinny_plain_128x96" f16 bf16;
        LINEAR_SKINNY_PLAIN_192X128 "xserv_linear_skinny_plain_192x128" f16 bf16;
        LINEAR_SKINNY_PLAIN_192X16 "xserv_linear_skinny_plain_192x16" f16 bf16;
        LINEAR_SKINNY_PLAIN_192X32 "xserv_linear_skinny_plain_192x32" f16 bf16;
        LINEAR_SKINNY_PLAIN_192X64 "xserv_linear_skinny_plain_192x64" f16 bf16;
        LINEAR_SKINNY_PLAIN_192X96 "xserv_linear_skinny_plain_192x96" f16 bf16;
        LINEAR_SKINNY_PLAIN_64X128 "xserv_linear_skinny_plain_64x128" f16 bf16;
        LINEAR_SKINNY_PLAIN_64X16 "xserv_linear_skinny_plain_64x16" f16 bf16;
        LINEAR_SKINNY_PLAIN_64X32 "xserv_linear_skinny_plain_64x32" f16 bf16;
        LINEAR_SKINNY_PLAIN_64X64 "xserv_linear_skinny_plain_64x64" f16 bf16;
        LINEAR_SKINNY_PLAIN_64X96 "xserv_linear_skinny_plain_64x96" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_128X128 "xserv_linear_skinny_residual_128x128" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_128X64 "xserv_linear_skinny_residual_128x64" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_128X96 "xserv_linear_skinny_residual_128x96" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_192X128 "xserv_linear_skinny_residual_192x128" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_192X16 "xserv_linear_skinny_residual_192x16" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_192X32 "xserv_linear_skinny_residual_192x32" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_192X64 "xserv_linear_skinny_residual_192x64" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_192X96 "xserv_linear_skinny_residual_192x96" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_64X128 "xserv_linear_skinny_residual_64x128" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_64X16 "xserv_linear_skinny_residual_64x16" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_64X32 "xserv_linear_skinny_residual_64x32" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_64X64 "xserv_linear_skinny_residual_64x64" f16 bf16;
        LINEAR_SKINNY_RESIDUAL_64X96 "xserv_linear_skinny_residual_64x96" f16 bf16;
        LINEAR_SKINNY_SWIGLU_128X128 "xserv_linear_skinny_swiglu_128x128" f16 bf16;
        LINEAR_SKINNY_SWIGLU_128X64 "xserv_linear_skinny_swiglu_128x64" f16 bf16;
        LINEAR_SKINNY_SWIGLU_128X96 "xserv_linear_skinny_swiglu_128x96" f16 bf16;
        LINEAR_SKINNY_SWIGLU_192X128 "xserv_linear_skinny_swiglu_192x128" f16 bf16;
        LINEAR_SKINNY_SWIGLU_192X16 "xserv_linear_skinny_swiglu_192x16" f16 bf16;
        LINEAR_SKINNY_SWIGLU_192X32 "xserv_linear_skinny_swiglu_192x32" f16 bf16;
        LINEAR_SKINNY_SWIGLU_192X64 "xserv_linear_skinny_swiglu_192x64" f16 bf16;
        LINEAR_SKINNY_SWIGLU_192X96 "xserv_linear_skinny_swiglu_192x96" f16 bf16;
        LINEAR_SKINNY_SWIGLU_64X128 "xserv_linear_skinny_swiglu_64x128" f16 bf16;
        LINEAR_SKINNY_SWIGLU_64X16 "xserv_linear_skinny_swiglu_64x16" f16 bf16;
        LINEAR_SKINNY_SWIGLU_64X32 "xserv_linear_skinny_swiglu_64x32" f16 bf16;
        LINEAR_SKINNY_SWIGLU_64X64 "xserv_linear_skinny_swiglu_64x64" f16 bf16;
        LINEAR_SKINNY_SWIGLU_64X96 "xserv_linear_skinny_swiglu_64x96" f16 bf16;
    }
    "log_probs/log_probs" {
        LOG_PROBS "xserv_log_probs" f32 f16 bf16;
    }
    "qk_norm_rope_append/qk_norm_rope_append" {
        QK_NORM_ROPE_APPEND_128 "xserv_qk_norm_rope_append_128" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_64 "xserv_qk_norm_rope_append_64" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_FP8_128 "xserv_qk_norm_rope_append_fp8_128" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_FP8_64 "xserv_qk_norm_rope_append_fp8_64" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_FP8_SCALAR "xserv_qk_norm_rope_append_fp8_scalar" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_FP8_VEC "xserv_qk_norm_rope_append_fp8_vec" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_SCALAR "xserv_qk_norm_rope_append_scalar" f32 f16 bf16;
        QK_NORM_ROPE_APPEND_VEC "xserv_qk_norm_rope_append_vec" f32 f16 bf16;
        QK_ROPE_TABLE "xserv_qk_rope_table" f32 f16 bf16;
    }
    "quantised/activations" {
        NORMALISE_ACTIVATIONS "xserv_normalise_activations" f16 bf16;
        QUANTISE_ACTIVATIONS "xserv_quantise_activations" f16 bf16;
        ROUND_ACTIVATIONS "xserv_round_activations" f32 f16 bf16;
    }
    "quantised/dequantise" {
        DEQUANTISE "xserv_dequantise" f32 f16 bf16;
    }
    "quantised/integers" {
        INTEGERS "xserv_integers" f16 bf16;
    }
    "rms_norm/add_rounded" {
        ADD_RMS_NORM_ROUNDED_SCALAR "xserv_add_rms_norm_rounded_scalar" f32 f16 bf16;
        ADD_RMS_NORM_ROUNDED_VEC "xserv_add_rms_norm_rounded_vec" f32 f16 bf16;
    }
    "rms_norm/rms_norm" {
        ADD_RMS_NORM_LOOP "xserv_add_rms_norm_loop" f32 f16 bf16;
        ADD_RMS_NORM_ROW "xserv_add_rms_norm_row" f32 f16 bf16;
        ADD_RMS_NORM_SCALAR "xserv_add_rms_norm_scalar" f32 f16 bf16;
        RMS_NORM_GROUP128 "xserv_rms_norm_group128" f32 f16 bf16;
        RMS_NORM_GROUP16 "xserv_rms_norm_group16" f32 f16 bf16;
        RMS_NORM_GROUP32 "xserv_rms_norm_group32" f32 f16 bf16;
        RMS_NORM_GROUP64 "xserv_rms_norm_group64" f32 f16 bf16;
        RMS_NORM_LOOP "xserv_rms_norm_loop" f32 f16 bf16;
        RMS_NORM_ROW "xserv_rms_norm_row" f32 f16 bf16;
        RMS_NORM_SCALAR "xserv_rms_norm_scalar" f32 f16 bf16;
        RMS_NORM_STREAM "xserv_rms_norm_stream" f32 f16 bf16;
    }
    "rms_norm/rounded" {
        RMS_NORM_ROUNDED "xserv_rms_norm_rounded" f16 bf16;
    }
    "rope/rope" {
        ROPE_INTERLEAVED_SCALAR_I32 "xserv_rope_interleaved_scalar_i32" f32 f16 bf16;
        ROPE_INTERLEAVED_SCALAR_I64 "xserv_rope_interleaved_scalar_i64" f32 f16 bf16;
        ROPE_INTERLEAVED_VEC_I32 "xserv_rope_interleaved_vec_i32" f32 f16 bf16;
        ROPE_INTERLEAVED_VEC_I64 "xserv_rope_interleaved_vec_i64" f32 f16 bf16;
        ROPE_SPLIT_SCALAR_I32 "xserv_rope_split_scalar_i32" f32 f16 bf16;
        ROPE_SPLIT_SCALAR_I64 "xserv_rope_split_scalar_i64" f32 f16 bf16;
        ROPE_SPLIT_VEC_I32 "xserv_rope_split_vec_i32" f32 f16 bf16;
        ROPE_SPLIT_VEC_I64 "xserv_rope_split_vec_i64" f32 f16 bf16;
        ROPE_TABLE "xserv_rope_table";
    }
    "sample/sample" {
        SAMPLE_CHOOSE "xserv_sample_choose" f32 f16 bf16;
        SAMPLE_CUT "xserv_sample_cut" f32 f16 bf16;
        SAMPLE_SCAN "xserv_sample_scan" f32 f16 bf16;
    }
    "silu_mul/rounded" {
        SILU_MUL_ROUNDED_SCALAR "xserv_silu_mul_rounded_scalar" f32 f16 bf16;
        SILU_MUL_ROUNDED_VEC "xserv_silu_mul_rounded_vec" f32 f16 bf16;
    }
    "silu_mul/silu_mul" {
        SILU_MUL_SCALAR "xserv_silu_mul_scalar" f32 f16 bf16;
        SILU_MUL_VEC "xserv_silu_mul_vec" f32 f16 bf16;
    }
    "softmax/softmax" {
        SOFTMAX_LOOP "xserv_softmax_loop" f32 f16 bf16;
        SOFTMAX_ROW16 "xserv_softmax_row16" f32 f16 bf16;
        SOFTMAX_ROW32 "xserv_softmax_row32" f32 f16 bf16;
        SOFTMAX_SCALAR "xserv_softmax_scalar" f32 f16 bf16;
    }
    "top_k/top_k" {
        TOP_K_MERGE "xserv_top_k_merge" f32 f16 bf16;
        TOP_K_PARTS "xserv_top_k_parts" f32 f16 bf16;
        TOP_K_PARTS_SCALAR "xserv_top_k_parts_scalar" f32 f16 bf16;
        TOP_K_REDUCE "xserv_top_k_reduce";
        TOP_K_SINGLE "xserv_top_k_single" f32 f16 bf16;
        TOP_K_SINGLE_SCALAR "xserv_top_k_single_scalar" f32 f16 bf16;
    }
    "transpose/transpose" {
        TRANSPOSE_B2 "xserv_transpose_b2";
        TRANSPOSE_B2_SCALAR "xserv_transpose_b2_scalar";
        TRANSPOSE_B4 "xserv_transpose_b4";
    }
}
