//! What is in a folder, without loading it: for a listing, or to say why it cannot be loaded.

use std::path::PathBuf;

use super::checkpoint::Checkpoint;
use super::config::{declared_architecture, CONFIG_FILE, MAX_CONFIG_BYTES};
use super::folder::{resolve, Folder};
use super::headers::ModelHeaders;
use super::safetensors::compute_dtype;
use super::{ModelConfig, ModelFolder};
use crate::error::Result;
use crate::memory::DType;

/// The report on a folder. What could not be found out is `None`.
#[derive(Clone, Debug, Default)]
pub struct Inspection {
    /// The folder, found in the cache or as given.
    pub path: PathBuf,
    /// As config.json names it, supported or not.
    pub architecture: Option<String>,
    /// Whether the model itself can be loaded (tokenizer and template aside).
    pub supported: bool,
    /// Why not, in one sentence.
    pub reason: Option<String>,
    /// The checked configuration.
    pub config: Option<ModelConfig>,
    /// Numbers in the weights; a tied output matrix is counted once.
    pub num_parameters: Option<u64>,
    /// Bytes in the files by element type (`"BF16"`), the largest first.
    pub stored_dtypes: Vec<(String, u64)>,
    /// The element type that loading without a wish would compute with.
    pub dtype: Option<DType>,
    /// Bytes of memory that the weights take when loaded that way.
    pub weights_bytes: Option<u64>,
    /// Bytes of KV cache for each token of context, with that element type.
    pub kv_bytes_per_token: Option<u64>,
    /// Oddities that do not keep the model from loading.
    pub warnings: Vec<String>,
}

/// Reports on the folder (or cached repository) that `path` means.
///
/// Fails only if there is no such folder; everything that is wrong inside is part of the report.
pub fn inspect(path: &str) -> Result<Inspection> {
    let folder = Folder::open(&resolve(path)?)?;
    let mut report = Inspection { path: folder.path().to_path_buf(), ..Inspection::default() };
    if let Ok(json) = folder.read_small_file(CONFIG_FILE, MAX_CONFIG_BYTES) {
        report.architecture = declared_architecture(&json);
    }
    // An unsupported architecture still has files whose headers say how large it is.
    let config = ModelConfig::read(&folder);
    let checkpoint = Checkpoint::open(&folder);
    if let Ok(checkpoint) = &checkpoint {
        report.add_checkpoint(checkpoint);
    }
    report.config = config.as_ref().ok().cloned();
    let model = config
        .and_then(|config| ModelHeaders::new(folder, config, checkpoint?))
        .and_then(|headers| headers.settle(None, &mut |_| true))
        .and_then(|model| report.add_model(&model));
    match model {
        Ok(()) => report.supported = true,
        Err(error) => report.reason = Some(error.message().to_owned()),
    }
    Ok(report)
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
        self.kv_bytes_per_token = Some(model.config().kv_layout(dtype).bytes_per_token() as u64);
        self.warnings = model.warnings().to_vec();
        Ok(())
    }
}
