//! The names of the special tokens, from `tokenizer_config.json`.

use crate::error::{check_room_for_json, Error, Result};
use serde_json::Value;

/// The largest `tokenizer_config.json`, in bytes. The published ones have about 10 KiB; some repeat
/// the added tokens and several templates.
pub const MAX_TOKENIZER_CONFIG_BYTES: usize = 4 << 20;

/// The texts of a model's special tokens. Templates see them as `bos_token`, `eos_token`,
/// `pad_token` and `unk_token`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token that begins a text.
    pub bos: Option<String>,
    /// The token that ends an answer.
    pub eos: Option<String>,
    /// The token that pads batches.
    pub pad: Option<String>,
    /// The token for text that the vocabulary cannot express.
    pub unk: Option<String>,
}

impl SpecialTokens {
    /// Reads `tokenizer_config.json`. A token is written as a string, as an object with the string
    /// under `content`, or is missing or null.
    pub fn from_config(tokenizer_config_json: &[u8]) -> Result<Self> {
        Self::from_value(&parse_config(tokenizer_config_json)?)
    }

    pub(super) fn from_value(config: &Value) -> Result<Self> {
        let token = |key: &str| match config.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(Value::Object(object)) => match object.get("content") {
                Some(Value::String(text)) => Ok(Some(text.clone())),
                _ => Err(Error::invalid_file(format!(
                    "tokenizer_config.json: {key} is an object without a string \"content\""
                ))),
            },
            Some(_) => Err(Error::invalid_file(format!(
                "tokenizer_config.json: {key} is neither a string nor an object"
            ))),
        };
        Ok(SpecialTokens {
            bos: token("bos_token")?,
            eos: token("eos_token")?,
            pad: token("pad_token")?,
            unk: token("unk_token")?,
        })
    }
}

/// Parses `tokenizer_config.json` as a JSON object of bounded size.
pub(super) fn parse_config(bytes: &[u8]) -> Result<Value> {
    if bytes.len() > MAX_TOKENIZER_CONFIG_BYTES {
        return Err(Error::invalid_file(format!(
            "tokenizer_config.json has {} bytes, at most {MAX_TOKENIZER_CONFIG_BYTES} are read",
            bytes.len()
        )));
    }
    check_room_for_json(bytes, "tokenizer_config.json")?;
    let config: Value = serde_json::from_slice(bytes)
        .map_err(|e| Error::invalid_file(format!("tokenizer_config.json: {e}")))?;
    if !config.is_object() {
        return Err(Error::invalid_file("tokenizer_config.json is not a JSON object"));
    }
    Ok(config)
}
