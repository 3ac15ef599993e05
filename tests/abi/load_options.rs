//! The options of a load that say where the weights come from and where they go.

use std::ffi::CString;
use std::path::Path;
use std::ptr;

use xserv::ffi::*;

use crate::client::*;
use crate::files::{Store, TempDir, TestModel};
use crate::plan::assert_as_planned;

fn load(path: &Path, options: &xserv_load_options) -> Result<Model, xserv_status> {
    Model::load(path, options).map_err(|failure| failure.status)
}

/// Returns a folder with the tiny model's config.json, changed by `edit`, and nothing else.
fn config_alone(edit: impl Fn(&mut serde_json::Value)) -> TempDir {
    let dir = TempDir::new();
    let text = std::fs::read_to_string(tiny().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    edit(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn random_weights_need_a_config_alone() {
    let dir = config_alone(|_| {});
    let not_found = xserv_status::XSERV_STATUS_NOT_FOUND;
    assert_eq!(load(dir.path(), &load_options()).err(), Some(not_found), "{}", last_error());
    let refused = plan(dir.path(), &load_options()).err().expect("a refusal");
    assert_eq!(refused.status, not_found, "{refused:?}");
    let options = xserv_load_options { random_weights: 1, ..load_options() };
    let model = load(dir.path(), &options).expect("a model");
    let (random, real) = (model.info(), Model::open(&tiny()).info());
    assert_eq!((random.num_parameters, random.has_tokenizer), (real.num_parameters, 0));
    let ids = [1_u32, 2, 3];
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 5) };
    let tokens = model.generate(&request).unwrap().ids;
    assert_eq!(tokens.len(), 5);
    // The numbers are the same each time.
    let again = load(dir.path(), &options).expect("a model");
    assert_eq!(again.generate(&request).unwrap().ids, tokens);

    let wrong = xserv_load_options { random_weights: 2, ..load_options() };
    let invalid = xserv_status::XSERV_STATUS_INVALID_ARGUMENT;
    assert_eq!(load(dir.path(), &wrong).err(), Some(invalid));
    assert_eq!(plan(dir.path(), &wrong).err().map(|refused| refused.status), Some(invalid));
}

/// Whatever they are kept as, in the type that the config names, in bf16 where it names none, or in
/// the one that is asked for; and within a budget.
#[test]
fn random_weights_take_the_memory_that_was_planned() {
    use xserv_dtype::*;
    let dtypes = [
        (Some("float32"), XSERV_DTYPE_AUTO, XSERV_DTYPE_F32),
        (None, XSERV_DTYPE_AUTO, XSERV_DTYPE_BF16),
        (Some("bfloat16"), XSERV_DTYPE_F16, XSERV_DTYPE_F16),
    ];
    for (declared, asked, expected) in dtypes {
        let dir = config_alone(|config| {
            config.as_object_mut().unwrap().remove("dtype");
            config["torch_dtype"] = declared.into();
        });
        for (weights, embeddings, kv_cache_format) in [(0, 0, 0), (1, 1, 0), (2, 0, 1)] {
            let options = xserv_load_options {
                dtype: asked as u32,
                weights,
                embeddings,
                kv_cache_format,
                random_weights: 1,
                num_threads: 2,
                ..load_options()
            };
            let max_memory_bytes = plan(dir.path(), &options).unwrap().minimum_bytes + (1 << 20);
            let options = xserv_load_options { max_memory_bytes, ..options };
            let found = plan(dir.path(), &options).unwrap();
            assert_eq!((found.dtype, found.fits), (expected as u32, 1));
            let model = load(dir.path(), &options).expect("a model");
            assert_as_planned(&model.info(), &found);
            let request = xserv_request { ignore_eos: 1, ..greedy(&[1, 2, 3], 5) };
            assert_eq!(model.generate(&request).unwrap().ids.len(), 5);
        }
    }
}

/// An output matrix of its own, which the files of a model that is declared tied may have, is none of
/// the random weights.
#[test]
fn random_weights_are_those_of_the_config_where_there_are_files() {
    let mut stored = TestModel::qwen3(1);
    stored.config["tie_word_embeddings"] = serde_json::json!(true);
    let dir = stored.write(Store::F32);
    let options = xserv_load_options { random_weights: 1, ..load_options() };
    let of_config = load(dir.path(), &options).expect("a model").info();
    let of_files = load(dir.path(), &load_options()).expect("a model").info();
    let output = u64::from(of_files.vocab_size) * u64::from(of_files.hidden_size);
    assert_eq!(of_config.num_parameters + output, of_files.num_parameters);
}

/// Whatever the layers are kept as: less memory, as planned, and tokens that are drawn from it.
#[test]
fn embeddings_in_8_bits_take_the_memory_that_was_planned() {
    let bytes = |weights, embeddings| {
        let options = xserv_load_options { weights, embeddings, ..load_options() };
        let model = load(&tiny(), &options).expect("a model");
        let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
        plan.struct_size = size_of::<xserv_memory_plan>();
        let path = CString::new(tiny().to_str().unwrap()).unwrap();
        check(unsafe { xserv_plan(path.as_ptr(), &options, &mut plan) }).unwrap();
        let info = model.info();
        let planned = (plan.weights_bytes, plan.workspace_bytes);
        assert_eq!((info.weights_bytes, info.workspace_bytes), planned);
        let request = xserv_request { ignore_eos: 1, ..greedy(&[1, 2, 3], 5) };
        assert_eq!(model.generate(&request).unwrap().ids.len(), 5);
        info.weights_bytes
    };
    for weights in 0..3 {
        assert!(bytes(weights, 1) < bytes(weights, 0), "weights {weights}");
    }
    let refused = |options| {
        assert_eq!(
            load(&tiny(), &options).err(),
            Some(xserv_status::XSERV_STATUS_INVALID_ARGUMENT)
        );
        last_error()
    };
    for (embeddings, said) in [(2, "int8"), (3, "embeddings is 3"), (u32::MAX, "embeddings is 4")] {
        let message = refused(xserv_load_options { embeddings, ..load_options() });
        assert!(message.contains(said), "{message}");
    }
}

/// With any weights.
#[test]
fn activations_of_any_format_take_the_memory_that_was_planned() {
    use xserv_activations::*;
    let tokens_of = |activations: u32, weights| {
        let options = xserv_load_options { activations, weights, num_threads: 2, ..load_options() };
        let model = load(&tiny(), &options).expect("a model");
        let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
        plan.struct_size = size_of::<xserv_memory_plan>();
        let path = CString::new(tiny().to_str().unwrap()).unwrap();
        check(unsafe { xserv_plan(path.as_ptr(), &options, &mut plan) }).unwrap();
        assert_as_planned(&model.info(), &plan);
        let request = xserv_request { ignore_eos: 1, ..greedy(&[1, 2, 3], 8) };
        model.generate(&request).unwrap().ids.len()
    };
    for weights in 0..3 {
        for activations in
            [XSERV_ACTIVATIONS_AS_COMPUTED, XSERV_ACTIVATIONS_INT8, XSERV_ACTIVATIONS_UNQUANTISED]
        {
            assert_eq!(tokens_of(activations as u32, weights), 8);
        }
    }
    for activations in [3, u32::MAX] {
        let options = xserv_load_options { activations, ..load_options() };
        let refused = load(&tiny(), &options).err();
        assert_eq!(refused, Some(xserv_status::XSERV_STATUS_INVALID_ARGUMENT));
        assert!(last_error().contains("activations is"), "{}", last_error());
    }
    let options = xserv_load_options { reserved: 1, ..load_options() };
    let refused = load(&tiny(), &options).err();
    assert_eq!(refused, Some(xserv_status::XSERV_STATUS_INVALID_ARGUMENT));
}

/// Twice as many tokens in the same memory as with bf16, as planned, with any weights.
#[test]
fn a_cache_of_8_bits_takes_the_memory_that_was_planned() {
    use xserv_kv_cache_format::*;
    let loaded = |kv_cache_format, weights, max_memory_bytes| {
        let options = xserv_load_options {
            dtype: xserv_dtype::XSERV_DTYPE_BF16 as u32,
            kv_cache_format: kv_cache_format as u32,
            weights,
            max_memory_bytes,
            ..load_options()
        };
        let model = load(&tiny(), &options).expect("a model");
        let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
        plan.struct_size = size_of::<xserv_memory_plan>();
        let path = CString::new(tiny().to_str().unwrap()).unwrap();
        check(unsafe { xserv_plan(path.as_ptr(), &options, &mut plan) }).unwrap();
        let info = model.info();
        assert_as_planned(&info, &plan);
        let request = xserv_request { ignore_eos: 1, ..greedy(&[1, 2, 3], 40) };
        assert_eq!(model.generate(&request).unwrap().ids.len(), 40);
        (info.kv_bytes_per_token, info.kv_cache_tokens, info.weights_bytes + info.workspace_bytes)
    };
    for weights in 0..3 {
        // Room for fewer tokens than the library would take without a limit.
        let room = loaded(XSERV_KV_CACHE_AS_COMPUTED, weights, 0).2 + (4 << 20);
        let (dense, narrow) = (
            loaded(XSERV_KV_CACHE_AS_COMPUTED, weights, room),
            loaded(XSERV_KV_CACHE_FP8, weights, room),
        );
        assert_eq!(narrow.0 * 2, dense.0);
        assert!(narrow.1 > dense.1 * 19 / 10, "{} tokens for {}", narrow.1, dense.1);
    }
    for kv_cache_format in [2, u32::MAX] {
        let options = xserv_load_options { kv_cache_format, ..load_options() };
        let refused = load(&tiny(), &options).err();
        assert_eq!(refused, Some(xserv_status::XSERV_STATUS_INVALID_ARGUMENT));
        assert!(last_error().contains("kv_cache_format is"), "{}", last_error());
    }
}

/// A file is made by one load and read by the next; a plan does neither.
#[test]
fn quantised_weights_are_kept_in_the_file_that_is_named() {
    let dir = TempDir::new();
    let file = dir.path().join("kept weights.safetensors");
    let name = CString::new(file.to_str().unwrap()).unwrap();
    let options = |weights, embeddings| xserv_load_options {
        weights,
        embeddings,
        kept_weights: name.as_ptr(),
        ..load_options()
    };
    let path = CString::new(tiny().to_str().unwrap()).unwrap();
    let planned = |options: &xserv_load_options| {
        let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
        plan.struct_size = size_of::<xserv_memory_plan>();
        check(unsafe { xserv_plan(path.as_ptr(), options, &mut plan) }).map(|_| plan.weights_bytes)
    };
    let plan = planned(&options(2, 1)).unwrap();
    assert!(!file.exists());
    let request = xserv_request { ignore_eos: 1, ..greedy(&[1, 2, 3], 9) };
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let model = load(&tiny(), &options(2, 1)).expect("a model");
        assert_eq!(model.info().weights_bytes, plan);
        tokens.push(model.generate(&request).unwrap().ids);
        assert!(file.exists());
    }
    let none = xserv_load_options { kept_weights: ptr::null(), ..options(2, 1) };
    tokens.push(load(&tiny(), &none).expect("a model").generate(&request).unwrap().ids);
    assert!(tokens[0] == tokens[1] && tokens[0] == tokens[2], "{tokens:?}");

    let refused = |options: &xserv_load_options, status, said: &str| {
        assert_eq!(load(&tiny(), options).err(), Some(status), "{}", last_error());
        assert!(last_error().contains(said), "{}", last_error());
    };
    refused(&options(1, 1), xserv_status::XSERV_STATUS_INVALID_FILE, "kept weights.safetensors");
    let invalid = xserv_status::XSERV_STATUS_INVALID_ARGUMENT;
    let random = xserv_load_options { random_weights: 1, ..options(2, 0) };
    let empty = xserv_load_options { kept_weights: c"".as_ptr(), ..options(2, 0) };
    let foreign = xserv_load_options { kept_weights: c"\xff".as_ptr(), ..options(2, 0) };
    for (options, said) in [
        (options(0, 0), "neither weights nor embeddings"),
        (random, "random numbers"),
        (empty, "options.kept_weights is empty"),
        (foreign, "options.kept_weights"),
    ] {
        refused(&options, invalid, said);
        assert!(planned(&options).is_err(), "{said}");
    }
    let options = xserv_load_options { kept_weights: c"/proc/kept".as_ptr(), ..options(2, 0) };
    refused(&options, xserv_status::XSERV_STATUS_IO, "/proc/kept");
}

