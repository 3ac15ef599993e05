//! Steps that are begun and finished apart, and the choice of tokens on a GPU.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xserv::backend::{Arena, ComputeContext, PinnedBuffer};
use xserv::engine::{GenerationConfig, Sampler, SamplingOverrides, SamplingParams};
use xserv::memory::{DType, ElementType};
use xserv::model::{Draw, Model, TokenChoice, FROM_BATCH, NO_TOKEN};
use xserv::ops::sample::{
    sample, SampleBuffers, SampleRow, SAMPLE_COUNTERS, SAMPLE_PARTIALS, SAMPLE_ROW_WORDS,
};

use crate::driver::{cuda_context, load, load_on_cuda, Driver, Sequence};
use crate::files::{Random, Store, TestModel};
use crate::golden::{self, Golden};

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.expect("a row").0 as u32
}

/// The first model of each architecture that this machine has.
fn golden_models() -> Vec<Golden> {
    let mut all = golden::all();
    let is_gpt2 = |golden: &Golden| golden.name.starts_with("gpt2");
    let first = all.iter().position(|golden| !is_gpt2(golden)).expect("a Qwen3");
    let mut models = vec![all.remove(first)];
    models.extend(all.into_iter().find(is_gpt2));
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
    // Each begins when the host has the end of the one before. (A hundredth for the difference of two clocks.)
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
        // Longer prompts behind those of one token.
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

/// Rows of logits and how to choose behind them, on the device.
struct Chooser {
    context: Arc<ComputeContext>,
}

impl Chooser {
    fn run(&self, logits: &[Vec<f32>], rows: &[SampleRow]) -> Vec<u32> {
        let (num_rows, vocab_size) = (logits.len(), logits[0].len());
        let float = ElementType::Float(DType::F32);
        let mut arena = Arena::new(&self.context, 192 << 20, "a test").expect("memory");
        let mut upload = |element, shape: &[usize], bytes: Vec<u8>| {
            let tensor = arena.tensor(element, shape).expect("room");
            let mut host = PinnedBuffer::new(&self.context, bytes.len(), "a test").expect("room");
            host.bytes().expect("bytes").copy_from_slice(&bytes);
            host.upload(0..bytes.len(), &tensor, 0).expect("a copy");
            host.wait().expect("the copy");
            tensor
        };
        let le = |words: Vec<u32>| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        let values = logits.concat().iter().map(|x| x.to_bits()).collect();
        let logits = upload(float, &[num_rows, vocab_size], le(values));
        let words = rows.iter().flat_map(|row| row.words()).collect();
        let rows = upload(ElementType::I32, &[num_rows, SAMPLE_ROW_WORDS], le(words));
        let mut host = PinnedBuffer::new(&self.context, num_rows * 4, "tokens").expect("room");
        let address = host.device_address(0);
        let address = le(vec![address as u32, (address >> 32) as u32]);
        let host_tokens = upload(ElementType::I32, &[2], address);
        let tokens = upload(ElementType::I32, &[num_rows], vec![0; num_rows * 4]);
        let len = num_rows * SAMPLE_COUNTERS;
        let counters = upload(ElementType::I32, &[len], vec![0; len * 4]);
        let len = num_rows * SAMPLE_PARTIALS;
        let partials = upload(ElementType::I64, &[len], vec![0xee; len * 8]);
        let buffers = SampleBuffers {
            rows: &rows,
            tokens: &tokens,
            host_tokens: &host_tokens,
            partials: &partials,
            counters: &counters,
        };
        for _ in 0..2 {
            // Twice: the counters are left as they were.
            sample(&self.context, &logits, &buffers).expect("a choice");
        }
        host.set_in_use().expect("an event");
        let words = host.bytes().expect("tokens").chunks(4);
        words.map(|b| u32::from_ne_bytes(b.try_into().expect("four"))).collect()
    }
}

fn chooser() -> Option<Chooser> {
    Some(Chooser { context: cuda_context()? })
}

fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (next() + next() + next() - 1.5) * 6.0).collect()
}

