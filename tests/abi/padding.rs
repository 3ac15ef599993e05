//! The contents of unused memory change nothing: rows of a workspace that a step leaves out, slots
//! of a block of the KV cache after the last token, scratch, and whatever a kernel reads beyond
//! what it needs. One token's embedding is NaN, so that requests with it write NaN to all of that
//! memory; others must give the bits that they give in memory that no such request has touched,
//! afterwards and beside one.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use xserv::backend::cpu::Isa;
use xserv::ffi::xserv_dtype::*;
use xserv::ffi::xserv_weights::*;
use xserv::ffi::*;

use crate::batching::idle;
use crate::client::*;
use crate::cuda::{on_cuda, shared_cuda};
use crate::files::{Family, Random, Store, TempDir, TestModel};

/// The token whose embedding is NaN; prompts have none from here on.
const POISON: u32 = 60;
const CONTEXT: usize = 256;
/// Eleven blocks: fewer than the prompts of a crowd need.
const KV_TOKENS: u64 = 352;
/// The largest step of a prompt: one that cuts none, and one that cuts them where neither blocks
/// nor tiles end.
const CUTS: [u64; 2] = [0, 37];

fn poisoned(mut model: TestModel) -> TempDir {
    let names = ["model.embed_tokens.weight", "wte.weight", "transformer.wte.weight"];
    let embedding = model.tensors.iter_mut().find(|tensor| names.contains(&tensor.name.as_str()));
    let embedding = embedding.unwrap();
    let width = embedding.shape[1];
    embedding.values[POISON as usize * width..][..width].fill(f32::NAN);
    let positions = model.config.as_object_mut().unwrap();
    for name in ["max_position_embeddings", "n_positions"] {
        positions.entry(name).and_modify(|most| {
            *most = most.as_u64().unwrap().max(CONTEXT as u64).into();
        });
    }
    model.write(Store::BF16)
}

/// Fills the workspace and the KV cache with NaN, and says so.
fn poison(model: &Model) {
    let prompt = [POISON; CONTEXT - 2];
    std::thread::scope(|scope| {
        for length in [CONTEXT - 2, 97, 64, 33, 1] {
            let prompt = &prompt[..length];
            scope.spawn(move || {
                let failure = model.generate(&greedy(prompt, 2)).map(|output| output.ids);
                let failure = failure.unwrap_err();
                assert!(failure.message.contains("not finite"), "{}", failure.message);
            });
        }
    });
    let logits = model.logits(&prompt, true).unwrap();
    assert!(logits.iter().all(|logit| logit.is_nan()), "the poison does not reach the end");
}

/// The result for a prompt: tokens, greedy or drawn, and the bits of its logits.
type Given = (Vec<u32>, Vec<u32>);

fn ask(model: &Model, prompt: &[u32], index: usize) -> Outcome<Given> {
    let request = xserv_request {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: index as u64,
        ignore_eos: 1,
        // Drawn tokens must not be the poison.
        logit_bias: &BAN,
        num_logit_bias: 1,
        ..greedy(prompt, 3 + index as u32 * 11 % 50)
    };
    let ids = model.generate(&request)?.ids;
    let logits = model.logits(prompt, true)?;
    Ok((ids, logits.iter().map(|logit| logit.to_bits()).collect()))
}

/// Whether an output is the expected one: to the bit, or with logits that are as near as those of
/// another batch.
fn agrees(given: &Outcome<Given>, expected: &Given, is_exact: bool) -> bool {
    let given = match given {
        Ok(given) => given,
        Err(failure) => {
            println!("{}", failure.message);
            return false;
        }
    };
    let value = |bits: &u32| f32::from_bits(*bits);
    let largest = expected.1.iter().map(value).fold(0.0f32, |a, b| a.max(b.abs()));
    let mut pairs = given.1.iter().map(value).zip(expected.1.iter().map(value));
    given == expected || !is_exact && pairs.all(|(a, b)| (a - b).abs() <= 0.03 * largest)
}

static BAN: xserv_logit_bias = xserv_logit_bias { token_id: POISON, bias: f32::NEG_INFINITY };

