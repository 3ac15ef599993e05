//! Configs that declare the output matrix tied, with files that hold one all the same: what is counted and
//! planned is what is loaded.

use serde_json::{json, Map, Value};
use xserv::backend::cpu::CpuBackend;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::{inspect, MemoryNeeds, Model, PassLimits};
use xserv::model::{ActivationFormat, KvFormat};

use crate::driver::{cuda_context, load, load_on_cuda};
use crate::files::{cpu_seconds, raw_safetensors, Family, Random, Store, TempDir, TestModel};

/// Entries of the vocabulary of [`declared_tied`]: an embedding of two pieces, `[70_001, 24]` in f32.
const NUM_TOKENS: usize = 70_001;

/// The relation of the stored output matrix to the embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Output {
    Absent,
    Equal,
    /// In this element alone.
    Differs(usize),
}

/// Returns a model that is declared tied, as f32, and the numbers in its tensors.
pub fn declared_tied(mut model: TestModel, embedding: &str, output: Output) -> (TempDir, u64) {
    model.config["tie_word_embeddings"] = json!(true);
    model.config["vocab_size"] = json!(NUM_TOKENS);
    let columns = model.tensor(embedding).shape[1];
    let mut random = Random(5);
    let values: Vec<f32> = (0..NUM_TOKENS * columns).map(|_| random.signed() as f32).collect();
    model.tensors.retain(|tensor| output != Output::Absent || tensor.name != "lm_head.weight");
    for tensor in &mut model.tensors {
        if tensor.name == embedding || tensor.name == "lm_head.weight" {
            tensor.shape = vec![NUM_TOKENS, columns];
            tensor.values = values.clone();
        }
        if let (Output::Differs(index), "lm_head.weight") = (output, tensor.name.as_str()) {
            tensor.values[index] += 1.0;
        }
    }
    let numbers: usize = model.tensors.iter().map(|tensor| tensor.values.len()).sum();
    (model.write(Store::F32), numbers as u64)
}

/// Returns the counts of an opened folder: parameters, and memory on the host and on a device.
fn counts(dir: &TempDir) -> (u64, MemoryNeeds, MemoryNeeds) {
    let report = inspect(dir.str()).expect("a report");
    assert!(report.supported, "{:?}", report.reason);
    let folder = Model::open(dir.str()).expect("opens");
    let dtype = folder.stored_dtype().expect("a type");
    let on_host = folder
        .host_plan(dtype, KvFormat::Dense, ActivationFormat::AsComputed, 2, 64, 1)
        .expect("a plan");
    let limits = PassLimits::of_tokens(folder.config(), 64);
    let on_device = folder.device_plan(dtype, KvFormat::Dense, &limits, false).expect("a plan");
    assert_eq!(report.weights_bytes, Some(on_host.weights_bytes));
    (report.num_parameters.expect("a number"), on_host, on_device)
}

#[test]
fn what_is_counted_is_what_is_loaded() {
    for (model, embedding) in [
        (TestModel::qwen3(1), "model.embed_tokens.weight"),
        (TestModel::qwen3(1).of(Family::Llama), "model.embed_tokens.weight"),
        (TestModel::qwen3(1).of(Family::Qwen2), "model.embed_tokens.weight"),
        (TestModel::qwen3(1).of(Family::Qwen3Moe), "model.embed_tokens.weight"),
        (TestModel::gpt2(1), "transformer.wte.weight"),
    ] {
        let (absent, numbers) = declared_tied(model.clone(), embedding, Output::Absent);
        let tied = counts(&absent);
        assert_eq!(tied.0, numbers);
        let last = NUM_TOKENS * model.tensor(embedding).shape[1] - 1;
        let outputs = [
            Output::Absent,
            Output::Equal,
            Output::Differs(0),
            Output::Differs(last / 2),
            Output::Differs(last),
        ];
        for output in outputs {
            let (dir, numbers) = declared_tied(model.clone(), embedding, output);
            let found = counts(&dir);
            if let Output::Differs(_) = output {
                assert_eq!(found.0, numbers, "{output:?}");
                let more = 4 * (last as u64 + 1);
                for (with, without) in [(found.1, tied.1), (found.2, tied.2)] {
                    assert!(with.weights_bytes >= without.weights_bytes + more, "{output:?}");
                }
            } else {
                assert_eq!(found, tied, "{output:?}");
            }
            let loaded = load(dir.str(), None, 2);
            assert_eq!(loaded.num_parameters(), found.0, "{output:?}");
            assert_eq!(loaded.weights_bytes(), found.1.weights_bytes, "{output:?}");
            if let Some(context) = cuda_context() {
                let loaded = load_on_cuda(dir.str(), None, context).expect("loads");
                assert_eq!(loaded.num_parameters(), found.0, "{output:?}");
                assert_eq!(loaded.weights_bytes(), found.2.weights_bytes, "{output:?}");
            }
        }
    }
}

