//! The shared object exports exactly the functions of the header, under its SONAME.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the libxserv.so that cargo built beside this test binary.
pub fn shared_object() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/<profile>/deps/<test>; `cargo test` leaves the library there, and only `cargo build` copies
    // it one folder up.
    let path = test.parent().unwrap().join("libxserv.so");
    assert!(path.exists(), "{} is not there: cargo builds it with the tests", path.display());
    path
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn exports_equal_the_header() {
    let nm = run(Command::new("nm").args(["-D", "--defined-only"]).arg(shared_object()));
    let exported: BTreeSet<String> =
        nm.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_string).collect();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let header = ["xserv.h", "xserv_ops.h"]
        .map(|name| std::fs::read_to_string(include.join(name)).unwrap())
        .join("\n");
    // A declaration: a name that begins with xserv_, then a parenthesis, outside comments. Inline
    // functions are compiled into the caller.
    let code: String = header
        .lines()
        .filter(|l| !l.trim_start().starts_with(['*', '/', '#']) && !l.contains("typedef"))
        .filter(|l| !l.starts_with("static inline"))
        .collect::<Vec<_>>()
        .join("\n");
    let mut declared = BTreeSet::new();
    for (at, _) in code.match_indices("xserv_") {
        let name: String =
            code[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if code[at + name.len()..].starts_with('(') {
            declared.insert(name);
        }
    }
    assert!(declared.len() >= 30, "{declared:?}");
    assert_eq!(exported, declared);
}

/// The C library's function ends the process where memory is short: see src/thread_exit.rs.
#[test]
#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
fn destructors_of_threads_are_registered_here() {
    let nm = run(Command::new("nm").args(["-D", "--undefined-only"]).arg(shared_object()));
    assert!(nm.contains("pthread_setspecific"), "{nm}");
    assert!(!nm.contains("__cxa_thread_atexit_impl"), "{nm}");
}

#[test]
fn soname_and_needed_libraries() {
    let dynamic = run(Command::new("readelf").arg("-d").arg(shared_object()));
    let soname = format!("[libxserv.so.{}]", xserv::ffi::XSERV_ABI_VERSION);
    assert!(dynamic.contains(&soname), "no SONAME {soname}:\n{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    for line in dynamic.lines().filter(|line| line.contains("(NEEDED)")) {
        let usual = ["libc.so", "libm.so", "libgcc_s.so", "ld-linux"];
        assert!(usual.iter().any(|name| line.contains(name)), "an unusual dependency: {line}");
    }
}
