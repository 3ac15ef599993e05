//! Allocations that fail: of each scenario every single one in turn, and all from any one on.
//!
//! A library that is preloaded (`fail_malloc.c`) lets `malloc` and its kin fail, of the library, its
//! dependencies, the standard library and the C library alike. A scenario runs in a child process,
//! which walks over the allocations: it lets one fail, looks at what the calls answered, frees all
//! that they made, and repeats the calls without a failure. If the child dies, that is noted, and
//! another goes on after that allocation.
//!
//! At the gate some of the allocations are tried, evenly spread; `XSERV_TRUST=full` tries all.
//! `XSERV_TRUST_STACKS=1` prints the stack of every abort.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_long, c_void, CStr, CString};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;
use std::time::Instant;

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;
use xserv::reserve;

use crate::client::*;
use crate::hostile_child::{wait_while_it_writes, TempDir};

/// Allocations of a scenario that are tried at the gate, for each mode.
const AT_THE_GATE: usize = 100;

/// Which allocations fail, as `fail_malloc.c` numbers it.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    None = 0,
    Once = 1,
    FromThenOn = 2,
}

/// The preloaded library.
struct Shim {
    set: unsafe extern "C" fn(c_int, c_long),
    switch: unsafe extern "C" fn(c_int),
    calls: unsafe extern "C" fn() -> c_long,
    blocks: unsafe extern "C" fn() -> c_long,
}

impl Shim {
    fn find() -> Shim {
        let find = |name: &CStr| {
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?} is not preloaded");
            found
        };
        // SAFETY: the signatures are those of the C file.
        unsafe {
            Shim {
                set: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, c_long)>(find(
                    c"xserv_fail_malloc",
                )),
                switch: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(find(
                    c"xserv_fail_malloc_switch",
                )),
                calls: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_long>(find(
                    c"xserv_fail_malloc_calls",
                )),
                blocks: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_long>(find(
                    c"xserv_fail_malloc_blocks",
                )),
            }
        }
    }

    /// Runs calls of the library, whose allocations count.
    fn during<T>(&self, calls: impl FnOnce() -> T) -> T {
        unsafe { (self.switch)(1) };
        let out = calls();
        unsafe { (self.switch)(0) };
        out
    }

    /// As `during`, for a call that gives a status.
    fn call(&self, call: impl FnOnce() -> xserv_status) -> Outcome<()> {
        check(self.during(call))
    }
}

/// The objects that a scenario works with: made before, with memory enough.
struct World {
    shim: Shim,
    model: Model,
    path: CString,
    options: xserv_load_options,
}

const TEXT: &str = "Once upon a time, 日本 had 12 naïve 🎉 <|im_end|> foxes.\n\n  The end";
const MESSAGES: &CStr = c"[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"Tell me a story of 3 h\xc3\xa9rons\"}]";
const TOOLS: &CStr = c"[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}]";

fn load(world: &World) -> Outcome<String> {
    let mut model = ptr::null_mut();
    world.shim.call(|| unsafe { xserv_load(world.path.as_ptr(), &world.options, &mut model) })?;
    let info = Model(model).info();
    let said = format!("{} {} {}", info.num_parameters, info.has_tokenizer, info.has_chat_template);
    world.shim.during(|| xserv_model_free(std::mem::ManuallyDrop::new(Model(model)).0));
    Ok(said)
}

/// A load that keeps what it quantises, and one that reads it.
fn load_with_kept_weights(world: &World) -> Outcome<String> {
    let folder = TempDir::new();
    let file = c_string(folder.path().join("kept.safetensors").to_str().unwrap());
    let weights = xserv_weights::XSERV_WEIGHTS_INT8 as u32;
    let options = xserv_load_options { weights, kept_weights: file.as_ptr(), ..world.options };
    let mut said = String::new();
    for _ in 0..2 {
        let mut model = ptr::null_mut();
        let loaded =
            world.shim.call(|| unsafe { xserv_load(world.path.as_ptr(), &options, &mut model) });
        let names = std::fs::read_dir(folder.path()).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        if let Some(part) = names.find(|name| name != "kept.safetensors") {
            let message = format!("{part} is left, {loaded:?}");
            return Err(Failure { status: XSERV_STATUS_INTERNAL, message });
        }
        loaded?;
        let model = Handle { shim: &world.shim, handle: model, free: xserv_model_free };
        said += &generate_with(&world.shim, model.handle)?;
    }
    Ok(said)
}

