//! The config of auto-round: the layouts of GPTQ and AWQ, with a scheme for each module that differs.
//!
//! The keys and their meaning are those of auto-round 0.16 (`get_layer_config`).

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::pattern::{optional_names, Budget, Expression, MAX_ENTRIES};
use super::scheme::Scheme;
use super::values::{group_size, one_of, refuse_set};
use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::folder::shown_name;

/// The layouts that are read, as `packing_format` names them. The first is the default.
const FORMATS: [(&str, Packing); 8] = [
    ("auto_round:auto_gptq", Packing::Gptq),
    ("auto", Packing::Gptq),
    ("auto_round:gptq", Packing::Gptq),
    ("auto_round", Packing::GptqV2),
    ("auto_round:gptqmodel", Packing::GptqV2),
    ("auto_round:gptq_v2", Packing::GptqV2),
    ("auto_round:auto_awq", Packing::Awq),
    ("auto_round:awq", Packing::Awq),
];
/// Weights with this number of bits or more are not quantised.
const WHOLE_BITS: usize = 16;

/// The packing of codes and zeros in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    /// As GPTQ has it: zeros are stored less one.
    Gptq,
    /// The same with zeros as they are.
    GptqV2,
    Awq,
}

/// The fields of the config.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AutoRound {
    packing: Packing,
    default: Integers,
    /// The beginnings of the names of the blocks that are quantised; `None` is all blocks.
    blocks: Option<Vec<String>>,
    /// Modules that `extra_config` names; `None` is not quantised.
    named: HashMap<String, Option<Integers>>,
    /// All keys of `extra_config`, in its order.
    keys: Vec<(Key, Option<Integers>)>,
    /// Modules that are not quantised.
    skipped: Vec<Key>,
}

/// A text that is in the names of modules.
#[derive(Clone, Debug, PartialEq)]
enum Key {
    Text(String),
    Expression(Expression),
}

impl Key {
    /// Compiles an expression; a text whose only special characters are dots is taken literally, so
    /// that the hundreds of names in a config are not compiled.
    fn new(place: &str, text: &str, budget: &Budget) -> Result<Self> {
        if text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
            return Ok(Key::Text(text.to_owned()));
        }
        Expression::new(place, text, budget).map(Key::Expression)
    }

    fn is_in(&self, module: &str) -> Result<bool> {
        match self {
            Key::Text(text) => Ok(module.contains(text.as_str())),
            Key::Expression(expression) => expression.is_in(module),
        }
    }
}

/// Integers with a scale for each group of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Integers {
    bits: usize,
    /// `None` is the whole row.
    group_size: Option<usize>,
    /// Whether all zeros are the middle.
    symmetric: bool,
}

impl AutoRound {
    pub fn parse(fields: Fields<'_>) -> Result<Self> {
        for key in ["rotation_config", "spinquant_config", "quarot_config", "super_bits"] {
            refuse_set(fields, key)?;
        }
        let names = FORMATS.map(|(name, _)| name);
        let format = one_of(fields, "packing_format", &names)?.unwrap_or(names[0]);
        let packing = FORMATS.iter().find(|(name, _)| *name == format);
        let packing = packing.map_or(Packing::Gptq, |&(_, packing)| packing);
        if fields.get("bits").is_none() {
            return Err(fields.missing("bits"));
        }
        let standard = Integers { bits: 4, group_size: Some(128), symmetric: true };
        let default = integers(fields, standard, packing)?.ok_or_else(|| {
            Error::invalid_file(format!(
                "{}: bits is {WHOLE_BITS} or more, so that nothing is quantised",
                fields.place()
            ))
        })?;
        let budget = Budget::default();
        let (mut named, mut keys) = (HashMap::new(), Vec::new());
        let place = format!("{}: extra_config", fields.place());
        for (key, overrides) in fields.optional_object("extra_config")?.into_iter().flatten() {
            let overrides = object(&place, key, overrides)?;
            if keys.len() == MAX_ENTRIES {
                return Err(Error::invalid_file(format!(
                    "{place} has more than {MAX_ENTRIES} entries"
                )));
            }
            if overrides.is_empty() {
                continue;
            }
            let place = format!("{place}: {}", shown_name(key));
            let scheme = integers(Fields::new(overrides, &place), default, packing)?;
            named.insert(key.clone(), scheme);
            keys.push((Key::new(&place, key, &budget)?, scheme));
        }
        let place = format!("{}: modules_to_not_convert", fields.place());
        let skipped = optional_names(fields, "modules_to_not_convert")?.unwrap_or_default();
        let skipped = skipped.iter().map(|text| Key::new(&place, text, &budget));
        let skipped = skipped.collect::<Result<Vec<Key>>>()?;
        Ok(AutoRound { packing, default, blocks: blocks(fields)?, named, keys, skipped })
    }

