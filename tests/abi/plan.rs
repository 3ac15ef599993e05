//! `xserv_load` does what `xserv_plan` tells.

use std::path::Path;
use std::ptr;

use xserv::ffi::xserv_device_kind::*;
use xserv::ffi::xserv_dtype::*;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::family_models::{families, Golden};
use crate::files::{Store, TestModel};
use crate::hostile_child::{inspect, Copy};

/// Asserts that a load is what was planned.
#[track_caller]
pub fn assert_as_planned(info: &xserv_model_info, plan: &xserv_memory_plan) {
    assert_eq!(info.dtype, plan.dtype);
    assert_eq!(info.has_tokenizer, plan.has_tokenizer);
    assert_eq!(info.weights_bytes, plan.weights_bytes);
    assert_eq!(info.workspace_bytes, plan.workspace_bytes);
    assert_eq!(info.kv_bytes_per_token, plan.kv_bytes_per_token);
    assert_eq!(info.kv_cache_tokens, plan.kv_cache_tokens);
    assert_eq!(info.max_context_tokens, plan.max_context_tokens);
}

/// Some of the models of [`families`]: in several files, with a window, with biases.
fn some_families() -> Vec<Golden> {
    let names = ["llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2.5-0.5b"];
    let is_one = |golden: &Golden| names.iter().any(|name| golden.name.starts_with(name));
    let some: Vec<Golden> = families().into_iter().filter(is_one).collect();
    assert_eq!(some.len(), names.len());
    some
}

/// Returns the models to try: those of the shared data, where they are, the repository's own, and `families`.
fn models(families: &[Golden]) -> Vec<std::path::PathBuf> {
    let mut models = vec![tiny()];
    models.extend(families.iter().map(|golden| golden.model_path().into()));
    if let Some(golden) = shared_golden() {
        let names = [
            "qwen3-tiny-tied",
            "qwen3-tiny-untied",
            "qwen3-tiny-mha",
            "qwen3-moe-tiny",
            "gpt2-tiny",
        ];
        models.extend(names.map(|name| golden.join("models").join(name)));
    }
    models
}

#[test]
fn the_plan_is_what_load_does() {
    for path in models(&some_families()) {
        for dtype in [XSERV_DTYPE_AUTO, XSERV_DTYPE_F32, XSERV_DTYPE_F16, XSERV_DTYPE_BF16] {
            let base = xserv_load_options { dtype: dtype as u32, num_threads: 2, ..load_options() };
            let context = plan(&path, &base).unwrap().max_context_tokens;
            for (max_context_tokens, kv_cache_tokens) in
                [(0, 0), (context / 2, 0), (context / 3, context), (0, 32), (0, 33)]
            {
                let options = xserv_load_options { max_context_tokens, kv_cache_tokens, ..base };
                let found = plan(&path, &options).unwrap();
                assert_eq!((found.device_kind, found.fits), (XSERV_DEVICE_CPU as u32, 1));
                assert_ne!(found.dtype, XSERV_DTYPE_AUTO as u32);
                let model = Model::load(&path, &options).unwrap();
                assert_as_planned(&model.info(), &found);
            }
        }
    }
}

