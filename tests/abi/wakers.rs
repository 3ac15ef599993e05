//! Wake-up callbacks and the calls that never wait: what a callback may do, where it runs, and who
//! waits for whom.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{mpsc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{idle, tokens, Submission};
use crate::client::*;

/// The time after which a call counts as hung. It all takes milliseconds.
const HANG: Duration = Duration::from_secs(30);

/// Runs `body` on a thread of its own and fails if it hangs.
fn without_hanging(body: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    if is_done.recv_timeout(HANG) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("it hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < HANG, "in vain: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

type Body = Box<dyn Fn(&Waker) + Send + Sync>;

/// A callback in Rust, which lives as long as the test's process.
struct Waker {
    body: Body,
    /// The submission that it is for, once that is known.
    submission: AtomicPtr<xserv_submission>,
    calls: AtomicU32,
    thread: Mutex<Option<ThreadId>>,
}

unsafe extern "C" fn wake(data: *mut c_void) {
    let waker = unsafe { &*(data as *const Waker) };
    *waker.thread.lock().unwrap() = Some(std::thread::current().id());
    (waker.body)(waker);
    waker.calls.fetch_add(1, Ordering::SeqCst);
}

impl Waker {
    fn new(body: impl Fn(&Waker) + Send + Sync + 'static) -> &'static Waker {
        Box::leak(Box::new(Waker {
            body: Box::new(body),
            submission: AtomicPtr::default(),
            calls: AtomicU32::new(0),
            thread: Mutex::new(None),
        }))
    }

    fn options(&'static self) -> xserv_submit_options {
        let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
        options.wake = Some(wake);
        options.wake_user_data = ptr::from_ref(self) as *mut c_void;
        options
    }

    /// Submits a request with this callback, which may already run.
    fn submit(&'static self, model: *mut xserv_model, request: &xserv_request) -> xserv_status {
        let mut submission = ptr::null_mut();
        let status = unsafe { xserv_submit(model, request, &self.options(), &mut submission) };
        if status == Status::XSERV_STATUS_OK {
            self.submission.store(submission, Ordering::SeqCst);
        }
        status
    }

    /// Returns the handle, for which the callback waits if xserv_submit() has not returned yet.
    fn handle(&self) -> *mut xserv_submission {
        loop {
            let handle = self.submission.load(Ordering::SeqCst);
            if !handle.is_null() {
                return handle;
            }
            std::thread::yield_now();
        }
    }

    fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }
}

const IDS: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];

/// Returns a request without tokens to generate.
fn over() -> xserv_request {
    greedy(&IDS, 0)
}

fn endless() -> xserv_request {
    xserv_request { ignore_eos: 1, ..greedy(&IDS, XSERV_UNSET_INT) }
}

fn next(submission: *mut xserv_submission, timeout_ms: u32) -> Outcome<u32> {
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    event.struct_size = size_of::<xserv_event>();
    check(unsafe { xserv_next(submission, timeout_ms, &mut event) })?;
    Ok(event.kind)
}

fn poll(submission: *mut xserv_submission) -> Outcome<bool> {
    let mut ready = 7;
    check(unsafe { xserv_poll(submission, &mut ready) })?;
    assert!(ready <= 1);
    Ok(ready == 1)
}

/// A cancel token that was thrown.
fn thrown() -> *mut xserv_cancel_token {
    let mut cancel = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut cancel) }).unwrap();
    check(xserv_cancel_token_cancel(cancel)).unwrap();
    cancel
}

