//! The kernels of products with quantised weights, by what the weight is stored as. A new code has
//! its lines here; the files that choose between kernels know codes by their properties alone.

use crate::backend::cuda::{kernels, KernelByHalf};
use crate::ops::linear::Epilogue;
use crate::ops::quantised::Code;

/// Returns the kernel of `cuda_quantised` for scales of a chunk, tokens of a block.
pub(super) fn product(code: Code, scales: usize, tokens: u64) -> Option<KernelByHalf> {
    Some(match (code, scales, tokens) {
        (Code::Int4, 1, 8) => kernels::LINEAR_QUANTISED_INT4_1_8,
        (Code::Int4, 1, 16) => kernels::LINEAR_QUANTISED_INT4_1_16,
        (Code::Int4, 1, 32) => kernels::LINEAR_QUANTISED_INT4_1_32,
        (Code::Int4, 1, 64) => kernels::LINEAR_QUANTISED_INT4_1_64,
        (Code::Int4, 2, 8) => kernels::LINEAR_QUANTISED_INT4_2_8,
        (Code::Int4, 2, 16) => kernels::LINEAR_QUANTISED_INT4_2_16,
        (Code::Int4, 2, 32) => kernels::LINEAR_QUANTISED_INT4_2_32,
        (Code::Int4, 2, 64) => kernels::LINEAR_QUANTISED_INT4_2_64,
        (Code::Int8, 1, 8) => kernels::LINEAR_QUANTISED_INT8_1_8,
        (Code::Int8, 1, 16) => kernels::LINEAR_QUANTISED_INT8_1_16,
        (Code::Int8, 1, 32) => kernels::LINEAR_QUANTISED_INT8_1_32,
        (Code::Int8, 1, 64) => kernels::LINEAR_QUANTISED_INT8_1_64,
        (Code::Int8, 2, 8) => kernels::LINEAR_QUANTISED_INT8_2_8,
        (Code::Int8, 2, 16) => kernels::LINEAR_QUANTISED_INT8_2_16,
        (Code::Int8, 2, 32) => kernels::LINEAR_QUANTISED_INT8_2_32,
        (Code::Int8, 2, 64) => kernels::LINEAR_QUANTISED_INT8_2_64,
        (Code::Fp8, 1, 8) => kernels::LINEAR_QUANTISED_FP8_1_8,
        (Code::Fp8, 1, 16) => kernels::LINEAR_QUANTISED_FP8_1_16,
        (Code::Fp8, 1, 32) => kernels::LINEAR_QUANTISED_FP8_1_32,
        (Code::Fp8, 1, 64) => kernels::LINEAR_QUANTISED_FP8_1_64,
        (Code::Fp8, 2, 8) => kernels::LINEAR_QUANTISED_FP8_2_8,
        (Code::Fp8, 2, 16) => kernels::LINEAR_QUANTISED_FP8_2_16,
        (Code::Fp8, 2, 32) => kernels::LINEAR_QUANTISED_FP8_2_32,
        (Code::Fp8, 2, 64) => kernels::LINEAR_QUANTISED_FP8_2_64,
        _ => return None,
    })
}

/// Returns the kernel of `cuda_quantised_few` for scales of a stage, tokens of a block.
pub(super) fn few(code: Code, scales: usize, tokens: u64) -> Option<KernelByHalf> {
    Some(match (code, scales, tokens) {
        (Code::Int4, 1, 8) => kernels::LINEAR_QUANTISED_FEW_INT4_1_8,
        (Code::Int4, 1, 16) => kernels::LINEAR_QUANTISED_FEW_INT4_1_16,
        (Code::Int4, 2, 8) => kernels::LINEAR_QUANTISED_FEW_INT4_2_8,
        (Code::Int4, 2, 16) => kernels::LINEAR_QUANTISED_FEW_INT4_2_16,
        (Code::Int4, 4, 8) => kernels::LINEAR_QUANTISED_FEW_INT4_4_8,
        (Code::Int4, 4, 16) => kernels::LINEAR_QUANTISED_FEW_INT4_4_16,
        (Code::Int8, 1, 8) => kernels::LINEAR_QUANTISED_FEW_INT8_1_8,
        (Code::Int8, 1, 16) => kernels::LINEAR_QUANTISED_FEW_INT8_1_16,
        (Code::Int8, 2, 8) => kernels::LINEAR_QUANTISED_FEW_INT8_2_8,
        (Code::Int8, 2, 16) => kernels::LINEAR_QUANTISED_FEW_INT8_2_16,
        (Code::Fp8, 1, 8) => kernels::LINEAR_QUANTISED_FEW_FP8_1_8,
        (Code::Fp8, 1, 16) => kernels::LINEAR_QUANTISED_FEW_FP8_1_16,
        (Code::Fp8, 2, 8) => kernels::LINEAR_QUANTISED_FEW_FP8_2_8,
        (Code::Fp8, 2, 16) => kernels::LINEAR_QUANTISED_FEW_FP8_2_16,
        _ => return None,
    })
}

