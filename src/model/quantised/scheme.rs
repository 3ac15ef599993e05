//! The scheme of one module, as a config describes it.

use super::pattern::{has_parts, Expression};
use crate::error::Result;
use crate::memory::DType;
use crate::ops::quantised::activations::are_inputs_quantised;
use crate::ops::quantised::{Code, QuantFormat};

/// The numbers that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleShape {
    /// The whole matrix.
    Tensor,
    /// A row.
    Channel,
    /// This many inputs of a row.
    Group(usize),
    /// This many rows and inputs.
    Block([usize; 2]),
}

/// The storage of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `weight` in FP8 with `weight_scale_inv`, or `weight_scale`.
    Fp8 {
        /// The numbers that share a scale; `None` if the file decides.
        scales: Option<ScaleShape>,
        /// Whether the config has activations quantised to FP8 too: as they come, or with scales that were
        /// measured.
        has_fp8_inputs: bool,
    },
    /// `qweight`, `qzeros` and `scales` of AWQ: packed along the outputs.
    Awq {
        /// Inputs that share a scale; `None` is the whole row.
        group_size: Option<usize>,
        /// Whether there is `qzeros`.
        has_zeros: bool,
    },
    /// `qweight`, `qzeros`, `scales` and `g_idx` of GPTQ: packed along the inputs.
    Gptq {
        /// 4 or 8.
        bits: usize,
        /// Inputs that share a scale; `None` is the whole row.
        group_size: Option<usize>,
        /// Whether all zeros are the middle.
        symmetric: bool,
        /// Whether inputs were quantised in the order of their size, so that groups are scattered.
        desc_act: bool,
        /// Whether zeros are stored as they are, and not less one.
        is_v2: bool,
    },
    /// `weight_packed` of compressed-tensors: integers of 4 or 8 bits.
    Packed {
        /// 4 or 8.
        bits: usize,
        /// The numbers that share a scale.
        scales: ScaleShape,
        /// Whether all zeros are the middle.
        symmetric: bool,
    },
    /// `weight` of compressed-tensors in bytes.
    Int8 {
        /// The numbers that share a scale.
        scales: ScaleShape,
        /// Whether all zeros are 0.
        symmetric: bool,
        /// Whether the config has activations quantised to integers of 8 bits too, with a scale for each
        /// token and no zeros.
        has_int8_inputs: bool,
    },
}

impl Scheme {
    /// Whether products of weights in groups of `group_size` inputs quantise their activations: where the
    /// config has FP8 of both. Each token's activations have a scale for 128 inputs, as they come, which
    /// is what configs with blocks of 128 ask for and finer than all others: a scale for the token, or one
    /// for all tokens that was measured. Where it has integers of 8 bits, of which rows have one scale each,
    /// a token's activations have one too, whatever strategy the config names.
    pub fn quantises_inputs(&self, group_size: usize, in_features: usize) -> bool {
        match *self {
            Scheme::Fp8 { has_fp8_inputs, .. } => {
                has_fp8_inputs && are_inputs_quantised(group_size, in_features)
            }
            Scheme::Int8 { symmetric, has_int8_inputs, .. } => {
                has_int8_inputs && symmetric && group_size >= in_features
            }
            _ => false,
        }
    }

    /// Returns the format that files of this scheme usually have, for random numbers in their place.
    pub fn usual_format(&self) -> QuantFormat {
        let inputs = |scales: Option<ScaleShape>| match scales {
            Some(ScaleShape::Group(size) | ScaleShape::Block([_, size])) => size,
            Some(ScaleShape::Tensor | ScaleShape::Channel) | None => usize::MAX,
        };
        let integers = |bits: usize| if bits == 4 { Code::Int4 } else { Code::Int8 };
        let (code, group_size, has_zeros, scale) = match *self {
            Scheme::Fp8 { scales, .. } => (Code::Fp8, inputs(scales), false, DType::BF16),
            Scheme::Awq { group_size, has_zeros } => {
                (Code::Int4, group_size.unwrap_or(usize::MAX), has_zeros, DType::F16)
            }
            Scheme::Gptq { bits, group_size, symmetric, .. } => {
                (integers(bits), group_size.unwrap_or(usize::MAX), !symmetric, DType::F16)
            }
            Scheme::Packed { bits, scales, symmetric } => {
                (integers(bits), inputs(Some(scales)), !symmetric, DType::BF16)
            }
            Scheme::Int8 { scales, symmetric, .. } => {
                (Code::Int8, inputs(Some(scales)), !symmetric, DType::BF16)
            }
        };
        let quantises_inputs = self.quantises_inputs(group_size, usize::MAX);
        QuantFormat { code, group_size, has_zeros, scale, quantises_inputs }
    }
}