#[test]
fn a_waker_may_submit_what_is_over_and_free_its_own_submission() {
    without_hanging(|| {
        let model = Model::open(&tiny());
        let handle = AtomicUsize::new(model.0.addr());
        let inner = Waker::new(|_| {});
        let cancel = thrown().addr();
        let outer = Waker::new(move |own| {
            let model = ptr::without_provenance_mut(handle.load(Ordering::SeqCst));
            if own.calls() == 0 {
                assert_eq!(inner.submit(model, &over()), Status::XSERV_STATUS_OK);
                let cancelled =
                    xserv_request { cancel: ptr::without_provenance(cancel), ..greedy(&IDS, 5) };
                assert_eq!(inner.submit(model, &cancelled), Status::XSERV_STATUS_OK);
                xserv_submission_free(own.handle());
            }
        });
        assert_eq!(outer.submit(model.0, &greedy(&IDS, 4)), Status::XSERV_STATUS_OK);
        wait_until("the wakers run", || outer.calls() >= 1 && inner.calls() == 2);
        // The model goes on, and nobody is called any more.
        assert_eq!(model.generate(&greedy(&IDS, 3)).unwrap().ids.len(), 3);
        idle(&model);
        assert_eq!((outer.calls(), inner.calls()), (1, 2));
        assert_eq!(xserv_cancel(outer.handle()), Status::XSERV_STATUS_BAD_HANDLE);
    });
}

#[test]
fn a_waker_may_take_events_and_do_whatever_does_not_wait() {
    without_hanging(|| {
        let model = Model::open(&tiny());
        let expected = model.generate(&greedy(&IDS, 6)).unwrap().ids.len();
        let other = Submission::new(&model, &endless(), ptr::null()).unwrap();
        let other_handle = AtomicUsize::new(other.0.addr());
        let taken = std::sync::Arc::new(AtomicUsize::new(0));
        let result = std::sync::Arc::new(AtomicUsize::new(0));
        let (heard, made) = (taken.clone(), result.clone());
        let waker = Waker::new(move |own| {
            let other = ptr::without_provenance_mut(other_handle.load(Ordering::SeqCst));
            poll(other).unwrap();
            next(other, 0).unwrap();
            let refused = next(other, 1).unwrap_err();
            assert_eq!(refused.status, Status::XSERV_STATUS_INVALID_ARGUMENT);
            check(xserv_cancel(other)).unwrap();
            let own = own.handle();
            assert!(poll(own).unwrap());
            loop {
                match next(own, 0).unwrap() {
                    k if k == XSERV_EVENT_TOKEN as u32 => heard.fetch_add(1, Ordering::SeqCst),
                    k if k == XSERV_EVENT_NONE as u32 => break,
                    k if k == XSERV_EVENT_DONE as u32 => {
                        let mut result = ptr::null_mut();
                        if unsafe { xserv_submission_take_result(own, &mut result) }
                            == Status::XSERV_STATUS_OK
                        {
                            xserv_result_free(result);
                            made.fetch_add(1, Ordering::SeqCst);
                        }
                        break;
                    }
                    _ => 0,
                };
            }
        });
        assert_eq!(waker.submit(model.0, &greedy(&IDS, 6)), Status::XSERV_STATUS_OK);
        wait_until("all is taken", || result.load(Ordering::SeqCst) == 1);
        assert_eq!(taken.load(Ordering::SeqCst), expected);
        // Its end may have been taken inside.
        other.finish(1);
        assert_eq!(other.result(0).finish_reason, XSERV_FINISH_CANCELLED as u32);
        xserv_submission_free(waker.handle());
        drop(other);
        idle(&model);
    });
}

#[test]
fn wakers_of_one_model_may_free_each_others_submissions() {
    without_hanging(|| {
        let model = Model::open(&tiny());
        for _ in 0..20 {
            static PAIR: [AtomicPtr<Waker>; 2] =
                [AtomicPtr::new(ptr::null_mut()), AtomicPtr::new(ptr::null_mut())];
            let wakers = [0, 1].map(|i: usize| {
                Waker::new(move |_| {
                    let other = unsafe { &*PAIR[1 - i].load(Ordering::SeqCst) };
                    xserv_submission_free(other.handle());
                })
            });
            for (place, waker) in PAIR.iter().zip(wakers) {
                place.store(ptr::from_ref(waker).cast_mut(), Ordering::SeqCst);
            }
            for waker in wakers {
                assert_eq!(waker.submit(model.0, &greedy(&IDS, 3)), Status::XSERV_STATUS_OK);
            }
            wait_until("one is woken", || wakers.iter().any(|waker| waker.calls() > 0));
            wakers.iter().for_each(|waker| xserv_submission_free(waker.handle()));
        }
        idle(&model);
    });
}

