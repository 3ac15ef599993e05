//! Reads the reference data of models: the formats are described in the README beside the shared data, and in
//! tests/golden/families/generate.py.

#![allow(dead_code)] // each test binary uses its part

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::{Dtype, SafeTensors};
use serde_json::{json, Value};

use crate::files::{safetensors_bytes, Random, Store, TempDir, TestTensor};

/// A prompt of `prompts.json`.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    /// The positions that there are logits of, in ascending order.
    pub rows: Vec<usize>,
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

/// An entry of `bf16.json`: what Transformers loses in bfloat16, or in float16.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    pub logits_std: f64,
    pub max_abs_diff: f64,
    pub rms_diff: f64,
}

/// A model and its references.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    model: ModelSource,
    pub refs_dir: PathBuf,
    pub prompts: Vec<Prompt>,
    pub greedy: Vec<Greedy>,
    pub bf16: HashMap<String, Loss>,
    /// The loss of Transformers in float16, where it was measured.
    pub f16: HashMap<String, Loss>,
    /// f32 `[rows, vocab_size]` by the prompt's name.
    pub logits: HashMap<String, Vec<f32>>,
}

/// The source of a model's folder.
#[derive(Debug)]
enum ModelSource {
    Folder(PathBuf),
    /// Written when it is first asked for.
    Made(Box<FamilyModel>, OnceLock<TempDir>),
}

/// A model of tests/golden/families, whose weights follow from its seed.
#[derive(Debug)]
struct FamilyModel {
    config: Value,
    generation_config: Option<Value>,
    /// `{name, shape, scale, offset}` of every tensor.
    tensors: Vec<Value>,
    num_shards: usize,
    seed: u64,
    store: Store,
    /// The checksum of the stored bits, by which the weights are known to be those of the
    /// references.
    checksum: String,
}

/// A tensor of a reference file.
#[derive(Debug)]
pub struct RefTensor {
    pub shape: Vec<usize>,
    pub f32s: Vec<f32>,
    pub i32s: Vec<i32>,
}

/// Returns the folder with the shared references; `None`, with a message, where it is not there.
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

/// Returns the models with references that this machine has: the shared ones, the repository's own,
/// and one seed of each configuration of the families Llama, Mistral and Qwen2.
pub fn all() -> Vec<Golden> {
    let mut found = trained();
    found.extend(families());
    found
}

/// One seed of each configuration of the families Llama, Mistral and Qwen2. They lie on disk for as
/// long as they are kept.
pub fn families() -> Vec<Golden> {
    let one_of = |(index, folder): (usize, &PathBuf)| {
        let mut seeds = read_family(folder);
        // Another seed for each: weights that are stored as bf16, f16 and f32.
        let chosen = index % seeds.len();
        seeds.swap_remove(chosen)
    };
    family_folders().iter().enumerate().map(one_of).collect()
}

/// The same with every seed.
pub fn every_seed() -> Vec<Golden> {
    let mut found = trained();
    found.extend(family_folders().iter().flat_map(|folder| read_family(folder)));
    found
}

/// Returns the folder of the repository.
fn repository() -> &'static Path {
    // A test that was built elsewhere runs in the repository's folder.
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built_in.is_dir() {
        built_in
    } else {
        Path::new(".")
    }
}

/// Those whose weights were trained: the shared ones, and the repository's own.
fn trained() -> Vec<Golden> {
    let mut found = Vec::new();
    if let Some(dir) = shared_golden() {
        for name in [
            "qwen3-tiny-tied",
            "qwen3-tiny-untied",
            "qwen3-tiny-mha",
            "qwen3-moe-tiny",
            "gpt2-tiny",
        ] {
            let refs = dir.join("refs").join(name);
            found.push(Golden::read(name, &dir.join("models").join(name), &refs));
        }
        // The same weights under other names: the references are gpt2-tiny's.
        let name = "gpt2-tiny-hubnames";
        let refs = dir.join("refs/gpt2-tiny");
        found.push(Golden::read(name, &dir.join("models").join(name), &refs));
    }
    found.extend(tiny_qwen3());
    found
}

