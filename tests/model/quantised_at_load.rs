//! Weights that are quantised while they are read.

use std::sync::Arc;
use xserv::model::{ActivationFormat, KvFormat};

use serde_json::json;
use xserv::backend::cpu::CpuBackend;
use xserv::error::{ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::{LoadOptions, Model, ModelFolder, PassLimits, WeightStorage};
use xserv::ops::common::packed_matrix::PackedMatrix;
use xserv::ops::quantised::{Code, QuantisedPanels};

use crate::driver::{argmax, bits, cuda_context, load, Driver};
use crate::files::{Family, Store, TempDir, TestModel};
use crate::golden::{self, Golden};
use crate::packing;
use crate::quantised_models::relative_rms;

const TRAINED: &str = "tiny-qwen3";
/// The one whose tokens may choose other experts when its weights are rounded.
const EXPERTS: &str = "Qwen3-MoE";
pub const AS_STORED: WeightStorage = WeightStorage::AsStored;
pub const INT8: WeightStorage = WeightStorage::Int8;
pub const INT4: WeightStorage = WeightStorage::Int4;
/// Bars on the difference of logits, relative to the root of their mean square: of a trained model,
/// and of random weights, which make more of a difference from layer to layer.
const INT8_BARS: [f64; 2] = [0.02, 0.02];
const INT4_BARS: [f64; 2] = [0.15, 0.30];

fn open(path: &str, weights: WeightStorage, group_size: usize) -> Result<ModelFolder> {
    open_both(path, weights, group_size, WeightStorage::AsStored)
}

/// The same with the matrices of tokens as `embeddings` says.
pub fn open_both(
    path: &str,
    weights: WeightStorage,
    group_size: usize,
    embeddings: WeightStorage,
) -> Result<ModelFolder> {
    let mut headers = Model::read_headers(path)?;
    if let Some(format) = weights.format(group_size)? {
        headers.quantise(format);
    }
    if let Some(format) = embeddings.embeddings_format()? {
        headers.quantise_tokens(format);
    }
    headers.settle(None, &mut |_| true)
}

fn quantised(
    path: &str,
    dtype: DType,
    weights: WeightStorage,
    embeddings: WeightStorage,
    num_threads: usize,
) -> Result<Model> {
    let backend = Arc::new(CpuBackend::new(num_threads)?);
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    open_both(path, weights, 0, embeddings)?.load(backend, &options, &mut |_| true)
}

/// Returns the repository's model with a prompt of its kind, and made ones; two have rows that are
/// no whole groups.
pub fn models() -> Vec<(&'static str, TempDir, Vec<u32>)> {
    let mut found = Vec::new();
    if let Some(golden) = golden::tiny_qwen3() {
        let prompt = golden.prompts.iter().find(|p| p.name == "chat_memory").expect("a prompt");
        let dir = packing::read(golden.model_path()).write(Store::BF16);
        found.push((TRAINED, dir, prompt.ids.clone()));
    }
    let made = [
        (EXPERTS, TestModel::wide_qwen3(4).of(Family::Qwen3Moe), Store::BF16),
        ("Llama", TestModel::wide_qwen3(3).of(Family::Llama), Store::F32),
        ("Qwen3 of 24", TestModel::qwen3(3), Store::F16),
        ("GPT-2", TestModel::wide_gpt2(3), Store::F32),
        ("GPT-2 of 30", TestModel::gpt2(3), Store::BF16),
    ];
    let prompt: Vec<u32> = (0..60).map(|i| i * 37 % 70).collect();
    found.extend(made.map(|(name, model, store)| (name, model.write(store), prompt.clone())));
    found
}

/// The parts that are quantised: the layers, the matrices of tokens, and both.
pub const CHOICES: [(WeightStorage, WeightStorage); 5] =
    [(INT8, AS_STORED), (INT4, AS_STORED), (AS_STORED, INT8), (INT8, INT8), (INT4, INT8)];

/// Returns the bar on the difference of logits.
fn bar_of(weights: WeightStorage, name: &str) -> f64 {
    if name == EXPERTS {
        return if weights == INT4 { 0.5 } else { 0.05 };
    }
    let bars = if weights == INT4 { INT4_BARS } else { INT8_BARS };
    bars[usize::from(name != TRAINED)]
}

#[test]
fn quantised_logits_are_close_to_those_of_the_numbers() {
    for (name, dir, prompt) in models() {
        let logits = |model: &Model| Driver::new(model, 8).logits(&prompt, usize::MAX);
        let want = logits(&load(dir.str(), Some(DType::F32), 2));
        for (weights, embeddings) in CHOICES {
            let bar = bar_of(weights, name);
            let model = quantised(dir.str(), DType::F32, weights, embeddings, 2).expect("a model");
            let off = relative_rms(&logits(&model), &want);
            let what = format!("{name}, {weights:?}, embeddings {embeddings:?}");
            println!("{what}: logits differ by {:.2} %", 100.0 * off);
            assert!(off > 1e-5 && off < bar, "{what}: {off:.2e} (bar {bar})");
        }
    }
}

/// Returns a model whose products take activations as integers of 8 bits.
fn with_byte_activations(path: &str, weights: WeightStorage, num_threads: usize) -> Result<Model> {
    let backend = Arc::new(CpuBackend::new(num_threads)?);
    let activations = ActivationFormat::Int8;
    let options = LoadOptions { dtype: Some(DType::F32), activations, ..LoadOptions::default() };
    open(path, weights, 0)?.load(backend, &options, &mut |_| true)
}

/// In bf16 a processor with AMX or AMD's AVX-512 BF16 rounds weights and their inputs to it in passes of
/// many tokens, unless the model is to be deterministic.
#[test]
fn deterministic_models_have_the_same_bits_however_a_prompt_is_cut_and_others_nearly() {
    for (name, dir, prompt) in models() {
        for (weights, embeddings) in [(INT8, INT8), (INT4, AS_STORED)] {
            let logits = |deterministic: bool, num_threads, piece| {
                let backend = Arc::new(CpuBackend::new(num_threads).expect("threads"));
                let dtype = Some(DType::BF16);
                let options = LoadOptions { dtype, deterministic, ..LoadOptions::default() };
                let folder = open_both(dir.str(), weights, 0, embeddings).expect("a folder");
                let model = folder.load(backend, &options, &mut |_| true).expect("a model");
                Driver::new(&model, 8).logits(&prompt, piece)
            };
            let whole = logits(true, 2, usize::MAX);
            let what = format!("{name}, {weights:?}");
            for (num_threads, piece) in [(1, 1), (3, 17)] {
                assert_eq!(bits(&logits(true, num_threads, piece)), bits(&whole), "{what}");
            }
            for (num_threads, piece) in [(2, usize::MAX), (1, 17)] {
                let off = relative_rms(&logits(false, num_threads, piece), &whole);
                println!("{what}: logits differ by {:.2} %", 100.0 * off);
                let bar = if name == EXPERTS { 0.06 } else { 0.02 };
                assert!(off < bar, "{what}: {off:.2e}");
            }
        }
    }
}

#[test]
fn activations_of_8_bits_are_close_to_those_of_16_and_have_the_same_bits_however_a_prompt_is_cut() {
    for (name, dir, prompt) in models() {
        for weights in [INT8, INT4] {
            let logits = |model: &Model, piece| Driver::new(model, 8).logits(&prompt, piece);
            let model = quantised(dir.str(), DType::F32, weights, AS_STORED, 2).expect("a model");
            let want = logits(&model, usize::MAX);
            let model = with_byte_activations(dir.str(), weights, 2).expect("a model");
            let whole = logits(&model, usize::MAX);
            let off = relative_rms(&whole, &want);
            println!("{name}, {weights:?}: logits differ by {:.2} %", 100.0 * off);
            let bar = if name == EXPERTS { 0.06 } else { 0.03 };
            assert!(off > 1e-4 && off < bar, "{name}, {weights:?}: {off:.2e}");
            for (num_threads, piece) in [(1, 1), (3, 17)] {
                let other =
                    with_byte_activations(dir.str(), weights, num_threads).expect("a model");
                assert_eq!(bits(&logits(&other, piece)), bits(&whole), "{name}, {weights:?}");
            }
            // Dense matrices have no such products.
            let dense = with_byte_activations(dir.str(), AS_STORED, 2).expect("a model");
            let stored = load(dir.str(), Some(DType::F32), 2);
            assert_eq!(bits(&logits(&dense, 9)), bits(&logits(&stored, usize::MAX)));
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
        for (weights, embeddings) in CHOICES {
            let bar = bar_of(weights, name);
            // The error of bf16 comes on top; it may give a token another expert.
            let of_bf16 = if name == EXPERTS { 0.3 } else { 0.03 };
            for (dtype, more) in [(DType::F32, 0.0), (DType::BF16, of_bf16)] {
                let what = format!("{name}, {weights:?}, embeddings {embeddings:?}, {dtype}");
                let context = cuda_context().expect("there is a device");
                let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
                let backend = CpuBackend::new(2).expect("threads");
                let folder = open_both(dir.str(), weights, 0, embeddings).expect("a folder");
                let limits = PassLimits::of_tokens(folder.config(), 64);
                let plan =
                    folder.device_plan(dtype, KvFormat::Dense, &limits, false).expect("a plan");
                let model = folder
                    .load_on_device(context, &backend, &options, &mut |_| true)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(plan.weights_bytes, model.weights_bytes(), "{what}");
                let off = relative_rms(&logits(&model), &want);
                println!("{what} on CUDA: logits differ by {:.2} %", 100.0 * off);
                assert!(off < bar + more, "{what} on CUDA: {off:.2e}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_makes_the_same_bits_in_the_memory_that_was_planned() {
    for (name, dir, prompt) in models() {
        for (weights, embeddings) in CHOICES {
            let what = format!("{name}, {weights:?}, embeddings {embeddings:?}");
            let folder = open_both(dir.str(), weights, 0, embeddings).expect("a folder");
            let planned = folder.weights_bytes(DType::F32).expect("a plan");
            let as_stored = Model::open(dir.str()).expect("a folder");
            assert!(planned < as_stored.weights_bytes(DType::F32).expect("a plan"), "{what}");
            let mut first = None;
            for num_threads in [1, 2, 5] {
                let model = quantised(dir.str(), DType::F32, weights, embeddings, num_threads)
                    .expect("a model");
                assert_eq!(planned, model.weights_bytes(), "{what}");
                let got = bits(&Driver::new(&model, 8).logits(&prompt, usize::MAX));
                assert!(
                    *first.get_or_insert_with(|| got.clone()) == got,
                    "{what}: other bits with {num_threads} threads"
                );
            }
        }
    }
}

/// One matrix in 8 bits serves both where the two are tied, and two where they are not, also where the
/// config says that they are tied and the files hold two that differ.
#[test]
fn embeddings_are_quantised_once_if_they_are_tied() {
    let bytes = |folder: &ModelFolder| folder.weights_bytes(DType::F32).expect("a plan");
    let format = INT8.embeddings_format().expect("a format").expect("one");
    for (is_declared, has_output, matrices) in [(true, false, 1), (true, true, 2), (false, true, 2)]
    {
        let mut model = TestModel::wide_qwen3(3);
        model.config["tie_word_embeddings"] = json!(is_declared);
        model.tensors.retain(|tensor| has_output || tensor.name != "lm_head.weight");
        let &[vocab_size, width] = model.tensor("model.embed_tokens.weight").shape.as_slice()
        else {
            panic!("an embedding is a matrix");
        };
        let dir = model.write(Store::F32);
        let whole = open(dir.str(), AS_STORED, 0).expect("a folder");
        let small = open_both(dir.str(), AS_STORED, 0, INT8).expect("a folder");
        let dense = PackedMatrix::bytes_for(vocab_size, width, DType::F32).expect("a size");
        let packed = QuantisedPanels::bytes_for(vocab_size, width, &format, false).expect("a size");
        let saved = (matrices * (dense - packed)) as u64;
        let what = format!("declared tied: {is_declared}, both stored: {has_output}");
        assert_eq!(bytes(&whole) - bytes(&small), saved, "{what}");
    }
}

#[test]
fn embeddings_of_four_bits_are_refused() {
    assert_eq!(AS_STORED.embeddings_format().expect("nothing to do"), None);
    let format = INT8.embeddings_format().expect("a format").expect("one");
    assert_eq!((format.code, format.group_size), (Code::Int8, 128));
    let error = INT4.embeddings_format().expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("int8"), "{error}");
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
                    quantised(dir.str(), DType::F32, weights, AS_STORED, 2).expect_err("refused");
                assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
                for words in [name, "not finite"] {
                    assert!(error.message().contains(words), "{error} does not say {words}");
                }
            }
        }
    }
}

/// Returns the logarithms of the probabilities of a row.
fn log_probs(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
}

/// Returns the logits of a trained model for its prompts, and for the answers that it is known to give.
pub fn trained_rows(golden: &Golden, model: &Model) -> Vec<Vec<f32>> {
    let mut driver = Driver::new(model, 64);
    let vocab_size = model.config().vocab_size;
    // Random tokens have no likely next one.
    let prompts = golden.prompts.iter().filter(|prompt| prompt.name != "random_ids");
    let mut rows = Vec::new();
    for prompt in prompts {
        rows.extend(driver.logits(&prompt.ids, usize::MAX).chunks(vocab_size).map(<[f32]>::to_vec));
    }
    for greedy in &golden.greedy {
        let ids = [&greedy.prompt_ids[..], &greedy.ids[..]].concat();
        let made = driver.logits(&ids, usize::MAX);
        let of_answer = made.chunks(vocab_size).skip(greedy.prompt_ids.len());
        rows.extend(of_answer.map(<[f32]>::to_vec));
    }
    rows
}

/// Returns the number of rows whose likeliest token is the same, and the mean divergence of their
/// probabilities.
pub fn loss(want: &[Vec<f32>], got: &[Vec<f32>]) -> (usize, f64) {
    assert_eq!(want.len(), got.len());
    let agreed = want.iter().zip(got).filter(|(w, g)| argmax(w) == argmax(g)).count();
    let divergence = want.iter().zip(got).map(|(w, g)| {
        let (w, g) = (log_probs(w), log_probs(g));
        w.iter().zip(&g).map(|(w, g)| w.exp() * (w - g)).sum::<f64>()
    });
    (agreed, divergence.sum::<f64>() / want.len() as f64)
}

/// The loss of a trained model: its likeliest token, and the divergence of its probabilities.
#[test]
fn a_trained_model_keeps_its_tokens() {
    let Some(golden) = golden::tiny_qwen3() else { return };
    let path = golden.model_path();
    let want = trained_rows(&golden, &load(path, Some(DType::BF16), 2));
    for (weights, group_size, embeddings, least_agreement, most_divergence) in [
        (INT8, 128, AS_STORED, 0.97, 1e-3),
        (INT4, 32, AS_STORED, 0.90, 0.05),
        (INT4, 64, AS_STORED, 0.88, 0.08),
        (INT4, 128, AS_STORED, 0.85, 0.1),
        (AS_STORED, 0, INT8, 0.97, 1e-3),
        (INT8, 128, INT8, 0.97, 1e-3),
        (INT4, 32, INT8, 0.90, 0.05),
    ] {
        let backend = Arc::new(CpuBackend::new(2).expect("threads"));
        let options = LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() };
        let model = open_both(path, weights, group_size, embeddings)
            .and_then(|folder| folder.load(backend, &options, &mut |_| true))
            .expect("a model");
        let got = trained_rows(&golden, &model);
        let (agreed, divergence) = loss(&want, &got);
        let agreement = agreed as f64 / want.len() as f64;
        println!(
            "{weights:?} in groups of {group_size}, embeddings {embeddings:?}: {agreed} of {} likeliest tokens \
             ({:.1} %), KL {divergence:.5}",
            want.len(),
            100.0 * agreement
        );
        assert!(agreement >= least_agreement && divergence <= most_divergence);
    }
}
