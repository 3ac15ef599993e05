//! Weights that are quantised while they are read.

use std::sync::Arc;

use xserv::backend::cpu::CpuBackend;
use xserv::error::{ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::{LoadOptions, Model, ModelFolder, PassLimits, WeightStorage};

use crate::driver::{argmax, bits, cuda_context, load, Driver};
use crate::files::{Family, Store, TempDir, TestModel};
use crate::golden;
use crate::packing;
use crate::quantised_models::relative_rms;

const TRAINED: &str = "tiny-qwen3";
const INT8: WeightStorage = WeightStorage::Int8;
const INT4: WeightStorage = WeightStorage::Int4;
/// Bars on the difference of logits, relative to the root of their mean square: of a trained model, and of random
/// weights, which make more of a difference from layer to layer.
const INT8_BARS: [f64; 2] = [0.02, 0.02];
const INT4_BARS: [f64; 2] = [0.15, 0.30];

fn open(path: &str, weights: WeightStorage, group_size: usize) -> Result<ModelFolder> {
    let mut headers = Model::read_headers(path)?;
    if let Some(format) = weights.format(group_size)? {
        headers.quantise(format);
    }
    headers.settle(None, &mut |_| true)
}

fn quantised(
    path: &str,
    dtype: DType,
    weights: WeightStorage,
    num_threads: usize,
) -> Result<Model> {
    let backend = Arc::new(CpuBackend::new(num_threads)?);
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    open(path, weights, 0)?.load(backend, &options, &mut |_| true)
}

/// The repository's model with a prompt of its kind, and made ones; two have rows that are no whole groups.
fn models() -> Vec<(&'static str, TempDir, Vec<u32>)> {
    let mut found = Vec::new();
    if let Some(golden) = golden::tiny_qwen3() {
        let prompt = golden.prompts.iter().find(|p| p.name == "chat_memory").expect("a prompt");
        let dir = packing::read(golden.model_path()).write(Store::BF16);
        found.push((TRAINED, dir, prompt.ids.clone()));
    }
    let made = [
        ("Llama", TestModel::wide_qwen3(3).of(Family::Llama), Store::F32),
        ("Qwen3 of 24", TestModel::qwen3(3), Store::F16),
        ("GPT-2", TestModel::wide_gpt2(3), Store::F32),
        ("GPT-2 of 30", TestModel::gpt2(3), Store::BF16),
    ];
    let prompt: Vec<u32> = (0..60).map(|i| i * 37 % 70).collect();
    found.extend(made.map(|(name, model, store)| (name, model.write(store), prompt.clone())));
    found
}

#[test]
fn quantised_logits_are_close_to_those_of_the_numbers() {
    for (name, dir, prompt) in models() {
        let logits = |model: &Model| Driver::new(model, 8).logits(&prompt, usize::MAX);
        let want = logits(&load(dir.str(), Some(DType::F32), 2));
        for (weights, bars) in [(INT8, INT8_BARS), (INT4, INT4_BARS)] {
            let bar = bars[usize::from(name != TRAINED)];
            let model = quantised(dir.str(), DType::F32, weights, 2).expect("a model");
            let off = relative_rms(&logits(&model), &want);
            println!("{name}, {weights:?}: logits differ by {:.2} %", 100.0 * off);
            assert!(off > 1e-5 && off < bar, "{name}, {weights:?}: {off:.2e} (bar {bar})");
        }
    }
}

#[test]
fn quantised_logits_on_cuda_are_close_to_those_of_the_numbers() {
    if cuda_context().is_none() {
        return;
    }
    for (name, dir, prompt) in models() {
        let logits = |model: &Model| Driver::new(model, 8).logits(&prompt, usize::MAX);
        let want = logits(&load(dir.str(), Some(DType::F32), 2));
        for (weights, bars) in [(INT8, INT8_BARS), (INT4, INT4_BARS)] {
            let bar = bars[usize::from(name != TRAINED)];
            // What bf16 loses comes on top.
            for (dtype, more) in [(DType::F32, 0.0), (DType::BF16, 0.03)] {
                let context = cuda_context().expect("there is a device");
                let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
                let backend = CpuBackend::new(2).expect("threads");
                let folder = open(dir.str(), weights, 0).expect("a folder");
                let limits = PassLimits::of_tokens(folder.config(), 64);
                let plan = folder.device_plan(dtype, &limits, false).expect("a plan");
                let model = folder
                    .load_on_device(context, &backend, &options, &mut |_| true)
                    .unwrap_or_else(|e| panic!("{name}, {weights:?}, {dtype}: {e}"));
                assert_eq!(
                    plan.weights_bytes,
                    model.weights_bytes(),
                    "{name}, {weights:?}, {dtype}"
                );
                let off = relative_rms(&logits(&model), &want);
                println!(
                    "{name}, {weights:?} on CUDA, {dtype}: logits differ by {:.2} %",
                    100.0 * off
                );
                assert!(off < bar + more, "{name}, {weights:?} on CUDA, {dtype}: {off:.2e}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_makes_the_same_bits_in_the_memory_that_was_planned() {
    for (name, dir, prompt) in models() {
        for weights in [INT8, INT4] {
            let folder = open(dir.str(), weights, 0).expect("a folder");
            let planned = folder.weights_bytes(DType::F32).expect("a plan");
            let as_stored = Model::open(dir.str()).expect("a folder");
            assert!(planned < as_stored.weights_bytes(DType::F32).expect("a plan"), "{name}");
            let mut first = None;
            for num_threads in [1, 2, 5] {
                let model =
                    quantised(dir.str(), DType::F32, weights, num_threads).expect("a model");
                assert_eq!(planned, model.weights_bytes(), "{name}, {weights:?}");
                let got = bits(&Driver::new(&model, 8).logits(&prompt, usize::MAX));
                assert!(
                    *first.get_or_insert_with(|| got.clone()) == got,
                    "{name}, {weights:?}: other bits with {num_threads} threads"
                );
            }
        }
    }
}

#[test]
fn sizes_of_groups_that_cannot_be_are_refused() {
    for weights in [INT8, INT4] {
        for size in [1, 16, 33, 100, (1 << 20) + 32, usize::MAX] {
            let error = weights.format(size).expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            for words in [size.to_string().as_str(), "multiple of 32"] {
                assert!(error.message().contains(words), "{error} does not say {words}");
            }
        }
        for size in [0, 32, 64, 96, 1 << 20] {
            assert!(weights.format(size).expect("a good size").is_some());
        }
    }
    assert_eq!(WeightStorage::AsStored.format(0).expect("nothing to do"), None);
    let error = WeightStorage::AsStored.format(128).expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("not quantised"), "{error}");
}

/// By the name of the tensor, whichever way it lies in the file.
#[test]
fn numbers_that_are_not_finite_are_refused() {
    let (rows, columns) = (TestModel::qwen3(3), TestModel::gpt2(3));
    for (model, name) in [
        (&rows, "model.layers.1.mlp.up_proj.weight"),
        (&columns, "transformer.h.1.mlp.c_fc.weight"),
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut model = model.clone();
            let tensor = model.tensors.iter_mut().find(|t| t.name == name).expect("a tensor");
            tensor.values[77] = value;
            let dir = model.write(Store::BF16);
            for weights in [INT8, INT4] {
                let error =
                    quantised(dir.str(), DType::F32, weights, 2).expect_err("must be refused");
                assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
                for words in [name, "not finite"] {
                    assert!(error.message().contains(words), "{error} does not say {words}");
                }
            }
        }
    }
}

/// The logarithms of the probabilities of a row.
fn log_probs(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
}

/// What a trained model loses: the likeliest token, and the divergence of the probabilities.
#[test]
fn a_trained_model_keeps_its_tokens() {
    let Some(golden) = golden::tiny_qwen3() else { return };
    let path = golden.model_path();
    let all = |model: &Model| -> Vec<Vec<f32>> {
        let mut driver = Driver::new(model, 64);
        let vocab_size = model.config().vocab_size;
        // Random tokens have no likely next one.
        let prompts = golden.prompts.iter().filter(|prompt| prompt.name != "random_ids");
        let mut rows = Vec::new();
        for prompt in prompts {
            rows.extend(
                driver.logits(&prompt.ids, usize::MAX).chunks(vocab_size).map(<[f32]>::to_vec),
            );
        }
        for greedy in &golden.greedy {
            let ids = [&greedy.prompt_ids[..], &greedy.ids[..]].concat();
            let made = driver.logits(&ids, usize::MAX);
            let of_answer = made.chunks(vocab_size).skip(greedy.prompt_ids.len());
            rows.extend(of_answer.map(<[f32]>::to_vec));
        }
        rows
    };
    let want = all(&load(path, Some(DType::BF16), 2));
    for (weights, group_size, least_agreement, most_divergence) in [
        (INT8, 128, 0.97, 1e-3),
        (INT4, 32, 0.90, 0.05),
        (INT4, 64, 0.88, 0.08),
        (INT4, 128, 0.85, 0.1),
    ] {
        let backend = Arc::new(CpuBackend::new(2).expect("threads"));
        let options = LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() };
        let model = open(path, weights, group_size)
            .and_then(|folder| folder.load(backend, &options, &mut |_| true))
            .expect("a model");
        let got = all(&model);
        let agreed = want.iter().zip(&got).filter(|(w, g)| argmax(w) == argmax(g)).count();
        let divergence: f64 = want
            .iter()
            .zip(&got)
            .map(|(w, g)| {
                let (w, g) = (log_probs(w), log_probs(g));
                w.iter().zip(&g).map(|(w, g)| w.exp() * (w - g)).sum::<f64>()
            })
            .sum::<f64>()
            / want.len() as f64;
        let agreement = agreed as f64 / want.len() as f64;
        println!(
            "{weights:?} in groups of {group_size}: {agreed} of {} likeliest tokens ({:.1} %), KL {divergence:.5}",
            want.len(),
            100.0 * agreement
        );
        assert!(agreement >= least_agreement && divergence <= most_divergence);
    }
}