fn tokenize(world: &World) -> Outcome<String> {
    let mut tokens = ptr::null_mut();
    let text = TEXT.as_ptr().cast();
    let (model, shim) = (world.model.0, &world.shim);
    shim.call(|| unsafe { xserv_tokenize(model, text, TEXT.len(), ptr::null(), &mut tokens) })?;
    let mut len = 0;
    let ids = unsafe { xserv_tokens_data(tokens, &mut len) };
    let said = format!("{:?}", unsafe { std::slice::from_raw_parts(ids, len) });
    shim.during(|| xserv_tokens_free(tokens));
    Ok(said)
}

fn text_of(shim: &Shim, text: *mut xserv_text) -> String {
    let data = unsafe { xserv_text_data(text, ptr::null_mut()) };
    let said = unsafe { CStr::from_ptr(data) }.to_str().unwrap().to_string();
    shim.during(|| xserv_text_free(text));
    said
}

/// Frees a handle when dropped, whatever came between.
struct Handle<'a, T> {
    shim: &'a Shim,
    handle: *mut T,
    free: extern "C" fn(*mut T),
}

impl<T> Drop for Handle<'_, T> {
    fn drop(&mut self) {
        self.shim.during(|| (self.free)(self.handle));
    }
}

/// At once, and as a stream.
fn detokenize(world: &World) -> Outcome<String> {
    let (model, shim) = (world.model.0, &world.shim);
    let ids: Vec<u32> = (300..340).collect();
    let mut text = ptr::null_mut();
    shim.call(|| unsafe { xserv_detokenize(model, ids.as_ptr(), ids.len(), true, &mut text) })?;
    let mut said = text_of(shim, text);
    let mut handle = ptr::null_mut();
    shim.call(|| unsafe { xserv_detokenizer_new(model, true, &mut handle) })?;
    let stream = Handle { shim, handle, free: xserv_detokenizer_free };
    for id in ids.iter().map(Some).chain([None]) {
        let mut piece = ptr::null();
        let len = ptr::null_mut();
        shim.call(|| match id {
            Some(id) => unsafe { xserv_detokenizer_push(stream.handle, *id, &mut piece, len) },
            None => unsafe { xserv_detokenizer_finish(stream.handle, &mut piece, len) },
        })?;
        said.push_str(unsafe { CStr::from_ptr(piece) }.to_str().unwrap());
    }
    Ok(said)
}

fn chat_template(world: &World) -> Outcome<String> {
    let mut options: xserv_chat_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_chat_options_init(&mut options, size_of_val(&options)) };
    options.messages_json = MESSAGES.as_ptr();
    options.tools_json = TOOLS.as_ptr();
    options.add_generation_prompt = 1;
    let (model, shim) = (world.model.0, &world.shim);
    let mut text = ptr::null_mut();
    shim.call(|| unsafe { xserv_apply_chat_template(model, &options, &mut text) })?;
    Ok(text_of(shim, text))
}

/// Returns the samples of a result, which is freed.
fn result_of(shim: &Shim, handle: *mut xserv_result) -> Outcome<String> {
    let result = Handle { shim, handle, free: xserv_result_free };
    let mut said = String::new();
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    let mut sample = 0usize;
    loop {
        shim.call(|| unsafe { xserv_result_get_sample(result.handle, sample, &mut info) })?;
        let ids = unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) };
        let text = unsafe { CStr::from_ptr(info.text) }.to_str().unwrap();
        said += &format!("{ids:?} {text:?} {}; ", info.finish_reason);
        if !info.log_probs.is_null() {
            let own = unsafe { std::slice::from_raw_parts(info.log_probs, ids.len()) };
            let count = ids.len() * info.num_top_log_probs;
            let top = unsafe { std::slice::from_raw_parts(info.top_log_probs, count) };
            let top: Vec<u32> = top.iter().map(|one| one.token_id).collect();
            said += &format!("{} of {} likely, {top:?}; ", own.len(), top.len());
        }
        sample += 1;
        if sample == info.num_samples as usize {
            return Ok(said);
        }
    }
}

