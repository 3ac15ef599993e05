//! The CUDA half without a GPU: a fake driver (fake_cuda.c) takes the place of NVIDIA's, with two devices
//! whose kernels do nothing, and any of its calls fails at will. Tokens mean nothing there (all are 0), but
//! every call that the library makes is made, in its order.
//!
//! If the library was built without nvcc, `XSERV_TEST_WITHOUT_KERNELS` lets it go on without
//! kernels (src/backend/cuda/fatbins.rs); that needs debug assertions, which tests have unless they
//! are built in release mode.

use std::ffi::{c_int, c_long, c_void, CStr, OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use xserv::backend::ComputeContext;
use xserv::ffi::xserv_device_kind::*;
use xserv::ffi::xserv_dtype::*;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::files::TempDir;
use crate::subprocess::{all, compile, is_child, run, sampled, say, Ended};

const OUT_OF_MEMORY: c_int = 2;
const ILLEGAL_ADDRESS: c_int = 700;
const LAUNCH_FAILED: c_int = 719;
const UNKNOWN: c_int = 999;

/// The classes of fake_cuda.c.
const CAN_RUN_OUT_OF_MEMORY: c_int = 2 | 4 | 8 | 16;
const MODULE: c_int = 4;
const ALL_CLASSES: c_int = 255;

/// Bars.
const MAX_ANSWER: Duration = Duration::from_secs(1);
const MAX_FREE: Duration = Duration::from_secs(5);

/// The controls of the fake driver, in a process that has loaded it.
struct Fake {
    fail: unsafe extern "C" fn(c_int, c_long, c_int),
    counted: unsafe extern "C" fn() -> c_long,
    never_ready: unsafe extern "C" fn(c_int, c_int),
    set_limit: unsafe extern "C" fn(c_int, usize),
    used: unsafe extern "C" fn(c_int) -> usize,
    lose: unsafe extern "C" fn(c_int, c_int),
    handles: unsafe extern "C" fn() -> c_long,
    calls_in_child: unsafe extern "C" fn() -> c_long,
    init: unsafe extern "C" fn(u32) -> c_int,
}

impl Fake {
    fn get() -> Fake {
        let library = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "the fake driver is not on LD_LIBRARY_PATH");
        fn find<T: Copy>(library: *mut c_void, name: &CStr) -> T {
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}: another libcuda was found");
            assert_eq!(size_of::<T>(), size_of_val(&found));
            unsafe { std::mem::transmute_copy(&found) }
        }
        Fake {
            fail: find(library, c"fake_cuda_fail"),
            counted: find(library, c"fake_cuda_counted"),
            never_ready: find(library, c"fake_cuda_never_ready"),
            set_limit: find(library, c"fake_cuda_set_limit"),
            used: find(library, c"fake_cuda_used"),
            lose: find(library, c"fake_cuda_lose"),
            handles: find(library, c"fake_cuda_handles"),
            calls_in_child: find(library, c"fake_cuda_calls_in_child"),
            init: find(library, c"cuInit"),
        }
    }

    fn fail(&self, classes: c_int, n: usize, status: c_int) {
        unsafe { (self.fail)(classes, n as c_long, status) }
    }

    fn counted(&self) -> usize {
        unsafe { (self.counted)() as usize }
    }

    fn used(&self, device: c_int) -> usize {
        unsafe { (self.used)(device) }
    }

    fn handles(&self) -> c_long {
        unsafe { (self.handles)() }
    }
}

/// Returns the folder of the fake driver, built once.
fn driver() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = TempDir::new();
            let library = folder.path().join("libcuda.so.1");
            compile("fake_cuda.c", &library, &["-Wl,-soname,libcuda.so.1", "-lpthread"]);
            // The name that is looked for first.
            std::os::unix::fs::symlink("libcuda.so.1", folder.path().join("libcuda.so")).unwrap();
            folder
        })
        .path()
}

/// Runs `name` of this module in a process with the fake driver.
fn with_fake(name: &str, environment: &[(&str, &str)]) -> Ended {
    let mut path = OsString::from(driver());
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(others);
    }
    let mut variables: Vec<(&str, &OsStr)> = vec![
        ("LD_LIBRARY_PATH", &path),
        ("XSERV_TEST_WITHOUT_KERNELS", OsStr::new("1")),
        ("XSERV_CUBLAS", OsStr::new("0")),
    ];
    variables.extend(environment.iter().map(|(name, value)| (*name, OsStr::new(*value))));
    run(&format!("cuda::{name}"), &variables)
}