/// Whether a module is the output matrix.
fn is_output(module: &str) -> bool {
    has_parts(module, "lm_head")
}

/// FP8 with a scale for each block or matrix.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fp8 {
    /// `[out, in]`.
    pub block: Option<[usize; 2]>,
    /// Modules that are not quantised: whole parts of their names, or ends of them.
    pub skipped: Vec<String>,
    /// The same as expressions.
    pub skipped_expressions: Vec<Expression>,
}

/// AWQ's 4 bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Awq {
    /// `None` is the whole row.
    pub group_size: Option<usize>,
    pub has_zeros: bool,
    pub lm_head: bool,
    /// Modules that are not quantised: what their names contain.
    pub skipped: Vec<String>,
}

/// GPTQ's 4 or 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gptq {
    pub default: GptqScheme,
    pub lm_head: bool,
    /// In the order of the config; the first that matches a module decides. `None` is a module that
    /// is not quantised.
    pub dynamic: Vec<(Expression, Option<GptqScheme>)>,
}

/// GPTQ's settings for a module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GptqScheme {
    pub bits: usize,
    /// `None` is the whole row.
    pub group_size: Option<usize>,
    pub symmetric: bool,
    pub desc_act: bool,
    /// Whether zeros are stored as they are, and not less one.
    pub is_v2: bool,
}

impl Fp8 {
    pub(super) fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        if self.skipped.iter().any(|key| has_parts(module, key) || ends_with(module, key)) {
            return Ok(None);
        }
        for expression in &self.skipped_expressions {
            if expression.matches(module)? {
                return Ok(None);
            }
        }
        let scales = self.block.map(ScaleShape::Block);
        Ok(Some(Scheme::Fp8 { scales, has_fp8_inputs: true }))
    }
}

/// Whether a name ends with a key that is not empty.
fn ends_with(module: &str, key: &str) -> bool {
    !key.is_empty() && module.ends_with(key)
}

impl Awq {
    pub(super) fn scheme(&self, module: &str) -> Option<Scheme> {
        let is_skipped = self.skipped.iter().any(|key| module.contains(key.as_str()));
        if is_skipped || (is_output(module) && !self.lm_head) {
            return None;
        }
        Some(Scheme::Awq { group_size: self.group_size, has_zeros: self.has_zeros })
    }
}

impl Gptq {
    pub(super) fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        if is_output(module) && !self.lm_head {
            return Ok(None);
        }
        for (expression, scheme) in &self.dynamic {
            if expression.matches(module)? {
                return Ok(scheme.map(GptqScheme::scheme));
            }
        }
        Ok(Some(self.default.scheme()))
    }
}

