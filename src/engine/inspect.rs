//! A report on a model folder, without loading it: that of the model layer, and whether its text
//! side works.

use std::path::PathBuf;

use super::engine::ModelShape;
use super::text_files::{read_chat_template, read_generation_config, read_tokenizer};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::model::{self, folder::Folder};

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

/// Inspects a folder or cached repo id. Fails only if there is none.
pub fn inspect(path: &str) -> Result<Inspection> {
    let found = model::inspect(path)?;
    let folder = Folder::open(&found.path)?;
    let tokenizer_problem = read_tokenizer(&folder).err();
    let chat_template_problem = match read_chat_template(&folder) {
        Ok(Some(_)) => None,
        Ok(None) => Some(Error::unsupported("the folder has no chat template")),
        Err(error) => Some(error),
    };
    // A model whose tokenizer.json is damaged is refused; one that has none can be used with ids. Of two
    // damaged files a load reports generation_config.json.
    let generation = found.config.as_ref().map(|config| read_generation_config(&folder, config));
    let tokenizer = tokenizer_problem.as_ref().filter(|e| e.kind() != ErrorKind::NotFound);
    let broken = generation.and_then(Result::err).or(tokenizer.cloned());
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