unsafe extern "C" fn count_tokens(_: *const xserv_token_event, count: *mut c_void) -> bool {
    unsafe { *(count as *mut u32) += 1 };
    true
}

static BIASES: [xserv_logit_bias; 2] = [
    xserv_logit_bias { token_id: 11, bias: 0.5 },
    xserv_logit_bias { token_id: 900, bias: f32::NEG_INFINITY },
];

/// Two samples of a chat, with all that can be told of them.
fn chat_request() -> xserv_request {
    xserv_request {
        messages_json: MESSAGES.as_ptr(),
        max_tokens: 12,
        num_samples: 2,
        seed: 7,
        logit_bias: BIASES.as_ptr(),
        num_logit_bias: BIASES.len(),
        min_tokens: 3,
        num_log_probs: 2,
        ..request()
    }
}

fn generate_with(shim: &Shim, model: *mut xserv_model) -> Outcome<String> {
    let stops = [c"qqqq".as_ptr(), c"zebra!".as_ptr()];
    let request = xserv_request {
        stop_strings: stops.as_ptr(),
        num_stop_strings: stops.len(),
        ..chat_request()
    };
    let (mut count, mut result) = (0u32, ptr::null_mut());
    let data = (&raw mut count).cast();
    shim.call(|| unsafe {
        xserv_generate(model, &request, Some(count_tokens), data, &mut result)
    })?;
    Ok(format!("{count} events: {}", result_of(shim, result)?))
}

fn generate(world: &World) -> Outcome<String> {
    generate_with(&world.shim, world.model.0)
}

/// The first request of a model, which starts its scheduler.
fn first_request(world: &World) -> Outcome<String> {
    let mut model = ptr::null_mut();
    check(unsafe { xserv_load(world.path.as_ptr(), &world.options, &mut model) })?;
    let model = Handle { shim: &world.shim, handle: model, free: xserv_model_free };
    generate_with(&world.shim, model.handle)
}

