//! The output of a request depends on the request alone, to the last bit: the tokens of prompts, greedy
//! and drawn, and the bytes of their logits are the same in every batch, beside any neighbours, however
//! prompts are cut, with and without the prefix cache and preemption, with any number of threads.
//! (`tests/abi/deterministic.rs` compares a crowd with single requests at one setting, and on GPUs.)

use std::collections::BTreeMap;

use xserv::ffi::*;

use crate::client::*;
use crate::files::{Family, Random, Store, TestModel};
use crate::scale::{scaled, share, watched, PATIENCE};

/// The longest context.
const CONTEXT: usize = 256;
const MOST_TOKENS: usize = 90;
const VOCAB: usize = 900;

/// The way in which a model is loaded and used.
#[derive(Clone, Copy, Debug)]
struct Setting {
    threads: u32,
    batch: u32,
    /// Prompt tokens in a step; 0: no prompt is cut.
    chunk: u64,
    prefix_cache: u8,
    kv_tokens: u64,
    /// Requests at once.
    callers: usize,
}

impl Setting {
    fn load(&self, path: &std::path::Path) -> Model {
        let options = xserv_load_options {
            num_threads: self.threads,
            max_batch_size: self.batch,
            max_prefill_tokens: if self.chunk == 0 { CONTEXT as u64 } else { self.chunk },
            prefix_cache: self.prefix_cache,
            kv_cache_tokens: self.kv_tokens,
            max_context_tokens: CONTEXT as u64,
            ..load_options()
        };
        Model::load(path, &options).unwrap()
    }
}

/// Alone first: what all others must give.
const ALONE: Setting =
    Setting { threads: 1, batch: 1, chunk: 0, prefix_cache: 0, kv_tokens: 2048, callers: 1 };

fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for (i, batch) in [1, 2, 3, 7, 8, 16, 31, 32, 64].into_iter().enumerate() {
        let chunk = [0, 1, 16, 127, 200][i % 5];
        let base = Setting { batch, chunk, callers: batch.min(32) as usize, ..ALONE };
        // A cache that is too small preempts; one that is large enough keeps prefixes.
        all.push(Setting { threads: 1 + i as u32 % 3, prefix_cache: 1, ..base });
        all.push(Setting { threads: 8, kv_tokens: 288, ..base });
        all.push(Setting { threads: 2, kv_tokens: 288, prefix_cache: 1, ..base });
    }
    for chunk in [1, 16, 127, 200] {
        all.push(Setting { chunk, threads: 2, batch: 16, callers: 16, ..ALONE });
    }
    all
}

fn prompts(count: usize) -> Vec<Vec<u32>> {
    let mut random = Random(11);
    let mut ids =
        |len: usize| -> Vec<u32> { (0..len).map(|_| random.below(VOCAB) as u32).collect() };
    let shared = ids(200);
    (0..count)
        .map(|i| match i % 4 {
            // Prefixes that are found in the cache, short ones, and such as end at a block's edge.
            0 => [shared[..32 + i * 7 % 120].to_vec(), ids(1 + i % 30)].concat(),
            1 => ids(1 + i % 40),
            2 => ids(32 * (1 + i % 3)),
            _ => ids(1 + (i * i * 31) % (CONTEXT - MOST_TOKENS - 2)),
        })
        .collect()
}

/// The result for a prompt: tokens, greedy and drawn, and the bits of its logits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Given {
    greedy: Vec<u32>,
    drawn: Vec<u32>,
    logits: Vec<u32>,
}

fn ask(model: &Model, prompt: &[u32], index: usize) -> Given {
    // Few of them long, so that those who are computed together come to need more room than there is.
    let tokens = if index % 4 == 2 { MOST_TOKENS as u32 - 1 } else { 3 + (index * 11 % 16) as u32 };
    let greedy_request = xserv_request { ignore_eos: 1, ..greedy(prompt, tokens) };
    let drawn = xserv_request {
        temperature: 0.9,
        top_p: 0.9,
        top_k: 40,
        seed: 100 + index as u64,
        repetition_penalty: if index.is_multiple_of(3) { 1.2 } else { 1.0 },
        ..greedy_request
    };
    Given {
        greedy: model.generate(&greedy_request).unwrap().ids,
        drawn: model.generate(&drawn).unwrap().ids,
        logits: model.logits(prompt, false).unwrap().iter().map(|x| x.to_bits()).collect(),
    }
}

