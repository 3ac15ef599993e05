//! The process around the library: little memory, no descriptors, closed standard files, forks; and
//! what the library must leave as it found it.

use std::collections::BTreeMap;
use std::ffi::{c_void, CStr};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("little memory", little_memory),
    ("no descriptors", no_descriptors),
    ("closed standard files", closed_standard_files),
    ("nothing is changed", nothing_is_changed),
    ("system calls", system_calls),
];

/// The number of runs of [`little_memory_is_an_error`].
pub const NUM_STEPS: usize = 48;

#[test]
fn little_memory_is_an_error() {
    for template in ["no", "yes"] {
        for step in 0..NUM_STEPS / 2 {
            let environment = [
                ("XSERV_HOSTILE_STEP", step.to_string()),
                ("XSERV_HOSTILE_TEMPLATE", template.to_string()),
                // Nothing is loaded before: memory that the allocator kept would be room.
                ("XSERV_HOSTILE_COLD", "1".to_string()),
                // An arena of the thread's own would be 64 MiB of room that counts as taken.
                ("MALLOC_ARENA_MAX", "1".to_string()),
            ];
            let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
            run_group_with("little memory", &environment);
        }
    }
}

#[test]
fn without_descriptors_loading_is_an_error() {
    run_group("no descriptors");
    run_group("closed standard files");
}

#[test]
fn the_process_is_left_as_it_was() {
    run_group("nothing is changed");
}

/// Needs strace; without it `files that are opened` looks at the descriptors alone.
#[test]
fn no_socket_and_no_file_for_writing() {
    let folder = TempDir::new();
    let trace = folder.path().join("trace");
    let traced = std::process::Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=%file,%network,open,openat", "-o"])
        .args([trace.to_str().unwrap(), "true"])
        .status();
    if !traced.is_ok_and(|status| status.success()) {
        eprintln!("skipped: strace is not there, or may not trace");
        return;
    }
    run_group_with("system calls", &[("XSERV_HOSTILE_TRACE", trace.to_str().unwrap())]);
    let text = std::fs::read_to_string(&trace).unwrap();
    let begin = text.find("xserv-trace-begin").expect("the mark");
    let end = text.find("xserv-trace-end").expect("the mark");
    let mut opened = 0;
    for line in text[begin..end].lines().skip(1) {
        let reads = line.contains("O_RDONLY") && !line.contains("O_CREAT");
        let looks = ["stat", "readlink", "access", "resumed", "getcwd", "exited"];
        opened += usize::from(reads);
        assert!(
            reads || looks.iter().any(|call| line.contains(call)) || line.contains("xserv-trace"),
            "neither looks nor reads: {line}"
        );
    }
    assert!(opened > 6, "only {opened} files were opened:\n{text}");
}

/// Address space for the process as it is and about 2^(step / 2) times 128 KiB more. Without a chat
/// template, whose thread asks for 256 MiB of it, the rest of the load is reached.
fn little_memory(bench: &mut Bench) {
    // Not set where the cases are counted only.
    let step = std::env::var("XSERV_HOSTILE_STEP").unwrap_or_default();
    let step: u32 = step.parse().unwrap_or_default();
    let mut room = (128u64 << 10) << (step / 2);
    if step % 2 == 1 {
        room += room / 2;
    }
    bench.case(format!("{} KiB of address space", room >> 10), move |_| {
        let copy = Copy::new();
        if std::env::var("XSERV_HOSTILE_TEMPLATE").unwrap() == "no" {
            copy.remove("chat_template.jinja");
        }
        let path = c_string(copy.path().to_str().unwrap());
        unsafe { libc::malloc_trim(0) };
        let options = xserv_load_options { num_threads: 2, kv_cache_tokens: 256, ..load_options() };
        let mut model = std::ptr::null_mut();
        let before = limit(libc::RLIMIT_AS, status_bytes("VmSize") + room);
        let status = unsafe { xserv_load(path.as_ptr(), &options, &mut model) };
        let mut later = Vec::new();
        if status == XSERV_STATUS_OK {
            let model = Model(model);
            later.push(model.generate(&greedy(&PROMPT, 3)).map(drop));
            later.push(model.tokenize(&"many words ".repeat(1000)).map(drop));
            later.push(model.logits(&PROMPT, true).map(drop));
            let chat = model.apply_chat_template(MESSAGES, None, None, true).map(drop);
            if model.info().has_chat_template == 1 {
                later.push(chat);
            }
        }
        limit(libc::RLIMIT_AS, before);
        if status != XSERV_STATUS_OK {
            expect_failure(check(status), XSERV_STATUS_OUT_OF_MEMORY, "")?;
            return Ok(last_error());
        }
        let mut said = "loads".to_string();
        for outcome in later {
            if let Err(failure) = outcome {
                said = failure.message.clone();
                expect_failure::<()>(Err(failure), XSERV_STATUS_OUT_OF_MEMORY, "")?;
            }
        }
        Ok(said)
    });
}

