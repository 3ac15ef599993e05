//! Operators with indices: embedding, rotary embeddings, argmax, top-k.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard_work;
use super::status::xserv_status;
use super::tensor::{optional_tensor, tensor_argument, xserv_tensor};
use crate::error::Error;
use crate::ops;
use crate::ops::rope::RopePairing;

/// Which two elements of a head form pair i of its head_dim / 2 pairs, for rotary embeddings.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_rope_pairing {
    /// Elements i and i + head_dim / 2: Hugging Face's rotate_half, as checkpoints of Qwen3 and
    /// Llama in that format require.
    XSERV_ROPE_SPLIT_HALF = 0,
    /// Elements 2i and 2i + 1, as in the paper and in GPT-J.
    XSERV_ROPE_INTERLEAVED = 1,
}

/// Looks rows up in a table, bit for bit: out[i] = table[ids[i]].
///
/// table: [vocab_size, width], f32, f16 or bf16; ids: [...], i32 or i64; out: [..., width], of the
/// table's type; any strides. out shares no memory with the others.
///
/// An id outside the table is never followed. On the CPU the call fails with
/// XSERV_STATUS_INVALID_ARGUMENT, and nothing is written. On CUDA it gives a row of zeros, and
/// xserv_context_synchronize() reports the first one.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_embedding(
    context: *const xserv_context,
    table: *const xserv_tensor,
    ids: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (table, ids, out) = unsafe {
            (
                tensor_argument(table, "table")?,
                tensor_argument(ids, "ids")?,
                tensor_argument(out, "out")?,
            )
        };
        ops::embedding::embedding(context_of(context)?.get()?, &table, &ids, &out)
    })
}

/// Computes the table of xserv_op_rope(): cos[p, i] = attention_scale * cos(p * inv_freq[i]), sin
/// likewise. The angles are computed in f64, so that the table is exact to f32 at every position.
///
/// inv_freq: [head_dim / 2]; attention_scale: a finite factor, 1 unless the model scales its rotary
/// embeddings (YaRN); cos, sin: [max_position, head_dim / 2]; all f32, any strides. cos and sin
/// share no memory with each other or with inv_freq.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_rope_table(
    context: *const xserv_context,
    inv_freq: *const xserv_tensor,
    attention_scale: f32,
    cos: *const xserv_tensor,
    sin: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (inv_freq, cos, sin) = unsafe {
            (
                tensor_argument(inv_freq, "inv_freq")?,
                tensor_argument(cos, "cos")?,
                tensor_argument(sin, "sin")?,
            )
        };
        ops::rope::rope_table(context_of(context)?.get()?, &inv_freq, attention_scale, &cos, &sin)
    })
}

/// Applies rotary position embeddings (Su et al., 2021, equation 34): rotates pair i of every head
/// of a token at position p by the angle of the table's entry [p, i]: a' = a cos - b sin, b' = b
/// cos + a sin, computed in f32 and rounded once. The whole head is rotated.
///
/// q, q_out: [num_tokens, num_heads, head_dim]; k, k_out: [num_tokens, num_kv_heads, head_dim], or
/// both NULL; all f32, all f16 or all bf16, head_dim even. positions: [num_tokens], i32 or i64.
/// cos, sin: [max_position, head_dim / 2], f32, see xserv_op_rope_table(). Any strides: q and k may
/// be slices of one fused projection. pairing: an xserv_rope_pairing. q_out may be the same view as
/// q, k_out the same as k; outputs share no memory with anything else.
///
/// A position outside the table is never followed. On the CPU the call fails with
/// XSERV_STATUS_INVALID_ARGUMENT, and nothing is written. On CUDA the token's heads are copied
/// unrotated, and xserv_context_synchronize() reports the first one.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_UNSUPPORTED (on CUDA, heads of more than
/// 1024 elements), XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_rope(
    context: *const xserv_context,
    q: *const xserv_tensor,
    k: *const xserv_tensor,
    positions: *const xserv_tensor,
    cos: *const xserv_tensor,
    sin: *const xserv_tensor,
    pairing: u32,
    q_out: *const xserv_tensor,
    k_out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (q, positions, cos, sin, q_out, k, k_out) = unsafe {
            (
                tensor_argument(q, "q")?,
                tensor_argument(positions, "positions")?,
                tensor_argument(cos, "cos")?,
                tensor_argument(sin, "sin")?,
                tensor_argument(q_out, "q_out")?,
                optional_tensor(k, "k")?,
                optional_tensor(k_out, "k_out")?,
            )
        };
        let pairing = match pairing {
            0 => RopePairing::SplitHalf,
            1 => RopePairing::Interleaved,
            other => {
                return Err(Error::invalid_argument(format!(
                    "pairing is {other}, not an xserv_rope_pairing"
                )))
            }
        };
        let k = match (&k, &k_out) {
            (Some(x), Some(out)) => Some(ops::rope::RopeHeads { x, out }),
            (None, None) => None,
            (Some(_), None) => return Err(Error::invalid_argument("k_out is NULL, but k is not")),
            (None, Some(_)) => return Err(Error::invalid_argument("k is NULL, but k_out is not")),
        };
        let q = ops::rope::RopeHeads { x: &q, out: &q_out };
        ops::rope::rope(context_of(context)?.get()?, q, k, &positions, &cos, &sin, pairing)
    })
}

/// Finds the index of the largest element along the last dimension. NaN counts as larger than every
/// number; among equal elements the lowest index wins.
///
/// x: [..., width], f32, f16 or bf16, width at least 1 and below 2^31; out: [...], i32 or i64. Any
/// strides; the two share no memory.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_argmax(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::argmax::argmax(context_of(context)?.get()?, &x, &out)
    })
}

/// Finds the k largest elements along the last dimension, in descending order, and their indices.
/// NaN counts as larger than every number; among equal elements the lowest index comes first. The
/// values are those of x, bit for bit.
///
/// x: [..., width], f32, f16 or bf16, width below 2^31; values: [..., k], of the type of x;
/// indices: [..., k], i32; any strides; they share no memory. k is the last dimension of values, at
/// most width and at most 1024.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_top_k(
    context: *const xserv_context,
    x: *const xserv_tensor,
    values: *const xserv_tensor,
    indices: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, values, indices) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(values, "values")?,
                tensor_argument(indices, "indices")?,
            )
        };
        ops::top_k::top_k(context_of(context)?.get()?, &x, &values, &indices)
    })
}
