//! Reading a model where files fail: each call that opens, reads, maps or asks about a file of the folder
//! fails in turn (fail_reads.c, preloaded), or the file changes just before it.

use std::ffi::{c_char, c_int, c_long, CStr, CString, OsStr};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use serde_json::{json, Value};
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::files::{safetensors_bytes, Store, TempDir, TestModel};
use crate::subprocess::{compile, is_child, run, sampled, say};

/// The classes of fail_reads.c.
const OPEN: c_int = 1;
const READ: c_int = 2;
const ALL: c_int = 31;

/// The ways to fail: the classes of calls that can, the errno (-1: reads little), and what a call of the
/// library must say.
const KINDS: [(&str, c_int, c_int, Option<xserv_status>); 5] = [
    ("EIO", ALL, libc::EIO, Some(XSERV_STATUS_IO)),
    ("ENOMEM", ALL, libc::ENOMEM, Some(XSERV_STATUS_OUT_OF_MEMORY)),
    ("EMFILE", OPEN, libc::EMFILE, Some(XSERV_STATUS_IO)),
    ("EINTR", OPEN | READ, libc::EINTR, None),
    ("a short read", READ, -1, None),
];

type Begin =
    unsafe extern "C" fn(*const c_char, c_int, c_long, c_int, Option<unsafe extern "C" fn()>);

/// The controls of the preloaded library.
struct Shim {
    begin: Begin,
    end: unsafe extern "C" fn() -> c_long,
    failed: unsafe extern "C" fn() -> *const c_char,
    folder: CString,
}

impl Shim {
    fn new(folder: &Path) -> Shim {
        fn find<T: Copy>(name: &CStr) -> T {
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}: nothing was preloaded");
            assert_eq!(size_of::<T>(), size_of_val(&found));
            unsafe { std::mem::transmute_copy(&found) }
        }
        Shim {
            begin: find(c"fail_reads_begin"),
            end: find(c"fail_reads_end"),
            failed: find(c"fail_reads_failed"),
            folder: c_string(folder.to_str().unwrap()),
        }
    }

    /// Runs `body` while call `n` of the classes fails; returns the number of such calls too.
    fn with<T>(
        &self,
        classes: c_int,
        n: usize,
        error: c_int,
        body: impl FnOnce() -> T,
    ) -> (T, usize) {
        unsafe { (self.begin)(self.folder.as_ptr(), classes, n as c_long, error, None) };
        let out = body();
        (out, unsafe { (self.end)() } as usize)
    }

    /// Runs `body`, and `meddle` just before the call `n` of the classes.
    fn meddling<T>(&self, n: usize, meddle: unsafe extern "C" fn(), body: impl FnOnce() -> T) -> T {
        unsafe { (self.begin)(self.folder.as_ptr(), ALL, n as c_long, 0, Some(meddle)) };
        let out = body();
        unsafe { (self.end)() };
        out
    }

    fn failed(&self) -> String {
        unsafe { CStr::from_ptr((self.failed)()) }.to_string_lossy().into_owned()
    }
}

/// Returns a folder of a model in three files.
fn write_sharded(model: &TestModel) -> TempDir {
    let folder = TempDir::new();
    folder.write("config.json", model.config.to_string());
    let each = model.tensors.len().div_ceil(3);
    let mut places = serde_json::Map::new();
    for (index, tensors) in model.tensors.chunks(each).enumerate() {
        let name = format!("model-{:05}-of-00003.safetensors", index + 1);
        folder.write(&name, safetensors_bytes(tensors, Store::F32));
        for tensor in tensors {
            places.insert(tensor.name.clone(), Value::String(name.clone()));
        }
    }
    folder.write("model.safetensors.index.json", json!({ "weight_map": places }).to_string());
    folder
}

/// Returns a copy of the repository's model.
fn copy_tiny() -> TempDir {
    let folder = TempDir::new();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let entry = entry.unwrap();
        folder.write(entry.file_name().to_str().unwrap(), std::fs::read(entry.path()).unwrap());
    }
    folder
}

/// The answers of a folder: everything that a failure could have changed.
#[derive(Debug, PartialEq)]
struct Answers {
    ids: Vec<u32>,
    chat: Option<String>,
    tokens: Option<Vec<u32>>,
    eos: u32,
}

fn load(path: &Path, map_files: bool) -> Outcome<Answers> {
    let options = xserv_load_options {
        num_threads: 2,
        max_context_tokens: 64,
        map_files: u8::from(map_files),
        ..load_options()
    };
    let model = Model::load(path, &options)?;
    let messages = r#"[{"role": "user", "content": "Say hello."}]"#;
    Ok(Answers {
        ids: model.generate(&greedy(&[10, 20, 30, 40], 4))?.ids,
        chat: model.apply_chat_template(messages, None, None, true).ok(),
        tokens: model.tokenize("Once upon a time").ok(),
        eos: model.info().num_eos_token_ids,
    })
}

