//! Running programs, and where things lie.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Longest that a program may run. Far more than any of them needs, a release build included.
const TIME_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Returns the root of the repository.
pub fn repository() -> PathBuf {
    // Cargo sets it for the tests that it runs; the built-in path may be that of another machine.
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    PathBuf::from(root)
}

/// Returns the small model of the repository.
pub fn model() -> PathBuf {
    repository().join("examples/models/tiny-qwen3")
}

/// Returns the folder of the libxserv.so that was built for this test run.
pub fn library_folder() -> PathBuf {
    let exe = std::env::current_exe().expect("the path of this test binary");
    let folder = exe.parent().expect("a folder").to_path_buf();
    assert!(folder.join("libxserv.so").is_file(), "no libxserv.so in {}", folder.display());
    folder
}

/// Returns a folder for the files of one test, kept for looking at until the next run. Empty.
pub fn work_folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("examples").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("an old work folder can be removed");
    }
    fs::create_dir_all(&folder).expect("a work folder can be made");
    folder
}

/// The outcome of a program.
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Returns a program to run in the repository's root, with nothing on its standard input.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    // Cargo's search path would find the library where a user's program has to find it by itself.
    command.current_dir(repository()).stdin(Stdio::null()).env_remove("LD_LIBRARY_PATH");
    command
}

/// Runs a program to its end.
pub fn outcome(command: &mut Command) -> Outcome {
    outcome_with_input(command, "")
}

/// Runs a program to its end, with these bytes on its standard input.
pub fn outcome_with_input(command: &mut Command, input: impl AsRef<[u8]>) -> Outcome {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    // Files and not pipes: nothing blocks, whatever the program writes.
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "output-{}-{}",
        std::process::id(),
        NUMBER.fetch_add(1, Ordering::Relaxed)
    ));
    let [stdin, stdout, stderr] = ["in", "out", "err"].map(|kind| base.with_extension(kind));
    fs::write(&stdin, input).expect("standard input can be written");
    let create = |path| fs::File::create(path).expect("an output file can be made");
    let mut child = command
        .stdin(fs::File::open(&stdin).expect("standard input can be read"))
        .stdout(create(&stdout))
        .stderr(create(&stderr))
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let deadline = Instant::now() + TIME_LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break Some(status);
        }
        if Instant::now() > deadline {
            child.kill().and_then(|()| child.wait()).ok();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let read = |path| String::from_utf8_lossy(&fs::read(path).expect("output")).into_owned();
    let outcome = Outcome {
        code: status.and_then(|status| status.code()),
        stdout: read(&stdout),
        stderr: read(&stderr),
    };
    for path in [stdin, stdout, stderr] {
        fs::remove_file(path).ok();
    }
    assert!(status.is_some(), "{command:?} did not end:\n{}\n{}", outcome.stdout, outcome.stderr);
    outcome
}

/// Runs a program that must succeed.
pub fn run(command: &mut Command) -> Outcome {
    run_with_input(command, "")
}

/// Runs a program that must succeed, with this text on its standard input.
pub fn run_with_input(command: &mut Command, input: &str) -> Outcome {
    let outcome = outcome_with_input(command, input);
    assert!(
        outcome.code == Some(0),
        "{command:?} ended with {:?}\n--- stdout\n{}\n--- stderr\n{}",
        outcome.code,
        outcome.stdout,
        outcome.stderr
    );
    outcome
}

/// Returns the texts of the code blocks of a language in a Markdown text.
pub fn code_blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut parts = text.split("\n```");
    parts.next();
    while let (Some(block), Some(_prose)) = (parts.next(), parts.next()) {
        let (name, body) = block.split_once('\n').expect("a block with lines");
        if name == language {
            found.push(body.to_string() + "\n");
        }
    }
    found
}

/// Says that a test, or a part of one, can't run here.
pub fn skip(what: &str, reason: &str) {
    assert!(std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(), "{what} can't run: {reason}");
    eprintln!("skipped: {what}: {reason}");
}

/// Whether a program is on PATH.
pub fn have(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|folder| folder.join(program).is_file())
}

/// Returns the first of these programs that is on PATH, after the one that the environment names.
fn compiler(variable: &str, names: &[&str]) -> String {
    let named = std::env::var(variable).unwrap_or_default();
    std::iter::once(named.as_str())
        .chain(names.iter().copied())
        .find(|name| !name.is_empty() && have(name))
        .unwrap_or_else(|| panic!("none of {names:?} is installed"))
        .to_string()
}

/// Returns the C compiler.
pub fn cc() -> String {
    compiler("CC", &["cc", "gcc", "clang"])
}

/// Returns the C++ compiler.
pub fn cxx() -> String {
    compiler("CXX", &["c++", "g++", "clang++"])
}

/// Flags for warnings, which are errors.
pub const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// Returns a CMake: one that is installed, or the one that tests/support/tools.sh puts into
/// target/tools. None, with the reason printed, if there is no way to get one.
pub fn cmake() -> Option<&'static str> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let script = repository().join("tests/support/tools.sh");
        let outcome = outcome(command("bash").arg(script).arg("cmake"));
        match outcome.code {
            Some(0) => Ok(outcome.stdout.trim().to_string()),
            _ => Err(outcome.stderr),
        }
    });
    match found {
        Ok(path) => Some(path),
        Err(reason) => {
            skip("what needs CMake", reason);
            None
        }
    }
}

/// Configures and builds a CMake project of the repository, warnings being errors.
pub fn cmake_build(cmake: &str, source: &Path, build: &Path, definitions: &[String]) {
    run(command(cmake)
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(build)
        .arg(format!("-DCMAKE_C_COMPILER={}", cc()))
        .arg(format!("-DCMAKE_CXX_COMPILER={}", cxx()))
        .args(["-DCMAKE_C_FLAGS=-Werror", "-DCMAKE_CXX_FLAGS=-Werror", "--no-warn-unused-cli"])
        .args(definitions));
    run(command(cmake).arg("--build").arg(build));
}

/// Builds a program from one source file of tests/examples against the library of this test run.
pub fn build_program(compiler: &str, sources: &[PathBuf], flags: &[&str], program: &Path) {
    let library = library_folder();
    run(command(compiler)
        .args(flags)
        .args(WARNINGS)
        .args(["-O1", "-g", "-pthread"])
        .arg("-I")
        .arg(repository().join("include"))
        .args(sources)
        .arg("-L")
        .arg(&library)
        .args(["-lxserv", "-lm"])
        .arg("-o")
        .arg(program));
}

/// Returns a folder in which the library has the name that programs ask the loader for.
pub fn staged_library() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = work_folder("library");
            fs::copy(library_folder().join("libxserv.so"), folder.join("libxserv.so.1"))
                .expect("the library can be copied");
            std::os::unix::fs::symlink("libxserv.so.1", folder.join("libxserv.so"))
                .expect("a link");
            folder
        })
        .clone()
}
