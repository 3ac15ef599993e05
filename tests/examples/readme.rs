//! Runs what README.md says: its programs, its commands, its links.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use crate::support::*;

fn readme() -> String {
    fs::read_to_string(repository().join("README.md")).expect("README.md")
}

/// Returns the texts of the code blocks of a language.
fn blocks(language: &str) -> Vec<String> {
    code_blocks(&readme(), language)
}

fn only_block(language: &str) -> String {
    let [block] = <[String; 1]>::try_from(blocks(language)).expect("one block of the language");
    block
}

#[test]
fn the_c_programs_run() {
    let folder = work_folder("readme-c");
    for (number, block) in blocks("c").iter().enumerate() {
        let (source, program) =
            (folder.join(format!("{number}.c")), folder.join(number.to_string()));
        fs::write(&source, block).expect("a source file");
        build_program(&cc(), &[source], &["-std=c11"], &program);
        let said = run(command(program).env("LD_LIBRARY_PATH", staged_library())).stdout;
        assert!(!said.trim().is_empty());
    }
}

#[test]
fn the_cpp_program_runs() {
    let folder = work_folder("readme-cpp");
    let source = folder.join("hello.cpp");
    fs::write(&source, only_block("cpp")).expect("a source file");
    build_program(&cxx(), &[source], &["-std=c++17"], &folder.join("hello"));
    let said = run(command(folder.join("hello")).env("LD_LIBRARY_PATH", staged_library())).stdout;
    assert!(said.contains(" tokens per second"), "{said}");
}

#[test]
fn the_python_programs_run() {
    let programs = blocks("python");
    assert!(programs.len() > 1);
    for program in programs {
        let said = run(command("python3")
            .arg("-c")
            .arg(program)
            .env("PYTHONPATH", "examples/python")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("XSERV_LIBRARY", library_folder().join("libxserv.so")));
        assert!(!said.stdout.trim().is_empty());
    }
}

/// All commands, in their order, in one shell whose folder is like the repository's. Left out are the
/// command that runs this test, and the download, for which the small model stands in.
///
/// The scripts follow the links to the repository itself.
#[test]
fn the_commands_run() {
    let Some(_) = cmake() else { return };
    if !have("pkg-config") {
        return skip("the_commands_run", "pkg-config is not installed");
    }
    let folder = work_folder("readme-commands");
    let root = folder.join("repository");
    fs::create_dir(&root).expect("a folder");
    for entry in fs::read_dir(repository()).expect("the repository") {
        let entry = entry.expect("an entry");
        symlink(entry.path(), root.join(entry.file_name())).expect("a link");
    }
    fs::write(root.join("hello.c"), blocks("c").remove(0)).expect("hello.c");
    symlink(model(), root.join("Qwen3-0.6B")).expect("a model");
    let cached = folder.join("cache/models--Qwen--Qwen3-0.6B");
    fs::create_dir_all(cached.join("refs")).expect("a cache");
    fs::create_dir_all(cached.join("snapshots/0")).expect("a cache");
    fs::write(cached.join("refs/main"), "0").expect("a cache");
    for file in fs::read_dir(model()).expect("the model") {
        let file = file.expect("a file");
        fs::copy(file.path(), cached.join("snapshots/0").join(file.file_name())).expect("a copy");
    }

    let mut script = String::from("set -e\n");
    let mut left_out = Vec::new();
    for line in blocks("sh").iter().flat_map(|block| block.lines()) {
        if line == "./tests/run"
            || line.starts_with("pip install")
            || line.starts_with("hf download")
        {
            left_out.push(line.to_string());
        } else {
            script += &format!("echo '$ {}'\n{line}\n", line.replace('\'', "'\\''"));
        }
    }
    assert_eq!(left_out.len(), 3, "{left_out:?}");
    script += "target/examples-c/chat Qwen/Qwen3-0.6B\n";

    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let elsewhere = |variable: &str, default: &str| {
        std::env::var_os(variable).map_or_else(|| home.join(default), PathBuf::from)
    };
    let mut shell: Command = command("bash");
    shell
        .current_dir(&root)
        .arg("-c")
        .arg(&script)
        .env("RUSTUP_HOME", elsewhere("RUSTUP_HOME", ".rustup"))
        .env("CARGO_HOME", elsewhere("CARGO_HOME", ".cargo"))
        .env("HF_HUB_CACHE", folder.join("cache"))
        .env("HOME", &folder);
    let said = run_with_input(&mut shell, "Hello!\n").stdout;
    fs::remove_dir_all(repository().join("target/qwen3-0.6b")).expect("the random model");
    assert!(said.contains("$ ./hello\n"), "{said}");
    assert!(said.contains("| tg32_tok_s "), "{said}");
}

#[test]
fn the_suite_is_what_continuous_integration_runs() {
    let ci = fs::read_to_string(repository().join(".ci/run")).expect(".ci/run");
    let last = ci.lines().rfind(|line| line.starts_with("check ")).expect("a check");
    let command = last.rsplit(' ').next().expect("a command");
    assert!(blocks("sh").contains(&format!("{command}\n")), "README.md does not have {command}");
}

#[test]
fn the_links_lead_somewhere() {
    let text = readme();
    let prose: String = text.split("\n```").step_by(2).collect();
    let targets: Vec<&str> =
        prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(targets.len() > 8);
    for target in targets.into_iter().filter(|target| !target.contains("://")) {
        assert!(repository().join(target).exists(), "README.md links to {target}");
    }
}

#[test]
fn the_versions_agree() {
    let changes = fs::read_to_string(repository().join("CHANGELOG.md")).expect("CHANGELOG.md");
    let is_version = |line: &&str| line.starts_with("## ") && *line != "## Unreleased";
    let newest = changes.lines().find(is_version).expect("a version");
    let version = env!("CARGO_PKG_VERSION");
    // A version in development has no heading of its own yet.
    match version.strip_suffix("-dev") {
        Some(_) => assert!(changes.lines().any(|line| line == "## Unreleased")),
        None => assert_eq!(newest, format!("## {version}")),
    }
    // Python spells it in its own way (PEP 440).
    let line = format!("__version__ = \"{}\"", version.replace("-dev", ".dev0"));
    let file = "examples/python/xserv/__init__.py";
    let text = fs::read_to_string(repository().join(file)).expect(file);
    assert!(text.lines().any(|found| found == line), "{file} has no line {line}");
}