/// Opens files until the limit is reached, and gives them.
fn all_descriptors() -> Vec<std::fs::File> {
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    files
}

fn no_descriptors(bench: &mut Bench) {
    for left in 0..4 {
        bench.case(format!("{left} descriptors"), move |_| {
            let model = Model::open(&tiny());
            let before = limit(libc::RLIMIT_NOFILE, 64);
            let mut files = all_descriptors();
            files.truncate(files.len() - left);
            let loaded = Model::load(&tiny(), &load_options());
            let inspected = inspect(&tiny());
            // A loaded model needs none.
            let generated = model.generate(&greedy(&PROMPT, 3));
            let chat = model.apply_chat_template(MESSAGES, None, None, true);
            drop(files);
            limit(libc::RLIMIT_NOFILE, before);
            generated.map_err(|f| f.message)?;
            chat.map_err(|f| f.message)?;
            let said = format!("{:?}", loaded.as_ref().map(drop).map_err(|f| &f.message));
            if left == 0 {
                expect_failure(loaded.map(drop), XSERV_STATUS_IO, "")?;
            } else {
                expect_answer(loaded)?;
            }
            if let Ok(found) = inspected {
                if left == 0 && found.supported {
                    return Err("the inspection saw a good folder without reading".to_string());
                }
            }
            Ok(said)
        });
    }
}

fn closed_standard_files(bench: &mut Bench) {
    let reference = bench.reference.clone();
    bench.case("standard files closed", move |_| {
        let saved: Vec<i32> =
            (0..3).map(|n| unsafe { libc::fcntl(n, libc::F_DUPFD_CLOEXEC, 100) }).collect();
        (0..3).for_each(|n| assert_eq!(unsafe { libc::close(n) }, 0));
        let outcome = Model::load(&tiny(), &load_options()).and_then(|model| {
            model.apply_chat_template(MESSAGES, None, None, true)?;
            let output = model.generate(&greedy(&PROMPT, 3))?;
            // Errors are no reason to print either.
            let failure = model.generate(&greedy(&[u32::MAX], 3)).unwrap_err();
            assert_eq!(failure.status, XSERV_STATUS_INVALID_ARGUMENT);
            Ok(output.ids)
        });
        let open: Vec<i32> =
            (0..3).filter(|n| unsafe { libc::fcntl(*n, libc::F_GETFD) } != -1).collect();
        for (number, saved) in (0..3).zip(saved) {
            assert_eq!(unsafe { libc::dup2(saved, number) }, number);
            unsafe { libc::close(saved) };
        }
        match outcome {
            Ok(ids) if ids == reference && open.is_empty() => Ok(String::new()),
            other => Err(format!("{other:?}, open afterwards: {open:?}")),
        }
    });
}

#[cfg(target_arch = "x86_64")]
fn floating_point_modes() -> String {
    let (mut mxcsr, mut control) = (0u32, 0u16);
    // SAFETY: both instructions store into the variables that they are given.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack));
        std::arch::asm!("fnstcw [{}]", in(reg) &mut control, options(nostack));
    }
    // The lowest six bits of MXCSR are flags that any computation sets.
    format!("{:#x} {control:#x}", mxcsr & !0x3f)
}