#[test]
fn wakers_of_two_models_may_free_each_others_models() {
    without_hanging(|| {
        for _ in 0..5 {
            let models = [Model::open(&tiny()), Model::open(&tiny())];
            let handles = [models[1].0.addr(), models[0].0.addr()];
            models.into_iter().for_each(std::mem::forget);
            let inside = Box::leak(Box::new(std::sync::Barrier::new(2)));
            let (inside, wakers) = (&*inside, handles.map(|other| (other, AtomicBool::new(false))));
            let wakers = wakers.map(|(other, has_met)| {
                Waker::new(move |_| {
                    // Both are inside their callbacks when the models are freed.
                    if !has_met.swap(true, Ordering::SeqCst) {
                        inside.wait();
                        xserv_model_free(ptr::without_provenance_mut(other));
                    }
                })
            });
            for (waker, model) in wakers.iter().zip([handles[1], handles[0]]) {
                let model = ptr::without_provenance_mut(model);
                assert_eq!(waker.submit(model, &endless()), Status::XSERV_STATUS_OK);
            }
            for waker in wakers {
                let last = |kind: u32| kind == XSERV_EVENT_DONE as u32;
                while !last(next(waker.handle(), XSERV_WAIT_FOREVER).unwrap()) {}
                xserv_submission_free(waker.handle());
                assert!(waker.calls() >= 1);
            }
        }
    });
}

#[test]
fn a_host_may_hold_a_lock_around_submit_that_its_waker_takes() {
    static HOST: Mutex<u32> = Mutex::new(0);
    without_hanging(|| {
        let model = Model::open(&tiny());
        let cancel = thrown();
        let requests = [over(), xserv_request { cancel, ..endless() }, greedy(&IDS, 2)];
        for (index, request) in requests.into_iter().enumerate() {
            let waker = Waker::new(|_| *HOST.lock().unwrap() += 1);
            let held = HOST.lock().unwrap();
            let before = *held;
            assert_eq!(waker.submit(model.0, &request), Status::XSERV_STATUS_OK);
            assert_eq!(waker.calls(), 0, "request {index}");
            // Whoever is over at once hears of it at once.
            assert!(index == 2 || poll(waker.handle()).unwrap());
            drop(held);
            wait_until("the waker runs", || waker.calls() > 0);
            assert!(*HOST.lock().unwrap() > before);
            // It ran on a thread of the library's.
            assert_ne!(waker.thread.lock().unwrap().unwrap(), std::thread::current().id());
            while next(waker.handle(), XSERV_WAIT_FOREVER).unwrap() != XSERV_EVENT_DONE as u32 {}
            xserv_submission_free(waker.handle());
        }
        xserv_cancel_token_free(cancel);
    });
}

/// It submits the next request in its callback, as a host does that keeps one under way: also when
/// all of them are over at once.
#[test]
fn a_waker_that_keeps_a_request_under_way_runs_in_turn_and_not_within_itself() {
    const ROUNDS: u32 = 20_000;
    thread_local! {
        static DEPTH: Cell<u32> = const { Cell::new(0) };
    }
    static MODEL: AtomicPtr<xserv_model> = AtomicPtr::new(ptr::null_mut());
    static CANCEL: AtomicPtr<xserv_cancel_token> = AtomicPtr::new(ptr::null_mut());
    static ROUND: AtomicU32 = AtomicU32::new(0);
    static DEEPEST: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn keep_going(_: *mut c_void) {
        DEPTH.set(DEPTH.get() + 1);
        DEEPEST.fetch_max(DEPTH.get(), Ordering::SeqCst);
        // Deep enough to tell.
        if ROUND.fetch_add(1, Ordering::SeqCst) < ROUNDS && DEPTH.get() < 50 {
            submit_next();
        }
        DEPTH.set(DEPTH.get() - 1);
    }
    fn submit_next() {
        let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
        options.wake = Some(keep_going);
        let cancel = CANCEL.load(Ordering::SeqCst);
        let request = xserv_request { cancel, ..endless() };
        let mut submission = ptr::null_mut();
        let model = MODEL.load(Ordering::SeqCst);
        check(unsafe { xserv_submit(model, &request, &options, &mut submission) }).unwrap();
    }
    without_hanging(|| {
        let model = Model::open(&tiny());
        MODEL.store(model.0, Ordering::SeqCst);
        CANCEL.store(thrown(), Ordering::SeqCst);
        let expected = model.generate(&greedy(&IDS, 8)).unwrap();
        submit_next();
        // Others make progress meanwhile.
        assert_eq!(model.generate(&greedy(&IDS, 8)).unwrap().ids, expected.ids);
        wait_until("it is woken again and again", || ROUND.load(Ordering::SeqCst) > ROUNDS);
        assert_eq!(DEEPEST.load(Ordering::SeqCst), 1);
        idle(&model);
    });
}

