//! `config.json` of the families Llama, Mistral, Qwen2 and Qwen3, and of mixtures of experts: every field and every default against
//! what Transformers' configuration classes make of the same file, and what is refused by name.

use std::path::Path;

use crate::config::{self, parse, with, without};
use serde_json::{json, Value};
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::Biases;

fn base(architecture: &str, model_type: &str) -> Value {
    json!({
        "architectures": [architecture], "model_type": model_type,
        "hidden_size": 96, "intermediate_size": 208, "vocab_size": 1280,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "tie_word_embeddings": false, "hidden_act": "silu", "torch_dtype": "bfloat16",
    })
}

fn llama() -> Value {
    let mut config = base("LlamaForCausalLM", "llama");
    config["attention_bias"] = false.into();
    config["mlp_bias"] = false.into();
    config
}

fn mistral() -> Value {
    let mut config = base("MistralForCausalLM", "mistral");
    config["sliding_window"] = Value::Null;
    config
}

fn qwen2() -> Value {
    let mut config = base("Qwen2ForCausalLM", "qwen2");
    config["use_sliding_window"] = false.into();
    config["sliding_window"] = 64.into();
    config["max_window_layers"] = 1.into();
    config
}

fn families() -> [Value; 3] {
    [llama(), mistral(), qwen2()]
}

/// Checks an error as the tests of the other families do, and that it names the file.
#[track_caller]
fn refused(config: &Value, kind: ErrorKind, named: &str) {
    config::refused(config, kind, named);
    let error = parse(config).expect_err("must be refused");
    assert!(error.message().starts_with("config.json"), "{error}");
}

/// Cases of tests/golden/families/configs.json.
fn cases() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families/configs.json");
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    match serde_json::from_slice(&text).expect("JSON") {
        Value::Array(cases) => cases,
        other => panic!("not a list: {other}"),
    }
}

#[test]
fn configs_mean_what_they_mean_to_transformers() {
    let cases = cases();
    assert!(cases.len() >= 53);
    for case in &cases {
        let (name, file, expected) = (&case["name"], &case["config"], &case["expected"]);
        let config = parse(file).unwrap_or_else(|e| panic!("{name}: {e}"));
        let count = |field: &str| expected[field].as_u64().map(|n| n as usize);
        assert_eq!(Some(config.head_dim), count("head_dim"), "{name}");
        assert_eq!(Some(config.num_kv_heads), count("num_key_value_heads"), "{name}");
        let eps = expected["rms_norm_eps"].as_f64().expect("a number") as f32;
        assert_eq!(config.norm_eps, eps, "{name}");
        assert_eq!(Some(config.tie_word_embeddings), expected["tie_word_embeddings"].as_bool());
        let [q, k, v, o, gate, up, down] = [0, 1, 2, 3, 4, 5, 6]
            .map(|part| expected["biases"][part].as_bool().expect("a flag of each part"));
        assert!(q == k && q == v && gate == up && gate == down, "{name}");
        assert_eq!(config.biases, Biases { qkv: q, attention_output: o, mlp: gate }, "{name}");
        // YaRN's extension is counted as Qwen's cards do.
        let positions = count("max_position_embeddings").expect("a count");
        let scaling = &file["rope_scaling"];
        let stretched = match scaling["type"].as_str() {
            Some("yarn") => {
                let original = scaling["original_max_position_embeddings"].as_f64().expect("one");
                (scaling["factor"].as_f64().expect("a factor") * original) as usize
            }
            _ => 0,
        };
        let context = positions.max(stretched);
        assert_eq!(config.max_context_tokens, context, "{name}");
        // A window that is as long as the context hides nothing.
        let windows = expected["sliding_windows"].as_array().expect("one for each layer");
        let windows = windows.iter().map(|window| window.as_u64().map(|n| n as usize));
        let windows: Vec<_> = windows.map(|of| of.filter(|&window| window < context)).collect();
        assert_eq!(config.windows, windows, "{name}");

        let experts = config.experts.as_ref().map(|experts| {
            let routing = experts.routing;
            json!({
                "num_experts": routing.num_experts(), "per_token": routing.experts_per_token(),
                "renormalises": routing.renormalises(), "width": experts.width,
                "layers": experts.layers,
            })
        });
        assert_eq!(experts.unwrap_or(Value::Null), expected["experts"], "{name}");

        let rope = config.rope.as_ref().expect("rotary positions");
        let scale = expected["attention_scaling"].as_f64().expect("a number");
        assert!((f64::from(rope.attention_scaling()) - scale).abs() < 1e-6, "{name}");
        let want = expected["inv_freq"].as_str().expect("a list").split(' ').map(|bits| {
            f32::from_bits(u32::from_str_radix(bits, 16).expect("the bits of a number"))
        });
        let got = rope.inv_freq(config.head_dim).expect("room");
        assert_eq!(got.len(), want.clone().count(), "{name}");
        for (pair, (got, want)) in got.into_iter().zip(want).enumerate() {
            // PyTorch's powers and ours are rounded once, to one of the nearest numbers; what is
            // mixed of two adds to it.
            let off = (f64::from(got) / f64::from(want) - 1.0).abs();
            assert!(off < 5e-7, "{name}: pair {pair} has {got:e}, Transformers {want:e}");
        }
    }
}

