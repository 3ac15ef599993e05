//! Models of random weights from a config alone: the same sizes as with files, finite logits, the
//! same numbers on every run and wherever the model is.

use std::sync::Arc;
use xserv::model::{ActivationFormat, KvFormat};

use serde_json::json;
use xserv::backend::cpu::CpuBackend;
use xserv::error::{ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::{LoadOptions, Model, PassLimits};

use crate::driver::{bits, cuda_context, load, load_on_cuda, Driver};
use crate::files::{Family, Store, TempDir, TestModel};

const IDS: [u32; 6] = [1, 5, 9, 13, 60, 2];

/// Every family, tied and untied, heads that lie apart on a device, and matrices of several pieces.
fn shapes() -> Vec<(&'static str, TestModel)> {
    let tied = |mut model: TestModel| {
        model.config["tie_word_embeddings"] = json!(true);
        model.tensors.retain(|tensor| tensor.name != "lm_head.weight");
        model
    };
    vec![
        ("qwen3", TestModel::qwen3(1)),
        ("tied qwen3", tied(TestModel::qwen3(1))),
        ("small qwen3", TestModel::small_qwen3(1)),
        ("llama", TestModel::qwen3(1).of(Family::Llama)),
        ("tied llama", tied(TestModel::wide_qwen3(1).of(Family::Llama))),
        ("qwen2", TestModel::qwen3(1).of(Family::Qwen2)),
        ("tied qwen2", tied(TestModel::wide_qwen3(1).of(Family::Qwen2))),
        ("qwen3 with experts", TestModel::qwen3(1).of(Family::Qwen3Moe)),
        ("tied qwen3 with experts", tied(TestModel::wide_qwen3(1).of(Family::Qwen3Moe))),
        ("gpt2", TestModel::gpt2(1)),
        ("tied gpt2", tied(TestModel::gpt2(1))),
    ]
}

/// Returns a folder with the config alone, which names an element type or not.
fn config_only(model: &TestModel, dtype: Option<&str>) -> TempDir {
    let mut config = model.config.clone();
    if let Some(dtype) = dtype {
        config["torch_dtype"] = dtype.into();
    }
    let dir = TempDir::new();
    dir.write("config.json", config.to_string());
    dir
}

fn options(dtype: Option<DType>) -> LoadOptions {
    LoadOptions { dtype, ..LoadOptions::default() }
}

fn random_on_cpu(path: &str, dtype: Option<DType>, num_threads: usize) -> Result<Model> {
    let backend = Arc::new(CpuBackend::new(num_threads)?);
    Model::open_without_weights(path)?.load(backend, &options(dtype), &mut |_| true)
}

fn logits(model: &Model) -> Vec<f32> {
    Driver::new(model, 2).logits(&IDS, usize::MAX)
}

/// Returns the root mean square of the differences, as a share of that of the numbers.
fn difference(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f32| f64::from(x).powi(2);
    let differences: f64 = found.iter().zip(expected).map(|(&a, &b)| square(a - b)).sum();
    (differences / expected.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

#[test]
fn sizes_are_those_of_a_model_with_files() {
    for (name, model) in shapes() {
        for (store, declared) in [(Store::F32, "float32"), (Store::BF16, "bfloat16")] {
            let (dir, files) = (config_only(&model, Some(declared)), model.write(store));
            let random = Model::open_without_weights(dir.str()).expect("a folder");
            let stored = Model::open(files.str()).expect("a folder");
            assert_eq!(random.warnings(), &[] as &[String]);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let host = |folder: &xserv::model::ModelFolder| {
                    folder.host_plan(dtype, KvFormat::Dense, ActivationFormat::AsComputed, 2, 64, 4)
                };
                assert_eq!(host(&random).unwrap(), host(&stored).unwrap(), "{name}");
                let limits = PassLimits::of_tokens(random.config(), 64);
                let device = |folder: &xserv::model::ModelFolder| {
                    folder.device_plan(dtype, KvFormat::Dense, &limits, false).expect("a plan")
                };
                assert_eq!(device(&random), device(&stored), "{name}");
            }
            let planned = random.weights_bytes(random.stored_dtype().unwrap()).unwrap();
            let random = random_on_cpu(dir.str(), None, 2).expect("a model");
            let stored = load(files.str(), None, 2);
            assert_eq!(random.dtype(), stored.dtype(), "{name}");
            assert_eq!(random.num_parameters(), stored.num_parameters(), "{name}");
            assert_eq!(random.weights_bytes(), stored.weights_bytes(), "{name}");
            assert_eq!(random.weights_bytes(), planned, "{name}");
        }
    }
}

#[test]
fn weights_are_bf16_unless_the_config_or_the_caller_says_otherwise() {
    let model = TestModel::qwen3(1);
    for (declared, expected) in
        [(None, DType::BF16), (Some("float16"), DType::F16), (Some("float32"), DType::F32)]
    {
        let dir = config_only(&model, declared);
        let load = |dtype| random_on_cpu(dir.str(), dtype, 1).expect("a model").dtype();
        assert_eq!(load(None), expected);
        assert_eq!(load(Some(DType::F16)), DType::F16);
    }
}

#[test]
fn logits_are_finite_reproducible_and_of_the_size_of_real_ones() {
    for (name, model) in shapes() {
        let dir = config_only(&model, None);
        let logits = |dtype, num_threads| {
            logits(&random_on_cpu(dir.str(), Some(dtype), num_threads).expect("a model"))
        };
        let exact = logits(DType::F32, 2);
        assert!(exact.iter().all(|x| x.is_finite()), "{name}");
        let mean = exact.iter().sum::<f32>() / exact.len() as f32;
        let square = exact.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / exact.len() as f32;
        // The rows of the output matrix have a length of about 1, and hidden states one of the
        // square root of their number; where they are tied the embedding of the token itself stands
        // out.
        assert!((0.5..2.0).contains(&square.sqrt()), "{name}: {}", square.sqrt());
        assert!(mean.abs() < 0.3, "{name}: {mean}");
        assert_eq!(bits(&logits(DType::F32, 1)), bits(&exact), "{name}: on another run");
        for (dtype, bar) in [(DType::F16, 0.01), (DType::BF16, 0.06)] {
            let found = difference(&logits(dtype, 2), &exact);
            assert!(found < bar, "{name} as {dtype}: {found}");
        }
    }
}

/// Each token has a row of its own, and each position too: nothing was filled twice with the same
/// numbers or left zero.
#[test]
fn all_weights_are_different() {
    for (name, model) in shapes() {
        let dir = config_only(&model, Some("float32"));
        let model = random_on_cpu(dir.str(), None, 2).expect("a model");
        let logits = Driver::new(&model, 2).logits(&[7, 8, 7], usize::MAX);
        let rows: Vec<&[f32]> = logits.chunks(model.config().vocab_size).collect();
        for (a, b) in [(0, 1), (1, 2), (0, 2)] {
            assert!(difference(rows[a], rows[b]) > 1e-3, "{name}: rows {a} and {b}");
        }
        let mut sorted = rows[0].to_vec();
        sorted.sort_by(f32::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[0] < pair[1]), "{name}: equal rows");
    }
}

#[test]
fn files_beside_the_config_are_not_read() {
    let model = TestModel::qwen3(1);
    let dir = config_only(&model, Some("float32"));
    let alone = bits(&logits(&random_on_cpu(dir.str(), None, 1).expect("a model")));
    dir.write("model.safetensors", "no safetensors file");
    assert!(Model::open(dir.str()).is_err());
    assert_eq!(bits(&logits(&random_on_cpu(dir.str(), None, 1).expect("a model"))), alone);
}

#[test]
fn a_config_is_checked_as_with_files() {
    let mut model = TestModel::qwen3(1);
    model.config["architectures"] = json!(["NobodysForCausalLM"]);
    let dir = config_only(&model, None);
    let error = Model::open_without_weights(dir.str()).expect_err("not supported");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let empty = TempDir::new();
    let error = Model::open_without_weights(empty.str()).expect_err("no config");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn progress_goes_from_zero_to_one_and_can_cancel() {
    let dir = config_only(&TestModel::gpt2(1), None);
    let load = |progress: &mut dyn FnMut(f32) -> bool| {
        let backend = Arc::new(CpuBackend::new(2).expect("threads"));
        Model::open_without_weights(dir.str())?.load(backend, &options(None), progress)
    };
    let mut seen = Vec::new();
    load(&mut |fraction| {
        seen.push(fraction);
        true
    })
    .expect("loads");
    assert_eq!((seen.first(), seen.last()), (Some(&0.0), Some(&1.0)));
    assert!(seen.windows(2).all(|pair| pair[0] <= pair[1]), "{seen:?}");
    // Only the vectors after the last matrix, which are not reported, were not counted before the end.
    assert!((0.99..=1.0).contains(&seen[seen.len() - 2]), "{seen:?}");
    for stop_at in 1..=seen.len() {
        let mut call = 0;
        let error = load(&mut |_| {
            call += 1;
            call < stop_at
        })
        .expect_err("was cancelled");
        assert_eq!((error.kind(), call), (ErrorKind::Cancelled, stop_at));
    }
}

/// The device fills its own memory: the numbers are those of the CPU, the gaps between its heads
/// stay zero, and it takes no more memory than with files.
#[test]
fn a_device_has_the_weights_of_the_cpu() {
    for (name, model) in shapes() {
        for (dtype, bar) in [(DType::F32, 1e-4), (DType::BF16, 0.06)] {
            let Some(context) = cuda_context() else { return };
            let dir = config_only(&model, None);
            let folder = Model::open_without_weights(dir.str()).expect("a folder");
            let limits = PassLimits::of_tokens(folder.config(), 64);
            let planned = folder
                .device_plan(dtype, KvFormat::Dense, &limits, false)
                .expect("a plan")
                .weights_bytes;
            let backend = CpuBackend::new(2).expect("threads");
            let random = folder
                .load_on_device(context.clone(), &backend, &options(Some(dtype)), &mut |_| true)
                .expect("a model");
            assert_eq!(random.weights_bytes(), planned, "{name}");
            let peak = context.memory_stats().peak;
            let expected = logits(&random_on_cpu(dir.str(), Some(dtype), 2).expect("a model"));
            let found = difference(&logits(&random), &expected);
            assert!(found < bar, "{name} as {dtype}: {found}");
            let Some(other) = cuda_context() else { return };
            let files = model.write(Store::BF16);
            let stored = load_on_cuda(files.str(), Some(dtype), other.clone()).expect("a model");
            assert_eq!(random.num_parameters(), stored.num_parameters(), "{name}");
            assert_eq!(peak, other.memory_stats().peak, "{name}: memory");
        }
    }
}
