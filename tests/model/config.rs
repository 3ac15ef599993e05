//! `config.json`: what is taken, and what is refused by name.

use serde_json::{json, Value};
use xserv::error::{Error, ErrorKind};
use xserv::memory::DType;
use xserv::model::{Biases, ModelConfig, RopeScaling};

fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "hidden_size": 96, "intermediate_size": 208, "vocab_size": 1280,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_scaling": null, "attention_bias": false, "tie_word_embeddings": true,
        "hidden_act": "silu", "sliding_window": null, "use_sliding_window": false,
        "max_window_layers": 2, "torch_dtype": "bfloat16",
    })
}

fn gpt2() -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": null,
        "vocab_size": 1101, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        "tie_word_embeddings": true, "scale_attn_weights": true,
        "scale_attn_by_inverse_layer_idx": false, "reorder_and_upcast_attn": false,
    })
}

pub fn with(mut config: Value, field: &str, value: Value) -> Value {
    config[field] = value;
    config
}

pub fn without(mut config: Value, field: &str) -> Value {
    config.as_object_mut().expect("an object").remove(field);
    config
}

pub fn parse(config: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::parse(config.to_string().as_bytes())
}

#[track_caller]
pub fn refused(config: &Value, kind: ErrorKind, named: &str) {
    let error = parse(config).expect_err("must be refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(named), "{error} does not name {named}");
    assert!(error.message().len() < 400, "{error} is no sentence");
}

#[test]
fn the_fields_of_qwen3_are_taken() {
    let config = parse(&qwen3()).expect("valid");
    assert_eq!(config.architecture, "Qwen3ForCausalLM");
    assert_eq!((config.hidden_size, config.intermediate_size, config.vocab_size), (96, 208, 1280));
    assert_eq!((config.num_layers, config.num_heads, config.num_kv_heads), (2, 4, 2));
    assert_eq!((config.head_dim, config.max_context_tokens), (32, 2048));
    assert_eq!((config.norm_eps, config.tie_word_embeddings), (1e-6, true));
    assert_eq!(config.declared_dtype, Some(DType::BF16));
    let rope = config.rope.expect("Qwen3 has rotary positions");
    assert_eq!((rope.theta, rope.scaling), (1e6, RopeScaling::None));
}

#[test]
fn the_fields_of_gpt2_are_taken_under_both_names() {
    let config = parse(&gpt2()).expect("valid");
    assert_eq!(config.architecture, "GPT2LMHeadModel");
    assert_eq!((config.hidden_size, config.intermediate_size, config.head_dim), (96, 384, 24));
    assert_eq!((config.num_layers, config.num_heads, config.num_kv_heads), (3, 4, 4));
    assert_eq!((config.max_context_tokens, config.rope.is_none()), (512, true));
    for (name, in_steps) in
        [("gelu_new", true), ("gelu_python_tanh", true), ("gelu_pytorch_tanh", false)]
    {
        let config = parse(&with(gpt2(), "activation_function", json!(name))).expect("valid");
        assert_eq!(config.gelu_in_steps, in_steps, "{name}");
    }
    assert!(parse(&without(gpt2(), "activation_function")).expect("valid").gelu_in_steps);
    let mut other = gpt2();
    for (old, new) in [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_positions", "max_position_embeddings"),
    ] {
        other[new] = other[old].take();
    }
    assert_eq!(parse(&other).expect("valid"), config);
    assert_eq!(parse(&with(gpt2(), "n_inner", json!(100))).expect("valid").intermediate_size, 100);
}

#[test]
fn new_spelling_of_rope_and_dtype() {
    let mut config =
        without(without(without(qwen3(), "rope_theta"), "rope_scaling"), "torch_dtype");
    config["rope_parameters"] = json!({"rope_theta": 5e5, "rope_type": "default"});
    config["dtype"] = json!("float16");
    config["layer_types"] = json!(["full_attention", "full_attention"]);
    let config = parse(&config).expect("valid");
    assert_eq!(config.rope.expect("rope").theta, 5e5);
    assert_eq!(config.declared_dtype, Some(DType::F16));
}

#[test]
fn what_transformers_takes_for_absent_fields() {
    let bare = [
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "attention_bias",
        "tie_word_embeddings",
        "hidden_act",
        "sliding_window",
        "model_type",
        "use_sliding_window",
        "max_window_layers",
        "torch_dtype",
    ]
    .into_iter()
    .fold(qwen3(), without);
    let config = parse(&bare).expect("valid");
    assert_eq!((config.head_dim, config.max_context_tokens), (128, 32768));
    assert_eq!((config.norm_eps, config.rope.expect("rope").theta), (1e-6, 10000.0));
    assert!(!config.tie_word_embeddings && config.biases == Biases::default());
    // An explicit null is something else than an absent field for these two.
    let config = parse(&with(qwen3(), "head_dim", Value::Null)).expect("valid");
    assert_eq!(config.head_dim, 24);
    let config = parse(&with(qwen3(), "num_key_value_heads", Value::Null)).expect("valid");
    assert_eq!(config.num_kv_heads, 4);
    assert!(parse(&without(gpt2(), "tie_word_embeddings")).expect("valid").tie_word_embeddings);
}

/// Every count, with everything that is no sensible count.
#[test]
fn absurd_counts_are_refused_by_name() {
    let absurd = [
        json!(0),
        json!(-1),
        json!(1.5),
        json!(96.0),
        json!(1_u64 << 31),
        json!(1_u64 << 63),
        json!(u64::MAX),
        json!(1e19),
        json!(1e308),
        json!("96"),
        json!(true),
        json!([96]),
        json!({}),
    ];
    let fields = [
        (
            qwen3(),
            [
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
            ]
            .as_slice(),
        ),
        (
            gpt2(),
            ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner"].as_slice(),
        ),
    ];
    for (base, fields) in fields {
        for field in fields {
            for value in &absurd {
                refused(&with(base.clone(), field, value.clone()), ErrorKind::InvalidFile, field);
            }
        }
    }
}

#[test]
fn missing_and_null_counts_are_refused_by_name() {
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ] {
        refused(&without(qwen3(), field), ErrorKind::InvalidFile, field);
        refused(&with(qwen3(), field, Value::Null), ErrorKind::InvalidFile, field);
    }
    refused(
        &without(qwen3(), "num_key_value_heads"),
        ErrorKind::InvalidFile,
        "num_key_value_heads",
    );
    for field in ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions"] {
        refused(&without(gpt2(), field), ErrorKind::InvalidFile, field);
        refused(&with(gpt2(), field, Value::Null), ErrorKind::InvalidFile, field);
    }
}

