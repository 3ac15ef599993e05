//! Tests in processes of their own: this test binary, started again with one ignored test.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::files::TempDir;
use crate::hostile_child::{wait_while_it_writes, HANG};

/// Whether every fault is to be tried, instead of a sample.
pub fn all() -> bool {
    std::env::var_os("XSERV_TRUST").is_some_and(|value| value == "full")
}

/// Compiles C source of this folder with these arguments, and returns the result.
pub fn compile(source: &str, output: &Path, arguments: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trust").join(source);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let out = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(output)
        .arg(source)
        .args(arguments)
        .output()
        .expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    output.to_path_buf()
}

/// The output of a child process, line by line, and how it ended if not well.
pub struct Ended {
    pub lines: Vec<String>,
    pub wrong: Option<String>,
}

impl Ended {
    /// Returns the rest of the lines that begin with this word.
    pub fn said<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(": "))
    }

    /// Fails unless the process ended well and found nothing wrong.
    pub fn check(&self, what: &str) {
        let mut wrong: Vec<&str> = self.said("wrong").collect();
        wrong.extend(self.wrong.as_deref());
        assert!(wrong.is_empty(), "{what}: {} wrong:\n{}", wrong.len(), wrong.join("\n"));
        assert!(self.said("done").count() == 1, "{what}: did not come to its end");
    }
}

/// One line from a child to its parent.
pub fn say(word: &str, text: impl std::fmt::Display) {
    println!("\n{word}: {}", text.to_string().replace('\n', " | "));
}

/// Runs the ignored test `name` of this binary in a process with these variables.
pub fn run(name: &str, environment: &[(&str, &OsStr)]) -> Ended {
    let folder = TempDir::new();
    let report = folder.path().join("report");
    let file = File::create(&report).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
        .env("XSERV_TRUST_CHILD", "1")
        .env("RUST_BACKTRACE", "0")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let status = wait_while_it_writes(&mut child, &report);
    let text = String::from_utf8_lossy(&std::fs::read(&report).unwrap()).into_owned();
    let lines: Vec<String> = text.lines().map(str::to_string).collect();
    let at = lines.iter().rev().find_map(|line| line.strip_prefix("case: ")).unwrap_or("the start");
    let last: Vec<&str> = match lines.iter().position(|line| line.contains(" panicked at ")) {
        Some(panic) => lines[panic..].iter().take(4).map(String::as_str).collect(),
        None => {
            lines.iter().rev().filter(|line| !line.is_empty()).take(4).map(String::as_str).collect()
        }
    };
    let wrong = match status {
        None => Some(format!("{at}: hung for {} s", HANG.as_secs())),
        Some(status) if status.signal().is_some() => {
            Some(format!("{at}: killed by signal {} after {last:?}", status.signal().unwrap()))
        }
        Some(status) if !status.success() => Some(format!("{at}: {status} after {last:?}")),
        Some(_) => None,
    };
    Ended { lines, wrong }
}

/// Whether this process is a child that [`run`] started. Others that run ignored tests have nothing to do.
pub fn is_child() -> bool {
    std::env::var_os("XSERV_TRUST_CHILD").is_some()
}

/// Numbers `1..=count`, or `sample` of them, spread evenly but for the first ones, which are all taken.
pub fn sampled(count: usize, sample: usize) -> Vec<usize> {
    if all() || count <= sample {
        return (1..=count).collect();
    }
    let dense = sample / 4;
    let rest = sample - dense;
    let spread =
        (0..rest).map(|i| dense + 1 + i * (count - dense - 1) / rest.max(2).saturating_sub(1));
    let mut chosen: Vec<usize> = (1..=dense).chain(spread.map(|n| n.min(count))).collect();
    chosen.dedup();
    chosen
}
