//! `model.safetensors.index.json`: split models, and names that lead elsewhere.

use std::os::unix::fs::symlink;

use serde_json::{json, Map, Value};
use xserv::error::{Error, ErrorKind};
use xserv::model::Model;

use crate::driver::{bits, load, Driver};
use crate::files::{cpu_seconds, safetensors_bytes, Store, TempDir, TestModel};

/// Returns a model split over `count` files.
fn split(model: &TestModel, count: usize) -> TempDir {
    let dir = TempDir::new();
    dir.write("config.json", model.config.to_string());
    let mut map = Map::new();
    let size = model.tensors.len().div_ceil(count);
    for (shard, tensors) in model.tensors.chunks(size).enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", shard + 1);
        dir.write(&name, safetensors_bytes(tensors, Store::F32));
        for tensor in tensors {
            map.insert(tensor.name.clone(), json!(name));
        }
    }
    write_map(&dir, &map);
    dir
}

fn write_map(dir: &TempDir, map: &Map<String, Value>) {
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    dir.write("model.safetensors.index.json", index.to_string());
}

fn read_map(dir: &TempDir) -> Map<String, Value> {
    let text = std::fs::read(dir.path().join("model.safetensors.index.json")).expect("the index");
    let index: Value = serde_json::from_slice(&text).expect("JSON");
    index["weight_map"].as_object().expect("an object").clone()
}

fn open(dir: &TempDir) -> Result<(), Error> {
    let start = cpu_seconds();
    let result = Model::open(dir.str()).map(|_| ());
    assert!(cpu_seconds() - start < 2.0, "took {} s", cpu_seconds() - start);
    result
}

#[track_caller]
fn refused(dir: &TempDir, kind: ErrorKind, named: &str) {
    let error = open(dir).expect_err("must be refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(named), "{error} does not name {named}");
    assert!(error.message().len() < 500, "{error} is no sentence");
}

#[test]
fn a_split_model_is_the_same_model() {
    let model = TestModel::qwen3(4);
    let ids = [3, 1, 4, 1, 5, 9, 2, 6];
    let logits = |dir: &TempDir| {
        let loaded = load(dir.str(), None, 2);
        let logits = Driver::new(&loaded, 2).logits(&ids, 3);
        bits(&logits)
    };
    let whole = logits(&model.write(Store::F32));
    for count in [1, 2, 3, 7] {
        assert!(logits(&split(&model, count)) == whole, "{count} files");
    }
}

#[test]
fn names_that_leave_the_folder() {
    let outside = TempDir::new();
    outside
        .write("secret.safetensors", safetensors_bytes(&TestModel::qwen3(1).tensors, Store::F32));
    let absolute = outside.path().join("secret.safetensors");
    let long = "a".repeat(4096);
    let names = [
        "..",
        ".",
        "",
        "/",
        "../secret.safetensors",
        "a/b.safetensors",
        "./a.safetensors",
        "a/../b",
        "..\\b",
        "a\0b",
        "a\nb",
        "\u{1b}[2J",
        "/dev/zero",
        "/etc/passwd",
        &long,
        absolute.to_str().expect("UTF-8"),
    ];
    for name in names {
        let dir = split(&TestModel::qwen3(1), 2);
        let mut map = read_map(&dir);
        map["model.norm.weight"] = json!(name);
        write_map(&dir, &map);
        refused(&dir, ErrorKind::InvalidFile, "not a plain file name");
    }
}

#[test]
fn things_in_the_folder_that_are_no_files_of_it() {
    let outside = TempDir::new();
    outside
        .write("secret.safetensors", safetensors_bytes(&TestModel::qwen3(1).tensors, Store::F32));
    type Case<'a> = (&'a str, &'a dyn Fn(&std::path::Path), ErrorKind, &'a str);
    let cases: [Case<'_>; 7] = [
        (
            "a link out",
            &|path| {
                symlink(outside.path().join("secret.safetensors"), path).expect("link");
            },
            ErrorKind::InvalidFile,
            "leads out",
        ),
        (
            "a link to a device",
            &|path| symlink("/dev/zero", path).expect("link"),
            ErrorKind::InvalidFile,
            "leads out",
        ),
        (
            "a link to itself",
            &|path| symlink(path, path).expect("link"),
            ErrorKind::InvalidFile,
            "circle",
        ),
        (
            "a link to nothing",
            &|path| symlink("/nowhere/at/all", path).expect("link"),
            ErrorKind::NotFound,
            "not there",
        ),
        (
            "a folder",
            &|path| std::fs::create_dir(path).expect("folder"),
            ErrorKind::InvalidFile,
            "not a regular file",
        ),
        (
            "a pipe",
            &|path| {
                let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo");
                assert!(made.success());
            },
            ErrorKind::InvalidFile,
            "not a regular file",
        ),
        ("nothing", &|_| {}, ErrorKind::NotFound, "not there"),
    ];
    for (what, make, kind, named) in cases {
        let dir = split(&TestModel::qwen3(1), 2);
        let path = dir.path().join("model-00002-of-00002.safetensors");
        std::fs::remove_file(&path).expect("remove");
        make(&path);
        let error = open(&dir).expect_err(what);
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.message().contains(named), "{what}: {error}");
        assert!(error.message().contains("model-00002-of-00002"), "{what}: {error}");
    }
}

