//! A mixed load for minutes, with everything that callers do, and memory that stays where it is:
//!
//! ```text
//! XSERV_SOAK_MINUTES=10 cargo test --test abi -- --ignored --nocapture soak::cpu     (or soak::cuda)
//! ```

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{idle, stats, tokens, Submission};
use crate::client::*;
use crate::cuda::{on_cuda, shared_cuda};

/// Threads that make requests.
const CALLERS: u64 = 12;
/// The memory by which the process may grow from the warm-up to the end: pools of the C library for
/// threads that met in other ways. A leak of 100 bytes a request shows after some minutes: there
/// are thousands of requests a minute.
const SLACK_BYTES: u64 = 6 << 20;
/// Drivers hand out device memory in steps of 2 MiB.
const DEVICE_SLACK_BYTES: u64 = 4 << 20;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    // SAFETY: takes and returns integers.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64
}

fn minutes() -> f64 {
    match std::env::var("XSERV_SOAK_MINUTES") {
        Ok(minutes) => minutes.parse().expect("XSERV_SOAK_MINUTES is a number"),
        Err(_) => 10.0,
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Returns a prompt of one of a few families, which begin alike.
fn prompt(random: &mut Random) -> Vec<u32> {
    let (family, common) = (random.below(4) as u32, random.below(300));
    let mut ids = tokens(common, family);
    ids.extend((0..1 + random.below(150)).map(|_| random.below(900) as u32));
    ids
}

#[derive(Default)]
struct Tally {
    requests: AtomicU64,
    cancelled: AtomicU64,
    deadlines: AtomicU64,
    dropped: AtomicU64,
    compared: AtomicU64,
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// One thing that a caller does. `known`: a prompt and its greedy continuation, where that is exact.
fn act(model: &Model, random: &mut Random, known: &[(Vec<u32>, Vec<u32>)], tally: &Tally) {
    add(&tally.requests);
    if !known.is_empty() && random.one_in(8) {
        let (ids, expected) = &known[random.below(known.len())];
        let request = xserv_request { ignore_eos: 1, ..greedy(ids, expected.len() as u32) };
        assert_eq!(&model.generate(&request).unwrap().ids, expected);
        return add(&tally.compared);
    }
    let ids = prompt(random);
    if random.one_in(30) {
        let logits = model.logits(&ids, false).unwrap();
        return assert!(logits.iter().all(|logit| logit.is_finite()));
    }
    let num_samples = if random.one_in(5) { 1 + random.below(5) as u32 } else { 1 };
    let request = xserv_request {
        ignore_eos: u8::from(random.one_in(2)),
        temperature: [0.0, 0.7, 1.2][random.below(3)],
        top_p: [1.0, 0.9][random.below(2)],
        repetition_penalty: [1.0, 1.3][random.below(2)],
        seed: random.below(1000) as u64,
        priority: [0, 0, 0, 1, -1][random.below(5)],
        cache_key: [0, 0, 0, 9][random.below(4)],
        time_limit_ms: if random.one_in(6) {
            1 + random.below(60) as u64
        } else {
            request().time_limit_ms
        },
        num_samples,
        ..greedy(&ids, 1 + random.below(120) as u32)
    };
    if random.one_in(4) {
        let most = if random.one_in(3) { random.below(20) } else { usize::MAX };
        let mut heard = 0;
        model
            .stream(&request, &mut |_| {
                heard += 1;
                heard <= most
            })
            .unwrap();
        return;
    }
    let submission = Submission::new(model, &request, ptr::null()).unwrap();
    let gives_up = random.one_in(4).then(|| random.below(40));
    for taken in 0.. {
        if gives_up == Some(taken) {
            if random.one_in(2) {
                return add(&tally.dropped);
            }
            check(xserv_cancel(submission.0)).unwrap();
        }
        let told = submission.next(XSERV_WAIT_FOREVER).unwrap();
        if told.kind == XSERV_EVENT_DONE as u32 {
            break;
        }
        if told.kind == XSERV_EVENT_END as u32 {
            match told.reason {
                r if r == XSERV_FINISH_CANCELLED as u32 => add(&tally.cancelled),
                r if r == XSERV_FINISH_DEADLINE as u32 => add(&tally.deadlines),
                _ => {}
            }
        }
    }
    submission.result(0);
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// `is_exact`: what a request gives does not depend on what runs beside it.
fn soak(options: &xserv_load_options, is_exact: bool, device_bytes: &dyn Fn() -> u64) {
    // A cache that is too small for all of them, so that some have to make room.
    let options = xserv_load_options { kv_cache_tokens: 2048, ..*options };
    let model = Model::load(&tiny(), &options).unwrap();
    let mut random = Random(1);
    let mut known = Vec::new();
    for _ in 0..6 * usize::from(is_exact) {
        let ids = prompt(&mut random);
        let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 40) };
        known.push((ids.clone(), model.generate(&request).unwrap().ids));
    }
    let length = Duration::from_secs_f64(minutes() * 60.0);
    let warm_up = (length / 5).min(Duration::from_secs(60));
    let (tally, stop, begin) = (Tally::default(), AtomicBool::new(false), Instant::now());
    let mut samples = Vec::new();
    let mut at_warm_up = (0, 0);
    std::thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (model, known, tally, stop) = (&model, &known, &tally, &stop);
            scope.spawn(move || {
                let mut random = Random(1000 + caller);
                while !stop.load(Ordering::Relaxed) {
                    act(model, &mut random, known, tally);
                }
            });
        }
        let mut told = Duration::ZERO;
        while begin.elapsed() < length && !stop.load(Ordering::Relaxed) {
            std::thread::sleep((length / 100).min(Duration::from_secs(1)));
            let now = begin.elapsed();
            if now >= warm_up {
                if samples.is_empty() {
                    at_warm_up = (stats(&model).peak_memory_bytes, device_bytes());
                }
                samples.push(resident_bytes());
            }
            if now >= told + Duration::from_secs(60) {
                told = now;
                let stats = stats(&model);
                println!(
                    "{:4.0} s: {} requests, {} tokens, {} preemptions, {} KiB resident",
                    now.as_secs_f64(),
                    tally.requests.load(Ordering::Relaxed),
                    stats.total_generated_tokens,
                    stats.total_preemptions,
                    resident_bytes() >> 10,
                );
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let last = idle(&model);
    let window = (samples.len() / 10).max(1);
    let early = median(samples[..window].to_vec());
    let late = median(samples[samples.len() - window..].to_vec());
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} requests, {} tokens, {} steps, {} preemptions, {} blocks to the host and {} back, hit rate {:.2}; \
         {} cancelled, {} out of time, {} dropped, {} compared; {} KiB resident after the warm-up, {} KiB at the end (of {} samples)",
        count(&tally.requests),
        last.total_generated_tokens,
        last.total_steps,
        last.total_preemptions,
        last.total_swapped_out_blocks,
        last.total_swapped_in_blocks,
        last.cache_hit_rate,
        count(&tally.cancelled),
        count(&tally.deadlines),
        count(&tally.dropped),
        count(&tally.compared),
        early >> 10,
        late >> 10,
        samples.len(),
    );
    assert!(late <= early + SLACK_BYTES, "the process grew from {early} to {late} bytes");
    let device_lost = at_warm_up.1.saturating_sub(device_bytes());
    assert!(device_lost <= DEVICE_SLACK_BYTES, "{device_lost} bytes of the device are gone");
    if !is_exact {
        // The memory that a device's allocator counts; on the host it follows the most blocks that
        // were used.
        let grown = last.peak_memory_bytes.saturating_sub(at_warm_up.0);
        println!("{grown} more bytes of the device at the peak than after the warm-up");
        assert!(grown <= DEVICE_SLACK_BYTES);
    }
    assert!(last.total_preemptions > 0 && last.total_cached_tokens > 0, "too easy a load");
    assert!(last.total_swapped_in_blocks > 0, "nobody was kept on the host");
}

#[test]
#[ignore = "takes XSERV_SOAK_MINUTES, 10 where that is not set"]
fn cpu() {
    // Preempted requests wait on the host, as on a GPU they do by default.
    let options = xserv_load_options { num_threads: 2, max_swap_bytes: 16 << 20, ..load_options() };
    soak(&options, true, &|| 0);
}

#[test]
#[ignore = "takes XSERV_SOAK_MINUTES, 10 where that is not set"]
fn cuda() {
    if let Some(_device) = shared_cuda() {
        let free = || {
            xserv::backend::cuda::CudaDevice::get(0).unwrap().free_memory_bytes().unwrap() as u64
        };
        soak(&on_cuda(xserv_dtype::XSERV_DTYPE_AUTO), false, &free);
    }
}
