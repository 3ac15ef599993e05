//! The corpus of bad input by class: how many cases there are of each, and what runs them.

use crate::hostile_child::count_cases;

/// The classes, how many cases each must have, and its groups.
const CLASSES: [(&str, usize, &[&str]); 13] = [
    (
        "safetensors header and body",
        220,
        &["weights", "weights that are no numbers", "more weights"],
    ),
    ("kept weights", 200, &["kept weights"]),
    ("shard index", 60, &["indexes", "more indexes"]),
    ("config.json", 250, &["configurations", "generation defaults", "config fields"]),
    (
        "tokenizer.json",
        300,
        &["tokenizers", "tokenizer settings", "slow tokenizers", "tokenizer fields"],
    ),
    ("chat template", 200, &["templates", "more templates"]),
    ("C ABI arguments", 800, &["handles", "pointers and numbers", "texts at the end of a page"]),
    ("sampling parameters", 200, &["sampling", "more sampling"]),
    (
        "constraints, tools and response templates",
        70,
        &["constraints", "tools", "response templates"],
    ),
    ("prompts", 200, &["prompts", "conversations", "more prompts"]),
    (
        "file system",
        80,
        &[
            "things in place of files",
            "changes during the load",
            "paths",
            "reads that fail",
            "little memory for files",
        ],
    ),
    (
        "environment",
        60,
        &[
            "little memory",
            "no descriptors",
            "closed standard files",
            "nothing is changed",
            "system calls",
            "hosts",
        ],
    ),
    ("kernel entry points", 500, &["tensors", "overlaps", "sizes and strides"]),
];

/// Runs of groups that are one case by themselves: the environments, and the steps of memory that
/// `hostile_surroundings` takes away.
fn runs(group: &str) -> usize {
    match group {
        "hosts" => crate::corpus_text::NUM_HOSTS,
        "little memory" => crate::hostile_surroundings::NUM_STEPS,
        _ => 1,
    }
}

/// Counts the cases, holds each class to the number that it must have, and the page to the numbers.
#[test]
fn every_class_has_its_cases() {
    let page = std::fs::read_to_string(crate::client::root().join("tests/TRUST.md")).unwrap();
    let (mut total, mut rows) = (0, Vec::new());
    for (class, least, groups) in CLASSES {
        let count: usize = groups.iter().map(|group| count_cases(group) * runs(group)).sum();
        println!("{class}: {count}");
        assert!(count >= least, "{class} has {count} cases, not {least}");
        total += count;
        rows.push(format!("| {class} | {count} |"));
    }
    rows.push(format!("| all | {total} |"));
    let missing: Vec<&String> = rows.iter().filter(|row| !page.contains(*row)).collect();
    assert!(missing.is_empty(), "tests/TRUST.md does not have these rows:\n{missing:#?}");
}
