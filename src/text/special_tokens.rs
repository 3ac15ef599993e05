//! The names of the special tokens, from `tokenizer_config.json` and `special_tokens_map.json`.

use crate::error::{check_room_for_json, Context, Error, Result};
use serde_json::Value;

/// The largest of either file, in bytes. The published ones have about 10 KiB; some repeat
/// the added tokens and several templates.
pub const MAX_TOKENIZER_CONFIG_BYTES: usize = 4 << 20;

/// The texts of a model's special tokens, as templates see them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token that begins a text (`bos_token`).
    pub bos: Option<String>,
    /// The token that ends an answer (`eos_token`).
    pub eos: Option<String>,
    /// The token that pads batches (`pad_token`).
    pub pad: Option<String>,
    /// The token for text that the vocabulary cannot express (`unk_token`).
    pub unk: Option<String>,
    /// The others, by the names of their variables: `sep_token`, `cls_token`, `mask_token`, and those that the model
    /// gives a name, such as `image_token`.
    pub others: Vec<(String, String)>,
}

/// The names of special tokens that all models share.
const COMMON_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl SpecialTokens {
    /// Reads `tokenizer_config.json`. A token is written as a string, as an object with the string
    /// under `content`, or is missing or null.
    pub fn from_config(tokenizer_config_json: &[u8]) -> Result<Self> {
        Self::from_files(Some(tokenizer_config_json), None)
    }

    /// Reads `tokenizer_config.json`, and `special_tokens_map.json`. As in Transformers (`_from_pretrained`,
    /// tokenization_utils_base.py) the latter counts, and then wins, where the former has no `added_tokens_decoder`.
    pub fn from_files(
        tokenizer_config_json: Option<&[u8]>,
        special_tokens_map_json: Option<&[u8]>,
    ) -> Result<Self> {
        const CONFIG: &str = "tokenizer_config.json";
        const MAP: &str = "special_tokens_map.json";
        let config = tokenizer_config_json.map(parse_config).transpose()?;
        let is_old = config.as_ref().is_none_or(|it| it.get("added_tokens_decoder").is_none());
        let map = special_tokens_map_json.filter(|_| is_old);
        let map = map.map(|bytes| parse_object(bytes, MAP)).transpose()?;

        let common = |name: &str| {
            if let Some(value) = map.as_ref().and_then(|map| map.get(name)) {
                return token(value, name).context(|| MAP);
            }
            let value = config.as_ref().and_then(|config| config.get(name));
            value.map_or(Ok(None), |value| token(value, name).context(|| CONFIG))
        };
        let mut tokens = SpecialTokens {
            bos: common("bos_token")?,
            eos: common("eos_token")?,
            pad: common("pad_token")?,
            unk: common("unk_token")?,
            others: Vec::new(),
        };
        for name in ["sep_token", "cls_token", "mask_token"] {
            tokens.others.extend(common(name)?.map(|text| (name.to_owned(), text)));
        }
        // Anything else whose name says so is a special token of this model, and what is listed by name.
        for value in [&config, &map].into_iter().flatten() {
            let is_own = |name: &str| name.ends_with("_token") && !COMMON_NAMES.contains(&name);
            let own = value.as_object().into_iter().flatten().filter(|(name, _)| is_own(name));
            let listed = value.get("extra_special_tokens").and_then(Value::as_object);
            for (name, value) in own.chain(listed.into_iter().flatten()) {
                if let Ok(Some(text)) = token(value, name) {
                    tokens.others.push((name.clone(), text));
                }
            }
        }
        Ok(tokens)
    }
}

/// Returns the text of a token, if the value is one.
fn token(value: &Value, name: &str) -> Result<Option<String>> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Object(object) => match object.get("content") {
            Some(Value::String(text)) => Ok(Some(text.clone())),
            _ => Err(Error::invalid_file(format!(
                "{name} is an object without a string \"content\""
            ))),
        },
        _ => Err(Error::invalid_file(format!("{name} is neither a string nor an object"))),
    }
}

/// Parses `tokenizer_config.json` as a JSON object of bounded size.
pub(super) fn parse_config(bytes: &[u8]) -> Result<Value> {
    parse_object(bytes, "tokenizer_config.json")
}

fn parse_object(bytes: &[u8], name: &str) -> Result<Value> {
    if bytes.len() > MAX_TOKENIZER_CONFIG_BYTES {
        return Err(Error::invalid_file(format!(
            "{name} has {} bytes, at most {MAX_TOKENIZER_CONFIG_BYTES} are read",
            bytes.len()
        )));
    }
    check_room_for_json(bytes, name)?;
    let config: Value =
        serde_json::from_slice(bytes).map_err(|e| Error::invalid_file(format!("{name}: {e}")))?;
    if !config.is_object() {
        return Err(Error::invalid_file(format!("{name} is not a JSON object")));
    }
    Ok(config)
}