#[test]
fn the_fields_of_the_families_are_taken() {
    for (file, name) in families().into_iter().zip(["Llama", "Mistral", "Qwen2"]) {
        let config = parse(&file).expect("valid");
        assert_eq!(config.architecture, format!("{name}ForCausalLM"));
        assert_eq!(
            (config.hidden_size, config.intermediate_size, config.vocab_size),
            (96, 208, 1280)
        );
        assert_eq!((config.num_layers, config.num_heads, config.num_kv_heads), (2, 6, 2));
        assert_eq!((config.head_dim, config.max_context_tokens), (16, 2048));
        assert!(!config.has_qk_norm);
        assert_eq!(config.declared_dtype, Some(DType::BF16));
        let by_type = parse(&without(file.clone(), "architectures")).expect("by model_type");
        assert_eq!(by_type, config);
        let by_architecture = parse(&without(file, "model_type")).expect("by architecture");
        assert_eq!(by_architecture, config);
    }
}

/// Only says how a product is divided among devices.
#[test]
fn pretraining_tp_changes_nothing() {
    let config = parse(&llama()).expect("valid");
    for value in [json!(1), json!(2), json!(4), Value::Null] {
        assert_eq!(parse(&with(llama(), "pretraining_tp", value)).expect("valid"), config);
    }
}

#[test]
fn wrong_fields_are_refused_by_name() {
    let invalid = ErrorKind::InvalidFile;
    for family in families() {
        for field in [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ] {
            refused(&without(family.clone(), field), invalid, field);
            refused(&with(family.clone(), field, Value::Null), invalid, field);
            for value in [json!(0), json!(-1), json!(1.5), json!("8"), json!(1_u64 << 40)] {
                refused(&with(family.clone(), field, value), invalid, field);
            }
        }
        for field in ["num_key_value_heads", "head_dim", "max_position_embeddings"] {
            for value in [json!(0), json!(-1), json!(1.5), json!("8"), json!(1_u64 << 40)] {
                refused(&with(family.clone(), field, value), invalid, field);
            }
        }
        for field in ["rms_norm_eps", "rope_theta"] {
            for value in [json!(0), json!(-1), json!("1e-6"), json!(1e300)] {
                refused(&with(family.clone(), field, value), invalid, field);
            }
        }
        refused(&with(family.clone(), "num_key_value_heads", json!(4)), invalid, "multiple");
        refused(&with(family.clone(), "tie_word_embeddings", json!(1)), invalid, "tie_word");
        refused(&with(family.clone(), "model_type", json!("gpt2")), invalid, "model_type");
        refused(&with(family, "rope_scaling", json!("llama3")), invalid, "rope_scaling");
    }
    for field in ["attention_bias", "mlp_bias"] {
        refused(&with(llama(), field, json!(0)), invalid, field);
    }
    for value in [json!(0), json!(-1), json!(true), json!("4096")] {
        refused(&with(mistral(), "sliding_window", value), invalid, "sliding_window");
    }
    refused(&with(qwen2(), "use_sliding_window", json!(0)), invalid, "use_sliding_window");
    let windowed = with(qwen2(), "use_sliding_window", json!(true));
    for value in [json!(0), json!(-1), json!(true), json!("4096"), json!(1_u64 << 40)] {
        refused(&with(windowed.clone(), "sliding_window", value), invalid, "sliding_window");
    }
    for value in [json!(-1), json!(0.5), json!("1")] {
        refused(&with(windowed.clone(), "max_window_layers", value), invalid, "max_window_layers");
    }
    for value in [json!("full_attention"), json!({}), json!(2)] {
        refused(&with(qwen2(), "layer_types", value), invalid, "layer_types");
    }
    // Every published Qwen2 names it; what Transformers takes for an absent one (32) fits none of them.
    refused(&without(qwen2(), "num_key_value_heads"), invalid, "num_key_value_heads");
}

