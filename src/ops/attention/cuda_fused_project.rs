//! Everything between the projection to q, k, v and the residual stream for one sequence with one
//! new token: `csrc/ops/attention/fused_project.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::attention::cuda_fused::{arguments, size, DecodeSequences, FusedArgs, Sizes};
use crate::ops::common::contiguous::{check, cuda};
use crate::ops::kv_cache::KvSlots;
use crate::ops::qk_norm_rope_append::QkNormRope;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct FusedProjectArgs {
        attention: FusedArgs,
        projection: OutputProjection,
    }
}

kernel_struct! {
    /// The kernel has the same struct and documents its fields.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct OutputProjection {
        weight: *mut u8,
        sums: *mut u8,
        hidden_size: i32,
        padding: i32,
    }
}

/// The number of query heads of a kv head.
const HEADS_PER_KV: usize = 2;
const HEAD_DIM: usize = 128;
/// The number of blocks that share a kv head.
const CLUSTER: u32 = 8;
/// Rows of the weight that a block has are 16 for each of up to 8 warps.
const ROW_UNIT: usize = 16 * CLUSTER as usize;
const MAX_ROWS: usize = 8 * ROW_UNIT;
const THREADS: u32 = 256;

/// The longest context for which less shared memory is faster (H200).
const SHORT_CONTEXT: i64 = 2048;
const SHORT_SHARED_BYTES: u32 = 144_704;
const LONG_SHARED_BYTES: u32 = 177_472;

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they
/// check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    [(2, SHORT_SHARED_BYTES), (3, LONG_SHARED_BYTES)]
        .map(|(slots, bytes)| (format!("attention_fused_project_{slots}"), bytes))
        .into()
}

/// Whether the chip and the build have the kernel, and it serves a projection of such heads.
pub fn has_attention_fused_project(
    context: &ComputeContext,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    hidden_size: usize,
) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    let info = cuda.device().info();
    let fits = head_dim == HEAD_DIM
        && num_kv_heads > 0
        && num_heads == num_kv_heads.saturating_mul(HEADS_PER_KV)
        && (ROW_UNIT..=MAX_ROWS).contains(&hidden_size)
        && hidden_size.is_multiple_of(ROW_UNIT);
    Ok(fits
        && info.compute_capability.0 >= 9
        && info.shared_memory_bytes >= LONG_SHARED_BYTES as usize
        && cuda.has_kernel(kernels::ATTENTION_FUSED_PROJECT_3.bf16)?)
}

/// Computes the attention of [`super::attention_fused()`] for one sequence, and for each kv head
/// the part of the output projection that belongs to its query heads:
/// `sums[g] = W_o[:, heads over g] round(attention)[heads over g]`.
///
/// weight [hidden_size, num_heads * head_dim]; sums f32 [num_kv_heads, hidden_size]; shapes as
/// [`has_attention_fused_project`] requires them.
pub fn attention_fused_project(
    context: &ComputeContext,
    qkv: &Tensor,
    how: &QkNormRope<'_>,
    kv: &KvSlots<'_>,
    sequences: &DecodeSequences<'_>,
    weight: &Tensor,
    sums: &Tensor,
) -> Result<()> {
    let (attention, sizes) = arguments(context, qkv, how, kv, sequences)?;
    let Sizes { dtype, is_fp8, num_seqs, num_heads, num_kv_heads, head_dim, max_kv_len } = sizes;
    let hidden_size = size(weight, 0);
    check("the weight", weight, qkv.element(), &[hidden_size, num_heads * head_dim])?;
    check("sums", sums, ElementType::Float(DType::F32), &[num_kv_heads, hidden_size])?;
    let fits = has_attention_fused_project(
        context,
        num_heads as usize,
        num_kv_heads as usize,
        head_dim as usize,
        hidden_size as usize,
    )?;
    if !fits || num_seqs != 1 || !(weight.data() as usize).is_multiple_of(16) {
        let message = format!("{num_seqs} x attention of {num_heads} heads, {hidden_size} wide");
        return Err(Error::internal(message));
    }
    let arguments = FusedProjectArgs {
        attention,
        projection: OutputProjection {
            weight: weight.data(),
            sums: sums.data(),
            hidden_size: hidden_size as i32,
            padding: 0,
        },
    };
    let is_short = max_kv_len <= SHORT_CONTEXT;
    let kernel = match (is_short, is_fp8) {
        (true, false) => kernels::ATTENTION_FUSED_PROJECT_2,
        (true, true) => kernels::ATTENTION_FUSED_PROJECT_FP8_2,
        (false, false) => kernels::ATTENTION_FUSED_PROJECT_3,
        (false, true) => kernels::ATTENTION_FUSED_PROJECT_FP8_3,
    };
    let kernel = kernel.of_half(dtype)?;
    let shared_bytes = if is_short { SHORT_SHARED_BYTES } else { LONG_SHARED_BYTES };
    let launch = Launch { grid: (CLUSTER, num_kv_heads as u32, 1), block: THREADS, shared_bytes };
    let arguments = Arguments::new().value(&arguments);
    // SAFETY: the argument of the kernel; the shapes were checked above, and the kernel follows no
    // block, slot or position beyond the cache and the tables.
    unsafe { cuda(context)?.launch_clusters(kernel, launch, CLUSTER, arguments) }
}
