//! Many requests on one model: xserv_generate from many threads, xserv_submit and xserv_next, samples, the
//! prefix cache, priorities, deadlines, statistics.

use std::ffi::{c_void, CStr};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::client::*;

/// Longest that a test waits for what must come. Far more than it takes.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn stats(model: &Model) -> xserv_model_stats {
    let mut stats: xserv_model_stats = unsafe { std::mem::zeroed() };
    stats.struct_size = size_of::<xserv_model_stats>();
    check(unsafe { xserv_model_get_stats(model.0, &mut stats) }).unwrap();
    stats
}

/// Waits until the scheduler has released everything. (It may notice a step after a caller has gone.)
pub fn idle(model: &Model) -> xserv_model_stats {
    let begin = Instant::now();
    loop {
        let stats = stats(model);
        if stats.total_ended == stats.total_submitted && stats.num_used_kv_blocks == 0 {
            assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
            return stats;
        }
        assert!(begin.elapsed() < PATIENCE, "requests are left over");
        std::thread::yield_now();
    }
}

pub fn tokens(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * (7 + salt) + 13 * salt) % 900).collect()
}

pub struct Submission(pub *mut xserv_submission);
// The handle may be used from any thread.
unsafe impl Send for Submission {}
unsafe impl Sync for Submission {}

impl Drop for Submission {
    fn drop(&mut self) {
        xserv_submission_free(self.0);
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    pub kind: u32,
    pub sample: u32,
    pub text: String,
    pub token: u32,
    pub reason: u32,
}

impl Submission {
    pub fn new(
        model: &Model,
        request: &xserv_request,
        options: *const xserv_submit_options,
    ) -> Outcome<Submission> {
        let mut submission = ptr::null_mut();
        check(unsafe { xserv_submit(model.0, request, options, &mut submission) })?;
        Ok(Submission(submission))
    }

    pub fn next(&self, timeout_ms: u32) -> Outcome<Told> {
        let mut event: xserv_event = unsafe { std::mem::zeroed() };
        event.struct_size = size_of::<xserv_event>();
        check(unsafe { xserv_next(self.0, timeout_ms, &mut event) })?;
        let text = unsafe { CStr::from_ptr(event.text) }.to_str().unwrap().to_string();
        Ok(Told {
            kind: event.kind,
            sample: event.sample,
            text,
            token: event.token_id,
            reason: event.finish_reason,
        })
    }

    /// Takes events to the end; gives tokens, text and reason of each sample.
    pub fn finish(&self, num_samples: usize) -> Vec<(Vec<u32>, String, u32)> {
        let mut out = vec![(Vec::new(), String::new(), u32::MAX); num_samples];
        loop {
            let told = self.next(XSERV_WAIT_FOREVER).unwrap();
            let sample = &mut out[told.sample as usize];
            match told.kind {
                k if k == XSERV_EVENT_TOKEN as u32 => {
                    sample.0.push(told.token);
                    sample.1.push_str(&told.text);
                }
                k if k == XSERV_EVENT_TEXT as u32 => sample.1.push_str(&told.text),
                k if k == XSERV_EVENT_END as u32 => sample.2 = told.reason,
                _ => return out,
            }
        }
    }

    pub fn result(&self, sample: usize) -> xserv_result_info {
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(self.0, &mut result) }).unwrap();
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        check(unsafe { xserv_result_get_sample(result, sample, &mut info) }).unwrap();
        let failed = unsafe { xserv_result_get_sample(result, 1000, &mut info) };
        assert_eq!(failed, Status::XSERV_STATUS_INVALID_ARGUMENT);
        xserv_result_free(result);
        info
    }
}

/// Returns a request of the mix that follows: some sampled, some greedy, some with penalties, all
/// of their own lengths.
pub fn mixed(ids: &[u32], index: usize) -> xserv_request {
    let max_tokens = [3, 9, 17, 30, 44, 6, 21, 12][index % 8];
    let request = xserv_request { ignore_eos: 1, seed: 1, ..greedy(ids, max_tokens) };
    match index % 3 {
        0 => request,
        1 => xserv_request { temperature: 0.9, top_k: 20, seed: index as u64, ..request },
        _ => xserv_request {
            temperature: 1.1,
            top_p: 0.9,
            repetition_penalty: 1.2,
            frequency_penalty: 0.1,
            seed: 3 * index as u64,
            ..request
        },
    }
}

