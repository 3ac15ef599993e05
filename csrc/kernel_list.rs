//! The part of the build script that keeps the list of kernels in `src/backend/cuda/kernels.rs`
//! equal to what was compiled, so that the library can launch by constants.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// Everything from this line of the file on is generated; what stands before it is kept.
const BEGIN: &str = "kernels! {\n";

/// Targets that together have every kernel. A build for fewer of them cannot tell that a listed
/// kernel is gone: some kernels exist only for the chip that has their instructions.
const COMPLETE_TARGETS: [&str; 1] = ["90a"];

/// The suffixes by dtype of the names of kernels.
const DTYPES: [&str; 3] = ["_f32", "_f16", "_bf16"];

/// The words of ptxas with `-v` before it compiles a kernel.
const COMPILING: &str = "Compiling entry function '";

/// Returns the kernels that ptxas compiled according to its output, each once, in order.
pub fn names_in(output: &str) -> BTreeSet<String> {
    let names = output.lines().filter_map(|line| line.split_once(COMPILING)?.1.split('\'').next());
    names.map(str::to_string).collect()
}

/// Compares the list with the kernels of each source (`attention/flash`), or with `XSERV_BLESS=1`
/// rewrites it if the build is for all targets that it takes. `targets` are such as `90a` and `ptx90`.
pub fn check(list: &Path, compiled: &BTreeMap<String, BTreeSet<String>>, targets: &[&str]) {
    let text = std::fs::read_to_string(list).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    let Some((head, old)) = text.split_once(BEGIN) else {
        panic!("{} has no line {BEGIN:?}", list.display());
    };
    one_source_each(compiled);
    let is_complete = COMPLETE_TARGETS.iter().all(|target| targets.contains(target));
    let new = body(compiled);
    if is_complete && std::env::var("XSERV_BLESS").is_ok_and(|value| value == "1") {
        if new != old {
            std::fs::write(list, format!("{head}{BEGIN}{new}"))
                .unwrap_or_else(|e| panic!("{}: {e}", list.display()));
        }
        return;
    }
    let listed = lines_of(old);
    let found = lines_of(&new);
    // Without all targets a family may lack members, so single names are compared.
    let (listed_names, found_names) = (expand(&listed), expand(&found));
    let unlisted: Vec<_> = found_names.difference(&listed_names).cloned().collect();
    let gone: Vec<_> = listed_names.difference(&found_names).cloned().collect();
    let mut message = String::new();
    if !unlisted.is_empty() {
        let _ = writeln!(message, "compiled, but not listed: {}", unlisted.join(", "));
    }
    if is_complete && !gone.is_empty() {
        let _ = writeln!(message, "listed, but not compiled: {}", gone.join(", "));
    }
    if is_complete && message.is_empty() && new != old {
        message.push_str("the same kernels, but other constants or another order\n");
    }
    if !message.is_empty() {
        panic!(
            "{} is out of date:\n{message}`XSERV_BLESS=1 cargo build` for the targets {} rewrites it",
            list.display(),
            COMPLETE_TARGETS.join(",")
        );
    }
}

/// The driver finds a loaded kernel by its name alone, so no two sources may share one.
fn one_source_each(compiled: &BTreeMap<String, BTreeSet<String>>) {
    let mut source_of = BTreeMap::new();
    for (source, names) in compiled {
        for name in names {
            if let Some(other) = source_of.insert(name, source) {
                panic!("{other} and {source} both define the kernel {name}");
            }
            if !name.starts_with("xserv_") {
                panic!("the kernel {name} of {source} does not begin with xserv_");
            }
        }
    }
}

/// Returns the generated part of the file: one line a kernel or family, under its source.
fn body(compiled: &BTreeMap<String, BTreeSet<String>>) -> String {
    let mut text = String::new();
    for (source, names) in compiled {
        let _ = writeln!(text, "    {source:?} {{");
        for (stem, dtypes) in families(names) {
            let constant = stem.trim_start_matches("xserv_").to_uppercase();
            let _ = write!(text, "        {constant} {stem:?}");
            dtypes.iter().for_each(|dtype| {
                let _ = write!(text, " {dtype}");
            });
            text.push_str(";\n");
        }
        text.push_str("    }\n");
    }
    text.push_str("}\n");
    text
}

/// Kernels whose names differ in the dtype at the end only, where all or both 16-bit ones are there.
/// Others stand alone, without dtypes; so do casts, which have two.
fn families(names: &BTreeSet<String>) -> BTreeMap<String, Vec<&'static str>> {
    let without_dtype =
        |name: &str| DTYPES.iter().find_map(|dtype| name.strip_suffix(dtype)).map(str::to_string);
    let mut found = BTreeMap::new();
    for name in names {
        let stem = without_dtype(name).filter(|stem| without_dtype(stem).is_none());
        let stem = stem.as_deref();
        let has = |stem: &str, dtype: &str| names.contains(&format!("{stem}_{dtype}"));
        match stem.filter(|stem| has(stem, "f16") && has(stem, "bf16")) {
            Some(stem) if has(stem, "f32") => {
                found.insert(stem.to_string(), vec!["f32", "f16", "bf16"]);
            }
            Some(stem) => {
                found.insert(stem.to_string(), vec!["f16", "bf16"]);
            }
            None => {
                found.insert(name.clone(), Vec::new());
            }
        }
    }
    found
}

/// Returns the lines of a generated part that name kernels: the source, the stem and the dtypes.
fn lines_of(body: &str) -> Vec<(String, String, Vec<String>)> {
    let mut source = String::new();
    let mut found = Vec::new();
    for line in body.lines() {
        let words: Vec<&str> = line.trim().trim_end_matches(';').split(' ').collect();
        match words.as_slice() {
            [name, "{"] => source = name.trim_matches('"').to_string(),
            [_, stem, dtypes @ ..] => found.push((
                source.clone(),
                stem.trim_matches('"').to_string(),
                dtypes.iter().map(|dtype| dtype.to_string()).collect(),
            )),
            _ => {}
        }
    }
    found
}

/// Returns `source: name` of every kernel.
fn expand(lines: &[(String, String, Vec<String>)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (source, stem, dtypes) in lines {
        if dtypes.is_empty() {
            found.insert(format!("{source}: {stem}"));
        }
        found.extend(dtypes.iter().map(|dtype| format!("{source}: {stem}_{dtype}")));
    }
    found
}
