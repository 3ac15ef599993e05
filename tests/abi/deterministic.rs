//! Models that are loaded with `deterministic` through the C functions: what a request gives
//! depends on the request alone.

use xserv::ffi::xserv_dtype::*;
use xserv::ffi::xserv_weights::*;
use xserv::ffi::*;

use crate::batching::idle;
use crate::client::*;
use crate::cuda::{on_cuda, shared_cuda};
use crate::files::{Family, Random, Store, TestModel};

fn request_of(prompt: &[u32], index: usize) -> xserv_request {
    xserv_request {
        seed: 100 + index as u64,
        temperature: if index.is_multiple_of(5) { 0.0 } else { 0.8 },
        top_p: if index.is_multiple_of(3) { 0.95 } else { 1.0 },
        // Host and device choose tokens each in their way; which one follows from the request.
        repetition_penalty: if index % 7 == 6 { 1.1 } else { 1.0 },
        ignore_eos: 1,
        ..greedy(prompt, 60 + index as u32 * 37 % 90)
    }
}

/// Each request alone with an empty cache, then all from threads of their own, twice, in a KV cache
/// that is far too small for them: they are cut, preempted, and find each other's beginnings.
/// Returns how many of the latter outputs differ, and the statistics of the crowded model.
fn different_outputs(
    path: &std::path::Path,
    options: &xserv_load_options,
) -> (usize, xserv_model_stats) {
    let mut random = Random(5);
    let mut ids = |len: usize| -> Vec<u32> { (0..len).map(|_| random.below(900) as u32).collect() };
    let begin = ids(150);
    let prompts: Vec<Vec<u32>> = (0..28)
        .map(|i| match i % 2 {
            0 => [begin[..70 + i * 2].to_vec(), ids(i * 9)].concat(),
            _ => ids(1 + i * i % 300),
        })
        .collect();
    let options = xserv_load_options { max_context_tokens: 512, ..*options };
    let roomy = xserv_load_options { prefix_cache: 0, kv_cache_tokens: 4096, ..options };
    let model = Model::load(path, &roomy).unwrap();
    let run = |model: &Model, i: usize| model.generate(&request_of(&prompts[i], i)).unwrap().ids;
    let alone: Vec<Vec<u32>> = (0..prompts.len()).map(|i| run(&model, i)).collect();
    drop(model);

    let small = xserv_load_options { kv_cache_tokens: 1024, ..options };
    let model = Model::load(path, &small).unwrap();
    let mut different = 0;
    for _ in 0..2 {
        let together: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let run = &run;
            let model = &model;
            let threads: Vec<_> =
                (0..prompts.len()).map(|i| scope.spawn(move || run(model, i))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        different += together.iter().zip(&alone).filter(|(a, b)| a != b).count();
    }
    let stats = idle(&model);
    println!(
        "{} preemptions, {} of {} tokens from the cache, {} blocks to the host, {} back",
        stats.total_preemptions,
        stats.total_cached_tokens,
        stats.total_looked_up_tokens,
        stats.total_swapped_out_blocks,
        stats.total_swapped_in_blocks
    );
    assert!(stats.total_preemptions > 0);
    assert_eq!(stats.total_cached_tokens > 0, options.prefix_cache == 1);
    assert_eq!(stats.num_used_swap_blocks, 0);
    (different, stats)
}

fn test_model(head_dim: usize, family: Family) -> crate::files::TempDir {
    write(TestModel::long_qwen3(21, head_dim).of(family))
}

/// Returns a model whose first layer has a window that is shorter than most prompts.
fn windowed_model(head_dim: usize, family: Family) -> crate::files::TempDir {
    write(TestModel::long_qwen3(21, head_dim).of(family).in_window(50))
}

fn write(mut model: TestModel) -> crate::files::TempDir {
    model.config["max_position_embeddings"] = 512.into();
    model.write(Store::BF16)
}

#[test]
fn requests_on_cuda_do_not_depend_on_others() {
    let Some(_device) = shared_cuda() else { return };
    for (head_dim, dtype, family) in [
        (128, XSERV_DTYPE_BF16, Family::Qwen3),
        (128, XSERV_DTYPE_F32, Family::Qwen3),
        (64, XSERV_DTYPE_F16, Family::Qwen3),
        (128, XSERV_DTYPE_BF16, Family::Llama),
        (64, XSERV_DTYPE_BF16, Family::Llama),
        (128, XSERV_DTYPE_F16, Family::Qwen2),
        (64, XSERV_DTYPE_F32, Family::Qwen2),
    ] {
        let dir = test_model(head_dim, family);
        let options = on_cuda(dtype);
        let (without, _) = different_outputs(dir.path(), &options);
        let options = xserv_load_options { deterministic: 1, ..options };
        let (with, _) = different_outputs(dir.path(), &options);
        println!("{with} of 56 outputs differ; without the option {without}");
        assert_eq!(with, 0, "{family:?}, heads of {head_dim}");
    }
    for (head_dim, dtype) in [(128, XSERV_DTYPE_BF16), (64, XSERV_DTYPE_F16)] {
        let dir = windowed_model(head_dim, Family::Qwen3);
        let options = xserv_load_options { deterministic: 1, ..on_cuda(dtype) };
        let (different, _) = different_outputs(dir.path(), &options);
        assert_eq!(different, 0, "a window, heads of {head_dim}");
    }
}

#[test]
fn requests_on_the_cpu_do_not_depend_on_others() {
    const AS_STORED: u32 = XSERV_WEIGHTS_AS_STORED as u32;
    // Without the option, quantised weights may be rounded otherwise in steps of many tokens.
    for (family, deterministic, weights) in [
        (Family::Qwen3, 0, AS_STORED),
        (Family::Qwen3, 1, AS_STORED),
        (Family::Llama, 0, AS_STORED),
        (Family::Qwen2, 1, AS_STORED),
        (Family::Qwen3, 1, XSERV_WEIGHTS_INT4 as u32),
        (Family::Llama, 1, XSERV_WEIGHTS_INT8 as u32),
    ] {
        let dir = test_model(64, family);
        let dtype = XSERV_DTYPE_BF16 as u32;
        let options =
            xserv_load_options { deterministic, num_threads: 2, dtype, weights, ..load_options() };
        let (different, stats) = different_outputs(dir.path(), &options);
        // Nothing is kept on the host unless it is asked for: the KV cache lies there.
        assert_eq!((different, stats.num_swap_blocks, stats.total_swapped_out_blocks), (0, 0, 0));
    }
    let dir = windowed_model(64, Family::Qwen2);
    let dtype = XSERV_DTYPE_BF16 as u32;
    let options = xserv_load_options { num_threads: 2, dtype, ..load_options() };
    assert_eq!(different_outputs(dir.path(), &options).0, 0, "a window");
}

/// Requests that were preempted go on with what was kept on the host, as if nothing had been.
fn check_swapping(options: &xserv_load_options) {
    for (family, prefix_cache) in
        [(Family::Qwen3, 0), (Family::Qwen3, 1), (Family::Llama, 1), (Family::Qwen2, 0)]
    {
        let dir = match family {
            Family::Qwen2 => windowed_model(64, family),
            _ => test_model(64, family),
        };
        let options = xserv_load_options {
            prefix_cache,
            max_swap_bytes: 4 << 20,
            deterministic: 1,
            ..*options
        };
        // Whether blocks are kept or recomputed is decided by measured times, so on a loaded
        // machine it may take several runs until some come back.
        let has_moved = (0..5).any(|_| {
            let (different, stats) = different_outputs(dir.path(), &options);
            assert_eq!(different, 0, "{family:?}");
            let moved = [stats.total_swapped_out_blocks, stats.total_swapped_in_blocks];
            println!("{family:?}: {moved:?} blocks out and in, {} places", stats.num_swap_blocks);
            stats.num_swap_blocks > 0 && moved.iter().all(|blocks| *blocks > 0)
        });
        assert!(has_moved, "{family:?}: no block was kept on the host and came back");
    }
    let dir = test_model(64, Family::Qwen3);
    // No limit takes nothing by itself.
    let unlimited = xserv_load_options { max_swap_bytes: u64::MAX, ..*options };
    assert_eq!(idle(&Model::load(dir.path(), &unlimited).unwrap()).num_swap_blocks, 0);
    // Too little for a block.
    let options = xserv_load_options { max_swap_bytes: 1, deterministic: 1, ..*options };
    let (different, stats) = different_outputs(dir.path(), &options);
    assert_eq!((different, stats.num_swap_blocks, stats.total_swapped_out_blocks), (0, 0, 0));
}

#[test]
fn what_was_kept_on_the_host_is_what_it_was_on_the_cpu() {
    check_swapping(&xserv_load_options { num_threads: 2, ..load_options() });
}

#[test]
fn what_was_kept_on_the_host_is_what_it_was_on_cuda() {
    let Some(_device) = shared_cuda() else { return };
    check_swapping(&on_cuda(XSERV_DTYPE_BF16));
}

#[test]
fn the_option_is_0_or_1() {
    let options = xserv_load_options { deterministic: 2, ..load_options() };
    let failure = Model::load(&tiny(), &options).err().unwrap();
    assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
    assert!(failure.message.contains("options.deterministic"), "{}", failure.message);
}