#[test]
fn a_budget_is_planned_as_it_is_used() {
    for path in models(&some_families()) {
        let base = xserv_load_options { num_threads: 2, ..load_options() };
        let least = plan(&path, &base).unwrap().minimum_bytes;
        let mut last_tokens = 0;
        for more in [0, 1, 100_000, 3_000_000] {
            let options = xserv_load_options { max_memory_bytes: least + more, ..base };
            let found = plan(&path, &options).unwrap();
            assert_eq!((found.fits, found.memory_bytes), (1, least + more));
            assert!(found.total_bytes <= least + more);
            assert!(found.kv_cache_tokens >= last_tokens.max(32));
            last_tokens = found.kv_cache_tokens;
            let model = Model::load(&path, &options).unwrap();
            assert_as_planned(&model.info(), &found);
            let mut request = greedy(&[1, 2, 3], 4);
            request.ignore_eos = 1;
            assert_eq!(model.generate(&request).unwrap().ids.len(), 4);
        }
        // One byte less than the least.
        for kv_cache_tokens in [0, 320] {
            let asked = xserv_load_options { kv_cache_tokens, ..base };
            let least = plan(&path, &asked).unwrap().minimum_bytes;
            let options = xserv_load_options { max_memory_bytes: least - 1, ..asked };
            let found = plan(&path, &options).unwrap();
            assert_eq!((found.fits, found.kv_cache_tokens, found.max_context_tokens), (0, 0, 0));
            assert_eq!((found.minimum_bytes, found.total_bytes), (least, least));
            let failure = Model::load(&path, &options).err().unwrap();
            assert_eq!(failure.status, XSERV_STATUS_OUT_OF_MEMORY);
            for number in [least - 1, found.weights_bytes, found.workspace_bytes] {
                assert!(failure.message.contains(&number.to_string()), "{failure:?}");
            }
            Model::load(&path, &xserv_load_options { max_memory_bytes: least, ..asked }).unwrap();
        }
    }
}

/// A config that declares the output matrix tied, and files with another: both matrices are counted.
#[test]
fn an_output_matrix_that_is_not_tied_after_all_is_planned() {
    let mut tied = TestModel::qwen3(1);
    tied.config["tie_word_embeddings"] = serde_json::json!(true);
    let numbers: usize = tied.tensors.iter().map(|tensor| tensor.values.len()).sum();
    let dir = tied.write(Store::F32);
    let base = xserv_load_options { num_threads: 2, ..load_options() };
    let max_memory_bytes = plan(dir.path(), &base).unwrap().minimum_bytes;
    let options = xserv_load_options { max_memory_bytes, ..base };
    let found = plan(dir.path(), &options).unwrap();
    assert_eq!(found.fits, 1);
    let model = Model::load(dir.path(), &options).unwrap();
    assert_as_planned(&model.info(), &found);
    assert_eq!(model.info().num_parameters, numbers as u64);
}

/// A missing tokenizer.json is no reason to refuse a folder, and planned, inspected and loaded alike.
#[test]
fn a_folder_without_a_tokenizer_is_planned_for_token_ids() {
    let copy = Copy::new();
    let base = xserv_load_options { num_threads: 2, ..load_options() };
    let with = plan(copy.path(), &base).unwrap();
    assert_eq!(with.has_tokenizer, 1);
    copy.remove("tokenizer.json");
    let found = plan(copy.path(), &base).unwrap();
    assert_eq!((found.has_tokenizer, found.minimum_bytes), (0, with.minimum_bytes));
    let inspected = inspect(copy.path()).unwrap();
    assert!(inspected.supported && !inspected.has_tokenizer);
    let model = Model::load(copy.path(), &base).unwrap();
    assert_as_planned(&model.info(), &found);
    let failure = model.tokenize("words").err().unwrap();
    assert_eq!(failure.status, XSERV_STATUS_UNSUPPORTED);
    assert_eq!(model.generate(&greedy(&[1, 2, 3], 2)).unwrap().ids.len(), 2);
}

/// Without a GPU and without a driver.
#[test]
fn a_gpu_is_planned_where_there_is_none() {
    models(&some_families()).iter().for_each(|path| a_gpu_is_planned(path));
}

