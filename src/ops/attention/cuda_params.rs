//! The parameters that the CUDA kernels of attention share.

use crate::backend::cuda::kernel_struct;
use crate::error::{Error, Result};
use crate::ops::attention::MAX_SIZE;

kernel_struct! {
    /// `csrc/ops/attention/attention.cuh` has the same struct and documents its fields.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::ops) struct AttentionParams {
        pub q: *mut u8,
        pub k: *mut u8,
        pub v: *mut u8,
        pub out: *mut u8,
        pub cu_seqlens_q: *mut u8,
        pub cu_seqlens_k: *mut u8,
        pub block_tables: *mut u8,
        pub context_lens: *mut u8,
        pub fault: *mut u8,
        /// The distances from sequence (or block) to sequence, token to token, and head to head.
        pub q_strides: [i64; 3] => [q_batch_stride, q_token_stride, q_head_stride],
        pub k_strides: [i64; 3] => [k_batch_stride, k_token_stride, k_head_stride],
        pub v_strides: [i64; 3] => [v_batch_stride, v_token_stride, v_head_stride],
        pub out_strides: [i64; 3] => [o_batch_stride, o_token_stride, o_head_stride],
        pub num_heads: i32,
        pub num_kv_heads: i32,
        pub q_len: i32,
        pub kv_len: i32,
        pub causal: i32,
        pub num_blocks: i32,
        pub block_size_log2: i32,
        pub max_blocks_per_seq: i32,
        pub scale: f32,
        pub window: i32,
    }
}

/// The window that stands for none, as the kernels take it: no sequence has more keys.
pub(in crate::ops) const NO_WINDOW: i64 = MAX_SIZE;

/// Returns a window as the kernels take it.
pub(super) fn window_or_none(window: Option<i64>) -> i32 {
    window.unwrap_or(NO_WINDOW).min(NO_WINDOW) as i32
}

/// The keys or values that a warp of these kernels copies at once (`csrc/ops/attention/cache_tile.cuh`).
pub(super) const TILE_KEYS: i64 = 16;

/// The number of query heads of a kv head that a block of the kernels for one query per sequence
/// serves; they take it from here.
pub(in crate::ops) const GROUP_HEADS: i64 = 8;

/// Returns a size as the kernels count it.
pub(super) fn count(size: i64) -> Result<i32> {
    i32::try_from(size)
        .map_err(|_| Error::unsupported(format!("attention: a size of {size} is too large")))
}

/// Returns a size as a second or third extent of a grid.
pub(super) fn grid_extent(size: i64, what: &str) -> Result<u32> {
    match u32::try_from(size) {
        Ok(extent) if extent <= 65535 => Ok(extent),
        _ => {
            Err(Error::unsupported(format!("attention: {size} {what} are too many for one launch")))
        }
    }
}
