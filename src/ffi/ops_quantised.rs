//! Operators with quantised matrices: to codes and back, and the product.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard_work;
use super::status::xserv_status;
use super::tensor::{optional_tensor, tensor_argument, xserv_tensor};
use crate::error::{Error, Result};
use crate::ops;
use crate::ops::quantised::tensors::QuantisedTensors;
use crate::ops::quantised::Code;

/// What the numbers of a quantised matrix are stored as. Number W[o, i] is (code - zero) * scale,
/// with the zero and the scale of its group.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_quant_code {
    /// 4 bits: an integer from 0 to 15; 8 where no zeros are given.
    XSERV_QUANT_INT4 = 0,
    /// 8 bits: an integer from 0 to 255; the zero is 128 where none are given.
    XSERV_QUANT_INT8 = 1,
    /// 8 bits: a float, e4m3fn (torch.float8_e4m3fn). It stands for itself, and has no zero.
    XSERV_QUANT_FP8 = 2,
}

fn code_of(code: u32) -> Result<Code> {
    match code {
        v if v == xserv_quant_code::XSERV_QUANT_INT4 as u32 => Ok(Code::Int4),
        v if v == xserv_quant_code::XSERV_QUANT_INT8 as u32 => Ok(Code::Int8),
        v if v == xserv_quant_code::XSERV_QUANT_FP8 as u32 => Ok(Code::Fp8),
        v => Err(Error::invalid_argument(format!("code is {v}, not an xserv_quant_code"))),
    }
}

/// Quantises a matrix to integers, each group of inputs of a row by itself. With 8 bits the largest
/// number of a group becomes 127 steps; with 4 bits the range is searched for that leaves the least
/// sum of squared errors. It is what xserv_load() does with XSERV_WEIGHTS_INT8 and _INT4.
///
/// x: [out_features, in_features], f32, f16 or bf16. code: XSERV_QUANT_INT4 or _INT8. group_size:
/// the inputs that share a scale; 0: all. codes: [out_features, in_features * bits / 32], i32: in
/// row-major order, of which each word has 8 codes of 4 bits or 4 of 8, the first in the lowest
/// bits. scales: [out_features, in_features / group_size rounded up], f32 or bf16, which hold them
/// without rounding. zeros: as scales, i32; NULL with 8 bits, where all are 128. Any strides;
/// nothing shares memory.
///
/// On CUDA the host does it, and the call returns when it is done. Numbers that are not finite are
/// refused, and then nothing is written.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_UNSUPPORTED (XSERV_QUANT_FP8),
/// XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_quantise(
    context: *const xserv_context,
    x: *const xserv_tensor,
    code: u32,
    group_size: u32,
    codes: *const xserv_tensor,
    scales: *const xserv_tensor,
    zeros: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, codes, scales, zeros) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(codes, "codes")?,
                tensor_argument(scales, "scales")?,
                optional_tensor(zeros, "zeros")?,
            )
        };
        let matrix = QuantisedTensors {
            code: code_of(code)?,
            group_rows: 1,
            group_size: group_size as usize,
            codes: &codes,
            scales: &scales,
            zeros: zeros.as_ref(),
        };
        ops::quantised::tensors::quantise(context_of(context)?.get()?, &x, &matrix)
    })
}

/// Computes the numbers of a quantised matrix, out[o, i] = (code - zero) * scale in f32, rounded
/// once.
///
/// code: an xserv_quant_code. group_rows: the rows that share a scale; 0 or 1: every row has its
/// own; 128 with scales for blocks of 128 x 128, out_features with one for all rows. group_size:
/// the inputs that share a scale; 0: all. codes: [out_features, in_features * bits / 32], i32, as
/// xserv_op_quantise() writes them: bytes of 8 bits in row-major order may be passed as words.
/// scales: [out_features / group_rows, in_features / group_size], both rounded up, f32, f16 or
/// bf16. zeros: as scales, i32, from 0 to 15 or 255, or NULL for 8 or 128; NULL with
/// XSERV_QUANT_FP8. out: [out_features, in_features], f32, f16 or bf16. Any strides; out shares no
/// memory with the others.
///
/// Scales may be 0 or negative. Those that are not finite, zeros out of range and codes of
/// XSERV_QUANT_FP8 that are no numbers (0x7f, 0xff) are refused, and then nothing is written. The
/// last group of rows or of inputs has what is left, and one that is larger than the matrix has
/// all.
///
/// Codes of checkpoints: compressed-tensors packs words as they are here, and has signed bytes with
/// the highest bit flipped; FP8 is the same in all; GPTQ's qweight and scales are transposed, which
/// swapped strides say. AWQ's words are packed along the other axis, and have to be packed anew.
/// Zeros, which files pack, are a number each here.
///
/// On CUDA the host brings the matrix into the order of the kernels: each call reads all of it to
/// the host, writes it back and waits.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn xserv_op_dequantise(
    context: *const xserv_context,
    code: u32,
    group_rows: u32,
    group_size: u32,
    codes: *const xserv_tensor,
    scales: *const xserv_tensor,
    zeros: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (codes, scales, zeros, out) = unsafe {
            (
                tensor_argument(codes, "codes")?,
                tensor_argument(scales, "scales")?,
                optional_tensor(zeros, "zeros")?,
                tensor_argument(out, "out")?,
            )
        };
        let matrix = QuantisedTensors {
            code: code_of(code)?,
            group_rows: group_rows as usize,
            group_size: group_size as usize,
            codes: &codes,
            scales: &scales,
            zeros: zeros.as_ref(),
        };
        ops::quantised::tensors::dequantise(context_of(context)?.get()?, &matrix, &out)
    })
}

/// Computes a linear layer with a quantised weight W: out = x W^T + bias, summed in f32 and rounded
/// once. On the CPU, where codes are integers, x is rounded to integers of 16 bits, with a scale
/// for up to 128 of them. On CUDA x is taken as it is, and the numbers of W may be rounded to its
/// type.
///
/// x: [num_tokens, in_features]; bias: [out_features], or NULL for none; out: [num_tokens,
/// out_features]; all f32, all f16 or all bf16. code, group_rows, group_size, codes, scales, zeros:
/// W [out_features, in_features], as in xserv_op_dequantise(), which says what is refused. Any
/// strides; out shares no memory with the others.
///
/// The weight is brought into the order of the kernels in every call. On CUDA this happens on the
/// host: each call reads the whole weight to the host, writes it back and waits, which costs far
/// more than the product itself. It serves comparisons and rare products; a model brings its
/// weights into this order once, at load.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn xserv_op_linear_quantised(
    context: *const xserv_context,
    x: *const xserv_tensor,
    code: u32,
    group_rows: u32,
    group_size: u32,
    codes: *const xserv_tensor,
    scales: *const xserv_tensor,
    zeros: *const xserv_tensor,
    bias: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, codes, scales, zeros, bias, out) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(codes, "codes")?,
                tensor_argument(scales, "scales")?,
                optional_tensor(zeros, "zeros")?,
                optional_tensor(bias, "bias")?,
                tensor_argument(out, "out")?,
            )
        };
        let weight = QuantisedTensors {
            code: code_of(code)?,
            group_rows: group_rows as usize,
            group_size: group_size as usize,
            codes: &codes,
            scales: &scales,
            zeros: zeros.as_ref(),
        };
        let context = context_of(context)?;
        ops::linear::tensors::linear_tensors(context.get()?, &x, &weight, bias.as_ref(), &out)
    })
}