#[test]
fn a_descriptor_that_nobody_reads_raises_no_signal() {
    thread_local! {
        static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
    }
    static SIGNALS: AtomicU32 = AtomicU32::new(0);
    extern "C" fn on_signal(_: i32) {
        // Other tests of this process may get their own.
        if IS_WATCHED.get() {
            SIGNALS.fetch_add(1, Ordering::SeqCst);
        }
    }
    unsafe extern "C" fn unblock(calls: *mut c_void) {
        // The host is free to do this on any thread that it is given.
        IS_WATCHED.set(true);
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGPIPE);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
            (*(calls as *const AtomicU32)).fetch_add(1, Ordering::SeqCst);
        }
    }
    IS_WATCHED.set(true);
    let before = unsafe { libc::signal(libc::SIGPIPE, on_signal as *const () as usize) };
    let model = Model::open(&tiny());
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC) }, 0);
    let mut sockets = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, sockets.as_mut_ptr()) }, 0);
    for reader in [pipe[0], sockets[0]] {
        assert_eq!(unsafe { libc::close(reader) }, 0);
    }
    let calls = AtomicU32::new(0);
    let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
    options.wake = Some(unblock);
    options.wake_user_data = &raw const calls as *mut c_void;
    for wake_fd in [pipe[1], sockets[1]] {
        for request in [over(), greedy(&IDS, 3), over()] {
            let before = calls.load(Ordering::SeqCst);
            let options = xserv_submit_options { wake_fd, ..options };
            let submission = Submission::new(&model, &request, &options).unwrap();
            wait_until("the waker runs", || calls.load(Ordering::SeqCst) > before);
            submission.finish(1);
        }
    }
    // None is left pending for the thread either: it is woken once more and would get it then.
    let last = Submission::new(&model, &over(), &options).unwrap();
    last.finish(1);
    drop(last);
    drop(model);
    unsafe {
        libc::close(pipe[1]);
        libc::close(sockets[1]);
        libc::signal(libc::SIGPIPE, before);
    }
    IS_WATCHED.set(false);
    assert_eq!(SIGNALS.load(Ordering::SeqCst), 0);
}

