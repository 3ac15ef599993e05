//! `quantization_config` of config.json: how the weights were quantised.
//!
//! The keys and their defaults are those of Transformers 5.23 and compressed-tensors 0.20. What would
//! change the numbers and is not implemented is refused by name; keys that are not known are taken to
//! be remarks.

use serde_json::{Map, Value};

use super::auto_round::AutoRound;
use super::compressed::{self, Groups};
use super::model_opt::ModelOpt;
use super::pattern::{optional_names, Budget, Expression};
use super::scheme::{Awq, Fp8, Gptq, GptqScheme, Scheme};
use super::values::{block_sizes, group_size, one_of, refuse_set};
use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::CONFIG_FILE;
use crate::model::folder::shown_name;

/// The files in which older repositories say what `quantization_config` says in others: of GPTQ, and of NVIDIA's
/// Model Optimizer.
pub const OLDER_FILES: [&str; 2] = [QUANTIZE_CONFIG_FILE, MODEL_OPT_FILE];
const QUANTIZE_CONFIG_FILE: &str = "quantize_config.json";
const MODEL_OPT_FILE: &str = "hf_quant_config.json";

/// The `quant_method`s that are read.
const SUPPORTED: &str = "fp8, awq, gptq, auto-round, compressed-tensors, modelopt";

/// The quantisation of a model's weights, as its config describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantConfig {
    /// Its place in the config, for messages: `config.json: quantization_config`.
    pub(super) place: String,
    pub(super) method: Method,
}

/// The settings of each method.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Method {
    Fp8(Fp8),
    Awq(Awq),
    Gptq(Gptq),
    AutoRound(AutoRound),
    CompressedTensors(Groups),
    ModelOpt(ModelOpt),
}

impl QuantConfig {
    /// Reads what a model's `config.json` says of quantisation; `None` if nothing.
    pub fn parse(config: &Value) -> Result<Option<Self>> {
        let Some(map) = config.as_object() else { return Ok(None) };
        let fields = Fields::new(map, CONFIG_FILE);
        if fields.get("quantization").is_some() {
            return Err(Error::unsupported(format!(
                "{CONFIG_FILE}: quantization, as MLX writes it, is not supported; \
                 quantization_config is read (supported methods: {SUPPORTED})"
            )));
        }
        for key in ["quantization_config", "compression_config"] {
            let Some(found) = fields.optional_object(key)? else { continue };
            let place = format!("{CONFIG_FILE}: {key}");
            // Older writers wrap it once more.
            let inner = match found.get("quantization_config") {
                Some(Value::Object(inner)) if key == "compression_config" => {
                    compressed::refuse_sparsity(Fields::new(found, &place))?;
                    inner
                }
                _ => found,
            };
            return Self::of(inner, place, None).map(Some);
        }
        Ok(None)
    }

    /// Reads one of [`OLDER_FILES`]; `None` if it says nothing of weights.
    pub fn parse_older(file: &str, json: &Value) -> Result<Option<Self>> {
        let map = json
            .as_object()
            .ok_or_else(|| Error::invalid_file(format!("{file} is not a JSON object")))?;
        if file != MODEL_OPT_FILE {
            return Self::of(map, file.to_owned(), Some("gptq")).map(Some);
        }
        let fields = Fields::new(map, file);
        let Some(found) = fields.optional_object("quantization")? else { return Ok(None) };
        let place = format!("{file}: quantization");
        // A model of which the KV cache alone is quantised.
        if Fields::new(found, &place).get("quant_algo").is_none() {
            return Ok(None);
        }
        Self::of(found, place, Some("modelopt")).map(Some)
    }

