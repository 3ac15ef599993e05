//! Many threads at once: random calls on shared and private handles, cancels at random moments, frees in
//! every order, callbacks that stop. Nothing hangs, nothing is lost, and afterwards the model is idle
//! with all its blocks free.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::files::Random;
use crate::functions::{functions, Function, HANDLES};
use crate::scale::{scaled, share, watched, PATIENCE};
use crate::world::*;

fn stats(model: *mut xserv_model) -> xserv_model_stats {
    let mut stats: xserv_model_stats = unsafe { std::mem::zeroed() };
    stats.struct_size = size_of::<xserv_model_stats>();
    check(unsafe { xserv_model_get_stats(model, &mut stats) }).unwrap();
    stats
}

/// Waits until nothing runs or waits, and asserts that no block is in use.
fn assert_idle(model: *mut xserv_model) -> xserv_model_stats {
    let until = Instant::now() + PATIENCE;
    loop {
        let now = stats(model);
        let ended = now.total_submitted == now.total_ended;
        if now.num_running + now.num_waiting == 0 && ended && now.num_used_kv_blocks == 0 {
            assert_eq!(now.num_preempted, 0);
            assert!(now.num_cached_kv_blocks <= now.num_kv_blocks);
            return now;
        }
        assert!(
            Instant::now() < until,
            "{} running, {} waiting, {} of {} ended, {} of {} blocks in use",
            now.num_running,
            now.num_waiting,
            now.total_ended,
            now.total_submitted,
            now.num_used_kv_blocks,
            now.num_kv_blocks
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends the process when `count` has stood still for [`PATIENCE`], until `is_over`, and tells every
/// minute how far it is.
fn watch_progress(what: &str, count: &AtomicU64, is_over: &AtomicBool) {
    let (mut seen, mut since, mut told) = (0, Instant::now(), Instant::now());
    while !is_over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(20));
        let now = count.load(Ordering::SeqCst);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if told.elapsed() > Duration::from_secs(60) {
            println!("{what}: {now} calls have ended");
            told = Instant::now();
        }
        if since.elapsed() > PATIENCE {
            eprintln!("{what}: no call ended for {} s after {now}", PATIENCE.as_secs());
            std::process::abort();
        }
    }
}

/// Handles that all threads share, of every kind: live ones, freed ones, and none.
struct Shared {
    slots: BTreeMap<&'static str, Vec<AtomicUsize>>,
    functions: Vec<Function>,
    /// A model that is never freed, and what it generates.
    anchor: usize,
    expected: Vec<u32>,
    calls: AtomicU64,
    succeeded: AtomicU64,
    compared: AtomicU64,
}

impl Shared {
    fn kind(name: &str) -> &'static str {
        HANDLES.iter().find(|kind| **kind == name).unwrap()
    }

    fn slot(&self, kind: &str, random: &mut Random) -> &AtomicUsize {
        let slots = &self.slots[kind];
        &slots[random.below(slots.len())]
    }

    /// Returns the tokens of a result, if nobody has freed it.
    fn tokens(&self, result: u64) -> Option<Vec<u32>> {
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        let result = std::ptr::without_provenance(result as usize);
        check(unsafe { xserv_result_get_info(result, &mut info) }).ok()?;
        Some(unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) }.to_vec())
    }

    /// One call of a random function, on random handles.
    fn call(&self, world: &mut World, random: &mut Random) {
        // A self-test takes 0.15 s and more of processor time, and maps memory all the while, for
        // which threads wait in turn.
        let slow = ["xserv_load", "xserv_inspect", "xserv_plan", "xserv_self_test"];
        let busy = [
            "xserv_generate",
            "xserv_submit",
            "xserv_next",
            "xserv_cancel",
            "xserv_logits",
            "xserv_score",
        ];
        let function = loop {
            let function = &self.functions[random.below(self.functions.len())];
            let name = function.name.as_str();
            // Few of those that take long, and more of what a host does all the time.
            let chance = match (slow.contains(&name), busy.contains(&name)) {
                (true, _) => 1,
                (_, true) => 40,
                _ => 8,
            };
            if random.below(40) < chance {
                break function;
            }
        };
        // A handle given to `_free` of models must not be the model that the test goes on with.
        let spares_anchor = function.frees() == Some("xserv_model");
        for kind in function.parameters.iter().filter_map(|p| p.pointee(1)) {
            let Some(kind) = HANDLES.iter().find(|known| **known == kind) else { continue };
            let handle = match random.below(10) {
                // A handle of a generation that no slot reaches: one of a live generation could be
                // an object of another test, which this call may free.
                0..2 => (2 * (1 + random.below(10)) + 1) << 55 | random.below(40),
                2..6 if *kind == "xserv_model" && !spares_anchor => self.anchor,
                _ => self.slot(kind, random).load(Ordering::SeqCst),
            };
            let is_anchor = spares_anchor && handle == self.anchor;
            world.set(
                kind,
                std::ptr::without_provenance_mut::<c_void>(if is_anchor { 0 } else { handle }),
            );
        }
        world.timeout_ms = [0, 1, 2, XSERV_WAIT_FOREVER][random.below(4)];
        let mut arguments = world.arguments(function);
        let returned = call(function, &arguments);
        if let Returned::Status(status) = returned {
            assert_ne!(status, XSERV_STATUS_INTERNAL as u32, "{}: {}", function.name, last_error());
        }
        self.succeeded.fetch_add(u64::from(returned.is_ok()), Ordering::Relaxed);
        for (kind, handle) in made(function, &mut arguments, returned) {
            let is_of_anchor = world.model().addr() == self.anchor;
            if function.name == "xserv_generate" && is_of_anchor {
                if let Some(tokens) = self.tokens(handle) {
                    assert_eq!(tokens, self.expected);
                    self.compared.fetch_add(1, Ordering::Relaxed);
                }
            }
            if !HANDLES.contains(&kind) {
                free(kind, handle);
                continue;
            }
            let slot = self.slot(Self::kind(kind), random);
            // The previous object may have been freed already, which is part of the storm.
            free(kind, slot.swap(handle as usize, Ordering::SeqCst) as u64);
        }
    }
}