/// 64 threads of 50 requests each over a KV cache for a quarter of them, with cancels at random: every output
/// is that of a run alone, or its beginning.
#[test]
fn every_request_of_a_crowd_gets_what_it_would_get_alone() {
    const THREADS: usize = 64;
    const REQUESTS: usize = 50;
    const KINDS: usize = 48;
    let prompts: Vec<Vec<u32>> = (0..KINDS)
        .map(|kind| {
            // Some share a beginning of two blocks.
            let mut ids = if kind % 2 == 0 { tokens(64, 1) } else { Vec::new() };
            ids.extend(tokens(1 + kind * 2, 2 + kind as u32));
            ids
        })
        .collect();
    let solo = Model::open(&tiny());
    let expected: Vec<Output> =
        (0..KINDS).map(|kind| solo.generate(&mixed(&prompts[kind], kind)).unwrap()).collect();
    drop(solo);
    // A request has up to 64 + 95 + 44 tokens, on average some 110: 64 of them want 220 to 450 blocks.
    let options =
        xserv_load_options { kv_cache_tokens: 64 * 32, max_context_tokens: 1024, ..load_options() };
    let model = Model::load(&tiny(), &options).unwrap();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (model, prompts, expected, done) = (&model, &prompts, &expected, &done);
            scope.spawn(move || {
                let mut state = 0x9e37_79b9u64.wrapping_mul(thread as u64 + 1);
                for _ in 0..REQUESTS {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                    let kind = (state >> 33) as usize % KINDS;
                    let mut request = mixed(&prompts[kind], kind);
                    request.priority = i32::from((state >> 40).is_multiple_of(16));
                    let stop_at = match (state >> 45) % 5 {
                        0 => 1 + (state >> 50) as usize % 20,
                        _ => usize::MAX,
                    };
                    let mut heard = 0;
                    let got = model
                        .stream(&request, &mut |event| {
                            heard = event.num_tokens as usize;
                            heard < stop_at
                        })
                        .unwrap();
                    let expected = &expected[kind];
                    assert_eq!(got.ids.len(), heard);
                    if stop_at > expected.ids.len() {
                        assert_eq!((&got.ids, &got.text), (&expected.ids, &expected.text));
                    } else {
                        assert_eq!(got.ids, expected.ids[..stop_at]);
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.load(Ordering::Relaxed), THREADS * REQUESTS);
    let stats = idle(&model);
    assert_eq!(stats.total_ended, (THREADS * REQUESTS) as u64);
    assert_eq!(stats.num_kv_blocks, 64);
    assert!(stats.peak_used_kv_blocks <= 64 && stats.cache_hit_rate > 0.1);
    assert_eq!(stats.step_counts.iter().sum::<u64>(), stats.total_steps);
    // A step is far more than one token.
    assert!(stats.total_steps * 2 < stats.total_generated_tokens, "{}", stats.total_steps);
    eprintln!(
        "{} steps, {} tokens, {} preemptions, hit rate {:.2}",
        stats.total_steps,
        stats.total_generated_tokens,
        stats.total_preemptions,
        stats.cache_hit_rate
    );
}

#[test]
fn submitted_requests_are_told_of_as_generate_tells() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 3);
    let expected: Vec<Output> =
        (0..9).map(|i| model.generate(&mixed(&ids[i..], i)).unwrap()).collect();
    let all: Vec<Submission> = (0..9)
        .map(|i| Submission::new(&model, &mixed(&ids[i..], i), ptr::null()).unwrap())
        .collect();
    for (submission, expected) in all.iter().zip(&expected) {
        let told = submission.finish(1).remove(0);
        assert_eq!(told, (expected.ids.clone(), expected.text.clone(), expected.finish_reason));
        let done = submission.next(0).unwrap();
        assert_eq!(done.kind, XSERV_EVENT_DONE as u32);
        let info = submission.result(0);
        assert_eq!((info.num_tokens, info.seed), (expected.ids.len(), expected.seed));
        // It can be had once.
        let mut result = ptr::null_mut();
        let again = unsafe { xserv_submission_take_result(submission.0, &mut result) };
        assert_eq!(again, Status::XSERV_STATUS_INVALID_ARGUMENT);
    }
    drop(all);
    idle(&model);
}

#[test]
fn samples_share_their_prompt_and_are_those_of_their_seeds() {
    let model = Model::open(&tiny());
    let ids = tokens(150, 5);
    let request = xserv_request {
        temperature: 1.0,
        seed: 40,
        ignore_eos: 1,
        num_samples: 6,
        ..greedy(&ids, 24)
    };
    let before = stats(&model).total_prompt_tokens;
    let submission = Submission::new(&model, &request, ptr::null()).unwrap();
    let told = submission.finish(6);
    // One computes the prompt; the others what follows its last whole block.
    let computed = idle(&model).total_prompt_tokens - before;
    assert!(computed <= 150 + 5 * 32, "{computed}");
    assert_eq!(submission.result(5).num_cached_tokens, 128);
    for (sample, told) in told.iter().enumerate() {
        let alone = xserv_request { seed: 40 + sample as u64, num_samples: 1, ..request };
        assert_eq!(model.generate(&alone).unwrap().ids, told.0);
        assert_eq!(told.2, XSERV_FINISH_MAX_TOKENS as u32);
    }
    // The same through the blocking call.
    let mut heard = vec![Vec::<u32>::new(); 6];
    let mut result = ptr::null_mut();
    unsafe extern "C" fn hear(event: *const xserv_token_event, data: *mut c_void) -> bool {
        let (event, heard) = unsafe { (&*event, &mut *(data as *mut Vec<Vec<u32>>)) };
        if event.token_id != XSERV_NO_TOKEN {
            heard[event.sample as usize].push(event.token_id);
        }
        true
    }
    let data = &raw mut heard as *mut c_void;
    check(unsafe { xserv_generate(model.0, &request, Some(hear), data, &mut result) }).unwrap();
    xserv_result_free(result);
    assert_eq!(heard, told.into_iter().map(|told| told.0).collect::<Vec<_>>());
    for num_samples in [0, 257] {
        let wrong = model.generate(&xserv_request { num_samples, ..request }).unwrap_err();
        assert!(wrong.message.contains("num_samples"), "{wrong:?}");
    }
}

#[test]
fn the_next_turn_costs_only_its_new_tokens_unless_it_is_isolated() {
    let model = Model::open(&tiny());
    let turn = tokens(100, 4);
    let first = model.generate(&xserv_request { ignore_eos: 1, ..greedy(&turn, 40) }).unwrap();
    let mut next = [turn, first.ids].concat();
    next.extend(tokens(10, 9));
    let request = xserv_request { ignore_eos: 1, ..greedy(&next, 8) };
    let cached = |request: &xserv_request| {
        let submission = Submission::new(&model, request, ptr::null()).unwrap();
        let told = submission.finish(1).remove(0).0;
        (told, submission.result(0).num_cached_tokens)
    };
    let (isolated, none) = cached(&xserv_request { cache_key: 5, ..request });
    let (warm, some) = cached(&request);
    assert_eq!((none, some), (0, 128));
    assert_eq!(isolated, warm);
    let (again, more) = cached(&xserv_request { cache_key: 5, ..request });
    assert_eq!((again, more), (warm.clone(), 128));

    let options = xserv_load_options { prefix_cache: 0, ..load_options() };
    let cold = Model::load(&tiny(), &options).unwrap();
    for _ in 0..2 {
        assert_eq!(cold.generate(&request).unwrap().ids, warm);
    }
    assert_eq!(stats(&cold).total_cached_tokens, 0);
}

#[test]
fn a_slow_callback_delays_nobody() {
    let model = Model::open(&tiny());
    let ids = tokens(12, 6);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 40) };
    let expected = model.generate(&request).unwrap().ids;
    std::thread::scope(|scope| {
        let (enter, entered) = std::sync::mpsc::channel();
        let (leave, left) = std::sync::mpsc::channel::<()>();
        let (model, request) = (&model, &request);
        let slow = scope.spawn({
            let request = Shared(*request);
            move || {
                let request = request;
                model.stream(&request.0, &mut |event| {
                    if event.num_tokens == 2 {
                        enter.send(()).unwrap();
                        left.recv().unwrap();
                    }
                    true
                })
            }
        });
        entered.recv().unwrap();
        // While the other is inside its callback.
        for _ in 0..3 {
            assert_eq!(model.generate(request).unwrap().ids, expected);
        }
        leave.send(()).unwrap();
        assert_eq!(slow.join().unwrap().unwrap().ids, expected);
    });
}