/// Returns the repository's own model.
pub fn tiny_qwen3() -> Option<Golden> {
    let (model, refs) = (
        repository().join("examples/models/tiny-qwen3"),
        repository().join("tests/golden/tiny-qwen3"),
    );
    if model.is_dir() && refs.is_dir() {
        return Some(Golden::read("tiny-qwen3", &model, &refs));
    }
    eprintln!("skipped: no {} with references", model.display());
    None
}

impl Golden {
    /// Whether tokens choose experts. Which they are may be in doubt in any 16-bit type, in rows of a prompt
    /// before those that are compared.
    pub fn has_experts(&self) -> bool {
        match &self.model {
            ModelSource::Folder(_) => self.name.contains("moe"),
            ModelSource::Made(model, _) => model.config.get("num_experts_per_tok").is_some(),
        }
    }

    /// Reads the references in `refs_dir` of the model in `model_dir`.
    pub fn read(name: &str, model_dir: &Path, refs_dir: &Path) -> Golden {
        let prompts: Vec<Prompt> = list(&json(&refs_dir.join("prompts.json")))
            .iter()
            .map(|entry| {
                let ids = ids(&entry["ids"]);
                Prompt { name: string(&entry["name"]), rows: (0..ids.len()).collect(), ids }
            })
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
                .map(|entry| (string(&entry["name"]), loss(entry)))
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
            model: ModelSource::Folder(model_dir.to_path_buf()),
            refs_dir: refs_dir.to_path_buf(),
            prompts,
            greedy,
            bf16,
            f16: HashMap::new(),
            logits,
        }
    }

    pub fn model_path(&self) -> &str {
        match &self.model {
            ModelSource::Folder(path) => path.to_str().expect("a UTF-8 path"),
            ModelSource::Made(model, folder) => {
                folder.get_or_init(|| model.write(&self.name)).str()
            }
        }
    }

    /// Returns the rows that there are references of, out of those of all positions of a prompt.
    pub fn kept(&self, prompt: &Prompt, logits: &[f32]) -> Vec<f32> {
        let vocab_size = logits.len() / prompt.ids.len();
        let rows = prompt.rows.iter().map(|row| &logits[row * vocab_size..][..vocab_size]);
        rows.collect::<Vec<_>>().concat()
    }
}

