//! make_random_model.py: the models that it makes are those that were asked for.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::*;

/// Runs the script; `arguments` begin with the shape.
fn make(folder: &Path, arguments: &[&str]) -> Outcome {
    let script = repository().join("tests/bench/make_random_model.py");
    outcome(command("python3").arg(script).arg("--shape").args(arguments).arg("--out").arg(folder))
}

/// Returns a folder with the model; `arguments` begin with the shape.
pub fn random_model(name: &str, arguments: &[&str]) -> PathBuf {
    let folder = work_folder(name);
    let made = make(&folder, arguments);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    folder
}

fn config_of(folder: &Path) -> Value {
    let text = fs::read(folder.join("config.json")).expect("a config");
    serde_json::from_slice(&text).expect("JSON")
}

/// Weights of a model by its config alone, with the formula of its family.
fn count_by(config: &Value) -> u64 {
    let size = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("no {key} in {config}"));
    let family = config["model_type"].as_str().expect("a family");
    if family == "gpt2" {
        let (hidden, layers) = (size("n_embd"), size("n_layer"));
        let layer = 12 * hidden * hidden + 13 * hidden;
        return (size("vocab_size") + size("n_positions")) * hidden + layers * layer + 2 * hidden;
    }
    let (hidden, heads, kv_heads) =
        (size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads"));
    let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(hidden / heads);
    let mut layer = 2 * hidden + 2 * hidden * head_dim * (heads + kv_heads);
    if family == "qwen2" {
        layer += head_dim * (heads + 2 * kv_heads);
    }
    if family.starts_with("qwen3") {
        layer += 2 * head_dim;
    }
    layer += match family {
        "qwen3_moe" => size("num_experts") * (hidden + 3 * hidden * size("moe_intermediate_size")),
        "mixtral" => size("num_local_experts") * (hidden + 3 * hidden * size("intermediate_size")),
        _ => 3 * hidden * size("intermediate_size"),
    };
    let num_embeddings = if config["tie_word_embeddings"] == true { 1 } else { 2 };
    num_embeddings * size("vocab_size") * hidden + size("num_hidden_layers") * layer + hidden
}

/// The published number of weights of each shape (tied matrices once), and what its config calls
/// itself.
const PUBLISHED: [(&str, u64, &str); 13] = [
    ("qwen3-0.6b", 596_049_920, "Qwen3ForCausalLM"),
    ("qwen3-1.7b", 1_720_574_976, "Qwen3ForCausalLM"),
    ("qwen3-4b", 4_022_468_096, "Qwen3ForCausalLM"),
    ("qwen3-8b", 8_190_735_360, "Qwen3ForCausalLM"),
    ("qwen3-14b", 14_768_307_200, "Qwen3ForCausalLM"),
    ("qwen3-32b", 32_762_123_264, "Qwen3ForCausalLM"),
    ("qwen3-30b-a3b", 30_532_122_624, "Qwen3MoeForCausalLM"),
    ("llama-3.1-8b", 8_030_261_248, "LlamaForCausalLM"),
    ("llama-3.2-1b", 1_235_814_400, "LlamaForCausalLM"),
    ("mistral-7b", 7_248_023_552, "MistralForCausalLM"),
    ("mixtral-8x7b", 46_702_792_704, "MixtralForCausalLM"),
    ("qwen2.5-7b", 7_615_616_512, "Qwen2ForCausalLM"),
    ("gpt2", 124_439_808, "GPT2LMHeadModel"),
];

/// 1234567 as the script prints it: 1,234,567.
fn with_commas(mut number: u64) -> String {
    let mut groups = Vec::new();
    while number >= 1000 {
        groups.push(format!("{:03}", number % 1000));
        number /= 1000;
    }
    groups.push(number.to_string());
    groups.reverse();
    groups.join(",")
}

#[test]
fn published_shapes_have_the_published_number_of_weights() {
    for (shape, count, architecture) in PUBLISHED {
        let folder = work_folder(&format!("random-{shape}"));
        let made = make(&folder, &[shape, "--config-only"]);
        assert_eq!(made.code, Some(0), "{}", made.stderr);
        assert!(
            made.stderr.contains(&format!(" {} weights", with_commas(count))),
            "{}",
            made.stderr
        );
        assert!(!folder.join("model.safetensors").exists(), "{shape} has weights");
        let config = config_of(&folder);
        assert_eq!(config["architectures"][0], architecture);
        assert_eq!(count_by(&config), count, "{shape}: {config}");
        fs::remove_dir_all(folder).expect("the folder");
    }
}

