//! Bad input in a process of its own: what the tests of bad input share, here and in `tests/trust`.
//!
//! A test names a group of cases; the group runs in a child (this test binary, started again), case
//! by case. A case damages a copy of the repository's model, calls the library as a program would, on
//! a thread with little stack, and says what it expects. Measured for each: processor time of every
//! call, peak of resident memory. The test classifies: as expected, not as expected, killed by a
//! signal, hung; after a death the group goes on with the next case in a new child.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{json, Value};
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;

/// The bars for every hostile case.
pub const MAX_CPU_SECONDS: f64 = 2.0;
pub const MAX_EXTRA_BYTES: u64 = 256 << 20;
/// A child without a sign of life for this long counts as hung.
pub const HANG: Duration = Duration::from_secs(30);
/// A small stack, such as a host might give a thread that calls the library.
pub const SMALL_STACK_BYTES: usize = 128 << 10;
/// A prompt for the model whose continuation is compared.
pub const PROMPT: [u32; 4] = [10, 20, 30, 40];

const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// A temporary folder that goes with the value.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("xserv-hostile-{}-{next}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A copy of the model that a case may damage.
pub struct Copy(TempDir);

impl Copy {
    pub fn new() -> Copy {
        let copy = Copy(TempDir::new());
        for name in FILES {
            std::fs::copy(tiny().join(name), copy.file(name)).unwrap();
        }
        copy
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).unwrap()
    }

    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.file(name)).unwrap();
    }

    /// Puts a file in place of what was there.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let _ = std::fs::remove_file(self.file(name));
        std::fs::write(self.file(name), bytes).unwrap();
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(name);
        change(&mut value);
        self.write(name, value.to_string());
    }

    /// Returns the header of the weights, and what follows it.
    pub fn weights(&self) -> (Value, Vec<u8>) {
        let bytes = self.read("model.safetensors");
        let (length, rest) = bytes.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        (serde_json::from_slice(&rest[..length]).unwrap(), rest[length..].to_vec())
    }

    /// Weights of this header, as it is written here, and this data.
    pub fn write_weights(&self, header: impl AsRef<[u8]>, data: &[u8]) {
        let header = header.as_ref();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(data);
        self.write("model.safetensors", bytes);
    }

    pub fn edit_header(&self, change: impl FnOnce(&mut Value)) {
        let (mut header, data) = self.weights();
        change(&mut header);
        self.write_weights(header.to_string(), &data);
    }
}

