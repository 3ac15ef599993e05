//! The page of the Python package's server, in a browser without a screen.

use std::path::PathBuf;
use std::process::Command;

use crate::support::*;

/// Python with Playwright, and with what the server needs where that is installed. .ci/run puts both there.
fn python() -> Command {
    let tools = repository().join("target/tools");
    let paths = [PathBuf::from("."), tools.join("page"), tools.join("server")];
    let mut python = command("python3");
    python
        .current_dir(repository().join("examples/python"))
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("XSERV_TEST_MODEL", model())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONPATH", std::env::join_paths(paths).expect("a path"));
    python
}

#[test]
fn its_tests_pass_in_chromium() {
    if std::env::var_os("XSERV_CHROMIUM").is_none() && !have("chromium") {
        return skip("the page's tests", "chromium is not installed");
    }
    if outcome(python().args(["-c", "import playwright.sync_api"])).code != Some(0) {
        return skip("the page's tests", "the Python package playwright is not installed");
    }
    let tests = ["-m", "unittest", "discover", "--start-directory", "tests_page", "-v"];
    let outcome = run(python().args(tests));
    assert!(outcome.stderr.contains("\nOK"), "{}", outcome.stderr);
    let ran = outcome.stderr.split("\nRan ").nth(1).and_then(|rest| rest.split(' ').next());
    assert!(ran.and_then(|count| count.parse().ok()) > Some(30), "too few tests: {ran:?}");
}
