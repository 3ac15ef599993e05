//! The config of compressed-tensors: groups of modules, each with a scheme of its own.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::pattern::{names, names_of, optional_names, Budget, Expression};
use super::scheme::{ScaleShape, Scheme};
use super::values::{block_sizes, group_size, one_of, refuse_set};
use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::folder::shown_name;

/// The most groups of a config; published ones have one to three.
const MAX_GROUPS: usize = 256;
/// The formats that are read.
const FORMATS: [&str; 4] =
    ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"];
/// The format of the whole config if groups have their own.
const MIXED: &str = "mixed-precision";
/// The class of linear layers, which stands for all of them.
const LINEAR: &str = "Linear";
/// Modules that are no linear layers, by the last part of their names.
const TABLES: [&str; 3] = ["embed_tokens", "wte", "wpe"];

/// The groups of a config.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Groups {
    groups: Vec<Group>,
    ignored: Targets,
}

/// Modules with a common scheme.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    targets: Targets,
    /// `None` if the weights are not quantised, only activations.
    scheme: Option<Scheme>,
}

/// A list of modules: names, expressions, and whether all linear layers are in it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Targets {
    names: HashSet<String>,
    /// In the order of their texts.
    expressions: Vec<(String, Expression)>,
    linear: bool,
}

impl Targets {
    fn new(place: &str, list: Vec<String>, budget: &Budget) -> Result<Self> {
        let mut targets = Targets::default();
        for target in list {
            match target.strip_prefix("re:") {
                Some(text) => {
                    let expression = Expression::new(place, text, budget)?;
                    targets.expressions.push((text.to_owned(), expression));
                }
                None if target == LINEAR => targets.linear = true,
                // Names of other classes are names of no module.
                None => drop(targets.names.insert(target)),
            }
        }
        targets.expressions.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(targets)
    }