/// Returns the number of prompts whose output differs from that in clean memory, for each of
/// [`CUTS`]: alone in poisoned memory, and in a crowd with poison in its midst.
fn differences(
    path: &std::path::Path,
    options: &xserv_load_options,
    is_exact: bool,
) -> [[usize; 2]; 2] {
    let mut random = Random(23);
    let prompts: Vec<Vec<u32>> = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65, 100, 129, 200]
        .iter()
        .map(|&length| (0..length).map(|_| random.below(POISON as usize) as u32).collect())
        .collect();
    let options = xserv_load_options {
        max_context_tokens: CONTEXT as u64,
        kv_cache_tokens: KV_TOKENS,
        max_batch_size: 8,
        ..*options
    };
    let model = Model::load(path, &options).unwrap();
    let expected: Vec<Given> =
        prompts.iter().enumerate().map(|(i, prompt)| ask(&model, prompt, i).unwrap()).collect();
    drop(model);
    CUTS.map(|max_prefill_tokens| {
        let options = xserv_load_options { max_prefill_tokens, ..options };
        let model = Model::load(path, &options).unwrap();
        let mut alone = 0;
        for (i, (prompt, expected)) in prompts.iter().zip(&expected).enumerate() {
            if prompt.len() as u64 > max_prefill_tokens {
                poison(&model);
                alone += usize::from(!agrees(&ask(&model, prompt, i), expected, is_exact));
            }
        }
        let together = differences_in_a_crowd(&model, &prompts, &expected, is_exact);
        idle(&model);
        [alone, together]
    })
}

fn differences_in_a_crowd(
    model: &Model,
    prompts: &[Vec<u32>],
    expected: &[Given],
    is_exact: bool,
) -> usize {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_over = &is_over;
        let poisoner = scope.spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                poison(model);
            }
        });
        let crowd: Vec<_> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| scope.spawn(move || ask(model, prompt, i)))
            .collect();
        let given: Vec<_> = crowd.into_iter().map(|one| one.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        poisoner.join().unwrap();
        let pairs = given.iter().zip(expected);
        let differs = |(given, expected): &(&std::thread::Result<Outcome<Given>>, &Given)| {
            given.as_ref().map_or(true, |given| !agrees(given, expected, is_exact))
        };
        pairs.filter(differs).count()
    })
}

/// Models of all families, narrow ones whose rows are no whole vectors and wide ones, and one whose
/// rows are no whole pairs either.
fn models() -> Vec<(String, TempDir)> {
    let mut all = vec![
        ("GPT-2".to_string(), poisoned(TestModel::gpt2(3))),
        ("odd".to_string(), poisoned(TestModel::qwen3_of(6, 51, 77))),
    ];
    for family in Family::ALL {
        all.push((format!("{family:?}"), poisoned(TestModel::qwen3(4).of(family))));
        all.push((format!("wide {family:?}"), poisoned(TestModel::wide_qwen3(5).of(family))));
    }
    all
}

#[test]
fn what_unused_memory_holds_changes_nothing_on_the_cpu() {
    for (name, dir) in models() {
        for (dtype, weights) in [
            (XSERV_DTYPE_BF16, XSERV_WEIGHTS_AS_STORED),
            (XSERV_DTYPE_F32, XSERV_WEIGHTS_AS_STORED),
            (XSERV_DTYPE_BF16, XSERV_WEIGHTS_INT8),
            (XSERV_DTYPE_BF16, XSERV_WEIGHTS_INT4),
        ] {
            let is_quantised = weights as u32 != XSERV_WEIGHTS_AS_STORED as u32;
            if is_quantised && !name.starts_with("wide") && name != "odd" {
                continue;
            }
            // Quantised weights may be rounded otherwise in steps of many tokens.
            for deterministic in if is_quantised { &[1, 0][..] } else { &[0] } {
                let options = xserv_load_options {
                    num_threads: 2,
                    dtype: dtype as u32,
                    weights: weights as u32,
                    deterministic: *deterministic,
                    ..load_options()
                };
                let is_exact = !is_quantised || *deterministic == 1;
                // Then a token may also choose another expert, of which no bound follows.
                if !is_exact && name.contains("Moe") {
                    continue;
                }
                let found = differences(dir.path(), &options, is_exact);
                let what = format!("{name}, {dtype:?}, {weights:?}, {deterministic}");
                assert_eq!(found, [[0; 2]; 2], "{what}");
            }
        }
    }
}

/// With AMX bf16 is computed in tiles, by other kernels than without.
#[test]
fn what_unused_memory_holds_changes_nothing_without_amx() {
    if Isa::detect() != Isa::Avx512Amx {
        println!("skipped: the test before this one has no AMX either");
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "padding::what_unused_memory_holds_changes_nothing_on_the_cpu"])
        .env("XSERV_AMX", "0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("test result: ok. 1"), "{text}{errors}");
}

#[test]
fn what_unused_memory_holds_changes_nothing_on_cuda() {
    let Some(_device) = shared_cuda() else { return };
    for (name, dir) in models() {
        for dtype in [XSERV_DTYPE_BF16, XSERV_DTYPE_F32] {
            for deterministic in [1, 0] {
                let options = xserv_load_options { deterministic, ..on_cuda(dtype) };
                let found = differences(dir.path(), &options, deterministic == 1);
                assert_eq!(found, [[0; 2]; 2], "{name}, {dtype:?}, deterministic {deterministic}");
            }
        }
    }
}