#[derive(Clone, Copy)]
struct Shared(xserv_request);
// Its pointers are to memory that outlives the threads of the tests.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

#[test]
fn cancels_take_effect_whatever_the_request_does() {
    let model = Model::open(&tiny());
    let ids = tokens(40, 7);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let expected =
        model.generate(&xserv_request { ignore_eos: 1, ..greedy(&ids, 64) }).unwrap().ids;
    for round in 0..40usize {
        let submission = Submission::new(&model, &request, ptr::null()).unwrap();
        let mut got = Vec::new();
        for _ in 0..round / 2 {
            got.push(submission.next(XSERV_WAIT_FOREVER).unwrap().token);
        }
        std::thread::scope(|scope| {
            let submission = &submission;
            scope.spawn(move || check(xserv_cancel(submission.0)).unwrap());
            check(xserv_cancel(submission.0)).unwrap();
        });
        let (rest, _, reason) = submission.finish(1).remove(0);
        assert!(rest.is_empty());
        assert_eq!(reason, XSERV_FINISH_CANCELLED as u32);
        assert_eq!(got, expected[..got.len()]);
        check(xserv_cancel(submission.0)).unwrap();
    }
    // One that nobody waits for.
    drop(Submission::new(&model, &request, ptr::null()).unwrap());
    idle(&model);
}