/// The required outcome for a damaged folder.
pub enum Expect {
    /// xserv_load refuses with this status and these words.
    Refused(xserv_status, &'static str),
    /// xserv_load refuses, as damaged or as not supported.
    NotLoaded,
    /// Everything works, and the model gives the tokens of the undamaged one.
    Same,
    /// Everything works.
    Works,
    /// All but conversations works; those fail with this status and these words.
    NoChat(xserv_status, &'static str),
    /// Token ids work; text fails with these words.
    NoText(&'static str),
    /// Generating fails with these words; the rest works.
    NoGenerate(&'static str),
    /// Loads or not, works or not: only the bars and the form of errors count.
    Answers,
}

/// Processor time of this process, all threads.
pub fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns a field of /proc/self/status that is in kB, in bytes.
pub fn status_bytes(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Sets a soft limit of this process, and returns what it was.
pub fn limit(resource: libc::__rlimit_resource_t, soft: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    assert_eq!(unsafe { libc::getrlimit(resource, &mut limit) }, 0);
    let before = limit.rlim_cur;
    limit.rlim_cur = soft.min(limit.rlim_max);
    assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
    before
}

/// Runs `body` on a thread with a small stack and gives its result.
pub fn on_small_stack<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().stack_size(SMALL_STACK_BYTES);
        builder.spawn_scoped(scope, body).unwrap().join().unwrap()
    })
}

/// Checks that a failure looks as it should.
pub fn check_failure(failure: &Failure) -> Result<(), String> {
    let message = &failure.message;
    let bad = |why: &str| Err(format!("{why}: {:?} {message:?}", failure.status));
    if message.is_empty() || message.len() > 1000 {
        return bad(&format!("a message of {} bytes", message.len()));
    }
    if message.contains(char::is_control) {
        return bad("control characters in a message");
    }
    if failure.status == XSERV_STATUS_INTERNAL {
        return bad("an internal fault");
    }
    Ok(())
}

/// Fails with this status and these words?
pub fn expect_failure<T: std::fmt::Debug>(
    outcome: Outcome<T>,
    status: xserv_status,
    words: &str,
) -> Result<(), String> {
    let failure = match outcome {
        Ok(value) => return Err(format!("was accepted: {:.100}", format!("{value:?}"))),
        Err(failure) => failure,
    };
    check_failure(&failure)?;
    if failure.status != status || !failure.message.contains(words) {
        let Failure { status: got, message } = failure;
        return Err(format!("expected {status:?} with {words:?}, got {got:?}: {message}"));
    }
    Ok(())
}

/// Works, or fails in good form?
pub fn expect_answer<T>(outcome: Outcome<T>) -> Result<(), String> {
    match outcome {
        Ok(_) => Ok(()),
        Err(failure) => check_failure(&failure),
    }
}

/// The findings of xserv_inspect.
pub struct Inspected {
    pub supported: bool,
    pub reason: String,
    pub has_tokenizer: bool,
    pub has_chat_template: bool,
}

pub fn inspect(path: &Path) -> Outcome<Inspected> {
    let path = c_string(path.to_str().unwrap());
    let mut inspection = std::ptr::null_mut();
    check(unsafe { xserv_inspect(path.as_ptr(), &mut inspection) })?;
    let mut info: xserv_inspection_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_inspection_info>();
    check(unsafe { xserv_inspection_get_info(inspection, &mut info) })?;
    let text = |pointer| {
        let text = unsafe { std::ffi::CStr::from_ptr(pointer) };
        text.to_str().expect("UTF-8").to_string()
    };
    for problem in [info.tokenizer_problem, info.chat_template_problem, info.architecture] {
        let problem = text(problem);
        assert!(problem.len() <= 1000 && !problem.contains(char::is_control), "{problem:?}");
    }
    let found = Inspected {
        supported: info.supported == 1,
        reason: text(info.unsupported_reason),
        has_tokenizer: info.has_tokenizer == 1,
        has_chat_template: info.has_chat_template == 1,
    };
    xserv_inspection_free(inspection);
    Ok(found)
}

/// The processor time of the costliest call so far, and its name.
#[derive(Default)]
pub struct Meter {
    pub worst: f64,
    pub call: &'static str,
}

impl Meter {
    pub fn time<T>(&mut self, call: &'static str, body: impl FnOnce() -> T) -> T {
        let begin = cpu_seconds();
        let out = body();
        let seconds = cpu_seconds() - begin;
        if seconds > self.worst {
            (self.worst, self.call) = (seconds, call);
        }
        out
    }
}

pub const MESSAGES: &str = r#"[{"role": "user", "content": "Say hello."}]"#;
const TEXT: &str = "Once upon a time, <|im_end|>\u{65e5}\u{672c}\u{8a9e} \u{1f600} 1234\n";

/// The answers of a loaded folder.
struct Answers {
    has_tokenizer: bool,
    has_chat_template: bool,
    ids: Outcome<Vec<u32>>,
    tokens: Outcome<Vec<u32>>,
    text: Outcome<Output>,
    chat: Outcome<String>,
    others: Vec<Outcome<()>>,
}

fn ask(model: &Model, meter: &mut Meter) -> Answers {
    let info = model.info();
    let text_request =
        xserv_request { prompt: c"Once upon a time".as_ptr(), max_tokens: 3, seed: 1, ..request() };
    let ids = meter.time("generate", || model.generate(&greedy(&PROMPT, 3)));
    let tokens = meter.time("tokenize", || model.tokenize(TEXT));
    let text = meter.time("generate from text", || model.generate(&text_request));
    let chat = meter.time("chat", || model.apply_chat_template(MESSAGES, None, None, true));
    let all: Vec<u32> = (0..info.vocab_size.min(5000)).collect();
    let others = vec![
        meter.time("detokenize", || model.detokenize(&all, false)).map(drop),
        meter.time("stream", || model.stream_chunks(&all, true)).map(drop),
        meter.time("logits", || model.logits(&PROMPT, false)).map(drop),
    ];
    Answers {
        has_tokenizer: info.has_tokenizer == 1,
        has_chat_template: info.has_chat_template == 1,
        ids: ids.map(|output| output.ids),
        tokens,
        text,
        chat,
        others,
    }
}

fn all_fine<T>(outcome: Outcome<T>, call: &str) -> Result<T, String> {
    outcome.map_err(|f| format!("{call}: {:?}: {}", f.status, f.message))
}

/// Whether an expression of a tokenizer was tried against the clock: one that is near the limit may fall on
/// either side.
fn is_close(failure: &Failure) -> bool {
    failure.message.contains("regular expressions take more than")
}

/// Asserts that a plan refuses what a load refuses, in the same words, and nothing else.
fn compare_with_plan(
    planned: &Outcome<xserv_memory_plan>,
    loaded: &Outcome<Model>,
) -> Result<(), String> {
    let told = |failure: &Failure| format!("{:?}: {}", failure.status, failure.message);
    match (planned, loaded) {
        (Ok(plan), Ok(model)) if plan.has_tokenizer == model.info().has_tokenizer => Ok(()),
        (Ok(_), Ok(_)) => Err("plan and model differ about the tokenizer".to_string()),
        (Err(failure), _) | (_, Err(failure)) if is_close(failure) => Ok(()),
        (_, Err(failure)) if failure.status == XSERV_STATUS_OUT_OF_MEMORY => Ok(()),
        (Ok(_), Err(failure)) => Err(format!("is planned, load says: {}", told(failure))),
        (Err(failure), Ok(_)) => Err(format!("loads, but the plan says: {}", told(failure))),
        (Err(plan), Err(load)) if told(plan) == told(load) => Ok(()),
        (Err(plan), Err(load)) => {
            Err(format!("the plan says {}, load says: {}", told(plan), told(load)))
        }
    }
}

/// Inspects, plans, loads and uses a folder, and compares with what is expected of it.
fn exercise(
    path: &Path,
    options: &xserv_load_options,
    expect: &Expect,
    reference: &[u32],
    meter: &mut Meter,
) -> Result<String, String> {
    let inspected = meter.time("inspect", || inspect(path));
    let planned = meter.time("plan", || plan(path, options));
    let loaded = meter.time("load", || Model::load(path, options));
    compare_with_plan(&planned, &loaded)?;
    if let (Ok(found), Ok(_)) = (&inspected, &loaded) {
        if !found.supported || !found.reason.is_empty() {
            return Err(format!("loads, but the inspection says {:?}", found.reason));
        }
    }
    if let (Ok(found), Err(failure)) = (&inspected, &loaded) {
        if found.supported && failure.status != XSERV_STATUS_OUT_OF_MEMORY && !is_close(failure) {
            return Err(format!("the inspection found nothing, load says: {}", failure.message));
        }
        if found.reason.len() > 1000 || found.reason.contains(char::is_control) {
            return Err(format!("a reason that is no sentence: {:?}", found.reason));
        }
    }
    if let Err(failure) = &inspected {
        check_failure(failure)?;
    }
    let model = match (loaded, expect) {
        (Ok(model), Expect::Refused(..) | Expect::NotLoaded) => {
            drop(model);
            return Err("was accepted".to_string());
        }
        (Ok(model), _) => model,
        (Err(failure), expect) => {
            let said = format!("{:?}: {}", failure.status, failure.message);
            match expect {
                Expect::Refused(status, words) => {
                    expect_failure::<()>(Err(failure), *status, words)?
                }
                Expect::Answers => check_failure(&failure)?,
                Expect::NotLoaded => {
                    check_failure(&failure)?;
                    let about_files = [XSERV_STATUS_INVALID_FILE, XSERV_STATUS_UNSUPPORTED];
                    if !about_files.contains(&failure.status) {
                        return Err(format!("was refused as something else: {said}"));
                    }
                }
                _ => return Err(format!("was refused: {said}")),
            }
            return Ok(said);
        }
    };
    let answers = ask(&model, meter);
    if let Ok(found) = &inspected {
        if found.has_tokenizer != answers.has_tokenizer
            || found.has_chat_template != answers.has_chat_template
        {
            return Err("inspection and model differ about tokenizer or template".to_string());
        }
    }
    match expect {
        Expect::Same | Expect::Works => {
            let ids = all_fine(answers.ids, "generate")?;
            if matches!(expect, Expect::Same) && ids != reference {
                return Err(format!("generates {ids:?}, not {reference:?}"));
            }
            all_fine(answers.tokens, "tokenize")?;
            all_fine(answers.text, "generate from text")?;
            all_fine(answers.chat, "chat")?;
            answers.others.into_iter().try_for_each(|o| all_fine(o, "another call"))?;
        }
        Expect::NoChat(status, words) => {
            if all_fine(answers.ids, "generate")? != reference {
                return Err("generates something else".to_string());
            }
            all_fine(answers.text, "generate from text")?;
            let said = answers.chat.as_ref().err().map(|f| f.message.clone());
            expect_failure(answers.chat, *status, words)?;
            return Ok(said.unwrap_or_default());
        }
        Expect::NoText(words) => {
            if all_fine(answers.ids, "generate")? != reference {
                return Err("generates something else".to_string());
            }
            expect_failure(answers.tokens, XSERV_STATUS_UNSUPPORTED, words)?;
            expect_failure(answers.text, XSERV_STATUS_UNSUPPORTED, words)?;
        }
        Expect::NoGenerate(words) => {
            for outcome in [answers.ids.map(drop), answers.text.map(drop)] {
                expect_failure(outcome, XSERV_STATUS_INVALID_FILE, words)?;
            }
            all_fine(answers.tokens, "tokenize")?;
        }
        Expect::Answers | Expect::Refused(..) | Expect::NotLoaded => {
            for outcome in [
                answers.ids.map(drop),
                answers.tokens.map(drop),
                answers.text.map(drop),
                answers.chat.map(drop),
            ] {
                expect_answer(outcome)?;
            }
            answers.others.into_iter().try_for_each(expect_answer)?;
        }
    }
    Ok("loads".to_string())
}

/// A group of cases: its name, and what runs them.
pub type Group = (&'static str, fn(&mut Bench));

/// A group of cases in the child.
pub struct Bench {
    report: File,
    skip: usize,
    next: usize,
    /// The tokens that the undamaged model generates from [`PROMPT`].
    pub reference: Vec<u32>,
    peaks_can_be_reset: bool,
}

impl Bench {
    fn write(&mut self, line: Value) {
        writeln!(self.report, "{line}").unwrap();
    }

    /// One case: `body` calls the library and returns what it saw, or what was wrong.
    pub fn case(
        &mut self,
        name: impl Into<String>,
        body: impl FnOnce(&mut Meter) -> Result<String, String> + Send,
    ) {
        self.case_with(name, MAX_CPU_SECONDS, body);
    }

    /// Returns a case with a bar of its own for the time: valid input that is merely large.
    pub fn case_with(
        &mut self,
        name: impl Into<String>,
        max_seconds: f64,
        body: impl FnOnce(&mut Meter) -> Result<String, String> + Send,
    ) {
        self.next += 1;
        if self.next <= self.skip {
            return;
        }
        let name = name.into();
        self.write(json!({ "begin": name }));
        // Memory that earlier cases left in the allocator would hide what this one takes.
        unsafe { libc::malloc_trim(0) };
        self.peaks_can_be_reset = std::fs::write("/proc/self/clear_refs", "5").is_ok();
        let before = if self.peaks_can_be_reset { status_bytes("VmRSS") } else { 0 };
        let mut meter = Meter::default();
        let outcome = on_small_stack(|| body(&mut meter));
        let extra = status_bytes("VmHWM").saturating_sub(before);
        let wrong = match &outcome {
            Err(why) => Some(why.clone()),
            Ok(_) if meter.worst > max_seconds => {
                Some(format!("{:.2} s of processor time in {}", meter.worst, meter.call))
            }
            Ok(_) if extra > MAX_EXTRA_BYTES => Some(format!("{} MiB more", extra >> 20)),
            Ok(_) => None,
        };
        self.write(json!({
            "end": name, "wrong": wrong, "said": outcome.unwrap_or_default(),
            "seconds": meter.worst, "call": meter.call, "bytes": extra,
        }));
    }

    /// A damaged copy of the model: inspected, loaded and used.
    pub fn folder(
        &mut self,
        name: impl Into<String>,
        expect: Expect,
        damage: impl FnOnce(&Copy) + Send,
    ) {
        let reference = self.reference.clone();
        self.case(name, |meter| {
            let copy = Copy::new();
            // The damage itself may need the stack that a test has.
            std::thread::scope(|scope| {
                scope.spawn(|| damage(&copy)).join().unwrap();
            });
            let options = xserv_load_options { num_threads: 2, ..load_options() };
            exercise(copy.path(), &options, &expect, &reference, meter)
        });
    }
}

/// Returns the groups, by name.
fn group(name: &str) -> fn(&mut Bench) {
    let found = crate::GROUPS.iter().copied().flatten().find(|(group, _)| *group == name);
    found.unwrap_or_else(|| panic!("no group {name}")).1
}

#[test]
#[ignore = "run by the tests of bad input, as a child process"]
fn child() {
    let Ok(name) = std::env::var("XSERV_HOSTILE_GROUP") else { return };
    let folder = PathBuf::from(std::env::var("XSERV_HOSTILE_FOLDER").unwrap());
    let skip = std::env::var("XSERV_HOSTILE_SKIP").unwrap().parse().unwrap();
    let report = File::options().append(true).open(folder.join("report")).unwrap();
    // From here on these two files must stay empty.
    for (number, file) in [(1, "stdout"), (2, "stderr")] {
        let file = File::create(folder.join(file)).unwrap();
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    }
    let of_undamaged = || {
        let model = Model::open(&tiny());
        model.generate(&greedy(&PROMPT, 3)).unwrap().ids
    };
    let cold = std::env::var_os("XSERV_HOSTILE_COLD").is_some();
    let reference = if cold { Vec::new() } else { of_undamaged() };
    let mut bench = Bench { report, skip, next: 0, reference, peaks_can_be_reset: false };
    group(&name)(&mut bench);
    bench.write(json!({ "begin": "the undamaged model afterwards" }));
    let afterwards = of_undamaged();
    assert!(cold || afterwards == bench.reference, "{afterwards:?}");
    assert_eq!(afterwards.len(), 3);
    bench.write(json!({ "done": bench.next }));
    // Without the test harness's own last words.
    unsafe { libc::_exit(0) };
}

/// The end of a child that failed.
struct Died {
    how: String,
    lines: Vec<Value>,
    printed: String,
}

/// Waits for the end of a process that writes to `report`; ends it, and returns `None`, when it has
/// written nothing for [`HANG`].
pub fn wait_while_it_writes(child: &mut Child, report: &Path) -> Option<ExitStatus> {
    let (mut seen, mut since) = (0, Instant::now());
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        let length = std::fs::metadata(report).unwrap().len();
        if length != seen {
            (seen, since) = (length, Instant::now());
        }
        if since.elapsed() > HANG {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn run_child(name: &str, skip: usize, environment: &[(&str, &str)]) -> Result<Vec<Value>, Died> {
    let folder = TempDir::new();
    let report = folder.path().join("report");
    File::create(&report).unwrap();
    let program = std::env::current_exe().unwrap();
    let trace = environment.iter().find(|(name, _)| *name == "XSERV_HOSTILE_TRACE");
    let mut command = match trace {
        None => Command::new(program),
        Some((_, file)) => {
            let mut strace = Command::new("strace");
            strace.args(["-f", "-qq", "-e", "trace=%file,%network", "-o", file]).arg(program);
            strace
        }
    };
    let mut child = command
        .args(["--exact", "hostile_child::child", "--ignored", "--nocapture", "--test-threads=1"])
        .env("XSERV_HOSTILE_GROUP", name)
        .env("XSERV_HOSTILE_FOLDER", folder.path())
        .env("XSERV_HOSTILE_SKIP", skip.to_string())
        // The host's wish for backtraces must not make errors slow or loud.
        .env("RUST_BACKTRACE", "1")
        .envs(environment.iter().copied())
        .env("TMPDIR", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let status = wait_while_it_writes(&mut child, &report);
    let text = std::fs::read_to_string(&report).unwrap();
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let read = |file| std::fs::read_to_string(folder.path().join(file)).unwrap_or_default();
    let printed = read("stdout") + &read("stderr");
    let how = match status {
        None => format!("hung for {} s", HANG.as_secs()),
        Some(status) if status.signal().is_some() => {
            format!("was killed by signal {}", status.signal().unwrap())
        }
        Some(status) if !status.success() => format!("ended with {status}"),
        Some(_) if !printed.is_empty() => "printed".to_string(),
        Some(_) => return Ok(lines),
    };
    Err(Died { how, lines, printed })
}

/// Returns the number of cases of a group, none of which is run.
#[allow(dead_code)]
pub fn count_cases(name: &str) -> usize {
    let lines = match run_child(name, usize::MAX, &[]) {
        Ok(lines) => lines,
        Err(died) => panic!("{name}: counting {}: {}", died.how, died.printed),
    };
    let done = lines.iter().find_map(|line| line["done"].as_u64());
    done.unwrap_or_else(|| panic!("{name} was not counted")) as usize
}

/// Runs a group in children; fails with all that was not as expected.
pub fn run_group(name: &str) {
    run_group_with(name, &[]);
}

pub fn run_group_with(name: &str, environment: &[(&str, &str)]) {
    let verbose = std::env::var("XSERV_HOSTILE_VERBOSE").is_ok();
    let mut wrong = Vec::new();
    let (mut cases, mut slowest, mut largest) = (0, (0.0, String::new()), (0, String::new()));
    let mut skip = 0;
    loop {
        let outcome = run_child(name, skip, environment);
        let (lines, died) = match outcome {
            Ok(lines) => (lines, None),
            Err(died) => (died.lines, Some((died.how, died.printed))),
        };
        let mut begun = String::new();
        let mut ended = 0;
        for line in &lines {
            if let Some(name) = line["begin"].as_str() {
                begun = name.to_string();
            }
            let Some(name) = line["end"].as_str() else { continue };
            ended += 1;
            let (seconds, bytes) =
                (line["seconds"].as_f64().unwrap(), line["bytes"].as_u64().unwrap());
            if let Some(why) = line["wrong"].as_str() {
                wrong.push(format!("{name}: {why}"));
            }
            if verbose {
                println!(
                    "  {name}: {:.0} ms in {}, {} MiB: {}",
                    seconds * 1e3,
                    line["call"].as_str().unwrap(),
                    bytes >> 20,
                    line["said"].as_str().unwrap()
                );
            }
            if seconds > slowest.0 {
                slowest = (seconds, name.to_string());
            }
            if bytes > largest.0 {
                largest = (bytes, name.to_string());
            }
        }
        cases += ended;
        let Some((how, printed)) = died else { break };
        wrong.push(format!("{begun}: the process {how}; it wrote {printed:.1000?}"));
        // On with the case after the one that ended it, unless nothing was left.
        skip += ended + 1;
        let no_case = lines.last().is_none_or(|line| !line["begin"].is_string());
        if wrong.len() > 40 || no_case || begun == "the undamaged model afterwards" {
            break;
        }
    }
    println!(
        "{name}: {cases} cases; slowest {:.2} s ({}); largest {} MiB ({})",
        slowest.0,
        slowest.1,
        largest.0 >> 20,
        largest.1
    );
    assert!(cases > 0, "{name}: no case ended: {}", wrong.join("\n"));
    assert!(wrong.is_empty(), "{} of {name}:\n{}", wrong.len(), wrong.join("\n"));
}