/// Whether the library can be told to go on without kernels.
fn can_fake() -> bool {
    let can = cfg!(debug_assertions) || xserv::backend::cuda::is_present();
    if !can {
        println!("skipped: a release build without kernels");
    }
    can
}

// ---- In the child ----

/// Returns a config of the sizes for which the fused kernels are written; its weights are random.
fn wide() -> TempDir {
    let folder = TempDir::new();
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": true, "eos_token_id": 1,
    });
    folder.write("config.json", config.to_string());
    folder
}

/// A model of the tests: its folder, and whether its weights are random.
struct Subject {
    path: PathBuf,
    is_random: bool,
    _folder: Option<TempDir>,
}

impl Subject {
    fn tiny() -> Subject {
        Subject { path: tiny(), is_random: false, _folder: None }
    }

    fn wide() -> Subject {
        let folder = wide();
        Subject { path: folder.path().to_path_buf(), is_random: true, _folder: Some(folder) }
    }

    fn of_name(name: &str) -> Subject {
        match name {
            "tiny" => Subject::tiny(),
            "wide" => Subject::wide(),
            other => panic!("{other}"),
        }
    }

    /// Loads it to a device, with room for less than what [`requests`] want.
    fn load(&self, device: u32) -> Outcome<Model> {
        let options = xserv_load_options {
            device_kind: XSERV_DEVICE_CUDA as u32,
            device_index: device,
            dtype: XSERV_DTYPE_BF16 as u32,
            num_threads: 2,
            max_context_tokens: 128,
            kv_cache_tokens: 160,
            max_prefill_tokens: 64,
            max_batch_size: 8,
            max_swap_bytes: 4 << 20,
            random_weights: u8::from(self.is_random),
            ..load_options()
        };
        Model::load(&self.path, &options)
    }
}

const NUM_TOKENS: u32 = 50;
const NUM_REQUESTS: u32 = 5;

fn generate(model: &Model, salt: u32) -> Outcome<Vec<u32>> {
    let prompt: Vec<u32> = (0..24).map(|i| (i * 7 + salt * 31) % 500).collect();
    let request = xserv_request { ignore_eos: 1, ..greedy(&prompt, NUM_TOKENS) };
    model.generate(&request).map(|output| output.ids)
}

