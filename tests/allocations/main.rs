//! Steady decoding allocates nothing: not on the scheduler's thread, not on the threads of the
//! kernels; on a GPU it asks the driver for no memory either. The library's allocator tells what
//! any thread but those of the tests does. It is also made to fail, to show which requests that
//! ends.

#![cfg(all(feature = "reserve", debug_assertions))]

mod callers;
mod counting;
#[path = "../support/model_files.rs"]
mod files;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use xserv::engine::harness::{Harness, HarnessOptions, HarnessRequest, StepModel};
use xserv::engine::scheduler::{Entry, Limits};
use xserv::engine::{
    DeviceChoice, Engine, EngineOptions, Event, Logger, Prompt, Request, SamplingOverrides, Ticket,
    ToolChoice,
};
use xserv::error::{ErrorKind, Result};
use xserv::ffi::{
    xserv_device_kind, xserv_event, xserv_event_kind, xserv_load, xserv_load_options,
    xserv_load_options_init, xserv_model_free, xserv_next, xserv_request, xserv_request_init,
    xserv_status, xserv_submission_free, xserv_submit, XSERV_WAIT_FOREVER,
};
use xserv::memory::DType;
use xserv::model::{
    BlockCopy, ForwardBatch, KvCache, KvSwap, ScoresOut, Step, StepResult, TokenChoice, Workspace,
    WriteMasks, NO_TOKEN,
};

use counting::{count, exempt_this_thread, fail_nth, fail_size, Counts};
use files::{Family, Store, TestModel};

/// For what takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(120);
/// Steps that are watched, at least.
const STEPS: u64 = 10_000;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn begin() -> MutexGuard<'static, ()> {
    exempt_this_thread();
    lock()
}

