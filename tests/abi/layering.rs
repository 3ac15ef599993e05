//! The layers of `src/lib.rs`: each module uses only what is below it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a layer may name after `crate::`, beside itself.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("error", &[] as &[&str]),
        ("panic_guard", &["error"]),
        ("thread_state", &[]),
        ("memory", &["error"]),
        ("backend", &["error", "panic_guard", "thread_state", "memory"]),
        ("ops", &["error", "panic_guard", "thread_state", "memory", "backend"]),
        ("model", &["error", "panic_guard", "thread_state", "memory", "backend", "ops"]),
        ("text", &["error", "panic_guard", "thread_state"]),
        (
            "engine",
            &["error", "panic_guard", "thread_state", "memory", "backend", "ops", "model", "text"],
        ),
        (
            "ffi",
            &["error", "panic_guard", "thread_state", "memory", "backend", "ops", "text", "engine"],
        ),
    ])
}

fn rust_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The modules that a source names after `crate::`, comments aside; `crate::{a, b}` counts too.
fn used(source: &str) -> Vec<String> {
    let code: Vec<&str> =
        source.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let list = match rest.strip_prefix('{') {
            Some(inside) => inside.split('}').next().unwrap_or(""),
            None => rest,
        };
        let parts: Vec<&str> =
            if rest.starts_with('{') { list.split(',').collect() } else { vec![list] };
        for part in parts {
            let name: String =
                part.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            names.push(name);
        }
    }
    names
}

#[test]
fn no_arrow_points_upwards() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed = allowed();
    let mut files = Vec::new();
    rust_files(&src, &mut files);
    assert!(files.len() > 20, "only {} source files found", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&src).unwrap();
        let layer = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if layer == "lib" {
            continue;
        }
        let below = allowed
            .get(layer)
            .unwrap_or_else(|| panic!("{}: a layer that this test does not know", file.display()));
        for name in used(&std::fs::read_to_string(&file).unwrap()) {
            if name != layer && !below.contains(&name.as_str()) {
                wrong.push(format!("{}: crate::{name}", relative.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point upwards:\n{}", wrong.join("\n"));
}

#[test]
fn the_finder_sees_what_it_must() {
    let source = "use crate::model::X;\nuse crate::{ops::Y, ffi};\n// crate::engine\nlet a = crate::text::Z;";
    assert_eq!(used(source), ["model", "ops", "ffi", "text"]);
}

#[test]
fn only_the_fenced_layers_are_unsafe() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&src, &mut files);
    for file in files {
        let relative = file.strip_prefix(&src).unwrap().to_str().unwrap().to_string();
        let fenced =
            ["ffi/", "memory/", "backend/", "ops/"].iter().any(|p| relative.starts_with(p));
        // Signal masks and floating-point modes, and one mapping of a file.
        let exceptions = ["thread_state.rs", "model/load.rs"];
        if fenced || exceptions.contains(&relative.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.lines().map(|l| l.split("//").next().unwrap_or(""));
        let count = code.filter(|l| l.contains("unsafe ")).count();
        assert_eq!(count, 0, "{relative} has unsafe code");
    }
}