#[test]
fn configs_are_spelt_as_published() {
    let config = |shape: &str| {
        let folder = random_model(&format!("random-config-{shape}"), &[shape, "--config-only"]);
        config_of(&folder)
    };
    for (shape, factor) in [("llama-3.1-8b", 8.0), ("llama-3.2-1b", 32.0)] {
        let config = config(shape);
        let scaling = &config["rope_scaling"];
        assert_eq!(scaling["rope_type"], "llama3");
        assert_eq!(scaling["factor"], factor);
        assert_eq!(scaling["low_freq_factor"], 1.0);
        assert_eq!(scaling["high_freq_factor"], 4.0);
        assert_eq!(scaling["original_max_position_embeddings"], 8192);
        assert_eq!(config["rope_theta"], 500000.0);
        assert_eq!(config.get("head_dim").is_some(), shape == "llama-3.2-1b");
    }
    let moe = config("qwen3-30b-a3b");
    for (key, value) in
        [("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768)]
    {
        assert_eq!(moe[key], value, "{key}");
    }
    assert_eq!((&moe["norm_topk_prob"], &moe["decoder_sparse_step"]), (&true.into(), &1.into()));
    let mixtral = config("mixtral-8x7b");
    assert_eq!(
        (&mixtral["num_local_experts"], &mixtral["num_experts_per_tok"]),
        (&8.into(), &2.into())
    );
    assert!(config("mistral-7b")["sliding_window"].is_null());
    assert_eq!(config("qwen2.5-7b")["use_sliding_window"], false);
}

#[test]
fn any_size_can_be_changed() {
    let sizes = [
        ["--hidden", "48"],
        ["--layers", "3"],
        ["--heads", "6"],
        ["--kv-heads", "2"],
        ["--head-dim", "10"],
        ["--vocab", "700"],
    ];
    let families: [(&str, &[&str]); 6] = [
        ("qwen3-8b", &["--tied", "--intermediate", "40"]),
        (
            "qwen3-30b-a3b",
            &["--experts", "5", "--experts-per-token", "2", "--moe-intermediate", "24"],
        ),
        ("llama-3.2-1b", &["--untied", "--intermediate", "40"]),
        ("mistral-7b", &["--intermediate", "40"]),
        ("mixtral-8x7b", &["--experts", "5", "--intermediate", "40"]),
        ("qwen2.5-7b", &["--intermediate", "40"]),
    ];
    for (shape, more) in families {
        let arguments = [&[shape], sizes.as_flattened(), more].concat();
        let folder = random_model(&format!("random-sizes-{shape}"), &arguments);
        let config = config_of(&folder);
        assert_eq!((&config["hidden_size"], &config["head_dim"]), (&48.into(), &10.into()));
        let bytes = fs::read(folder.join("model.safetensors")).expect("weights");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let stored: usize = tensors.tensors().iter().map(|(_, t)| t.data().len() / 2).sum();
        assert_eq!(stored as u64, count_by(&config), "{shape}");
        let is_tied = tensors.tensor("lm_head.weight").is_err();
        assert_eq!(config["tie_word_embeddings"], is_tied, "{shape}");
        let has = |name: &str| tensors.tensor(&format!("model.layers.2.{name}")).is_ok();
        assert_eq!(has("self_attn.q_norm.weight"), shape.starts_with("qwen3"));
        assert_eq!(has("self_attn.k_proj.bias"), shape == "qwen2.5-7b");
        assert_eq!(has("mlp.experts.4.down_proj.weight"), shape == "qwen3-30b-a3b");
        assert_eq!(has("block_sparse_moe.experts.4.w2.weight"), shape == "mixtral-8x7b");
        let is_dense = !["qwen3-30b-a3b", "mixtral-8x7b"].contains(&shape);
        assert_eq!(has("mlp.gate_proj.weight"), is_dense);
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let folder = work_folder("random-refused");
    for (arguments, named) in [
        (&["llama-3.2-1b", "--kv-heads", "5"][..], "5 kv heads"),
        (&["qwen3-8b", "--experts", "4"], "--experts"),
        (&["qwen3-30b-a3b", "--experts", "4"], "8 of 4 experts"),
        (&["gpt2", "--untied"], "always tied"),
        (&["qwen3-8b", "--layers", "0"], "--layers"),
        (&["qwen3-8b", "--vocab", "100"], "--vocab"),
        (&["qwen3-8b", "--head-dim", "9"], "--head-dim"),
    ] {
        let refused = make(&folder, arguments);
        assert_eq!(refused.code, Some(2), "{arguments:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(named), "{arguments:?}: {}", refused.stderr);
    }
    assert!(!folder.join("config.json").exists(), "something was written");
}