    /// A module that `extra_config` names has its own scheme. The others are quantised if their block
    /// is, by the first key that is in their names, or as the whole.
    pub fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        let found = match self.named.get(module) {
            Some(&named) => named,
            None => self.in_block(module)?,
        };
        Ok(found.map(|integers| self.packing.scheme(integers)))
    }

    fn in_block(&self, module: &str) -> Result<Option<Integers>> {
        let is_in_block = match &self.blocks {
            Some(blocks) => blocks.iter().any(|block| module.starts_with(block.as_str())),
            None => module.contains(".layers.") || module.contains(".h."),
        };
        if !is_in_block {
            return Ok(None);
        }
        for key in &self.skipped {
            if key.is_in(module)? {
                return Ok(None);
            }
        }
        for (key, scheme) in &self.keys {
            if key.is_in(module)? {
                return Ok(*scheme);
            }
        }
        Ok(Some(self.default))
    }
}

impl Packing {
    fn scheme(self, integers: Integers) -> Scheme {
        let Integers { bits, group_size, symmetric } = integers;
        match self {
            Packing::Awq => Scheme::Awq { group_size, has_zeros: !symmetric },
            Packing::Gptq | Packing::GptqV2 => {
                let is_v2 = self == Packing::GptqV2;
                Scheme::Gptq { bits, group_size, symmetric, desc_act: false, is_v2 }
            }
        }
    }
}

fn object<'a>(place: &str, key: &str, value: &'a Value) -> Result<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| {
        Error::invalid_file(format!("{place}: {} is not an object", shown_name(key)))
    })
}

/// Reads what a config or an entry of it says of weights; `None` if they are not quantised.
fn integers(fields: Fields<'_>, default: Integers, packing: Packing) -> Result<Option<Integers>> {
    let bits = fields.optional_count("bits", 64)?.unwrap_or(default.bits);
    if bits >= WHOLE_BITS {
        return Ok(None);
    }
    one_of(fields, "data_type", &["int"])?;
    let supported: &[usize] = if packing == Packing::Awq { &[4] } else { &[4, 8] };
    if !supported.contains(&bits) {
        let supported: Vec<String> = supported.iter().map(usize::to_string).collect();
        return Err(Error::unsupported(format!(
            "{}: bits {bits} is not supported (supported: {})",
            fields.place(),
            supported.join(", ")
        )));
    }
    let group_size = match fields.get("group_size") {
        None => default.group_size,
        Some(_) => group_size(fields, "group_size", 128)?,
    };
    Ok(Some(Integers { bits, group_size, symmetric: fields.flag("sym", default.symmetric)? }))
}

