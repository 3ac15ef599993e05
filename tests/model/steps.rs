//! Steps that are begun and finished apart, with tokens that the device chooses.

use std::ops::Range;
use std::time::{Duration, Instant};

use xserv::memory::DType;
use xserv::model::{Draw, KvFormat, Model, TokenChoice, FROM_BATCH, NO_TOKEN};

use crate::driver::{argmax, cuda_context, load, load_on_cuda, Driver, Sequence};
use crate::files::{Family, Random, Store, TestModel};
use crate::golden::{self, Golden};

/// Returns the first model of each architecture that this machine has, a Qwen3 in front.
fn golden_models() -> Vec<Golden> {
    let mut models: Vec<Golden> = Vec::new();
    let mut all = golden::all();
    all.sort_by_key(|golden| !golden.name.contains("qwen3"));
    assert!(all[0].name.contains("qwen3"), "a Qwen3");
    let family = |golden: &Golden| {
        golden.name.chars().take_while(char::is_ascii_alphanumeric).collect::<String>()
    };
    for golden in all {
        if models.iter().all(|other| family(other) != family(&golden)) {
            models.push(golden);
        }
    }
    models
}

fn golden_model() -> Golden {
    golden_models().swap_remove(0)
}

/// Greedy tokens by steps whose logits come to the caller.
fn greedy_by_caller(model: &Model, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut driver = Driver::new(model, 64);
    let (mut sequence, mut tokens, mut next) = (Sequence::default(), Vec::new(), prompt.to_vec());
    for _ in 0..count {
        driver.begin(&mut [(&mut sequence, &next)], &[], &[TokenChoice::Caller]).expect("a step");
        let result = driver.finish();
        assert_eq!(result.tokens, [NO_TOKEN]);
        let token = argmax(&result.logits);
        tokens.push(token);
        next = vec![token];
    }
    tokens
}

#[test]
fn the_caller_can_choose() {
    for golden in golden_models() {
        let cpu = load(golden.model_path(), Some(DType::F32), 2);
        let greedy = &golden.greedy[0];
        assert_eq!(greedy_by_caller(&cpu, &greedy.prompt_ids, greedy.ids.len()), greedy.ids);
        let Some(context) = cuda_context() else { continue };
        let model = load_on_cuda(golden.model_path(), Some(DType::F32), context).expect("a model");
        assert_eq!(greedy_by_caller(&model, &greedy.prompt_ids, greedy.ids.len()), greedy.ids);
    }
}

#[test]
fn a_step_that_cannot_be_is_refused() {
    let golden = golden_model();
    let cpu = load(golden.model_path(), Some(DType::F32), 1);
    let mut driver = Driver::new(&cpu, 8);
    let mut sequence = Sequence::default();
    let mut begin = |sources: &[u32], choices: &[TokenChoice]| {
        driver.begin(&mut [(&mut sequence, &[1])], sources, choices).is_ok()
    };
    assert!(!begin(&[], &[]));
    assert!(!begin(&[], &[TokenChoice::Greedy]));
    assert!(!begin(&[0], &[TokenChoice::Caller]));
    assert!(!begin(&[FROM_BATCH, FROM_BATCH], &[TokenChoice::Caller]));
    assert!(begin(&[FROM_BATCH], &[TokenChoice::Caller]));
    // One may be in flight.
    assert!(!begin(&[], &[TokenChoice::Caller]));
}