    /// Returns the first expression that the module matches.
    fn expression(&self, module: &str) -> Result<Option<&str>> {
        for (text, expression) in &self.expressions {
            if expression.matches(module)? {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }
}

impl Groups {
    /// As in compressed-tensors, a name is preferred to an expression, that to a class, and among
    /// expressions the first in the order of their texts.
    pub fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        let is_linear = !TABLES.iter().any(|table| module.rsplit('.').next() == Some(*table));
        let ignored = &self.ignored;
        if ignored.names.contains(module)
            || (ignored.linear && is_linear)
            || ignored.expression(module)?.is_some()
        {
            return Ok(None);
        }
        // Of two groups with the same target, the later one counts, as in a dictionary.
        if let Some(group) = self.groups.iter().rev().find(|g| g.targets.names.contains(module)) {
            return Ok(group.scheme);
        }
        let mut best: Option<(&str, &Group)> = None;
        for group in &self.groups {
            if let Some(text) = group.targets.expression(module)? {
                if best.is_none_or(|(known, _)| text <= known) {
                    best = Some((text, group));
                }
            }
        }
        let group = match best {
            Some((_, group)) => Some(group),
            None => self.groups.iter().rev().find(|group| group.targets.linear && is_linear),
        };
        Ok(group.and_then(|group| group.scheme))
    }
}

/// Refuses weights of which some are left out.
pub(super) fn refuse_sparsity(fields: Fields<'_>) -> Result<()> {
    let Some(map) = fields.optional_object("sparsity_config")? else { return Ok(()) };
    let place = format!("{}: sparsity_config", fields.place());
    one_of(Fields::new(map, &place), "format", &["dense"]).map(drop)
}

/// Reads the config.
pub(super) fn groups(fields: Fields<'_>) -> Result<Groups> {
    refuse_sparsity(fields)?;
    refuse_set(fields, "transform_config")?;
    let format = overall_format(fields)?;
    let budget = Budget::default();
    let ignored = optional_names(fields, "ignore")?.unwrap_or_default();
    let ignored = Targets::new(&format!("{}: ignore", fields.place()), ignored, &budget)?;
    let found =
        fields.optional_object("config_groups")?.ok_or_else(|| fields.missing("config_groups"))?;
    if found.len() > MAX_GROUPS {
        let expected = format!("at most {MAX_GROUPS} groups");
        return Err(fields.wrong("config_groups", &expected));
    }
    let mut groups = Vec::new();
    for (name, group) in found {
        let place = format!("{}: config_groups: {}", fields.place(), shown_name(name));
        groups.push(match group {
            Value::Object(map) => {
                let fields = Fields::new(map, &place);
                let targets = Targets::new(&place, names(fields, "targets")?, &budget)?;
                Group { targets, scheme: group_scheme(fields, format)? }
            }
            Value::Array(_) => {
                let list = names_of(group).ok_or_else(|| {
                    Error::invalid_file(format!("{place} is not a list of targets"))
                })?;
                let targets = Targets::new(&place, list, &budget)?;
                Group { targets, scheme: preset(&place, name, format)? }
            }
            _ => {
                return Err(Error::invalid_file(format!(
                    "{place} is neither an object nor a list of targets"
                )))
            }
        });
    }
    Ok(Groups { groups, ignored })
}

/// Returns the format of the groups that name none.
fn overall_format(fields: Fields<'_>) -> Result<Option<&'static str>> {
    let mut known = FORMATS.to_vec();
    known.push(MIXED);
    Ok(one_of(fields, "format", &known)?.filter(|format| *format != MIXED))
}

fn group_scheme(fields: Fields<'_>, overall: Option<&'static str>) -> Result<Option<Scheme>> {
    let Some(weights) = fields.optional_object("weights")? else { return Ok(None) };
    let format =
        one_of(fields, "format", &FORMATS)?.or(overall).ok_or_else(|| fields.missing("format"))?;
    let inputs = Inputs::new(fields)?;
    let place = format!("{}: weights", fields.place());
    scheme_of(Fields::new(weights, &place), format, inputs).map(Some)
}

/// The format in which the modules of a group take their activations.
#[derive(Clone, Copy, Debug, Default)]
struct Inputs {
    are_fp8: bool,
    /// Integers of 8 bits without zeros.
    are_int8: bool,
}

impl Inputs {
    fn new(fields: Fields<'_>) -> Result<Self> {
        let Some(inputs) = fields.optional_object("input_activations")? else {
            return Ok(Inputs::default());
        };
        let place = format!("{}: input_activations", fields.place());
        let fields = Fields::new(inputs, &place);
        let has_bytes = fields.optional_count("num_bits", 64)?.unwrap_or(8) == 8;
        let is_float = one_of(fields, "type", &["int", "float"])? == Some("float");
        let symmetric = fields.flag("symmetric", true)?;
        Ok(Inputs { are_fp8: has_bytes && is_float, are_int8: has_bytes && !is_float && symmetric })
    }
}

/// Returns the scheme of weights that are stored in a format.
fn scheme_of(fields: Fields<'_>, format: &'static str, inputs: Inputs) -> Result<Scheme> {
    let unsupported = |what: String| {
        Error::unsupported(format!("{}: {what} is not supported in {format}", fields.place()))
    };
    let bits = fields.optional_count("num_bits", 64)?.unwrap_or(8);
    let is_float = one_of(fields, "type", &["int", "float"])? == Some("float");
    let symmetric = fields.flag("symmetric", true)?;
    let scales = scale_shape(fields)?;
    match fields.get("dynamic") {
        None | Some(Value::Bool(false)) => {}
        Some(_) => return Err(fields.wrong("dynamic", "false")),
    }
    if format == "pack-quantized" {
        if is_float || ![4, 8].contains(&bits) {
            let kind = if is_float { "float" } else { "int" };
            return Err(unsupported(format!("num_bits {bits} of type {kind}")));
        }
        return match scales {
            ScaleShape::Block(_) => Err(unsupported("strategy \"block\"".to_owned())),
            // Such zeros are stored as nothing that is described.
            ScaleShape::Tensor if !symmetric => {
                Err(unsupported("strategy \"tensor\" with symmetric = false".to_owned()))
            }
            _ => Ok(Scheme::Packed { bits, scales, symmetric }),
        };
    }
    if bits != 8 {
        return Err(unsupported(format!("num_bits {bits}")));
    }
    match (is_float, format) {
        (true, "int-quantized") => Err(unsupported("type \"float\"".to_owned())),
        (false, "float-quantized") => Err(unsupported("type \"int\"".to_owned())),
        (true, _) if !symmetric => Err(unsupported("symmetric = false".to_owned())),
        (true, _) => Ok(Scheme::Fp8 { scales: Some(scales), has_fp8_inputs: inputs.are_fp8 }),
        (false, _) => Ok(Scheme::Int8 { scales, symmetric, has_int8_inputs: inputs.are_int8 }),
    }
}

/// Returns which numbers share a scale: `strategy`, or what the other keys amount to without it.
fn scale_shape(fields: Fields<'_>) -> Result<ScaleShape> {
    let strategy = one_of(fields, "strategy", &["tensor", "channel", "group", "block"])?;
    match (strategy, fields.get("group_size").is_some()) {
        (Some("tensor"), _) | (None, false) => Ok(ScaleShape::Tensor),
        (Some("channel"), _) => Ok(ScaleShape::Channel),
        (Some("block"), _) => block_sizes(fields, "block_structure")?
            .map(ScaleShape::Block)
            .ok_or_else(|| fields.missing("block_structure")),
        (_, true) => {
            Ok(group_size(fields, "group_size", 128)?
                .map_or(ScaleShape::Channel, ScaleShape::Group))
        }
        (_, false) => Err(fields.missing("group_size")),
    }
}

/// Returns the scheme that a preset's name stands for.
fn preset(place: &str, name: &str, format: Option<&'static str>) -> Result<Option<Scheme>> {
    let name = name.to_ascii_uppercase();
    let weights = match name.as_str() {
        "UNQUANTIZED" => return Ok(None),
        "FP8" => r#"{"num_bits": 8, "type": "float", "strategy": "tensor"}"#,
        "FP8_DYNAMIC" => r#"{"num_bits": 8, "type": "float", "strategy": "channel"}"#,
        "FP8_BLOCK" => {
            r#"{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}"#
        }
        "W8A8" | "INT8" => r#"{"num_bits": 8, "strategy": "channel"}"#,
        "W4A16" | "W4A8" | "W4AFP8" => r#"{"num_bits": 4, "strategy": "group", "group_size": 128}"#,
        "W8A16" => r#"{"num_bits": 8, "strategy": "group", "group_size": 128}"#,
        "W4A16_ASYM" => {
            r#"{"num_bits": 4, "symmetric": false, "strategy": "group", "group_size": 128}"#
        }
        _ => {
            return Err(Error::unsupported(format!(
                "{place}: a preset of that name is not supported"
            )))
        }
    };
    let map: Map<String, Value> = serde_json::from_str(weights)
        .map_err(|e| Error::internal(format!("the preset of {place}: {e}")))?;
    let format =
        format.ok_or_else(|| Error::invalid_file(format!("{place}: format is missing")))?;
    // Where weights are floats of 8 bits, so are activations.
    let inputs = Inputs { are_fp8: true, are_int8: ["W8A8", "INT8"].contains(&name.as_str()) };
    scheme_of(Fields::new(&map, place), format, inputs).map(Some)
}