#[test]
fn time_limits_end_requests() {
    let model = Model::open(&tiny());
    let ids = tokens(12, 8);
    let request =
        xserv_request { ignore_eos: 1, time_limit_ms: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let got = model.generate(&request).unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_DEADLINE as u32);
    let plenty = xserv_request { time_limit_ms: u64::MAX, max_tokens: 5, ..request };
    assert_eq!(model.generate(&plenty).unwrap().finish_reason, XSERV_FINISH_MAX_TOKENS as u32);
    idle(&model);
}

#[test]
fn waiting_is_woken_by_a_descriptor_and_by_a_callback() {
    let model = Model::open(&tiny());
    let ids = tokens(12, 9);
    let expected = model.generate(&mixed(&ids, 3)).unwrap().ids;
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    assert!(fd >= 0);
    unsafe extern "C" fn count(data: *mut c_void) {
        unsafe { &*(data as *const AtomicU32) }.fetch_add(1, Ordering::Release);
    }
    let calls = AtomicU32::new(0);
    let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
    assert_eq!(options.wake_fd, -1);
    options.wake_fd = fd;
    options.wake = Some(count);
    options.wake_user_data = &raw const calls as *mut c_void;
    let all: Vec<Submission> =
        (0..4).map(|_| Submission::new(&model, &mixed(&ids, 3), &options).unwrap()).collect();
    let mut got = vec![Vec::new(); 4];
    let mut open = 4;
    while open > 0 {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let ready = unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) };
        assert_eq!(ready, 1, "nobody was woken");
        let mut told = [0u8; 8];
        assert_eq!(unsafe { libc::read(fd, told.as_mut_ptr() as *mut c_void, 8) }, 8);
        for (submission, got) in all.iter().zip(&mut got) {
            loop {
                let told = submission.next(0).unwrap();
                match told.kind {
                    k if k == XSERV_EVENT_TOKEN as u32 => got.push(told.token),
                    k if k == XSERV_EVENT_END as u32 => open -= 1,
                    k if k == XSERV_EVENT_NONE as u32 || k == XSERV_EVENT_DONE as u32 => break,
                    _ => {}
                }
            }
        }
    }
    assert_eq!(got, vec![expected; 4]);
    assert!(calls.load(Ordering::Acquire) >= 4);
    drop(all);
    // One that ends at once wakes as well.
    let at_once = xserv_request { max_tokens: 0, ..mixed(&ids, 3) };
    let before = calls.load(Ordering::Acquire);
    let submission = Submission::new(&model, &at_once, &options).unwrap();
    assert_eq!(submission.finish(1)[0].2, XSERV_FINISH_MAX_TOKENS as u32);
    let begin = Instant::now();
    while calls.load(Ordering::Acquire) == before {
        assert!(begin.elapsed() < PATIENCE, "nobody was woken");
        std::thread::yield_now();
    }
    drop(submission);
    unsafe { libc::close(fd) };
    // Neither a descriptor that is closed nor one that blocks is taken.
    let blocking = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    for wrong in [fd, blocking] {
        let options = xserv_submit_options { wake_fd: wrong, ..options };
        let failure = Submission::new(&model, &at_once, &options).err().unwrap();
        assert!(failure.message.contains("wake_fd"), "{failure:?}");
    }
    unsafe { libc::close(blocking) };
}

