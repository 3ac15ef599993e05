//! A model: its folder, its configuration, its weights and its forward pass.
//!
//! ```text
//! folder, config, safetensors, shard_index, checkpoint   what is on disk; headers only
//! decoder                                                the block, the families, the forward passes
//! headers                                                whether tied matrices are: decided before anything is counted
//! load                                                   which tensors make which weight; reads and packs them
//! device                                                 a model on a device: its memory, its steps
//! batch, kv_cache, workspace                             what a forward pass needs besides the weights
//! kv_swap                                                blocks of the KV cache that wait on the host
//! step                                                   a forward pass and the choice of the next tokens
//! inspect                                                a report on a folder
//! ```

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod decoder;
mod device;
pub mod folder;
mod headers;
pub mod inspect;
pub mod kv_cache;
mod kv_swap;
pub mod load;
pub mod safetensors;
pub mod shard_index;
pub mod step;
pub mod workspace;

use std::fmt;
use std::sync::Arc;

pub use batch::ForwardBatch;
pub use config::{ModelConfig, RopeConfig, YarnConfig};
pub use device::limits::PassLimits;
pub use device::MemoryNeeds;
pub use headers::ModelHeaders;
pub use inspect::{inspect, Inspection};
pub use kv_cache::KvCache;
pub use kv_swap::{BlockCopy, CopyDirection, KvSwap};
pub use load::LoadOptions;
pub use step::{Draw, Step, StepResult, StepTime, TokenChoice, FROM_BATCH, NO_TOKEN};
pub use workspace::Workspace;

use crate::backend::cpu::CpuBackend;
use crate::backend::ComputeContext;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::kv_cache::layout::KvLayout;
use crate::ops::rope::cpu_table::RopeTable;
use crate::thread_state::StandardFloats;
use checkpoint::Checkpoint;
use decoder::block::{Decoder, DecoderPlan};
use device::{DeviceModel, DeviceModelLoad};
use folder::{resolve, Folder};
use load::Loader;

/// The weights in memory.
type LoadedWeights = Decoder<PackedMatrix, Vec<f32>>;

/// A folder whose configuration and headers have been found in order, and of which it is known whether the
/// embedding is the output matrix. No other weight has been read.
#[derive(Debug)]
pub struct ModelFolder {
    folder: Folder,
    config: ModelConfig,
    checkpoint: Checkpoint,
    plan: DecoderPlan,
    warnings: Vec<String>,
}

impl ModelFolder {
    /// Sizes and kind of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The folder, for the files that are not the model's weights.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Oddities worth a line in a log; each is one sentence.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The element type that [`LoadOptions::dtype`] `None` stands for.
    pub fn stored_dtype(&self) -> Result<DType> {
        Ok(self.plan.totals()?.stored_dtype())
    }

    /// Bytes of memory that the weights will take as `dtype`.
    pub fn weights_bytes(&self, dtype: DType) -> Result<u64> {
        let totals = self.plan.totals()?;
        let mut sum = totals.vector_len.saturating_mul(size_of::<f32>() as u64);
        for &(out_features, in_features) in &totals.matrices {
            let bytes = PackedMatrix::bytes_for(out_features, in_features, dtype)
                .ok_or_else(|| Error::out_of_memory("a weight matrix", usize::MAX))?;
            sum = sum.saturating_add(bytes as u64);
        }
        Ok(sum)
    }

    /// What the model takes of the host's memory as `dtype`, for passes of up to `num_tokens` tokens on
    /// `num_threads` threads that ask for the logits of up to `num_logits_rows` of them.
    pub fn host_plan(
        &self,
        dtype: DType,
        num_threads: usize,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> Result<MemoryNeeds> {
        let config = &self.config;
        let workspace =
            Workspace::bytes_for(config, dtype, num_threads, num_tokens, num_logits_rows);
        Ok(MemoryNeeds {
            weights_bytes: self.weights_bytes(dtype)?,
            workspace_bytes: workspace as u64,
            kv_bytes_per_token: config.kv_layout(dtype).bytes_per_token() as u64,
        })
    }

    pub(crate) fn plan(&self) -> &DecoderPlan {
        &self.plan
    }

    /// Reads the weights. `progress` is called on this thread with the fraction done, from 0 to 1,
    /// and ends the load with [`ErrorKind::Cancelled`] by returning false.
    pub fn load(
        self,
        backend: Arc<CpuBackend>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Model> {
        let totals = self.plan.totals()?;
        let dtype = options.dtype.unwrap_or(totals.stored_dtype());
        let mode = StandardFloats::new();
        let rope = match &self.config.rope {
            Some(rope) => Some(RopeTable::new(
                &rope.inv_freq(self.config.head_dim)?,
                rope.attention_scaling(),
                self.config.max_context_tokens,
            )?),
            None => None,
        };
        drop(mode);
        let (weights, weights_bytes) = load::load_weights(
            &self.plan,
            &self.folder,
            &self.checkpoint,
            &backend,
            options,
            progress,
        )?;
        if !progress(1.0) {
            return Err(Error::new(
                ErrorKind::Cancelled,
                "loading was cancelled by the progress callback",
            ));
        }
        Ok(Model {
            config: self.config,
            compute: Compute::Cpu(Box::new(CpuModel { weights, rope, backend })),
            dtype,
            weights_bytes,
            num_parameters: totals.num_parameters,
        })
    }

    /// The same to the CUDA device of `context`, which must work for this model alone. `backend` only reads
    /// the files.
    pub fn load_on_device(
        self,
        context: Arc<ComputeContext>,
        backend: &CpuBackend,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Model> {
        self.begin_on_device(backend, options, progress)?.finish(context)
    }

    /// The same in two halves: the first, which makes ready what can be, needs no device yet.
    pub fn begin_on_device<'a>(
        &'a self,
        backend: &'a CpuBackend,
        options: &LoadOptions,
        progress: &'a mut dyn FnMut(f32) -> bool,
    ) -> Result<DeviceLoad<'a>> {
        let totals = self.plan.totals()?;
        let dtype = options.dtype.unwrap_or(totals.stored_dtype());
        let num_parameters = totals.num_parameters;
        let (stored_bytes, checkpoint) = (totals.stored_bytes, &self.checkpoint);
        let (folder, deterministic) = (&self.folder, options.deterministic);
        let loader =
            Loader::new(folder, checkpoint, backend, dtype, options, stored_bytes, progress)?;
        let weights = DeviceModelLoad::new(&self.config, &self.plan, loader, dtype, deterministic)?;
        Ok(DeviceLoad { config: &self.config, weights, dtype, num_parameters })
    }
}

/// A model on its way to a device.
pub struct DeviceLoad<'a> {
    config: &'a ModelConfig,
    weights: DeviceModelLoad<'a>,
    dtype: DType,
    num_parameters: u64,
}