fn a_gpu_is_planned(path: &Path) {
    let device = XSERV_DEVICE_CUDA as u32;
    let base = xserv_load_options { device_kind: device, ..load_options() };
    let roomy = plan(path, &xserv_load_options { kv_cache_tokens: 4096, ..base }).unwrap();
    assert_eq!((roomy.device_kind, roomy.kv_cache_tokens), (device, 4096));
    assert!(roomy.weights_bytes > 0 && roomy.workspace_bytes > 0);
    for budget in [256 << 20, 512 << 20] {
        let options = xserv_load_options { max_memory_bytes: budget, ..base };
        let found = plan(path, &options).unwrap();
        assert!(found.memory_bytes <= budget && found.total_bytes <= budget);
        assert_eq!(found.weights_bytes, roomy.weights_bytes);
        if xserv::backend::cuda::available().is_err() {
            assert_eq!((found.fits, found.memory_bytes), (1, budget));
            let room = budget - found.total_bytes;
            let all = 256 * found.max_context_tokens;
            assert!(room < 32 * found.kv_bytes_per_token || found.kv_cache_tokens >= all);
        }
    }
    let options = xserv_load_options { max_memory_bytes: roomy.minimum_bytes / 1000, ..base };
    assert_eq!(plan(path, &options).unwrap().fits, 0);
    // A context of half the length takes half the tables of positions.
    let halves = |max_context_tokens| {
        let options = xserv_load_options { max_context_tokens, kv_cache_tokens: 64, ..base };
        plan(path, &options).unwrap().workspace_bytes
    };
    assert!(halves(16) < halves(64));
}

/// The share by which runs with these options may differ from the plan.
const TOLERANCE: f64 = 0.02;

/// Requests of all kinds at once: decoding in batches of any size, prompts in pieces beside it,
/// logits of all rows.
fn run_everything(model: &Model) {
    let context = model.info().max_context_tokens as usize;
    let vocab_size = model.info().vocab_size;
    let prompt = |len: usize, seed: u32| -> Vec<u32> {
        (0..len as u32).map(|i| (i * 31 + seed) % vocab_size).collect()
    };
    std::thread::scope(|scope| {
        for seed in 0..24 {
            let len = [3, 40, 150, 300][seed as usize % 4].min(context / 2);
            let ids = prompt(len, seed);
            scope.spawn(move || {
                let mut request = greedy(&ids, 20);
                request.ignore_eos = 1;
                // Draws on the device, and of the host's.
                request.temperature = [0.0, 0.7][seed as usize % 2];
                request.repetition_penalty = [1.0, 1.2][seed as usize / 2 % 2];
                assert_eq!(model.generate(&request).unwrap().ids.len(), 20);
            });
        }
    });
    let all = prompt(context / 2, 7);
    assert_eq!(model.logits(&all, true).unwrap().len(), all.len() * vocab_size as usize);
}

/// The peak of a device's allocator is the plan, whatever steps there were.
#[test]
fn the_plan_of_a_gpu_is_what_a_run_takes() {
    let Some(_device) = crate::cuda::whole_cuda() else { return };
    for path in models(&some_families()) {
        for dtype in [XSERV_DTYPE_F32, XSERV_DTYPE_F16, XSERV_DTYPE_BF16] {
            let base = crate::cuda::on_cuda(dtype);
            let deterministic = xserv_load_options { deterministic: 1, ..base };
            let small = xserv_load_options { max_batch_size: 5, max_prefill_tokens: 64, ..base };
            for options in [base, deterministic, small] {
                let options = xserv_load_options { kv_cache_tokens: 2048, ..options };
                let found = plan(&path, &options).unwrap();
                // Not a byte more than planned is allowed.
                let limited = xserv_load_options { max_memory_bytes: found.total_bytes, ..options };
                let model = Model::load(&path, &limited).unwrap();
                assert_as_planned(&model.info(), &found);
                let taken = || {
                    let mut stats: xserv_model_stats = unsafe { std::mem::zeroed() };
                    stats.struct_size = size_of::<xserv_model_stats>();
                    check(unsafe { xserv_model_get_stats(model.0, &mut stats) }).unwrap();
                    stats.peak_memory_bytes
                };
                let loaded = taken();
                run_everything(&model);
                let used = taken();
                let off = (found.total_bytes as f64 - used as f64) / used as f64;
                println!(
                    "{} {dtype:?}: planned {} bytes (work space {}), {loaded} after the load, used {used} \
                     ({:+.2} %)",
                    path.file_name().unwrap().to_string_lossy(),
                    found.total_bytes,
                    found.workspace_bytes,
                    100.0 * off
                );
                assert!((0.0..=TOLERANCE).contains(&off), "{off}");
                assert_eq!(loaded, used, "a run took more than the load");
            }
        }
    }
}

