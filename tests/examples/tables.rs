//! tests/bench/tables: its own tests, on the CPU and at the smallest size, and its types.

use std::path::PathBuf;
use std::process::Command;

use crate::support::*;

/// Returns the folders of the modules that the tables use.
fn own_packages() -> [PathBuf; 2] {
    ["examples/python", "examples/docs"].map(|folder| repository().join(folder))
}

/// Python with NumPy and mypy, where .ci/run puts them.
fn python() -> Command {
    let tools = repository().join("target/tools");
    let installed = [tools.join("numpy"), tools.join("python-types")];
    let paths = own_packages().into_iter().chain(installed);
    let mut python = command("python3");
    python
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONPATH", std::env::join_paths(paths).expect("a path"));
    python
}

fn has(module: &str) -> bool {
    outcome(python().args(["-c", &format!("import {module}")])).code == Some(0)
}

#[test]
fn its_own_tests_pass() {
    if !has("numpy") {
        return skip("the tables", "numpy is not installed");
    }
    let outcome = run(python().arg("tests/bench/tables/test_tables.py").arg(model()));
    assert!(outcome.stderr.contains("\nOK"), "{}", outcome.stderr);
}

#[test]
fn it_is_typed() {
    if !has("numpy") || !has("mypy") {
        return skip("the types of the tables", "numpy or mypy is not installed");
    }
    let found = outcome(
        python()
            .current_dir(repository().join("tests/bench"))
            .env("MYPYPATH", std::env::join_paths(own_packages()).expect("a path"))
            .env("MYPY_CACHE_DIR", work_folder("tables-mypy"))
            .args(["-m", "mypy", "--strict", "--no-error-summary", "tables"]),
    );
    assert_eq!(found.code, Some(0), "{}{}", found.stdout, found.stderr);
}