/// Returns the reports of xserv_inspect or xserv_plan, as text.
fn inspect(path: &Path) -> Outcome<String> {
    let path = c_string(path.to_str().unwrap());
    let mut inspection = std::ptr::null_mut();
    check(unsafe { xserv_inspect(path.as_ptr(), &mut inspection) })?;
    let mut info: xserv_inspection_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_inspection_info>();
    check(unsafe { xserv_inspection_get_info(inspection, &mut info) })?;
    let text = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    let told =
        [info.unsupported_reason, info.tokenizer_problem, info.chat_template_problem].map(text);
    let told = format!(
        "{} {} {} {} {told:?}",
        info.supported, info.has_tokenizer, info.has_chat_template, info.num_parameters
    );
    xserv_inspection_free(inspection);
    Ok(told)
}

fn plan(path: &Path) -> Outcome<String> {
    let path = c_string(path.to_str().unwrap());
    let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
    plan.struct_size = size_of::<xserv_memory_plan>();
    let options = xserv_load_options { num_threads: 2, max_context_tokens: 64, ..load_options() };
    check(unsafe { xserv_plan(path.as_ptr(), &options, &mut plan) })?;
    Ok(format!("{} {} {}", plan.weights_bytes, plan.workspace_bytes, plan.has_tokenizer))
}

fn call(function: &str, path: &Path) -> Outcome<String> {
    match function {
        "load" => load(path, false).map(|answers| format!("{answers:?}")),
        "load mapped" => load(path, true).map(|answers| format!("{answers:?}")),
        "inspect" => inspect(path),
        "plan" => plan(path),
        other => panic!("{other}"),
    }
}

fn wrong(what: impl std::fmt::Display) {
    say("wrong", what);
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap()
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn calls_fail() {
    if !is_child() {
        return;
    }
    let folder = match variable("XSERV_TRUST_MODEL").as_str() {
        "tiny" => copy_tiny(),
        "sharded" => write_sharded(&TestModel::qwen3(5)),
        other => panic!("{other}"),
    };
    let function = variable("XSERV_TRUST_FUNCTION");
    let path = folder.path().canonicalize().unwrap();
    let shim = Shim::new(&path);
    let expected = call(&function, &path).unwrap();
    let mut faults = 0;
    for (kind, classes, error, status) in KINDS {
        let (_, count) = shim.with(classes, 0, error, || call(&function, &path));
        say("count", format!("{function}: {count} calls can fail with {kind}"));
        for n in sampled(count, 24) {
            say("case", format!("{function}: {kind} at {n}"));
            let (outcome, counted) = shim.with(classes, n, error, || call(&function, &path));
            let what = format!("{function}: {kind} in {}", shim.failed());
            faults += usize::from(counted >= n);
            match (&outcome, status) {
                (Ok(told), None) if *told == expected => {}
                (Err(failure), Some(status)) if failure.status == status => {}
                (Ok(told), None) => wrong(format!("{what}: {told}, not {expected}")),
                (Ok(_), Some(_)) => wrong(format!("{what}: works")),
                (Err(Failure { status, message }), _) => {
                    wrong(format!("{what}: {status:?}: {message}"))
                }
            }
            match call(&function, &path) {
                Ok(told) if told == expected => {}
                Ok(told) => wrong(format!("after {what}: {told}, not {expected}")),
                Err(failure) => wrong(format!("after {what}: {}", failure.message)),
            }
        }
    }
    say("faults", faults);
    say("done", "");
}

/// The change to a file during a load.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    /// It loses its end.
    Cut,
    /// Its bytes are overwritten by those of another model of the same shape.
    Overwritten,
    /// The file of another model takes its name.
    Replaced,
}

struct Meddling {
    change: Change,
    path: PathBuf,
    len: u64,
    other: Vec<u8>,
}

static MEDDLING: Mutex<Option<Meddling>> = Mutex::new(None);

unsafe extern "C" fn meddle() {
    let Some(Meddling { change, path, len, other }) = &*MEDDLING.lock().unwrap() else { return };
    match change {
        Change::Cut => File::options().write(true).open(path).unwrap().set_len(*len).unwrap(),
        Change::Overwritten => {
            File::options().write(true).open(path).unwrap().write_all(other).unwrap();
        }
        Change::Replaced => {
            let new = path.with_extension("new");
            std::fs::write(&new, other).unwrap();
            std::fs::rename(new, path).unwrap();
        }
    }
}

