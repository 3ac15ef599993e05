//! A model that is loaded: the weights, and what computes with them.

use std::fmt;
use std::sync::Arc;

use super::config::ModelConfig;
use super::device::limits::PassLimits;
use super::device::model::DeviceModel;
use super::kv_cache::KvCache;
use super::load::LoadedWeights;
use super::workspace::Workspace;
use crate::backend::cpu::CpuBackend;
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{DType, Device};
use crate::ops::kv_cache::layout::{KvFormat, KvLayout};
use crate::ops::rope::cpu_table::RopeTable;

/// A loaded model. Shared by reference; what a forward pass changes belongs to its caller. On a
/// device the passes share a stream, which may be recording: one thread at a time.
pub struct Model {
    pub(super) config: ModelConfig,
    pub(super) compute: Compute,
    pub(super) dtype: DType,
    pub(super) kv_format: KvFormat,
    pub(super) weights_bytes: u64,
    pub(super) num_parameters: u64,
}

/// The weights, and what computes with them.
pub(super) enum Compute {
    Cpu(Box<CpuModel>),
    Device(Box<DeviceModel>),
}

/// A model on the CPU.
pub(super) struct CpuModel {
    pub(super) weights: LoadedWeights,
    pub(super) rope: Option<RopeTable>,
    pub(super) backend: Arc<CpuBackend>,
}

impl Model {
    /// Returns the sizes and kind of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the element type of the matrices, and of what is computed with keys and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the layout of a KV cache for this model.
    pub fn kv_layout(&self) -> KvLayout {
        let layout = self.config.kv_layout(self.dtype, self.kv_format);
        match &self.compute {
            Compute::Cpu(_) => layout,
            Compute::Device(cuda) => KvLayout { head_dim: cuda.spacing.stride, ..layout },
        }
    }

    /// Allocates a KV cache of `num_blocks` blocks where the model is.
    pub fn kv_cache(&self, num_blocks: usize) -> Result<KvCache> {
        match &self.compute {
            Compute::Cpu(_) => KvCache::new(self.kv_layout(), num_blocks),
            Compute::Device(cuda) => {
                KvCache::on_device(&cuda.context, self.kv_layout(), num_blocks)
            }
        }
    }

    /// Makes room for passes of up to `num_tokens` tokens that ask for the logits of up to
    /// `num_logits_rows` of them.
    pub fn reserve(
        &self,
        workspace: &mut Workspace,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> Result<()> {
        match &self.compute {
            Compute::Cpu(_) => workspace.reserve(&self.config, num_tokens, num_logits_rows),
            Compute::Device(cuda) => {
                workspace.on_device(cuda, &self.config, num_tokens.max(num_logits_rows)).map(|_| ())
            }
        }
    }

    /// Makes room for passes within `limits` if the model is on a device: all the device memory
    /// that they take.
    pub fn reserve_on_device(&self, workspace: &mut Workspace, limits: &PassLimits) -> Result<()> {
        match &self.compute {
            Compute::Cpu(_) => Ok(()),
            Compute::Device(cuda) => workspace.reserve_on_device(cuda, &self.config, limits),
        }
    }

    /// Returns the bytes of memory that the weights take.
    pub fn weights_bytes(&self) -> u64 {
        self.weights_bytes
    }

    /// Returns the number of parameters; a tied output matrix is counted once.
    pub fn num_parameters(&self) -> u64 {
        self.num_parameters
    }

    /// Returns a human-readable name: backend, instruction set and threads, or the name of the GPU.
    pub fn device_name(&self) -> String {
        match &self.compute {
            Compute::Cpu(cpu) => cpu.backend.name().to_string(),
            Compute::Device(cuda) => cuda.device_name(),
        }
    }

    /// Returns the index of the GPU; `None` on the CPU.
    pub fn device_index(&self) -> Option<i32> {
        match self.compute_context()?.device() {
            Device::Cuda(index) => Some(index),
            Device::Cpu => None,
        }
    }

    /// Returns the number of CPU threads that compute; 0 on a GPU.
    pub fn num_threads(&self) -> usize {
        match &self.compute {
            Compute::Cpu(cpu) => cpu.backend.num_threads(),
            Compute::Device(_) => 0,
        }
    }

    /// Returns the context of a model on a GPU.
    pub fn compute_context(&self) -> Option<&Arc<ComputeContext>> {
        match &self.compute {
            Compute::Cpu(_) => None,
            Compute::Device(cuda) => Some(&cuda.context),
        }
    }
}

impl fmt::Debug for Model {
    /// Leaves out the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}
