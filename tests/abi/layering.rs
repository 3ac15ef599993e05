//! The layers of `src/lib.rs`: each module uses only what is below it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns what a layer may name after `crate::`, beside itself.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("reserve", &[] as &[&str]),
        ("error", &["reserve"]),
        ("panic_guard", &["error"]),
        ("process", &["error"]),
        ("thread_exit", &[]),
        ("thread_state", &[]),
        ("threads", &["error", "panic_guard", "thread_state"]),
        ("memory", &["error"]),
        ("backend", &["error", "panic_guard", "process", "thread_state", "threads", "memory"]),
        (
            "ops",
            &["error", "panic_guard", "process", "thread_state", "threads", "memory", "backend"],
        ),
        (
            "model",
            &[
                "error",
                "panic_guard",
                "process",
                "thread_state",
                "threads",
                "memory",
                "backend",
                "ops",
            ],
        ),
        ("self_test", &["error", "memory", "backend", "ops"]),
        ("text", &["error", "panic_guard", "process", "thread_state", "threads"]),
        (
            "engine",
            &[
                "error",
                "panic_guard",
                "process",
                "thread_state",
                "threads",
                "memory",
                "backend",
                "ops",
                "model",
                "text",
            ],
        ),
        ("api", &["error", "memory", "engine"]),
        (
            "ffi",
            &[
                "error",
                "panic_guard",
                "process",
                "reserve",
                "thread_state",
                "threads",
                "memory",
                "backend",
                "ops",
                "self_test",
                "text",
                "engine",
            ],
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

/// Returns the modules that a source names after `crate::`, comments aside; `crate::{a, b}` counts
/// too.
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
        // Forks; the allocator; threads, their ends, signal masks, floating-point modes and cancellation;
        // and one mapping of a file.
        let exceptions = [
            "process.rs",
            "reserve.rs",
            "thread_exit.rs",
            "thread_state.rs",
            "threads.rs",
            "model/load/files.rs",
            // Rows of a matrix that threads share.
            "model/load/quantised.rs",
        ];
        if fenced || exceptions.contains(&relative.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.lines().map(|l| l.split("//").next().unwrap_or(""));
        let count = code.filter(|l| l.contains("unsafe ")).count();
        assert_eq!(count, 0, "{relative} has unsafe code");
    }
}

/// The imports between operators: the first uses something of the second. Keep the
/// list short.
const ARROWS: [(&str, &str); 25] = [
    ("argmax", "softmax"),
    ("attention", "kv_cache"),
    ("attention", "qk_norm_rope_append"),
    ("attention", "softmax"),
    ("embedding", "quantised"),
    ("experts", "embedding"),
    ("experts", "linear"),
    ("experts", "quantised"),
    ("experts", "softmax"),
    ("linear", "attention"),
    ("linear", "elementwise"),
    ("linear", "gemm"),
    ("linear", "kv_cache"),
    ("linear", "layer_norm"),
    ("linear", "qk_norm_rope_append"),
    ("linear", "quantised"),
    ("linear", "rms_norm"),
    ("linear", "silu_mul"),
    ("qk_norm_rope_append", "kv_cache"),
    ("qk_norm_rope_append", "rms_norm"),
    ("qk_norm_rope_append", "rope"),
    ("quantised", "copy"),
    ("quantised", "elementwise"),
    ("sample", "top_k"),
    ("silu_mul", "activation"),
];

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the folders of `src/ops`, `common` aside.
fn operators() -> BTreeSet<String> {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let folders = std::fs::read_dir(ops).unwrap().map(|entry| entry.unwrap().path());
    let names = folders.filter(|path| path.is_dir());
    let names = names.map(|path| path.file_name().unwrap().to_str().unwrap().to_string());
    names.filter(|name| name != "common").collect()
}

/// Returns the modules that a source names after `ops::`, comments aside; `ops::{a, b}` counts too.
fn used_operators(source: &str) -> Vec<String> {
    let code: Vec<&str> =
        source.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut names = Vec::new();
    for (at, found) in code.match_indices("ops::") {
        if code[..at].ends_with(is_word) {
            continue;
        }
        let rest = &code[at + found.len()..];
        let Some(inside) = rest.strip_prefix('{') else {
            names.push(rest.chars().take_while(|&c| is_word(c)).collect());
            continue;
        };
        // From `{a::{b, c}, d}`, take the names that begin an item of the outer braces.
        let (mut depth, mut item) = (0, String::new());
        for c in inside.chars() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => names.push(std::mem::take(&mut item)),
                _ if depth == 0 => item.push(c),
                _ => {}
            }
        }
        names.push(item);
    }
    let first = |name: &String| name.trim().chars().take_while(|&c| is_word(c)).collect();
    names.iter().map(first).filter(|name: &String| !name.is_empty()).collect()
}