/// Returns the folders of tests/golden/families, in the order of their names.
fn family_folders() -> Vec<PathBuf> {
    let dir = repository().join("tests/golden/families");
    let Ok(entries) = std::fs::read_dir(&dir) else {
        eprintln!("skipped: no {}", dir.display());
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut found: Vec<PathBuf> = paths.filter(|path| path.join("config.json").is_file()).collect();
    found.sort();
    assert!(found.len() >= 12, "only {} models in {}", found.len(), dir.display());
    found
}

/// Every seed of a configuration.
fn read_family(folder: &Path) -> Vec<Golden> {
    let name = folder.file_name().and_then(|name| name.to_str()).expect("a UTF-8 name");
    let references = json(&folder.join("references.json"));
    let logits = tensors(&folder.join("logits.safetensors"));
    let generation_config = folder.join("generation_config.json");
    let models = list(&references["models"]);
    assert!(!models.is_empty(), "{name}: no models");
    let read = |model: &Value| {
        let seed = model["seed"].as_u64().expect("a seed");
        let mut golden = Golden {
            name: format!("{name} seed {seed}"),
            model: ModelSource::Made(
                Box::new(FamilyModel {
                    config: json(&folder.join("config.json")),
                    generation_config: generation_config
                        .is_file()
                        .then(|| json(&generation_config)),
                    tensors: list(&references["tensors"]),
                    num_shards: number(&references["shards"]) as usize,
                    seed,
                    store: Store::named(&string(&model["store"])),
                    checksum: string(&model["checksum"]),
                }),
                OnceLock::new(),
            ),
            refs_dir: folder.to_path_buf(),
            prompts: Vec::new(),
            greedy: Vec::new(),
            bf16: HashMap::new(),
            f16: HashMap::new(),
            logits: HashMap::new(),
        };
        for entry in list(&model["prompts"]) {
            let (name, prompt_ids) = (string(&entry["name"]), ids(&entry["ids"]));
            let rows = ids(&entry["rows"]).iter().map(|&row| row as usize).collect();
            let kept = logits[&format!("{seed}.{name}")].f32s.clone();
            golden.prompts.push(Prompt { name: name.clone(), ids: prompt_ids.clone(), rows });
            golden.greedy.push(Greedy {
                name: name.clone(),
                prompt_ids,
                ids: ids(&entry["greedy_ids"]),
                margins: list(&entry["margins"]).iter().map(|m| number(m) as f32).collect(),
            });
            golden.bf16.insert(name.clone(), loss(&entry["bf16"]));
            golden.f16.insert(name.clone(), loss(&entry["f16"]));
            golden.logits.insert(name, kept);
        }
        golden
    };
    models.iter().map(read).collect()
}

impl FamilyModel {
    /// Returns the weights that generate.py makes of the seed.
    fn weights(&self) -> Vec<TestTensor> {
        let made = |tensor: &Value| {
            let name = string(&tensor["name"]);
            let shape: Vec<usize> = ids(&tensor["shape"]).iter().map(|&n| n as usize).collect();
            let (scale, offset) = (number(&tensor["scale"]), number(&tensor["offset"]));
            let mut random = Random(fnv1a(format!("{}/{name}", self.seed).as_bytes()));
            let len = shape.iter().product();
            let values = (0..len).map(|_| (offset + scale * random.signed()) as f32).collect();
            TestTensor { name, shape, values }
        };
        self.tensors.iter().map(made).collect()
    }

    /// Writes the folder of the model `name`.
    fn write(&self, name: &str) -> TempDir {
        let tensors = self.weights();
        assert_eq!(checksum(&tensors, self.store), self.checksum, "{name}: other weights");
        let mut config = self.config.clone();
        for field in ["dtype", "torch_dtype"] {
            if config.get(field).is_some() {
                config[field] = self.store.long_name().into();
            }
        }
        let dir = TempDir::new();
        dir.write("config.json", config.to_string());
        if let Some(generation_config) = &self.generation_config {
            dir.write("generation_config.json", generation_config.to_string());
        }
        if self.num_shards == 1 {
            dir.write("model.safetensors", safetensors_bytes(&tensors, self.store));
            return dir;
        }
        let mut weight_map = serde_json::Map::new();
        let per_shard = tensors.len().div_ceil(self.num_shards);
        for (index, part) in tensors.chunks(per_shard).enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", index + 1, self.num_shards);
            dir.write(&file, safetensors_bytes(part, self.store));
            for tensor in part {
                weight_map.insert(tensor.name.clone(), file.as_str().into());
            }
        }
        let total: usize = tensors.iter().map(|t| self.store.bytes(&t.values).len()).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        dir.write("model.safetensors.index.json", index.to_string());
        dir
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64;
    bytes.iter().fold(start, |h, &byte| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the checksum of generate.py: of the stored bits, in the order of the tensors.
fn checksum(tensors: &[TestTensor], store: Store) -> String {
    let mut total = 0_u64;
    for tensor in tensors {
        let bytes = store.bytes(&tensor.values);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |w, &b| w << 8 | u64::from(b));
        let words = bytes.chunks_exact(bytes.len() / tensor.values.len()).map(word);
        let sum =
            words.zip(1_u64..).fold(0_u64, |sum, (word, i)| sum.wrapping_add(word.wrapping_mul(i)));
        total = total.wrapping_mul(31).wrapping_add(sum);
    }
    format!("{total:016x}")
}

fn loss(entry: &Value) -> Loss {
    Loss {
        logits_std: number(&entry["logits_std"]),
        max_abs_diff: number(&entry["max_abs_diff"]),
        rms_diff: number(&entry["rms_diff"]),
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
