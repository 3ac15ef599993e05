//! Models of the families Llama, Mistral and Qwen2 through the C functions, against Transformers.

use std::path::Path;
use std::sync::RwLockReadGuard;

use serde_json::json;
use xserv::ffi::xserv_dtype::XSERV_DTYPE_F32;
use xserv::ffi::*;

use crate::batching::idle;
use crate::client::*;
use crate::cuda::{on_cuda, shared_cuda};
use crate::family_models::{families, std_of, Golden};

/// Loads a model in f32 on the CPU, and on the GPU of this machine, which `device` keeps for as
/// long as it is used.
fn on_all_devices(path: &Path, device: &Option<RwLockReadGuard<'_, ()>>) -> Vec<Model> {
    let cpu = xserv_load_options {
        dtype: XSERV_DTYPE_F32 as u32,
        num_threads: 2,
        prefix_cache: 1,
        ..load_options()
    };
    let mut models = vec![Model::load(path, &cpu).unwrap()];
    if device.is_some() {
        let cuda = xserv_load_options { prefix_cache: 1, ..on_cuda(XSERV_DTYPE_F32) };
        models.push(Model::load(path, &cuda).unwrap());
    }
    models
}

fn check_logits(golden: &Golden, model: &Model) {
    for prompt in &golden.prompts {
        let expected = &golden.logits[&prompt.name];
        let got = golden.kept(prompt, &model.logits(&prompt.ids, true).unwrap());
        assert_eq!(got.len(), expected.len());
        let bar = 2e-4 * std_of(expected);
        for (got, expected) in got.iter().zip(expected) {
            let off = (f64::from(*got) - f64::from(*expected)).abs();
            assert!(off <= bar, "{} {}: {got} and {expected}", golden.name, prompt.name);
        }
    }
}

/// Logits and greedy tokens; then the same requests again from threads of their own, whose
/// beginnings are in the cache.
#[test]
fn logits_and_greedy_tokens_in_f32() {
    let device = shared_cuda();
    for golden in families() {
        for model in on_all_devices(Path::new(golden.model_path()), &device) {
            check_logits(&golden, &model);
            let generate = |index: usize| {
                let want = &golden.greedy[index];
                let request = greedy(&want.prompt_ids, want.ids.len() as u32);
                let got = model.generate(&xserv_request { ignore_eos: 1, ..request }).unwrap();
                assert_eq!(got.ids, want.ids, "{} {}", golden.name, want.name);
            };
            (0..golden.greedy.len()).for_each(generate);
            let before = idle(&model).total_cached_tokens;
            std::thread::scope(|scope| {
                (0..golden.greedy.len()).for_each(|index| {
                    scope.spawn(move || generate(index));
                });
            });
            // The longest prompt has three whole blocks.
            assert!(idle(&model).total_cached_tokens >= before + 64, "{}", golden.name);
        }
    }
}

/// Llama 3.1's generation_config.json has three end tokens; any of them ends the text.
#[test]
fn any_of_several_end_tokens_ends_a_text() {
    let device = shared_cuda();
    let mut tried = 0;
    for golden in families() {
        for want in &golden.greedy {
            // The last two of the three are generated, the later one first in the list.
            let unused = (0..).find(|id| !want.ids.contains(id)).unwrap();
            let end_ids = [unused, want.ids[20], want.ids[10]];
            let first = want.ids.iter().position(|id| end_ids.contains(id)).unwrap();
            let folder = Path::new(golden.model_path());
            let settings = json!({ "eos_token_id": end_ids, "temperature": 0.6, "top_p": 0.9 });
            std::fs::write(folder.join("generation_config.json"), settings.to_string()).unwrap();
            for model in on_all_devices(folder, &device) {
                let place = format!("{} {}", golden.name, want.name);
                let got = model.generate(&greedy(&want.prompt_ids, 24)).unwrap();
                assert_eq!(got.ids, want.ids[..=first], "{place}");
                let reason = xserv_finish_reason::XSERV_FINISH_STOP_TOKEN as u32;
                assert_eq!(got.finish_reason, reason, "{place}");
            }
            tried += 1;
        }
    }
    assert!(tried >= 36, "only {tried} texts");
}

/// Mistral's window is moved over the context, which is as long as the config says.
#[test]
fn the_context_of_a_model_with_a_window_is_longer_than_it() {
    let device = shared_cuda();
    let golden = families().into_iter().find(|golden| golden.name.starts_with("mistral-7b-v0.1"));
    let golden = golden.expect("the first Mistral");
    for model in on_all_devices(Path::new(golden.model_path()), &device) {
        assert_eq!(model.info().max_context_tokens, 1024);
        let prompt: Vec<u32> = (0..1025).map(|i| i % 250).collect();
        let request = xserv_request { ignore_eos: 1, ..greedy(&prompt[..996], 1000) };
        let got = model.generate(&request).unwrap();
        // The one after the last position that was computed is chosen, and no further.
        assert_eq!(got.ids.len(), 29);
        assert_eq!(got.finish_reason, xserv_finish_reason::XSERV_FINISH_CONTEXT_FULL as u32);
        let failure = model.generate(&greedy(&prompt, 1)).err().unwrap();
        assert!(failure.message.contains("1024"), "{failure:?}");
    }
}
