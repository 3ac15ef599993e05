//! `csrc/ops/attention/split_kv.cu`: one query per sequence, its keys split among blocks.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, MAX_COUNTERS,
};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::DType;
#[cfg(test)]
use crate::ops::attention::choice::KERNEL_HEAD_DIMS;
use crate::ops::attention::cuda_flash::tile_stride;
use crate::ops::attention::cuda_params::{
    count, grid_extent, AttentionParams, GROUP_HEADS, TILE_KEYS,
};
use crate::ops::attention::{Form, Problem};

kernel_struct! {
    /// `csrc/ops/attention/attention.cuh` has the same struct and documents its fields.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::ops) struct AttentionDecodeParams {
        q: *mut u8,
        k: *mut u8,
        v: *mut u8,
        out: *mut u8,
        partial_out: *mut u8,
        partial_stats: *mut u8,
        counters: *mut u8,
        cu_seqlens_q: *mut u8,
        cu_seqlens_k: *mut u8,
        block_tables: *mut u8,
        context_lens: *mut u8,
        fault: *mut u8,
        q_strides: [i64; 2] => [q_seq_stride, q_head_stride],
        k_strides: [i64; 3] => [k_seq_stride, k_token_stride, k_head_stride],
        v_strides: [i64; 3] => [v_seq_stride, v_token_stride, v_head_stride],
        out_strides: [i64; 2] => [o_seq_stride, o_head_stride],
        num_heads: i32,
        num_kv_heads: i32,
        num_tokens: i32,
        kv_len: i32,
        max_chunks: i32,
        num_blocks: i32,
        block_size_log2: i32,
        max_blocks_per_seq: i32,
        scale: f32,
        window: i32,
    }
}

/// Returns the most chunks that any sequence of up to `max_kv_len` keys has, by the rule of the
/// kernel.
fn max_chunks(max_kv_len: i64) -> i64 {
    let up_to =
        |len: i64, chunk_len: i64| (max_kv_len.min(len) as u64).div_ceil(chunk_len as u64) as i64;
    let long = if max_kv_len > 65536 { 64 } else { 1 };
    up_to(2048, 256).max(up_to(8192, 512)).max(up_to(65536, 1024)).max(long)
}

/// Returns the most keys that the chunks of a sequence divide: those of a window begin with the tile in
/// which it begins.
fn max_divided(problem: &Problem<'_>) -> i64 {
    problem.max_kv_len.min(problem.max_seen() + TILE_KEYS - 1)
}

/// Returns the kernel, its threads and its dynamic shared memory in bytes.
fn kernel(dtype: DType, head_dim: i64, is_fp8: bool) -> Option<(Kernel, u32, u32)> {
    // These are as instantiated at the end of the source.
    let (dense, fp8, warps, stages) = match head_dim {
        64 => (kernels::ATTENTION_SPLIT_KV_D64, kernels::ATTENTION_SPLIT_KV_FP8_D64, 4, 4),
        80 => (kernels::ATTENTION_SPLIT_KV_D80, kernels::ATTENTION_SPLIT_KV_FP8_D80, 4, 4),
        96 => (kernels::ATTENTION_SPLIT_KV_D96, kernels::ATTENTION_SPLIT_KV_FP8_D96, 4, 3),
        128 => (kernels::ATTENTION_SPLIT_KV_D128, kernels::ATTENTION_SPLIT_KV_FP8_D128, 4, 2),
        256 => (kernels::ATTENTION_SPLIT_KV_D256, kernels::ATTENTION_SPLIT_KV_FP8_D256, 3, 2),
        _ => return None,
    };
    let kernel = if is_fp8 { fp8 } else { dense }.of(dtype);
    // Twice as many stages of half the bytes.
    let (stages, row_bytes) = if is_fp8 { (2 * stages, head_dim) } else { (stages, 2 * head_dim) };
    match dtype {
        DType::F32 => Some((kernel, 128, 0)),
        // Each warp and stage has 16 keys and values.
        _ => Some((kernel, warps * 32, warps * stages * 2 * 16 * tile_stride(row_bytes) as u32)),
    }
}

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they
/// check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    let of = |dim, name: &str, is_fp8| {
        let bytes = kernel(DType::F16, dim, is_fp8)?.2;
        Some((format!("attention_split_kv_{name}d{dim}"), bytes))
    };
    let both = |dim| [of(dim, "", false), of(dim, "fp8_", true)];
    KERNEL_HEAD_DIMS.into_iter().flat_map(both).flatten().collect()
}

