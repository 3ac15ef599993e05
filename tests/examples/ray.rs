//! The application of Ray Serve in examples/ray: its own tests, and its types.

use std::path::PathBuf;
use std::process::Command;

use crate::support::*;

fn folder() -> PathBuf {
    repository().join("examples/ray")
}

/// Python with Ray, pytest and what the server needs. None, with the reason printed, where that is
/// not installed.
fn python(test: &str) -> Option<Command> {
    let tools = repository().join("target/tools"); // .ci/run puts them there
    let server = repository().join("examples/python");
    let paths = [folder(), server, tools.join("ray"), tools.join("python-types")];
    let mut python = command("python3");
    python
        .current_dir(folder())
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("XSERV_TEST_MODEL", model())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONPATH", std::env::join_paths(paths).expect("a path"));
    let import = "import ray.serve, pytest, httpx, openai, xserv_server.app, xserv_ray";
    let mut asked = command("python3");
    asked
        .args(["-c", import])
        .envs(python.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if outcome(&mut asked).code != Some(0) {
        skip(test, "ray[serve], pytest, openai or what the server needs is not installed");
        return None;
    }
    Some(python)
}

#[test]
fn its_own_tests_pass() {
    let Some(mut python) = python("the tests of Ray Serve") else { return };
    let said = run(python.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])).stdout;
    let last = said.lines().last().unwrap_or("");
    let passed = last.split_once(" passed").and_then(|(count, _)| count.parse::<u32>().ok());
    assert!(passed > Some(40) && !last.contains("skipped"), "{said}");
}

#[test]
fn it_is_typed() {
    let Some(mut python) = python("the types of Ray Serve's application") else { return };
    python.env("MYPYPATH", repository().join("examples/python"));
    python.env("MYPY_CACHE_DIR", work_folder("ray-mypy"));
    let mut is_there = command("python3");
    let types = repository().join("target/tools/python-types");
    is_there.args(["-m", "mypy", "--version"]).env("PYTHONPATH", &types);
    if outcome(&mut is_there).code != Some(0) {
        return skip("the types of Ray Serve's application", "mypy is not installed");
    }
    let found = outcome(python.args(["-m", "mypy", "--strict", "--no-error-summary", "xserv_ray"]));
    assert_eq!(found.code, Some(0), "{}{}", found.stdout, found.stderr);
}
