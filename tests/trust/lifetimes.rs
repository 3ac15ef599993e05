//! Opening and closing of the library by hosts, and the end of processes: a program in C that does
//! it, and what becomes of it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::client::{root, tiny};
use crate::files::TempDir;
use crate::scale::{scaled, PATIENCE};

/// Returns the libxserv.so that cargo built beside this test binary.
fn shared_object() -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join("libxserv.so");
    assert!(path.exists(), "{} is not there: cargo builds it with the tests", path.display());
    path
}

/// Returns the compiled host.
fn host() -> &'static PathBuf {
    static HOST: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = HOST.get_or_init(|| {
        let folder = TempDir::new();
        let program = folder.path().join("lifetimes");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
        let output = Command::new(compiler)
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"])
            .arg(root().join("include"))
            .arg(root().join("tests/trust/lifetimes.c"))
            .arg("-o")
            .arg(&program)
            .args(["-ldl", "-lpthread"])
            .output()
            .expect("a C compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (folder, program)
    });
    program
}

/// Runs the host in this way, and asserts that it ends with this code and prints nothing.
fn run(way: &[&str], environment: &[(&str, &str)], code: i32, limit: Duration) {
    let mut child = Command::new(host())
        .arg(shared_object())
        .arg(tiny())
        .args(way)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() && begin.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(2));
    }
    if child.try_wait().unwrap().is_none() {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    assert_eq!(
        output.status.code(),
        Some(code),
        "{way:?} {environment:?}: {} {printed}",
        output.status
    );
    assert_eq!(printed, "", "{way:?}");
}

#[test]
fn the_library_is_opened_and_closed_again_and_again() {
    let rounds = scaled(50, 1_000);
    run(&["rounds", &rounds.to_string()], &[], 0, PATIENCE * (1 + rounds as u32 / 25));
}

/// The exit code is the host's, within five seconds (the host sets itself an alarm), whoever exits.
#[test]
fn processes_end_with_their_own_code() {
    for (way, code) in [
        ("idle", 20),
        ("busy", 21),
        ("callback", 22),
        ("progress", 23),
        ("wake", 24),
        ("atexit", 25),
        ("closed", 26),
        ("quick", 27),
        ("handlers", 28),
    ] {
        for _ in 0..scaled(3, 50) {
            run(&[way], &[], code, PATIENCE);
        }
    }
}

/// The stacks of the library's threads are the library's to choose. (Rust's standard library takes
/// them from the environment where nobody says how large they are.)
#[test]
fn the_environment_does_not_choose_the_stacks_of_threads() {
    for size in ["1", "4096", "16384", "999999999999999"] {
        run(&["host"], &[("RUST_MIN_STACK", size)], 0, PATIENCE);
    }
}
