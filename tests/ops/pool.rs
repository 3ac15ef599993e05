//! The thread pool: every task once, panics as errors, nesting, sharing, and an end without a
//! trace.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use xserv::backend::cpu::CpuBackend;
use xserv::error::ErrorKind;

#[test]
fn every_task_runs_once() {
    for num_threads in [1, 2, 3, 8] {
        let backend = CpuBackend::new(num_threads).unwrap();
        assert_eq!(backend.num_threads(), num_threads);
        for num_tasks in [0, 1, 2, 3, 7, 100, 10_000] {
            let counts: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
            backend
                .parallel_for(num_tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn a_panic_becomes_an_error_and_the_pool_goes_on() {
    for num_threads in [1, 2, 3] {
        let backend = CpuBackend::new(num_threads).unwrap();
        for round in 0..50 {
            let error = backend
                .parallel_for(20, &|task| assert!(task != 13, "unlucky in round {round}"))
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal);
            assert!(error.message().contains("unlucky"), "{error}");
            backend.parallel_for(20, &|_| {}).unwrap();
        }
    }
}

#[test]
fn nested_jobs_run_on_their_thread() {
    let backend = CpuBackend::new(3).unwrap();
    let count = AtomicUsize::new(0);
    backend
        .parallel_for(10, &|_| {
            backend
                .parallel_for(10, &|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
        })
        .unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 100);
}

#[test]
fn several_callers_take_turns() {
    let backend = CpuBackend::new(2).unwrap();
    let count = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let add = |_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    };
                    backend.parallel_for(5, &add).unwrap();
                }
            });
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 4 * 500 * 5);
}

#[test]
fn wakes_sleeping_workers() {
    let backend = CpuBackend::new(3).unwrap();
    for _ in 0..20 {
        // Longer than workers spin.
        std::thread::sleep(Duration::from_millis(2));
        let inside = AtomicUsize::new(0);
        let begin = Instant::now();
        backend
            .parallel_for(3, &|_| {
                inside.fetch_add(1, Ordering::SeqCst);
                // Only returns when all three run at once.
                while inside.load(Ordering::SeqCst) < 3 {
                    assert!(begin.elapsed() < Duration::from_secs(20), "a worker sleeps on");
                    std::thread::yield_now();
                }
            })
            .unwrap();
    }
}

#[test]
fn starts_and_ends_without_trouble() {
    for i in 0..60 {
        let backend = CpuBackend::new(1 + i % 4).unwrap();
        if i % 2 == 0 {
            backend.parallel_for(8, &|_| {}).unwrap();
        }
        if i % 3 == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    assert!(CpuBackend::new(0).is_err());
    assert!(CpuBackend::new(1_000_000).is_err());
}

/// Other tests of this process have threads of the same names; at least ours must be found idle.
#[cfg(target_os = "linux")]
#[test]
fn an_idle_pool_uses_no_processor_time_and_its_threads_block_signals() {
    let backend = CpuBackend::new(3).unwrap();
    backend.parallel_for(3, &|_| {}).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    // Name, blocked signals and nanoseconds on a processor of each thread of a pool.
    let workers = || -> Vec<(String, u64, u64)> {
        let mut found = Vec::new();
        for thread in std::fs::read_dir("/proc/self/task").unwrap() {
            let path = thread.unwrap().path();
            let Ok(status) = std::fs::read_to_string(path.join("status")) else { continue };
            let Ok(times) = std::fs::read_to_string(path.join("schedstat")) else { continue };
            if status.starts_with("Name:\txserv-cpu-") {
                let blocked = status.lines().find_map(|l| l.strip_prefix("SigBlk:\t")).unwrap();
                let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
                let nanos = times.split(' ').next().unwrap().parse().unwrap();
                found.push((path.display().to_string(), blocked, nanos));
            }
        }
        found
    };
    let before = workers();
    std::thread::sleep(Duration::from_millis(100));
    let after = workers();
    assert!(after.len() >= 2);
    for (_, blocked, _) in &after {
        // SIGINT (2), SIGTERM (15), SIGCHLD (17).
        for signal in [2, 15, 17] {
            assert!(blocked & 1 << (signal - 1) != 0, "signal {signal} is not blocked");
        }
    }
    let idle = after.iter().filter(|a| before.iter().any(|b| b.0 == a.0 && b.2 == a.2)).count();
    assert!(idle >= 2, "{before:?} {after:?}");
}

#[test]
fn helpers_run_beside_the_calling_thread() {
    for num_threads in [1, 2, 5] {
        let backend = CpuBackend::new(num_threads).unwrap();
        let caller = std::thread::current().id();
        let next = AtomicUsize::new(0);
        let (done, mine) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            while next.fetch_add(1, Ordering::Relaxed) < 1000 {
                done.fetch_add(1, Ordering::Relaxed);
            }
        };
        let helpers = Mutex::new(Vec::new());
        let helper = |number: usize| {
            assert_ne!(std::thread::current().id(), caller);
            helpers.lock().unwrap().push(number);
            work();
        };
        backend
            .with_helpers(&helper, &mut || {
                assert_eq!(std::thread::current().id(), caller);
                mine.fetch_add(1, Ordering::Relaxed);
                work();
            })
            .unwrap();
        assert_eq!((done.into_inner(), mine.into_inner()), (1000, 1));
        let mut helpers = helpers.into_inner().unwrap();
        helpers.sort_unstable();
        helpers.dedup();
        assert!(helpers.len() < num_threads && helpers.iter().all(|&n| n < num_threads - 1));
        // A panic on either side is an error, and the pool goes on.
        assert!(backend.with_helpers(&|_| {}, &mut || panic!("here")).is_err());
        backend.parallel_for(20, &|_| {}).unwrap();
    }
}