/// A request for an event loop: every event is taken and its number checked.
fn submit_and_next(world: &World) -> Outcome<String> {
    let (model, shim) = (world.model.0, &world.shim);
    let (request, mut handle) = (chat_request(), ptr::null_mut());
    shim.call(|| unsafe { xserv_submit(model, &request, ptr::null(), &mut handle) })?;
    let submission = Handle { shim, handle, free: xserv_submission_free };
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    event.struct_size = size_of::<xserv_event>();
    let mut told = [0u32; 2];
    let mut failure = None;
    let mut said = String::new();
    loop {
        let taken =
            shim.call(|| unsafe { xserv_next(submission.handle, XSERV_WAIT_FOREVER, &mut event) });
        if let Err(error) = taken {
            failure = Some(error);
            continue;
        }
        let kind = event.kind;
        if kind == xserv_event_kind::XSERV_EVENT_DONE as u32 {
            break;
        }
        if kind == xserv_event_kind::XSERV_EVENT_TOKEN as u32 {
            told[event.sample as usize] += 1;
            if event.num_tokens != told[event.sample as usize] {
                let message = format!("token {} is told as {told:?}", event.num_tokens);
                return Err(Failure { status: XSERV_STATUS_INTERNAL, message });
            }
            if event.log_prob.is_nan() || event.num_top_log_probs != 2 {
                let message = format!("token {} lacks log-probabilities", event.num_tokens);
                return Err(Failure { status: XSERV_STATUS_INTERNAL, message });
            }
        }
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    let mut result = ptr::null_mut();
    // Memory may be there again: nothing must have been lost by a first attempt that failed.
    let mut take =
        || shim.call(|| unsafe { xserv_submission_take_result(submission.handle, &mut result) });
    if let Err(failure) = take() {
        if failure.status != XSERV_STATUS_OUT_OF_MEMORY {
            return Err(failure);
        }
        check(unsafe { xserv_submission_take_result(submission.handle, &mut result) }).map_err(
            |second| Failure {
                message: format!("after {failure:?}: {}", second.message),
                ..second
            },
        )?;
    }
    said += &result_of(shim, result)?;
    Ok(format!("{told:?} {said}"))
}

fn logits(world: &World) -> Outcome<String> {
    let ids: Vec<u32> = (300..320).collect();
    let vocab_size = world.model.info().vocab_size as usize;
    let mut out = vec![f32::NAN; vocab_size * ids.len()];
    let options = logits_options(xserv_logits_rows::XSERV_LOGITS_ALL as u32);
    world.shim.call(|| unsafe {
        let out = (out.as_mut_ptr(), out.len());
        xserv_logits(world.model.0, ids.as_ptr(), ids.len(), &options, out.0, out.1)
    })?;
    let sum = out.iter().fold(0u64, |sum, x| sum.rotate_left(5) ^ u64::from(x.to_bits()));
    Ok(format!("{sum:x}"))
}

fn scores(world: &World) -> Outcome<String> {
    let ids: Vec<u32> = (400..440).collect();
    let mut out = [xserv_token_score { log_prob: f32::NAN, is_likeliest: 7 }; 37];
    world.shim.call(|| unsafe {
        let out = (out.as_mut_ptr(), out.len());
        xserv_score(world.model.0, ids.as_ptr(), ids.len(), 3, ptr::null(), out.0, out.1)
    })?;
    let sum = out.iter().fold(0u64, |sum, one| {
        sum.rotate_left(5) ^ u64::from(one.log_prob.to_bits()) ^ u64::from(one.is_likeliest)
    });
    Ok(format!("{sum:x}"))
}

/// A context of several threads, a tensor, and operators that take scratch memory.
fn operators(world: &World) -> Outcome<String> {
    let shim = &world.shim;
    let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
    options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    options.num_threads = 2;
    let mut handle = ptr::null_mut();
    shim.call(|| unsafe { xserv_context_new(&options, &mut handle) })?;
    let context = Handle { shim, handle, free: xserv_context_free };
    let context = context.handle;
    let mut owned = ptr::null_mut();
    let (f32, shape) = (xserv_dtype::XSERV_DTYPE_F32 as u32, [8i64, 16]);
    shim.call(|| unsafe { xserv_owned_tensor_new(context, f32, 2, shape.as_ptr(), &mut owned) })?;
    let owned = Handle { shim, handle: owned, free: xserv_owned_tensor_free };
    let _ = &owned;
    let mut a: Vec<f32> = (0..128).map(|i| i as f32 * 0.01).collect();
    let mut b = a.clone();
    let mut c = vec![0f32; 64];
    let (mut wide, mut tall, mut square) = ([8i64, 16], [16i64, 8], [8i64, 8]);
    let a = tensor(&mut a, &mut wide);
    let b = tensor(&mut b, &mut tall);
    let out = tensor(&mut c, &mut square);
    shim.call(|| unsafe { xserv_op_gemm(context, ptr::null(), &a, &b, &out) })?;
    shim.call(|| unsafe { xserv_op_softmax(context, &out, &out) })?;
    shim.call(|| unsafe { xserv_op_gelu(context, &out, &out) })?;
    Ok(format!("{:?}", &c[..8]))
}

fn inspect(world: &World) -> Outcome<String> {
    let (shim, mut handle) = (&world.shim, ptr::null_mut());
    shim.call(|| unsafe { xserv_inspect(world.path.as_ptr(), &mut handle) })?;
    let inspection = Handle { shim, handle, free: xserv_inspection_free };
    let mut info: xserv_inspection_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_inspection_info>();
    shim.call(|| unsafe { xserv_inspection_get_info(inspection.handle, &mut info) })?;
    let reason = unsafe { CStr::from_ptr(info.unsupported_reason) };
    let problem = unsafe { CStr::from_ptr(info.tokenizer_problem) };
    let flags = (info.supported, info.has_tokenizer, info.has_chat_template);
    let architecture = unsafe { CStr::from_ptr(info.architecture) };
    Ok(format!("{flags:?} {architecture:?} {reason:?} {problem:?}"))
}

fn plan(world: &World) -> Outcome<String> {
    let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
    plan.struct_size = size_of::<xserv_memory_plan>();
    let options = xserv_load_options { kv_cache_tokens: 1024, ..world.options };
    world.shim.call(|| unsafe { xserv_plan(world.path.as_ptr(), &options, &mut plan) })?;
    Ok(format!("{} {} {}", plan.total_bytes, plan.weights_bytes, plan.has_tokenizer))
}

/// Calls that fail: each tells its own failure, or the lack of memory.
fn error_text(world: &World) -> Outcome<String> {
    let (model, shim) = (world.model.0, &world.shim);
    let mut said = String::new();
    let mut no_memory = None;
    let mut expect = |call: &dyn Fn() -> xserv_status, wanted: xserv_status| match shim.call(call) {
        Ok(()) => said += "OK; ",
        Err(error) if error.status == wanted => said += &format!("{}; ", error.message),
        Err(error) => no_memory = Some(error),
    };
    let out_of_range = [u32::MAX];
    let greedy = greedy(&out_of_range, 3);
    let bad = xserv_request { messages_json: c"[{\"role\":1}]".as_ptr(), ..request() };
    let text = b"caf\xc3".as_ptr().cast();
    let generate = |r: &xserv_request| unsafe {
        xserv_generate(model, r, None, ptr::null_mut(), ptr::null_mut())
    };
    expect(&|| generate(&greedy), XSERV_STATUS_INVALID_ARGUMENT);
    expect(&|| generate(&bad), XSERV_STATUS_INVALID_ARGUMENT);
    expect(
        &|| unsafe { xserv_tokenize(model, text, 4, ptr::null(), &mut ptr::null_mut()) },
        XSERV_STATUS_INVALID_ARGUMENT,
    );
    expect(
        &|| unsafe { xserv_load(c"nobody/nothing".as_ptr(), ptr::null(), &mut ptr::null_mut()) },
        XSERV_STATUS_NOT_FOUND,
    );
    expect(
        &|| unsafe { xserv_tokenize(forged(), text, 3, ptr::null(), &mut ptr::null_mut()) },
        XSERV_STATUS_BAD_HANDLE,
    );
    match no_memory {
        Some(error) => Err(error),
        None => Ok(said),
    }
}

type Scenario = fn(&World) -> Outcome<String>;

const SCENARIOS: [(&str, Scenario); 14] = [
    ("load", load),
    ("load with kept weights", load_with_kept_weights),
    ("tokenize", tokenize),
    ("detokenize", detokenize),
    ("chat template", chat_template),
    ("generate", generate),
    ("first request", first_request),
    ("submit and next", submit_and_next),
    ("logits", logits),
    ("scores", scores),
    ("operators", operators),
    ("inspect", inspect),
    ("plan", plan),
    ("error text", error_text),
];

/// Prints where the process aborts. Memory is there again by then, and no lock of the allocator is held.
extern "C" fn on_abort(_: c_int) {
    let shim = Shim::find();
    unsafe { (shim.set)(Mode::None as c_int, 0) };
    eprintln!("{}", std::backtrace::Backtrace::force_capture());
    unsafe { libc::signal(libc::SIGABRT, libc::SIG_DFL) };
    unsafe { libc::raise(libc::SIGABRT) };
}

/// Runs `body` on a thread that has not called the library before, nor anything of Rust's standard
/// library: what these allocate once for each thread counts as well.
fn on_fresh_thread<T>(body: impl FnOnce() -> T) -> T {
    struct Task<F, T>(Option<F>, Option<T>);
    extern "C" fn run<F: FnOnce() -> T, T>(task: *mut c_void) -> *mut c_void {
        let task = unsafe { &mut *task.cast::<Task<F, T>>() };
        task.1 = task.0.take().map(|body| body());
        ptr::null_mut()
    }
    fn entry<F: FnOnce() -> T, T>(_: &Task<F, T>) -> extern "C" fn(*mut c_void) -> *mut c_void {
        run::<F, T>
    }
    let mut task = Task(Some(body), None);
    let run = entry(&task);
    unsafe {
        let mut thread = std::mem::zeroed();
        let task = (&raw mut task).cast();
        assert_eq!(libc::pthread_create(&mut thread, ptr::null(), run, task), 0);
        assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
    }
    task.1.expect("the body ran")
}

/// Without any memory of the system: a call that finds all that it needs in the reserve, calls that
/// are refused meanwhile, and a request that was submitted before and goes on.
fn refusal(world: &World) {
    let (model, shim) = (world.model.0, &world.shim);
    let (request, mut submission) = (chat_request(), ptr::null_mut());
    check(unsafe { xserv_submit(model, &request, ptr::null(), &mut submission) }).unwrap();
    let tokenize = |tokens: &mut *mut xserv_tokens| {
        let text = TEXT.as_ptr().cast();
        shim.call(|| unsafe { xserv_tokenize(model, text, TEXT.len(), ptr::null(), tokens) })
    };
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    unsafe { (shim.set)(Mode::FromThenOn as c_int, 1) };
    tokenize(&mut first).unwrap();
    assert!(reserve::bytes_in_use() > 0);
    let refused = tokenize(&mut second).unwrap_err();
    assert_eq!(refused.status, XSERV_STATUS_OUT_OF_MEMORY);
    assert!(refused.message.contains("memory is exhausted"), "{}", refused.message);
    let mut token = ptr::null_mut();
    let refused = shim.call(|| unsafe { xserv_cancel_token_new(&mut token) }).unwrap_err();
    assert_eq!(refused.status, XSERV_STATUS_OUT_OF_MEMORY);
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    event.struct_size = size_of::<xserv_event>();
    let mut num_tokens = 0;
    while event.kind != xserv_event_kind::XSERV_EVENT_DONE as u32 {
        shim.call(|| unsafe { xserv_next(submission, XSERV_WAIT_FOREVER, &mut event) }).unwrap();
        num_tokens += u32::from(event.kind == xserv_event_kind::XSERV_EVENT_TOKEN as u32);
    }
    assert_eq!(num_tokens, 24);
    let mut result = ptr::null_mut();
    shim.call(|| unsafe { xserv_submission_take_result(submission, &mut result) }).unwrap();
    result_of(shim, result).unwrap();
    shim.during(|| xserv_tokens_free(first));
    // Memory is there again, so nothing is refused, whatever is still kept of the reserve.
    unsafe { (shim.set)(Mode::None as c_int, 0) };
    tokenize(&mut second).unwrap();
    xserv_tokens_free(second);
    xserv_submission_free(submission);
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

#[test]
#[ignore = "run by the other tests of this module, as a child process"]
fn child() {
    let name = variable("XSERV_TRUST_SCENARIO");
    let scenario = SCENARIOS.iter().find(|(known, _)| *known == name).map(|(_, scenario)| scenario);
    if scenario.is_none() && name != "refusal" {
        return;
    }
    if std::env::var_os("XSERV_TRUST_STACKS").is_some() {
        let handler = on_abort as extern "C" fn(c_int) as libc::sighandler_t;
        unsafe { libc::signal(libc::SIGABRT, handler) };
    }
    let options = xserv_load_options { num_threads: 2, ..load_options() };
    let world = World {
        shim: Shim::find(),
        model: Model::load(&tiny(), &options).unwrap(),
        path: c_string(tiny().to_str().unwrap()),
        options,
    };
    let Some(scenario) = scenario else { return refusal(&world) };
    let set = |mode: Mode, nth: usize| unsafe { (world.shim.set)(mode as c_int, nth as c_long) };
    let mode = if variable("XSERV_TRUST_MODE") == "1" { Mode::Once } else { Mode::FromThenOn };
    let most: usize = variable("XSERV_TRUST_POINTS").parse().unwrap();
    let skip: usize = variable("XSERV_TRUST_SKIP").parse().unwrap();
    let mut report = File::options().append(true).open(variable("XSERV_TRUST_REPORT")).unwrap();
    let mut write = |line: String| report.write_all(format!("{line}\n").as_bytes()).unwrap();
    set(Mode::None, 0);
    let reference = scenario(&world).unwrap();
    // Tokenizers keep a cache for each of several threads.
    (0..32).for_each(|_| assert_eq!(on_fresh_thread(|| scenario(&world)).unwrap(), reference));
    set(Mode::None, 0);
    assert_eq!(scenario(&world).unwrap(), reference);
    let calls = unsafe { (world.shim.calls)() } as usize;
    let points = calls.min(most);
    write(format!("calls {calls} {points}"));
    let blocks = || unsafe { (world.shim.blocks)() };
    let before = blocks();
    for point in skip..points {
        let nth = 1 + point * calls / points;
        write(format!("begin {nth}"));
        set(mode, nth);
        let outcome = on_fresh_thread(|| scenario(&world));
        set(Mode::None, 0);
        let kept = reserve::bytes_in_use();
        let again = scenario(&world);
        let answer = match &outcome {
            Ok(said) if *said == reference => "ok",
            Ok(said) => &format!("wrong {said}"),
            Err(error) if error.status == XSERV_STATUS_OUT_OF_MEMORY => "refused",
            Err(error) => &format!("wrong {:?} {}", error.status, error.message),
        };
        let afterwards = match &again {
            Ok(said) if *said == reference => "right",
            Ok(said) => &format!("wrong {said}"),
            Err(error) => &format!("wrong {:?} {}", error.status, error.message),
        };
        write(format!("end {nth}|{answer}|{afterwards}|{kept}"));
    }
    write(format!("done {}", blocks() - before));
    // Without the test harness's own last words.
    unsafe { libc::_exit(0) };
}

/// Compiles the library to be preloaded, once for this process.
fn shim() -> &'static Path {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    BUILT.get_or_init(|| {
        let name = format!("fail_malloc-{}.so", std::process::id());
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let compiler = std::env::var("CC").unwrap_or("cc".to_string());
        let status = Command::new(compiler)
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"])
            .arg(root().join("tests/trust/fail_malloc.c"))
            .arg("-o")
            .arg(&built)
            .status()
            .expect("a C compiler");
        assert!(status.success(), "fail_malloc.c does not compile");
        // Another process of this test may be about to preload it.
        let ready = built.with_file_name("fail_malloc.so");
        std::fs::rename(&built, &ready).unwrap();
        ready
    })
}