/// Steps one after another, with a pause in the middle.
fn check_step_times(model: &Model) {
    const PAUSE: Duration = Duration::from_millis(50);
    let mut driver = Driver::new(model, 64);
    let mut sequence = Sequence::default();
    let prompt: Vec<u32> = (0..300).collect();
    let begin = Instant::now();
    let mut times = Vec::new();
    for step in 0..6 {
        if step == 4 {
            std::thread::sleep(PAUSE);
        }
        let next = if step == 0 { &prompt[..] } else { &[7][..] };
        driver.begin(&mut [(&mut sequence, next)], &[], &[TokenChoice::Caller]).expect("a step");
        times.push(driver.finish().time);
    }
    let whole = begin.elapsed();
    assert!(times.iter().all(|time| time.busy > Duration::ZERO), "{times:?}");
    assert_eq!(times[0].idle, Duration::ZERO);
    // Each begins when the host has the end of the one before. (A hundredth for the difference of
    // two clocks.)
    assert!(times[1..].iter().all(|time| time.idle > Duration::ZERO), "{times:?}");
    assert!(times[4].idle >= PAUSE * 99 / 100, "{times:?}");
    let sum: Duration = times.iter().map(|time| time.busy + time.idle).sum();
    assert!(sum <= whole * 101 / 100, "{times:?} in {whole:?}");
    assert!(times.iter().map(|time| time.idle).sum::<Duration>() >= PAUSE * 99 / 100);
}

#[test]
fn times_of_steps_are_those_of_what_computes_them() {
    let golden = golden_model();
    check_step_times(&load(golden.model_path(), Some(DType::F32), 1));
    let Some(context) = cuda_context() else { return };
    let model = load_on_cuda(golden.model_path(), Some(DType::BF16), context).expect("a model");
    check_step_times(&model);
    // Begun ahead, as an engine does: they do not overlap.
    let mut driver = Driver::new(&model, 64);
    let mut sequence = Sequence::default();
    let prompt: Vec<u32> = (0..600).collect();
    let begin = Instant::now();
    let mut sum = Duration::ZERO;
    for step in 0..100 {
        let (next, sources) = match step {
            0 => (&prompt[..], &[][..]),
            _ => (&[7][..], &[0][..]),
        };
        let choices = [TokenChoice::Greedy];
        driver.begin(&mut [(&mut sequence, next)], sources, &choices).expect("a step");
        if step > 0 {
            let time = driver.finish().time;
            assert!(time.busy > Duration::ZERO);
            sum += time.busy + time.idle;
        }
    }
    let last = driver.finish().time;
    sum += last.busy + last.idle;
    let whole = begin.elapsed();
    assert!(sum <= whole * 101 / 100, "{sum:?} in {whole:?}");
    // Behind the first mark there is no moment that is neither.
    assert!(sum >= whole / 4, "{sum:?} in {whole:?}");
}

/// Several sequences, each step begun before the one that chooses its tokens is finished.
#[test]
fn steps_in_flight_follow_each_other_on_cuda() {
    for golden in golden_models() {
        steps_in_flight_follow_each_other(&golden);
    }
}

fn steps_in_flight_follow_each_other(golden: &Golden) {
    for dtype in [DType::F32, DType::BF16] {
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(golden.model_path(), Some(dtype), context).expect("a model");
        assert_eq!(model.max_steps_in_flight(), 2);
        let prompts: Vec<&[u32]> =
            golden.greedy.iter().map(|greedy| greedy.prompt_ids.as_slice()).collect();
        let count = golden.greedy.iter().map(|greedy| greedy.ids.len()).min().expect("one");
        let alone: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| greedy_by_caller(&model, prompt, count)).collect();

        let mut driver = Driver::new(&model, 128);
        let mut sequences: Vec<Sequence> = prompts.iter().map(|_| Sequence::default()).collect();
        let choices = vec![TokenChoice::Greedy; prompts.len()];
        let mut parts: Vec<_> = sequences.iter_mut().zip(prompts.iter().copied()).collect();
        // Longer prompts after those of one token.
        parts.sort_by_key(|(_, prompt)| prompt.len() > 1);
        driver.begin(&mut parts, &[], &choices).expect("the prompts");
        let mut tokens: Vec<Vec<u32>> = prompts.iter().map(|_| Vec::new()).collect();
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.sort_by_key(|&i| prompts[i].len() > 1);
        for round in 1..=count {
            if round < count {
                let mut slots: Vec<Option<&mut Sequence>> =
                    sequences.iter_mut().map(Some).collect();
                let mut parts: Vec<(&mut Sequence, &[u32])> =
                    order.iter().map(|&i| (slots[i].take().expect("once"), &[0][..])).collect();
                let sources: Vec<u32> = (0..prompts.len() as u32).collect();
                driver.begin(&mut parts, &sources, &choices).expect("a step");
            }
            for (row, token) in driver.finish().tokens.into_iter().enumerate() {
                tokens[order[row]].push(token);
            }
        }
        if dtype == DType::F32 {
            assert_eq!(tokens, alone);
        } else {
            // Rounding depends on the batch; most tokens do not.
            let same =
                tokens.concat().iter().zip(alone.concat()).filter(|(a, b)| **a == *b).count();
            println!(
                "{same} of {} bf16 tokens are those of the sequences alone",
                alone.concat().len()
            );
        }
    }
}

