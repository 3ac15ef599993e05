//! `src/guide.md`, which tells how to add things: the files that it names are there.

use std::path::Path;

/// Returns the words between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Returns the paths of the project that a text names.
fn paths(text: &str) -> Vec<&str> {
    let is_path = |word: &&str| {
        ["src/", "csrc/", "tests/", "include/", "examples/"].iter().any(|top| word.starts_with(top))
            && !word.contains(char::is_whitespace)
    };
    quoted(text).into_iter().filter(is_path).collect()
}

#[test]
fn every_file_that_the_guide_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_to_string(root.join("src/guide.md")).unwrap();
    let named = paths(&guide);
    assert!(named.len() > 30, "only {} paths found", named.len());
    // A placeholder stands for something that is there for an operator, or for a family.
    let known = ["softmax", "qwen3"];
    let is_there =
        |path: &&str| known.iter().any(|name| root.join(path.replace("NAME", name)).exists());
    let missing: Vec<&str> = named.into_iter().filter(|path| !is_there(path)).collect();
    assert!(missing.is_empty(), "src/guide.md names what is not there: {missing:?}");
}

#[test]
fn the_finder_sees_paths_alone() {
    let text = "`src/lib.rs` and `cargo test --test abi`, `tests/no such`, `NAME`";
    assert_eq!(paths(text), ["src/lib.rs"]);
}
