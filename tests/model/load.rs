//! Loading: progress, cancelling, tied and untied outputs, both ways of reading, files that change.

use std::sync::Arc;

use serde_json::json;
use xserv::backend::cpu::CpuBackend;
use xserv::error::{ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::{LoadOptions, Model};

use crate::driver::{bits, load, Driver};
use crate::files::{safetensors_bytes, Random, Store, TempDir, TestModel, TestTensor};
use crate::golden;

fn load_with(
    path: &str,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Model> {
    Model::open(path)?.load(Arc::new(CpuBackend::new(2)?), options, progress)
}

fn logits(model: &Model) -> Vec<u32> {
    bits(&Driver::new(model, 2).logits(&[1, 2, 3, 4, 5], usize::MAX))
}

#[test]
fn progress_goes_from_zero_to_one() {
    let dir = TestModel::qwen3(1).write(Store::F32);
    let mut seen = Vec::new();
    let thread = std::thread::current().id();
    load_with(dir.str(), &LoadOptions::default(), &mut |fraction| {
        assert_eq!(std::thread::current().id(), thread);
        seen.push(fraction);
        true
    })
    .expect("loads");
    assert_eq!((seen.first(), seen.last()), (Some(&0.0), Some(&1.0)));
    assert!(seen.windows(2).all(|pair| pair[0] <= pair[1]), "{seen:?}");
}

#[test]
fn every_call_of_progress_can_cancel() {
    let dir = TestModel::qwen3(1).write(Store::F32);
    let mut calls = 0;
    load_with(dir.str(), &LoadOptions::default(), &mut |_| {
        calls += 1;
        true
    })
    .expect("loads");
    for stop_at in 1..=calls {
        let mut call = 0;
        let error = load_with(dir.str(), &LoadOptions::default(), &mut |_| {
            call += 1;
            call < stop_at
        })
        .expect_err("was cancelled");
        assert_eq!((error.kind(), call), (ErrorKind::Cancelled, stop_at));
    }
}

#[test]
fn a_mapping_gives_the_same_model() {
    let dir = TestModel::qwen3(1).write(Store::BF16);
    for dtype in [None, Some(DType::F32), Some(DType::F16)] {
        let read = load(dir.str(), dtype, 2);
        let options = LoadOptions { dtype, map_files: true, ..LoadOptions::default() };
        let mapped = load_with(dir.str(), &options, &mut |_| true).expect("loads");
        assert!(logits(&read) == logits(&mapped), "{dtype:?}");
    }
}

/// As the published Qwen3-0.6B: declared tied, but with the output matrix in the file.
#[test]
fn a_stored_output_matrix_is_tied_if_it_is_equal() {
    let mut model = TestModel::qwen3(1);
    model.config["tie_word_embeddings"] = json!(true);
    let embedding = model.tensor("model.embed_tokens.weight").values.clone();
    let output = |model: &mut TestModel, values: &[f32]| {
        for tensor in &mut model.tensors {
            if tensor.name == "lm_head.weight" {
                tensor.values = values.to_vec();
            }
        }
    };
    let untied = load(model.write(Store::F32).str(), None, 2);
    output(&mut model, &embedding);
    let equal = load(model.write(Store::F32).str(), None, 2);
    model.tensors.retain(|tensor| tensor.name != "lm_head.weight");
    let tied = load(model.write(Store::F32).str(), None, 2);
    assert!(logits(&equal) == logits(&tied));
    assert_eq!(equal.weights_bytes(), tied.weights_bytes());
    // Transformers 5: where the two differ, both are used.
    assert!(logits(&untied) != logits(&tied));
    assert!(untied.weights_bytes() > tied.weights_bytes());

    // With the output matrix alone, it is the embedding.
    for tensor in &mut model.tensors {
        if tensor.name == "model.embed_tokens.weight" {
            tensor.name = "lm_head.weight".to_owned();
        }
    }
    let swapped = load(model.write(Store::F32).str(), None, 2);
    assert!(logits(&swapped) == logits(&tied));
}

#[test]
fn names_without_their_prefix() {
    let mut model = TestModel::qwen3(1);
    let prefixed = logits(&load(model.write(Store::F32).str(), None, 1));
    for tensor in &mut model.tensors {
        tensor.name = tensor.name.replace("model.", "");
    }
    assert!(logits(&load(model.write(Store::F32).str(), None, 1)) == prefixed);
}

/// Matrices of several pieces, with sizes that fit no panel, must arrive whole.
#[test]
fn large_matrices_arrive_whole() {
    // 70001 rows of 96: six pieces of 4 MiB in f32.
    let vocab = 70_001;
    let mut model = TestModel::qwen3(1);
    model.config["vocab_size"] = json!(vocab);
    model.config["tie_word_embeddings"] = json!(true);
    model.tensors.retain(|tensor| tensor.name != "lm_head.weight");
    let mut random = Random(9);
    let values: Vec<f32> = (0..vocab * 24).map(|_| random.signed() as f32).collect();
    for tensor in &mut model.tensors {
        if tensor.name == "model.embed_tokens.weight" {
            *tensor = TestTensor {
                name: tensor.name.clone(),
                shape: vec![vocab, 24],
                values: values.clone(),
            };
        }
    }
    let dir = model.write(Store::F32);
    let mut fractions = 0;
    let one = load_with(dir.str(), &LoadOptions::default(), &mut |_| {
        fractions += 1;
        true
    })
    .expect("loads");
    let three = load(dir.str(), None, 3);
    // The last row is its own logit's weight: both ends of the matrix are there.
    let got = Driver::new(&one, 1).logits(&[vocab as u32 - 1], 1);
    assert!(bits(&got) == bits(&Driver::new(&three, 1).logits(&[vocab as u32 - 1], 1)));
    assert!(got.iter().all(|x| x.is_finite()) && got[vocab - 1] != 0.0);
    assert!(fractions > 10);
}

#[test]
fn files_that_change_between_open_and_load() {
    let model = TestModel::qwen3(1);
    let bytes = safetensors_bytes(&model.tensors, Store::F32);
    let backend = Arc::new(CpuBackend::new(1).expect("a backend"));
    type Change<'a> = (&'a str, &'a dyn Fn(&TempDir));
    let changes: [Change<'_>; 4] = [
        ("cut", &|dir| dir.write("model.safetensors", &bytes[..bytes.len() - 1])),
        ("grown", &|dir| dir.write("model.safetensors", [&bytes[..], b"x"].concat())),
        ("replaced", &|dir| {
            dir.write("new", &bytes);
            std::fs::rename(dir.path().join("new"), dir.path().join("model.safetensors"))
                .expect("rename");
        }),
        ("deleted", &|dir| {
            std::fs::remove_file(dir.path().join("model.safetensors")).expect("remove");
        }),
    ];
    for map_files in [false, true] {
        for (what, change) in changes {
            let dir = model.write(Store::F32);
            let folder = Model::open(dir.str()).expect("opens");
            change(&dir);
            let options = LoadOptions { map_files, ..LoadOptions::default() };
            let error = folder.load(Arc::clone(&backend), &options, &mut |_| true).expect_err(what);
            assert!(error.message().contains("model.safetensors"), "{what}: {error}");
            assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NotFound), "{what}: {error}");
        }
    }
}

/// Cut while it is being read, by the progress callback itself.
#[test]
fn a_file_cut_while_it_is_read() {
    let model = TestModel::qwen3(1);
    let dir = model.write(Store::F32);
    let path = dir.path().join("model.safetensors");
    let mut calls = 0;
    let error = load_with(dir.str(), &LoadOptions::default(), &mut |_| {
        calls += 1;
        if calls == 3 {
            let file = std::fs::File::options().write(true).open(&path).expect("open");
            file.set_len(5000).expect("cut");
        }
        true
    })
    .expect_err("the file is too short");
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(error.message().contains("model.safetensors"), "{error}");
}

#[test]
fn the_golden_weights_take_the_memory_that_was_announced() {
    for golden in golden::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let folder = Model::open(golden.model_path()).expect("opens");
            let announced = folder.weights_bytes(dtype).expect("a size");
            let loaded = load(golden.model_path(), Some(dtype), 1);
            assert_eq!(loaded.weights_bytes(), announced, "{} {dtype}", golden.name);
        }
    }
}
