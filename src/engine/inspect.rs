//! A report on a model folder, without loading it: that of the model layer, and whether its text
//! side works.

use std::path::PathBuf;

use super::engine::ModelShape;
use super::text_files::{read_chat_template, read_generation_config, read_tokenizer};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::model;
use crate::model::folder::{is_lasting, Folder};

/// The report. Numbers that are not known are 0.
#[derive(Clone, Debug, Default)]
pub struct Inspection {
    /// The folder.
    pub path: PathBuf,
    /// The architecture that config.json names; empty if it names none.
    pub architecture: String,
    /// Why the folder cannot be loaded; `None` if it can.
    pub reason: Option<String>,
    /// Why text cannot be tokenized; `None` if it can.
    pub tokenizer_problem: Option<String>,
    /// Why messages cannot be rendered; `None` if they can.
    pub chat_template_problem: Option<String>,
    /// Stored element types and their bytes, for example "bf16: 1192099840".
    pub stored_dtypes: String,
    /// Number of weights.
    pub num_parameters: u64,
    /// Bytes of the weights in memory, as stored.
    pub weights_bytes: u64,
    /// Bytes of KV cache for a token.
    pub kv_bytes_per_token: u64,
    /// Longest context, in tokens.
    pub max_context_tokens: u64,
    /// The element type that a load with default options would choose.
    pub dtype: Option<DType>,
    /// Sizes from the config.
    pub shape: Option<ModelShape>,
}

/// Inspects a folder or cached repo id. Fails if there is none, or if it could not be examined.
pub fn inspect(path: &str) -> Result<Inspection> {
    let found = model::inspect(path)?;
    let folder = Folder::open(&found.path)?;
    let tokenizer_problem = problem(read_tokenizer(&folder))?;
    let chat_template_problem = read_chat_template(&folder)?.err();
    // A model whose tokenizer.json is damaged is refused; one that has none can be used with ids. Of two
    // damaged files a load reports generation_config.json.
    let generation = match &found.config {
        Some(config) => problem(read_generation_config(&folder, config))?,
        None => None,
    };
    let tokenizer = tokenizer_problem.as_ref().filter(|e| e.kind() != ErrorKind::NotFound);
    let broken = generation.or(tokenizer.cloned());
    let reason = match (found.supported, broken) {
        (false, _) => Some(found.reason.unwrap_or_else(|| "unsupported".to_string())),
        (true, Some(error)) => Some(error.message().to_string()),
        (true, None) => None,
    };
    let dtypes: Vec<String> = found
        .stored_dtypes
        .iter()
        .map(|(name, b)| format!("{}: {b}", name.to_lowercase()))
        .collect();
    Ok(Inspection {
        architecture: found.architecture.unwrap_or_default(),
        reason,
        tokenizer_problem: tokenizer_problem.map(|e| e.message().to_string()),
        chat_template_problem: chat_template_problem.map(|e| e.message().to_string()),
        stored_dtypes: dtypes.join(", "),
        num_parameters: found.num_parameters.unwrap_or(0),
        weights_bytes: found.weights_bytes.unwrap_or(0),
        kv_bytes_per_token: found.kv_bytes_per_token.unwrap_or(0),
        max_context_tokens: found.config.as_ref().map_or(0, |c| c.max_context_tokens as u64),
        dtype: found.dtype,
        shape: found.config.as_ref().map(ModelShape::of),
        path: found.path,
    })
}

/// Returns what is wrong with a part of the folder, if anything is. Fails if that could not be found
/// out.
fn problem<T>(outcome: Result<T>) -> Result<Option<Error>> {
    match outcome {
        Ok(_) => Ok(None),
        Err(error) if is_lasting(error.kind()) => Ok(Some(error)),
        Err(error) => Err(error),
    }
}