#[cfg(not(target_arch = "x86_64"))]
fn floating_point_modes() -> String {
    String::new()
}

fn listing(folder: &str) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            // The descriptor of this very listing is gone again.
            let target = std::fs::read_link(&path).unwrap_or_default();
            let name = path.file_name().unwrap().to_str().unwrap().to_string();
            (!target.starts_with("/proc")).then(|| format!("{name} {}", target.display()))
        })
        .collect();
    names.sort();
    names
}

/// Returns the state of the process that a library must leave alone.
fn snapshot() -> BTreeMap<&'static str, String> {
    let mut environment: Vec<String> = Vec::new();
    extern "C" {
        static environ: *const *const libc::c_char;
    }
    let mut next = unsafe { environ };
    while !unsafe { *next }.is_null() {
        environment.push(format!("{:?}", unsafe { CStr::from_ptr(*next) }));
        next = unsafe { next.add(1) };
    }
    let locale = unsafe { libc::setlocale(libc::LC_ALL, std::ptr::null()) };
    let signals: Vec<String> = (1..65)
        .map(|signal| {
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
            format!("{:x}/{:x}", action.sa_sigaction, action.sa_flags)
        })
        .collect();
    let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &mut mask) };
    let masked: Vec<i32> =
        (1..65).filter(|s| unsafe { libc::sigismember(&mask, *s) } == 1).collect();
    let umask = unsafe { libc::umask(0o22) };
    unsafe { libc::umask(umask) };
    let limits: Vec<String> = (0..16)
        .map(|resource| {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            unsafe { libc::getrlimit(resource, &mut limit) };
            format!("{}/{}", limit.rlim_cur, limit.rlim_max)
        })
        .collect();
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut cores) };
    let cores: Vec<usize> = (0..1024).filter(|n| unsafe { libc::CPU_ISSET(*n, &cores) }).collect();
    let mut name = [0u8; 16];
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    BTreeMap::from([
        ("environment", format!("{environment:?}")),
        ("locale", format!("{:?}", unsafe { CStr::from_ptr(locale) })),
        ("signals", format!("{signals:?}")),
        ("signal mask", format!("{masked:?}")),
        ("working directory", format!("{:?}", std::env::current_dir())),
        ("umask", umask.to_string()),
        ("limits", format!("{limits:?}")),
        ("floating point", floating_point_modes()),
        ("descriptors", format!("{:?}", listing("/proc/self/fd"))),
        ("cores", format!("{cores:?}")),
        ("thread name", format!("{name:?}")),
        ("dumpable", unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }.to_string()),
    ])
}

fn differences(
    before: &BTreeMap<&'static str, String>,
    after: &BTreeMap<&'static str, String>,
) -> Result<(), String> {
    for (what, old) in before {
        if after[what] != *old {
            return Err(format!("{what} changed from {old} to {}", after[what]));
        }
    }
    Ok(())
}

fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Looks at every open file: none for writing, no socket, nothing outside the model's folder.
unsafe extern "C" fn look_at_files(_: f32, seen: *mut c_void) -> bool {
    let (before, wrong, opened) = unsafe { &mut *(seen as *mut (Vec<String>, Vec<String>, usize)) };
    for line in listing("/proc/self/fd") {
        if before.contains(&line) {
            continue;
        }
        let (number, target) = line.split_once(' ').unwrap();
        let info =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
        let flags = info.lines().find_map(|l| l.strip_prefix("flags:")).unwrap_or("0").trim();
        let flags = i32::from_str_radix(flags, 8).unwrap();
        *opened += 1;
        if flags & libc::O_ACCMODE != libc::O_RDONLY
            || flags & libc::O_CLOEXEC == 0
            || !target.contains("tiny-qwen3")
        {
            wrong.push(format!("{target} with {flags:o}"));
        }
    }
    true
}

