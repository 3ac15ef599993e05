//! The Python package: its structs against the header's, its own tests, its types, its example, and pip.

use std::path::PathBuf;
use std::process::Command;

use crate::random_model::random_model;
use crate::support::*;

fn package() -> PathBuf {
    repository().join("examples/python")
}

fn python() -> Command {
    let mut python = command("python3");
    python
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so"))
        .env("XSERV_TEST_MODEL", model())
        .env("PYTHONDONTWRITEBYTECODE", "1");
    python
}

#[test]
fn structs_are_those_of_the_header() {
    let script = repository().join("tests/examples/describe_structs.py");
    let describe =
        |what: &str| run(python().arg(&script).arg(what).env("PYTHONPATH", package())).stdout;
    let folder = work_folder("python-structs");
    let source = folder.join("structs.c");
    let program = folder.join("structs");
    std::fs::write(&source, describe("c")).expect("a source file");
    build_program(&cc(), &[source], &["-std=c11"], &program);
    let in_c = run(command(&program).env("LD_LIBRARY_PATH", staged_library())).stdout;
    let in_python = describe("python");
    assert!(in_c.lines().count() > 130, "too few lines: {in_c}");
    for (c, python) in in_c.lines().zip(in_python.lines()) {
        assert_eq!(c, python, "in C, in Python");
    }
    assert_eq!(in_c, in_python);
}

#[test]
fn its_own_tests_pass() {
    let tests = ["-W", "error", "-m", "unittest", "discover", "--start-directory", "tests", "-v"];
    // .ci/run puts numpy there.
    let numpy = repository().join("target/tools/numpy");
    let outcome = run(python().current_dir(package()).args(tests).env("PYTHONPATH", numpy));
    eprintln!("{}", outcome.stderr);
    assert!(outcome.stderr.contains("\nOK"), "{}", outcome.stderr);
}

/// A program as a user writes it runs, and mypy and pyright find nothing in it nor in the package.
#[test]
fn a_typed_program_runs_and_is_clean() {
    let program = package().join("tests/typed_program.py");
    let said = run(python().arg(&program).arg(model()).env("PYTHONPATH", package())).stdout;
    assert!(said.starts_with("Once upon a time") && said.ends_with("cpu 0\n"), "{said}");

    // .ci/run puts them there.
    let tools = repository().join("target/tools/python-types");
    let is_there = |module: &str| {
        outcome(python().args(["-m", module, "--version"]).env("PYTHONPATH", &tools)).code
            == Some(0)
    };
    if !["mypy", "pyright"].into_iter().all(is_there) {
        assert!(std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(), "mypy or pyright is missing");
        return skip("a_typed_program_runs_and_is_clean", "mypy or pyright is not installed");
    }
    let cache = work_folder("python-mypy");
    let mypy = ["-m", "mypy", "--strict", "--no-error-summary", "xserv", "tests/typed_program.py"];
    let pyright = ["-m", "pyright", "xserv", "tests/typed_program.py"];
    for arguments in [&mypy[..], &pyright[..]] {
        let found = outcome(
            python()
                .current_dir(package())
                .args(arguments)
                .env("PYTHONPATH", &tools)
                .env("MYPYPATH", package())
                .env("MYPY_CACHE_DIR", &cache),
        );
        assert_eq!(found.code, Some(0), "{}{}", found.stdout, found.stderr);
    }
}

#[test]
fn example_generates() {
    let example = package().join("generate.py");
    let answer = run(python().arg(&example).arg(model()).arg("Hello!"));
    assert!(!answer.stdout.trim().is_empty());
    let missing = outcome(python().arg(&example).arg("/no/such/folder"));
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("XSERV_STATUS_NOT_FOUND"), "{}", missing.stderr);
}

