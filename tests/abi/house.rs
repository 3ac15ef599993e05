//! Dependencies between the files of `src`: rules that the compiler does not enforce.
//!
//! * The model and the engine say what is computed, and name no kernel, no capability of a device.
//! * A family of models is named in its folder alone.
//! * Forks are noticed in one way, and threads are begun in one way.
//! * Files do not use each other in circles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Returns the Rust files below a folder, by their paths from `src` on, with their text.
fn sources(folder: &str) -> BTreeMap<String, String> {
    fn walk(folder: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
                found.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(&src().join(folder), &src(), &mut found);
    assert!(found.len() > 10, "only {} files in {folder}", found.len());
    found
}

/// Returns the lines of code before the unit tests, comments aside, with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or("")
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.split("//").next().unwrap_or("")))
}

/// Returns the words of a line, as identifiers are made of them.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Whether a word is about how a device computes something.
fn names_a_kernel(word: &str) -> bool {
    const PARTS: [&str; 7] = ["skinny", "gemv", "wgmma", "cublas", "split_kv", "mma", "flash"];
    word == "compute_capability"
        || word == "has_kernel"
        || word.starts_with("xserv_")
        || word.starts_with("is_") && word.ends_with("_faster")
        || PARTS.iter().any(|part| word.split('_').any(|piece| piece == *part) || word == *part)
}