#[test]
fn bad_numbers_flags_and_names_are_refused_by_name() {
    for value in [json!(0), json!(-1), json!("1e-6"), json!(false), json!([]), json!(1e300)] {
        refused(
            &with(qwen3(), "rms_norm_eps", value.clone()),
            ErrorKind::InvalidFile,
            "rms_norm_eps",
        );
        refused(&with(qwen3(), "rope_theta", value.clone()), ErrorKind::InvalidFile, "rope_theta");
        refused(
            &with(gpt2(), "layer_norm_epsilon", value),
            ErrorKind::InvalidFile,
            "layer_norm_epsilon",
        );
    }
    for field in ["tie_word_embeddings", "attention_bias", "use_sliding_window"] {
        for value in [json!(0), json!(1), json!("true"), json!({}), json!([])] {
            refused(&with(qwen3(), field, value), ErrorKind::InvalidFile, field);
        }
    }
    for value in [json!(1), json!(["silu"]), json!({})] {
        refused(&with(qwen3(), "hidden_act", value.clone()), ErrorKind::InvalidFile, "hidden_act");
        refused(&with(qwen3(), "model_type", value.clone()), ErrorKind::InvalidFile, "model_type");
        refused(
            &with(gpt2(), "activation_function", value),
            ErrorKind::InvalidFile,
            "activation_function",
        );
    }
    for value in [json!("Qwen3ForCausalLM"), json!([1]), json!({}), json!(3)] {
        refused(&with(qwen3(), "architectures", value), ErrorKind::InvalidFile, "architectures");
    }
    for value in [json!(1), json!("yarn"), json!([1])] {
        refused(&with(qwen3(), "rope_scaling", value), ErrorKind::InvalidFile, "rope_scaling");
    }
}

/// A number that no f64 holds makes the whole file invalid JSON for us; Python reads infinity.
#[test]
fn numbers_beyond_f64_are_refused() {
    for field in ["hidden_size", "rope_theta", "rms_norm_eps", "num_hidden_layers", "unused"] {
        for number in ["1e309", "-1e309", "NaN", "Infinity"] {
            let text = with(qwen3(), field, json!("@")).to_string().replace("\"@\"", number);
            let error = ModelConfig::parse(text.as_bytes()).expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::InvalidFile);
            assert!(error.message().contains("config.json"), "{error}");
        }
    }
}