    fn of(map: &Map<String, Value>, place: String, default: Option<&str>) -> Result<Self> {
        let fields = Fields::new(map, &place);
        let is_bitsandbytes =
            fields.flag("load_in_4bit", false)? || fields.flag("load_in_8bit", false)?;
        let method = match fields.optional_string("quant_method")?.or(default) {
            Some(method) => method,
            None if is_bitsandbytes => "bitsandbytes",
            None => return Err(fields.missing("quant_method")),
        };
        let method = match method.to_ascii_lowercase().as_str() {
            "fp8" => Method::Fp8(fp8(fields)?),
            "awq" => Method::Awq(awq(fields)?),
            "gptq" => Method::Gptq(gptq(fields)?),
            // The longer name is of older versions.
            "auto-round" | "intel/auto-round" => Method::AutoRound(AutoRound::parse(fields)?),
            "compressed-tensors" => Method::CompressedTensors(compressed::groups(fields)?),
            "modelopt" => Method::ModelOpt(ModelOpt::parse(fields)?),
            _ => {
                let algorithm = match fields.optional_string("quant_algo")? {
                    Some(algorithm) => format!(" ({})", shown_name(algorithm)),
                    None => String::new(),
                };
                return Err(Error::unsupported(format!(
                    "{place}: quant_method \"{}\"{algorithm} is not supported (supported: {SUPPORTED})",
                    shown_name(method)
                )));
            }
        };
        Ok(QuantConfig { place, method })
    }

    /// Returns the method, as `quant_method` names it.
    pub fn method_name(&self) -> &'static str {
        match self.method {
            Method::Fp8(_) => "fp8",
            Method::Awq(_) => "awq",
            Method::Gptq(_) => "gptq",
            Method::AutoRound(_) => "auto-round",
            Method::CompressedTensors(_) => "compressed-tensors",
            Method::ModelOpt(_) => "modelopt",
        }
    }

    /// Returns the scheme that the config has for a module, such as `model.layers.3.mlp.down_proj`;
    /// `None` if it is not quantised.
    pub fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        match &self.method {
            Method::Fp8(fp8) => fp8.scheme(module),
            Method::Awq(awq) => Ok(awq.scheme(module)),
            Method::Gptq(gptq) => gptq.scheme(module),
            Method::AutoRound(auto_round) => auto_round.scheme(module),
            Method::CompressedTensors(groups) => groups.scheme(module),
            Method::ModelOpt(model_opt) => model_opt.scheme(module),
        }
    }

    /// Whether the config names all modules that are quantised, so that another is a damaged file.
    /// The others quantise what their writers chose to, and silently leave out routers or
    /// output matrices.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.method, Method::CompressedTensors(_))
    }
}

fn fp8(fields: Fields<'_>) -> Result<Fp8> {
    one_of(fields, "fmt", &["e4m3", "e4m3fn", "float8_e4m3fn"])?;
    one_of(fields, "scale_fmt", &["float"])?;
    one_of(fields, "expert_dtype", &["fp8"])?;
    // Both quantise activations, "static" with scales that were measured; the weights are the same.
    one_of(fields, "activation_scheme", &["dynamic", "static"])?;
    refuse_set(fields, "modules_to_convert")?;
    let block = block_sizes(fields, "weight_block_size")?;
    let key = match fields.get("modules_to_not_convert") {
        Some(_) => "modules_to_not_convert",
        None => "ignored_layers",
    };
    let skipped = optional_names(fields, key)?.unwrap_or_else(|| vec!["lm_head".to_owned()]);
    let budget = Budget::default();
    let place = format!("{}: {key}", fields.place());
    let mut skipped_expressions = Vec::new();
    for name in &skipped {
        // Transformers takes each name for an expression; a dot that matches any character makes no
        // difference to names of modules.
        if name.contains(['*', '+', '?', '[', ']', '(', ')', '^', '$', '|', '\\', '{', '}']) {
            // On its own first, so that it is whole.
            Expression::new(&place, name, &Budget::default())?;
            let bounded = format!(r"(?:{name})(?:(?<=\.)|(?=\.|$))");
            skipped_expressions.push(Expression::new(&place, &bounded, &budget)?);
        }
    }
    Ok(Fp8 { block, skipped, skipped_expressions })
}

fn awq(fields: Fields<'_>) -> Result<Awq> {
    // The older of two spellings; both name the layout of the packed codes.
    for key in ["version", "format", "checkpoint_format"] {
        one_of(fields, key, &["gemm"])?;
    }
    if fields.optional_string("backend")? == Some("llm-awq") {
        return Err(Error::unsupported(format!(
            "{}: backend \"llm-awq\", whose weights are packed otherwise, is not supported",
            fields.place()
        )));
    }
    check_bits(fields, &[4])?;
    check_pack_dtype(fields)?;
    for key in ["rotation", "adapter"] {
        refuse_set(fields, key)?;
    }
    Ok(Awq {
        group_size: group_size(fields, "group_size", 128)?,
        has_zeros: fields.flag("zero_point", true)?,
        lm_head: fields.flag("lm_head", false)?,
        skipped: optional_names(fields, "modules_to_not_convert")?.unwrap_or_default(),
    })
}