#[test]
fn the_finder_of_operators_sees_what_it_must() {
    let source = "use crate::ops::rope::cpu;\nuse crate::ops::{\n    gemm::{a, b}, softmax,\n};\n\
                  // crate::ops::sample\nops::linear::cpu::linear(); loops::no();\n\
                  use super::ops::top_k;";
    assert_eq!(used_operators(source), ["rope", "gemm", "softmax", "linear", "top_k"]);
}

/// Returns the sources of an operator.
fn sources(operator: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops").join(operator), &mut files);
    assert!(!files.is_empty(), "src/ops/{operator} has no sources");
    files
}

#[test]
fn operators_use_each_other_along_few_arrows() {
    let operators = operators();
    let mut found = BTreeSet::new();
    for operator in &operators {
        for name in sources(operator).iter().flat_map(|file| used_operators(&read(file))) {
            if name != *operator && operators.contains(&name) {
                found.insert((operator.clone(), name));
            }
        }
    }
    let listed: BTreeSet<(String, String)> =
        ARROWS.iter().map(|(from, to)| (from.to_string(), to.to_string())).collect();
    let new: Vec<_> = found.difference(&listed).collect();
    assert!(new.is_empty(), "imports that no list names (what several need is common): {new:?}");
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "the list may shrink, nothing imports along {gone:?}");
}

#[test]
fn what_operators_have_in_common_names_none_of_them() {
    let operators = operators();
    for file in sources("common") {
        let used = used_operators(&read(&file));
        let wrong: Vec<_> = used.iter().filter(|name| operators.contains(*name)).collect();
        assert!(wrong.is_empty(), "{} names {wrong:?}", file.display());
    }
}

/// Returns the words between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn every_operator_has_a_row_and_a_test() {
    let docs = read("src/ops/mod.rs");
    let main = read("tests/ops/main.rs");
    let header = read("include/xserv_ops.h");
    let mut rows: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in docs.lines().filter_map(|line| line.strip_prefix("//! | [`")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let name = cells[0].split('`').next().unwrap();
        assert_eq!(cells.len(), 4, "the row of {name} in src/ops/mod.rs");
        assert!(rows.insert(name, cells).is_none(), "{name} has two rows in src/ops/mod.rs");
    }
    let operators = operators();
    assert!(operators.len() > 15, "only {operators:?} found");
    let listed: BTreeSet<String> = rows.keys().map(|name| name.to_string()).collect();
    assert_eq!(listed, operators, "the rows of src/ops/mod.rs and the folders of src/ops");

    let mut in_table = BTreeSet::new();
    for (name, cells) in rows {
        // All files but the contract, which is a form where there is nothing else.
        let files = sources(name);
        let stems = files.iter().map(|file| file.file_stem().unwrap().to_str().unwrap());
        let files: BTreeSet<&str> = stems.filter(|stem| *stem != "mod").collect();
        let forms: BTreeSet<&str> = quoted(cells[1]).into_iter().filter(|f| *f != "mod").collect();
        assert_eq!(forms, files, "the forms of {name} in src/ops/mod.rs and its files");
        for function in quoted(cells[2]) {
            let is_declared = header.contains(&format!(" {function}("));
            assert!(is_declared, "{name}: {function} is not in xserv_ops.h");
            in_table.insert(function);
        }
        let tests = [format!("tests/ops/{name}.rs"), format!("tests/ops/{name}/mod.rs")];
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let test = tests.iter().find(|path| root.join(path).is_file());
        let test = test.unwrap_or_else(|| panic!("{name} has no test tests/ops/{name}.rs"));
        let told = quoted(cells[3]);
        assert_eq!(told, [test.trim_end_matches("mod.rs")], "the test of {name}");
        let is_run = main.lines().any(|line| line == format!("mod {name};"));
        assert!(is_run, "tests/ops/main.rs does not declare {name}");
    }
    let declared = header.lines().filter_map(|line| line.strip_prefix("enum xserv_status "));
    for function in declared.filter_map(|rest| rest.split('(').next()) {
        let is_operator = function.starts_with("xserv_op_");
        assert!(!is_operator || in_table.contains(function), "no row names {function}");
    }
}