#[test]
fn the_model_and_the_engine_name_no_kernel() {
    let mut wrong = Vec::new();
    for folder in ["model", "engine"] {
        for (file, text) in sources(folder) {
            for (number, line) in code(&text) {
                let found = words(line).filter(|word| names_a_kernel(word));
                wrong.extend(found.map(|word| format!("{file}:{number}: {word}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for word in ["has_linear_skinny", "is_prefill_faster", "compute_capability", "linear_gemv"] {
        assert!(names_a_kernel(word), "{word}");
    }
    assert!(!names_a_kernel("attend_new_tokens"));
}

#[test]
fn processes_are_not_told_by_their_ids() {
    // A forked child in a namespace of its own can have the id of its parent: see src/process.rs.
    let mut wrong = Vec::new();
    for (file, text) in sources("") {
        for (number, line) in code(&text) {
            if line.contains("process::id") || line.contains("getpid") {
                wrong.push(format!("{file}:{number}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn threads_are_begun_in_one_way() {
    // That way reports lack of memory as an error, and does not leave the stack size to the
    // environment.
    let mut wrong = Vec::new();
    for (file, text) in sources("").iter().filter(|(file, _)| !file.starts_with("thread")) {
        for (number, line) in code(text) {
            if ["thread::Builder", "thread::spawn", "scope.spawn"]
                .iter()
                .any(|way| line.contains(way))
            {
                wrong.push(format!("{file}:{number}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_family_is_named_in_its_folder_alone() {
    let names = ["qwen", "gpt2", "llama", "mistral", "mixtral"];
    // Words of config.json: a kind of rotary scaling, and a field that is refused.
    let spellings = ["\"llama3\"", "llama_4_scaling_beta"];
    let mut wrong = Vec::new();
    for (file, text) in sources("") {
        if file.starts_with("model/decoder/family/") {
            continue;
        }
        for (number, line) in code(&text) {
            let mut lower = line.to_lowercase();
            spellings.iter().for_each(|spelling| lower = lower.replace(spelling, ""));
            let found = names.iter().filter(|name| lower.contains(**name));
            wrong.extend(found.map(|name| format!("{file}:{number}: {name}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the statements at the outermost level that begin with `use`, as paths from `crate` on,
/// without those that only hand on what another file defines.
fn uses(module: &[&str], text: &str) -> BTreeSet<String> {
    let code: Vec<&str> = code(text).map(|(_, line)| line).collect();
    let code = code.join("\n");
    let mut found = BTreeSet::new();
    for statement in format!("\n{code}").split("\nuse ").skip(1) {
        let statement: String =
            statement.split(';').next().unwrap_or("").split_whitespace().collect();
        leaves(&statement, "", &mut |path| {
            let mut base: Vec<&str> = module.to_vec();
            let mut rest: Vec<&str> = path.split("::").collect();
            match rest.first() {
                Some(&"crate") => base.clear(),
                Some(&"self") => {}
                Some(&"super") => {
                    while rest.get(1) == Some(&"super") {
                        base.pop();
                        rest.remove(0);
                    }
                    base.pop();
                }
                _ => return,
            }
            rest.remove(0);
            base.extend(rest.into_iter().filter(|part| *part != "self"));
            found.insert(base.join("::"));
        });
    }
    found
}

/// Calls `give` with every path of a `use` tree.
fn leaves(tree: &str, before: &str, give: &mut dyn FnMut(&str)) {
    let Some((head, inside)) = tree.split_once('{') else {
        return give(&format!("{before}{tree}"));
    };
    let inside = inside.strip_suffix('}').unwrap_or(inside);
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if start < at {
                    leaves(&inside[start..at], &format!("{before}{head}"), give);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// Returns the module that a file is.
fn module_of(file: &str) -> Vec<&str> {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').filter(|part| *part != "lib").collect()
}

/// Which files each file uses.
fn arrows(files: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let by_module: BTreeMap<String, &str> =
        files.keys().map(|file| (module_of(file).join("::"), file.as_str())).collect();
    let resolve = |path: &str| {
        let mut parts: Vec<&str> = path.split("::").collect();
        while !parts.is_empty() {
            if let Some(file) = by_module.get(&parts.join("::")) {
                return Some(*file);
            }
            parts.pop();
        }
        None
    };
    let used = |file: &String, text: &String| {
        let paths = uses(&module_of(file), text);
        let found: BTreeSet<&str> = paths.iter().filter_map(|path| resolve(path)).collect();
        found.into_iter().filter(|other| *other != file).collect()
    };
    files.iter().map(|(file, text)| (file.as_str(), used(file, text))).collect()
}

/// All files that can be reached from a file along the arrows.
fn reach<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        for other in arrows.get(file).into_iter().flatten() {
            if found.insert(*other) {
                next.push(other);
            }
        }
    }
    found
}

/// Returns the sets of files that all use each other, directly or not.
fn circles(files: &BTreeMap<String, String>) -> BTreeSet<Vec<&str>> {
    let arrows = arrows(files);
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        arrows.keys().map(|file| (*file, reach(&arrows, file))).collect();
    let mut found = BTreeSet::new();
    for (file, others) in &reached {
        let circle: Vec<&str> = others
            .iter()
            .filter(|other| reached.get(**other).is_some_and(|back| back.contains(file)))
            .copied()
            .collect();
        if circle.len() > 1 {
            found.insert(circle);
        }
    }
    found
}

#[test]
fn files_use_each_other_in_no_circle() {
    let files = sources("");
    let found = circles(&files);
    assert!(found.is_empty(), "circles: {found:#?}");
}

#[test]
fn a_circle_is_seen() {
    let file = |text: &str| text.to_string();
    let files = BTreeMap::from([
        ("a/mod.rs".to_string(), file("pub use self::b::X;\npub struct Y;")),
        (
            "a/b.rs".to_string(),
            file("use super::c::{self, Z};\nuse std::fmt;\nmod tests {\n    use super::d;\n}"),
        ),
        ("a/c.rs".to_string(), file("use crate::{a::d::W, error};")),
        (
            "a/d.rs".to_string(),
            file("use super::b::X; // use super::Y\n#[cfg(test)]\nmod tests {\nuse super::Y;"),
        ),
    ]);
    assert_eq!(circles(&files), BTreeSet::from([vec!["a/b.rs", "a/c.rs", "a/d.rs"]]));
}
