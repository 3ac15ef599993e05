//! The CUDA half.

use super::angles::{head_strides, Angles, RopePairing};
use crate::backend::cuda::{kernel_struct, kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::num_blocks;

kernel_struct! {
    /// `csrc/ops/rope/rope.cu` has the same struct and documents its fields.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct RopeArgs {
        q: *mut u8,
        q_out: *mut u8,
        k: *mut u8,
        k_out: *mut u8,
        positions: *mut u8,
        cos: *mut u8,
        sin: *mut u8,
        fault: *mut u8,
        /// The strides of tokens and of heads: q, q_out, k, k_out.
        strides: [[i64; 2]; 4] => [
            q_token_stride, q_head_stride,
            q_out_token_stride, q_out_head_stride,
            k_token_stride, k_head_stride,
            k_out_token_stride, k_out_head_stride,
        ],
        num_heads: i32,
        num_kv_heads: i32,
        head_dim: i32,
        max_position: i32,
        lanes: i32,
        lanes_multiplier: i32,
        heads_at_a_time: i32,
        padding: i32,
    }
}

/// The most threads of a block.
const MAX_THREADS: i64 = 512;

/// Returns how many heads a block rotates at a time: all that fit if there are few tokens, for the
/// lowest latency; otherwise 16, so that several blocks share a multiprocessor (measured on an H200
/// at 1, 2048 and 8192 tokens).
fn heads_at_a_time(num_tokens: i64, heads: i64, lanes: i64) -> i64 {
    let most = if num_tokens <= 256 { heads } else { 16 };
    most.min(heads).min(MAX_THREADS / lanes).max(1)
}

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    tensors: [Option<&Tensor>; 4],
    num_tokens: i64,
    head_dim: i64,
    angles: &Angles<'_>,
) -> Result<()> {
    let too_many =
        |what: &str, found: i64| Error::unsupported(format!("rope: {found} {what} are too many"));
    let int = |what: &str, found: i64| i32::try_from(found).map_err(|_| too_many(what, found));
    let vector = 16 / dtype.size_bytes() as i64;
    let strides =
        tensors.map(|tensor| tensor.and_then(head_strides).map_or([0; 2], <[i64; 2]>::from));
    let is_vector = head_dim % (2 * vector) == 0
        && strides.iter().flatten().all(|stride| stride % vector == 0)
        && tensors
            .iter()
            .flatten()
            .chain(&[angles.cos, angles.sin])
            .all(|tensor| (tensor.data() as usize).is_multiple_of(16));
    let is_split = angles.pairing == RopePairing::SplitHalf;
    let kernel = match (is_split, is_vector, angles.positions_are_i64) {
        (true, true, false) => kernels::ROPE_SPLIT_VEC_I32.of(dtype),
        (true, true, true) => kernels::ROPE_SPLIT_VEC_I64.of(dtype),
        (true, false, false) => kernels::ROPE_SPLIT_SCALAR_I32.of(dtype),
        (true, false, true) => kernels::ROPE_SPLIT_SCALAR_I64.of(dtype),
        (false, true, false) => kernels::ROPE_INTERLEAVED_VEC_I32.of(dtype),
        (false, true, true) => kernels::ROPE_INTERLEAVED_VEC_I64.of(dtype),
        (false, false, false) => kernels::ROPE_INTERLEAVED_SCALAR_I32.of(dtype),
        (false, false, true) => kernels::ROPE_INTERLEAVED_SCALAR_I64.of(dtype),
    };
    let lanes = head_dim / 2 / if is_vector { vector } else { 1 };
    if lanes > MAX_THREADS {
        return Err(Error::unsupported(format!("rope: heads of {head_dim} elements are too long")));
    }
    let num_heads = |index: usize| {
        let tensor = tensors.get(index).copied().flatten();
        tensor.and_then(|tensor| tensor.shape().get(1).copied()).unwrap_or(0)
    };
    let (num_heads, num_kv_heads) = (num_heads(0), num_heads(2));
    let at_a_time = heads_at_a_time(num_tokens, num_heads.saturating_add(num_kv_heads), lanes);
    let [q, q_out, k, k_out] =
        tensors.map(|tensor| tensor.map_or(std::ptr::null_mut(), Tensor::data));
    let arguments = RopeArgs {
        q,
        q_out,
        k,
        k_out,
        positions: angles.positions.data(),
        cos: angles.cos.data(),
        sin: angles.sin.data(),
        fault: cuda.faults(),
        strides,
        num_heads: int("heads", num_heads)?,
        // Their sum is computed in 32 bits.
        num_kv_heads: int("heads", num_heads.saturating_add(num_kv_heads))? - num_heads as i32,
        head_dim: head_dim as i32,
        max_position: int("positions", angles.max_position() as i64)?,
        lanes: lanes as i32,
        lanes_multiplier: ((1i64 << 20) as u64).div_ceil(lanes as u64) as i32,
        heads_at_a_time: at_a_time as i32,
        padding: 0,
    };
    let grid = num_blocks(num_tokens, 1).ok_or_else(|| too_many("tokens", num_tokens))?;
    let launch = Launch::linear(grid, (lanes * at_a_time) as u32);
    // SAFETY: the argument of xserv_rope_*; the strides lead to the heads of all tensors, and the
    // kernel reads no row outside the tables.
    unsafe { cuda.launch(kernel, launch, Arguments::new().value(&arguments)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_a_thread_for_each_lane() {
        for lanes in 1..=MAX_THREADS {
            let multiplier = ((1i64 << 20) as u64).div_ceil(lanes as u64);
            for heads in [1, 2, 3, 40, 1000] {
                for tokens in [1, 257, 8192] {
                    let at_a_time = heads_at_a_time(tokens, heads, lanes);
                    assert!((1..=heads).contains(&at_a_time) && at_a_time * lanes <= MAX_THREADS);
                }
            }
            for thread in 0..1024u64 {
                let product = i32::try_from(thread * multiplier).unwrap();
                assert_eq!(i64::from(product >> 20), thread as i64 / lanes, "{thread} / {lanes}");
            }
        }
        assert_eq!(heads_at_a_time(8192, 40, 8), 16);
        assert_eq!(heads_at_a_time(1, 40, 8), 40);
    }
}