/// Asks for all prompts from as many threads as the setting says, beside neighbours that are cancelled.
fn ask_all(model: &Model, prompts: &[Vec<u32>], setting: &Setting) -> Vec<Given> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let given = std::sync::Mutex::new(BTreeMap::new());
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        if setting.callers > 2 {
            scope.spawn(|| {
                let mut random = Random(3);
                while !is_over.load(std::sync::atomic::Ordering::SeqCst) {
                    let prompt = &prompts[random.below(prompts.len())];
                    let (mut left, request) = (random.below(6), greedy(prompt, 20));
                    let neighbour = model.stream(&request, &mut |_| {
                        left = left.saturating_sub(1);
                        left > 0
                    });
                    neighbour.unwrap();
                }
            });
        }
        let callers: Vec<_> = (0..setting.callers)
            .map(|_| {
                scope.spawn(|| loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    let Some(prompt) = prompts.get(i) else { return };
                    let one = ask(model, prompt, i);
                    given.lock().unwrap().insert(i, one);
                })
            })
            .collect();
        let ends: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
        ends.into_iter().for_each(|end| end.unwrap());
    });
    given.into_inner().unwrap().into_values().collect()
}

#[test]
fn every_prompt_has_one_output_whatever_the_setting() {
    let (count, every, share) = (scaled(20, 1_000), scaled(2, 1), share());
    watched("bit identity", PATIENCE * (20 + count as u32), move || {
        let (mut outputs, mut settings_used) = (0, 0);
        let (mut preemptions, mut hits) = (0, 0);
        for (family, store) in [
            (Family::Qwen3, Store::BF16),
            (Family::Qwen3, Store::F32),
            (Family::Llama, Store::BF16),
            (Family::Qwen2, Store::BF16),
        ] {
            let mut model = TestModel::wide_qwen3(17).of(family);
            model.config["max_position_embeddings"] = CONTEXT.into();
            let folder = model.write(store);
            let prompts = prompts(count);
            let expected = ask_all(&ALONE.load(folder.path()), &prompts, &ALONE);
            // Steps that divide nothing of the list's order, so that all kinds are met.
            let is_first = (family, store) == (Family::Qwen3, Store::BF16);
            let every = if is_first { every } else { every * every };
            let of_this_share =
                settings().into_iter().step_by(every).skip(share.0).step_by(share.1);
            for setting in of_this_share {
                let model = setting.load(folder.path());
                let given = ask_all(&model, &prompts, &setting);
                assert_eq!(given.len(), prompts.len());
                for (i, (given, expected)) in given.iter().zip(&expected).enumerate() {
                    assert!(
                        given == expected,
                        "prompt {i} of {} tokens differs with {setting:?}, {family:?}, {}: tokens {:?} and {:?}, not {:?} and {:?}",
                        prompts[i].len(),
                        store.name(),
                        given.greedy,
                        given.drawn,
                        expected.greedy,
                        expected.drawn,
                    );
                    outputs += 3;
                }
                let mut stats: xserv_model_stats = unsafe { std::mem::zeroed() };
                stats.struct_size = size_of::<xserv_model_stats>();
                check(unsafe { xserv_model_get_stats(model.0, &mut stats) }).unwrap();
                preemptions += stats.total_preemptions;
                hits += stats.total_cached_tokens;
                settings_used += 1;
            }
        }
        println!(
            "{outputs} outputs of {count} prompts in {settings_used} settings, {preemptions} preemptions, \
             {hits} tokens from the cache"
        );
        // Few settings may have no prefix cache, or no need to preempt.
        assert!(share.1 > 1 || (preemptions > 0 && hits > 0), "too easy a load");
    });
}
