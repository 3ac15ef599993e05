//! A folder that has been found in order, and the way from there to a model.

use std::sync::Arc;

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::decoder::block::DecoderPlan;
use super::device::load::DeviceModelLoad;
use super::folder::Folder;
use super::load::{self, ActivationFormat, LoadOptions, Loader};
use super::loaded::{Compute, CpuModel, Model};
use super::memory_needs::MemoryNeeds;
use super::workspace::{WeightForms, Workspace};
use crate::backend::cpu::CpuBackend;
use crate::backend::ComputeContext;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::model::load::plan::MatrixSize;
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::kv_cache::layout::KvFormat;
use crate::ops::quantised::{QuantFormat, QuantisedPanels};
use crate::ops::rope::cpu_table::RopeTable;

/// A folder whose configuration and headers have been found in order, and of which it is known whether the
/// embedding is the output matrix. No other weight has been read.
#[derive(Debug)]
pub struct ModelFolder {
    pub(super) folder: Folder,
    pub(super) config: ModelConfig,
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: DecoderPlan,
    pub(super) warnings: Vec<String>,
    /// Whether an output matrix that is stored although it is declared tied is the embedding, if
    /// there is one.
    pub(super) is_tied: Option<bool>,
}

impl ModelFolder {
    /// Sizes and kind of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the folder, for the files that are not the model's weights.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Oddities worth a line in a log; each is one sentence.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Has the matrices of the layers quantised while they are read.
    pub(super) fn quantise(&mut self, format: QuantFormat) {
        self.plan.quantise(format);
    }

    /// Has the embedding and the output matrix quantised while they are read.
    pub(super) fn quantise_tokens(&mut self, format: QuantFormat) {
        self.plan.quantise_tokens(format);
    }

    /// Has all products keep their activations.
    pub(super) fn keep_activations(&mut self) {
        self.plan.keep_activations();
    }

    /// Returns the element type that [`LoadOptions::dtype`] `None` stands for.
    pub fn stored_dtype(&self) -> Result<DType> {
        Ok(self.plan.totals()?.stored_dtype())
    }

    /// Returns the bytes of memory that the weights will take as `dtype`.
    pub fn weights_bytes(&self, dtype: DType) -> Result<u64> {
        let totals = self.plan.totals()?;
        let mut sum = totals.vector_len.saturating_mul(size_of::<f32>() as u64);
        for size in &totals.matrices {
            let MatrixSize { out_features, in_features, quantised, may_be_ordered } = *size;
            let bytes = match &quantised {
                None => PackedMatrix::bytes_for(out_features, in_features, dtype),
                Some(format) => {
                    QuantisedPanels::bytes_for(out_features, in_features, format, may_be_ordered)
                }
            };
            let bytes = bytes.ok_or_else(|| Error::out_of_memory("a weight matrix", usize::MAX))?;
            sum = sum.saturating_add(bytes as u64);
        }
        Ok(sum)
    }

    /// Returns how much of the host's memory the model takes as `dtype` with a KV cache and
    /// activations of these formats, for passes of up to `num_tokens` tokens on `num_threads`
    /// threads that ask for the logits of up to `num_logits_rows` of them.
    pub fn host_plan(
        &self,
        dtype: DType,
        kv_format: KvFormat,
        activations: ActivationFormat,
        num_threads: usize,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> Result<MemoryNeeds> {
        let config = &self.config;
        let mut layers = self.plan.weight_forms()?;
        layers.iter_mut().for_each(|form| *form = activations.of_form(*form));
        let mut routers = self.plan.router_forms()?;
        routers.iter_mut().for_each(|form| *form = activations.of_form(*form));
        let output = activations.of_form(self.plan.tokens.output().form());
        let forms = WeightForms { layers: &layers, routers: &routers, output };
        let workspace =
            Workspace::bytes_for(config, dtype, forms, num_threads, num_tokens, num_logits_rows);
        Ok(MemoryNeeds {
            weights_bytes: self.weights_bytes(dtype)?,
            workspace_bytes: workspace as u64,
            kv_bytes_per_token: config.kv_layout(dtype, kv_format).bytes_per_token() as u64,
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
        let rope = match &self.config.rope {
            Some(rope) => Some(RopeTable::new(
                &rope.inv_freq(self.config.head_dim)?,
                rope.attention_scaling(),
                self.config.max_context_tokens,
            )?),
            None => None,
        };
        let (weights, weights_bytes) = load::load_weights(
            &self.plan,
            &self.folder,
            &self.checkpoint,
            &backend,
            options,
            self.is_tied,
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
            kv_format: options.kv_format,
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
        let mut loader =
            Loader::new(folder, checkpoint, backend, dtype, options, stored_bytes, progress)?;
        loader.open_kept(&self.plan, folder, checkpoint, options, self.is_tied)?;
        let kv_format = options.kv_format;
        let weights = DeviceModelLoad::new(
            &self.config,
            &self.plan,
            loader,
            dtype,
            kv_format,
            deterministic,
        )?;
        Ok(DeviceLoad { config: &self.config, weights, dtype, kv_format, num_parameters })
    }
}

/// A model on its way to a device.
pub struct DeviceLoad<'a> {
    config: &'a ModelConfig,
    weights: DeviceModelLoad<'a>,
    dtype: DType,
    kv_format: KvFormat,
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
            kv_format: self.kv_format,
            weights_bytes,
            num_parameters: self.num_parameters,
        })
    }
}