impl GptqScheme {
    fn scheme(self) -> Scheme {
        let GptqScheme { bits, group_size, symmetric, desc_act, is_v2 } = self;
        Scheme::Gptq { bits, group_size, symmetric, desc_act, is_v2 }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{json, Value};

    use super::*;
    use crate::error::ErrorKind;
    use crate::model::quantised::QuantConfig;

    const DOWN: &str = "model.layers.3.mlp.down_proj";

    fn config(quantization: Value) -> QuantConfig {
        let config = json!({"quantization_config": quantization});
        QuantConfig::parse(&config).expect("a good config").expect("a quantised model")
    }

    fn scheme(config: &QuantConfig, module: &str) -> Option<Scheme> {
        config.scheme(module).expect("a scheme")
    }

    #[track_caller]
    fn refused(quantization: Value, kind: ErrorKind, named: &[&str]) {
        let config = json!({"quantization_config": quantization});
        let error = QuantConfig::parse(&config).expect_err("must be refused");
        assert_eq!(error.kind(), kind, "{error}");
        for name in named.iter().chain(&["config.json: quantization_config"]) {
            assert!(error.message().contains(name), "{error} does not name {name}");
        }
        assert!(error.message().len() < 500, "{error} is no sentence");
    }

    fn with(base: &Value, key: &str, value: Value) -> Value {
        let mut changed = base.clone();
        changed[key] = value;
        changed
    }

    #[test]
    fn a_config_without_quantisation() {
        for config in [json!({}), json!({"quantization_config": null}), json!([])] {
            assert_eq!(QuantConfig::parse(&config).expect("no error"), None);
        }
    }

    #[test]
    fn fp8() {
        let qwen = json!({
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        });
        let scales = Some(ScaleShape::Block([128, 128]));
        let blocks = Some(Scheme::Fp8 { scales, has_fp8_inputs: true });
        assert_eq!(scheme(&config(qwen.clone()), DOWN), blocks);
        assert_eq!(scheme(&config(qwen.clone()), "lm_head"), None);
        let listed = json!(["lm_head", "model.layers.3.mlp.gate", "model.layers.1", "re*.o_proj"]);
        let config = config(with(&qwen, "modules_to_not_convert", listed));
        assert_eq!(scheme(&config, "lm_head"), None);
        assert_eq!(scheme(&config, "model.layers.3.mlp.gate"), None);
        assert_eq!(scheme(&config, "model.layers.3.mlp.gate_proj"), blocks);
        assert_eq!(scheme(&config, "model.layers.1.mlp.up_proj"), None);
        assert_eq!(scheme(&config, "model.layers.11.mlp.up_proj"), blocks);

        refused(with(&qwen, "fmt", json!("e5m2")), ErrorKind::Unsupported, &["fmt \"e5m2\""]);
        refused(with(&qwen, "scale_fmt", json!("ue8m0")), ErrorKind::Unsupported, &["ue8m0"]);
        refused(with(&qwen, "expert_dtype", json!("fp4")), ErrorKind::Unsupported, &["fp4"]);
        for block in [json!([0, 128]), json!([128]), json!(128), json!([128, -1]), json!([1, 1e9])]
        {
            let key = "weight_block_size";
            refused(with(&qwen, key, block), ErrorKind::InvalidFile, &[key, "expected"]);
        }
        let many: Vec<String> = (0..20_000).map(|i| i.to_string()).collect();
        for list in [json!("lm_head"), json!([1]), json!(many)] {
            let key = "modules_to_not_convert";
            refused(with(&qwen, key, list), ErrorKind::InvalidFile, &[key, "a list of at most"]);
        }
        let key = "modules_to_not_convert";
        refused(with(&qwen, key, json!(["a)|(?:"])), ErrorKind::InvalidFile, &[key, "a)|(?:"]);
    }

    #[test]
    fn awq() {
        let qwen = json!({
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true,
            "version": "gemm", "modules_to_not_convert": null, "backend": "autoawq",
        });
        let groups = Some(Scheme::Awq { group_size: Some(128), has_zeros: true });
        assert_eq!(scheme(&config(qwen.clone()), DOWN), groups);
        assert_eq!(scheme(&config(qwen.clone()), "lm_head"), None);
        let gates = config(with(&qwen, "modules_to_not_convert", json!(["mlp.gate"])));
        assert_eq!(scheme(&gates, "model.layers.0.mlp.gate_proj"), None);
        assert_eq!(scheme(&gates, DOWN), groups);
        let rows = config(with(&with(&qwen, "group_size", json!(-1)), "zero_point", json!(false)));
        let expected = Scheme::Awq { group_size: None, has_zeros: false };
        assert_eq!(scheme(&rows, DOWN), Some(expected));

        for version in ["gemv", "gemv_fast", "llm-awq", "marlin", "exllama"] {
            let named = &["version", version];
            refused(with(&qwen, "version", json!(version)), ErrorKind::Unsupported, named);
        }
        refused(with(&qwen, "bits", json!(8)), ErrorKind::Unsupported, &["bits 8"]);
        refused(with(&qwen, "backend", json!("llm-awq")), ErrorKind::Unsupported, &["llm-awq"]);
        for size in [json!(0), json!(-2), json!("128"), json!(1.5), json!(1_u64 << 40)] {
            let named = &["group_size", "expected -1 for the whole row"];
            refused(with(&qwen, "group_size", size), ErrorKind::InvalidFile, named);
        }
    }

    #[test]
    fn gptq() {
        let base = json!({
            "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false,
            "lm_head": false, "checkpoint_format": "gptq",
            "dynamic": {
                "-:.*self_attn": {},
                r"+:.*\.3\..*down_proj": {"bits": 8, "group_size": 64, "sym": true},
                ".*down_proj": {"desc_act": false},
            },
        });
        let default = Scheme::Gptq {
            bits: 4,
            group_size: Some(128),
            symmetric: false,
            desc_act: true,
            is_v2: false,
        };
        let read = config(base.clone());
        assert_eq!(scheme(&read, "model.layers.3.mlp.up_proj"), Some(default));
        assert_eq!(scheme(&read, "model.layers.3.self_attn.q_proj"), None);
        assert_eq!(scheme(&read, "lm_head"), None);
        let third = Scheme::Gptq {
            bits: 8,
            group_size: Some(64),
            symmetric: true,
            desc_act: true,
            is_v2: false,
        };
        assert_eq!(scheme(&read, DOWN), Some(third));
        let down = scheme(&read, "model.layers.4.mlp.down_proj");
        assert!(matches!(down, Some(Scheme::Gptq { bits: 4, desc_act: false, .. })));
        let v2 = config(with(&base, "checkpoint_format", json!("gptq_v2")));
        assert!(matches!(scheme(&v2, "a"), Some(Scheme::Gptq { is_v2: true, .. })));
        let output = config(with(&base, "lm_head", json!(true)));
        assert_eq!(scheme(&output, "lm_head"), Some(default));

        for bits in [2, 3, 5] {
            refused(with(&base, "bits", json!(bits)), ErrorKind::Unsupported, &["bits"]);
        }
        for format in ["exl3", "marlin", "bitblas", "gptq_v3"] {
            let key = "checkpoint_format";
            refused(with(&base, key, json!(format)), ErrorKind::Unsupported, &[key, format]);
        }
        refused(with(&base, "pack_dtype", json!("int16")), ErrorKind::Unsupported, &["pack_dtype"]);
        refused(with(&base, "format", json!("gptq_v2")), ErrorKind::InvalidFile, &["gptq_v2"]);
        refused(with(&base, "is_marlin_format", json!(true)), ErrorKind::Unsupported, &["marlin"]);
        for dynamic in [json!({"+:(": {}}), json!({"+:a": 1}), json!([1])] {
            refused(with(&base, "dynamic", dynamic), ErrorKind::InvalidFile, &["dynamic"]);
        }
        let three = json!({"+:a": {"bits": 3}});
        refused(with(&base, "dynamic", three), ErrorKind::Unsupported, &["+:a", "bits 3"]);
        let mut no_bits = base;
        no_bits.as_object_mut().expect("an object").remove("bits");
        refused(no_bits, ErrorKind::InvalidFile, &["bits is missing"]);

        let old = json!({"bits": 4, "group_size": -1, "sym": true, "desc_act": false});
        let old = QuantConfig::parse_older("quantize_config.json", &old).expect("a good config");
        let old = old.expect("a quantised model");
        assert!(matches!(scheme(&old, DOWN), Some(Scheme::Gptq { group_size: None, .. })));
    }

    #[test]
    fn compressed_tensors() {
        let int4 = json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
            "group_size": 64, "dynamic": false, "actorder": null, "observer": "minmax"});
        let fp8 = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel",
            "dynamic": false, "group_size": null});
        let inputs = json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
        let base = json!({
            "quant_method": "compressed-tensors", "format": "mixed-precision",
            "quantization_status": "compressed", "kv_cache_scheme": null,
            "sparsity_config": {}, "transform_config": {},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": int4, "format": "pack-quantized"},
                "group_1": {"targets": ["re:.*self_attn.*"], "weights": fp8,
                    "format": "float-quantized", "input_activations": inputs},
                "group_2": {"targets": ["model.layers.0.self_attn.q_proj"], "weights": null},
            },
        });
        let read = config(base.clone());
        let packed = Scheme::Packed { bits: 4, scales: ScaleShape::Group(64), symmetric: true };
        let query = "model.layers.1.self_attn.q_proj";
        let channel = |has_fp8_inputs| {
            Some(Scheme::Fp8 { scales: Some(ScaleShape::Channel), has_fp8_inputs })
        };
        assert_eq!(scheme(&read, DOWN), Some(packed));
        assert_eq!(scheme(&read, query), channel(true));
        for (inputs, has_fp8_inputs) in [
            (json!({"num_bits": 8, "type": "float", "strategy": "tensor"}), true),
            (json!(null), false),
            (json!({"num_bits": 8, "type": "int"}), false),
            (json!({"num_bits": 8}), false),
            (json!({"num_bits": 4, "type": "float"}), false),
        ] {
            let mut other = base.clone();
            other["config_groups"]["group_1"]["input_activations"] = inputs;
            assert_eq!(scheme(&config(other), query), channel(has_fp8_inputs));
        }
        for dense in [
            "model.layers.0.self_attn.q_proj",
            "lm_head",
            "model.layers.0.mlp.gate",
            "model.embed_tokens",
        ] {
            assert_eq!(scheme(&read, dense), None, "{dense}");
        }
        let preset = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"FP8_BLOCK": ["Linear"]}});
        let scales = Some(ScaleShape::Block([128, 128]));
        let blocks = Scheme::Fp8 { scales, has_fp8_inputs: true };
        assert_eq!(scheme(&config(preset.clone()), DOWN), Some(blocks));
        let older = json!({"compression_config": {"quantization_config": preset}});
        assert!(QuantConfig::parse(&older).expect("a good config").is_some());

        for format in [
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
            "mxfp6-pack-quantized",
            "marlin-24",
            "sparse-24-bitmask",
            "dense",
        ] {
            let named = &["format", format];
            refused(with(&base, "format", json!(format)), ErrorKind::Unsupported, named);
            let mut group = base.clone();
            group["config_groups"]["group_0"]["format"] = json!(format);
            refused(group, ErrorKind::Unsupported, &["group_0", format]);
        }
        let sparse = json!({"format": "sparse-24-bitmask"});
        refused(
            with(&base, "sparsity_config", sparse),
            ErrorKind::Unsupported,
            &["sparsity_config"],
        );
        let rotation = json!({"config_groups": {"u": {}}});
        let key = "transform_config";
        refused(with(&base, key, rotation), ErrorKind::Unsupported, &[key]);
        for (key, value, kind) in [
            ("num_bits", json!(3), ErrorKind::Unsupported),
            ("type", json!("float"), ErrorKind::Unsupported),
            ("strategy", json!("tensor_group"), ErrorKind::Unsupported),
            ("strategy", json!("block"), ErrorKind::InvalidFile),
            ("group_size", json!(0), ErrorKind::InvalidFile),
            ("dynamic", json!(true), ErrorKind::InvalidFile),
        ] {
            let mut group = base.clone();
            group["config_groups"]["group_0"]["weights"][key] = value;
            refused(group, kind, &["config_groups: group_0: weights"]);
        }
        refused(with(&base, "ignore", json!(["re:("])), ErrorKind::InvalidFile, &["ignore"]);
        refused(
            with(&base, "config_groups", json!({})),
            ErrorKind::InvalidFile,
            &["config_groups"],
        );
        let unknown = json!({"NVFP4": ["Linear"]});
        refused(with(&base, "config_groups", unknown), ErrorKind::Unsupported, &["NVFP4"]);
    }

    #[test]
    fn model_opt() {
        let algorithm = |name: &str| {
            json!({"quant_method": "modelopt", "quant_algo": name, "producer": {"name": "modelopt"},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                "ignore": ["lm_head", "model.layers.1.mlp*", "router"]})
        };
        let of = |scales| Some(Scheme::Fp8 { scales: Some(scales), has_fp8_inputs: true });
        let read = config(algorithm("FP8"));
        assert_eq!(scheme(&read, DOWN), of(ScaleShape::Tensor));
        for dense in ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.router"] {
            assert_eq!(scheme(&read, dense), None, "{dense}");
        }
        assert_eq!(scheme(&read, "model.layers.11.mlp.up_proj"), of(ScaleShape::Tensor));
        let rows = config(algorithm("fp8_per_channel_per_token"));
        assert_eq!(scheme(&rows, DOWN), of(ScaleShape::Channel));
        for other in ["NVFP4", "FP8_PB_WO", "MIXED_PRECISION", "W4A8_AWQ"] {
            refused(algorithm(other), ErrorKind::Unsupported, &["quant_algo", other]);
        }
        let nested = json!({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}});
        assert_eq!(scheme(&config(nested), DOWN), of(ScaleShape::Tensor));
        let none = json!({"quant_method": "modelopt"});
        refused(none, ErrorKind::InvalidFile, &["quant_algo is missing"]);
        refused(with(&algorithm("FP8"), "ignore", json!("a")), ErrorKind::InvalidFile, &["ignore"]);

        let file = "hf_quant_config.json";
        let older = |quantization: Value| {
            let json = json!({"producer": {"name": "modelopt"}, "quantization": quantization});
            QuantConfig::parse_older(file, &json)
        };
        let found = older(json!({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*down_proj"]}));
        let found = found.expect("a good file").expect("a quantised model");
        assert_eq!(scheme(&found, DOWN), None);
        assert_eq!(scheme(&found, "model.layers.0.mlp.up_proj"), of(ScaleShape::Tensor));
        let cache = older(json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"}));
        assert_eq!(cache.expect("a good file"), None);
        let error = older(json!({"quant_algo": "NVFP4"})).expect_err("must be refused");
        assert!(error.message().contains("hf_quant_config.json: quantization"), "{error}");
        let error = QuantConfig::parse_older(file, &json!([])).expect_err("must be refused");
        assert!(error.message().contains("hf_quant_config.json is not"), "{error}");
    }

    #[test]
    fn integers_of_activations_are_read_with_those_of_weights() {
        let of = |inputs: Value| {
            let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
            let group =
                json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
            let read = config(json!({
                "quant_method": "compressed-tensors", "format": "int-quantized",
                "config_groups": {"group_0": group},
            }));
            let found = scheme(&read, DOWN);
            let Some(Scheme::Int8 { has_int8_inputs, .. }) = found else { panic!("{found:?}") };
            has_int8_inputs
        };
        let dynamic = json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true});
        assert!(of(dynamic.clone()));
        assert!(of(json!({"num_bits": 8, "strategy": "tensor", "dynamic": false})));
        assert!(!of(with(&dynamic, "symmetric", json!(false))));
        assert!(!of(with(&dynamic, "type", json!("float"))));
        assert!(!of(with(&dynamic, "num_bits", json!(16))));
        assert!(!of(Value::Null));
        let preset = |name: &str| {
            scheme(
                &config(json!({
                    "quant_method": "compressed-tensors", "format": "int-quantized",
                    "config_groups": {name: ["Linear"]},
                })),
                DOWN,
            )
        };
        let (scales, symmetric) = (ScaleShape::Channel, true);
        let all = Scheme::Int8 { scales, symmetric, has_int8_inputs: true };
        assert_eq!(preset("W8A8"), Some(all));
    }

    #[test]
    fn activations_are_quantised_where_those_of_a_scale_share_one_of_the_weight() {
        let of = |scales, has_fp8_inputs| Scheme::Fp8 { scales, has_fp8_inputs };
        let rows = of(Some(ScaleShape::Channel), true);
        for (group_size, in_features, is_quantised) in
            [(128, 256, true), (256, 512, true), (200, 200, true), (64, 256, false), (64, 64, true)]
        {
            let quantises = |scheme: &Scheme| scheme.quantises_inputs(group_size, in_features);
            assert_eq!(quantises(&rows), is_quantised, "{group_size} of {in_features}");
            assert!(!quantises(&of(None, false)));
            let packed = Scheme::Packed { bits: 8, scales: ScaleShape::Channel, symmetric: true };
            assert!(!quantises(&packed));
        }
        let bytes = |symmetric, has_int8_inputs| Scheme::Int8 {
            scales: ScaleShape::Channel,
            symmetric,
            has_int8_inputs,
        };
        assert!(bytes(true, true).quantises_inputs(256, 256));
        assert!(!bytes(true, true).quantises_inputs(128, 256), "groups of a row");
        assert!(!bytes(false, true).quantises_inputs(256, 256), "zeros");
        assert!(!bytes(true, false).quantises_inputs(256, 256));
        for (scales, is_quantised) in [
            (None, true),
            (Some(ScaleShape::Tensor), true),
            (Some(ScaleShape::Block([128, 128])), true),
            (Some(ScaleShape::Block([128, 64])), false),
            (Some(ScaleShape::Group(32)), false),
        ] {
            let format = of(scales, true).usual_format();
            assert_eq!(format.quantises_inputs, is_quantised, "{scales:?}");
        }
    }

    #[test]
    fn other_methods_are_refused_by_name() {
        for method in ["mxfp4", "modelopt_fp4", "bitsandbytes", "hqq", "exl3", "quark", "torchao"] {
            let quantization = json!({"quant_method": method});
            refused(quantization, ErrorKind::Unsupported, &[method, "compressed-tensors"]);
        }
        let modelopt = json!({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"});
        refused(modelopt, ErrorKind::Unsupported, &["modelopt_fp4", "NVFP4"]);
        refused(json!({"load_in_4bit": true}), ErrorKind::Unsupported, &["bitsandbytes"]);
        refused(json!({"bits": 4}), ErrorKind::InvalidFile, &["quant_method is missing"]);
        let mlx = json!({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}});
        let error = QuantConfig::parse(&mlx).expect_err("must be refused");
        assert!(error.message().contains("MLX"), "{error}");
        let error = QuantConfig::parse(&json!({"quantization_config": 3})).expect_err("refused");
        assert!(error.message().contains("quantization_config is 3"), "{error}");
    }
}
