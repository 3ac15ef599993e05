//! Attention over a cache of 8-bit floats by the kernels for wider numbers: the keys and values of
//! some sequences at a time are widened into memory of the call's own. That is for many queries a
//! sequence, which go over their keys again and again; one query a sequence has kernels that read
//! 8-bit floats.

use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::{DType, Tensor, MAX_RANK};
use crate::ops::attention::{dispatch, size, AttentionBackend, AttentionOptions, Problem};
use crate::ops::common::staging::{contiguous, input};
use crate::ops::kv_cache::widen::{Widened, WidenedSizes};

/// The memory of keys and values that are widened at a time on a device, where one sequence does
/// not need more.
const MAX_BYTES: usize = 64 << 20;

/// Returns the device memory that a call takes for keys and values, for up to `num_seqs` sequences
/// of up to `max_kv_len` keys in blocks of `block_size`.
pub(super) fn scratch_bytes(
    dtype: DType,
    num_seqs: usize,
    num_kv_heads: usize,
    head_dim: usize,
    max_kv_len: usize,
    block_size: usize,
) -> usize {
    let blocks_per_seq = max_kv_len.div_ceil(block_size.max(1));
    let one =
        WidenedSizes { dtype, num_seqs: 1, blocks_per_seq, block_size, num_kv_heads, head_dim };
    let of_one = one.bytes().unwrap_or(usize::MAX);
    // There are three arrays, each rounded up.
    of_one.saturating_mul(num_seqs.max(1)).min(MAX_BYTES.max(of_one)).saturating_add(3 * 512)
}

/// Runs a call over a cache.
pub(super) fn run(
    context: &ComputeContext,
    problem: &Problem<'_>,
    backend: AttentionBackend,
) -> Result<()> {
    let options = problem.options;
    let (Some(block_tables), Some(context_lens)) = (&options.block_tables, &options.context_lens)
    else {
        return Ok(());
    };
    let block_size = size(problem.k, 1);
    let most_blocks = (problem.max_kv_len as u64).div_ceil(block_size.max(1) as u64) as i64;
    let blocks_per_seq = most_blocks.min(size(block_tables, 1));
    let sizes = |num_seqs: i64| WidenedSizes {
        dtype: problem.dtype,
        num_seqs: num_seqs as usize,
        blocks_per_seq: blocks_per_seq as usize,
        block_size: block_size as usize,
        num_kv_heads: problem.num_kv_heads as usize,
        head_dim: problem.head_dim as usize,
    };
    let group = match context.backend() {
        // The host has to see the first queries with the others.
        ContextBackend::Cpu { .. } => problem.num_seqs,
        ContextBackend::Cuda(_) => (MAX_BYTES / sizes(1).bytes()?.max(1)).max(1) as i64,
    };
    // The first query of a sequence sees the earliest keys.
    let num_seen = problem.window.map(|window| window + problem.max_q_len - 1);
    let block_tables = input(context, block_tables, contiguous)?;
    let context_lens = input(context, context_lens, contiguous)?;
    let mut first = 0;
    while first < problem.num_seqs {
        let num_seqs = group.min(problem.num_seqs - first);
        let widened = Widened::new(context, &sizes(num_seqs))?;
        let tables = rows(&block_tables.tensor, first, num_seqs)?;
        let lens = rows(&context_lens.tensor, first, num_seqs)?;
        widened.fill(context, problem.k, problem.v, &tables, &lens, num_seen)?;
        let ends = match &options.cu_seqlens_q {
            Some(ends) => Some(rows(ends, first, num_seqs + 1)?),
            None => None,
        };
        let (q, out) = match ends {
            Some(_) => (*problem.q, *problem.out),
            None => (rows(problem.q, first, num_seqs)?, rows(problem.out, first, num_seqs)?),
        };
        let options = AttentionOptions {
            cu_seqlens_q: ends,
            block_tables: Some(*widened.block_tables),
            context_lens: Some(lens),
            has_settled_indices: false,
            ..*options
        };
        let part = Problem {
            is_fp8: false,
            q: &q,
            k: &widened.k,
            v: &widened.v,
            out: &out,
            options: &options,
            num_seqs,
            ..*problem
        };
        dispatch(context, &part, backend)?;
        first += num_seqs;
    }
    Ok(())
}

/// Returns `count` rows of a tensor from row `first` on.
fn rows(tensor: &Tensor, first: i64, count: i64) -> Result<Tensor> {
    let mut sizes = [0; MAX_RANK];
    for (to, &size) in sizes.iter_mut().zip(tensor.shape().iter()) {
        *to = size;
    }
    if let Some(size) = sizes.first_mut() {
        *size = count;
    }
    let shape = sizes.get(..tensor.shape().len()).unwrap_or_default();
    let stride = tensor.strides().first().copied().unwrap_or(0);
    let offset = first as usize * stride as usize * tensor.element().size_bytes();
    let (element, device) = (tensor.element(), tensor.device());
    // SAFETY: rows of the tensor, which is as valid as that.
    unsafe {
        let data = tensor.data().wrapping_add(offset);
        Tensor::from_raw(data, element, device, shape, Some(tensor.strides()), "rows")
    }
}