/// The chain of kernels for decoding against the operators for any batch: logits of one token for
/// each of many sequences of different lengths, several steps on, as graphs too.
#[test]
fn decoding_in_chains_on_cuda_is_the_forward_pass() {
    let settings =
        Family::DENSE.map(|family| [(family, DType::BF16), (family, DType::F16)]).concat();
    for (family, dtype) in settings {
        let dir = TestModel::wide_qwen3(5).of(family).write(Store::BF16);
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for batch in [1, 2, 3, 5, 8, 9, 17, 33, 70, 100, 130] {
            compare_chain(&model, batch, 1..151);
        }
    }
    for window in [1, 20, 64] {
        let dir = TestModel::wide_qwen3(5).in_window(window).write(Store::BF16);
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(dir.str(), Some(DType::BF16), context).expect("a model");
        for batch in [1, 2, 3, 5, 9, 33, 130] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// The same with rows as long as those of large models, which other kernels serve.
#[test]
fn decoding_long_rows_in_chains_on_cuda_is_the_forward_pass() {
    for (hidden, intermediate, family) in [
        (4096, 512, Family::Qwen3),
        (512, 4096, Family::Qwen3),
        (512, 6144, Family::Qwen3),
        (4096, 512, Family::Qwen2),
        (512, 6144, Family::Llama),
    ] {
        let Some(context) = cuda_context() else { return };
        let dir = TestModel::qwen3_of(6, hidden, intermediate).of(family).write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(DType::BF16), context).expect("a model");
        for batch in [1, 2, 3] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// The same with heads that the fused attention is not made for, some of which are padded.
#[test]
fn decoding_heads_of_any_length_in_chains_on_cuda_is_the_forward_pass() {
    for (head_dim, family, dtype) in [
        (48, Family::Qwen3, DType::BF16),
        (80, Family::Llama, DType::F16),
        (96, Family::Qwen3, DType::BF16),
        (100, Family::Qwen2, DType::BF16),
        (256, Family::Qwen3, DType::BF16),
        (256, Family::Llama, DType::F16),
    ] {
        let Some(context) = cuda_context() else { return };
        let dir = TestModel::long_qwen3(8, head_dim).of(family).write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for batch in [1, 2, 3, 9, 33, 130] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// Graphs of operators, of an architecture without a chain.
#[test]
fn decoding_gpt2_by_steps_on_cuda_is_the_forward_pass() {
    let dir = TestModel::wide_gpt2(5).write(Store::BF16);
    for dtype in [DType::BF16, DType::F16] {
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for batch in [1, 2, 3, 5, 8, 9, 17, 70] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// Prompts of `lens` tokens.
pub fn compare_chain(model: &Model, batch: usize, lens: Range<usize>) {
    let (dtype, vocab_size) = (model.dtype(), model.config().vocab_size);
    let mut random = Random(batch as u64);
    let prompts: Vec<Vec<u32>> = (0..batch)
        .map(|_| {
            let len = lens.start + random.below(lens.len());
            (0..len).map(|_| random.below(vocab_size) as u32).collect()
        })
        .collect();
    let next: Vec<Vec<u32>> =
        (0..4).map(|_| (0..batch).map(|_| random.below(vocab_size) as u32).collect()).collect();
    let run = |by_steps: bool| -> Vec<Vec<f32>> {
        let mut driver = Driver::new(model, batch * (lens.end / 32 + 2));
        driver.reserve(batch * (lens.end + 10));
        let mut sequences: Vec<Sequence> = (0..batch).map(|_| Sequence::default()).collect();
        for (sequence, prompt) in sequences.iter_mut().zip(&prompts) {
            driver.step(&mut [(sequence, prompt)], false);
        }
        let mut all = Vec::new();
        for tokens in &next {
            let mut parts: Vec<(&mut Sequence, &[u32])> =
                sequences.iter_mut().zip(tokens.chunks(1)).collect();
            if by_steps {
                let choices = vec![TokenChoice::Caller; batch];
                driver.begin(&mut parts, &[], &choices).expect("a step");
                all.push(driver.finish().logits);
            } else {
                all.push(driver.step(&mut parts, false).concat());
            }
        }
        all
    };
    let (want, got) = (run(false), run(true));
    let mut worst = 0.0f64;
    for (want, got) in want.iter().zip(&got) {
        for (want, got) in want.chunks(vocab_size).zip(got.chunks(vocab_size)) {
            let sum: f64 = want.iter().zip(got).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let rms = (sum / vocab_size as f64).sqrt() / golden::std_of(want);
            assert!(rms.is_finite(), "{dtype} batch of {batch}");
            worst = worst.max(rms);
        }
    }
    println!("{dtype} batch of {batch}: worst row {worst:.2e} std");
    let bar = match (model.kv_layout().format, dtype) {
        // A rounding that falls the other way may make a neighbour in 8 bits of a key.
        (KvFormat::Fp8, _) => 0.12,
        (KvFormat::Dense, DType::BF16) => 6e-2,
        (KvFormat::Dense, _) => 8e-3,
    };
    assert!(worst <= bar, "{dtype} batch of {batch}: {worst:.2e}");
    // And the same bits again.
    assert!(run(true) == got, "{dtype} batch of {batch}");
}

#[test]
fn seeds_and_penalties_choose_the_way() {
    let draw = Draw { seed: 1, ..Draw::default() };
    let golden = golden_model();
    let cpu = load(golden.model_path(), Some(DType::F32), 1);
    assert!(cpu.can_choose(&TokenChoice::Caller));
    assert!(!cpu.can_choose(&TokenChoice::Draw(draw)));
    for golden in golden_models() {
        seeds_choose_the_way(&golden, draw);
    }
}

fn seeds_choose_the_way(golden: &Golden, draw: Draw) {
    let Some(context) = cuda_context() else { return };
    let model = load_on_cuda(golden.model_path(), Some(DType::F32), context).expect("a model");
    assert!(model.can_choose(&TokenChoice::Draw(draw)));
    let prompt = &golden.greedy[0].prompt_ids;
    let tokens = |seed: u64| -> Vec<u32> {
        let mut driver = Driver::new(&model, 64);
        let mut sequence = Sequence::default();
        let mut next = prompt.clone();
        let choose = |index| TokenChoice::Draw(Draw { seed, index, temperature: 5.0, ..draw });
        (0..20)
            .map(|index| {
                driver.begin(&mut [(&mut sequence, &next)], &[], &[choose(index)]).expect("a step");
                let token = driver.finish().tokens[0];
                next = vec![token];
                token
            })
            .collect()
    };
    assert_eq!(tokens(1), tokens(1));
    assert_ne!(tokens(1), tokens(2));
}
