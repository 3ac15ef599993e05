//! The documentation of examples/docs: its snippets run, and it builds without a dead link.

use std::fs;
use std::path::PathBuf;

use crate::support::*;

/// Returns the pages, with their names.
fn pages() -> Vec<(String, String)> {
    let folder = repository().join("examples/docs");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("examples/docs") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            found.push((name, fs::read_to_string(path).expect("a page")));
        }
    }
    found.sort();
    assert!(found.len() > 12, "{} pages", found.len());
    found
}

/// Returns the snippets of a language, with names of their own.
fn snippets(language: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (page, text) in pages() {
        let blocks = code_blocks(&text, language).into_iter().enumerate();
        found.extend(blocks.map(|(number, block)| (format!("{page}-{number}"), block)));
    }
    found
}

fn programs_run(language: &str, compiler: &str, standard: &str) {
    let folder = work_folder(&format!("docs-{language}"));
    let snippets = snippets(language);
    assert!(snippets.len() > 2);
    for (name, snippet) in snippets {
        let source = folder.join(format!("{name}.{language}"));
        fs::write(&source, snippet).expect("a source file");
        build_program(compiler, &[source], &[standard], &folder.join(&name));
        let said = run(command(folder.join(&name)).env("LD_LIBRARY_PATH", staged_library())).stdout;
        assert!(!said.trim().is_empty(), "{name} says nothing");
    }
}

#[test]
fn the_c_snippets_run() {
    programs_run("c", &cc(), "-std=c11");
}

#[test]
fn the_cpp_snippets_run() {
    programs_run("cpp", &cxx(), "-std=c++17");
}

#[test]
fn the_python_snippets_run() {
    let numpy = repository().join("target/tools/numpy"); // .ci/run puts it there
    let path = std::env::join_paths([repository().join("examples/python"), numpy]).expect("a path");
    let python = |program: &str| {
        let mut python = command("python3");
        python
            .args(["-c", program])
            .env("PYTHONPATH", &path)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("XSERV_LIBRARY", library_folder().join("libxserv.so"));
        python
    };
    let has_numpy = outcome(&mut python("import numpy")).code == Some(0);
    let snippets = snippets("python");
    assert!(snippets.len() > 10);
    for (name, snippet) in snippets {
        if snippet.contains("import numpy") && !has_numpy {
            skip(&name, "numpy is not installed");
            continue;
        }
        let said = run(&mut python(&snippet)).stdout;
        assert!(!said.trim().is_empty(), "{name} says nothing");
    }
}

/// They start the server of the Python package.
#[test]
fn the_commands_run() {
    let packages = repository().join("target/tools/server"); // .ci/run puts them there
    let folder = work_folder("docs-commands");
    let program = folder.join("xserv-server");
    fs::write(&program, "#!/bin/sh\nexec python3 -m xserv_server \"$@\"\n").expect("a script");
    run(command("chmod").arg("+x").arg(&program));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(folder).chain(std::env::split_paths(&path));
    let environment = [
        ("PATH", std::env::join_paths(paths).expect("a path")),
        (
            "PYTHONPATH",
            std::env::join_paths([repository().join("examples/python"), packages]).expect("a path"),
        ),
        ("PYTHONDONTWRITEBYTECODE", "1".into()),
        ("XSERV_LIBRARY", library_folder().join("libxserv.so").into()),
    ];
    let is_there = "import fastapi, uvicorn, prometheus_client, xserv_server.app";
    let asked = outcome(command("python3").args(["-c", is_there]).envs(environment.clone()));
    if asked.code != Some(0) || !have("curl") {
        return skip("the commands of the documentation", "the server or curl is not installed");
    }
    let snippets = snippets("sh");
    assert!(!snippets.is_empty());
    for (name, snippet) in snippets {
        let script = format!("set -e -m\n{snippet}");
        let said = run(command("bash").arg("-c").arg(script).envs(environment.clone()));
        assert!(said.stdout.contains("\"chat.completion\""), "{name}: {}", said.stdout);
    }
}

/// Every snippet that is not run above is taken from files that are tested, or is a picture.
#[test]
fn every_snippet_is_run() {
    let run = ["c", "cpp", "python", "sh"];
    let taken = ["{literalinclude}", "{figure}", "{csv-table}", "{toctree}", "{eval-rst}"];
    for (page, text) in pages() {
        for line in text.split("\n```").skip(1).step_by(2) {
            let kind = line.split([' ', '\n']).next().unwrap_or("");
            assert!(run.contains(&kind) || taken.contains(&kind), "{page}: {kind:?}");
        }
    }
}

#[test]
fn it_builds_without_a_dead_link() {
    let tools = repository().join("target/tools/docs"); // .ci/run puts them there
    if !tools.join("sphinx").is_dir() {
        return skip("the documentation", "Sphinx is not installed");
    }
    let out: PathBuf = work_folder("docs-html");
    let said = run(command(repository().join("examples/docs/build"))
        .arg(&out)
        .env("XSERV_LIBRARY", library_folder().join("libxserv.so")));
    assert!(said.stdout.contains(" links in "), "{}", said.stdout);
    let reference = fs::read_to_string(out.join("generated/xserv_c.html")).expect("a page");
    let header = fs::read_to_string(repository().join("include/xserv.h")).expect("xserv.h");
    let contents = header.split("* Contents").nth(1).and_then(|rest| rest.split("*/").next());
    let mut functions = 0;
    for name in contents.expect("a list").split_whitespace() {
        if name.starts_with("xserv_") {
            let anchor = format!("id=\"c-{}\"", name.replace('_', "-"));
            assert!(reference.contains(&anchor), "the reference has no {name}");
            functions += 1;
        }
    }
    assert!(functions > 50, "{functions} functions");
}
