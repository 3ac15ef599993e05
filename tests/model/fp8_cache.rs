//! Models with a KV cache of 8-bit floats: what it costs, how much memory it takes, and bits that do
//! not depend on how a prompt is computed.

use xserv::memory::DType;
use xserv::model::{KvFormat, Model};

use crate::driver::{
    bits, cuda_context, load, load_fp8_cache, load_fp8_cache_on_cuda, load_on_cuda, Driver,
    Sequence,
};
use crate::files::{Family, Random, Store, TestModel};
use crate::golden;
use crate::quantised_at_load::{loss, trained_rows};
use crate::steps::compare_chain;

/// The likeliest tokens of a trained model, and the divergence of its probabilities, against the
/// same model with a cache of its own type.
#[test]
fn a_trained_model_keeps_its_tokens() {
    let Some(golden) = golden::tiny_qwen3() else { return };
    let path = golden.model_path();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let mut models =
            vec![("the CPU", load(path, Some(dtype), 2), load_fp8_cache(path, dtype, 2))];
        if let (Some(one), Some(other)) = (cuda_context(), cuda_context()) {
            let dense = load_on_cuda(path, Some(dtype), one).expect("a model");
            let narrow = load_fp8_cache_on_cuda(path, dtype, other, false).expect("a model");
            models.push(("a GPU", dense, narrow));
        }
        for (device, dense, model) in models {
            let want = trained_rows(&golden, &dense);
            assert_eq!(model.kv_layout().format, KvFormat::Fp8);
            let got = trained_rows(&golden, &model);
            let (agreed, divergence) = loss(&want, &got);
            let agreement = agreed as f64 / want.len() as f64;
            println!(
                "{dtype} on {device}: {agreed} of {} likeliest tokens ({:.1} %), KL {divergence:.5}",
                want.len(),
                100.0 * agreement
            );
            assert!(agreement >= 0.95 && divergence > 0.0 && divergence <= 5e-3, "{dtype}");
        }
    }
}

fn ids(model: &Model, len: usize) -> Vec<u32> {
    let mut random = Random(5);
    (0..len).map(|_| random.below(model.config().vocab_size) as u32).collect()
}

#[test]
fn bits_do_not_depend_on_chunks_or_threads() {
    for files in [
        TestModel::wide_qwen3(7),
        TestModel::wide_qwen3(7).of(Family::Llama),
        TestModel::wide_qwen3(7).in_window(40),
    ] {
        let dir = files.write(Store::BF16);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let model = load_fp8_cache(dir.str(), dtype, 1);
            let ids = ids(&model, 150);
            let whole = bits(&Driver::new(&model, 8).logits(&ids, usize::MAX));
            for chunk in [1, 7, 40] {
                let got = bits(&Driver::new(&model, 8).logits(&ids, chunk));
                assert!(got == whole, "{dtype}, pieces of {chunk}");
            }
            let model = load_fp8_cache(dir.str(), dtype, 3);
            let got = bits(&Driver::new(&model, 8).logits(&ids, usize::MAX));
            assert!(got == whole, "{dtype}, three threads");
        }
    }
}

