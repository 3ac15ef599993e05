//! `csrc/ops/attention/flash_wgmma.cu`: the algorithm of `cuda_flash` with the instructions of Hopper.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, TensorMap,
};
use crate::error::{Error, Result};
use crate::memory::{Block, DType, Tensor};
use crate::ops::attention::cuda_params::{grid_extent, AttentionParams};
use crate::ops::attention::{head_strides, size, Form, Problem};
use crate::ops::kv_cache::layout;

kernel_struct! {
    /// The kernel has the same struct and documents its fields.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::ops) struct AttentionFlashWgmmaParams {
        q: *mut u8,
        out: *mut u8,
        cu_seqlens_q: *mut u8,
        cu_seqlens_k: *mut u8,
        block_tables: *mut u8,
        context_lens: *mut u8,
        fault: *mut u8,
        counter: *mut u8,
        partial_out: *mut u8,
        partial_stats: *mut u8,
        running: *mut u8,
        q_strides: [i64; 4] => [q_batch_stride, q_token_stride, q_head_stride, q_row_stride],
        out_strides: [i64; 4] => [o_batch_stride, o_token_stride, o_head_stride, o_row_stride],
        num_heads: i32,
        num_kv_heads: i32,
        q_len: i32,
        kv_len: i32,
        num_seqs: i32,
        num_blocks: i32,
        max_blocks_per_seq: i32,
        causal: i32,
        scale: f32,
        packed_heads: i32,
        max_segments: i32,
        window: i32,
    }
}

/// The head dim of the form with segments, and the block size that the kernels are compiled for.
const SEGMENTS_HEAD_DIM: i64 = 128;
const BLOCK_SIZE: i64 = layout::BLOCK_SIZE as i64;
/// Elements between neighbours along an axis that the copy engine cannot step over.
const MAX_STEP: i64 = 1 << 39;
/// The number of dims of a box: 128 bytes.
const BOX_DIMS: u32 = 64;
/// The most heads that form the rows of an item together.
const MAX_PACKED_HEADS: i64 = 64;
/// The most keys with which it pays to read the index arrays early.
const MAX_EARLY_KEYS: i64 = 1024;
/// The number of keys of a segment; the kernel takes it from here.
pub(in crate::ops) const SEGMENT_KEYS: u64 = 1024;
/// The bytes that a group of consumers keeps between segments: 64 queries in f32.
const RUNNING_BYTES: usize = 64 * SEGMENTS_HEAD_DIM as usize * 4;
/// The bytes that a segment leaves for a head: a query in f32, a maximum and a sum.
const PARTIAL_BYTES: usize = (SEGMENTS_HEAD_DIM as usize + 2) * 4;

/// The most multiprocessors of a chip that these kernels run on, which are Hopper's.
const MAX_MULTIPROCESSORS: usize = 144;

/// Returns the device memory that attention in segments takes on any chip while it is queued.
pub(super) fn scratch_bytes(dtype: DType, head_dim: usize) -> usize {
    if dtype != DType::F32 && head_dim as i64 == SEGMENTS_HEAD_DIM {
        running_bytes(MAX_MULTIPROCESSORS)
    } else {
        0
    }
}

fn running_bytes(num_multiprocessors: usize) -> usize {
    num_multiprocessors * 2 * RUNNING_BYTES
}

/// Returns the most segments that a query sees of up to `max_kv_len` keys.
fn max_segments(max_kv_len: i64, window: Option<i64>) -> i64 {
    let segments = |keys: i64| (keys as u64).div_ceil(SEGMENT_KEYS) as i64;
    // The first key of a window may be the last one of a segment.
    let of_window = window.map_or(i64::MAX, |window| 1 + segments(window - 1));
    segments(max_kv_len).min(of_window)
}

/// The groups of 64 queries of a block: two share their keys, one fills more multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    One,
    Two,
}

impl Groups {
    /// Chooses by the number of whole blocks there would be; measured on an H200. Both give the
    /// same bits.
    fn choose(whole_blocks: i64, num_multiprocessors: i64) -> Self {
        if whole_blocks <= num_multiprocessors / 2 {
            Groups::One
        } else {
            Groups::Two
        }
    }

    fn count(self) -> u32 {
        match self {
            Groups::One => 1,
            Groups::Two => 2,
        }
    }

    /// Returns the bytes for two buffers of queries, two tiles each of 128 keys and values,
    /// barriers and items.
    fn shared_bytes(self, head_dim: u32) -> u32 {
        (2 * self.count() * 64 + 4 * 128) * head_dim * 2 + 288
    }

