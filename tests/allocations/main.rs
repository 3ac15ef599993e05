//! Steady decoding allocates nothing: not on the scheduler's thread, not on the threads of the kernels; on a GPU it
//! asks the driver for no memory either. The allocator of this program counts what any thread but those of the tests
//! does.

mod counting;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use xserv::engine::harness::{Harness, HarnessOptions, HarnessRequest, StepModel};
use xserv::engine::scheduler::Limits;
use xserv::engine::{
    DeviceChoice, Engine, EngineOptions, Event, Logger, Prompt, Request, SamplingOverrides, Ticket,
};
use xserv::error::Result;
use xserv::memory::DType;
use xserv::model::{
    BlockCopy, KvCache, KvSwap, Step, StepResult, TokenChoice, Workspace, NO_TOKEN,
};

use counting::{count, exempt_this_thread, Counts};

/// For what takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(120);
/// Steps that are watched, at least.
const STEPS: u64 = 10_000;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn begin() -> MutexGuard<'static, ()> {
    exempt_this_thread();
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn assert_none(counts: &Counts) {
    let Counts { allocations, frees, first } = counts;
    let first = first.as_deref().unwrap_or_default();
    assert_eq!((*allocations, *frees), (0, 0), "allocations and frees; the first:\n{first}");
}

/// Takes a token of each; false once one of them has ended.
fn take_one_each(tickets: &mut [Ticket]) -> bool {
    tickets.iter_mut().all(|ticket| match ticket.next(Some(PATIENCE)).unwrap() {
        Some(Event::Token { .. }) => true,
        Some(Event::Text { .. }) => true,
        Some(Event::End { .. }) => false,
        other => panic!("{other:?}"),
    })
}

/// A model without arithmetic: the next token is a function of the last. It waits for its users, so that the
/// queues of tokens do not grow.
struct Instant {
    depth: usize,
    vocab_size: usize,
    /// Results of the steps under way, and memory of those before.
    steps: Mutex<[(usize, StepResult); 2]>,
    begun: AtomicUsize,
    /// Tokens that were chosen, and those of them that were taken.
    chosen: AtomicUsize,
    taken: AtomicUsize,
}

/// Tokens that may be ahead of the users.
const AHEAD: usize = 200;

impl StepModel for Instant {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_steps_in_flight(&self) -> usize {
        self.depth
    }

    fn begin_step(
        &self,
        step: &Step<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        let begun = self.begun.fetch_add(1, Ordering::Relaxed);
        let chosen = self.chosen.fetch_add(step.choices.len(), Ordering::Relaxed);
        while chosen > self.taken.load(Ordering::Acquire) + AHEAD {
            std::thread::yield_now();
        }
        let steps = &mut *self.steps.lock().unwrap();
        let (used, result) = steps.iter_mut().min_by_key(|(used, _)| *used).unwrap();
        *used = begun + 1;
        result.tokens.clear();
        result.logits.clear();
        for (row, choice) in step.choices.iter().enumerate() {
            let token = (begun * 31 + row) % self.vocab_size;
            let by_model = *choice != TokenChoice::Caller;
            result.tokens.push(if by_model { token as u32 } else { NO_TOKEN });
            if !by_model {
                let logits = (0..self.vocab_size).map(|id| ((id * token) % 17) as f32 * 0.1);
                result.logits.extend(logits);
            }
        }
        Ok(())
    }

    fn copy_blocks(&self, _: &mut KvCache, _: &mut KvSwap, _: &[BlockCopy]) -> Result<()> {
        unreachable!("nobody is preempted")
    }

    fn finish_step(&self, _: &mut Workspace, out: &mut StepResult) -> Result<()> {
        let steps = &mut *self.steps.lock().unwrap();
        let oldest = steps.iter_mut().filter(|(used, _)| *used > 0).min_by_key(|(used, _)| *used);
        let (used, result) = oldest.unwrap();
        *used = 0;
        std::mem::swap(out, result);
        Ok(())
    }
}

/// Greedy, with all filters, with penalties.
fn samplings() -> [SamplingOverrides; 3] {
    let greedy = SamplingOverrides { temperature: Some(0.0), ..Default::default() };
    let filters = SamplingOverrides {
        temperature: Some(1.0),
        top_k: Some(40),
        top_p: Some(0.9),
        min_p: Some(0.01),
        ..Default::default()
    };
    let penalties = SamplingOverrides {
        repetition_penalty: Some(1.2),
        frequency_penalty: Some(0.1),
        ..filters
    };
    [greedy, filters, penalties]
}

