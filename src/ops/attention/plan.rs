//! The choice of the kernels for the attention of a model, made once, when it is loaded.
//!
//! On Hopper and later, one kernel computes everything between the projection to q, k, v and the
//! output projection for sequences with one new token, where the heads suit it; for one sequence of
//! a small model the output projection is part of it too. Everything else is
//! [`attention`](super::attention()) over the cache.
//!
//! In a model that is to be deterministic, the keys of a row are gone over in an order that follows
//! from the row's position alone: by flash attention in segments, for decoding too.

use super::choice::AttentionBackend;
use super::cuda_fused::{
    attention_fused, has_attention_fused, is_fused_head_dim, DecodeScratch, DecodeSequences,
};
use super::cuda_fused_project::{attention_fused_project, has_attention_fused_project};
use super::{attention_scratch_bytes, AttentionOptions};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::is_portable;
use crate::ops::kv_cache::layout::KvFormat;
use crate::ops::kv_cache::KvSlots;
use crate::ops::qk_norm_rope_append::QkNormRope;

/// The sizes of the attention of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSizes {
    /// The number of query heads.
    pub num_heads: usize,
    /// The number of key and value heads.
    pub num_kv_heads: usize,
    /// The number of elements of a head.
    pub head_dim: usize,
    /// The distance in elements from one head to the next.
    pub head_stride: usize,
    /// Whether queries and keys are rotated, and normalised per head before that or not.
    pub has_rope: bool,
    /// What the cache stores.
    pub kv_format: KvFormat,
}

/// The plan for the attention of a model; see the head of the file.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlan {
    sizes: AttentionSizes,
    has_fused: bool,
    is_deterministic: bool,
}

/// Returns the most device memory that [`attention`](super::attention()) over the cache takes while
/// it is queued, for up to `num_seqs` sequences of up to `max_kv_len` keys.
pub fn scratch_bytes(
    sizes: &AttentionSizes,
    dtype: DType,
    num_seqs: usize,
    max_kv_len: usize,
    is_deterministic: bool,
) -> usize {
    attention_scratch_bytes(sizes, dtype, num_seqs, max_kv_len, is_deterministic)
}

/// Returns the bytes of the partial results of up to `num_seqs` sequences with one new token each,
/// on any device; 0 where no kernel leaves any.
pub fn partial_bytes(sizes: &AttentionSizes, dtype: DType, num_seqs: usize) -> Result<usize> {
    let AttentionSizes { num_heads, head_dim, has_rope, .. } = *sizes;
    if has_rope && dtype != DType::F32 && is_fused_head_dim(head_dim) {
        DecodeScratch::device_bytes(num_seqs, num_heads, head_dim)
    } else {
        Ok(0)
    }
}

/// Allocates the memory of [`partial_bytes`]; `None` where that is 0.
pub fn partials(
    context: &ComputeContext,
    sizes: &AttentionSizes,
    dtype: DType,
    num_seqs: usize,
) -> Result<Option<DecodeScratch>> {
    if partial_bytes(sizes, dtype, num_seqs)? == 0 {
        return Ok(None);
    }
    DecodeScratch::new(context, num_seqs, sizes.num_heads, sizes.head_dim).map(Some)
}

impl AttentionPlan {
    /// Finds the kernels that serve such heads on the device of `context`. `XSERV_CUDA_PORTABLE=1`
    /// in the environment selects [`attention`](super::attention()) alone, for comparing and
    /// testing what other devices take.
    pub fn find(
        context: &ComputeContext,
        sizes: AttentionSizes,
        dtype: DType,
        is_deterministic: bool,
    ) -> Result<Self> {
        let has_fused = !is_portable()
            && sizes.has_rope
            && dtype != DType::F32
            && sizes.head_dim == sizes.head_stride
            && has_attention_fused(context, sizes.head_dim)?;
        Ok(AttentionPlan { sizes, has_fused, is_deterministic })
    }

    /// Whether there is a kernel that projects to `hidden_size` too.
    pub(in crate::ops) fn has_fused_projection(
        &self,
        context: &ComputeContext,
        hidden_size: usize,
    ) -> Result<bool> {
        let AttentionSizes { num_heads, num_kv_heads, head_dim, .. } = self.sizes;
        let has = |hidden_size| {
            has_attention_fused_project(context, num_heads, num_kv_heads, head_dim, hidden_size)
        };
        Ok(self.is_fused() && has(hidden_size)?)
    }

    pub(in crate::ops) fn num_kv_heads(&self) -> usize {
        self.sizes.num_kv_heads
    }

    /// Whether sequences with one new token each are served by
    /// [`AttentionPlan::attend_new_tokens`].
    pub fn is_fused(&self) -> bool {
        self.has_fused && !self.is_deterministic
    }

    /// Returns the options of [`attention`](super::attention()) over the cache, without the index
    /// arrays.
    pub fn options(&self) -> AttentionOptions {
        let backend =
            if self.is_deterministic { AttentionBackend::Flash } else { AttentionBackend::Auto };
        AttentionOptions {
            causal: true,
            backend,
            in_segments: self.is_deterministic,
            has_settled_indices: true,
            ..AttentionOptions::default()
        }
    }

    /// Computes everything between the projections for sequences with one new token each. qkv and
    /// out are matrices of `[num_seqs, ...]`.
    #[allow(clippy::too_many_arguments)]
    pub fn attend_new_tokens(
        &self,
        context: &ComputeContext,
        qkv: &DeviceTensor,
        how: &QkNormRope<'_>,
        slots: &KvSlots<'_>,
        sequences: &DecodeSequences<'_>,
        scratch: Option<&DecodeScratch>,
        out: &DeviceTensor,
    ) -> Result<()> {
        let num_seqs = sequences.context_lens.num_elements() as usize;
        let AttentionSizes { num_heads, head_dim, .. } = self.sizes;
        let qkv = qkv.view(0, &[num_seqs, self.all_heads(), head_dim], None)?;
        let out = out.view(0, &[num_seqs, num_heads, head_dim], None)?;
        let scratch = scratch.ok_or_else(no_scratch)?;
        attention_fused(context, &qkv, how, slots, sequences, scratch, &out)
    }

    /// Does the same for one sequence, and computes for each kv head its part of the output
    /// projection with `weight` [hidden_size, num_heads * head_dim]. Returns the parts, f32
    /// [num_kv_heads, hidden_size].
    #[allow(clippy::too_many_arguments)]
    pub fn attend_and_project(
        &self,
        context: &ComputeContext,
        qkv: &DeviceTensor,
        how: &QkNormRope<'_>,
        slots: &KvSlots<'_>,
        sequences: &DecodeSequences<'_>,
        scratch: Option<&DecodeScratch>,
        weight: &Tensor,
    ) -> Result<DeviceTensor> {
        let hidden_size = weight.shape().first().map_or(0, |&n| n as usize);
        let sums = scratch.ok_or_else(no_scratch)?;
        let sums = sums.as_matrix(self.sizes.num_kv_heads, hidden_size)?;
        let qkv = qkv.view(0, &[1, self.all_heads(), self.sizes.head_dim], None)?;
        attention_fused_project(context, &qkv, how, slots, sequences, weight, &sums)?;
        Ok(sums)
    }

    /// Returns the number of heads of q, k and v.
    fn all_heads(&self) -> usize {
        self.sizes.num_heads + 2 * self.sizes.num_kv_heads
    }
}

fn no_scratch() -> Error {
    Error::internal("no memory for partial results of attention")
}
