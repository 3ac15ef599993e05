//! `csrc/ops/attention/flash.cu`: tiles of queries against tiles of keys, without scores in memory.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Kernel, Launch};
use crate::error::{Error, Result};
use crate::memory::DType;
#[cfg(test)]
use crate::ops::attention::choice::KERNEL_HEAD_DIMS;
use crate::ops::attention::cuda_params::{grid_extent, AttentionParams};
use crate::ops::attention::Problem;

/// A kernel and the launch parameters that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FlashKernel {
    kernel: Kernel,
    /// The number of queries of a block.
    queries: i64,
    shared_bytes: u32,
}

/// Returns the bytes from row to row of a tile of `row_bytes` bytes a row, as in `TileRows` of
/// `csrc/ops/attention/attention.cuh`.
pub(super) fn tile_stride(row_bytes: i64) -> i64 {
    match row_bytes % 128 {
        0 => row_bytes,
        _ => ((row_bytes / 16) | 1) * 16,
    }
}

/// Returns the 16-bit kernel that is compiled for windows.
fn windowed(dtype: DType, head_dim: i64, is_short: bool) -> Option<Kernel> {
    match (head_dim, is_short) {
        (64, false) => kernels::ATTENTION_FLASH_D64_WINDOW,
        (64, true) => kernels::ATTENTION_FLASH_D64_SHORT_WINDOW,
        (80, _) => kernels::ATTENTION_FLASH_D80_WINDOW,
        (96, _) => kernels::ATTENTION_FLASH_D96_WINDOW,
        (128, false) => kernels::ATTENTION_FLASH_D128_WINDOW,
        (128, true) => kernels::ATTENTION_FLASH_D128_SHORT_WINDOW,
        (256, _) => kernels::ATTENTION_FLASH_D256_WINDOW,
        _ => return None,
    }
    .of(dtype)
}

/// Returns the kernel for a call with this number of (sequence, head) pairs. A block takes half the
/// queries where whole blocks would leave multiprocessors idle, each of which holds two: on an H200
/// (132 multiprocessors) that is 1.2 to 1.45 times as fast with 128 and 256 whole blocks, and 0.9
/// times with 512.
fn kernel(
    dtype: DType,
    head_dim: i64,
    max_q_len: i64,
    num_pairs: i64,
    num_multiprocessors: i64,
) -> Option<FlashKernel> {
    let whole_blocks = (max_q_len as u64).div_ceil(128) as i64 * num_pairs;
    let is_short = max_q_len <= 64 || whole_blocks < 2 * num_multiprocessors;
    let kernel = match (head_dim, is_short && dtype != DType::F32) {
        (64, false) => kernels::ATTENTION_FLASH_D64.of(dtype),
        (80, _) => kernels::ATTENTION_FLASH_D80.of(dtype),
        (96, _) => kernels::ATTENTION_FLASH_D96.of(dtype),
        (128, false) => kernels::ATTENTION_FLASH_D128.of(dtype),
        (256, _) => kernels::ATTENTION_FLASH_D256.of(dtype),
        (64, true) => kernels::ATTENTION_FLASH_D64_SHORT.of(dtype)?,
        (128, true) => kernels::ATTENTION_FLASH_D128_SHORT.of(dtype)?,
        _ => return None,
    };
    if dtype == DType::F32 {
        let keys = if head_dim > 128 { 16 } else { 32 };
        let shared = ((32 + 2 * keys) * (head_dim + 4) + 32 * (keys + 1)) * 4;
        return Some(FlashKernel { kernel, queries: 32, shared_bytes: shared as u32 });
    }
    let halves = is_short && matches!(head_dim, 64 | 128) || head_dim == 256;
    let queries = if halves { 64 } else { 128 };
    let keys = if head_dim == 256 { 32 } else { 64 };
    // The memory holds the queries, and two stages of keys and values.
    let shared = (queries + 2 * 2 * keys) * tile_stride(2 * head_dim);
    Some(FlashKernel { kernel, queries, shared_bytes: shared as u32 })
}

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they
/// check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    let mut found = Vec::new();
    for dim in KERNEL_HEAD_DIMS {
        for (dtype, queries, suffix) in
            [(DType::F32, 1, "_f32"), (DType::F16, 1 << 20, ""), (DType::F16, 1, "_short")]
        {
            let is_found = suffix != "_short" || matches!(dim, 64 | 128);
            let kernel = kernel(dtype, dim, queries, 1, 1).filter(|_| is_found);
            found.extend(
                kernel.map(|k| (format!("attention_flash_d{dim}{suffix}"), k.shared_bytes)),
            );
        }
    }
    found
}

/// Queues a call.
pub(super) fn launch(
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
) -> Result<()> {
    let Problem { dtype, head_dim, max_q_len, num_heads, num_seqs, .. } = *problem;
    if max_q_len == 0 || num_seqs == 0 {
        return Ok(());
    }
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let none = || Error::internal(format!("no flash kernel for head_dim {head_dim}"));
    let pairs = num_heads.saturating_mul(num_seqs);
    let mut flash = kernel(dtype, head_dim, max_q_len, pairs, processors).ok_or_else(none)?;
    if problem.window.is_some() && dtype != DType::F32 {
        let is_short = flash.queries == 64;
        flash.kernel = windowed(dtype, head_dim, is_short).ok_or_else(none)?;
    }
    let tiles =
        grid_extent((max_q_len as u64).div_ceil(flash.queries as u64) as i64, "tiles of queries")?;
    let launch = Launch {
        grid: (params.num_heads as u32, tiles, grid_extent(num_seqs, "sequences")?),
        block: 128,
        shared_bytes: flash.shared_bytes,
    };
    // SAFETY: the argument of the kernel; the strides span the tensors' elements, and what the
    // index arrays hold is clamped to them.
    unsafe { cuda.launch(flash.kernel, launch, Arguments::new().value(params)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_blocks_where_whole_ones_are_too_few() {
        let queries = |dtype, head_dim, max_q_len, heads| {
            kernel(dtype, head_dim, max_q_len, heads, 132).unwrap().queries
        };
        assert_eq!(queries(DType::BF16, 128, 512, 32), 64);
        assert_eq!(queries(DType::BF16, 128, 2048, 16), 64);
        assert_eq!(queries(DType::BF16, 128, 2048, 32), 128);
        assert_eq!(queries(DType::F16, 64, 64, 4096), 64);
        assert_eq!(queries(DType::F16, 80, 64, 1), 128);
        assert_eq!(queries(DType::F16, 256, 4096, 32), 64);
        assert_eq!(queries(DType::F32, 64, 64, 1), 32);
        assert_eq!(kernel(DType::F32, 40, 64, 1, 132), None);
    }

    #[test]
    fn shared_memory_fits_every_generation() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for head_dim in KERNEL_HEAD_DIMS {
                for q_len in [1, 100_000] {
                    let kernel = kernel(dtype, head_dim, q_len, 64, 132).unwrap();
                    // The limit is 99 KiB less the 1 KiB that the system keeps for a block.
                    assert!(kernel.shared_bytes <= 98 * 1024, "{kernel:?}");
                }
            }
        }
        assert_eq!(kernel(DType::BF16, 128, 8192, 32, 132).unwrap().shared_bytes, 98304);
        assert_eq!(kernel(DType::BF16, 80, 8192, 32, 132).unwrap().shared_bytes, 67584);
        assert_eq!(kernel(DType::F32, 256, 8192, 32, 132).unwrap().shared_bytes, 68736);
    }
}