/// As `begin`, for a thread that is counted itself.
fn lock() -> MutexGuard<'static, ()> {
    counting::begin();
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
    /// Whether all requests are submitted: before, one alone would get ahead of its users, who wait
    /// for the others.
    is_open: AtomicBool,
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
        let is_early = || !self.is_open.load(Ordering::Acquire);
        while is_early() || chosen > self.taken.load(Ordering::Acquire) + AHEAD {
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

    fn choose_masked(&self, _: &Step<'_>, _: &mut Workspace, _: &mut WriteMasks<'_>) -> Result<()> {
        unreachable!("nobody has a constraint")
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

    fn logits(
        &self,
        _: &ForwardBatch<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: &mut [f32],
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        unreachable!("nobody asks for logits")
    }

    fn score(
        &self,
        _: &ForwardBatch<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: ScoresOut<'_>,
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        unreachable!("nobody asks for scores")
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
            is_open: AtomicBool::new(false),
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
        model.is_open.store(true, Ordering::Release);
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

/// Rounds of requests that fill the context, the first of which is not watched; within a round,
/// from where the queues have grown to what their users may be behind.
fn check_model(folder: &Path, options: &EngineOptions) {
    const QUEUED: u64 = 500;
    let engine = Engine::load(
        folder.to_str().unwrap(),
        &EngineOptions { kv_cache_tokens: 3 * 2048, num_threads: 2, ..options.clone() },
        std::sync::Arc::new(Logger::silent()),
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
                logit_bias: Vec::new(),
                min_tokens: 0,
                first_tokens: &[],
                log_probs: None,
                constraint: None,
                prompt_log_probs: None,
                answer_format: None,
                tool_choice: ToolChoice::Auto,
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
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        dtype: Some(DType::F32),
        ..EngineOptions::default()
    };
    check_model(&tiny(), &options);
    // How many tokens come to an expert differs from step to step.
    let mut with_experts = TestModel::qwen3(1).of(Family::Qwen3Moe);
    with_experts.config["max_position_embeddings"] = 2048.into();
    check_model(with_experts.write(Store::F32).path(), &options);
}

#[test]
fn ten_thousand_steps_of_a_model_on_cuda_ask_the_device_for_nothing() {
    let _one = begin();
    if let Err(why) = xserv::backend::cuda::available() {
        assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {why}");
        println!("skipped: no CUDA device ({why})");
        return;
    }
    let options = EngineOptions {
        device: DeviceChoice::Cuda,
        dtype: Some(DType::BF16),
        ..EngineOptions::default()
    };
    check_model(&tiny(), &options);
}

/// The room of a plan is there from the start: planning ends no request for lack of memory.
#[test]
fn planning_finds_its_memory_whatever_the_allocator_says() {
    let _one = begin();
    for (depth, by_model) in [(1, false), (2, false), (2, true)] {
        let model = Arc::new(Instant {
            depth,
            vocab_size: 64,
            steps: Mutex::default(),
            begun: AtomicUsize::new(0),
            is_open: AtomicBool::new(true),
            chosen: AtomicUsize::new(0),
            // It waits for nobody.
            taken: AtomicUsize::new(usize::MAX / 2),
        });
        // A size that nothing else has.
        let limits = Limits { max_sequences: 59, max_prefill_tokens: 64 };
        let options =
            HarnessOptions { num_blocks: 256, limits, prefix_cache: true, max_swapped: 0 };
        let engine = Harness::new(model, &options).unwrap();
        let size = limits.max_sequences * size_of::<Entry>();
        let failures = fail_size(size, || {
            let submit = |index: u32| {
                engine.submit(HarnessRequest {
                    token_ids: (0..10 + index).collect(),
                    max_new: 40,
                    by_model,
                    ..HarnessRequest::default()
                })
            };
            let tickets: Vec<Ticket> = (0..70).map(|index| submit(index).unwrap()).collect();
            for mut ticket in tickets {
                let mut tokens = 0;
                while let Some(Event::Token { .. }) = ticket.next(Some(PATIENCE)).unwrap() {
                    tokens += 1;
                }
                assert_eq!(tokens, 40);
            }
        });
        assert_eq!(failures, 0);
    }
}

/// A request that loses a token to a failed allocation ends with the error.
#[test]
fn no_token_is_lost_for_want_of_memory_on_the_callers_thread() {
    const TOKENS: usize = 40;
    let _one = begin();
    let model = Arc::new(Instant {
        depth: 1,
        vocab_size: 64,
        steps: Mutex::default(),
        begun: AtomicUsize::new(0),
        is_open: AtomicBool::new(true),
        chosen: AtomicUsize::new(0),
        taken: AtomicUsize::new(usize::MAX / 2),
    });
    let options = HarnessOptions {
        num_blocks: 256,
        limits: Limits { max_sequences: 4, max_prefill_tokens: 64 },
        prefix_cache: true,
        max_swapped: 0,
    };
    let engine = Harness::new(model, &options).unwrap();
    for number in 1.. {
        let mut ticket = engine
            .submit(HarnessRequest {
                token_ids: vec![1, 2, 3],
                max_new: TOKENS,
                ..HarnessRequest::default()
            })
            .unwrap();
        let (told, failed) = fail_nth(number, || {
            let mut told = 0;
            loop {
                match ticket.next(Some(PATIENCE)) {
                    Ok(Some(Event::Token { num_tokens, .. })) => {
                        told += 1;
                        assert_eq!(num_tokens, told);
                    }
                    Ok(Some(Event::End { .. })) => break Ok(told),
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => break Err(error.kind()),
                }
            }
        });
        assert_eq!(ticket.next(Some(PATIENCE)).unwrap(), Some(Event::Done));
        if !failed {
            assert_eq!(told, Ok(TOKENS));
            assert!(number > 1, "nothing was tried");
            break;
        }
        assert_eq!(told, Err(ErrorKind::OutOfMemory));
    }
}

/// The same through the C interface, with a model that has no tokenizer: its pieces of text are empty.
#[test]
fn xserv_next_loses_no_event_for_want_of_memory() {
    const TOKENS: u32 = 20;
    let _one = begin();
    let folder = files::TempDir::new();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        folder.write(name, std::fs::read(tiny().join(name)).unwrap());
    }
    let path = std::ffi::CString::new(folder.str()).unwrap();
    let mut model = std::ptr::null_mut();
    // SAFETY: the structs and the paths live longer than the calls.
    unsafe {
        let mut options: xserv_load_options = std::mem::zeroed();
        xserv_load_options_init(&mut options, size_of_val(&options));
        options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
        let loaded = xserv_load(path.as_ptr(), &options, &mut model);
        assert_eq!(loaded, xserv_status::XSERV_STATUS_OK);
    }
    let ids = [5u32, 6, 7];
    // SAFETY: a struct of integers and pointers, filled by the library.
    let mut request: xserv_request = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { xserv_request_init(&mut request, size_of_val(&request)) };
    request.prompt_tokens = ids.as_ptr();
    request.num_prompt_tokens = ids.len();
    (request.max_tokens, request.ignore_eos) = (TOKENS, 1);
    for number in 1.. {
        let mut submission = std::ptr::null_mut();
        // SAFETY: the request is complete, the model has not been freed.
        let status = unsafe { xserv_submit(model, &request, std::ptr::null(), &mut submission) };
        assert_eq!(status, xserv_status::XSERV_STATUS_OK);
        // SAFETY: as above.
        let mut event: xserv_event = unsafe { std::mem::zeroed() };
        event.struct_size = size_of::<xserv_event>();
        // SAFETY: the event is writable.
        let mut next =
            || unsafe { (xserv_next(submission, XSERV_WAIT_FOREVER, &mut event), event) };
        let (ended, failed) = fail_nth(number, || {
            let mut told = 0;
            loop {
                let (status, event) = next();
                if status != xserv_status::XSERV_STATUS_OK {
                    break Err(status);
                }
                if event.kind != xserv_event_kind::XSERV_EVENT_TOKEN as u32 {
                    assert_eq!(event.kind, xserv_event_kind::XSERV_EVENT_END as u32);
                    break Ok(told);
                }
                told += 1;
                assert_eq!(event.num_tokens, told);
            }
        });
        let (status, event) = next();
        assert_eq!(status, xserv_status::XSERV_STATUS_OK);
        assert_eq!(event.kind, xserv_event_kind::XSERV_EVENT_DONE as u32);
        xserv_submission_free(submission);
        if !failed {
            assert_eq!(ended, Ok(TOKENS));
            assert!(number > 2, "too little was tried");
            break;
        }
        assert_eq!(ended, Err(xserv_status::XSERV_STATUS_OUT_OF_MEMORY));
    }
    xserv_model_free(model);
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