/// Calls that a waker must not make are refused, and those it may make work.
#[test]
fn a_waker_cannot_wait() {
    struct Inside {
        model: Model,
        statuses: std::sync::Mutex<Vec<(xserv_status, xserv_status)>>,
        seen: std::sync::Condvar,
    }
    unsafe extern "C" fn wake(data: *mut c_void) {
        let inside = unsafe { &*(data as *const Inside) };
        let ids = [1u32, 2, 3];
        let request = greedy(&ids, 2);
        let mut result = ptr::null_mut();
        let generate =
            unsafe { xserv_generate(inside.model.0, &request, None, ptr::null_mut(), &mut result) };
        let mut logits = vec![0f32; inside.model.info().vocab_size as usize];
        let logits = unsafe {
            xserv_logits(
                inside.model.0,
                ids.as_ptr(),
                3,
                ptr::null(),
                logits.as_mut_ptr(),
                logits.len(),
            )
        };
        inside.statuses.lock().unwrap().push((generate, logits));
        inside.seen.notify_all();
    }
    let inside = Inside {
        model: Model::open(&tiny()),
        statuses: Default::default(),
        seen: Default::default(),
    };
    let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
    options.wake = Some(wake);
    options.wake_user_data = &raw const inside as *mut c_void;
    let ids = tokens(10, 1);
    let submission = Submission::new(&inside.model, &greedy(&ids, 3), &options).unwrap();
    let statuses = inside.statuses.lock().unwrap();
    let wait = inside.seen.wait_timeout_while(statuses, PATIENCE, |seen| seen.is_empty());
    let first = wait.unwrap().0[0];
    let refused = Status::XSERV_STATUS_INVALID_ARGUMENT;
    assert_eq!(first, (refused, refused));
    drop(submission);
    assert_eq!(inside.model.generate(&greedy(&ids, 3)).unwrap().ids.len(), 3);
}

#[test]
fn freeing_a_model_ends_what_was_submitted() {
    let model = Model::open(&tiny());
    let ids = tokens(12, 2);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let all: Vec<Submission> =
        (0..80).map(|_| Submission::new(&model, &request, ptr::null()).unwrap()).collect();
    all[0].next(XSERV_WAIT_FOREVER).unwrap();
    drop(model);
    for submission in all {
        let told = submission.finish(1).remove(0);
        assert_eq!(told.2, XSERV_FINISH_CANCELLED as u32);
    }
}

#[test]
fn logits_are_computed_between_the_steps_of_others() {
    let model = Model::open(&tiny());
    let ids = tokens(700, 3);
    let expected = model.logits(&ids[..600], true).unwrap();
    let last = model.logits(&ids, false).unwrap();
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids[..30], 200) };
    let alone = model.generate(&request).unwrap().ids;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (model, ids) = (&model, &ids);
            let (expected, last, alone) = (&expected, &last, &alone);
            let request = Shared(request);
            scope.spawn(move || {
                let request = request;
                assert_eq!(&model.generate(&request.0).unwrap().ids, alone);
            });
            scope.spawn(move || {
                assert!(&model.logits(&ids[..600], true).unwrap() == expected);
                assert!(&model.logits(ids, false).unwrap() == last);
            });
        }
    });
    idle(&model);
}

#[test]
fn a_batch_has_no_more_than_was_asked_for() {
    let options = xserv_load_options { max_batch_size: 2, ..load_options() };
    let model = Model::load(&tiny(), &options).unwrap();
    let ids = tokens(10, 1);
    let expected = model.generate(&mixed(&ids, 3)).unwrap().ids;
    let all: Vec<Submission> =
        (0..7).map(|_| Submission::new(&model, &mixed(&ids, 3), ptr::null()).unwrap()).collect();
    for submission in &all {
        assert!(stats(&model).num_running <= 2);
        assert_eq!(submission.finish(1)[0].0, expected);
    }
    let options = xserv_load_options { max_batch_size: 5000, ..load_options() };
    let failure = Model::load(&tiny(), &options).err().unwrap();
    assert!(failure.message.contains("max_batch_size"), "{failure:?}");
}