#[test]
fn greedy_on_cuda_is_the_first_of_the_largest() {
    let Some(chooser) = chooser() else { return };
    for vocab_size in [1, 3, 4, 7, 1000, 151_936, 151_937] {
        let mut rows: Vec<Vec<f32>> = (0..4).map(|seed| noise(seed, vocab_size)).collect();
        // Equals, far apart.
        let last = vocab_size - 1;
        rows[1][last] = 50.0;
        rows[1][last / 2] = 50.0;
        rows[2].fill(-3.0);
        let want: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
        let how = SampleRow { top_p: 1.0, ..SampleRow::default() };
        assert_eq!(chooser.run(&rows, &[how; 4]), want, "vocabulary of {vocab_size}");
        for (row, bad) in rows.iter_mut().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0]) {
            row[last / 3] = bad;
        }
        let tokens = chooser.run(&rows, &[how; 4]);
        assert_eq!(tokens[..3], [NO_TOKEN; 3]);
        assert_ne!(tokens[3], NO_TOKEN);
        let caller = SampleRow { temperature: -1.0, ..how };
        assert_eq!(chooser.run(&rows[3..], &[caller]), [NO_TOKEN]);
    }
}

/// Tokens that are drawn have the distribution of the CPU's sampler: the same tokens in the choice, and a share
/// within five standard deviations.
#[test]
fn draws_on_cuda_have_the_distribution_of_the_host() {
    let Some(chooser) = chooser() else { return };
    const DRAWS: usize = 4000;
    let cases = [
        (1.0, None, None, None),
        (0.7, Some(5), None, None),
        (1.0, None, Some(0.8), None),
        (1.3, Some(40), Some(0.9), Some(0.02)),
        (1.0, None, None, Some(0.1)),
        (0.3, Some(1), None, None),
        (1.0, Some(1000), Some(0.999), None),
        (1e-6, None, None, None),
        (1e-40, None, None, Some(0.1)),
    ];
    // The last ones: more equals than are sorted, more of the likely tokens, and too large a k.
    let flat = [
        (1.0, Some(5), Some(0.9), None),
        (1.0, None, Some(0.7), None),
        (0.8, Some(700), Some(0.9), Some(0.5)),
    ];
    let cases = cases.map(|case| (case, false)).into_iter().chain(flat.map(|case| (case, true)));
    for (case, ((temperature, top_k, top_p, min_p), is_flat)) in cases.enumerate() {
        let mut logits = noise(case as u64 + 10, if is_flat { 6000 } else { 203 });
        // Rounded, so that there are equals, at the borders of the filters too.
        match is_flat {
            true => logits.iter_mut().for_each(|x| *x = x.signum()),
            false => logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0),
        }
        let caller = SamplingOverrides {
            temperature: Some(temperature),
            top_k,
            top_p,
            min_p,
            ..SamplingOverrides::default()
        };
        let params = SamplingParams::resolve(&caller, &GenerationConfig::default()).expect("valid");
        let mut sampler = Sampler::new(params, 0, &[]).expect("a sampler");
        let mut want = vec![0.0; logits.len()];
        for candidate in sampler.candidates(&mut logits.clone()).expect("candidates") {
            want[candidate.token_id as usize] = candidate.weight;
        }
        let how = |index: usize| SampleRow {
            seed: 1 << 40 | case as u64,
            index: index as u64,
            temperature,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            top_k: top_k.unwrap_or(0) as i32,
        };
        let rows: Vec<SampleRow> = (0..DRAWS).map(how).collect();
        let tokens = chooser.run(&vec![logits.clone(); DRAWS], &rows);
        let mut counts = vec![0usize; logits.len()];
        tokens.iter().for_each(|&token| counts[token as usize] += 1);
        for (id, (&count, &p)) in counts.iter().zip(&want).enumerate() {
            assert!(count == 0 || p > 0.0, "case {case}: token {id} is not in the choice");
            let (n, expected) = (DRAWS as f64, DRAWS as f64 * p);
            let bar = 5.0 * (n * p * (1.0 - p)).sqrt() + 1.0;
            assert!(
                (count as f64 - expected).abs() <= bar,
                "case {case}: {id}: {count}, {expected}"
            );
        }
        // The same alone, and again.
        assert_eq!(chooser.run(&[logits.clone()], &rows[7..8]), tokens[7..8], "case {case}");
    }
}

