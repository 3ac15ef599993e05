//! The device memory that a model takes.

use super::limits::PassLimits;
use super::model::rope_bytes;
use super::scratch::{ProductShapes, Scratch};
use super::workspace;
use crate::backend::cuda::CudaContext;
use crate::error::Result;
use crate::memory::DType;
use crate::model::kv_cache::KvCache;
use crate::model::load::device as load;
use crate::model::load::heads::HeadSpacing;
use crate::model::memory_needs::MemoryNeeds;
use crate::model::opened::ModelFolder;
use crate::ops::kv_cache::layout::KvFormat;

/// The maximum number of bytes lost to rounding: a model has ten allocations, and each is rounded
/// up to a multiple of 512 bytes.
const ROUNDING_BYTES: usize = 10 * 512;

impl ModelFolder {
    /// Returns the memory that the model takes on a CUDA device as `dtype` with a KV cache
    /// of this format, for passes within `limits`. What does not run there is refused by name.
    pub fn device_plan(
        &self,
        dtype: DType,
        kv_format: KvFormat,
        limits: &PassLimits,
        is_deterministic: bool,
    ) -> Result<MemoryNeeds> {
        let config = self.config();
        let spacing = HeadSpacing::new(config.head_dim)?;
        let weights = load::device_bytes(self.plan(), dtype, spacing)?;
        let products = ProductShapes::of(self.plan(), spacing)?;
        let scratch =
            Scratch::of(config, &products, dtype, kv_format, spacing, limits, is_deterministic);
        let layout = config.device_kv_layout(dtype, kv_format)?;
        let workspace = workspace::device_bytes(config, dtype, spacing, limits)?
            .saturating_add(scratch.bytes)
            .saturating_add(CudaContext::COUNTERS_BYTES)
            .saturating_add(KvCache::spare_bytes(&layout))
            .saturating_add(ROUNDING_BYTES);
        Ok(MemoryNeeds {
            weights_bytes: (weights as u64).saturating_add(rope_bytes(config, dtype)? as u64),
            workspace_bytes: workspace as u64,
            kv_bytes_per_token: layout.bytes_per_token() as u64,
        })
    }
}
