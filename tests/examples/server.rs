//! The server of the Python package: its own tests, its types, and its command in the wheel.

use std::path::PathBuf;
use std::process::Command;

use crate::support::*;

fn package() -> PathBuf {
    repository().join("examples/python")
}

/// Python with what the server needs. None, with the reason printed, where that is not installed.
fn python(test: &str) -> Option<Command> {
    // .ci/run puts them there.
    let packages = repository().join("target/tools/server");
    let mut python = command("python3");
    python
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("XSERV_TEST_MODEL", model())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONPATH", std::env::join_paths([package(), packages]).expect("a path"));
    let import = "import fastapi, httptools, httpx, openai, prometheus_client, uvicorn";
    let mut asked = command("python3");
    asked
        .args(["-c", import])
        .envs(python.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if outcome(&mut asked).code != Some(0) {
        assert!(
            std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(),
            "the server's packages are missing"
        );
        skip(test, "fastapi, uvicorn, openai or another package is not installed");
        return None;
    }
    Some(python)
}

#[test]
fn its_own_tests_pass() {
    let Some(mut python) = python("the server's own tests") else { return };
    let tests = ["-m", "unittest", "discover", "--start-directory", "tests_server", "-v"];
    let outcome = run(python.current_dir(package()).args(tests));
    eprintln!("{}", outcome.stderr);
    assert!(outcome.stderr.contains("\nOK"), "{}", outcome.stderr);
    let ran = outcome.stderr.split("\nRan ").nth(1).and_then(|rest| rest.split(' ').next());
    assert!(ran.and_then(|count| count.parse().ok()) > Some(80), "too few tests: {ran:?}");
}

#[test]
fn it_is_typed() {
    let Some(mut python) = python("the server's types") else { return };
    let types = repository().join("target/tools/python-types");
    let server = repository().join("target/tools/server");
    let path = std::env::join_paths([types, server]).expect("a path");
    python.current_dir(package()).env("PYTHONPATH", &path).env("MYPYPATH", package());
    python.env("MYPY_CACHE_DIR", work_folder("server-mypy"));
    let mut is_there = command("python3");
    if outcome(is_there.args(["-m", "mypy", "--version"]).env("PYTHONPATH", &path)).code != Some(0)
    {
        assert!(std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(), "mypy is missing");
        return skip("the server's types", "mypy is not installed");
    }
    let found =
        outcome(python.args(["-m", "mypy", "--strict", "--no-error-summary", "xserv_server"]));
    assert_eq!(found.code, Some(0), "{}{}", found.stdout, found.stderr);
}

/// The load script, for a moment: nothing is lost.
#[test]
fn nothing_is_lost_under_load() {
    let Some(mut python) = python("the server under load") else { return };
    let load = package().join("tests_server/load.py");
    let options = ["--clients", "40", "--seconds", "4", "--disconnects", "0.2"];
    let said = run(python.arg(load).arg(model()).args(options)).stdout;
    let report: serde_json::Value = serde_json::from_str(&said).expect("a line of JSON");
    assert_eq!(report["lost"], 0, "{said}");
    assert!(report["whole"].as_u64() > Some(0) && report["left"].as_u64() > Some(0), "{said}");
}

/// The soak, for a moment: whoever stays has the known answer, and nothing is left of those who leave.
#[test]
fn who_leaves_takes_nothing_from_others() {
    let Some(mut python) = python("the server's soak") else { return };
    let soak = package().join("tests_server/soak.py");
    let options = ["--clients", "40", "--minutes", "0.1"];
    let said = run(python.arg(soak).arg(model()).args(options)).stdout;
    let report: serde_json::Value = serde_json::from_str(&said).expect("a line of JSON");
    assert_eq!(report["lost"], 0, "{said}");
    assert!(report["whole"].as_u64() > Some(0) && report["left"].as_u64() > Some(0), "{said}");
}

#[test]
fn the_command_says_what_it_needs() {
    let mut bare = command("python3");
    bare.args(["-S", "-m", "xserv_server", "/no/such/folder"])
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("PYTHONPATH", package());
    let said = outcome(&mut bare);
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(said.stderr.contains("pip install 'xserv[server]'"), "{}", said.stderr);
}