/// Fifty tokens of each of several requests at once, which have to preempt each other.
fn requests(model: &Model) -> Vec<Outcome<Vec<u32>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..NUM_REQUESTS).map(|salt| scope.spawn(move || generate(model, salt))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn is_fine(ids: &[u32]) -> bool {
    ids.len() == NUM_TOKENS as usize && ids.iter().all(|&id| id == 0)
}

fn wrong(what: impl std::fmt::Display) {
    say("wrong", what);
}

/// Says what is wrong with a load or a request, unless it is right or ended with this status.
fn expect<T>(what: &str, outcome: &Outcome<T>, status: xserv_status) {
    if let Err(failure) = outcome {
        if failure.status != status {
            wrong(format!("{what}: {:?}: {}", failure.status, failure.message));
        }
        if failure.message.contains("18446744073709551615") {
            wrong(format!("{what}: {}", failure.message));
        }
    }
}

fn expect_ids(what: &str, outcome: &Outcome<Vec<u32>>, status: xserv_status) {
    expect(what, outcome, status);
    if let Ok(ids) = outcome {
        if !is_fine(ids) {
            wrong(format!("{what}: tokens {ids:?}"));
        }
    }
}

fn free(what: &str, model: Model) -> Duration {
    let begin = Instant::now();
    drop(model);
    let took = begin.elapsed();
    if took > MAX_FREE {
        wrong(format!("{what}: free took {took:?}"));
    }
    took
}

/// Load, requests, free, with a fault planned. Returns whether the fault came, and the model that it left.
fn run_subject(
    fake: &Fake,
    subject: &Subject,
    classes: c_int,
    n: usize,
    status: c_int,
) -> (Outcome<Model>, Vec<Outcome<Vec<u32>>>, bool) {
    fake.fail(classes, n, status);
    let model = subject.load(0);
    let outcomes = match &model {
        Ok(model) => requests(model),
        Err(_) => Vec::new(),
    };
    (model, outcomes, n > 0 && fake.counted() >= n)
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap()
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn two_devices() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    assert_eq!(xserv::backend::cuda::num_cuda_devices(), 2);
    for subject in [Subject::tiny(), Subject::wide()] {
        for device in [0, 1] {
            let other = 1 - device;
            let (used, handles) = ([fake.used(0), fake.used(1)], fake.handles());
            let model = subject.load(device).unwrap();
            let info = model.info();
            assert_eq!((info.device_kind, info.device_index), (XSERV_DEVICE_CUDA as u32, device));
            for outcome in requests(&model) {
                assert!(is_fine(&outcome.unwrap()));
            }
            let mut stats: xserv_model_stats = unsafe { std::mem::zeroed() };
            stats.struct_size = size_of::<xserv_model_stats>();
            check(unsafe { xserv_model_get_stats(model.0, &mut stats) }).unwrap();
            assert!(stats.total_preemptions > 0, "nothing was preempted");
            assert!(model.logits(&[1, 2, 3], true).is_ok());
            assert!(fake.used(device as c_int) > info.weights_bytes as usize);
            assert_eq!(
                fake.used(other as c_int),
                used[other as usize],
                "memory of the other device"
            );
            drop(model);
            assert_eq!([fake.used(0), fake.used(1)], used, "memory was kept");
            assert_eq!(fake.handles(), handles, "events, streams or pinned memory were kept");
        }
    }
    let failure = Subject::tiny().load(2).map(drop).unwrap_err();
    assert_eq!(failure.status, XSERV_STATUS_NO_DEVICE, "{}", failure.message);
    say("done", "");
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn memory_fails() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::of_name(&variable("XSERV_TRUST_MODEL"));
    let (used, handles) = {
        // Memory that the first load keeps for good is no leak.
        let (model, outcomes, _) = run_subject(&fake, &subject, CAN_RUN_OUT_OF_MEMORY, 0, 0);
        assert!(model.is_ok() && outcomes.iter().all(|o| o.as_deref().is_ok_and(is_fine)));
        drop(model);
        (fake.used(0), fake.handles())
    };
    let count = {
        let (model, ..) = run_subject(&fake, &subject, CAN_RUN_OUT_OF_MEMORY, 0, 0);
        drop(model);
        fake.counted()
    };
    say("count", count);
    let (mut loads, mut failed, mut survived, mut faults) = (0, 0, 0, 0);
    for n in sampled(count, 60) {
        let what = format!("out of memory at {n}");
        say("case", &what);
        let (model, outcomes, came) =
            run_subject(&fake, &subject, CAN_RUN_OUT_OF_MEMORY, n, OUT_OF_MEMORY);
        faults += usize::from(came);
        expect(&format!("{what}, load"), &model, XSERV_STATUS_OUT_OF_MEMORY);
        for outcome in &outcomes {
            expect_ids(&what, outcome, XSERV_STATUS_OUT_OF_MEMORY);
            failed += usize::from(outcome.is_err());
            survived += usize::from(outcome.is_ok());
        }
        fake.fail(0, 0, 0);
        let model = match model {
            Ok(model) => model,
            Err(_) => {
                loads += 1;
                match subject.load(0) {
                    Ok(model) => model,
                    Err(failure) => {
                        wrong(format!("{what}, the next load: {}", failure.message));
                        continue;
                    }
                }
            }
        };
        for outcome in requests(&model) {
            expect_ids(&format!("{what}, afterwards"), &outcome, XSERV_STATUS_OK);
        }
        free(&what, model);
        if (fake.used(0), fake.handles()) != (used, handles) {
            let now = (fake.used(0), fake.handles());
            wrong(format!(
                "{what}: {now:?} bytes and handles are left, {:?} before",
                (used, handles)
            ));
        }
    }
    say("faults", faults);
    say("failed", format!("{loads} loads, {failed} requests; {survived} requests went on"));
    // Little memory, and not for a moment only.
    let model = subject.load(0).unwrap();
    let needed = fake.used(0);
    drop(model);
    for eighths in 0..8 {
        let limit = needed * eighths / 8;
        say("case", format!("a device with {limit} bytes"));
        unsafe { (fake.set_limit)(0, limit) };
        let loaded = subject.load(0);
        expect("little memory", &loaded, XSERV_STATUS_OUT_OF_MEMORY);
        match loaded {
            Ok(_) => wrong(format!("{limit} of {needed} bytes are enough")),
            Err(failure) => say("said", failure.message),
        }
        unsafe { (fake.set_limit)(0, 1 << 30) };
        if (fake.used(0), fake.handles()) != (used, handles) {
            wrong(format!("{limit}: memory or handles are left"));
        }
    }
    let model = subject.load(0).unwrap();
    expect_ids("after all", &generate(&model, 1), XSERV_STATUS_OK);
    // An operator's allocation that the device cannot serve says what is free there.
    let context = ComputeContext::cuda_private(0, usize::MAX).unwrap();
    let message = match context.allocate_exact(1 << 40, "a test") {
        Ok(_) => "memory that is not there".to_string(),
        Err(error) => error.message().to_string(),
    };
    say("said", &message);
    if !message.contains(" of 1073741824 are free") || message.contains("budget") {
        wrong(message);
    }
    say("done", "");
}

/// Kernels are loaded once in a process, some of them to find out which there are.
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn kernels_fail() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::of_name(&variable("XSERV_TRUST_MODEL"));
    let n: usize = variable("XSERV_TRUST_N").parse().unwrap();
    fake.fail(MODULE, n, OUT_OF_MEMORY);
    let loaded = subject.load(0);
    if n == 0 {
        say("count", fake.counted());
    }
    match &loaded {
        Ok(_) if n == 0 => {}
        // A model with other kernels than the device has would be slower for its life.
        Ok(_) => wrong("loads, with a kernel that was not loaded"),
        Err(_) => expect("a kernel", &loaded, XSERV_STATUS_OUT_OF_MEMORY),
    }
    fake.fail(0, 0, 0);
    drop(loaded);
    for outcome in requests(&subject.load(0).unwrap()) {
        expect_ids("afterwards", &outcome, XSERV_STATUS_OK);
    }
    say("done", "");
}

