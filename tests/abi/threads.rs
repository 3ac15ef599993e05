//! The host's threads: cancelled in the middle of a call, and with as little stack as the header
//! allows.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] =
    &[("cancelled threads", cancelled_threads), ("small stacks", small_stacks)];

/// The stack that a call may need, according to the header. Not all of it is used on the CPU, and
/// less by an optimised build; the rest is room for the driver of a GPU.
const STACK_KIB: usize = 256;

#[test]
fn a_cancelled_thread_finishes_its_call() {
    run_group("cancelled threads");
}

#[test]
fn the_least_stack_of_the_header_is_enough() {
    run_group("small stacks");
    let header = std::fs::read_to_string(root().join("include/xserv.h")).unwrap();
    assert!(header.contains(&format!("at most {STACK_KIB} KiB of stack")));
}

extern "C" {
    fn pthread_cancel(thread: libc::pthread_t) -> i32;
}

extern "C-unwind" {
    fn pthread_testcancel();
}

/// A thread that calls the library and is cancelled meanwhile.
#[derive(Default)]
struct Cancelled {
    /// The callbacks have begun: from now on it may be cancelled.
    is_inside: AtomicBool,
    was_cancelled: AtomicBool,
    loaded: AtomicI32,
    generated: AtomicI32,
}

impl Cancelled {
    /// Waits until the thread is cancelled, then does what ends a cancelled thread.
    fn wait(&self) {
        self.is_inside.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(10);
        while !self.was_cancelled.load(Ordering::SeqCst) && Instant::now() < until {
            std::thread::yield_now();
        }
        // SAFETY: returns, as the library has disabled cancellation.
        unsafe { pthread_testcancel() };
    }
}

unsafe extern "C" fn on_progress(_: f32, state: *mut c_void) -> bool {
    unsafe { &*(state as *const Cancelled) }.wait();
    true
}

unsafe extern "C" fn on_token(_: *const xserv_token_event, state: *mut c_void) -> bool {
    unsafe { &*(state as *const Cancelled) }.wait();
    true
}

/// Loads and generates, and notes how that went.
fn call_library(state: &Cancelled) {
    let data = std::ptr::from_ref(state) as *mut c_void;
    let path = c_string(tiny().to_str().unwrap());
    let options = xserv_load_options {
        progress: Some(on_progress),
        progress_user_data: data,
        ..load_options()
    };
    let mut model = std::ptr::null_mut();
    let loaded = unsafe { xserv_load(path.as_ptr(), &options, &mut model) };
    state.loaded.store(loaded as i32, Ordering::SeqCst);
}

fn generate_with(state: &Cancelled, model: &Model) {
    let data = std::ptr::from_ref(state) as *mut c_void;
    let request = greedy(&PROMPT, 3);
    let none = std::ptr::null_mut();
    let generated = unsafe { xserv_generate(model.0, &request, Some(on_token), data, none) };
    state.generated.store(generated as i32, Ordering::SeqCst);
}

/// The work of a thread: a call, after which the thread ends as cancelled.
struct Work<'a> {
    state: &'a Cancelled,
    call: &'a (dyn Fn(&Cancelled) + Sync),
}

/// Has nothing to drop when the thread is cancelled in its last statement.
extern "C-unwind" fn run(work: *mut c_void) -> *mut c_void {
    run_call(work);
    unsafe { pthread_testcancel() };
    std::ptr::null_mut()
}

