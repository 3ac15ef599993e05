//! A folder before the one question that its headers leave open: whether an output matrix that is stored
//! although the config declares it tied is another than the embedding.
//!
//! As in Transformers 5, two that differ are not tied after all. Published folders of tied models store the
//! copy, or leave it out; either way the model has one matrix. The question is answered here, from the files and
//! before anything is counted, so that every count and every plan of memory is that of the model that is loaded.

use super::checkpoint::Checkpoint;
use super::decoder::block::DecoderPlan;
use super::folder::Folder;
use super::load::equal::are_equal;
use super::load::plan::{MatrixPlan, PlannedDecoder};
use super::load::WeightFiles;
use super::{unused_warning, ModelConfig, ModelFolder};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;

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
        let PlannedDecoder { plan, stored_output, unused } =
            DecoderPlan::new(&config, &checkpoint)?;
        let warnings = unused_warning(&unused).into_iter().collect();
        let presumed = ModelFolder { folder, config, checkpoint, plan, warnings };
        Ok(ModelHeaders { presumed, stored_output })
    }

    /// The folder as it is unless an output matrix that is declared tied differs from the embedding: good for
    /// a guess, such as where the model will go.
    pub fn presumed(&self) -> &ModelFolder {
        &self.presumed
    }

    /// Decides whether the embedding is the output matrix.
    ///
    /// Where both are stored although the config declares them tied, reads them up to the first difference (to
    /// the end if they are equal), on the threads of `backend` or on this one alone. `progress` is then called
    /// with 0 now and again, and ends the comparison with
    /// [`ErrorKind::Cancelled`](crate::error::ErrorKind::Cancelled) by returning false.
    pub fn settle(
        self,
        backend: Option<&CpuBackend>,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<ModelFolder> {
        let ModelHeaders { presumed: mut found, stored_output } = self;
        if let Some(output) = stored_output {
            let files = WeightFiles::new(&found.folder, &found.checkpoint, false);
            let embedding = &found.plan.tokens.embedding;
            if !are_equal(embedding, &output, files, backend, &mut || progress(0.0))? {
                found.plan.tokens.output = Some(output);
            }
        }
        Ok(found)
    }
}
