//! Reads the reference data of a model: the formats are described in the README beside the data.

#![allow(dead_code)] // each test binary uses its part

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A prompt of `prompts.json`.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
}

/// An entry of `generate.json`.
#[derive(Clone, Debug)]
pub struct Greedy {
    pub name: String,
    pub prompt_ids: Vec<u32>,
    /// The token with the largest logit at each step, end tokens ignored.
    pub ids: Vec<u32>,
    /// First minus second logit at each step.
    pub margins: Vec<f32>,
}

/// An entry of `bf16.json`: what Transformers loses in bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Loss {
    pub logits_std: f64,
    pub max_abs_diff: f64,
    pub rms_diff: f64,
}

/// A model and its references.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    pub model_dir: PathBuf,
    pub refs_dir: PathBuf,
    pub prompts: Vec<Prompt>,
    pub greedy: Vec<Greedy>,
    pub bf16: HashMap<String, Bf16Loss>,
    /// f32 `[T, vocab_size]` by the prompt's name.
    pub logits: HashMap<String, Vec<f32>>,
}

/// A tensor of a reference file.
#[derive(Debug)]
pub struct RefTensor {
    pub shape: Vec<usize>,
    pub f32s: Vec<f32>,
    pub i32s: Vec<i32>,
}

/// The folder with the shared references; `None`, with a message, where it is not there.
pub fn shared_golden() -> Option<PathBuf> {
    let dir = std::env::var_os("XSERV_GOLDEN")
        .map(PathBuf::from)
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden"));
    if dir.join("models").is_dir() {
        return Some(dir);
    }
    eprintln!("skipped: no golden data in {} (set XSERV_GOLDEN)", dir.display());
    None
}

/// The models with references that this machine has: the shared ones, and the repository's own.
pub fn all() -> Vec<Golden> {
    let mut found = Vec::new();
    if let Some(dir) = shared_golden() {
        for name in ["qwen3-tiny-tied", "qwen3-tiny-untied", "qwen3-tiny-mha", "gpt2-tiny"] {
            let refs = dir.join("refs").join(name);
            found.push(Golden::read(name, &dir.join("models").join(name), &refs));
        }
        // The same weights under other names: the references are gpt2-tiny's.
        let name = "gpt2-tiny-hubnames";
        let refs = dir.join("refs/gpt2-tiny");
        found.push(Golden::read(name, &dir.join("models").join(name), &refs));
    }
    // A test that was built elsewhere runs in the repository's folder.
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR"));
    let repository = if built_in.is_dir() { built_in } else { Path::new(".") };
    let (model, refs) =
        (repository.join("examples/models/tiny-qwen3"), repository.join("tests/golden/tiny-qwen3"));
    if model.is_dir() && refs.is_dir() {
        found.push(Golden::read("tiny-qwen3", &model, &refs));
    } else {
        eprintln!("skipped: no {} with references", model.display());
    }
    found
}

impl Golden {
    /// Reads the references in `refs_dir` of the model in `model_dir`.
    pub fn read(name: &str, model_dir: &Path, refs_dir: &Path) -> Golden {
        let prompts: Vec<Prompt> = list(&json(&refs_dir.join("prompts.json")))
            .iter()
            .map(|entry| Prompt { name: string(&entry["name"]), ids: ids(&entry["ids"]) })
            .collect();
        let greedy = list(&json(&refs_dir.join("generate.json")))
            .iter()
            .map(|entry| Greedy {
                name: string(&entry["name"]),
                prompt_ids: ids(&entry["prompt_ids"]),
                ids: ids(&entry["greedy_ids"]),
                margins: list(&entry["margins"]).iter().map(|m| number(m) as f32).collect(),
            })
            .collect();
        let bf16_file = refs_dir.join("bf16.json");
        let bf16 = if bf16_file.is_file() {
            list(&json(&bf16_file))
                .iter()
                .map(|entry| {
                    let loss = Bf16Loss {
                        logits_std: number(&entry["logits_std"]),
                        max_abs_diff: number(&entry["max_abs_diff"]),
                        rms_diff: number(&entry["rms_diff"]),
                    };
                    (string(&entry["name"]), loss)
                })
                .collect()
        } else {
            eprintln!("skipped: {name} has no bf16.json");
            HashMap::new()
        };
        let logits = tensors(&refs_dir.join("logits.safetensors"))
            .into_iter()
            .map(|(name, tensor)| (name, tensor.f32s))
            .collect();
        Golden {
            name: name.to_owned(),
            model_dir: model_dir.to_path_buf(),
            refs_dir: refs_dir.to_path_buf(),
            prompts,
            greedy,
            bf16,
            logits,
        }
    }

    pub fn model_path(&self) -> &str {
        self.model_dir.to_str().expect("a UTF-8 path")
    }
}

/// All tensors of a safetensors file.
pub fn tensors(path: &Path) -> HashMap<String, RefTensor> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("a valid reference file");
    file.iter()
        .map(|(name, view)| {
            let words = || view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            let mut tensor =
                RefTensor { shape: view.shape().to_vec(), f32s: Vec::new(), i32s: Vec::new() };
            match view.dtype() {
                Dtype::F32 => tensor.f32s = words().map(f32::from_le_bytes).collect(),
                Dtype::I32 => tensor.i32s = words().map(i32::from_le_bytes).collect(),
                other => panic!("{}: {name} is {other}", path.display()),
            }
            (name.to_owned(), tensor)
        })
        .collect()
}

/// Standard deviation.
pub fn std_of(values: &[f32]) -> f64 {
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
    let square = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    (square / values.len() as f64).sqrt()
}

fn json(path: &Path) -> Value {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().expect("a list").clone()
}

fn string(value: &Value) -> String {
    value.as_str().expect("a string").to_owned()
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}