#[test]
fn devices_that_are_not_there_are_refused() {
    let none = Some(xserv_status::XSERV_STATUS_NO_DEVICE);
    let cpu = xserv_load_options { device_index: 1, ..load_options() };
    assert_eq!(load(&tiny(), &cpu).err(), none);
    assert!(last_error().contains("no CPU device 1"), "{}", last_error());
    for device_index in [xserv_cuda_device_count(), 1000, u32::MAX] {
        let device_kind = xserv_device_kind::XSERV_DEVICE_CUDA as u32;
        let options = xserv_load_options { device_kind, device_index, ..load_options() };
        assert_eq!(load(&tiny(), &options).err(), none, "{}", last_error());
        // The best device is then the CPU.
        let device_kind = xserv_device_kind::XSERV_DEVICE_AUTO as u32;
        let options = xserv_load_options { device_kind, device_index, ..load_options() };
        let model = load(&tiny(), &options).expect("a model on the CPU");
        let info = model.info();
        assert_eq!((info.device_kind, info.device_index), (0, 0));
    }
}

/// Returns a model whose logits of thousands of tokens take seconds.
pub fn slow_model() -> Model {
    let dir = config_alone(|config| {
        config["hidden_size"] = 512.into();
        config["intermediate_size"] = 2048.into();
        config["num_hidden_layers"] = 24.into();
        config["max_position_embeddings"] = 8192.into();
        config["max_window_layers"] = 24.into();
        config.as_object_mut().unwrap().remove("layer_types");
    });
    let options = xserv_load_options { random_weights: 1, ..load_options() };
    load(dir.path(), &options).expect("a model")
}