fn run_call(work: *mut c_void) {
    let work = unsafe { &*(work as *const Work<'_>) };
    (work.call)(work.state);
}

fn cancelled_threads(bench: &mut Bench) {
    let cancel = |call: &(dyn Fn(&Cancelled) + Sync)| -> Result<Cancelled, String> {
        let state = Cancelled {
            loaded: AtomicI32::new(-1),
            generated: AtomicI32::new(-1),
            ..Cancelled::default()
        };
        let work = Work { state: &state, call };
        let mut thread: libc::pthread_t = unsafe { std::mem::zeroed() };
        type Body = extern "C" fn(*mut c_void) -> *mut c_void;
        type Unwinding = extern "C-unwind" fn(*mut c_void) -> *mut c_void;
        // SAFETY: the two differ in that the second may be unwound, as the C library does.
        let body = unsafe { std::mem::transmute::<Unwinding, Body>(run) };
        let data = std::ptr::from_ref(&work) as *mut c_void;
        let started = unsafe { libc::pthread_create(&mut thread, std::ptr::null(), body, data) };
        assert_eq!(started, 0);
        while !state.is_inside.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(unsafe { pthread_cancel(thread) }, 0);
        state.was_cancelled.store(true, Ordering::SeqCst);
        let mut end = std::ptr::null_mut();
        assert_eq!(unsafe { libc::pthread_join(thread, &mut end) }, 0);
        // PTHREAD_CANCELED
        match end.addr() as isize {
            -1 => Ok(state),
            _ => Err("the thread was not cancelled after the call".to_string()),
        }
    };
    bench.case("in xserv_load", move |_| {
        let state = cancel(&call_library)?;
        match state.loaded.load(Ordering::SeqCst) {
            0 => Ok(String::new()),
            status => Err(format!("status {status}")),
        }
    });
    let reference = bench.reference.clone();
    bench.case("in xserv_generate", move |_| {
        let model = Model::open(&tiny());
        let state = cancel(&|state| generate_with(state, &model))?;
        let again = model.generate(&greedy(&PROMPT, 3)).map_err(|f| f.message)?;
        match state.generated.load(Ordering::SeqCst) {
            0 if again.ids == reference => Ok(String::new()),
            status => Err(format!("status {status}, then {:?}", again.ids)),
        }
    });
}

/// Every case runs on a thread with [`STACK_KIB`] of stack. `XSERV_STACK_KIB` is for measuring how
/// much they need: 160, of which messages that are nested as deeply as JSON may be need the most,
/// the others 96.
fn small_stacks(bench: &mut Bench) {
    let wanted = std::env::var("XSERV_STACK_KIB").ok().and_then(|kib| kib.parse::<usize>().ok());
    let on_stack = move |body: &(dyn Fn() -> Result<(), Failure> + Sync)| {
        let bytes = wanted.unwrap_or(STACK_KIB) << 10;
        let outcome = std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().stack_size(bytes);
            builder.spawn_scoped(scope, body).unwrap().join().unwrap()
        });
        outcome.map(|()| String::new()).map_err(|f| format!("{:?}: {}", f.status, f.message))
    };
    bench.case("load and inspect", move |_| {
        on_stack(&|| {
            inspect(&tiny())?;
            Model::load(&tiny(), &xserv_load_options { num_threads: 2, ..load_options() }).map(drop)
        })
    });
    bench.case("generate", move |_| {
        let model = Model::open(&tiny());
        let text = c_string("Once upon a time ".repeat(20));
        on_stack(&|| {
            let stop = [c"never".as_ptr(), c"ever".as_ptr()];
            let request = xserv_request {
                prompt: text.as_ptr(),
                max_tokens: 8,
                seed: 1,
                temperature: 0.9,
                top_k: 5,
                top_p: 0.9,
                stop_strings: stop.as_ptr(),
                num_stop_strings: 2,
                ..request()
            };
            model.generate(&request)?;
            model.logits(&PROMPT, true).map(drop)
        })
    });
    bench.case("tokenize and detokenize", move |_| {
        let model = Model::open(&tiny());
        let text = "Some words, \u{65e5}\u{672c}\u{8a9e} and 12345 <|im_end|>\n".repeat(2000);
        on_stack(&|| {
            let ids = model.tokenize(&text)?;
            model.detokenize(&ids, false)?;
            model.stream_chunks(&ids[..200], true).map(drop)
        })
    });
    bench.case("messages and tools nested deeply", move |_| {
        let model = Model::open(&tiny());
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let objects = format!("{}1{}", r#"{"a":"#.repeat(120), "}".repeat(120));
        let messages = format!(r#"[{{"role": "user", "content": "a", "extra": {objects}}}]"#);
        let tools = format!(r#"[{{"type": "function", "function": {}}}]"#, nested(120));
        on_stack(&|| {
            model.apply_chat_template(&messages, Some(&tools), None, true)?;
            model.apply_chat_template(MESSAGES, None, Some(r#"{"a": [[[1]]]}"#), true)?;
            // Deeper than is allowed.
            let deep = format!(r#"[{{"role": "user", "content": {}}}]"#, nested(5000));
            model.apply_chat_template(&deep, None, None, true).unwrap_err();
            Ok(())
        })
    });
    bench.case("operators", move |_| on_stack(&|| operators()));
}

/// Products of matrices, attention and a norm, whose kernels keep tiles on the stack.
fn operators() -> Result<(), Failure> {
    let context = Context::new(2);
    let (mut values, mut out) = (vec![0.5f32; 4 * 96 * 96], vec![0f32; 4 * 96 * 96]);
    let (mut matrix, mut heads) = ([2 * 96, 2 * 96], [1, 4, 96, 96]);
    unsafe {
        let (a, to) = (tensor(&mut values, &mut matrix), tensor(&mut out, &mut matrix));
        check(xserv_op_gemm(context.0, std::ptr::null(), &a, &a, &to))?;
        check(xserv_op_softmax(context.0, &a, &to))?;
        let (q, to) = (tensor(&mut values, &mut heads), tensor(&mut out, &mut heads));
        check(xserv_op_attention(context.0, std::ptr::null(), &q, &q, &q, &to))
    }
}