fn gptq(fields: Fields<'_>) -> Result<Gptq> {
    for key in ["rotation", "adapter", "is_marlin_format"] {
        refuse_set(fields, key)?;
    }
    check_pack_dtype(fields)?;
    let format = one_of(fields, "format", &["gptq", "gptq_v2"])?;
    let stored = one_of(fields, "checkpoint_format", &["gptq", "gptq_v2"])?;
    if let (Some(format), Some(stored)) = (format, stored) {
        if format != stored {
            return Err(Error::invalid_file(format!(
                "{}: checkpoint_format is \"{stored}\", but format is \"{format}\"",
                fields.place()
            )));
        }
    }
    let default = GptqScheme {
        bits: check_bits(fields, &[4, 8])?.ok_or_else(|| fields.missing("bits"))?,
        group_size: group_size(fields, "group_size", 128)?,
        symmetric: fields.flag("sym", true)?,
        desc_act: fields.flag("desc_act", false)?,
        is_v2: stored.or(format) == Some("gptq_v2"),
    };
    let mut dynamic = Vec::new();
    let budget = Budget::default();
    for (key, overrides) in fields.optional_object("dynamic")?.into_iter().flatten() {
        let place = format!("{}: dynamic", fields.place());
        let is_skipped = key.starts_with("-:");
        let text = key.strip_prefix("-:").or(key.strip_prefix("+:")).unwrap_or(key);
        let expression = Expression::new(&place, text, &budget)?;
        if is_skipped {
            dynamic.push((expression, None));
            continue;
        }
        let place = format!("{place}: {}", shown_name(key));
        let Some(overrides) = overrides.as_object() else {
            return Err(Error::invalid_file(format!("{place} is not an object")));
        };
        let fields = Fields::new(overrides, &place);
        dynamic.push((expression, Some(overridden(fields, default)?)));
    }
    Ok(Gptq { default, lm_head: fields.flag("lm_head", false)?, dynamic })
}

/// Returns the scheme that `dynamic` gives the modules of one expression.
fn overridden(fields: Fields<'_>, default: GptqScheme) -> Result<GptqScheme> {
    for key in ["rotation", "adapter"] {
        refuse_set(fields, key)?;
    }
    check_pack_dtype(fields)?;
    for key in ["format", "checkpoint_format", "method", "quant_method"] {
        one_of(
            fields,
            key,
            if key.ends_with("method") { &["gptq"] } else { &["gptq", "gptq_v2"] },
        )?;
        if key.ends_with("format") && fields.get(key).is_some() {
            let is_v2 = one_of(fields, key, &["gptq", "gptq_v2"])? == Some("gptq_v2");
            if is_v2 != default.is_v2 {
                return Err(Error::unsupported(format!(
                    "{}: a {key} other than that of the other modules is not supported",
                    fields.place()
                )));
            }
        }
    }
    let group_size = match fields.get("group_size") {
        None => default.group_size,
        Some(_) => group_size(fields, "group_size", 128)?,
    };
    Ok(GptqScheme {
        bits: check_bits(fields, &[4, 8])?.unwrap_or(default.bits),
        group_size,
        symmetric: fields.flag("sym", default.symmetric)?,
        desc_act: fields.flag("desc_act", default.desc_act)?,
        is_v2: default.is_v2,
    })
}

/// Returns `bits`, which must be one of `supported`, or `None` if it is absent.
fn check_bits(fields: Fields<'_>, supported: &[usize]) -> Result<Option<usize>> {
    let bits = fields.optional_count("bits", 64)?;
    match bits {
        Some(found) if !supported.contains(&found) => {
            let supported: Vec<String> = supported.iter().map(usize::to_string).collect();
            Err(Error::unsupported(format!(
                "{}: bits {found} is not supported (supported: {})",
                fields.place(),
                supported.join(", ")
            )))
        }
        _ => Ok(bits),
    }
}

/// Refuses codes that are packed into words of another size.
fn check_pack_dtype(fields: Fields<'_>) -> Result<()> {
    one_of(fields, "pack_dtype", &["int32", "torch.int32"]).map(drop)
}