#[test]
fn the_asyncio_example_answers_everyone() {
    let example = package().join("serve.py");
    let answers = run(python().arg(&example).arg(model()).args(["Hello!", "Tell me a story."]));
    assert!(answers.stdout.starts_with("> Hello!\n"), "{}", answers.stdout);
    assert!(answers.stdout.contains("\n> Tell me a story.\n"), "{}", answers.stdout);
    assert!(answers.stderr.contains(" tokens in "), "{}", answers.stderr);
}

#[test]
fn every_operator_computes_what_numpy_does() {
    // .ci/run puts numpy there.
    let numpy = repository().join("target/tools/numpy");
    let path = std::env::join_paths([package(), numpy]).expect("a path");
    if outcome(python().args(["-c", "import numpy"]).env("PYTHONPATH", &path)).code != Some(0) {
        assert!(std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(), "numpy is missing");
        return skip("every_operator_computes_what_numpy_does", "numpy is not installed");
    }
    let program = package().join("kernels.py");
    let said = run(python().arg(program).arg("cpu").env("PYTHONPATH", &path)).stdout;
    assert!(said.contains("all as it should be") && said.matches(" ok\n").count() >= 27, "{said}");
}

#[test]
fn a_program_may_end_while_text_is_generated() {
    let program = "import os, xserv\nm = xserv.Model(os.environ['XSERV_TEST_MODEL'])\n\
                   s = m.generate('Once', stream=True, max_tokens=1500, ignore_eos=True)\nnext(s)\nprint('left')";
    for _ in 0..3 {
        let ended = run(python().args(["-c", program]).env("PYTHONPATH", package()));
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("left\n", ""));
    }
}

#[test]
fn pip_installs_it_with_a_library() {
    if outcome(command("python3").args(["-m", "pip", "--version"])).code != Some(0) {
        return skip("pip_installs_it_with_a_library", "python3 has no pip");
    }
    let folder = work_folder("python-pip");
    let source = folder.join("source");
    run(command("cp").arg("-r").arg(package()).arg(&source));
    std::fs::copy(library_folder().join("libxserv.so"), source.join("xserv/libxserv.so"))
        .expect("the library can be copied");
    let target = folder.join("installed");
    let mut pip = command("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(&target)
        .arg(&source);
    // With the setuptools that is installed if it can make wheels; else pip fetches one.
    let can_make_wheels = ["import setuptools, wheel", "import setuptools.command.bdist_wheel"]
        .iter()
        .any(|import| outcome(command("python3").args(["-c", import])).code == Some(0));
    if can_make_wheels {
        run(pip.arg("--no-build-isolation"));
    } else if outcome(&mut pip).code != Some(0) {
        return skip(
            "pip_installs_it_with_a_library",
            "setuptools can't make wheels here, and pip could not fetch another one",
        );
    }
    assert!(target.join("xserv/py.typed").is_file());
    let program = "import sys, xserv; from xserv import inspect, library_version; \
                   print(xserv.__file__, library_version, inspect(sys.argv[1]).supported)";
    let used = run(command("python3")
        .current_dir(&folder)
        .args(["-c", program])
        .arg(model())
        .env("PYTHONPATH", &target)
        .env_remove("XSERV_LIBRARY"));
    let expected = format!(
        "{} {} True",
        target.join("xserv/__init__.py").display(),
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(used.stdout.trim(), expected);
}

/// The benchmark of the settings of sampling knows the package from inside.
#[test]
fn the_benchmark_of_sampling_runs() {
    let model = random_model("sampling-model", &["qwen3-tiny", "--vocab", "32000"]);
    let script = repository().join("tests/bench/sampling.py");
    let sizes = "--device cpu --requests 2 --prompt 8 --tokens 4 --repeats 1 --json";
    let mut bench = python();
    bench.env("PYTHONPATH", package()).arg(script).arg(model).args(sizes.split(' '));
    let said: serde_json::Value = serde_json::from_str(&run(&mut bench).stdout).expect("JSON");
    let rows = said["rows"].as_array().expect("rows");
    assert!(rows.len() > 10, "{said}");
    assert!(rows.iter().all(|row| row["tokens_per_second"].as_f64() > Some(0.0)), "{said}");
}