/// Returns a context on a device, without a limit.
fn cuda_context(device: u32) -> Outcome<Context> {
    let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
    options.device_kind = XSERV_DEVICE_CUDA as u32;
    options.device_index = device;
    let mut context = std::ptr::null_mut();
    check(unsafe { xserv_context_new(&options, &mut context) })?;
    Ok(Context(context))
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn counts() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::of_name(&variable("XSERV_TRUST_MODEL"));
    let (model, ..) = run_subject(&fake, &subject, ALL_CLASSES, 0, 0);
    drop(model);
    say("count", fake.counted());
    say("done", "");
}

/// One fault for good. What was lost stays lost, says so at once, and takes nothing else along.
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn device_is_lost() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::of_name(&variable("XSERV_TRUST_MODEL"));
    let n: usize = variable("XSERV_TRUST_N").parse().unwrap();
    let status: c_int = variable("XSERV_TRUST_STATUS").parse().unwrap();
    let on_cpu = Model::open(&tiny());
    let expected = on_cpu.generate(&greedy(&[10, 20, 30, 40], 3)).unwrap().ids;
    let neighbour = subject.load(1).unwrap();
    const LOST: xserv_status = XSERV_STATUS_DEVICE_LOST;
    let what = format!("{status} at {n}");
    let mut slowest = Duration::ZERO;
    let mut answers = |what: String, body: &mut dyn FnMut() -> Outcome<()>, is_lost: bool| {
        let begin = Instant::now();
        let outcome = body();
        slowest = slowest.max(begin.elapsed());
        if begin.elapsed() > MAX_ANSWER {
            wrong(format!("{what}: answered after {:?}", begin.elapsed()));
        }
        match outcome {
            Ok(()) if is_lost => wrong(format!("{what}: works on a lost device")),
            outcome => expect(&what, &outcome, LOST),
        }
    };
    let (model, outcomes, came) = run_subject(&fake, &subject, ALL_CLASSES, n, status);
    expect(&format!("{what}, load"), &model, LOST);
    for outcome in &outcomes {
        expect_ids(&what, outcome, LOST);
    }
    // The unknown error ends nothing in the driver: whoever was not told of it goes on.
    let is_told = model.is_err() || outcomes.iter().any(|outcome| outcome.is_err());
    let is_lost = is_told || (came && status != UNKNOWN);
    let mut freed = Duration::ZERO;
    if let Ok(model) = model {
        answers(format!("{what}, next"), &mut || generate(&model, 1).map(drop), is_lost);
        answers(format!("{what}, logits"), &mut || model.logits(&[1, 2], true).map(drop), is_lost);
        freed = free(&what, model);
    }
    // Some faults only come when the model is freed.
    let is_lost = is_lost || (fake.counted() >= n && status != UNKNOWN);
    answers(format!("{what}, next load"), &mut || subject.load(0).map(drop), is_lost);
    answers(format!("{what}, context"), &mut || cuda_context(0).map(drop), is_lost);
    expect_ids(&format!("{what}, device 1"), &generate(&neighbour, 2), XSERV_STATUS_OK);
    expect(&format!("{what}, load to device 1"), &subject.load(1), XSERV_STATUS_OK);
    let after = on_cpu.generate(&greedy(&[10, 20, 30, 40], 3)).map(|output| output.ids);
    if after.as_ref().ok() != Some(&expected) {
        wrong(format!("{what}, the CPU: {after:?}"));
    }
    free("device 1", neighbour);
    say("came", usize::from(fake.counted() >= n));
    say("told", usize::from(is_told));
    say("answer_us", slowest.as_micros());
    say("free_us", freed.as_micros());
    say("done", "");
}

