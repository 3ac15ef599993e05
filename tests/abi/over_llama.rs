//! The tests of this binary once more, over a Llama.
//!
//! Most tests load the model of this repository, a Qwen3. It becomes a Llama that writes nearly the
//! same texts when its norms of heads are replaced by what they do on average: the norms' weights
//! and a number for each head go into the rows of the projections, which are computed before the
//! rotation as the norms are. So the same stories, stop strings and end tokens serve all tests, and
//! nothing has to be trained or stored.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::client::{root, TEST_MODEL};
use crate::cuda::{shared_cuda, whole_cuda};
use crate::files::{raw_safetensors, TempDir};

/// 1 / rms of the projections' outputs for each head of queries and of keys, by layer: the
/// geometric mean over the prompts and answers of tests/golden/tiny-qwen3.
const QUERY_SCALES: [[f32; 6]; 6] = [
    [2.092, 2.174, 2.189, 2.132, 2.246, 2.171],
    [0.996, 0.965, 0.993, 0.882, 0.878, 0.903],
    [0.561, 0.614, 0.640, 0.669, 0.633, 0.596],
    [0.677, 0.654, 0.652, 0.603, 0.636, 0.593],
    [0.596, 0.562, 0.564, 0.648, 0.662, 0.609],
    [0.476, 0.516, 0.484, 0.484, 0.490, 0.466],
];
const KEY_SCALES: [[f32; 2]; 6] = [
    [2.072, 2.074],
    [0.837, 0.890],
    [0.481, 0.533],
    [0.517, 0.481],
    [0.418, 0.503],
    [0.388, 0.426],
];

/// What has nothing to run over another model: it compares tiny-qwen3 with Transformers' own
/// results or with what is known of it, brings models of its own, or looks at files of the
/// repository.
const OTHERS: &[&str] = &[
    "arguments::inspection_of_the_repository_model",
    "begin_token::",
    "families::",
    "golden::",
    "guide::",
    "header::",
    "house::",
    "layering::",
    "over_llama::",
    "padding::",
    "structs::",
    "symbols::",
];

/// A safetensors file of bf16: its tensors in their order, by name.
struct Weights(Vec<(String, Vec<usize>, Vec<half::bf16>)>);

impl Weights {
    fn read(bytes: &[u8]) -> Weights {
        let file = safetensors::SafeTensors::deserialize(bytes).expect("a safetensors file");
        let tensor = |(name, view): (String, safetensors::tensor::TensorView)| {
            assert_eq!(view.dtype(), safetensors::Dtype::BF16);
            let pairs = view.data().chunks_exact(2);
            let values = pairs.map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]));
            (name, view.shape().to_vec(), values.collect())
        };
        Weights(file.tensors().into_iter().map(tensor).collect())
    }

    fn take(&mut self, name: &str) -> Vec<half::bf16> {
        let found = self.0.iter().position(|(other, ..)| other == name);
        self.0.remove(found.unwrap_or_else(|| panic!("no tensor {name}"))).2
    }

    /// Folds a norm of heads into the projection before it: row d of head h becomes `scales[h] *
    /// norm[d]` times itself.
    fn fold(&mut self, attention: &str, letter: char, scales: &[f32]) {
        let norm = self.take(&format!("{attention}.{letter}_norm.weight"));
        let projection = format!("{attention}.{letter}_proj.weight");
        let found = self.0.iter_mut().find(|(name, ..)| *name == projection);
        let (_, shape, values) = found.unwrap_or_else(|| panic!("no tensor {projection}"));
        assert_eq!(shape[0], scales.len() * norm.len());
        for (row, values) in values.chunks_exact_mut(shape[1]).enumerate() {
            let factor = scales[row / norm.len()] * norm[row % norm.len()].to_f32();
            values.iter_mut().for_each(|x| *x = half::bf16::from_f32(x.to_f32() * factor));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, shape, values) in &self.0 {
            let begin = data.len();
            data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
            let entry =
                json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name.clone(), entry);
        }
        raw_safetensors(&Value::Object(header).to_string(), &data)
    }
}

/// A folder with the Llama.
fn tiny_llama() -> TempDir {
    let source = root().join("examples/models/tiny-qwen3");
    let read = |name: &str| std::fs::read(source.join(name)).expect("a file of tiny-qwen3");
    let folder = TempDir::new();
    for name in
        ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    {
        folder.write(name, read(name));
    }
    let mut config: Value = serde_json::from_slice(&read("config.json")).expect("JSON");
    config["architectures"] = json!(["LlamaForCausalLM"]);
    config["model_type"] = json!("llama");
    folder.write("config.json", config.to_string());
    let mut weights = Weights::read(&read("model.safetensors"));
    for (layer, (queries, keys)) in QUERY_SCALES.iter().zip(&KEY_SCALES).enumerate() {
        let attention = format!("model.layers.{layer}.self_attn");
        weights.fold(&attention, 'q', queries);
        weights.fold(&attention, 'k', keys);
    }
    folder.write("model.safetensors", weights.bytes());
    folder
}

/// The longest that the tests may take together, twenty times what they do: a test that hangs is named by
/// its own process, which says after a minute which tests still run.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs tests of this binary over a model, and returns how many passed.
fn run_over(folder: &TempDir, arguments: &[&str]) -> u32 {
    let [said, errors] = ["stdout", "stderr"].map(|name| folder.path().join(name));
    let file = |path| File::create(path).expect("a file");
    let mut tests = Command::new(std::env::current_exe().expect("this binary has a path"));
    tests.args(arguments).env(TEST_MODEL, folder.path()).stdin(Stdio::null());
    let mut child = tests.stdout(file(&said)).stderr(file(&errors)).spawn().expect("a process");
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break Some(status);
        }
        if began.elapsed() > LIMIT {
            child.kill().and_then(|()| child.wait()).expect("a child");
            break None;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let read = |path| std::fs::read(path).expect("what the tests said");
    let (text, errors) = (read(&said), read(&errors));
    let (text, errors) = (String::from_utf8_lossy(&text), String::from_utf8_lossy(&errors));
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {text}{errors}");
    let summary = text.lines().find_map(|line| line.strip_prefix("test result: ok. "));
    println!("over a Llama: {}", summary.unwrap_or_default());
    let passed = summary.and_then(|line| line.split(' ').next()?.parse().ok());
    passed.unwrap_or_else(|| panic!("no summary in {text}"))
}

#[test]
fn every_test_of_the_engine_runs_over_a_llama_too() {
    let folder = tiny_llama();
    let others: Vec<&str> = OTHERS.iter().flat_map(|module| ["--skip", module]).collect();
    // Tests of this process that look at all memory of a GPU wait until those are done.
    let device = shared_cuda();
    assert!(run_over(&folder, &[&others[..], &["--skip", "memory::"]].concat()) >= 80);
    drop(device);
    // And these look at all of it themselves.
    let _device = whole_cuda();
    assert!(run_over(&folder, &["memory::"]) >= 4);
}

/// The Llama writes what the tests need: a story that goes on, an answer that ends by itself.
#[test]
fn the_llama_writes_stories_and_ends() {
    use crate::client::*;
    let folder = tiny_llama();
    let model = Model::open(folder.path());
    let prompt = model.tokenize("Once upon a time").expect("ids");
    let story = model.generate(&greedy(&prompt, 40)).expect("a text");
    assert!(story.text.starts_with(", a small "), "{:?}", story.text);
    assert_eq!(story.ids.len(), 40);
}
