//! Model folders made by tests: temporary folders, safetensors files, small models with random
//! weights.

#![allow(dead_code)] // each test binary uses its part

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{json, Map, Value};

/// A folder that is removed at the end of the test.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "xserv-model-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("create a temporary folder");
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn str(&self) -> &str {
        self.0.to_str().expect("the temporary folder's path is UTF-8")
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("create");
        std::fs::write(path, bytes).expect("write a file");
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A small generator of reproducible numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn signed(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Seconds that this thread has computed: what a hostile file costs, however busy the machine is.
pub fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("procfs");
    let ns: u64 = stat.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number");
    ns as f64 * 1e-9
}

/// The type in which a test stores numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Store {
    F32,
    F16,
    BF16,
}

impl Store {
    pub fn name(self) -> &'static str {
        match self {
            Store::F32 => "F32",
            Store::F16 => "F16",
            Store::BF16 => "BF16",
        }
    }

    /// Returns the type of a safetensors file's name.
    pub fn named(name: &str) -> Store {
        [Store::F32, Store::F16, Store::BF16]
            .into_iter()
            .find(|store| store.name() == name)
            .unwrap_or_else(|| panic!("no type {name}"))
    }

    /// Returns the name in config.json.
    pub fn long_name(self) -> &'static str {
        match self {
            Store::F32 => "float32",
            Store::F16 => "float16",
            Store::BF16 => "bfloat16",
        }
    }

    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Store::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Store::F16 => {
                values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect()
            }
            Store::BF16 => {
                values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
            }
        }
    }
}

/// A tensor as a test makes it.
#[derive(Clone, Debug)]
pub struct TestTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Returns the bytes of a safetensors file.
pub fn safetensors_bytes(tensors: &[TestTensor], store: Store) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend(store.bytes(&tensor.values));
        header.insert(
            tensor.name.clone(),
            json!({"dtype": store.name(), "shape": tensor.shape, "data_offsets": [begin, data.len()]}),
        );
    }
    raw_safetensors(&Value::Object(header).to_string(), &data)
}

/// Returns a file with exactly this header and this data, however wrong.
pub fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// A family of the shape of Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    Qwen3,
    /// Without norms of heads; with frequencies scaled as Llama 3.1's, and biases of the MLP where
    /// the attention has them.
    Llama,
    /// Without norms of heads, with biases of q, k and v.
    Qwen2,
    /// With four experts in the first layer, of which a token takes two.
    Qwen3Moe,
}

impl Family {
    pub const ALL: [Family; 4] = [Family::Qwen3, Family::Llama, Family::Qwen2, Family::Qwen3Moe];
    /// Those without experts: where kernels round otherwise, a token may choose others.
    pub const DENSE: [Family; 3] = [Family::Qwen3, Family::Llama, Family::Qwen2];
}

/// A model with random weights.
#[derive(Clone, Debug)]
pub struct TestModel {
    pub config: Value,
    pub tensors: Vec<TestTensor>,
}

impl TestModel {
    /// Returns a Qwen3 of two layers, 4 query heads over 2 key heads of dimension 10, hidden size
    /// 24, with every kind of weight that a Qwen3 can have.
    pub fn qwen3(seed: u64) -> Self {
        Self::with_sizes(seed, (24, 40, 70), (4, 2, 10), true)
    }

    /// The same without biases, with hidden size 256 and heads of 128: sizes that all kernels of
    /// decoding serve.
    pub fn wide_qwen3(seed: u64) -> Self {
        Self::with_sizes(seed, (256, 768, 1000), (4, 2, 128), false)
    }

    /// The same with other sizes.
    pub fn qwen3_of(seed: u64, hidden: usize, intermediate: usize) -> Self {
        Self::with_sizes(seed, (hidden, intermediate, 1000), (4, 2, 128), false)
    }

    /// One with the layers of Qwen3-0.6B and room for 4096 tokens.
    pub fn small_qwen3(seed: u64) -> Self {
        let mut model = Self::with_sizes(seed, (1024, 3072, 1000), (16, 8, 128), false);
        model.config["max_position_embeddings"] = json!(4096);
        model
    }

    /// One whose products are summed in parts on a GPU (four of unequal lengths in the last of a layer).
    pub fn long_qwen3(seed: u64, head_dim: usize) -> Self {
        Self::with_sizes(seed, (512, 2304, 1000), (4, 2, head_dim), false)
    }

    /// Gives the first layer of a Qwen a sliding window; the second sees all keys.
    pub fn in_window(mut self, window: usize) -> Self {
        self.config["use_sliding_window"] = true.into();
        self.config["sliding_window"] = window.into();
        self.config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        self
    }