/// Returns the bits of the logits of some tokens: other weights give others.
fn logits(path: &Path, map_files: bool) -> Outcome<Vec<u32>> {
    let options = xserv_load_options {
        num_threads: 2,
        max_context_tokens: 64,
        map_files: u8::from(map_files),
        ..load_options()
    };
    let model = Model::load(path, &options)?;
    Ok(model.logits(&[1, 2, 3, 4], true)?.into_iter().map(f32::to_bits).collect())
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn files_change() {
    if !is_child() {
        return;
    }
    let is_sharded = variable("XSERV_TRUST_MODEL") == "sharded";
    let models = [TestModel::qwen3(5), TestModel::qwen3(6)];
    let folders = models.map(|model| match is_sharded {
        true => write_sharded(&model),
        false => model.write(Store::F32),
    });
    let old = logits(folders[0].path(), false).unwrap();
    let path = folders[0].path().canonicalize().unwrap();
    let shim = Shim::new(&path);
    let names: &[&str] = match is_sharded {
        true => &["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
        false => &["model.safetensors"],
    };
    let (_, count) = shim.with(ALL, 0, 0, || logits(&path, false));
    let (mut refused, mut as_old, mut as_new) = (0, 0, 0);
    for name in names {
        let [own, other] =
            [&path, folders[1].path()].map(|folder| std::fs::read(folder.join(name)).unwrap());
        assert_eq!(own.len(), other.len());
        let file = path.join(name);
        std::fs::write(&file, &other).unwrap();
        let new = logits(&path, false).unwrap();
        assert_ne!(old, new);
        for change in [Change::Cut, Change::Overwritten, Change::Replaced] {
            for n in sampled(count, 100) {
                let what = format!("{name}: {change:?} before call {n} of {count}");
                say("case", &what);
                let _ = std::fs::remove_file(&file);
                std::fs::write(&file, &own).unwrap();
                // A change within a tick of the file system's clock could not be seen.
                let past = SystemTime::now() - Duration::from_secs(100);
                File::options().write(true).open(&file).unwrap().set_modified(past).unwrap();
                let len = (own.len() * n / (count + 1)) as u64;
                let meddling = Meddling { change, path: file.clone(), len, other: other.clone() };
                *MEDDLING.lock().unwrap() = Some(meddling);
                match shim.meddling(n, meddle, || logits(&path, false)) {
                    Ok(bits) if bits == old => as_old += 1,
                    Ok(bits) if bits == new && change != Change::Cut => as_new += 1,
                    Ok(_) => wrong(format!("{what}: garbage")),
                    Err(Failure {
                        status: XSERV_STATUS_IO | XSERV_STATUS_INVALID_FILE, ..
                    }) => {
                        refused += 1;
                    }
                    Err(Failure { status, message }) => {
                        wrong(format!("{what}: {status:?}: {message}"));
                    }
                }
            }
        }
        std::fs::write(&file, &own).unwrap();
        if logits(&path, false).ok().as_ref() != Some(&old) {
            wrong("the load after all is not right");
        }
    }
    say(
        "count",
        format!("{refused} refused, {as_old} with the old weights, {as_new} with the new"),
    );
    say("done", "");
}

fn preloaded(name: &str, environment: &[(&str, &str)]) {
    let folder = TempDir::new();
    let library = compile("fail_reads.c", &folder.path().join("fail_reads.so"), &["-ldl"]);
    let mut variables: Vec<(&str, &OsStr)> = vec![("LD_PRELOAD", library.as_os_str())];
    variables.extend(environment.iter().map(|(name, value)| (*name, OsStr::new(*value))));
    let ended = run(&format!("reads::{name}"), &variables);
    let what = environment.iter().map(|(_, value)| *value).collect::<Vec<_>>().join(", ");
    for word in ["count", "faults"] {
        ended.said(word).for_each(|said| println!("{what}: {word}: {said}"));
    }
    ended.check(&what);
}

#[test]
fn failing_calls_are_told_as_what_they_are() {
    for model in ["tiny", "sharded"] {
        for function in ["load", "load mapped", "inspect", "plan"] {
            preloaded(
                "calls_fail",
                &[("XSERV_TRUST_MODEL", model), ("XSERV_TRUST_FUNCTION", function)],
            );
        }
    }
}

#[test]
fn files_that_change_give_no_garbage() {
    for model in ["whole", "sharded"] {
        preloaded("files_change", &[("XSERV_TRUST_MODEL", model)]);
    }
}