/// The most memory for partial results where sequences lie in a block cache: enough for all
/// multiprocessors several times over. More sequences take several launches.
const MAX_PARTIAL_BYTES: i64 = 32 << 20;

/// Returns the bytes of partial results of a sequence of up to `max_kv_len` keys.
fn partial_bytes(num_heads: i64, head_dim: i64, max_kv_len: i64) -> i64 {
    match max_chunks(max_kv_len) {
        // Nothing is combined if every sequence has a single chunk.
        ..=1 => 0,
        chunks => num_heads.saturating_mul(chunks).saturating_mul(head_dim + 2).saturating_mul(4),
    }
}

/// Returns the device memory that a call over a block cache takes while it is queued.
pub(super) fn scratch_bytes(
    num_seqs: usize,
    num_heads: usize,
    head_dim: usize,
    max_kv_len: usize,
) -> usize {
    let of_a_sequence = partial_bytes(num_heads as i64, head_dim as i64, max_kv_len as i64);
    let partial = of_a_sequence.saturating_mul(num_seqs as i64);
    let counters = num_seqs.saturating_mul(num_heads).saturating_mul(4);
    // There are two arrays and, if they are many, counters, each rounded up.
    (partial.min(MAX_PARTIAL_BYTES.max(of_a_sequence)) as usize)
        .saturating_add(if counters > MAX_COUNTERS * 4 { counters } else { 0 })
        .saturating_add(3 * 512)
}

/// Queues a call with at most one query per sequence.
pub(super) fn launch(
    context: &ComputeContext,
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
) -> Result<()> {
    let Problem { num_seqs, num_heads, head_dim, .. } = *problem;
    let is_cached = problem.form == Form::Paged && !params.cu_seqlens_q.is_null();
    let of_a_sequence = partial_bytes(num_heads, head_dim, max_divided(problem));
    let group = if is_cached && of_a_sequence > 0 {
        (MAX_PARTIAL_BYTES / of_a_sequence).max(1)
    } else {
        num_seqs
    };
    let mut first = 0;
    while first < num_seqs {
        let part = Problem { num_seqs: group.min(num_seqs - first), ..*problem };
        // The arrays begin at the first sequence of the group; they say where in q and out its
        // tokens are.
        let from = |array: *mut u8, words: i64| {
            if array.is_null() {
                array
            } else {
                array.wrapping_add((first * words * 4) as usize)
            }
        };
        let params = AttentionParams {
            cu_seqlens_q: from(params.cu_seqlens_q, 1),
            block_tables: from(params.block_tables, i64::from(params.max_blocks_per_seq)),
            context_lens: from(params.context_lens, 1),
            ..*params
        };
        launch_group(context, cuda, &part, &params)?;
        first += part.num_seqs;
    }
    Ok(())
}

