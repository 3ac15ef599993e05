//! `tests/TRUST.md`: what it names is there.

use std::collections::BTreeSet;

use crate::client::root;

fn page() -> String {
    std::fs::read_to_string(root().join("tests/TRUST.md")).unwrap()
}

/// Returns the words between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the tests that a text names: `target::module::function`.
fn tests(text: &str) -> BTreeSet<&str> {
    let is_test = |name: &&str| {
        let parts: Vec<&str> = name.split("::").collect();
        let is_word = |part: &&str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        parts.len() == 3 && parts.iter().all(is_word)
    };
    quoted(text).filter(is_test).collect()
}

/// Whether a test has this name.
fn exists(name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    let [target, module, function] = parts[..] else { return false };
    let file = root().join("tests").join(target).join(format!("{module}.rs"));
    let text = std::fs::read_to_string(file).unwrap_or_default();
    // Attributes come before the function, with nothing but such lines between.
    let mut is_marked = false;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with(&format!("fn {function}(")) {
            return is_marked;
        }
        is_marked = line == "#[test]" || is_marked && line.starts_with("#[");
    }
    false
}

#[test]
fn every_test_that_the_page_names_is_there() {
    let page = page();
    let named = tests(&page);
    assert!(named.len() > 60, "only {} tests are named", named.len());
    let missing: Vec<&&str> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "tests/TRUST.md names what is not there: {missing:?}");
}

#[test]
fn a_test_that_is_not_there_is_noticed() {
    let text =
        "`trust::page::a_test_that_is_not_there_is_noticed`, `trust::page::quoted` and `a::b`";
    let named: Vec<&str> = tests(text).into_iter().collect();
    assert_eq!(named.len(), 2);
    assert!(exists(named[0]));
    assert!(!exists(named[1]), "a function that is no test");
    assert!(!exists("trust::nowhere::nothing"));
}

#[test]
fn every_promise_has_a_test() {
    let page = page();
    let (_, promises) = page.split_once("| The header says | Held by |").expect("the table");
    let rows: Vec<&str> = promises.lines().filter(|line| line.starts_with("| ")).collect();
    assert!(rows.len() > 30, "{} promises", rows.len());
    for row in rows {
        assert!(!tests(row).is_empty(), "no test: {row}");
    }
}

#[test]
fn every_file_that_the_page_names_is_there() {
    let page = page();
    let is_path = |word: &&str| {
        ["tests/", ".ci/"].iter().any(|top| word.starts_with(top))
            && !word.contains(char::is_whitespace)
    };
    for path in quoted(&page).filter(is_path) {
        assert!(root().join(path).exists(), "tests/TRUST.md names {path}");
    }
}
