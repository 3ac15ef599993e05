//! The families of models. A family is a file with two functions: `parse` makes a [`ModelConfig`]
//! from the fields of config.json, with the meanings and defaults of Transformers, and `plan` says
//! which tensors make which weight of the decoder. Nothing outside this folder names a family.

mod gpt2;
mod llama;
mod llama_like;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod windows;

use serde_json::Value;

use super::block::DecoderPlan;
use crate::error::{check_room_for_json, Error, Result};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::fields::Fields;
use crate::model::config::{
    refuse_what_changes_every_model, ModelConfig, CONFIG_FILE, MAX_CONFIG_BYTES,
};
use crate::model::folder::{shown_name, Folder};
use crate::model::load::plan::{PlannedDecoder, Planner};
use crate::model::other_formats::has_no_config;
use crate::model::quantised::{QuantConfig, OLDER_FILES};

/// The supported families.
static FAMILIES: [Family; 7] = [
    Family {
        name: qwen3::ARCHITECTURE,
        model_type: qwen3::MODEL_TYPE,
        parse: qwen3::parse,
        plan: llama_like::plan,
    },
    Family {
        name: qwen3_moe::ARCHITECTURE,
        model_type: qwen3_moe::MODEL_TYPE,
        parse: qwen3_moe::parse,
        plan: llama_like::plan,
    },
    Family {
        name: qwen2::ARCHITECTURE,
        model_type: qwen2::MODEL_TYPE,
        parse: qwen2::parse,
        plan: llama_like::plan,
    },
    Family {
        name: llama::ARCHITECTURE,
        model_type: llama::MODEL_TYPE,
        parse: llama::parse,
        plan: llama_like::plan,
    },
    Family {
        name: mistral::ARCHITECTURE,
        model_type: mistral::MODEL_TYPE,
        parse: mistral::parse,
        plan: llama_like::plan,
    },
    Family {
        name: mixtral::ARCHITECTURE,
        model_type: mixtral::MODEL_TYPE,
        parse: mixtral::parse,
        plan: mixtral::plan,
    },
    Family {
        name: gpt2::ARCHITECTURE,
        model_type: gpt2::MODEL_TYPE,
        parse: gpt2::parse,
        plan: gpt2::plan,
    },
];

/// A family of models.
struct Family {
    /// The name in `architectures` of config.json.
    name: &'static str,
    /// The name in `model_type` of config.json.
    model_type: &'static str,
    /// Returns the sizes and kinds that config.json names, and refuses, by name, what would change
    /// the computation and is not implemented.
    parse: fn(Fields<'_>) -> Result<ModelConfig>,
    /// Finds the tensors of the weights.
    plan: fn(&ModelConfig, &mut Planner<'_>) -> Result<DecoderPlan>,
}

impl ModelConfig {
    /// Reads and checks `config.json` of `folder`.
    pub fn read(folder: &Folder) -> Result<Self> {
        if !folder.contains(CONFIG_FILE)? {
            return Err(has_no_config(folder));
        }
        let mut config = Self::parse(&folder.read_small_file(CONFIG_FILE, MAX_CONFIG_BYTES)?)?;
        if config.quantisation.is_none() {
            config.quantisation = quantize_config(folder)?;
        }
        Ok(config)
    }

    /// Checks the content of a `config.json`.
    pub fn parse(json: &[u8]) -> Result<Self> {
        check_room_for_json(json, CONFIG_FILE)?;
        let value: Value = serde_json::from_slice(json).map_err(|e| {
            Error::invalid_file(format!(
                "{CONFIG_FILE} is not valid JSON: {}",
                shown_name(&e.to_string())
            ))
        })?;
        let quantisation = QuantConfig::parse(&value)?;
        let Value::Object(map) = value else {
            return Err(Error::invalid_file(format!("{CONFIG_FILE} is not a JSON object")));
        };
        let fields = Fields::new(&map, CONFIG_FILE);
        let family = Family::named_by(fields)?;
        refuse_what_changes_every_model(fields)?;
        let mut config = (family.parse)(fields)?;
        config.quantisation = quantisation;
        config.check_heads()?;
        config.check_experts()?;
        Ok(config)
    }
}

/// Reads what older repositories say of quantisation beside config.json.
fn quantize_config(folder: &Folder) -> Result<Option<QuantConfig>> {
    for file in OLDER_FILES {
        let Some(json) = folder.read_optional_file(file, MAX_CONFIG_BYTES)? else { continue };
        check_room_for_json(&json, file)?;
        let value: Value = serde_json::from_slice(&json).map_err(|e| {
            Error::invalid_file(format!("{file} is not valid JSON: {}", shown_name(&e.to_string())))
        })?;
        if let Some(found) = QuantConfig::parse_older(file, &value)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

impl DecoderPlan {
    /// Finds every tensor that the model needs.
    pub fn of(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<PlannedDecoder> {
        let family = FAMILIES.iter().find(|family| family.name == config.architecture);
        let family = family.ok_or_else(|| {
            Error::internal(format!("the architecture {} has no family", config.architecture))
        })?;
        let mut planner = Planner::new(checkpoint, config.quantisation.as_ref());
        let plan = (family.plan)(config, &mut planner)?;
        Ok(planner.finish(plan))
    }
}

impl Family {
    /// Returns the family that config.json names, in `architectures` or, without it, in
    /// `model_type`.
    fn named_by(fields: Fields<'_>) -> Result<&'static Family> {
        let find = |is_it: &dyn Fn(&Family) -> bool| FAMILIES.iter().find(|family| is_it(family));
        let model_type = fields.optional_string("model_type")?;
        let by_model_type =
            model_type.and_then(|model_type| find(&|family| family.model_type == model_type));
        let refuse = |name: &str| {
            Err(Error::unsupported(format!(
                "architecture {} is not supported (supported: {})",
                shown_name(name),
                FAMILIES.each_ref().map(|family| family.name).join(", ")
            )))
        };
        let named = match fields.get("architectures") {
            None => None,
            Some(Value::Array(names)) => match names.as_slice() {
                [] => None,
                [Value::String(name)] => Some(name.as_str()),
                [_] => return Err(fields.wrong("architectures", "a list with one name")),
                [first, ..] => {
                    let mut all = first.as_str().unwrap_or("?").to_owned();
                    all.push_str(" with others");
                    return refuse(&all);
                }
            },
            Some(_) => return Err(fields.wrong("architectures", "a list with one name")),
        };
        let family = match (named, by_model_type, model_type) {
            (Some(name), _, _) => match find(&|family| family.name == name) {
                Some(family) => family,
                None => return refuse(name),
            },
            (None, Some(family), _) => family,
            (None, None, Some(other)) => return refuse(other),
            (None, None, None) => return Err(fields.missing("architectures")),
        };
        match model_type {
            Some(model_type) if by_model_type.is_none_or(|other| other.name != family.name) => {
                Err(fields.wrong(
                    "model_type",
                    &format!("the one of {} (found {})", family.name, shown_name(model_type)),
                ))
            }
            _ => Ok(family),
        }
    }
}
