//! Models on a GPU through the C functions.

use serde_json::Value;
use xserv::ffi::xserv_device_kind::{XSERV_DEVICE_AUTO, XSERV_DEVICE_CUDA};
use xserv::ffi::xserv_dtype::{XSERV_DTYPE_AUTO, XSERV_DTYPE_F32};
use xserv::ffi::*;

use crate::client::*;

/// Whether there is a GPU; where not, a line that says so.
pub fn has_cuda() -> bool {
    let found = xserv::backend::cuda::available();
    if let Err(why) = &found {
        assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {why}");
        println!("skipped: no CUDA device ({why})");
    }
    found.is_ok()
}

pub fn on_cuda(dtype: xserv_dtype) -> xserv_load_options {
    let device = XSERV_DEVICE_CUDA as u32;
    xserv_load_options { device, dtype: dtype as u32, ..load_options() }
}

/// The prompts and greedy tokens of a reference folder.
fn greedy_cases(refs: &std::path::Path) -> Vec<(Vec<u32>, Vec<u32>)> {
    let text = std::fs::read_to_string(refs.join("generate.json")).unwrap();
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
    };
    let cases: Value = serde_json::from_str(&text).unwrap();
    let cases = cases.as_array().cloned().or_else(|| cases["cases"].as_array().cloned()).unwrap();
    cases
        .iter()
        .filter(|case| case["min_margin"].as_f64().is_none_or(|margin| margin >= 2e-3))
        .map(|case| (ids(&case["prompt_ids"]), ids(&case["greedy_ids"])))
        .collect()
}

#[test]
fn greedy_tokens_on_cuda_are_the_reference_and_do_not_depend_on_neighbours() {
    let Some(golden) = shared_golden().filter(|_| has_cuda()) else { return };
    for name in ["qwen3-tiny-tied", "qwen3-tiny-untied", "qwen3-tiny-mha"] {
        let model =
            Model::load(&golden.join("models").join(name), &on_cuda(XSERV_DTYPE_F32)).unwrap();
        let info = model.info();
        let device = unsafe { std::ffi::CStr::from_ptr(info.device) }.to_str().unwrap();
        assert!(device.starts_with("cuda ("), "{device}");
        println!("{name} on {device}");
        let cases = greedy_cases(&golden.join("refs").join(name));
        assert!(!cases.is_empty());
        let run = |(prompt, expected): &(Vec<u32>, Vec<u32>)| {
            let mut request = greedy(prompt, expected.len() as u32);
            request.ignore_eos = 1;
            assert_eq!(&model.generate(&request).unwrap().ids, expected, "{name}");
        };
        cases.iter().for_each(run);
        // All at once, of several threads.
        std::thread::scope(|scope| {
            for case in &cases {
                scope.spawn(|| run(case));
            }
        });
    }
}

#[test]
fn the_best_device_is_the_gpu_where_the_model_runs() {
    let Some(golden) = shared_golden().filter(|_| has_cuda()) else { return };
    let auto = xserv_load_options { device: XSERV_DEVICE_AUTO as u32, ..load_options() };
    for (name, expected) in [("qwen3-tiny-tied", "cuda ("), ("gpt2-tiny", "cpu (")] {
        let model = Model::load(&golden.join("models").join(name), &auto).unwrap();
        let device = unsafe { std::ffi::CStr::from_ptr(model.info().device) };
        assert!(device.to_str().unwrap().starts_with(expected), "{name}: {device:?}");
    }
    let gpt2 = golden.join("models/gpt2-tiny");
    let failure = Model::load(&gpt2, &on_cuda(XSERV_DTYPE_AUTO)).err().unwrap();
    assert_eq!(failure.status, xserv_status::XSERV_STATUS_UNSUPPORTED);
    assert!(failure.message.contains("GPT2LMHeadModel"), "{}", failure.message);
}

#[test]
fn a_budget_of_device_memory_is_kept_or_refused() {
    let Some(golden) = shared_golden().filter(|_| has_cuda()) else { return };
    let path = golden.join("models/qwen3-tiny-tied");
    let base = on_cuda(XSERV_DTYPE_AUTO);
    let failure = Model::load(&path, &xserv_load_options { max_memory_bytes: 100_000, ..base });
    assert_eq!(failure.err().unwrap().status, xserv_status::XSERV_STATUS_OUT_OF_MEMORY);
    let max_memory_bytes = 160 << 20;
    let model = Model::load(&path, &xserv_load_options { max_memory_bytes, ..base }).unwrap();
    let info = model.info();
    let kv_bytes = info.kv_cache_tokens * info.kv_bytes_per_token;
    assert!(info.weights_bytes + kv_bytes <= max_memory_bytes);
    let mut request = greedy(&[5, 6, 7], 8);
    request.ignore_eos = 1;
    assert_eq!(model.generate(&request).unwrap().ids.len(), 8);
}

#[test]
fn loading_and_freeing_on_cuda_again_and_again() {
    let Some(golden) = shared_golden().filter(|_| has_cuda()) else { return };
    let path = golden.join("models/qwen3-tiny-untied");
    let prompt = [3, 1, 4, 1, 5, 9];
    let mut expected: Option<Vec<u32>> = None;
    for _ in 0..10 {
        let model = Model::load(&path, &on_cuda(XSERV_DTYPE_AUTO)).unwrap();
        let mut request = greedy(&prompt, 16);
        request.ignore_eos = 1;
        let got = model.generate(&request).unwrap().ids;
        assert_eq!(expected.get_or_insert(got.clone()), &got, "the same run, the same tokens");
    }
}
