//! The families of models. A family is a file with two functions: `parse` makes a [`ModelConfig`]
//! from the fields of config.json, with the meanings and defaults of Transformers, and `plan` says
//! which tensors make which weight of the decoder. Nothing outside this folder names a family.

mod gpt2;
mod qwen3;

use std::fmt;

use serde_json::Value;

use super::block::DecoderPlan;
use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::ModelConfig;
use crate::model::folder::shown_name;
use crate::model::load::plan::Planner;

/// The supported families.
const FAMILIES: [&Family; 2] = [&qwen3::FAMILY, &gpt2::FAMILY];

/// A family of models.
pub struct Family {
    /// The name in `architectures` of config.json.
    pub name: &'static str,
    /// The name in `model_type` of config.json.
    pub(in crate::model) model_type: &'static str,
    /// Returns the sizes and kinds that config.json names, and refuses, by name, what would change
    /// the computation and is not implemented. The first argument is the family itself.
    pub(in crate::model) parse: fn(&'static Family, Fields<'_>) -> Result<ModelConfig>,
    /// Finds the tensors of the weights.
    pub(in crate::model) plan: fn(&ModelConfig, &mut Planner<'_>) -> Result<DecoderPlan>,
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Family {
    /// Returns the family that config.json names, in `architectures` or, without it, in
    /// `model_type`.
    pub(in crate::model) fn named_by(fields: Fields<'_>) -> Result<&'static Family> {
        let find =
            |is_it: &dyn Fn(&Family) -> bool| FAMILIES.into_iter().find(|family| is_it(family));
        let model_type = fields.optional_string("model_type")?;
        let by_model_type =
            model_type.and_then(|model_type| find(&|family| family.model_type == model_type));
        let refuse = |name: &str| {
            Err(Error::unsupported(format!(
                "architecture {} is not supported (supported: {})",
                shown_name(name),
                FAMILIES.map(|family| family.name).join(", ")
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
            Some(model_type) if by_model_type != Some(family) => Err(fields.wrong(
                "model_type",
                &format!("the one of {} (found {})", family.name, shown_name(model_type)),
            )),
            _ => Ok(family),
        }
    }
}