/// Filters over a whole vocabulary: the token is one that the CPU's sampler leaves. Few tokens and many, more equals
/// than the device sorts, and more tokens than it sorts, without equals.
#[test]
fn filters_on_cuda_leave_what_they_leave_on_the_host() {
    let Some(chooser) = chooser() else { return };
    let filters = [
        (Some(50), None),
        (None, Some(0.5)),
        (Some(20), Some(0.95)),
        (None, Some(0.05)),
        (Some(512), Some(0.3)),
        (Some(513), None),
        (Some(3000), Some(0.6)),
        (None, Some(0.97)),
    ];
    let cases = filters.iter().flat_map(|filter| [(*filter, 1.0), (*filter, 0.05), (*filter, 0.0)]);
    for (case, ((top_k, top_p), spread)) in cases.enumerate() {
        let mut logits = noise(case as u64 + 90, 151_936);
        logits.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x * spread).to_f32());
        let caller = SamplingOverrides {
            temperature: Some(0.6),
            top_k,
            top_p,
            ..SamplingOverrides::default()
        };
        let params = SamplingParams::resolve(&caller, &GenerationConfig::default()).expect("valid");
        let mut sampler = Sampler::new(params, 0, &[]).expect("a sampler");
        let kept: Vec<u32> = sampler
            .candidates(&mut logits.clone())
            .expect("candidates")
            .iter()
            .map(|candidate| candidate.token_id)
            .collect();
        let rows: Vec<SampleRow> = (0..32)
            .map(|index| SampleRow {
                seed: 3,
                index,
                temperature: 0.6,
                top_p: top_p.unwrap_or(1.0),
                min_p: 0.0,
                top_k: top_k.unwrap_or(0) as i32,
            })
            .collect();
        for token in chooser.run(&vec![logits.clone(); 32], &rows) {
            let is_kept = kept.contains(&token);
            assert!(is_kept, "{top_k:?} {top_p:?} {spread}: {token} is not among {}", kept.len());
        }
    }
}

/// The chain of kernels for decoding against the operators for any batch: logits of one token for each of many
/// sequences of different lengths, several steps on, as graphs too.
#[test]
fn decoding_in_chains_on_cuda_is_the_forward_pass() {
    for dtype in [DType::BF16, DType::F16] {
        let dir = TestModel::wide_qwen3(5).write(Store::BF16);
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for batch in [1, 2, 3, 5, 8, 9, 17, 33, 70, 100, 130] {
            compare_chain(&model, batch, 1..151);
        }
    }
}

/// The same with rows as long as those of large models, which other kernels serve.
#[test]
fn decoding_long_rows_in_chains_on_cuda_is_the_forward_pass() {
    for (hidden, intermediate) in [(4096, 512), (512, 4096), (512, 6144)] {
        let Some(context) = cuda_context() else { return };
        let dir = TestModel::qwen3_of(6, hidden, intermediate).write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(DType::BF16), context).expect("a model");
        for batch in [1, 2, 3] {
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
    let bar = if dtype == DType::BF16 { 6e-2 } else { 8e-3 };
    assert!(worst <= bar, "{dtype} batch of {batch}: {worst:.2e}");
    // And the same bits again.
    assert!(run(true) == got, "{dtype} batch of {batch}");
}

#[test]
fn seeds_and_penalties_choose_the_way() {
    let draw = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1, index: 0 };
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