fn qwen3_moe() -> Value {
    let mut config = base("Qwen3MoeForCausalLM", "qwen3_moe");
    for (field, value) in [
        ("num_experts", json!(8)),
        ("num_experts_per_tok", json!(2)),
        ("moe_intermediate_size", json!(48)),
        ("norm_topk_prob", json!(true)),
        ("decoder_sparse_step", json!(1)),
        ("mlp_only_layers", json!([])),
    ] {
        config[field] = value;
    }
    config
}

fn mixtral() -> Value {
    let mut config = base("MixtralForCausalLM", "mixtral");
    config["num_local_experts"] = 8.into();
    config["num_experts_per_tok"] = 2.into();
    config
}

#[test]
fn the_fields_of_experts_are_taken() {
    for (file, width, has_norms) in [(qwen3_moe(), 48, true), (mixtral(), 208, false)] {
        let config = parse(&file).expect("valid");
        let experts = config.experts.as_ref().expect("experts");
        let routing = experts.routing;
        assert_eq!((routing.num_experts(), routing.experts_per_token()), (8, 2));
        assert_eq!((experts.width, routing.renormalises()), (width, true));
        assert_eq!((&experts.layers, config.has_qk_norm), (&vec![true; 2], has_norms));
        assert_eq!(config.dense_mlp_width(), 0);
        assert!(config.experts_of(1).is_some() && config.experts_of(2).is_none());
        // Transformers 5 writes one name in all families, and reads both.
        let (old, new) = match has_norms {
            true => ("num_experts", "num_local_experts"),
            false => ("num_local_experts", "num_experts"),
        };
        let renamed = with(without(file.clone(), old), new, json!(8));
        assert_eq!(parse(&renamed).expect("valid"), config);
        assert_eq!(parse(&with(file.clone(), new, json!(8))).expect("valid"), config);
        refused(&with(file.clone(), new, json!(9)), ErrorKind::InvalidFile, new);
        let by_type = parse(&without(file.clone(), "architectures")).expect("by model_type");
        assert_eq!(by_type, config);
        assert_eq!(parse(&without(file, "model_type")).expect("by architecture"), config);
    }
    let with_layers = |layers: Value| with(qwen3_moe(), "mlp_only_layers", layers);
    let some = parse(&with_layers(json!([1, 7]))).expect("valid");
    assert_eq!(some.experts.as_ref().expect("experts").layers, [true, false]);
    assert_eq!(some.dense_mlp_width(), 208);
    assert!(parse(&with_layers(json!([0, 1]))).expect("valid").experts.is_none());
    let rare = parse(&with(qwen3_moe(), "decoder_sparse_step", json!(3))).expect("valid");
    assert!(rare.experts.is_none());
}

#[test]
fn wrong_fields_of_experts_are_refused_by_name() {
    let invalid = ErrorKind::InvalidFile;
    for file in [qwen3_moe(), mixtral()] {
        for field in ["num_experts_per_tok", "num_local_experts"] {
            for value in [json!(0), json!(-1), json!(1.5), json!("8"), json!(1_u64 << 40)] {
                refused(&with(file.clone(), field, value), invalid, field);
            }
        }
        refused(&with(file.clone(), "num_experts_per_tok", json!(9)), invalid, "9 of 8 experts");
        let all = with(file.clone(), "num_experts_per_tok", json!(8));
        assert!(parse(&all).is_ok());
        refused(&with(file, "hidden_act", json!("gelu")), ErrorKind::Unsupported, "hidden_act");
    }
    for field in ["moe_intermediate_size", "decoder_sparse_step"] {
        for value in [json!(0), json!(-1), json!(1.5), json!("8"), json!(1_u64 << 40)] {
            refused(&with(qwen3_moe(), field, value), invalid, field);
        }
    }
    for value in [json!(1), json!("0"), json!({}), json!([-1]), json!([0.5]), json!(["0"])] {
        refused(&with(qwen3_moe(), "mlp_only_layers", value), invalid, "mlp_only_layers");
    }
    let deep = with(qwen3_moe(), "num_hidden_layers", json!(100));
    refused(&with(deep, "num_experts", json!(1000)), invalid, "100 layers have 1000 experts");
    let long = with(qwen3_moe(), "mlp_only_layers", json!(vec![0; 100_000]));
    refused(&long, invalid, "mlp_only_layers");
    refused(&with(qwen3_moe(), "norm_topk_prob", json!(1)), invalid, "norm_topk_prob");
    refused(
        &with(qwen3_moe(), "layer_types", json!(["sliding_attention", "full_attention"])),
        ErrorKind::Unsupported,
        "sliding_attention",
    );
    for value in [json!(0), json!(-1), json!("32")] {
        refused(&with(mixtral(), "sliding_window", value), invalid, "sliding_window");
    }
}