/// This program, as the child for a scenario.
fn child_of(scenario: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "allocations::child", "--ignored", "--nocapture", "--test-threads=1"])
        .env("LD_PRELOAD", shim())
        .env("XSERV_TRUST_SCENARIO", scenario);
    command
}

/// The outcomes of the children of one scenario.
#[derive(Default)]
struct Walk {
    /// Allocations of the scenario, and those of them that were tried.
    calls: usize,
    tried: usize,
    refused: usize,
    aborts: Vec<(usize, String)>,
    hangs: Vec<usize>,
    wrong: Vec<String>,
    /// The most bytes of the reserve that were in use when all handles were freed.
    kept: usize,
    /// Blocks that the walk left allocated.
    leaked: i64,
}

/// Runs one child from a point on. Returns whether the walk is complete, and the point to go on with.
fn run_child(
    scenario: &str,
    mode: Mode,
    backtrace: &str,
    most: usize,
    skip: usize,
    walk: &mut Walk,
) -> (bool, usize) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!(
        "allocations-{}-{}-{}-{backtrace}",
        std::process::id(),
        scenario.replace(' ', "-"),
        mode as c_int
    );
    let report = folder.join(&name);
    let printed = folder.join(format!("{name}.stderr"));
    File::create(&report).unwrap();
    let mut child = child_of(scenario)
        .env("XSERV_TRUST_MODE", (mode as c_int).to_string())
        .env("XSERV_TRUST_POINTS", most.to_string())
        .env("XSERV_TRUST_SKIP", skip.to_string())
        .env("XSERV_TRUST_REPORT", &report)
        .env("RUST_BACKTRACE", backtrace)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&printed).unwrap())
        .spawn()
        .unwrap();
    let status = wait_while_it_writes(&mut child, &report);
    let text = std::fs::read_to_string(&report).unwrap();
    let said = std::fs::read_to_string(&printed).unwrap_or_default();
    let _ = std::fs::remove_file(&report);
    let _ = std::fs::remove_file(&printed);
    let (mut begun, mut point, mut is_done) = (0, skip, false);
    for line in text.lines() {
        let (kind, rest) = line.split_once(' ').unwrap();
        match kind {
            "calls" => {
                let (calls, _) = rest.split_once(' ').unwrap();
                walk.calls = calls.parse().unwrap();
            }
            "begin" => begun = rest.parse().unwrap(),
            "end" => {
                let parts: Vec<&str> = rest.split('|').collect();
                point += 1;
                walk.tried += 1;
                walk.refused += usize::from(parts[1] == "refused");
                walk.kept = walk.kept.max(parts[3].parse().unwrap());
                if parts[1].starts_with("wrong") || parts[2] != "right" {
                    walk.wrong.push(format!("{scenario}, allocation {rest}"));
                }
            }
            "done" => {
                walk.leaked += rest.parse::<i64>().unwrap();
                is_done = true;
            }
            _ => panic!("{line}"),
        }
    }
    match status {
        None => walk.hangs.push(begun),
        Some(status) if status.success() && is_done => return (true, point),
        Some(status) => {
            assert!(begun > 0, "{scenario}: the child failed before its walk: {said}");
            let how = match status.signal() {
                Some(signal) => format!("signal {signal}"),
                None => format!("{status}"),
            };
            walk.aborts.push((begun, format!("{how}: {}", said.trim())));
        }
    }
    walk.tried += 1;
    (false, point + 1)
}