/// Reads the blocks that are quantised: names that begin their modules', in a string with commas or in
/// a list, which may be one of lists.
fn blocks(fields: Fields<'_>) -> Result<Option<Vec<String>>> {
    let keys = ["block_name_to_quantize", "to_quant_block_names"];
    let Some((key, value)) = keys.iter().find_map(|key| Some((*key, fields.get(key)?))) else {
        return Ok(None);
    };
    let mut names = Vec::new();
    let mut add = |value: &Value| {
        let text = value.as_str().filter(|_| names.len() < MAX_ENTRIES)?;
        names.extend(
            text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned),
        );
        Some(())
    };
    let is_good = match value {
        Value::Array(list) => list.iter().try_for_each(|entry| match entry {
            Value::Array(inner) => inner.iter().try_for_each(&mut add),
            _ => add(entry),
        }),
        _ => add(value),
    };
    match is_good {
        Some(()) => Ok(Some(names).filter(|names| !names.is_empty())),
        None => Err(fields.wrong(key, "names of blocks: a string, or a list of them")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::ErrorKind;
    use crate::model::quantised::QuantConfig;

    fn parse(changes: Value) -> Result<QuantConfig> {
        let mut quantization = json!({
            "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": true,
            "data_type": "int", "packing_format": "auto_round:auto_gptq",
            "autoround_version": "0.8.0", "block_name_to_quantize": "model.layers",
        });
        for (key, value) in changes.as_object().expect("an object") {
            quantization[key] = value.clone();
        }
        let config = json!({"quantization_config": quantization});
        Ok(QuantConfig::parse(&config)?.expect("a quantised model"))
    }

    fn scheme(config: &QuantConfig, module: &str) -> Option<Scheme> {
        config.scheme(module).expect("a scheme")
    }

    fn gptq(bits: usize, group: usize, symmetric: bool, is_v2: bool) -> Option<Scheme> {
        let group_size = Some(group);
        Some(Scheme::Gptq { bits, group_size, symmetric, desc_act: false, is_v2 })
    }

    const DOWN: &str = "model.layers.3.mlp.down_proj";

    #[test]
    fn layouts() {
        let usual = gptq(4, 128, true, false);
        for format in [json!(null), json!("auto"), json!("auto_round:gptq")] {
            let config = parse(json!({"packing_format": format})).expect("a good config");
            assert_eq!(scheme(&config, DOWN), usual);
            assert_eq!(config.method_name(), "auto-round");
        }
        for format in ["auto_round", "auto_round:gptqmodel"] {
            let config = parse(json!({"packing_format": format})).expect("a good config");
            assert_eq!(scheme(&config, DOWN), gptq(4, 128, true, true), "{format}");
        }
        let config = parse(json!({"packing_format": "auto_round:auto_awq", "sym": false}));
        let awq = Scheme::Awq { group_size: Some(128), has_zeros: true };
        assert_eq!(scheme(&config.expect("a good config"), DOWN), Some(awq));
    }

    #[test]
    fn modules_that_differ() {
        let config = parse(json!({"extra_config": {
            "model.layers.3.mlp.down_proj": {"bits": 8, "group_size": 64, "sym": false},
            "lm_head": {"bits": 4, "group_size": 32},
            "model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "fp"},
            ".*self_attn.*": {"bits": 16},
            "o_proj$": {"bits": 8},
            ".*": {},
        }}))
        .expect("a good config");
        assert_eq!(scheme(&config, DOWN), gptq(8, 64, false, false));
        assert_eq!(scheme(&config, "lm_head"), gptq(4, 32, true, false));
        assert_eq!(scheme(&config, "model.layers.1.mlp.up_proj"), None);
        assert_eq!(scheme(&config, "model.layers.1.self_attn.o_proj"), None);
        assert_eq!(scheme(&config, "model.layers.1.mlp.o_proj"), gptq(8, 128, true, false));
        assert_eq!(scheme(&config, "model.layers.1.mlp.gate_proj"), gptq(4, 128, true, false));
        assert_eq!(scheme(&config, "model.embed_tokens"), None);
    }

    #[test]
    fn blocks_that_are_quantised() {
        for blocks in [
            json!("model.layers.0,model.layers.1"),
            json!(["model.layers.0", "model.layers.1"]),
            json!([["model.layers.0"], ["model.layers.1"]]),
        ] {
            let config = parse(json!({"block_name_to_quantize": blocks})).expect("a good config");
            assert_eq!(scheme(&config, "model.layers.1.a"), gptq(4, 128, true, false));
            assert_eq!(scheme(&config, DOWN), None);
        }
        let config = parse(json!({"block_name_to_quantize": null})).expect("a good config");
        assert_eq!(scheme(&config, DOWN), gptq(4, 128, true, false));
        assert_eq!(scheme(&config, "lm_head"), None);
        let config = parse(json!({"modules_to_not_convert": ["mlp.down"]})).expect("a good config");
        assert_eq!(scheme(&config, DOWN), None);
    }

    #[test]
    fn what_is_refused() {
        for (changes, kind, named) in [
            (json!({"packing_format": "auto_round:nv_fp"}), ErrorKind::Unsupported, "nv_fp"),
            (json!({"packing_format": "auto_round:fp8_static"}), ErrorKind::Unsupported, "fp8"),
            (json!({"data_type": "mx_fp"}), ErrorKind::Unsupported, "mx_fp"),
            (json!({"bits": 2}), ErrorKind::Unsupported, "bits 2"),
            (json!({"bits": 16}), ErrorKind::InvalidFile, "bits is 16"),
            (json!({"bits": null}), ErrorKind::InvalidFile, "bits is missing"),
            (json!({"group_size": 0}), ErrorKind::InvalidFile, "group_size"),
            (json!({"rotation_config": {"a": 1}}), ErrorKind::Unsupported, "rotation_config"),
            (json!({"extra_config": {"a": 1}}), ErrorKind::InvalidFile, "extra_config: a"),
            (json!({"extra_config": {"a": {"bits": 3}}}), ErrorKind::Unsupported, "bits 3"),
            (json!({"extra_config": {"(": {"bits": 8}}}), ErrorKind::InvalidFile, "extra_config"),
            (json!({"block_name_to_quantize": [1]}), ErrorKind::InvalidFile, "block_name"),
            (json!({"modules_to_not_convert": ["("]}), ErrorKind::InvalidFile, "modules_to_not"),
            (
                json!({"packing_format": "auto_round:auto_awq", "bits": 8}),
                ErrorKind::Unsupported,
                "bits 8",
            ),
        ] {
            let error = parse(changes.clone()).expect_err("must be refused");
            assert_eq!(error.kind(), kind, "{changes}: {error}");
            assert!(error.message().contains(named), "{changes}: {error}");
        }
    }
}