    fn with_sizes(
        seed: u64,
        (hidden, intermediate, vocab): (usize, usize, usize),
        (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
        has_biases: bool,
    ) -> Self {
        let mut random = Random(seed);
        let (q, kv) = (num_heads * head_dim, num_kv_heads * head_dim);
        // Sums of about the same size whatever the width.
        let scale = 0.4 * (24.0 / hidden as f64).sqrt();
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], scale: f64, offset: f64| {
            let len: usize = shape.iter().product();
            let values = (0..len).map(|_| (offset + scale * random.signed()) as f32).collect();
            tensors.push(TestTensor { name, shape: shape.to_vec(), values });
        };
        add("model.embed_tokens.weight".into(), &[vocab, hidden], 1.0, 0.0);
        add("lm_head.weight".into(), &[vocab, hidden], 0.5, 0.0);
        add("model.norm.weight".into(), &[hidden], 0.3, 1.0);
        for layer in 0..2 {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            add(name("input_layernorm.weight"), &[hidden], 0.3, 1.0);
            add(name("post_attention_layernorm.weight"), &[hidden], 0.3, 1.0);
            add(name("self_attn.q_norm.weight"), &[head_dim], 0.3, 1.0);
            add(name("self_attn.k_norm.weight"), &[head_dim], 0.3, 1.0);
            for (part, rows, columns) in [
                ("self_attn.q_proj", q, hidden),
                ("self_attn.k_proj", kv, hidden),
                ("self_attn.v_proj", kv, hidden),
                ("self_attn.o_proj", hidden, q),
                ("mlp.gate_proj", intermediate, hidden),
                ("mlp.up_proj", intermediate, hidden),
                ("mlp.down_proj", hidden, intermediate),
            ] {
                add(name(&format!("{part}.weight")), &[rows, columns], scale, 0.0);
                if has_biases && part.starts_with("self_attn") {
                    add(name(&format!("{part}.bias")), &[rows], 0.5, 0.0);
                }
            }
        }
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "vocab_size": vocab,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": has_biases,
            "tie_word_embeddings": false,
            "hidden_act": "silu",
        });
        TestModel { config, tensors }
    }

    /// Returns a Qwen3's sizes and weights as a model of another family.
    pub fn of(mut self, family: Family) -> Self {
        assert_eq!(self.config["model_type"], "qwen3");
        if family == Family::Qwen3 {
            return self;
        }
        if family == Family::Qwen3Moe {
            return self.with_experts();
        }
        let had_biases = self.config["attention_bias"] == true;
        self.config.as_object_mut().expect("an object").remove("attention_bias");
        self.tensors.retain(|tensor| !tensor.name.contains("self_attn.q_norm"));
        self.tensors.retain(|tensor| !tensor.name.contains("self_attn.k_norm"));
        let with_biases = match family {
            Family::Qwen3 | Family::Qwen3Moe => unreachable!("returned above"),
            Family::Llama => {
                self.config["architectures"] = json!(["LlamaForCausalLM"]);
                self.config["model_type"] = json!("llama");
                self.config["attention_bias"] = json!(had_biases);
                self.config["mlp_bias"] = json!(had_biases);
                self.config["rope_scaling"] = json!({
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                });
                // Those of the attention are there already.
                ["gate_proj", "up_proj", "down_proj"].as_slice()
            }
            Family::Qwen2 => {
                self.config["architectures"] = json!(["Qwen2ForCausalLM"]);
                self.config["model_type"] = json!("qwen2");
                self.tensors.retain(|tensor| !tensor.name.ends_with(".bias"));
                ["q_proj", "k_proj", "v_proj"].as_slice()
            }
        };
        if family == Family::Qwen2 || had_biases {
            let mut random = Random(family as u64);
            let is_of = |name: &str| with_biases.iter().any(|part| name.contains(part));
            let weights = self.tensors.iter().filter(|t| is_of(&t.name)).cloned();
            for weight in weights.collect::<Vec<_>>() {
                let len = weight.shape[0];
                self.tensors.push(TestTensor {
                    name: weight.name.replace(".weight", ".bias"),
                    shape: vec![len],
                    values: (0..len).map(|_| (0.5 * random.signed()) as f32).collect(),
                });
            }
        }
        self
    }

    /// Puts experts in the place of the MLP of the first layer. Each has the numbers of the MLP at other
    /// places.
    fn with_experts(mut self) -> Self {
        const NUM_EXPERTS: usize = 4;
        let width = self.tensor("model.layers.0.mlp.down_proj.weight").shape[1];
        let hidden = self.tensor("model.layers.0.mlp.down_proj.weight").shape[0];
        let is_moved = |tensor: &TestTensor| tensor.name.starts_with("model.layers.0.mlp.");
        let (mlp, rest): (Vec<_>, Vec<_>) = self.tensors.into_iter().partition(is_moved);
        self.tensors = rest;
        for expert in 0..NUM_EXPERTS {
            for tensor in &mlp {
                let name = tensor.name.replace(".mlp.", &format!(".mlp.experts.{expert}."));
                let mut values = tensor.values.clone();
                values.rotate_left(expert * 131 % tensor.values.len());
                self.tensors.push(TestTensor { name, shape: tensor.shape.clone(), values });
            }
        }
        let mut random = Random(NUM_EXPERTS as u64);
        // Logits of about 1.
        let scale = (3.0 / hidden as f64).sqrt();
        let router = (0..NUM_EXPERTS * hidden).map(|_| (scale * random.signed()) as f32).collect();
        self.tensors.push(TestTensor {
            name: "model.layers.0.mlp.gate.weight".into(),
            shape: vec![NUM_EXPERTS, hidden],
            values: router,
        });
        for (field, value) in [
            ("architectures", json!(["Qwen3MoeForCausalLM"])),
            ("model_type", json!("qwen3_moe")),
            ("num_experts", json!(NUM_EXPERTS)),
            ("num_experts_per_tok", json!(2)),
            ("moe_intermediate_size", json!(width)),
            ("norm_topk_prob", json!(true)),
            ("mlp_only_layers", json!([1])),
        ] {
            self.config[field] = value;
        }
        self
    }

    /// Returns a GPT-2 of two layers, 3 heads of dimension 10, hidden size 30, with an output
    /// matrix of its own: rows that are no whole vectors.
    pub fn gpt2(seed: u64) -> Self {
        Self::gpt2_with_sizes(seed, 3, (30, 50, 70), 512)
    }

    /// The same with hidden size 128 and heads of 64, for long contexts.
    pub fn wide_gpt2(seed: u64) -> Self {
        Self::gpt2_with_sizes(seed, 2, (128, 3200, 70), 2048)
    }

    fn gpt2_with_sizes(
        seed: u64,
        num_heads: usize,
        (hidden, intermediate, vocab): (usize, usize, usize),
        positions: usize,
    ) -> Self {
        let mut random = Random(seed);
        let scale = 0.4 * (30.0 / hidden as f64).sqrt();
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], scale: f64, offset: f64| {
            let len: usize = shape.iter().product();
            let values = (0..len).map(|_| (offset + scale * random.signed()) as f32).collect();
            tensors.push(TestTensor { name, shape: shape.to_vec(), values });
        };
        add("transformer.wte.weight".into(), &[vocab, hidden], 1.0, 0.0);
        add("transformer.wpe.weight".into(), &[positions, hidden], 0.5, 0.0);
        add("lm_head.weight".into(), &[vocab, hidden], 0.5, 0.0);
        add("transformer.ln_f.weight".into(), &[hidden], 0.3, 1.0);
        add("transformer.ln_f.bias".into(), &[hidden], 0.3, 0.0);
        for layer in 0..2 {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            for norm in ["ln_1", "ln_2"] {
                add(name(&format!("{norm}.weight")), &[hidden], 0.3, 1.0);
                add(name(&format!("{norm}.bias")), &[hidden], 0.3, 0.0);
            }
            for (part, in_features, out_features) in [
                ("attn.c_attn", hidden, 3 * hidden),
                ("attn.c_proj", hidden, hidden),
                ("mlp.c_fc", hidden, intermediate),
                ("mlp.c_proj", intermediate, hidden),
            ] {
                // Sums of about the same size whatever the width.
                let scale = scale * (hidden as f64 / in_features as f64).sqrt();
                add(name(&format!("{part}.weight")), &[in_features, out_features], scale, 0.0);
                add(name(&format!("{part}.bias")), &[out_features], 0.5, 0.0);
            }
        }
        let config = json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_inner": intermediate,
            "vocab_size": vocab,
            "n_layer": 2,
            "n_head": num_heads,
            "n_positions": positions,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": false,
            "activation_function": "gelu_new",
        });
        TestModel { config, tensors }
    }

    pub fn tensor(&self, name: &str) -> &TestTensor {
        self.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Writes `config.json` and `model.safetensors` into a new folder.
    pub fn write(&self, store: Store) -> TempDir {
        let dir = TempDir::new();
        dir.write("config.json", self.config.to_string());
        dir.write("model.safetensors", safetensors_bytes(&self.tensors, store));
        dir
    }
}