fn walk(scenario: &str, mode: Mode, backtrace: &str, most: usize) -> Walk {
    let mut walk = Walk::default();
    let mut skip = 0;
    loop {
        let (is_done, next) = run_child(scenario, mode, backtrace, most, skip, &mut walk);
        if is_done || next >= most.min(walk.calls) {
            return walk;
        }
        skip = next;
    }
}

fn most_points() -> usize {
    match std::env::var_os("XSERV_TRUST").filter(|value| value == "full") {
        Some(_) => usize::MAX,
        None => AT_THE_GATE,
    }
}

fn walk_all(mode: Mode, most: usize) -> BTreeMap<String, Walk> {
    let only = std::env::var("XSERV_TRUST_ONLY").ok();
    let mut walks = BTreeMap::new();
    for (scenario, _) in SCENARIOS {
        if only.as_deref().is_some_and(|only| only != scenario) {
            continue;
        }
        for backtrace in ["0", "1"] {
            let began = Instant::now();
            let walk = walk(scenario, mode, backtrace, most);
            println!(
                "{scenario}, RUST_BACKTRACE={backtrace}: {} of {} allocations, {} refused, {} died, {} \
                 hung, {} wrong; {} bytes of the reserve kept, {} blocks more allocated; {:.1} s",
                walk.tried,
                walk.calls,
                walk.refused,
                walk.aborts.len(),
                walk.hangs.len(),
                walk.wrong.len(),
                walk.kept,
                walk.leaked,
                began.elapsed().as_secs_f64(),
            );
            walks.insert(format!("{scenario}, RUST_BACKTRACE={backtrace}"), walk);
        }
    }
    walks
}