#[test]
fn not_json_at_all() {
    let deep = "[".repeat(100_000);
    let cases: [&[u8]; 8] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{\"a\":1}x",
        b"\"Qwen3ForCausalLM\"",
        deep.as_bytes(),
    ];
    for json in cases {
        let error = ModelConfig::parse(json).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidFile);
        assert!(error.message().starts_with("config.json"), "{error}");
    }
    let error = ModelConfig::parse(b"{}").expect_err("must be refused");
    assert!(error.message().contains("architectures is missing"), "{error}");
}

#[test]
fn other_architectures_are_refused_by_name() {
    for name in ["Qwen3NextForCausalLM", "Llama4ForCausalLM", "Qwen3Model", "GPT2Model", ""] {
        let config = with(qwen3(), "architectures", json!([name]));
        refused(&config, ErrorKind::Unsupported, name);
    }
    let both = with(qwen3(), "architectures", json!(["Qwen3ForCausalLM", "GPT2LMHeadModel"]));
    refused(&both, ErrorKind::Unsupported, "Qwen3ForCausalLM with others");
    let by_type = with(without(qwen3(), "architectures"), "model_type", json!("mamba"));
    refused(&by_type, ErrorKind::Unsupported, "mamba");
    refused(&with(qwen3(), "model_type", json!("gpt2")), ErrorKind::InvalidFile, "model_type");
    assert!(parse(&without(qwen3(), "architectures")).is_ok());
    // A name from a file must not reach a terminal as it is, nor fill a log.
    let error = parse(&with(qwen3(), "architectures", json!(["\x1b[31m".repeat(10_000)])))
        .expect_err("must be refused");
    assert!(error.message().len() < 1000 && !error.message().contains('\x1b'));
}

#[test]
fn what_would_change_the_computation_is_refused_by_name() {
    for (field, value) in [
        ("hidden_act", json!("gelu")),
        ("quantization_config", json!({"quant_method": "bitsandbytes", "load_in_4bit": true})),
        ("layer_types", json!(["full_attention", "chunked_attention"])),
        ("is_causal", json!(false)),
        ("is_encoder_decoder", json!(true)),
        ("partial_rotary_factor", json!(0.5)),
    ] {
        let named = if field == "layer_types" { "chunked_attention" } else { field };
        refused(&with(qwen3(), field, value), ErrorKind::Unsupported, named);
    }
    let quantised = with(qwen3(), "quantization_config", json!({"quant_method": "mxfp4"}));
    refused(&quantised, ErrorKind::Unsupported, "mxfp4");
    for (field, value) in [
        ("activation_function", json!("gelu")),
        ("activation_function", json!("relu")),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("scale_attn_weights", json!(false)),
        ("add_cross_attention", json!(true)),
    ] {
        refused(&with(gpt2(), field, value), ErrorKind::Unsupported, field);
    }
    assert!(parse(&with(gpt2(), "reorder_and_upcast_attn", json!(true))).is_ok());
    assert!(parse(&with(gpt2(), "activation_function", json!("gelu_pytorch_tanh"))).is_ok());
}

#[test]
fn heads_must_fit() {
    refused(
        &with(qwen3(), "num_key_value_heads", json!(3)),
        ErrorKind::InvalidFile,
        "num_key_value_heads",
    );
    refused(&with(qwen3(), "head_dim", json!(33)), ErrorKind::Unsupported, "head_dim");
    refused(&with(qwen3(), "head_dim", json!(258)), ErrorKind::InvalidFile, "head_dim");
    assert!(parse(&with(qwen3(), "head_dim", json!(256))).is_ok());
    assert!(parse(&with(qwen3(), "head_dim", json!(2))).is_ok());
    refused(&with(gpt2(), "n_head", json!(5)), ErrorKind::InvalidFile, "n_head");
    refused(&with(gpt2(), "n_head", json!(32)), ErrorKind::Unsupported, "head_dim");
    let wide = with(with(gpt2(), "n_head", json!(2)), "n_embd", json!(516));
    refused(&wide, ErrorKind::Unsupported, "n_head");
    let narrow = with(with(qwen3(), "head_dim", Value::Null), "hidden_size", json!(2));
    refused(&narrow, ErrorKind::InvalidFile, "num_attention_heads");
}