#[test]
fn prompts_are_cut_as_was_asked_for() {
    let ids = tokens(700, 2);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 4) };
    let steps_of = |max_prefill_tokens| {
        let options = xserv_load_options { max_prefill_tokens, ..load_options() };
        let model = Model::load(&tiny(), &options).unwrap();
        let generated = model.generate(&request).unwrap().ids;
        (generated, idle(&model).total_steps)
    };
    // The prompt's pieces, the last of which gives a token, and three more.
    let (expected, steps) = steps_of(0);
    assert_eq!((expected.len(), steps), (4, 2 + 3));
    for (max_prefill_tokens, pieces) in [(1, 700), (100, 7), (699, 2), (700, 1), (u64::MAX, 1)] {
        assert_eq!(steps_of(max_prefill_tokens), (expected.clone(), pieces + 3));
    }
    // Memory grows with the number of tokens computed at once.
    let planned = |max_prefill_tokens| {
        let options = xserv_load_options { max_prefill_tokens, ..load_options() };
        let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
        plan.struct_size = size_of::<xserv_memory_plan>();
        let path = std::ffi::CString::new(tiny().to_str().unwrap()).unwrap();
        check(unsafe { xserv_plan(path.as_ptr(), &options, &mut plan) }).unwrap();
        plan.workspace_bytes
    };
    assert!(planned(64) < planned(0) && planned(0) < planned(2048));
    assert_eq!(planned(2048), planned(u64::MAX));
}

#[test]
fn time_without_requests_is_not_idle_time_of_steps() {
    let model = Model::load(&tiny(), &load_options()).unwrap();
    let ids = tokens(40, 3);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 20) };
    let mut working = Duration::ZERO;
    for _ in 0..4 {
        let begin = Instant::now();
        model.generate(&request).unwrap();
        working += begin.elapsed();
        std::thread::sleep(Duration::from_millis(100));
    }
    let stats = idle(&model);
    assert!(stats.device_busy_seconds > 0.0 && stats.device_idle_seconds > 0.0);
    let counted = stats.device_busy_seconds + stats.device_idle_seconds;
    assert!(counted <= working.as_secs_f64(), "{counted} s in {working:?} of requests");
}

#[test]
fn only_the_events_that_were_asked_for_are_told() {
    let model = Model::open(&tiny());
    let ids = [5_u32, 6, 7];
    let request = xserv_request { ignore_eos: 1, num_samples: 2, ..greedy(&ids, 6) };
    let kinds_of = |events: u32| {
        let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
        options.events = events;
        let mut submission = ptr::null_mut();
        check(unsafe { xserv_submit(model.0, &request, &options, &mut submission) })?;
        let mut kinds = std::collections::BTreeMap::new();
        let mut event: xserv_event = unsafe { std::mem::zeroed() };
        event.struct_size = size_of::<xserv_event>();
        while event.kind != xserv_event_kind::XSERV_EVENT_DONE as u32 {
            check(unsafe { xserv_next(submission, XSERV_WAIT_FOREVER, &mut event) })?;
            *kinds.entry(event.kind).or_insert(0) += 1;
        }
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission, &mut result) })?;
        assert_eq!(take_result(result).ids.len(), 6);
        xserv_submission_free(submission);
        Ok::<_, Failure>(kinds)
    };
    let [_, token, text, end, done] = [0, 1, 2, 3, 4_u32];
    let all = kinds_of(0).unwrap();
    assert_eq!((all[&token], all[&end], all[&done]), (12, 2, 1));
    assert_eq!(kinds_of(1 << token | 1 << text | 1 << end | 1 << done).unwrap(), all);
    assert_eq!(kinds_of(1 << end).unwrap(), [(end, 2), (done, 1)].into());
    assert_eq!(kinds_of(1 << done).unwrap(), [(done, 1)].into());
    for unknown in [1, 1 << 11, u32::MAX] {
        let failure = kinds_of(unknown).unwrap_err();
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
    }
}
