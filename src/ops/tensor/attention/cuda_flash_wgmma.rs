//! `csrc/ops/attention_flash_wgmma.cu`: the same as `cuda_flash` over a block cache, with what Hopper has.

use super::cuda::{grid_extent, AttentionParams};
use super::{size, Form, Problem};
use crate::backend::cuda::{Arguments, CudaContext, Launch, TensorMap};
use crate::error::{Error, Result};
use crate::memory::DType;

/// The kernel has the same struct and says what it means.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct AttentionFlashWgmmaParams {
    q: *mut u8,
    out: *mut u8,
    cu_seqlens_q: *mut u8,
    block_tables: *mut u8,
    context_lens: *mut u8,
    fault: *mut u8,
    counter: *mut u8,
    q_strides: [i64; 2],
    out_strides: [i64; 2],
    num_heads: i32,
    num_kv_heads: i32,
    num_tokens: i32,
    num_seqs: i32,
    num_blocks: i32,
    max_blocks_per_seq: i32,
    causal: i32,
    scale: f32,
}
const _: () = assert!(size_of::<AttentionFlashWgmmaParams>() == 56 + 32 + 32);

/// What the kernel is compiled for.
const HEAD_DIM: i64 = 128;
const BLOCK_SIZE: i64 = 32;
/// Dims of a box: 128 bytes.
const BOX_DIMS: u32 = 64;

/// Groups of 64 queries of a block: two share their keys, one fills more multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    One,
    Two,
}

impl Groups {
    /// By how many whole blocks there would be; measured on an H200. Both give the same bits.
    fn choose(whole_blocks: i64, num_multiprocessors: i64) -> Self {
        match whole_blocks <= num_multiprocessors / 2 {
            true => Groups::One,
            false => Groups::Two,
        }
    }

    fn count(self) -> u32 {
        match self {
            Groups::One => 1,
            Groups::Two => 2,
        }
    }

    /// Two buffers of queries, two tiles each of 128 keys and values, barriers and items.
    fn shared_bytes(self) -> u32 {
        2 * self.count() * 16384 + 4 * 32768 + 288
    }

    fn kernel(self, dtype: DType) -> Option<&'static str> {
        match (self, dtype) {
            (Groups::Two, DType::F16) => Some("xserv_attention_flash_wgmma_f16"),
            (Groups::Two, DType::BF16) => Some("xserv_attention_flash_wgmma_bf16"),
            (Groups::One, DType::F16) => Some("xserv_attention_flash_wgmma_short_f16"),
            (Groups::One, DType::BF16) => Some("xserv_attention_flash_wgmma_short_bf16"),
            (_, DType::F32) => None,
        }
    }
}

/// Queues a call, unless it is one that only the portable kernel serves; says which.
pub(super) fn try_launch(
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
) -> Result<bool> {
    let Problem { dtype, head_dim, max_q_len, num_heads, num_seqs, .. } = *problem;
    let is_served = problem.form == Form::Paged
        && !params.cu_seqlens_q.is_null()
        && cuda.device().info().compute_capability == (9, 0)
        && head_dim == HEAD_DIM
        && size(problem.k, 1) == BLOCK_SIZE
        && problem.k.is_contiguous()
        && problem.v.is_contiguous()
        && [problem.k, problem.v].iter().all(|t| (t.data() as usize).is_multiple_of(16))
        && !problem.k.is_empty()
        && problem.scale > 0.0;
    if !is_served || max_q_len == 0 || num_seqs == 0 {
        return Ok(false);
    }
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let pairs = num_heads.saturating_mul(num_seqs);
    let tiles = |queries: u64| (max_q_len as u64).div_ceil(queries) as i64;
    let groups = Groups::choose(tiles(128).saturating_mul(pairs), processors);
    let Some(name) = groups.kernel(dtype) else { return Ok(false) };
    if !cuda.has_kernel("attention_flash_wgmma", name) {
        return Ok(false);
    }
    let extents = [1, BLOCK_SIZE as u32, 1, BOX_DIMS];
    let k_map = TensorMap::new(cuda, problem.k, &extents)?;
    let v_map = TensorMap::new(cuda, problem.v, &extents)?;
    let counter = cuda.counters(1)?;
    let counter = counter.ok_or_else(|| Error::internal("no counter for attention"))?;
    let arguments = AttentionFlashWgmmaParams {
        q: params.q,
        out: params.out,
        cu_seqlens_q: params.cu_seqlens_q,
        block_tables: params.block_tables,
        context_lens: params.context_lens,
        fault: params.fault,
        counter,
        // Of tokens and heads.
        q_strides: [params.q_strides[1], params.q_strides[2]],
        out_strides: [params.out_strides[1], params.out_strides[2]],
        num_heads: params.num_heads,
        num_kv_heads: params.num_kv_heads,
        num_tokens: params.q_len,
        num_seqs: grid_extent(num_seqs, "sequences")? as i32,
        num_blocks: params.num_blocks,
        max_blocks_per_seq: params.max_blocks_per_seq,
        causal: i32::from(problem.options.causal),
        scale: params.scale,
    };
    let items = tiles(64 * u64::from(groups.count())).saturating_mul(pairs);
    let launch = Launch {
        grid: (items.min(processors) as u32, 1, 1),
        block: 128 * (groups.count() + 1),
        shared_bytes: groups.shared_bytes(),
    };
    let arguments = Arguments::new().value(&arguments).value(&k_map).value(&v_map);
    // SAFETY: the arguments of the kernel; the strides span the tensors' elements, what the index arrays hold
    // is compared with the cache, and the counter is zero between launches.
    unsafe { cuda.launch_overlapping("attention_flash_wgmma", name, launch, arguments) }?;
    Ok(true)
}