#[test]
fn freeing_waits_for_a_waker_that_runs_and_for_no_other() {
    static INSIDE: AtomicBool = AtomicBool::new(false);
    static LEAVE: AtomicBool = AtomicBool::new(false);
    without_hanging(|| {
        let model = Model::open(&tiny());
        let waker = Waker::new(|_| {
            INSIDE.store(true, Ordering::SeqCst);
            while !LEAVE.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        });
        assert_eq!(waker.submit(model.0, &endless()), Status::XSERV_STATUS_OK);
        wait_until("it is inside", || INSIDE.load(Ordering::SeqCst));
        let other = Waker::new(|_| {});
        assert_eq!(other.submit(model.0, &endless()), Status::XSERV_STATUS_OK);
        xserv_submission_free(other.handle());
        let freeing = std::thread::spawn(move || {
            xserv_submission_free(waker.handle());
            waker.calls()
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!freeing.is_finished());
        LEAVE.store(true, Ordering::SeqCst);
        assert_eq!(freeing.join().unwrap(), 1);
        assert_eq!(other.calls(), 0);
        idle(&model);
        assert_eq!(waker.calls(), 1);
    });
}

#[test]
fn asking_without_waiting_never_waits_for_a_thread_that_waits() {
    without_hanging(|| {
        let model = Model::open(&tiny());
        // Inside a waker the model computes nothing, so the other submission has no events.
        let (enter, entered) = mpsc::channel();
        let (leave, left) = mpsc::channel::<()>();
        let (enter, left) = (Mutex::new(enter), Mutex::new(left));
        let blocking = Waker::new(move |own| {
            if own.calls() == 0 {
                enter.lock().unwrap().send(()).unwrap();
                left.lock().unwrap().recv().unwrap();
            }
        });
        assert_eq!(blocking.submit(model.0, &greedy(&IDS, 3)), Status::XSERV_STATUS_OK);
        entered.recv().unwrap();
        let submission = Submission::new(&model, &greedy(&tokens(20, 3), 5), ptr::null()).unwrap();
        let handle = submission.0.addr();
        let waiting: Vec<_> = [XSERV_WAIT_FOREVER, 60_000]
            .into_iter()
            .map(|timeout_ms| {
                std::thread::spawn(move || {
                    let handle = ptr::without_provenance_mut(handle);
                    let mut kinds = Vec::new();
                    while kinds.last() != Some(&(XSERV_EVENT_DONE as u32)) {
                        kinds.push(next(handle, timeout_ms).unwrap());
                    }
                    kinds
                })
            })
            .collect();
        // They are very likely to wait by now.
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        for _ in 0..100 {
            assert!(!poll(submission.0).unwrap());
            assert_eq!(next(submission.0, 0).unwrap(), XSERV_EVENT_NONE as u32);
        }
        let mut result = ptr::null_mut();
        let early = unsafe { xserv_submission_take_result(submission.0, &mut result) };
        assert_eq!(early, Status::XSERV_STATUS_INVALID_ARGUMENT);
        assert_eq!(next(submission.0, 30).unwrap(), XSERV_EVENT_NONE as u32);
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(30) && took < Duration::from_secs(10), "{took:?}");
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        leave.send(()).unwrap();
        // Each event goes to one of them, but for the last.
        let kinds: Vec<u32> = waiting.into_iter().flat_map(|t| t.join().unwrap()).collect();
        let count = |kind: xserv_event_kind| kinds.iter().filter(|k| **k == kind as u32).count();
        assert_eq!(count(XSERV_EVENT_END), 1);
        assert_eq!(count(XSERV_EVENT_DONE), 2);
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
        xserv_result_free(result);
        xserv_submission_free(blocking.handle());
        idle(&model);
    });
}

/// The destructors run in rounds. Rust's own data of the thread goes in the second.
#[test]
fn a_model_may_be_freed_in_the_last_destructors_of_a_thread() {
    static KEY: AtomicU32 = AtomicU32::new(0);
    static ROUND: AtomicU32 = AtomicU32::new(0);
    static SAID: Mutex<Option<(String, String)>> = Mutex::new(None);
    extern "C" fn free(model: *mut c_void) {
        if ROUND.fetch_add(1, Ordering::SeqCst) < 2 {
            // Once more in the next round.
            unsafe { libc::pthread_setspecific(KEY.load(Ordering::SeqCst), model) };
            return;
        }
        let before = last_error();
        xserv_model_free(model as *mut xserv_model);
        *SAID.lock().unwrap() = Some((before, last_error()));
    }
    let mut key = 0;
    assert_eq!(unsafe { libc::pthread_key_create(&mut key, Some(free)) }, 0);
    KEY.store(key, Ordering::SeqCst);
    std::thread::spawn(move || {
        let model = Model::open(&tiny());
        assert_eq!(model.generate(&greedy(&IDS, 3)).unwrap().ids.len(), 3);
        assert_eq!(unsafe { libc::pthread_setspecific(key, model.0 as *const c_void) }, 0);
        std::mem::forget(model);
    })
    .join()
    .unwrap();
    let (before, after) = SAID.lock().unwrap().take().expect("the destructor has run");
    assert_eq!(after, before);
    unsafe { libc::pthread_key_delete(key) };
}
