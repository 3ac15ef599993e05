//! Attention on a device: brings the tensors into a layout that the kernels take, and launches the
//! kernels that were chosen.

use crate::backend::cuda::CudaContext;
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::attention::cuda_params::{count, window_or_none, AttentionParams};
use crate::ops::attention::{
    cuda_flash, cuda_flash_wgmma, cuda_naive, cuda_split_kv, has_whole_heads, head_strides, size,
    AttentionBackend, Problem,
};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::staging::{contiguous, input, output, Input};

/// Whether the fused kernels can read and write a tensor in vectors of 16 bytes.
fn is_vectors(tensor: &Tensor) -> bool {
    let size = tensor.element().size_bytes() as i64;
    has_whole_heads(tensor)
        && (tensor.data() as usize).is_multiple_of(16)
        && head_strides(tensor).iter().all(|stride| (stride % (16 / size)) == 0)
}

/// Runs a call on the device.
pub(super) fn run(
    context: &ComputeContext,
    cuda: &CudaContext,
    problem: &Problem<'_>,
    backend: AttentionBackend,
) -> Result<()> {
    let options = problem.options;
    let fits = if backend == AttentionBackend::Naive { has_whole_heads } else { is_vectors };
    let q = input(context, problem.q, fits)?;
    let k = input(context, problem.k, fits)?;
    let v = input(context, problem.v, fits)?;
    let place = output(context, problem.out, fits)?;
    if options.cu_seqlens_q.is_some() && place.tensor.data() != problem.out.data() {
        // Tokens that belong to no sequence stay as they are.
        // SAFETY: both are valid for their layouts; the place is fresh memory.
        unsafe { copy_unchecked(context, problem.out, &place.tensor) }?;
    }
    let indices = |tensor: &Option<Tensor>| {
        tensor.as_ref().map(|tensor| input(context, tensor, contiguous)).transpose()
    };
    let cu_seqlens_q = indices(&options.cu_seqlens_q)?;
    let cu_seqlens_k = indices(&options.cu_seqlens_k)?;
    let block_tables = indices(&options.block_tables)?;
    let context_lens = indices(&options.context_lens)?;
    let address = |staged: &Option<Input>| {
        staged.as_ref().map_or(std::ptr::null_mut(), |staged| {
            if staged.tensor.is_empty() {
                // This is not NULL, which would mean that there is none; nothing is read.
                std::ptr::without_provenance_mut(16)
            } else {
                staged.tensor.data()
            }
        })
    };
    let packed = |array: &Option<Tensor>, dimension| if array.is_some() { 0 } else { dimension };
    let is_paged = options.block_tables.is_some();
    let params = AttentionParams {
        q: q.tensor.data(),
        k: k.tensor.data(),
        v: v.tensor.data(),
        out: place.tensor.data(),
        cu_seqlens_q: address(&cu_seqlens_q),
        cu_seqlens_k: address(&cu_seqlens_k),
        block_tables: address(&block_tables),
        context_lens: address(&context_lens),
        fault: cuda.faults(),
        q_strides: head_strides(&q.tensor),
        k_strides: head_strides(&k.tensor),
        v_strides: head_strides(&v.tensor),
        out_strides: head_strides(&place.tensor),
        num_heads: count(problem.num_heads)?,
        num_kv_heads: count(problem.num_kv_heads)?,
        q_len: count(size(problem.q, packed(&options.cu_seqlens_q, 1)))?,
        kv_len: count(size(problem.k, packed(&options.cu_seqlens_k, 1)))?,
        // Without a window a single query sees all keys either way.
        causal: i32::from(options.causal && (problem.max_q_len > 1 || problem.window.is_some())),
        num_blocks: if is_paged { count(size(problem.k, 0))? } else { 0 },
        block_size_log2: if is_paged { size(problem.k, 1).trailing_zeros() as i32 } else { 0 },
        max_blocks_per_seq: count(options.block_tables.as_ref().map_or(0, |t| size(t, 1)))?,
        scale: problem.scale,
        window: window_or_none(problem.window),
    };
    match backend {
        AttentionBackend::Naive => cuda_naive::launch(context, cuda, problem, &params),
        AttentionBackend::SplitKv => cuda_split_kv::launch(context, cuda, problem, &params),
        _ => {
            if cuda_flash_wgmma::try_launch(cuda, problem, &params, &k.tensor, &v.tensor)? {
                Ok(())
            } else {
                cuda_flash::launch(cuda, problem, &params)
            }
        }
    }?;
    place.finish(context)
}