/// A family's own name is no licence for its descendants.
#[test]
fn relatives_are_refused_by_name() {
    for (name, model_type) in [
        ("Llama4ForCausalLM", "llama4_text"),
        ("Llama4ForConditionalGeneration", "llama4"),
        ("Ministral3ForCausalLM", "ministral3"),
        ("Qwen2MoeForCausalLM", "qwen2_moe"),
        ("Qwen3NextForCausalLM", "qwen3_next"),
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("LlamaForSequenceClassification", "llama"),
        ("Qwen2ForSequenceClassification", "qwen2"),
    ] {
        for family in families() {
            let config = with(family, "model_type", json!(model_type));
            let named = with(config.clone(), "architectures", json!([name]));
            let error = parse(&named).expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.message().contains(name), "{error}");
        }
        if !["llama", "qwen2"].contains(&model_type) {
            let config = without(with(llama(), "model_type", json!(model_type)), "architectures");
            let error = parse(&config).expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.message().contains(model_type), "{error}");
        }
    }
}

#[test]
fn what_would_change_the_computation_is_refused_by_name() {
    let unsupported = ErrorKind::Unsupported;
    for family in families() {
        for (field, value) in [
            ("hidden_act", json!("gelu")),
            ("quantization_config", json!({"quant_method": "awq", "bits": 3})),
            ("is_causal", json!(false)),
            ("partial_rotary_factor", json!(0.5)),
            ("attn_temperature_tuning", json!(true)),
        ] {
            refused(&with(family.clone(), field, value), unsupported, field);
        }
        let chunked = json!(["chunked_attention", "full_attention"]);
        refused(&with(family.clone(), "layer_types", chunked), unsupported, "chunked_attention");
        let short = with(family, "layer_types", json!(["full_attention"]));
        refused(&short, ErrorKind::InvalidFile, "layer_types");
    }
}

#[test]
fn other_kinds_of_rope_are_refused_by_name() {
    for family in families() {
        for (kind, more) in [
            ("dynamic", json!({"factor": 2.0})),
            ("longrope", json!({"short_factor": [1.0], "long_factor": [2.0]})),
            ("su", json!({"short_factor": [1.0], "long_factor": [2.0]})),
            ("proportional", json!({})),
            ("mrope", json!({"mrope_section": [2, 3, 3]})),
            ("Llama3", json!({"factor": 8.0})),
        ] {
            for (entry, spelling) in [
                ("rope_scaling", "type"),
                ("rope_scaling", "rope_type"),
                ("rope_parameters", "rope_type"),
            ] {
                let scaling = with(more.clone(), spelling, json!(kind));
                refused(&with(family.clone(), entry, scaling), ErrorKind::Unsupported, kind);
            }
        }
        let per_layer = json!({"full_attention": {"rope_type": "default", "rope_theta": 1e4}});
        let config = with(family, "rope_parameters", per_layer);
        refused(&config, ErrorKind::Unsupported, "full_attention");
    }
}

#[test]
fn wrong_parameters_of_llama3_rope_are_refused_by_name() {
    let good = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    });
    let file = |rope: Value| with(llama(), "rope_scaling", rope);
    parse(&file(good.clone())).expect("valid");
    for field in ["factor", "low_freq_factor", "high_freq_factor"] {
        refused(&file(without(good.clone(), field)), ErrorKind::InvalidFile, field);
        for value in [json!(0), json!(-1), json!("8"), json!(1e300), json!([])] {
            refused(&file(with(good.clone(), field, value)), ErrorKind::InvalidFile, field);
        }
    }
    let field = "original_max_position_embeddings";
    for value in [json!(0), json!(-1), json!("8"), json!(1.5), json!(1_u64 << 40)] {
        refused(&file(with(good.clone(), field, value)), ErrorKind::InvalidFile, field);
    }
    refused(&file(with(good.clone(), "factor", json!(0.5))), ErrorKind::InvalidFile, "factor");
    // Nothing would lie between the two.
    for high in [json!(1.0), json!(0.5)] {
        let config = file(with(good.clone(), "high_freq_factor", high));
        refused(&config, ErrorKind::InvalidFile, "high_freq_factor");
    }
    let linear = json!({"rope_type": "linear"});
    refused(&file(linear.clone()), ErrorKind::InvalidFile, "factor");
    refused(&file(with(linear, "factor", json!(0.5))), ErrorKind::InvalidFile, "factor");
}