impl DeviceLoad<'_> {
    /// Reads the weights to the CUDA device of `context`, which must work for this model alone.
    pub fn finish(self, context: Arc<ComputeContext>) -> Result<Model> {
        let (model, weights_bytes) = self.weights.finish(context)?;
        Ok(Model {
            config: self.config.clone(),
            compute: Compute::Device(Box::new(model)),
            dtype: self.dtype,
            weights_bytes,
            num_parameters: self.num_parameters,
        })
    }
}

/// One sentence about tensors that nothing reads.
fn unused_warning(unused: &[String]) -> Option<String> {
    const NAMED: usize = 3;
    if unused.is_empty() {
        return None;
    }
    let named: Vec<String> =
        unused.iter().take(NAMED).map(|name| folder::shown_name(name)).collect();
    let more = unused.len().saturating_sub(NAMED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("the model does not use the tensors {}{rest}", named.join(", ")))
}

/// A loaded model. Shared by reference; what a forward pass changes belongs to its caller. On a device the passes
/// share a stream, which may be recording: one thread at a time.
pub struct Model {
    config: ModelConfig,
    compute: Compute,
    dtype: DType,
    weights_bytes: u64,
    num_parameters: u64,
}

/// The weights, and what computes with them.
enum Compute {
    Cpu(Box<CpuModel>),
    Device(Box<DeviceModel>),
}

/// A model on the CPU.
struct CpuModel {
    weights: LoadedWeights,
    rope: Option<RopeTable>,
    backend: Arc<CpuBackend>,
}

impl Model {
    /// Reads configuration and headers of the folder that `path` means: a folder, or a repository
    /// (`org/name`) in the local Hugging Face cache.
    ///
    /// What is not supported is refused here, by name. Where the files hold an output matrix that the config
    /// declares tied, the two are compared on this thread: see [`ModelHeaders::settle`].
    pub fn open(path: &str) -> Result<ModelFolder> {
        Self::read_headers(path)?.settle(None, &mut |_| true)
    }

    /// The first half of [`Model::open`], which reads no weight.
    pub fn read_headers(path: &str) -> Result<ModelHeaders> {
        let folder = Folder::open(&resolve(path)?)?;
        let config = ModelConfig::read(&folder)?;
        let checkpoint = Checkpoint::open(&folder)?;
        ModelHeaders::new(folder, config, checkpoint)
    }

    /// Sizes and kind of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Element type of the matrices and of the KV cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What a KV cache for this model looks like.
    pub fn kv_layout(&self) -> KvLayout {
        let layout = self.config.kv_layout(self.dtype);
        match &self.compute {
            Compute::Cpu(_) => layout,
            Compute::Device(cuda) => KvLayout { head_dim: cuda.spacing.stride, ..layout },
        }
    }

    /// A KV cache of `num_blocks` blocks where the model is.
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

    /// Makes room for passes within `limits`, where the model is on a device: all that they take of it.
    pub fn reserve_on_device(&self, workspace: &mut Workspace, limits: &PassLimits) -> Result<()> {
        match &self.compute {
            Compute::Cpu(_) => Ok(()),
            Compute::Device(cuda) => workspace.reserve_on_device(cuda, &self.config, limits),
        }
    }

    /// Bytes of memory that the weights take.
    pub fn weights_bytes(&self) -> u64 {
        self.weights_bytes
    }

    /// Numbers in the weights; a tied output matrix is counted once.
    pub fn num_parameters(&self) -> u64 {
        self.num_parameters
    }

    /// For people: backend, instruction set and threads, or the name of the GPU.
    pub fn device_name(&self) -> String {
        match &self.compute {
            Compute::Cpu(cpu) => cpu.backend.name().to_string(),
            Compute::Device(cuda) => cuda.device_name(),
        }
    }

    /// Threads of the CPU that compute; 0 on a GPU.
    pub fn num_threads(&self) -> usize {
        match &self.compute {
            Compute::Cpu(cpu) => cpu.backend.num_threads(),
            Compute::Device(_) => 0,
        }
    }

    /// The context of a model on a GPU.
    pub fn compute_context(&self) -> Option<&Arc<ComputeContext>> {
        match &self.compute {
            Compute::Cpu(_) => None,
            Compute::Device(cuda) => Some(&cuda.context),
        }
    }
}

impl fmt::Debug for Model {
    /// Without the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}