fn launch_group(
    context: &ComputeContext,
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
) -> Result<()> {
    let Problem { num_seqs, num_heads, num_kv_heads, head_dim, .. } = *problem;
    let (kernel, block, shared_bytes) = kernel(problem.dtype, head_dim, problem.is_fp8)
        .ok_or_else(|| Error::internal(format!("no decode kernel for head_dim {head_dim}")))?;
    let chunks = max_chunks(max_divided(problem));
    let heads_per_kv = num_heads / num_kv_heads.max(1);
    let units = grid_extent(
        num_kv_heads * (heads_per_kv as u64).div_ceil(GROUP_HEADS as u64) as i64,
        "kv heads",
    )?;
    let launch = Launch {
        grid: (chunks as u32, units, grid_extent(num_seqs, "sequences")?),
        block,
        shared_bytes,
    };

    // Nothing is combined if every sequence has a single chunk.
    let rows =
        if chunks > 1 { num_seqs.saturating_mul(num_heads).saturating_mul(chunks) } else { 0 };
    let bytes = |floats: i64| {
        usize::try_from(rows.saturating_mul(floats).saturating_mul(4)).unwrap_or(usize::MAX)
    };
    let what = "partial results of attention";
    let partial_out = context.allocate(bytes(head_dim), what)?;
    let partial_stats = context.allocate(bytes(2), what)?;
    let num_counters = num_seqs as usize * units as usize;
    let mut own_counters = None;
    let counters = match cuda.counters(num_counters)? {
        Some(counters) => counters,
        None => {
            let block =
                own_counters.insert(context.allocate(num_counters * 4, "counters of attention")?);
            // SAFETY: fresh device memory of that size.
            unsafe { cuda.fill(block.start(), 0, num_counters * 4) }?;
            block.start()
        }
    };

    let packed_q = !params.cu_seqlens_q.is_null();
    // A query is a sequence, or a token where q is packed.
    let query_strides = |[seq, token, head]: [i64; 3]| [if packed_q { token } else { seq }, head];
    let decode = AttentionDecodeParams {
        q: params.q,
        k: params.k,
        v: params.v,
        out: params.out,
        partial_out: partial_out.start(),
        partial_stats: partial_stats.start(),
        counters,
        cu_seqlens_q: params.cu_seqlens_q,
        cu_seqlens_k: params.cu_seqlens_k,
        block_tables: params.block_tables,
        context_lens: params.context_lens,
        fault: params.fault,
        q_strides: query_strides(params.q_strides),
        k_strides: params.k_strides,
        v_strides: params.v_strides,
        out_strides: query_strides(params.out_strides),
        num_heads: params.num_heads,
        num_kv_heads: params.num_kv_heads,
        num_tokens: params.q_len,
        kv_len: params.kv_len,
        max_chunks: count(chunks)?,
        num_blocks: params.num_blocks,
        block_size_log2: params.block_size_log2,
        max_blocks_per_seq: params.max_blocks_per_seq,
        scale: problem.scale,
        window: params.window,
    };
    // SAFETY: the argument of the kernel; the strides span the tensors' elements, the contents of
    // the index arrays are clamped to them, and the workspace has a place for every chunk. Work of
    // the memory's next user is queued after this launch.
    unsafe { cuda.launch(kernel, launch, Arguments::new().value(&decode)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mirrors `decode_chunk_len` of the kernel.
    fn chunk_len(kv_len: i64) -> i64 {
        match kv_len {
            ..=2048 => 256,
            2049..=8192 => 512,
            8193..=65536 => 1024,
            _ => (kv_len / 64 + 64) / 64 * 64,
        }
    }

    #[test]
    fn the_workspace_has_room_for_every_shorter_sequence() {
        let mut most = 1;
        for len in (0..140_000i64).chain([1_000_000, (1 << 30) - 1, 1 << 30]) {
            most = most.max(len.div_euclid(chunk_len(len)) + i64::from(len % chunk_len(len) > 0));
            assert_eq!(max_chunks(len), most, "{len}");
        }
    }

    #[test]
    fn partial_results_of_many_sequences_are_bounded() {
        assert_eq!(scratch_bytes(256, 32, 128, 256), 3 * 512);
        assert_eq!(scratch_bytes(2, 32, 128, 2048), 2 * 32 * 8 * 130 * 4 + 3 * 512);
        assert_eq!(scratch_bytes(256, 32, 128, 40_960), (32 << 20) + 3 * 512);
        // One sequence that is too large by itself, and counters of its own.
        assert_eq!(scratch_bytes(1, 1024, 256, 1 << 20), 1024 * 64 * 258 * 4 + 3 * 512);
        assert_eq!(scratch_bytes(256, 65, 64, 100), 256 * 65 * 4 + 3 * 512);
    }

    #[test]
    fn shared_memory_fits_every_generation() {
        for head_dim in KERNEL_HEAD_DIMS {
            // The limit is 99 KiB less 1 KiB of the system's and 1 KiB of the kernel's own.
            assert!([false, true]
                .iter()
                .all(|&is_fp8| kernel(DType::BF16, head_dim, is_fp8).unwrap().2 <= 97 * 1024));
        }
        assert_eq!(kernel(DType::BF16, 128, false).unwrap().2, 65536);
    }
}