    /// Returns the kernel, if there is one. With `is_early` it reads the index arrays while the
    /// preceding kernels are still running, unless there is a window.
    fn kernel(
        self,
        dtype: DType,
        head_dim: i64,
        in_segments: bool,
        is_early: bool,
        has_window: bool,
    ) -> Option<Kernel> {
        macro_rules! of {
            ($whole:ident $windowed:ident) => {
                if has_window {
                    kernels::$windowed
                } else {
                    kernels::$whole
                }
            };
        }
        let is_early = is_early && !has_window;
        let kernel = match (head_dim, self, in_segments) {
            (SEGMENTS_HEAD_DIM, Groups::Two, true) => {
                of!(ATTENTION_FLASH_WGMMA_SEGMENTS ATTENTION_FLASH_WGMMA_SEGMENTS_WINDOW)
            }
            (SEGMENTS_HEAD_DIM, Groups::One, true) => {
                of!(ATTENTION_FLASH_WGMMA_SEGMENTS_SHORT ATTENTION_FLASH_WGMMA_SEGMENTS_SHORT_WINDOW)
            }
            (128, Groups::Two, false) => {
                of!(ATTENTION_FLASH_WGMMA_128 ATTENTION_FLASH_WGMMA_128_WINDOW)
            }
            (128, Groups::One, false) if is_early => kernels::ATTENTION_FLASH_WGMMA_128_EARLY,
            (128, Groups::One, false) => {
                of!(ATTENTION_FLASH_WGMMA_128_SHORT ATTENTION_FLASH_WGMMA_128_SHORT_WINDOW)
            }
            (64, Groups::Two, false) => {
                of!(ATTENTION_FLASH_WGMMA_64 ATTENTION_FLASH_WGMMA_64_WINDOW)
            }
            (64, Groups::One, false) if is_early => kernels::ATTENTION_FLASH_WGMMA_64_EARLY,
            (64, Groups::One, false) => {
                of!(ATTENTION_FLASH_WGMMA_64_SHORT ATTENTION_FLASH_WGMMA_64_SHORT_WINDOW)
            }
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they
/// check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    [(64, Groups::One), (64, Groups::Two), (128, Groups::One), (128, Groups::Two)]
        .map(|(head_dim, groups)| {
            let name = format!("attention_flash_wgmma_{head_dim}_{}", groups.count());
            (name, groups.shared_bytes(head_dim))
        })
        .into()
}

/// Returns keys or values as `[batch, kv_len, num_kv_heads, head_dim]`, where a block cache has its blocks
/// for the batch and packed tensors have a batch of one; `None` if the copy engine cannot fetch them.
fn as_boxes(tensor: &Tensor) -> Result<Option<Tensor>> {
    let (packed, strides) = (tensor.shape().len() == 3, head_strides(tensor));
    let sizes = if packed {
        [1, size(tensor, 0), size(tensor, 1)]
    } else {
        [0, 1, 2].map(|axis| size(tensor, axis))
    };
    let head_dim = size(tensor, sizes.len() - usize::from(packed));
    let (mut shape, mut steps) = ([head_dim; 4], [1; 4]);
    let mut dense = head_dim;
    let axes = sizes.iter().zip(&strides).zip(shape.iter_mut().zip(&mut steps));
    for ((&size, &stride), (extent, step)) in axes.rev() {
        // Nobody steps along an axis of size one, but its step must be one that can be.
        (*extent, *step) = (size, if size > 1 { stride } else { dense });
        dense = dense.saturating_mul(size.max(1));
    }
    let is_fetched = (tensor.data() as usize).is_multiple_of(16)
        && !tensor.is_empty()
        && steps.iter().take(3).all(|&step| (1..MAX_STEP).contains(&step) && step % 8 == 0);
    if !is_fetched {
        return Ok(None);
    }
    let (data, element, device) = (tensor.data(), tensor.element(), tensor.device());
    // SAFETY: the elements of the tensor itself, with another axis of size one at most.
    unsafe { Tensor::from_raw(data, element, device, &shape, Some(&steps), "k or v") }.map(Some)
}

/// Queues a call, unless only the portable kernel serves it; returns whether the call was queued. `k` and
/// `v` are those of the problem, or copies of them.
pub(super) fn try_launch(
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
    k: &Tensor,
    v: &Tensor,
) -> Result<bool> {
    let Problem { dtype, head_dim, max_q_len, num_heads, num_seqs, .. } = *problem;
    let is_paged = problem.form == Form::Paged;
    let is_served = cuda.device().info().compute_capability == (9, 0)
        && (!is_paged || size(k, 1) == BLOCK_SIZE)
        && problem.scale > 0.0;
    if !is_served || dtype == DType::F32 || max_q_len == 0 || num_seqs == 0 {
        return Ok(false);
    }
    let (Some(k), Some(v)) = (as_boxes(k)?, as_boxes(v)?) else { return Ok(false) };
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    // The heads of a kv head of one query share their keys. The bits are the same, and there are
    // that many times fewer items.
    let heads_per_kv = num_heads.checked_div(problem.num_kv_heads).unwrap_or(0);
    let is_packed = max_q_len == 1 && (2..=MAX_PACKED_HEADS).contains(&heads_per_kv);
    let heads = if is_packed { problem.num_kv_heads } else { num_heads };
    let pairs = heads.saturating_mul(num_seqs);
    let tiles = |queries: u64| (max_q_len as u64).div_ceil(queries) as i64;
    let groups = if is_packed {
        Groups::One
    } else {
        Groups::choose(tiles(128).saturating_mul(pairs), processors)
    };
    let in_segments = problem.options.in_segments;
    let has_settled_indices = problem.options.has_settled_indices || problem.form == Form::Batched;
    let is_early = has_settled_indices && problem.max_kv_len <= MAX_EARLY_KEYS;
    let has_window = problem.window.is_some();
    let kernel = groups.kernel(dtype, head_dim, in_segments, is_early, has_window);
    let Some(kernel) = kernel else { return Ok(false) };
    if !cuda.has_kernel(kernel)? {
        return Ok(false);
    }
    let extents = [1, BLOCK_SIZE as u32, 1, BOX_DIMS];
    let k_map = TensorMap::new(cuda, &k, &extents)?;
    let v_map = TensorMap::new(cuda, &v, &extents)?;
    let counter = cuda.counters(1)?;
    let counter = counter.ok_or_else(|| Error::internal("no counter for attention"))?;
    // Segments of few sequences are items of their own, where there is room for their results.
    let all_segments = max_segments(problem.max_kv_len, problem.window);
    let scratch_bytes = running_bytes(processors as usize);
    let rows_of = |segments: i64| num_seqs.saturating_mul(num_heads).saturating_mul(segments);
    let fits = rows_of(all_segments) <= (scratch_bytes / PARTIAL_BYTES) as i64;
    let is_shared = in_segments && is_packed && all_segments > 1 && pairs < 2 * processors && fits;
    let segments = if is_shared { all_segments } else { 1 };
    let partial_rows = rows_of(segments);
    // The memory is returned although the kernels are only queued: work of its next user is queued
    // after them.
    let memory = if in_segments {
        Some(cuda.allocator().allocate(scratch_bytes, "partial results of attention")?)
    } else {
        None
    };
    let scratch = memory.as_ref().map_or(std::ptr::null_mut(), Block::start);
    // The strides of sequences, of tokens, of heads or groups of them, and of the rows of an item.
    let strides = |[batch, token, head]: [i64; 3]| {
        if is_packed {
            [batch, token, heads_per_kv * head, head]
        } else {
            [batch, token, head, token]
        }
    };
    let arguments = AttentionFlashWgmmaParams {
        q: params.q,
        out: params.out,
        cu_seqlens_q: params.cu_seqlens_q,
        cu_seqlens_k: params.cu_seqlens_k,
        block_tables: params.block_tables,
        context_lens: params.context_lens,
        fault: params.fault,
        counter,
        partial_out: if segments > 1 { scratch } else { std::ptr::null_mut() },
        partial_stats: scratch.wrapping_add(partial_rows as usize * SEGMENTS_HEAD_DIM as usize * 4),
        running: scratch,
        q_strides: strides(params.q_strides),
        out_strides: strides(params.out_strides),
        num_heads: heads as i32,
        num_kv_heads: params.num_kv_heads,
        q_len: params.q_len,
        kv_len: params.kv_len,
        num_seqs: grid_extent(num_seqs, "sequences")? as i32,
        num_blocks: params.num_blocks,
        max_blocks_per_seq: params.max_blocks_per_seq,
        causal: i32::from(problem.options.causal && !is_packed),
        scale: params.scale,
        packed_heads: if is_packed { heads_per_kv as i32 } else { 0 },
        max_segments: segments as i32,
        window: params.window,
    };
    let items =
        tiles(64 * u64::from(groups.count())).saturating_mul(pairs).saturating_mul(segments);
    let launch = Launch {
        grid: (items.min(processors) as u32, 1, 1),
        block: 128 * (groups.count() + 1),
        shared_bytes: groups.shared_bytes(head_dim as u32),
    };
    let launched = Arguments::new().value(&arguments).value(&k_map).value(&v_map);
    // SAFETY: the arguments of the kernel; the strides span the tensors' elements, the contents of
    // the index arrays are compared with the cache, and the counter is zero between launches.
    unsafe { cuda.launch_overlapping(kernel, launch, launched) }?;
    if segments > 1 {
        let merge = kernels::ATTENTION_FLASH_WGMMA_MERGE.of_half(dtype)?;
        let grid = (num_heads as u32, grid_extent(num_seqs, "sequences")?, 1);
        let launch = Launch { grid, block: head_dim as u32, shared_bytes: 0 };
        let arguments = Arguments::new().value(&arguments);
        // SAFETY: the argument of the kernel, which reads what the preceding one has left.
        unsafe { cuda.launch(merge, launch, arguments) }?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_in_few_segments() {
        let keys = SEGMENT_KEYS as i64;
        for window in [1, 2, 100, keys - 1, keys, keys + 1, keys + 2, 4 * keys, 4 * keys + 2] {
            let touched = |end: i64| (end - 1) / keys - (end - window).max(0) / keys + 1;
            let most = (1..=20 * keys).map(touched).max();
            assert_eq!(most, Some(max_segments(20 * keys, Some(window))), "{window}");
        }
        assert_eq!(max_segments(3 * keys + 1, None), 4);
        assert_eq!(max_segments(2 * keys, Some(10 * keys)), 2);
    }
}