#[test]
fn what_cannot_be_loaded_cannot_be_planned() {
    let base = load_options();
    let fails = |path: &Path, options: xserv_load_options, status: Status, words: &str| {
        let failure = plan(path, &options).err().expect(words);
        assert_eq!(failure.status, status, "{failure:?}");
        assert!(failure.message.contains(words), "{failure:?}");
    };
    let bad = XSERV_STATUS_INVALID_ARGUMENT;
    fails(Path::new("/no/such/folder"), base, XSERV_STATUS_NOT_FOUND, "/no/such/folder");
    fails(&tiny(), xserv_load_options { device_kind: 9, ..base }, bad, "options.device_kind is 9");
    fails(&tiny(), xserv_load_options { num_threads: 5000, ..base }, bad, "num_threads");
    let too_long = xserv_load_options { max_context_tokens: 1 << 40, ..base };
    fails(&tiny(), too_long, bad, "max_context_tokens");
    let too_small = xserv_load_options { max_context_tokens: 64, kv_cache_tokens: 32, ..base };
    fails(&tiny(), too_small, bad, "kv_cache_tokens is 32");
    let of_another_family = Copy::new();
    of_another_family.edit("config.json", |config| {
        config["architectures"] = serde_json::json!(["Qwen3NextForCausalLM"]);
    });
    fails(of_another_family.path(), base, XSERV_STATUS_UNSUPPORTED, "Qwen3Next");
    let of_another_version = Copy::new();
    of_another_version.edit("tokenizer.json", |tokenizer| tokenizer["version"] = "9.0".into());
    fails(of_another_version.path(), base, XSERV_STATUS_UNSUPPORTED, "tokenizer.json");
    // Mistral's own forms of a tokenizer and of a checkpoint.
    for (file, other) in [("tokenizer.json", "tekken.json"), ("config.json", "params.json")] {
        let copy = Copy::new();
        copy.remove(file);
        copy.write(other, "{}");
        fails(copy.path(), base, XSERV_STATUS_UNSUPPORTED, other);
    }
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let copy = Copy::new();
        copy.write(name, "[");
        fails(copy.path(), base, XSERV_STATUS_INVALID_FILE, name);
        // If several files are damaged, the same one is reported.
        copy.write("tokenizer.json", "?");
        let loaded = Model::load(copy.path(), &base).err().unwrap();
        let planned = plan(copy.path(), &base).err().unwrap();
        assert_eq!((loaded.status, &loaded.message), (planned.status, &planned.message));
        assert_eq!(inspect(copy.path()).unwrap().reason, loaded.message);
    }
    let mut found: xserv_memory_plan = unsafe { std::mem::zeroed() };
    let path = c_string(tiny().to_str().unwrap());
    for struct_size in [0, 8, size_of::<xserv_memory_plan>() + 8, usize::MAX] {
        found.struct_size = struct_size;
        let status = unsafe { xserv_plan(path.as_ptr(), ptr::null(), &mut found) };
        assert_eq!(status, bad);
        assert!(last_error().contains("struct_size"), "{}", last_error());
        assert_eq!(found.weights_bytes, 0, "written on failure");
    }
    let status = unsafe { xserv_plan(path.as_ptr(), ptr::null(), ptr::null_mut()) };
    assert_eq!(status, bad);
    found.struct_size = size_of::<xserv_memory_plan>();
    assert_eq!(unsafe { xserv_plan(ptr::null(), ptr::null(), &mut found) }, bad);
    check(unsafe { xserv_plan(path.as_ptr(), ptr::null(), &mut found) }).unwrap();
}
