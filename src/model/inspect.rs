//! Reports what is in a folder, without loading it: for a listing, or to say why it cannot be
//! loaded.

use std::path::PathBuf;

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::config::{declared_architecture, CONFIG_FILE, MAX_CONFIG_BYTES};
use super::folder::{is_lasting, resolve, Folder};
use super::headers::ModelHeaders;
use super::opened::ModelFolder;
use super::safetensors::compute_dtype;
use crate::error::Result;
use crate::memory::DType;
use crate::ops::kv_cache::layout::KvFormat;

/// The report on a folder. What could not be found out is `None`.
#[derive(Clone, Debug, Default)]
pub struct Inspection {
    /// The folder, found in the cache or as given.
    pub path: PathBuf,
    /// The architecture that config.json names, supported or not.
    pub architecture: Option<String>,
    /// Whether the model itself can be loaded (tokenizer and template aside).
    pub supported: bool,
    /// The reason why it cannot be loaded, in one sentence.
    pub reason: Option<String>,
    /// The checked configuration.
    pub config: Option<ModelConfig>,
    /// The number of parameters; a tied output matrix is counted once.
    pub num_parameters: Option<u64>,
    /// The bytes in the files by element type (`"BF16"`), the largest first.
    pub stored_dtypes: Vec<(String, u64)>,
    /// The element type that loading computes with if none is requested.
    pub dtype: Option<DType>,
    /// The bytes of memory that the weights take with that element type.
    pub weights_bytes: Option<u64>,
    /// The bytes of KV cache for each token of context, with that element type.
    pub kv_bytes_per_token: Option<u64>,
    /// Oddities that do not keep the model from loading.
    pub warnings: Vec<String>,
}

/// Reports on the folder (or cached repository) that `path` means.
///
/// Fails if there is no such folder, or if it could not be examined: for lack of memory, say.
/// Everything that is wrong inside is part of the report.
pub fn inspect(path: &str) -> Result<Inspection> {
    let folder = Folder::open(&resolve(path)?)?;
    let mut report = Inspection { path: folder.path().to_path_buf(), ..Inspection::default() };
    if let Ok(json) = lasting(folder.read_small_file(CONFIG_FILE, MAX_CONFIG_BYTES))? {
        report.architecture = declared_architecture(&json)?;
    }
    // An unsupported architecture still has files whose headers say how large it is.
    let config = lasting(ModelConfig::read(&folder))?;
    let checkpoint = lasting(Checkpoint::open(&folder))?;
    if let Ok(checkpoint) = &checkpoint {
        report.add_checkpoint(checkpoint);
    }
    report.config = config.as_ref().ok().cloned();
    let model = config
        .and_then(|config| ModelHeaders::new(folder, config, checkpoint?))
        .and_then(|headers| headers.settle(None, &mut |_| true))
        .and_then(|model| report.add_model(&model));
    match lasting(model)? {
        Ok(()) => report.supported = true,
        Err(error) => report.reason = Some(error.message().to_owned()),
    }
    Ok(report)
}

/// Fails if the outcome is a failure that says nothing about the files, and else returns it.
fn lasting<T>(outcome: Result<T>) -> Result<Result<T>> {
    match outcome {
        Err(error) if !is_lasting(error.kind()) => Err(error),
        outcome => Ok(outcome),
    }
}

impl Inspection {
    fn add_checkpoint(&mut self, checkpoint: &Checkpoint) {
        self.stored_dtypes = checkpoint
            .bytes_by_dtype()
            .into_iter()
            .map(|(dtype, bytes)| (dtype.to_string(), bytes))
            .collect();
        let elements = checkpoint
            .tensors
            .values()
            .filter_map(|entry| Some((entry, compute_dtype(entry.info.dtype)?)))
            .map(|(entry, dtype)| entry.info.len_bytes / dtype.size_bytes() as u64)
            .fold(0_u64, u64::saturating_add);
        self.num_parameters = Some(elements);
    }

    fn add_model(&mut self, model: &ModelFolder) -> Result<()> {
        let totals = model.plan().totals()?;
        let dtype = totals.stored_dtype();
        self.num_parameters = Some(totals.num_parameters);
        self.dtype = Some(dtype);
        self.weights_bytes = Some(model.weights_bytes(dtype)?);
        self.kv_bytes_per_token =
            Some(model.config().kv_layout(dtype, KvFormat::Dense).bytes_per_token() as u64);
        self.warnings = model.warnings().to_vec();
        Ok(())
    }
}
