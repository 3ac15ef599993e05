//! The options that a caller gives to a load, and the numbers that they stand for.

use std::path::PathBuf;

use crate::backend::cpu::MAX_THREADS;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::{ActivationFormat, KvFormat, ModelConfig, WeightStorage};

/// The device that the caller wants for a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CUDA device where it can be used and the model runs and fits there, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device, or an error.
    Cuda,
}

/// The options of a load. 0 leaves a number to the library.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// The device to compute on.
    pub device: DeviceChoice,
    /// The index of the CUDA device; 0 on the CPU.
    pub device_index: u32,
    /// Element type that is computed with; `None`: that of the files.
    pub dtype: Option<DType>,
    /// What the KV cache stores, if not numbers of that type.
    pub kv_format: KvFormat,
    /// What products with quantised weights take their activations as.
    pub activations: ActivationFormat,
    /// The storage of the matrices of the layers.
    pub weights: WeightStorage,
    /// The inputs that share a scale in weights quantised at load; 0: 32 for 4 bits, 128 for 8.
    pub weights_group_size: usize,
    /// The storage of the embedding and the output matrix: not 4 bits.
    pub embeddings: WeightStorage,
    /// The file in which matrices that are quantised at load are kept for later loads: read if it
    /// is there, else made, and refused if it does not fit.
    pub kept_weights: Option<PathBuf>,
    /// Threads of the kernels; 0: one for each core.
    pub num_threads: usize,
    /// Map weight files instead of reading them.
    pub map_files: bool,
    /// Longest context of a request; 0: as the config says.
    pub max_context_tokens: u64,
    /// Tokens in the KV cache; 0: the rest of the budget, or a share of the free memory.
    pub kv_cache_tokens: u64,
    /// Budget for weights, KV cache and work space together, on the device that computes; 0: none.
    pub max_memory_bytes: u64,
    /// Most sequences in a step; 0: as many as pay off on the device.
    pub max_batch_size: u32,
    /// Tokens of prompts in a step; 0: as many as pay off on the device.
    pub max_prefill_tokens: u64,
    /// Most bytes of the host for preempted requests; 0: a share of the available memory for a
    /// model on a device, none for one on the CPU.
    pub max_swap_bytes: u64,
    /// Never reuse keys and values that another request, or an earlier part of the same one, has
    /// computed.
    pub no_prefix_cache: bool,
    /// See [`LoadOptions::deterministic`].
    pub deterministic: bool,
    /// Make up the weights instead of reading them.
    pub random_weights: bool,
}

impl EngineOptions {
    /// Returns the index of the CUDA device as the driver counts.
    pub(super) fn device_index(&self) -> i32 {
        i32::try_from(self.device_index).unwrap_or(i32::MAX)
    }
}

/// Returns the number of threads of the kernels for the option `wanted`.
pub(super) fn num_threads(wanted: usize) -> Result<usize> {
    match wanted {
        0 => Ok(std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS))),
        n if n <= MAX_THREADS => Ok(n),
        n => Err(Error::invalid_argument(format!(
            "num_threads is {n}, but at most {MAX_THREADS} are allowed"
        ))),
    }
}

/// Returns the longest context for the option `wanted` of a model with this config.
pub(super) fn context_limit(wanted: u64, config: &ModelConfig) -> Result<u64> {
    let limit = config.max_context_tokens as u64;
    match wanted {
        0 => Ok(limit),
        n if n <= limit => Ok(n),
        n => Err(Error::invalid_argument(format!(
            "max_context_tokens is {n}, but the model's context is {limit}"
        ))),
    }
}
