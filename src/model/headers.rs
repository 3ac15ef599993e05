//! A folder before the one question that its headers leave open: whether an output matrix that is stored
//! although the config declares it tied is another than the embedding.
//!
//! As in Transformers 5, two that differ are not tied after all. Published folders of tied models
//! store the copy, or leave it out; either way the model has one matrix. The question is answered
//! here, from the files and before anything is counted, so that every count and every plan of
//! memory is that of the model that is loaded.

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::decoder::block::DecoderPlan;
use super::folder::{self, resolve, Folder};
use super::load::equal::are_equal;
use super::load::kept::recorded_tie;
use super::load::plan::PlannedDecoder;
use super::load::weights::MatrixPlan;
use super::load::WeightFiles;
use super::loaded::Model;
use super::opened::ModelFolder;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::memory::DType;
use crate::ops::quantised::QuantFormat;
use std::path::Path;

/// A folder whose configuration and headers have been found in order. No weight has been read.
#[derive(Debug)]
pub struct ModelHeaders {
    /// The folder if the model has one matrix of tokens.
    presumed: ModelFolder,
    /// The output matrix that is stored although it is declared to be the embedding.
    stored_output: Option<MatrixPlan>,
}

impl ModelHeaders {
    pub(super) fn new(folder: Folder, config: ModelConfig, checkpoint: Checkpoint) -> Result<Self> {
        let PlannedDecoder { plan, stored_output, unused } = DecoderPlan::of(&config, &checkpoint)?;
        let warnings = unused_warning(&unused).into_iter().collect();
        let presumed = ModelFolder { folder, config, checkpoint, plan, warnings, is_tied: None };
        Ok(ModelHeaders { presumed, stored_output })
    }

    /// Returns the folder as it is unless an output matrix that is declared tied differs from the
    /// embedding: good for a guess, such as where the model will go.
    pub fn presumed(&self) -> &ModelFolder {
        &self.presumed
    }

    /// Has the matrices of the layers quantised while they are read.
    pub fn quantise(&mut self, format: QuantFormat) {
        self.presumed.quantise(format);
    }

    /// Has the embedding and the output matrix quantised while they are read, once if they are one.
    pub fn quantise_tokens(&mut self, format: QuantFormat) {
        self.presumed.quantise_tokens(format);
        if let Some(output) = &mut self.stored_output {
            output.quantise(format);
        }
    }

    /// Has all products keep their activations as they are computed, whatever the folder's config says of
    /// FP8.
    pub fn keep_activations(&mut self) {
        self.presumed.keep_activations();
        if let Some(output) = &mut self.stored_output {
            output.keep_activations();
        }
    }

    /// Takes from a file of kept weights whether an output matrix that is stored although it is
    /// declared tied is the embedding, if the file tells and the model is the one that it was made
    /// from.
    pub fn recall_output(&mut self, kept: &Path) {
        if self.stored_output.is_some() {
            let ModelFolder { folder, checkpoint, .. } = &self.presumed;
            self.presumed.is_tied = recorded_tie(kept, folder, checkpoint);
        }
    }

    /// Decides whether the embedding is the output matrix.
    ///
    /// If both are stored although the config declares them tied, and nothing else tells
    /// ([`ModelHeaders::recall_output`]), reads them up to the first difference (to the end if they
    /// are equal), on the threads of `backend` or on this one alone. `progress` is then called with
    /// 0 now and again, and ends the comparison with
    /// [`ErrorKind::Cancelled`](crate::error::ErrorKind::Cancelled) by returning false.
    pub fn settle(
        self,
        backend: Option<&CpuBackend>,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<ModelFolder> {
        let ModelHeaders { presumed: mut found, stored_output } = self;
        if let Some(output) = stored_output {
            let is_tied = match found.is_tied {
                Some(is_tied) => is_tied,
                None => {
                    let files = WeightFiles::new(&found.folder, &found.checkpoint, false);
                    let embedding = &found.plan.tokens.embedding;
                    are_equal(embedding, &output, files, backend, &mut || progress(0.0))?
                }
            };
            found.is_tied = Some(is_tied);
            if !is_tied {
                found.plan.tokens.output = Some(output);
            }
        }
        Ok(found)
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

impl Model {
    /// Reads configuration and headers of the folder that `path` means: a folder, or a repository
    /// (`org/name`) in the local Hugging Face cache.
    ///
    /// Refuses what is not supported, by name. If the files hold an output matrix that the config
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

    /// Reads the configuration alone, and takes random numbers for the weights, whether there are
    /// files or not: to time a shape without its files. Norms scale by 1, biases are 0.
    /// [`LoadOptions::dtype`](super::LoadOptions::dtype) `None` stands for the element type that
    /// config.json names, or bf16. Loading on a device makes up the numbers there and reads nothing.
    ///
    /// Refuses what is not supported, by name.
    pub fn read_config_alone(path: &str) -> Result<ModelHeaders> {
        let folder = Folder::open(&resolve(path)?)?;
        let config = ModelConfig::read(&folder)?;
        let checkpoint = Checkpoint::random(config.declared_dtype.unwrap_or(DType::BF16));
        ModelHeaders::new(folder, config, checkpoint)
    }

    /// Opens a folder by [`Model::read_config_alone`].
    pub fn open_without_weights(path: &str) -> Result<ModelFolder> {
        Model::read_config_alone(path)?.settle(None, &mut |_| true)
    }
}