/// A device that is lost while two models on it and one on the other device generate.
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn device_is_lost_mid_run() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::tiny();
    let models = [0, 0, 1].map(|device| subject.load(device).unwrap());
    std::thread::scope(|scope| {
        for model in &models[..2] {
            scope.spawn(|| loop {
                if let Err(failure) = generate(model, 3) {
                    expect::<()>("mid-run", &Err(failure), XSERV_STATUS_DEVICE_LOST);
                    break;
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        unsafe { (fake.lose)(0, LAUNCH_FAILED) };
    });
    let [a, b, c] = models;
    for model in [a, b] {
        expect_ids("afterwards", &generate(&model, 4), XSERV_STATUS_DEVICE_LOST);
        free("a lost model", model);
    }
    expect_ids("device 1", &generate(&c, 4), XSERV_STATUS_OK);
    // Without a choice the CPU is the next best.
    let auto = xserv_load_options { device_kind: XSERV_DEVICE_AUTO as u32, ..load_options() };
    let model = Model::load(&tiny(), &auto).unwrap();
    if model.info().device_kind != XSERV_DEVICE_CPU as u32 {
        wrong("a model was loaded to a lost device");
    }
    say("done", "");
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn device_never_ready() {
    if !is_child() {
        return;
    }
    let fake = Fake::get();
    let subject = Subject::tiny();
    // Events that say for ever that they are not reached, on a device that does its work.
    unsafe { (fake.never_ready)(1, 0) };
    let model = subject.load(0).unwrap();
    for outcome in requests(&model) {
        expect_ids("not ready", &outcome, XSERV_STATUS_OK);
    }
    free("not ready", model);
    unsafe { (fake.never_ready)(0, 0) };
    // A device that hangs: what waits for it waits, but nobody else does.
    let model = subject.load(0).unwrap();
    let neighbour = Model::open(&tiny());
    unsafe { (fake.never_ready)(1, 1) };
    let prompt: Vec<u32> = (0..24).collect();
    let request = xserv_request { ignore_eos: 1, ..greedy(&prompt, NUM_TOKENS) };
    let mut submission = std::ptr::null_mut();
    check(unsafe { xserv_submit(model.0, &request, std::ptr::null(), &mut submission) }).unwrap();
    let timed = |what: &str, most: Duration, body: &mut dyn FnMut()| {
        say("case", what);
        let begin = Instant::now();
        body();
        let took = begin.elapsed();
        say("took", format!("{what}: {took:?}"));
        if took > most {
            wrong(format!("{what}: took {took:?}"));
        }
    };
    timed("xserv_cancel", MAX_ANSWER, &mut || check(xserv_cancel(submission)).unwrap());
    timed("the CPU", 20 * MAX_ANSWER, &mut || {
        assert!(neighbour.generate(&greedy(&[10, 20, 30, 40], 3)).is_ok());
    });
    timed("xserv_submission_free", MAX_ANSWER, &mut || xserv_submission_free(submission));
    // Memory that a kernel may still write cannot be given back, so freeing the model waits for the
    // device, and ends when that does.
    std::thread::scope(|scope| {
        let handle = model.0 as usize;
        let thread = scope.spawn(move || {
            drop(Model(std::ptr::with_exposed_provenance_mut(handle)));
            Instant::now()
        });
        std::mem::forget(model);
        std::thread::sleep(Duration::from_millis(300));
        say(
            "took",
            format!("free of a hung device's model had returned: {}", thread.is_finished()),
        );
        let begin = Instant::now();
        unsafe { (fake.never_ready)(0, 0) };
        let took = thread.join().unwrap().saturating_duration_since(begin);
        if took > MAX_FREE {
            wrong(format!("free took {took:?} after the device went on"));
        }
    });
    say("done", "");
}

/// Forks, runs `body` in the child, and returns what it returned there.
fn in_fork(body: impl FnOnce() -> i32) -> Result<i32, String> {
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
        unsafe { libc::_exit(code) };
    }
    let begin = Instant::now();
    loop {
        let mut status = 0;
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            return match libc::WIFEXITED(status) {
                true => Ok(libc::WEXITSTATUS(status)),
                false => Err(format!("status {status:#x}")),
            };
        }
        if begin.elapsed() > Duration::from_secs(20) {
            unsafe { libc::kill(child, libc::SIGKILL) };
            return Err("hung".to_string());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a load to CUDA in a forked child says what it must.
fn is_refused() -> bool {
    match Subject::tiny().load(0) {
        Err(failure) => {
            let fits = failure.status == XSERV_STATUS_NO_DEVICE
                && failure.message.contains("forked after CUDA had been started")
                && failure.message.contains("start a new process");
            if !fits {
                eprintln!("{:?}: {}", failure.status, failure.message);
            }
            fits
        }
        Ok(_) => false,
    }
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn forked_children() {
    if !is_child() {
        return;
    }
    let how = variable("XSERV_TRUST_HOW");
    let fake = Fake::get();
    let reference = Model::open(&tiny());
    let expected = reference.generate(&greedy(&[10, 20, 30, 40], 3)).unwrap().ids;
    let in_child = |parents: Option<*mut xserv_model>,
                    context: Option<*mut xserv_context>|
     -> i32 {
        if !is_refused() {
            return 1;
        }
        match cuda_context(0) {
            Err(failure) if failure.status == XSERV_STATUS_NO_DEVICE => {}
            _ => return 2,
        }
        if xserv::backend::cuda::num_cuda_devices() != 0 {
            return 3;
        }
        let auto = xserv_load_options { device_kind: XSERV_DEVICE_AUTO as u32, ..load_options() };
        let model = match Model::load(&tiny(), &auto) {
            Ok(model) => model,
            Err(_) => return 4,
        };
        if model.info().device_kind != XSERV_DEVICE_CPU as u32 {
            return 5;
        }
        let ids = model.generate(&greedy(&[10, 20, 30, 40], 3)).map(|output| output.ids);
        if ids.ok().as_ref() != Some(&expected) {
            return 6;
        }
        // The parent's objects are released without a call to the driver.
        if let Some(model) = parents {
            xserv_model_free(model);
        }
        if let Some(context) = context {
            xserv_context_free(context);
        }
        if unsafe { (fake.calls_in_child)() } != 0 {
            return 7;
        }
        0
    };
    let outcome = match how.as_str() {
        "after a load" => {
            let model = Subject::tiny().load(0).unwrap();
            let context = cuda_context(1).unwrap();
            assert!(is_fine(&generate(&model, 1).unwrap()));
            let outcome = in_fork(|| in_child(Some(model.0), Some(context.0)));
            // Nor does the parent notice.
            expect_ids("the parent", &generate(&model, 2), XSERV_STATUS_OK);
            free("the parent's", model);
            outcome
        }
        "after the host's own start" => {
            assert_eq!(unsafe { (fake.init)(0) }, 0);
            in_fork(|| in_child(None, None))
        }
        "during the start" => std::thread::scope(|scope| {
            let thread = scope.spawn(|| Subject::tiny().load(0).unwrap());
            // The fake driver takes half a second to start.
            std::thread::sleep(Duration::from_millis(200));
            let outcome = in_fork(|| in_child(None, None));
            expect_ids("the parent", &generate(&thread.join().unwrap(), 2), XSERV_STATUS_OK);
            outcome
        }),
        "before any start" => {
            // A child that is the first to start CUDA may use it.
            in_fork(|| match Subject::tiny().load(0) {
                Ok(model) => i32::from(!generate(&model, 1).is_ok_and(|ids| is_fine(&ids))),
                Err(_) => 1,
            })
        }
        other => panic!("{other}"),
    };
    if outcome != Ok(0) {
        wrong(format!("{how}: {outcome:?}"));
    }
    say("done", "");
}

// ---- In the parent ----

#[test]
fn models_go_to_the_device_that_they_are_told() {
    if can_fake() {
        with_fake("two_devices", &[]).check("two devices");
    }
}

#[test]
fn models_survive_calls_that_find_no_memory() {
    if !can_fake() {
        return;
    }
    for model in ["tiny", "wide"] {
        let ended = with_fake("memory_fails", &[("XSERV_TRUST_MODEL", model)]);
        for word in ["count", "faults", "failed", "said"] {
            ended.said(word).for_each(|said| println!("{model}: {word}: {said}"));
        }
        ended.check(model);
    }
}

#[test]
fn kernels_without_memory_are_not_kernels_that_are_not_there() {
    if !can_fake() {
        return;
    }
    for model in ["tiny", "wide"] {
        let with = |n: usize| {
            let n = n.to_string();
            with_fake("kernels_fail", &[("XSERV_TRUST_MODEL", model), ("XSERV_TRUST_N", &n)])
        };
        let counts = with(0);
        counts.check(model);
        let count: usize = counts.said("count").next().unwrap().parse().unwrap();
        println!("{model}: {count} calls load kernels");
        for n in sampled(count, 12) {
            with(n).check(&format!("{model}, {n} of {count}"));
        }
    }
}

#[test]
fn lost_devices_are_told_and_take_nothing_else_along() {
    if !can_fake() {
        return;
    }
    let failed: Mutex<Vec<String>> = Mutex::default();
    let (mut runs, mut came, mut told) = (0, 0, 0);
    let (mut answer, mut free) = (0, 0);
    for model in ["tiny", "wide"] {
        let counts = with_fake("counts", &[("XSERV_TRUST_MODEL", model)]);
        counts.check(model);
        let count: usize = counts.said("count").next().unwrap().parse().unwrap();
        println!("{model}: {count} calls of the driver");
        for status in [ILLEGAL_ADDRESS, LAUNCH_FAILED, UNKNOWN] {
            // A process each.
            let chosen: Vec<usize> = match all() {
                true => (1..=count).collect(),
                false => (1..=7).map(|i| 1 + (i * i * count) / 50).collect(),
            };
            for n in chosen {
                let ended = with_fake(
                    "device_is_lost",
                    &[
                        ("XSERV_TRUST_MODEL", model),
                        ("XSERV_TRUST_N", &n.to_string()),
                        ("XSERV_TRUST_STATUS", &status.to_string()),
                    ],
                );
                let number = |word| -> u64 {
                    ended.said(word).next().map_or(0, |said| said.parse().unwrap())
                };
                runs += 1;
                came += number("came");
                told += number("told");
                answer = answer.max(number("answer_us"));
                free = free.max(number("free_us"));
                let caught =
                    std::panic::catch_unwind(|| ended.check(&format!("{model} {status} {n}")));
                if let Err(panic) = caught {
                    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                    failed.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                }
            }
        }
    }
    println!(
        "{runs} runs, {came} faults came, {told} were told; slowest answer {answer} us, slowest free {free} us"
    );
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(came > 0 && told > 0);
    with_fake("device_is_lost_mid_run", &[]).check("a device lost mid-run");
}

#[test]
fn devices_that_never_answer_hold_up_nobody_else() {
    if can_fake() {
        let ended = with_fake("device_never_ready", &[]);
        ended.said("took").for_each(|said| println!("{said}"));
        ended.check("never ready");
    }
}

#[test]
fn forked_children_are_told_that_cuda_is_their_parents() {
    if !can_fake() {
        return;
    }
    for how in
        ["after a load", "after the host's own start", "before any start", "during the start"]
    {
        let slow = ("FAKE_CUDA_INIT_MS", if how == "during the start" { "500" } else { "0" });
        with_fake("forked_children", &[("XSERV_TRUST_HOW", how), slow]).check(how);
    }
}