#[test]
fn a_storm_of_random_calls() {
    let (share, shares) = share();
    let (threads, calls) = (scaled(16, 256), scaled(1_000, 10_000) / shares);
    let mut world = World::new();
    let anchor = world.model();
    let shared = Shared {
        slots: HANDLES
            .iter()
            .map(|kind| (*kind, (0..8).map(|_| AtomicUsize::new(0)).collect()))
            .collect(),
        functions: functions(),
        anchor: anchor.addr(),
        expected: std::mem::ManuallyDrop::new(Model(anchor))
            .generate(&greedy(&IDS, 2))
            .unwrap()
            .ids,
        calls: AtomicU64::new(0),
        succeeded: AtomicU64::new(0),
        compared: AtomicU64::new(0),
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_progress("the storm", &shared.calls, &is_over));
        let storm: Vec<_> = (0..threads)
            .map(|thread| {
                let shared = &shared;
                scope.spawn(move || {
                    let mut random = Random(7 + (share * threads + thread) as u64);
                    let mut world = World::empty();
                    for _ in 0..calls {
                        shared.call(&mut world, &mut random);
                        shared.calls.fetch_add(1, Ordering::SeqCst);
                    }
                    // The handles are the storm's.
                    world.forget();
                })
            })
            .collect();
        let ends: Vec<_> = storm.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        watch.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    for (kind, slots) in &shared.slots {
        slots.iter().for_each(|slot| free(kind, slot.load(Ordering::SeqCst) as u64));
    }
    let last = assert_idle(anchor);
    println!(
        "{} calls by {threads} threads, {} succeeded, {} outputs compared, {} samples",
        shared.calls.load(Ordering::SeqCst),
        shared.succeeded.load(Ordering::SeqCst),
        shared.compared.load(Ordering::SeqCst),
        last.total_ended,
    );
    assert!(shared.compared.load(Ordering::SeqCst) > 0);
    assert!(shared.succeeded.load(Ordering::SeqCst) as usize > threads * calls / 8);
    // The world still works.
    world.renew("xserv_result");
}

/// Passes time on this thread, to about this many microseconds.
fn pass_time(microseconds: usize) {
    let until = Instant::now() + Duration::from_micros(microseconds as u64);
    while Instant::now() < until {
        std::thread::yield_now();
    }
}

fn submit(model: *mut xserv_model, request: &xserv_request) -> Outcome<*mut xserv_submission> {
    let mut submission = std::ptr::null_mut();
    check(unsafe { xserv_submit(model, request, std::ptr::null(), &mut submission) })?;
    Ok(submission)
}

/// Returns the kind of the next event and its finish reason.
fn next(submission: *mut xserv_submission) -> Outcome<(u32, u32)> {
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    event.struct_size = size_of::<xserv_event>();
    let wait = PATIENCE.as_millis() as u32;
    check(unsafe { xserv_next(submission, wait, &mut event) })?;
    assert_ne!(event.kind, xserv_event_kind::XSERV_EVENT_NONE as u32, "no event came");
    Ok((event.kind, event.finish_reason))
}