/// Links between files of one folder are harmless and are used.
#[test]
fn a_link_within_the_folder_is_followed() {
    let dir = split(&TestModel::qwen3(1), 2);
    let path = dir.path().join("model-00002-of-00002.safetensors");
    std::fs::rename(&path, dir.path().join("other")).expect("rename");
    symlink("other", &path).expect("link");
    open(&dir).expect("a good folder");
}

#[test]
fn indexes_that_lie() {
    let model = TestModel::qwen3(1);
    let dir = split(&model, 2);
    let good = read_map(&dir);

    let mut map = good.clone();
    map.insert("model.layers.9.weight".to_owned(), json!("model-00001-of-00002.safetensors"));
    write_map(&dir, &map);
    refused(&dir, ErrorKind::InvalidFile, "model.layers.9.weight");

    // The embedding is in the first file.
    let mut map = good.clone();
    map["model.embed_tokens.weight"] = json!("model-00002-of-00002.safetensors");
    write_map(&dir, &map);
    refused(&dir, ErrorKind::InvalidFile, "model.embed_tokens.weight");

    // An index that names but one of the files lacks the other's tensors.
    let mut map = good.clone();
    map.retain(|_, file| file == "model-00001-of-00002.safetensors");
    write_map(&dir, &map);
    refused(&dir, ErrorKind::InvalidFile, "is missing");

    // A file that repeats the other's tensors, which the index does not decide between.
    dir.write("model-00002-of-00002.safetensors", safetensors_bytes(&model.tensors, Store::F32));
    let mut map = Map::new();
    map.insert("model.norm.weight".to_owned(), json!("model-00001-of-00002.safetensors"));
    let last = model.tensors.last().expect("tensors").name.clone();
    map.insert(last, json!("model-00002-of-00002.safetensors"));
    write_map(&dir, &map);
    refused(&dir, ErrorKind::InvalidFile, "more than one file");
}

#[test]
fn indexes_that_are_no_indexes() {
    let deep = "[".repeat(100_000);
    let many: Vec<String> = (0..5000).map(|i| format!("\"{i}\":\"{i}\"")).collect();
    let many = format!("{{\"weight_map\":{{{}}}}}", many.join(","));
    let cases = [
        ("", "EOF"),
        ("[]", "expected an object"),
        ("{}", "weight_map is missing"),
        ("null", "expected"),
        (deep.as_str(), "model.safetensors.index.json"),
        ("{\"weight_map\":[]}", "file names"),
        ("{\"weight_map\":{}}", "empty"),
        ("{\"weight_map\":{\"a\":1}}", "string"),
        ("{\"weight_map\":{\"a\":null}}", "string"),
        ("{\"weight_map\":{\"a\":\"b\",\"a\":\"b\"}}", "occurs twice"),
        ("{\"weight_map\":{\"a\":\"b\"},\"weight_map\":{\"a\":\"b\"}}", "occurs twice"),
        (many.as_str(), "more than 4096 files"),
        ("{\"weight_map\":{\"a\":\"b\"}}x", "trailing"),
    ];
    for (text, named) in cases {
        let dir = split(&TestModel::qwen3(1), 2);
        dir.write("model.safetensors.index.json", text);
        refused(&dir, ErrorKind::InvalidFile, named);
    }
    let dir = split(&TestModel::qwen3(1), 2);
    dir.write("model.safetensors.index.json", vec![b' '; (16 << 20) + 1]);
    refused(&dir, ErrorKind::InvalidFile, "larger than");
}