/// Damaged weights show in the logits of every token that sees what they made, as with a cache of any other
/// type. (Those before it in its piece may be none either: in a tile, what is hidden counts zero times.)
#[test]
fn keys_that_are_no_numbers_stay_none() {
    for (model, embedding) in [
        (TestModel::wide_qwen3(7), "model.embed_tokens.weight"),
        (TestModel::wide_gpt2(7), "transformer.wte.weight"),
    ] {
        for none in [f32::NAN, -f32::NAN] {
            let mut model = model.clone();
            let tensor = model.tensors.iter_mut().find(|t| t.name == embedding).expect("a tensor");
            let width = tensor.shape[1];
            tensor.values[3 * width..4 * width].fill(none);
            let dir = model.write(Store::BF16);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let model = load_fp8_cache(dir.str(), dtype, 2);
                let vocab_size = model.config().vocab_size;
                let ids: Vec<u32> = (0..80).map(|i| if i == 10 { 3 } else { 5 + i % 30 }).collect();
                for chunk in [1, 9, usize::MAX] {
                    let logits = Driver::new(&model, 8).logits(&ids, chunk);
                    for (row, logits) in logits.chunks(vocab_size).enumerate().skip(10) {
                        let is_finite = logits.iter().any(|x| x.is_finite());
                        assert!(!is_finite, "{dtype}, pieces of {chunk}, row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_token_takes_a_byte_for_each_number() {
    for model in [TestModel::wide_qwen3(7), TestModel::wide_gpt2(7)] {
        let dir = model.write(Store::BF16);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let bytes = |model: &Model| model.kv_layout().bytes_per_token();
            let dense = bytes(&load(dir.str(), Some(dtype), 1));
            let model = load_fp8_cache(dir.str(), dtype, 1);
            assert_eq!(bytes(&model) * dtype.size_bytes(), dense);
            let cache = model.kv_cache(5).expect("a cache");
            assert_eq!(cache.size_bytes(), 5 * 32 * bytes(&model));
        }
    }
}

/// Decoding by the kernels of one token for each sequence, and as graphs, against the forward pass.
#[test]
fn decoding_by_steps_on_cuda_is_the_forward_pass() {
    for (files, dtype) in [
        (TestModel::wide_qwen3(5), DType::BF16),
        (TestModel::wide_qwen3(5), DType::F16),
        (TestModel::wide_qwen3(5).of(Family::Llama), DType::BF16),
        (TestModel::wide_qwen3(5).in_window(20), DType::BF16),
        (TestModel::long_qwen3(5, 64), DType::BF16),
        (TestModel::wide_gpt2(5), DType::BF16),
        (TestModel::wide_gpt2(5), DType::F32),
    ] {
        let dir = files.write(Store::BF16);
        let Some(context) = cuda_context() else { return };
        let model = load_fp8_cache_on_cuda(dir.str(), dtype, context, false).expect("a model");
        for batch in [1, 2, 3, 8, 17, 70] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// The device against the host, for whole prompts, prompts in pieces beside decoding sequences, and
/// tokens one by one.
#[test]
fn cuda_and_the_cpu_agree() {
    for files in [TestModel::wide_qwen3(9), TestModel::long_qwen3(9, 64), TestModel::wide_gpt2(9)] {
        let dir = files.write(Store::BF16);
        let Some(context) = cuda_context() else { return };
        let host = load_fp8_cache(dir.str(), DType::F32, 2);
        let device = load_fp8_cache_on_cuda(dir.str(), DType::F32, context, false);
        let device = device.expect("a model");
        let ids = ids(&host, 100);
        let run = |model: &Model| -> Vec<Vec<f32>> {
            let mut driver = Driver::new(model, 16);
            let (mut a, mut b) = (Sequence::default(), Sequence::default());
            let mut all = driver.step(&mut [(&mut a, &ids[..40])], true);
            all.extend(driver.step(&mut [(&mut a, &ids[40..41]), (&mut b, &ids[50..100])], true));
            all.extend(driver.step(&mut [(&mut a, &ids[41..42]), (&mut b, &ids[..1])], true));
            all.extend(driver.step(&mut [(&mut b, &ids[1..30]), (&mut a, &ids[42..49])], true));
            all
        };
        let (want, got) = (run(&host).concat(), run(&device).concat());
        let vocab_size = host.config().vocab_size;
        let mut worst = 0.0f64;
        for (want, got) in want.chunks(vocab_size).zip(got.chunks(vocab_size)) {
            let sum: f64 = want.iter().zip(got).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            worst = worst.max((sum / vocab_size as f64).sqrt() / golden::std_of(want));
        }
        println!("worst row {worst:.2e} std");
        // In f32 few keys become another number of 8 bits.
        assert!(worst <= 2e-2, "{worst:.2e}");
    }
}
