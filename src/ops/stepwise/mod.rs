//! The steps of a decoder layer on a device with the roundings of Transformers: a result is rounded to the
//! element type wherever Transformers stores a tensor, so that bf16 and f16 give the same tokens. (The
//! operators of [`super::tensor`] round once.) For tensors of the library's own: contiguous, and not
//! looked up.

mod add_rms_norm;
mod decode_attention;
mod decode_attention_o;
mod decode_gemv;
mod decode_gemv_mma;
mod embedding_step;
mod gelu_tanh;
mod kv_cache_append;
mod kv_cache_swap;
mod prefill_gemm;
mod prefill_heads;
mod qk_norm_rope_append;
mod sample;
mod silu_mul;
mod skinny_gemm;

pub use add_rms_norm::add_rms_norm;
pub use decode_attention::{
    decode_attention, has_decode_attention, DecodeScratch, DecodeSequences,
};
pub use decode_attention_o::{decode_attention_o, has_decode_attention_o};
pub use decode_gemv::{decode_gemv, has_decode_gemv, is_gemv_weight, GEMV_TOKENS};
pub use decode_gemv_mma::{decode_gemv_mma, has_decode_gemv_mma, OneTokenLinear, NUM_SUMS};
pub use embedding_step::embedding_step;
pub use gelu_tanh::gelu_tanh;
pub use kv_cache_append::kv_cache_append;
pub use kv_cache_swap::{kv_cache_swap, KvCopy, KvParts, MOST_KV_COPIES};
pub use prefill_gemm::{has_prefill_gemm, is_prefill_faster, prefill_gemm};
pub use prefill_heads::{is_prefill_heads_faster, prefill_heads};
pub use qk_norm_rope_append::{qk_norm_rope_append, rope_tables, KvSlots, QkNormRope};
pub use sample::{
    sample, SampleBuffers, SampleRow, SAMPLE_COUNTERS, SAMPLE_PARTIALS, SAMPLE_ROW_WORDS,
};
pub use silu_mul::silu_mul;
pub use skinny_gemm::{
    has_skinny_gemm, is_skinny_weight, num_fixed_parts, rms_norm_step, skinny_gemm, LinearResult,
    SKINNY_TOKENS,
};

use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};

/// The device half of a context.
fn cuda(context: &ComputeContext) -> Result<&CudaContext> {
    match context.backend() {
        ContextBackend::Cuda(cuda) => Ok(cuda),
        ContextBackend::Cpu { .. } => Err(Error::internal("a stepwise operator on the CPU")),
    }
}

/// Checks that a tensor is contiguous and of this type and shape.
fn check(name: &str, tensor: &Tensor, element: ElementType, shape: &[i64]) -> Result<()> {
    let fits = tensor.element() == element && **tensor.shape() == *shape && tensor.is_contiguous();
    match fits {
        true => Ok(()),
        false => Err(Error::internal(format!(
            "{name} is {} {} with strides {}, not {element} {shape:?}",
            tensor.element(),
            tensor.shape(),
            tensor.strides()
        ))),
    }
}

/// The floating-point type of a tensor.
fn float(name: &str, tensor: &Tensor) -> Result<DType> {
    match tensor.element() {
        ElementType::Float(dtype) => Ok(dtype),
        other => Err(Error::internal(format!("{name} has elements of {other}"))),
    }
}

/// Rows and width of a matrix.
fn matrix_size(name: &str, tensor: &Tensor) -> Result<(u32, i32)> {
    let (&[rows, width], true) = (&**tensor.shape(), tensor.is_contiguous()) else {
        return Err(Error::internal(format!("{name} has shape {}", tensor.shape())));
    };
    match (u32::try_from(rows), i32::try_from(width)) {
        (Ok(rows), Ok(width)) if rows <= i32::MAX as u32 => Ok((rows, width)),
        _ => Err(Error::unsupported(format!("{name}: shape {} is too large", tensor.shape()))),
    }
}

/// Elements of 16 bytes if rows of `width` of all tensors are whole aligned vectors, else 1.
fn vector_len(dtype: DType, width: i32, tensors: &[&Tensor]) -> i32 {
    let vector = 16 / dtype.size_bytes() as i32;
    let is_aligned = |tensor: &&Tensor| (tensor.data() as usize).is_multiple_of(16);
    match width % vector == 0 && tensors.iter().all(is_aligned) {
        true => vector,
        false => 1,
    }
}
