//! The kernels of `csrc/ops/attention/fused.cu` by the length of heads, and what they need to be launched.

use crate::backend::cuda::{kernels, KernelByHalf};
#[cfg(test)]
use crate::ops::attention::choice::KERNEL_HEAD_DIMS;
use crate::ops::attention::cuda_flash::tile_stride;
use crate::ops::attention::cuda_params::{GROUP_HEADS, TILE_KEYS};

/// A kernel of attention for sequences with one new token.
pub(super) struct FusedKernel {
    pub kernel: KernelByHalf,
    /// The threads of a block.
    pub threads: u32,
    /// The dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// The blocks of the largest cluster.
const MAX_CLUSTER: i64 = 16;

/// Returns the kernel for heads of `head_dim` elements, if it is compiled: that of clusters or that
/// of chunks, for a cache that stores 8-bit floats or one of the heads' dtype.
pub(super) fn fused_kernel(head_dim: i64, is_cluster: bool, is_fp8: bool) -> Option<FusedKernel> {
    macro_rules! of {
        ($cluster:ident $cluster_fp8:ident $chunked:ident $chunked_fp8:ident) => {
            match (is_cluster, is_fp8) {
                (true, false) => kernels::$cluster,
                (true, true) => kernels::$cluster_fp8,
                (false, false) => kernels::$chunked,
                (false, true) => kernels::$chunked_fp8,
            }
        };
    }
    let kernel = match head_dim {
        64 => of!(ATTENTION_FUSED_CLUSTER_D64 ATTENTION_FUSED_CLUSTER_FP8_D64
            ATTENTION_FUSED_CHUNKED_D64 ATTENTION_FUSED_CHUNKED_FP8_D64),
        80 => of!(ATTENTION_FUSED_CLUSTER_D80 ATTENTION_FUSED_CLUSTER_FP8_D80
            ATTENTION_FUSED_CHUNKED_D80 ATTENTION_FUSED_CHUNKED_FP8_D80),
        96 => of!(ATTENTION_FUSED_CLUSTER_D96 ATTENTION_FUSED_CLUSTER_FP8_D96
            ATTENTION_FUSED_CHUNKED_D96 ATTENTION_FUSED_CHUNKED_FP8_D96),
        128 => of!(ATTENTION_FUSED_CLUSTER_D128 ATTENTION_FUSED_CLUSTER_FP8_D128
            ATTENTION_FUSED_CHUNKED_D128 ATTENTION_FUSED_CHUNKED_FP8_D128),
        256 => of!(ATTENTION_FUSED_CLUSTER_D256 ATTENTION_FUSED_CLUSTER_FP8_D256
            ATTENTION_FUSED_CHUNKED_D256 ATTENTION_FUSED_CHUNKED_FP8_D256),
        _ => return None,
    };
    // As instantiated at the end of the source.
    let warps = if is_cluster { 8 } else { 4 };
    let slots = match (is_cluster, head_dim) {
        (_, 256) => 2,
        (true, _) => 3,
        (false, _) => 4,
    };
    // Twice as many tiles of half the bytes.
    let (slots, element_bytes) = if is_fp8 { (2 * slots, 1) } else { (slots, 2) };
    let ring = warps * slots * TILE_KEYS * tile_stride(head_dim * element_bytes);
    let merged = warps * GROUP_HEADS * (head_dim + 4 + 2) * 4;
    let rows = (GROUP_HEADS + 2) * (2 * head_dim + 16);
    // From the other blocks of a cluster come vectors of 4 elements and their maxima and sums;
    // slices are rounded up.
    let vectors = head_dim / 4;
    let rounding = if vectors % MAX_CLUSTER == 0 { 0 } else { MAX_CLUSTER };
    let received = GROUP_HEADS * vectors + rounding + 2 * MAX_CLUSTER;
    let received = if is_cluster { received * (16 + 8) } else { 0 };
    let shared_bytes = ring.max(merged) + rows + received + 16;
    Some(FusedKernel { kernel, threads: 32 * warps as u32, shared_bytes: shared_bytes as u32 })
}

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    let mut found = Vec::new();
    for (form, is_cluster) in [("chunked", false), ("cluster", true)] {
        for (stored, is_fp8) in [("", false), ("fp8_", true)] {
            for dim in KERNEL_HEAD_DIMS {
                let bytes = fused_kernel(dim, is_cluster, is_fp8).map(|found| found.shared_bytes);
                let name = format!("attention_fused_{form}_{stored}d{dim}");
                found.extend(bytes.map(|bytes| (name, bytes)));
            }
        }
    }
    found
}