/// Mistral's window is that of all layers, and leaves the context as it is.
#[test]
fn a_window_of_mistral_is_in_all_layers() {
    let unsupported = ErrorKind::Unsupported;
    for (window, positions, found) in [
        (json!(512), 2048, Some(512)),
        (json!(2047), 2048, Some(2047)),
        (json!(2048), 2048, None),
        (Value::Null, 131_072, None),
    ] {
        let config = with(mistral(), "sliding_window", window);
        let config = parse(&with(config, "max_position_embeddings", json!(positions)));
        let config = config.expect("valid");
        assert_eq!((config.max_context_tokens, config.windows), (positions, vec![found; 2]));
    }
    let config = with(mistral(), "max_position_embeddings", json!(32_768));
    let bare = parse(&without(config, "sliding_window")).expect("valid");
    assert_eq!((bare.max_context_tokens, bare.windows), (32_768, vec![Some(4096); 2]));
    // A list that says the same is none the worse; one that does not is not what Transformers computes.
    let windowed = with(mistral(), "sliding_window", json!(512));
    let types =
        |config: &Value, types: [&str; 2]| with(config.clone(), "layer_types", json!(types));
    assert!(parse(&types(&windowed, ["sliding_attention"; 2])).is_ok());
    assert!(parse(&types(&mistral(), ["full_attention"; 2])).is_ok());
    for list in [["full_attention"; 2], ["sliding_attention", "full_attention"]] {
        refused(&types(&windowed, list), unsupported, "layer_types has full_attention");
    }
    let list = ["full_attention", "sliding_attention"];
    refused(&types(&mistral(), list), unsupported, "layer_types has sliding_attention");
    // Llama has no windows.
    let config = parse(&with(llama(), "sliding_window", json!(64))).expect("valid");
    assert_eq!((config.max_context_tokens, config.windows), (2048, vec![None; 2]));
    refused(&types(&llama(), list), unsupported, "sliding_attention");
}

#[test]
fn windows_of_qwen_are_in_the_layers_that_are_named() {
    let invalid = ErrorKind::InvalidFile;
    for family in [
        qwen2(),
        with(
            with(qwen2(), "architectures", json!(["Qwen3ForCausalLM"])),
            "model_type",
            json!("qwen3"),
        ),
    ] {
        let windows = |config: &Value| parse(config).expect("valid").windows;
        assert_eq!(windows(&family), [None; 2]);
        let mut config = with(family.clone(), "use_sliding_window", json!(true));
        assert_eq!(windows(&config), [None, Some(64)]);
        assert_eq!(windows(&with(config.clone(), "max_window_layers", json!(0))), [Some(64); 2]);
        for last in [json!(2), json!(u64::MAX)] {
            assert_eq!(windows(&with(config.clone(), "max_window_layers", last)), [None; 2]);
        }
        assert_eq!(windows(&without(config.clone(), "max_window_layers")), [None; 2]);
        assert_eq!(windows(&with(config.clone(), "sliding_window", Value::Null)), [None; 2]);
        // The default of 4096 is longer than the context.
        assert_eq!(windows(&without(config.clone(), "sliding_window")), [None; 2]);
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        assert_eq!(windows(&config), [Some(64), None]);
        config["layer_types"] = json!(["full_attention", "full_attention"]);
        assert_eq!(windows(&config), [None; 2]);
        // Transformers finds no window for the layers that are to have one.
        config["layer_types"] = json!(["full_attention", "sliding_attention"]);
        let named = "use_sliding_window is not true";
        refused(&with(config.clone(), "use_sliding_window", json!(false)), invalid, named);
        refused(
            &with(config.clone(), "sliding_window", Value::Null),
            invalid,
            "sliding_window is null",
        );
        config["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
        refused(&config, invalid, "layer_types has 3 entries");
    }
}