fn nothing_is_changed(bench: &mut Bench) {
    let reference = bench.reference.clone();
    bench.case("load, use and free", move |_| {
        let threads = num_threads();
        let before = snapshot();
        for _ in 0..3 {
            let model =
                Model::load(&tiny(), &xserv_load_options { num_threads: 4, ..load_options() })
                    .map_err(|f| f.message)?;
            differences(&before, &snapshot())?;
            let mut inside = Ok(());
            let output = model
                .stream(&greedy(&PROMPT, 3), &mut |_| {
                    inside = inside.clone().and_then(|()| differences(&before, &snapshot()));
                    true
                })
                .map_err(|f| f.message)?;
            inside?;
            assert_eq!(output.ids, reference);
            model.apply_chat_template(MESSAGES, None, None, true).map_err(|f| f.message)?;
            model.tokenize("Some text").map_err(|f| f.message)?;
            model.generate(&greedy(&[u32::MAX], 1)).unwrap_err();
            Model::load(&tiny().join("nothing"), &load_options()).map(drop).unwrap_err();
            inspect(&tiny()).map_err(|f| f.message)?;
            differences(&before, &snapshot())?;
            drop(model);
            differences(&before, &snapshot())?;
            if num_threads() != threads {
                return Err(format!("{} threads, {threads} before", num_threads()));
            }
        }
        Ok(format!("{threads} threads"))
    });
    bench.case("files that are opened", |_| {
        let mut seen = (listing("/proc/self/fd"), Vec::<String>::new(), 0usize);
        let options = xserv_load_options {
            progress: Some(look_at_files),
            progress_user_data: &raw mut seen as *mut c_void,
            ..load_options()
        };
        let model = Model::load(&tiny(), &options).map_err(|f| f.message)?;
        if seen.1.is_empty() && seen.2 > 0 {
            drop(model);
            return Ok(format!("{} looked at", seen.2));
        }
        Err(format!("{:?}", seen.1))
    });
    bench.case("a failed load leaves no thread, file or memory", |_| {
        let copy = Copy::new();
        let (header, mut data) = copy.weights();
        data.pop();
        copy.write_weights(header.to_string(), &data);
        let before = (num_threads(), snapshot());
        for _ in 0..50 {
            Model::load(copy.path(), &load_options()).map(drop).unwrap_err();
        }
        let _ = Model::load(&tiny(), &xserv_load_options { max_memory_bytes: 1, ..load_options() });
        let _ = Model::load(
            &tiny(),
            &xserv_load_options { kv_cache_tokens: 1 << 45, ..load_options() },
        );
        differences(&before.1, &snapshot())?;
        match num_threads() == before.0 {
            true => Ok(String::new()),
            false => Err(format!("{} threads, {} before", num_threads(), before.0)),
        }
    });
    bench.case("threads of the library take no signals", |_| {
        let model = Model::load(&tiny(), &xserv_load_options { num_threads: 4, ..load_options() });
        let model = model.map_err(|f| f.message)?;
        let mut found = 0;
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let field = |name: &str| {
                status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_string()
            };
            if !field("Name:").starts_with("xserv") {
                continue;
            }
            found += 1;
            let blocked = u64::from_str_radix(&field("SigBlk:"), 16).unwrap();
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGPROF, libc::SIGUSR1]
            {
                if blocked >> (signal - 1) & 1 == 0 {
                    return Err(format!("{} takes signal {signal}", field("Name:")));
                }
            }
        }
        drop(model);
        match found {
            3 => Ok(String::new()),
            n => Err(format!("{n} threads of the library, 3 expected")),
        }
    });
}

/// Traced by `no_socket_and_no_file_for_writing`.
fn system_calls(bench: &mut Bench) {
    bench.case("load, use and free", |_| {
        // A mark in the trace: from here on all is the library's.
        let _ = std::fs::metadata("/xserv-trace-begin");
        let model = Model::open(&tiny());
        let text = model.generate(&greedy(&PROMPT, 3)).map_err(|f| f.message)?.text;
        model.tokenize(&text).map_err(|f| f.message)?;
        model.apply_chat_template(MESSAGES, None, None, true).map_err(|f| f.message)?;
        drop(model);
        inspect(&tiny()).map_err(|f| f.message)?;
        let _ = Model::load(std::path::Path::new("nobody/nothing"), &load_options());
        let _ = std::fs::metadata("/xserv-trace-end");
        Ok(String::new())
    });
}
