//! Models on a GPU through the C functions.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde_json::Value;
use xserv::ffi::xserv_device_kind::{XSERV_DEVICE_AUTO, XSERV_DEVICE_CUDA};
use xserv::ffi::xserv_dtype::*;
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

/// Who may use the GPU: many tests at once, or one that looks at all of its memory.
static DEVICE: RwLock<()> = RwLock::new(());

/// Returns a GPU that is shared with other tests until the result is dropped, if there is one.
pub fn shared_cuda() -> Option<RwLockReadGuard<'static, ()>> {
    has_cuda().then(|| DEVICE.read().unwrap_or_else(PoisonError::into_inner))
}

/// Returns a GPU that no other test of this process uses until the result is dropped, if there is
/// one.
pub fn whole_cuda() -> Option<RwLockWriteGuard<'static, ()>> {
    has_cuda().then(|| DEVICE.write().unwrap_or_else(PoisonError::into_inner))
}

pub fn on_cuda(dtype: xserv_dtype) -> xserv_load_options {
    let device = XSERV_DEVICE_CUDA as u32;
    xserv_load_options { device_kind: device, dtype: dtype as u32, ..load_options() }
}

/// Returns the prompts and greedy tokens of a reference folder.
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
    let (Some(golden), Some(_device)) = (shared_golden(), shared_cuda()) else { return };
    for (name, refs) in [
        ("qwen3-tiny-tied", "qwen3-tiny-tied"),
        ("qwen3-tiny-untied", "qwen3-tiny-untied"),
        ("qwen3-tiny-mha", "qwen3-tiny-mha"),
        ("gpt2-tiny", "gpt2-tiny"),
        ("gpt2-tiny-hubnames", "gpt2-tiny"),
    ] {
        let model =
            Model::load(&golden.join("models").join(name), &on_cuda(XSERV_DTYPE_F32)).unwrap();
        let info = model.info();
        let device = unsafe { std::ffi::CStr::from_ptr(info.device) }.to_str().unwrap();
        assert!(device.starts_with("cuda ("), "{device}");
        println!("{name} on {device}");
        let cases = greedy_cases(&golden.join("refs").join(refs));
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
    let (Some(golden), Some(_device)) = (shared_golden(), shared_cuda()) else { return };
    let auto = xserv_load_options { device_kind: XSERV_DEVICE_AUTO as u32, ..load_options() };
    for name in ["qwen3-tiny-tied", "gpt2-tiny"] {
        let model = Model::load(&golden.join("models").join(name), &auto).unwrap();
        let device = unsafe { std::ffi::CStr::from_ptr(model.info().device) };
        assert!(device.to_str().unwrap().starts_with("cuda ("), "{name}: {device:?}");
    }
}

/// Draws that a seed decides, prompts as long as the context and longer, cancelling: as on the CPU.
#[test]
fn gpt2_on_cuda_serves_what_it_serves_on_the_cpu() {
    let (Some(golden), Some(_device)) = (shared_golden(), shared_cuda()) else { return };
    let path = golden.join("models/gpt2-tiny");
    for dtype in [XSERV_DTYPE_F32, XSERV_DTYPE_F16, XSERV_DTYPE_BF16] {
        let on_cpu = xserv_load_options { dtype: dtype as u32, ..load_options() };
        let [gpu, cpu] =
            [on_cuda(dtype), on_cpu].map(|options| Model::load(&path, &options).unwrap());
        let context = gpu.info().max_context_tokens as usize;
        assert_eq!(context, cpu.info().max_context_tokens as usize);
        let long: Vec<u32> = (0..=context as u32).map(|i| i * 31 % 600).collect();
        for len in [context - 4, context, context + 1] {
            let request = xserv_request { ignore_eos: 1, ..greedy(&long[..len], 8) };
            let what = |outcome: Outcome<Output>| match outcome {
                Ok(output) => Ok((output.ids.len(), output.finish_reason)),
                Err(failure) => Err((failure.status, failure.message)),
            };
            let (on_gpu, on_cpu) = (what(gpu.generate(&request)), what(cpu.generate(&request)));
            assert_eq!(on_gpu, on_cpu, "{len} of {context} tokens");
            assert_eq!(on_gpu.is_err(), len > context, "{len} of {context} tokens");
        }
        let too_long = [&gpu, &cpu].map(|model| model.logits(&long, false).unwrap_err());
        assert_eq!(too_long[0].status, too_long[1].status);
        assert_eq!(too_long[0].message, too_long[1].message);

        let draw = |seed: u64| {
            let request = greedy(&[5, 6, 7], 40);
            let request = xserv_request { temperature: 1.0, ignore_eos: 1, seed, ..request };
            gpu.generate(&request).unwrap().ids
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));

        let mut token = std::ptr::null_mut();
        check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
        let request = greedy(&[5, 6, 7], 400);
        let request = xserv_request { cancel: token, ignore_eos: 1, ..request };
        let mut seen = 0;
        let cancelled = gpu.stream(&request, &mut |_| {
            seen += 1;
            if seen == 3 {
                check(xserv_cancel_token_cancel(token)).unwrap();
            }
            true
        });
        xserv_cancel_token_free(token);
        let cancelled = cancelled.unwrap();
        assert_eq!(cancelled.finish_reason, xserv_finish_reason::XSERV_FINISH_CANCELLED as u32);
        assert!(cancelled.ids.len() < 400, "{} tokens", cancelled.ids.len());
    }
}

#[test]
fn a_budget_of_device_memory_is_kept_or_refused() {
    let (Some(golden), Some(_device)) = (shared_golden(), shared_cuda()) else { return };
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
    let (Some(golden), Some(_device)) = (shared_golden(), shared_cuda()) else { return };
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
