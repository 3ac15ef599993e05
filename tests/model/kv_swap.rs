//! Blocks of the KV cache that are copied to the host and back.

use xserv::memory::DType;
use xserv::model::{BlockCopy, CopyDirection, KvSwap, Model, TokenChoice};

use crate::driver::{
    bits, cuda_context, load, load_fp8_cache, load_fp8_cache_on_cuda, load_on_cuda, Driver,
    Sequence,
};
use crate::files::{Family, Random, Store, TestModel};

const NUM_BLOCKS: usize = 40;

fn ids(len: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len).map(|_| random.below(900) as u32).collect()
}

/// Waits for memory for up to `most` places.
fn grow(swap: &mut KvSwap, most: usize) -> usize {
    loop {
        match swap.grow(most).expect("memory") {
            Some(num_places) => return num_places,
            None => std::thread::yield_now(),
        }
    }
}

/// Three sequences take turns in a cache that has room for one: each is copied to the host, others
/// write over its blocks, and it goes on in other blocks. Their logits are, bit for bit, those of
/// sequences that stay.
fn check_turns(model: &Model) {
    let mut swap = model.kv_swap();
    // As many slabs as it takes.
    let mut num_places = 0;
    while num_places < 3 * NUM_BLOCKS {
        num_places += grow(&mut swap, 3 * NUM_BLOCKS - num_places);
    }
    assert_eq!(num_places, 3 * NUM_BLOCKS);
    let mut roomy = Driver::new(model, 3 * NUM_BLOCKS);
    let mut tight = Driver::new(model, NUM_BLOCKS);
    let mut staying: Vec<Sequence> = (0..3).map(|_| Sequence::default()).collect();
    let mut moving: Vec<Sequence> = (0..3).map(|_| Sequence::default()).collect();
    for (turn, len) in [700, 1, 33, 500, 1].into_iter().enumerate() {
        for (i, (stays, moves)) in staying.iter_mut().zip(&mut moving).enumerate() {
            let first = (i * NUM_BLOCKS) as u32;
            if turn > 0 {
                tight.swap_in(moves, &mut swap, first);
            }
            let next = ids(len - i.min(len - 1), (10 * turn + i) as u64);
            let expected = roomy.step(&mut [(stays, &next)], false).remove(0);
            let found = tight.step(&mut [(moves, &next)], false).remove(0);
            assert_eq!(bits(&found), bits(&expected), "sequence {i} in turn {turn}");
            tight.swap_out(moves, &mut swap, first);
        }
    }
    assert!(swap.take_time().is_some());
}

/// Copies are queued while a step is under way, which has read and written the blocks before they
/// are copied; the step after them finds what they have brought.
fn check_order(model: &Model) {
    let mut swap = model.kv_swap();
    assert_eq!(grow(&mut swap, NUM_BLOCKS), NUM_BLOCKS);
    let (mut roomy, mut tight) =
        (Driver::new(model, 3 * NUM_BLOCKS), Driver::new(model, NUM_BLOCKS));
    let prompts = [ids(900, 1), ids(800, 2)];
    let greedy = [TokenChoice::Greedy];
    let mut expected = Vec::new();
    for prompt in &prompts {
        let mut sequence = Sequence::default();
        for next in [&prompt[..], &[7]] {
            roomy.begin(&mut [(&mut sequence, next)], &[], &greedy).expect("a step");
            expected.push(roomy.finish().tokens[0]);
        }
    }
    for _ in 0..3 {
        let (mut a, mut b) = (Sequence::default(), Sequence::default());
        tight.begin(&mut [(&mut a, &prompts[0])], &[], &greedy).expect("a step");
        tight.swap_out(&mut a, &mut swap, 0);
        tight.begin(&mut [(&mut b, &prompts[1])], &[], &greedy).expect("a step");
        let mut found = vec![tight.finish().tokens[0]];
        tight.free(b);
        tight.swap_in(&mut a, &mut swap, 0);
        tight.begin(&mut [(&mut a, &[7])], &[], &greedy).expect("a step");
        found.extend([tight.finish().tokens[0], tight.finish().tokens[0]]);
        assert_eq!(found, [expected[0], expected[2], expected[1]]);
        tight.free(a);
    }
}

#[test]
fn sequences_that_were_on_the_host_go_on_as_if_they_had_stayed() {
    for (head_dim, family, dtype) in [
        (64, Family::Qwen3, DType::F32),
        (64, Family::Qwen3, DType::BF16),
        (128, Family::Qwen3, DType::F32),
        (128, Family::Qwen3, DType::BF16),
        (128, Family::Llama, DType::BF16),
        (64, Family::Qwen2, DType::F32),
    ] {
        let mut files = TestModel::long_qwen3(21, head_dim).of(family);
        files.config["max_position_embeddings"] = 2048.into();
        if (family, head_dim) == (Family::Qwen2, 64) {
            files = files.in_window(50);
        }
        let dir = files.write(Store::BF16);
        let path = dir.path().to_str().unwrap();
        check_turns(&load(path, Some(dtype), 2));
        check_turns(&load_fp8_cache(path, dtype, 2));
        let Some(context) = cuda_context() else { continue };
        let model = load_on_cuda(path, Some(dtype), context).expect("a model");
        check_turns(&model);
        check_order(&model);
        let Some(context) = cuda_context() else { continue };
        let model = load_fp8_cache_on_cuda(path, dtype, context, false).expect("a model");
        check_turns(&model);
    }
}

#[test]
fn copies_that_cannot_be_are_refused() {
    let dir = TestModel::long_qwen3(21, 64).write(Store::BF16);
    let path = dir.path().to_str().unwrap();
    let mut models = vec![load(path, None, 1)];
    models
        .extend(cuda_context().map(|context| load_on_cuda(path, None, context).expect("a model")));
    for model in &models {
        let mut kv = model.kv_cache(4).expect("a cache");
        let mut swap = model.kv_swap();
        let mut copy = |swap: &mut _, block, place| {
            let copies = [BlockCopy { block, place, direction: CopyDirection::ToHost }];
            model.copy_blocks(&mut kv, swap, &copies).is_ok()
        };
        assert!(!copy(&mut swap, 0, 0));
        assert_eq!(grow(&mut swap, 3), 3);
        assert!(copy(&mut swap, 3, 2));
        assert!(
            !copy(&mut swap, 3, 3)
                && !copy(&mut swap, u32::MAX, 0)
                && !copy(&mut swap, 0, u32::MAX)
        );
        assert!(!copy(&mut swap, 5, 0));
    }
}
