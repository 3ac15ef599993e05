//! The part of `csrc/common/layouts.cuh` that belongs to attention.

pub(in crate::ops) use super::choice::KERNEL_HEAD_DIMS;
pub(in crate::ops) use super::cuda_flash::shared_bytes as flash_shared_bytes;
pub(in crate::ops) use super::cuda_flash_wgmma::{
    shared_bytes as flash_wgmma_shared_bytes, AttentionFlashWgmmaParams, SEGMENT_KEYS,
};
pub(in crate::ops) use super::cuda_fused::FusedArgs;
pub(in crate::ops) use super::cuda_fused_kernels::shared_bytes as fused_shared_bytes;
pub(in crate::ops) use super::cuda_fused_project::{
    shared_bytes as fused_project_shared_bytes, FusedProjectArgs, OutputProjection,
};
pub(in crate::ops) use super::cuda_params::{AttentionParams, GROUP_HEADS, NO_WINDOW};
pub(in crate::ops) use super::cuda_split_kv::{
    shared_bytes as split_kv_shared_bytes, AttentionDecodeParams,
};