#[test]
fn logits_are_cancelled_while_they_are_computed_and_while_they_wait() {
    let model = slow_model();
    let ids: Vec<u32> = (0..8000).map(|i| i % 100).collect();
    let mut tokens = [ptr::null_mut(); 2];
    for token in &mut tokens {
        check(unsafe { xserv_cancel_token_new(token) }).unwrap();
    }
    let [first, second] = tokens.map(|token| token as usize);
    let compute = |cancel: usize| {
        let mut logits = vec![0_f32; model.info().vocab_size as usize];
        let options = xserv_logits_options {
            cancel: cancel as *const xserv_cancel_token,
            ..logits_options(0)
        };
        let begin = std::time::Instant::now();
        let status = unsafe {
            xserv_logits(
                model.0,
                ids.as_ptr(),
                ids.len(),
                &options,
                logits.as_mut_ptr(),
                logits.len(),
            )
        };
        (status, begin.elapsed())
    };
    let throw = |cancel: usize| {
        check(xserv_cancel_token_cancel(cancel as *const xserv_cancel_token)).unwrap()
    };
    let pause = || std::thread::sleep(std::time::Duration::from_millis(300));
    let cancelled = xserv_status::XSERV_STATUS_CANCELLED;
    std::thread::scope(|scope| {
        let running = scope.spawn(|| compute(first));
        pause();
        let waiting = scope.spawn(|| compute(second));
        pause();
        throw(second);
        let (status, _) = waiting.join().unwrap();
        assert_eq!(status, cancelled);
        assert!(!running.is_finished(), "the model is too fast for this test");
        throw(first);
        assert_eq!(running.join().unwrap().0, cancelled);
    });
    // A token that was thrown before ends the call at once, and the model goes on.
    assert_eq!(compute(first).0, cancelled);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids[..4], 3) };
    assert_eq!(model.generate(&request).unwrap().ids.len(), 3);
    tokens.into_iter().for_each(|token| xserv_cancel_token_free(token));
}