#[test]
fn ten_thousand_steps_of_the_engine_allocate_nothing() {
    let _one = begin();
    for (depth, by_model) in [(1, false), (2, false), (2, true)] {
        let model = Arc::new(Instant {
            depth,
            vocab_size: 64,
            steps: Mutex::default(),
            begun: AtomicUsize::new(0),
            chosen: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
        });
        let options = HarnessOptions {
            num_blocks: 4096,
            limits: Limits { max_sequences: 8, max_prefill_tokens: 64 },
            prefix_cache: true,
            max_swapped: 0,
        };
        let engine = Harness::new(model.clone(), &options).unwrap();
        let submit = |index: usize| {
            engine.submit(HarnessRequest {
                token_ids: (0..10 + index as u32).collect(),
                max_new: STEPS as usize + 1000,
                by_model,
                sampling: samplings()[if by_model { 0 } else { index % 3 }],
                ..HarnessRequest::default()
            })
        };
        let mut tickets: Vec<Ticket> = (0..8).map(|index| submit(index).unwrap()).collect();
        let mut take = |steps: u64| {
            for _ in 0..steps {
                assert!(take_one_each(&mut tickets));
                model.taken.fetch_add(8, Ordering::Release);
            }
        };
        take(500);
        let before = engine.stats().steps;
        let counts = count(|| take(STEPS));
        let steps = engine.stats().steps - before;
        // It waits for nobody any more.
        model.taken.store(usize::MAX / 2, Ordering::Release);
        assert!(steps + AHEAD as u64 / 8 >= STEPS, "{steps} steps");
        assert_none(&counts);
    }
}

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3")
}

/// Rounds of requests that fill the context, the first of which is not watched; within a round, from where the
/// queues have grown to what their users may be behind.
fn check_model(options: &EngineOptions) {
    const QUEUED: u64 = 500;
    let engine = Engine::load(
        tiny().to_str().unwrap(),
        &EngineOptions { kv_cache_tokens: 3 * 2048, num_threads: 2, ..options.clone() },
        Logger::silent(),
        &mut |_| true,
    )
    .unwrap();
    let (mut steps, mut round) = (0, 0);
    let mut device = None;
    while steps < STEPS {
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| (i..i + 12).collect()).collect();
        let generated = engine.stats().generated_tokens;
        let submit = |index: usize| {
            let request = Request {
                prompt: Prompt::TokenIds(&prompts[index]),
                sampling: samplings()[index],
                seed: Some(index as u64),
                max_tokens: None,
                stop_strings: Vec::new(),
                stop_token_ids: &[],
                skip_special: true,
                ignore_eos: true,
                cancel: None,
                priority: 0,
                num_samples: 1,
                time_limit: None,
                cache_key: 0,
            };
            engine.submit(&request, None).unwrap()
        };
        let mut tickets: Vec<Ticket> = (0..3).map(submit).collect();
        while engine.stats().generated_tokens < generated + 3 * QUEUED {
            std::thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..QUEUED + 50 {
            assert!(take_one_each(&mut tickets));
        }
        let mut take = || {
            for _ in 0..1450 {
                assert!(take_one_each(&mut tickets));
            }
        };
        if round == 0 {
            take();
        } else {
            let before = engine.stats().steps;
            let counted = || engine.device_memory_stats().map(|s| (s.reserved, s.num_driver_calls));
            let on_device = *device.get_or_insert_with(counted);
            let counts = count(take);
            steps += engine.stats().steps - before;
            match on_device {
                None => assert_none(&counts),
                // A few frees of what was allocated before have been seen (8 in a round): not judged.
                Some(_) => assert_eq!(counts.allocations, 0, "{counts:#?}"),
            }
            assert_eq!(counted(), on_device, "memory asked of the device, and how often");
        }
        drop(tickets);
        round += 1;
    }
    println!("{steps} steps on {}: device counters {device:?}", engine.device_name());
}

#[test]
fn ten_thousand_steps_of_a_model_allocate_nothing() {
    let _one = begin();
    check_model(&EngineOptions {
        device: DeviceChoice::Cpu,
        dtype: Some(DType::F32),
        ..EngineOptions::default()
    });
}

#[test]
fn ten_thousand_steps_of_a_model_on_cuda_ask_the_device_for_nothing() {
    let _one = begin();
    if let Err(why) = xserv::backend::cuda::available() {
        assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {why}");
        println!("skipped: no CUDA device ({why})");
        return;
    }
    check_model(&EngineOptions {
        device: DeviceChoice::Cuda,
        dtype: Some(DType::BF16),
        ..EngineOptions::default()
    });
}

#[test]
fn an_allocation_is_seen() {
    let _one = begin();
    let counts = count(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(std::hint::black_box(vec![0u8; 1000])));
        })
    });
    assert!(counts.allocations >= 1 && counts.frees >= 1, "{counts:?}");
    assert!(counts.first.is_some());
}