/// Blocks that may be more at the end of a walk: a queue or a cache of another size.
const MOST_BLOCKS: i64 = 32;

fn assert_none_failed(walks: &BTreeMap<String, Walk>) {
    let mut wrong = Vec::new();
    for (name, walk) in walks {
        wrong.extend(walk.aborts.iter().map(|(nth, how)| format!("{name}: {nth} died: {how}")));
        wrong.extend(walk.hangs.iter().map(|nth| format!("{name}: {nth} hung")));
        wrong.extend(walk.wrong.iter().map(|what| format!("{name}: {what}")));
        if walk.tried == 0 || walk.leaked > MOST_BLOCKS {
            wrong.push(format!("{name}: {} tried, {} blocks lost", walk.tried, walk.leaked));
        }
    }
    assert!(wrong.is_empty(), "{} failures:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_single_failure_is_survived() {
    assert_none_failed(&walk_all(Mode::Once, most_points()));
}

/// Goes beyond the header: the reserve lasts until the call ends, however long it is.
#[test]
fn lasting_lack_of_memory_is_survived_by_small_calls() {
    assert_none_failed(&walk_all(Mode::FromThenOn, most_points() / 4));
}

#[test]
fn what_runs_goes_on_and_what_is_new_is_refused() {
    let output = child_of("refusal").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
}