/// Returns the kernel of `cuda_quantised_many` for inputs of a piece, tokens of a block, groups of
/// four warps.
pub(super) fn many(
    code: Code,
    piece_inputs: usize,
    tokens: usize,
    groups: usize,
) -> Option<KernelByHalf> {
    Some(match (code, piece_inputs, tokens, groups) {
        (Code::Int4, 64, 32, 4) => kernels::LINEAR_QUANTISED_MANY_INT4_64_32X4,
        (Code::Int4, 64, 32, 3) => kernels::LINEAR_QUANTISED_MANY_INT4_64_32X3,
        (Code::Int4, 64, 32, 2) => kernels::LINEAR_QUANTISED_MANY_INT4_64_32X2,
        (Code::Int4, 64, 64, 3) => kernels::LINEAR_QUANTISED_MANY_INT4_64_64X3,
        (Code::Int4, 64, 64, 2) => kernels::LINEAR_QUANTISED_MANY_INT4_64_64X2,
        (Code::Int4, 64, 96, 2) => kernels::LINEAR_QUANTISED_MANY_INT4_64_96X2,
        (Code::Int4, 64, 128, 2) => kernels::LINEAR_QUANTISED_MANY_INT4_64_128X2,
        (Code::Int4, 32, 32, 4) => kernels::LINEAR_QUANTISED_MANY_INT4_32_32X4,
        (Code::Int4, 32, 64, 3) => kernels::LINEAR_QUANTISED_MANY_INT4_32_64X3,
        (Code::Int4, 32, 128, 2) => kernels::LINEAR_QUANTISED_MANY_INT4_32_128X2,
        (Code::Int8, 64, 32, 4) => kernels::LINEAR_QUANTISED_MANY_INT8_64_32X4,
        (Code::Int8, 64, 32, 3) => kernels::LINEAR_QUANTISED_MANY_INT8_64_32X3,
        (Code::Int8, 64, 32, 2) => kernels::LINEAR_QUANTISED_MANY_INT8_64_32X2,
        (Code::Int8, 64, 64, 3) => kernels::LINEAR_QUANTISED_MANY_INT8_64_64X3,
        (Code::Int8, 64, 64, 2) => kernels::LINEAR_QUANTISED_MANY_INT8_64_64X2,
        (Code::Int8, 64, 96, 2) => kernels::LINEAR_QUANTISED_MANY_INT8_64_96X2,
        (Code::Int8, 64, 128, 2) => kernels::LINEAR_QUANTISED_MANY_INT8_64_128X2,
        (Code::Int8, 32, 32, 4) => kernels::LINEAR_QUANTISED_MANY_INT8_32_32X4,
        (Code::Int8, 32, 64, 3) => kernels::LINEAR_QUANTISED_MANY_INT8_32_64X3,
        (Code::Int8, 32, 128, 2) => kernels::LINEAR_QUANTISED_MANY_INT8_32_128X2,
        (Code::Fp8, 64, 32, 4) => kernels::LINEAR_QUANTISED_MANY_FP8_64_32X4,
        (Code::Fp8, 64, 32, 3) => kernels::LINEAR_QUANTISED_MANY_FP8_64_32X3,
        (Code::Fp8, 64, 32, 2) => kernels::LINEAR_QUANTISED_MANY_FP8_64_32X2,
        (Code::Fp8, 64, 64, 3) => kernels::LINEAR_QUANTISED_MANY_FP8_64_64X3,
        (Code::Fp8, 64, 64, 2) => kernels::LINEAR_QUANTISED_MANY_FP8_64_64X2,
        (Code::Fp8, 64, 96, 2) => kernels::LINEAR_QUANTISED_MANY_FP8_64_96X2,
        (Code::Fp8, 64, 128, 2) => kernels::LINEAR_QUANTISED_MANY_FP8_64_128X2,
        (Code::Fp8, 32, 32, 4) => kernels::LINEAR_QUANTISED_MANY_FP8_32_32X4,
        (Code::Fp8, 32, 64, 3) => kernels::LINEAR_QUANTISED_MANY_FP8_32_64X3,
        (Code::Fp8, 32, 128, 2) => kernels::LINEAR_QUANTISED_MANY_FP8_32_128X2,
        _ => return None,
    })
}