/// An output matrix of its own counts for the element type that most numbers are stored in, a copy does not.
#[test]
fn the_stored_type_is_that_of_what_is_loaded() {
    let columns = 24;
    let mut model = TestModel::qwen3(1);
    let is_tokens = |name: &str| name == "lm_head.weight" || name == "model.embed_tokens.weight";
    let others = model.tensors.iter().filter(|tensor| !is_tokens(&tensor.name));
    let num_others: usize = others.map(|tensor| tensor.values.len()).sum();
    // Two such matrices in bf16 are more than all the others, which are in f16, and one is less.
    let vocab = num_others * 3 / 4 / columns;
    model.config["tie_word_embeddings"] = json!(true);
    model.config["vocab_size"] = json!(vocab);
    for (output, dtype) in [(0.5, DType::F16), (0.25, DType::BF16)] {
        let mut header = Map::new();
        let mut data = Vec::new();
        for tensor in &model.tensors {
            let (store, shape, value) = match tensor.name.as_str() {
                "lm_head.weight" => (Store::BF16, vec![vocab, columns], output),
                name if is_tokens(name) => (Store::BF16, vec![vocab, columns], 0.5),
                _ => (Store::F16, tensor.shape.clone(), 0.5),
            };
            let begin = data.len();
            data.extend(store.bytes(&vec![value; shape.iter().product()]));
            header.insert(
                tensor.name.clone(),
                json!({"dtype": store.name(), "shape": shape, "data_offsets": [begin, data.len()]}),
            );
        }
        let dir = TempDir::new();
        dir.write("config.json", model.config.to_string());
        let header = Value::Object(header).to_string();
        dir.write("model.safetensors", raw_safetensors(&header, &data));
        let (_, on_host, _) = counts(&dir);
        assert_eq!(inspect(dir.str()).expect("a report").dtype, Some(dtype));
        let loaded = load(dir.str(), None, 1);
        assert_eq!((loaded.dtype(), loaded.weights_bytes()), (dtype, on_host.weights_bytes));
    }
}

/// The comparison can be cancelled, and is made of what must be read alone.
#[test]
fn a_comparison_can_be_cancelled() {
    let cases = [(Output::Absent, 0), (Output::Differs(0), 0), (Output::Equal, 1)];
    for (output, num_calls) in cases {
        for backend in [None, Some(CpuBackend::new(2).expect("a backend"))] {
            let (dir, _) = declared_tied(TestModel::qwen3(1), "model.embed_tokens.weight", output);
            let headers = Model::read_headers(dir.str()).expect("headers");
            let mut seen = Vec::new();
            let settled = headers.settle(backend.as_ref(), &mut |fraction| {
                seen.push(fraction);
                false
            });
            assert_eq!(seen, vec![0.0; num_calls], "{output:?}");
            match settled {
                Ok(_) => assert_eq!(num_calls, 0, "{output:?}"),
                Err(error) => assert_eq!((error.kind(), num_calls), (ErrorKind::Cancelled, 1)),
            }
        }
    }
}

#[test]
fn a_file_that_changes_before_the_comparison() {
    let (dir, _) = declared_tied(TestModel::qwen3(1), "model.embed_tokens.weight", Output::Equal);
    let headers = Model::read_headers(dir.str()).expect("headers");
    dir.write("model.safetensors", "something else");
    let error = headers.settle(None, &mut |_| true).expect_err("another file");
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.message().contains("model.safetensors"), "{error}");
}

/// A sparse file costs its author nothing, so that matrices beyond all that exist are not compared.
#[test]
fn matrices_of_no_end_are_not_compared() {
    let (hidden, vocab) = (1032_usize, 1_usize << 22); // 8.06 GiB in bf16
    let mut model = TestModel::qwen3_of(1, 8, 8);
    for (name, value) in [("hidden_size", hidden), ("vocab_size", vocab)] {
        model.config[name] = json!(value);
    }
    model.config["tie_word_embeddings"] = json!(true);
    let mut header = Map::new();
    let mut end = 0;
    for tensor in &model.tensors {
        let is_tokens = tensor.name.contains("embed_tokens") || tensor.name == "lm_head.weight";
        let shape: Vec<usize> = match is_tokens {
            true => vec![vocab, hidden],
            false => tensor.shape.iter().map(|&n| if n == 8 { hidden } else { n }).collect(),
        };
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        header.insert(tensor.name.clone(), entry);
    }
    model.config["intermediate_size"] = json!(hidden);
    let dir = TempDir::new();
    dir.write("config.json", model.config.to_string());
    let start = raw_safetensors(&Value::Object(header).to_string(), b"");
    dir.write("model.safetensors", &start);
    let file = std::fs::File::options().write(true).open(dir.path().join("model.safetensors"));
    let file = file.expect("the file is there");
    if let Err(error) = file.set_len((start.len() + end) as u64) {
        println!("skipped: no sparse file of {end} bytes here ({error})");
        return;
    }
    let begin = cpu_seconds();
    let report = inspect(dir.str()).expect("a report");
    let seconds = cpu_seconds() - begin;
    assert!(report.supported, "{:?}", report.reason);
    assert_eq!(report.num_parameters, Some(end as u64 / 2));
    assert!(seconds < 0.5, "{seconds} s");
}