/// Takes events to the end, and gives the finish reason.
fn finish(submission: *mut xserv_submission) -> u32 {
    let mut reason = u32::MAX;
    loop {
        match next(submission).unwrap() {
            (kind, _) if kind == xserv_event_kind::XSERV_EVENT_DONE as u32 => return reason,
            (kind, why) if kind == xserv_event_kind::XSERV_EVENT_END as u32 => reason = why,
            _ => {}
        }
    }
}

/// Returns a cache that is too small for all who ask, so that requests also wait and are preempted.
fn crowded() -> Model {
    let options = xserv_load_options {
        num_threads: 2,
        kv_cache_tokens: 128,
        max_context_tokens: 128,
        max_prefill_tokens: 32,
        ..load_options()
    };
    Model::load(&tiny(), &options).unwrap()
}

#[test]
fn cancels_at_random_moments_leave_nothing_behind() {
    const THREADS: usize = 16;
    let rounds = scaled(2_000, 100_000) / THREADS;
    let model = crowded();
    let (count, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let reasons: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_progress("the cancels", &count, &is_over));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (model, count, reasons) = (&model, &count, &reasons);
                scope.spawn(move || {
                    let mut random = Random(100 + thread as u64);
                    for _ in 0..rounds {
                        let reason = cancel_once(model.0, &mut random);
                        reasons[reason.min(7) as usize].fetch_add(1, Ordering::Relaxed);
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        watch.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    let last = assert_idle(model.0);
    let of = |reason: xserv_finish_reason| reasons[reason as usize].load(Ordering::SeqCst);
    let cancelled = of(xserv_finish_reason::XSERV_FINISH_CANCELLED);
    println!(
        "{} cancels, {cancelled} in time, {} preemptions",
        count.load(Ordering::SeqCst),
        last.total_preemptions
    );
    assert!(cancelled as usize > rounds * THREADS / 4, "most came too late");
    assert!(last.total_preemptions > 0, "too easy a load");
    let ids = model.generate(&greedy(&IDS, 3)).unwrap().ids;
    assert_eq!(ids, Model::open(&tiny()).generate(&greedy(&IDS, 3)).unwrap().ids);
}

/// Submits, and cancels in one of four ways at some moment. Gives the finish reason; 7 where the
/// submission was freed before it had one.
fn cancel_once(model: *mut xserv_model, random: &mut Random) -> u32 {
    // Half of them need another block after some tokens.
    let length = [1 + random.below(60), 29 + 32 * random.below(2)][random.below(2)];
    let ids: Vec<u32> = (0..length).map(|_| random.below(2000) as u32).collect();
    let mut token = std::ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
    let way = random.below(4);
    let request =
        xserv_request { cancel: token, ignore_eos: 1, ..greedy(&ids, 1 + random.below(60) as u32) };
    if way == 3 {
        // By another thread, of a call that blocks.
        let delay = random.below(4000);
        let thrown = token.addr();
        let output = std::thread::scope(|scope| {
            scope.spawn(move || {
                pass_time(delay);
                check(xserv_cancel_token_cancel(std::ptr::without_provenance(thrown))).unwrap();
            });
            std::mem::ManuallyDrop::new(Model(model)).generate(&request).unwrap()
        });
        xserv_cancel_token_free(token);
        return output.finish_reason;
    }
    let submission = submit(model, &request).unwrap();
    let mut reason = u32::MAX;
    for _ in 0..random.below(6) {
        match next(submission).unwrap() {
            (kind, why) if kind == xserv_event_kind::XSERV_EVENT_END as u32 => reason = why,
            _ => {}
        }
    }
    pass_time(random.below(3000));
    match way {
        0 => check(xserv_cancel(submission)).unwrap(),
        1 => check(xserv_cancel_token_cancel(token)).unwrap(),
        _ => {
            xserv_submission_free(submission);
            xserv_cancel_token_free(token);
            return reason.min(7);
        }
    }
    if random.below(4) == 0 {
        check(xserv_cancel(submission)).unwrap();
    }
    let last = finish(submission);
    xserv_submission_free(submission);
    xserv_cancel_token_free(token);
    last.min(reason)
}

/// Every order of these.
fn orders<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for i in 0..items.len() {
        let mut rest = items.to_vec();
        let first = rest.remove(i);
        all.extend(orders(&rest).into_iter().map(|order| [vec![first.clone()], order].concat()));
    }
    all
}

#[derive(Clone, Copy, Debug)]
enum Freed {
    Model,
    Detokenizer,
    Result,
    Submissions,
}

/// Loads, has `streams` requests under way, and frees everything in this order. Freed objects are gone,
/// the others go on.
fn free_in(order: &[Freed], streams: usize) {
    let mut world = World::empty();
    for kind in ["xserv_model", "xserv_detokenizer", "xserv_result"] {
        world.renew(kind);
    }
    let model = world.model();
    let endless = xserv_request { ignore_eos: 1, ..greedy(&IDS, 100) };
    // A call that blocks goes on through all of it.
    let address = model.addr();
    let blocked = (streams > 0).then(|| {
        let (begun, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let model =
                std::mem::ManuallyDrop::new(Model(std::ptr::without_provenance_mut(address)));
            let endless = xserv_request { ignore_eos: 1, ..greedy(&IDS, 100) };
            model.stream(&endless, &mut |_| {
                let _ = begun.send(());
                true
            })
        });
        // It has its first token.
        wait.recv_timeout(PATIENCE).unwrap();
        thread
    });
    let submissions: Vec<_> = (0..streams).map(|_| submit(model, &endless).unwrap()).collect();
    let is_freed = |status: xserv_status| assert_eq!(status, XSERV_STATUS_BAD_HANDLE);
    let mut is_model_there = true;
    for freed in order {
        match freed {
            Freed::Model => {
                xserv_model_free(model);
                is_model_there = false;
                let mut out = std::ptr::null_mut();
                is_freed(unsafe { xserv_detokenizer_new(model, true, &mut out) });
            }
            Freed::Detokenizer => {
                let detokenizer = world.handle("xserv_detokenizer");
                let (mut text, mut length) = (std::ptr::null(), 0);
                // It keeps what it needs alive.
                let push = |text: &mut _, length: &mut _| unsafe {
                    xserv_detokenizer_push(detokenizer, 5, text, length)
                };
                check(push(&mut text, &mut length)).unwrap();
                xserv_detokenizer_free(detokenizer);
                is_freed(push(&mut text, &mut length));
            }
            Freed::Result => {
                let result = world.handle("xserv_result");
                assert!(!xserv_result_text(result).is_null());
                xserv_result_free(result);
                assert!(xserv_result_text(result).is_null());
            }
            Freed::Submissions => {
                for (i, submission) in submissions.iter().enumerate() {
                    if i % 2 == 0 && !is_model_there {
                        let reason = finish(*submission);
                        let cancelled = xserv_finish_reason::XSERV_FINISH_CANCELLED as u32;
                        let at_the_end = xserv_finish_reason::XSERV_FINISH_MAX_TOKENS as u32;
                        assert!([cancelled, at_the_end].contains(&reason), "{reason}");
                    }
                    xserv_submission_free(*submission);
                    is_freed(xserv_cancel(*submission));
                }
            }
        }
    }
    if let Some(thread) = blocked {
        match thread.join().unwrap() {
            Ok(output) => assert!(output.ids.len() <= 100),
            Err(failure) => panic!("{failure:?}"),
        }
    }
    world.forget();
}

#[test]
fn handles_are_freed_in_every_order() {
    let rounds = scaled(1, 14);
    watched("frees in every order", 20 * PATIENCE, move || {
        let all = [Freed::Model, Freed::Detokenizer, Freed::Result, Freed::Submissions];
        let mut count = 0;
        for _ in 0..rounds {
            for order in orders(&all) {
                for streams in [0, 1, 64] {
                    free_in(&order, streams);
                    count += 1;
                }
            }
        }
        println!("{count} rounds");
    });
}

#[test]
fn callbacks_stop_at_every_token() {
    let tokens = scaled(12, 120) as u32;
    watched("callbacks that stop", 20 * PATIENCE, move || {
        let model = &crowded();
        let mut stops = 0;
        for batch in [1usize, 2, 3, 4, 8, 16, 32, 64] {
            for stop in (1..=tokens).step_by(if batch > 8 { 4 } else { 1 }) {
                std::thread::scope(|scope| {
                    for _ in 0..batch {
                        scope.spawn(move || {
                            let request = xserv_request { ignore_eos: 1, ..greedy(&IDS, stop + 8) };
                            let mut seen = 0;
                            let output = model.stream(&request, &mut |event| {
                                seen += u32::from(event.id != XSERV_NO_TOKEN);
                                seen < stop
                            });
                            let output = output.unwrap();
                            let reason = xserv_finish_reason::XSERV_FINISH_CALLBACK as u32;
                            let got = (seen, output.ids.len(), output.finish_reason);
                            assert_eq!(got, (stop, stop as usize, reason), "batch {batch}");
                        });
                    }
                });
                assert_idle(model.0);
                stops += batch;
            }
        }
        println!("{stops} stops");
    });
}