/// Returns the kernel of `cuda_quantised_one` for scales of 128 inputs.
pub(super) fn one(code: Code, scales: usize) -> Option<KernelByHalf> {
    Some(match (code, scales) {
        (Code::Int4, 1) => kernels::LINEAR_QUANTISED_ONE_INT4_1,
        (Code::Int4, 2) => kernels::LINEAR_QUANTISED_ONE_INT4_2,
        (Code::Int4, 4) => kernels::LINEAR_QUANTISED_ONE_INT4_4,
        (Code::Int8, 1) => kernels::LINEAR_QUANTISED_ONE_INT8_1,
        (Code::Int8, 2) => kernels::LINEAR_QUANTISED_ONE_INT8_2,
        (Code::Int8, 4) => kernels::LINEAR_QUANTISED_ONE_INT8_4,
        (Code::Fp8, 1) => kernels::LINEAR_QUANTISED_ONE_FP8_1,
        _ => return None,
    })
}

/// Returns the kernel of `cuda_narrow_quantised` for scales of a step. Its products are normalised unless
/// they are added.
pub(super) fn narrow(
    code: Code,
    scales: usize,
    result: Epilogue,
    has_norm: bool,
) -> Option<KernelByHalf> {
    use Epilogue::{AddResidual, Store, SwiGlu};
    Some(match (result, has_norm, code, scales) {
        (Store, true, Code::Int4, 1) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT4_1,
        (Store, true, Code::Int4, 2) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT4_2,
        (Store, true, Code::Int4, 4) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT4_4,
        (Store, true, Code::Int8, 1) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT8_1,
        (Store, true, Code::Int8, 2) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT8_2,
        (Store, true, Code::Int8, 4) => kernels::LINEAR_NARROW_QUANTISED_NORM_INT8_4,
        (Store, true, Code::Fp8, 1) => kernels::LINEAR_NARROW_QUANTISED_NORM_FP8_1,
        (Store, true, Code::Fp8, 2) => kernels::LINEAR_NARROW_QUANTISED_NORM_FP8_2,
        (Store, true, Code::Fp8, 4) => kernels::LINEAR_NARROW_QUANTISED_NORM_FP8_4,
        (SwiGlu, true, Code::Int4, 1) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT4_1,
        (SwiGlu, true, Code::Int4, 2) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT4_2,
        (SwiGlu, true, Code::Int4, 4) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT4_4,
        (SwiGlu, true, Code::Int8, 1) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT8_1,
        (SwiGlu, true, Code::Int8, 2) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT8_2,
        (SwiGlu, true, Code::Int8, 4) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_INT8_4,
        (SwiGlu, true, Code::Fp8, 1) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_FP8_1,
        (SwiGlu, true, Code::Fp8, 2) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_FP8_2,
        (SwiGlu, true, Code::Fp8, 4) => kernels::LINEAR_NARROW_QUANTISED_SWIGLU_FP8_4,
        (AddResidual, false, Code::Int4, 1) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_1,
        (AddResidual, false, Code::Int4, 2) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_2,
        (AddResidual, false, Code::Int4, 4) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT4_4,
        (AddResidual, false, Code::Int8, 1) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_1,
        (AddResidual, false, Code::Int8, 2) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_2,
        (AddResidual, false, Code::Int8, 4) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_INT8_4,
        (AddResidual, false, Code::Fp8, 1) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_1,
        (AddResidual, false, Code::Fp8, 2) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_2,
        (AddResidual, false, Code::Fp8, 4) => kernels::LINEAR_NARROW_QUANTISED_RESIDUAL_FP8_4,
        _ => return None,
    })
}

/// Returns the kernel of `cuda_narrow_quantised` for FP8 in pieces.
pub(super) fn narrow_fp8(result: Epilogue, has_norm: bool) -> Option<KernelByHalf> {
    use Epilogue::{AddResidual, Store, SwiGlu};
    Some(match (result, has_norm) {
        (Store, true) => kernels::LINEAR_NARROW_FP8_NORM,
        (SwiGlu, true) => kernels::LINEAR_NARROW_FP8_SWIGLU,
        (AddResidual, false) => kernels::LINEAR_NARROW_FP8_RESIDUAL,
        _ => return None,
    })
}
