//! Finding folders: paths, and repositories in a made-up Hugging Face cache.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use xserv::error::{Error, ErrorKind};
use xserv::model::folder::{check_file_name, io_error, is_lasting, resolve_with, Folder};
use xserv::model::Model;

use crate::files::{Store, TempDir, TestModel};

const HASH: &str = "0123456789abcdef0123456789abcdef01234567";

/// Returns a cache with the repository `acme/tiny`, its files links into `blobs` as downloads leave
/// them: the weights in the blobs that all repositories share, the configuration in the
/// repository's own.
fn cache() -> TempDir {
    let dir = TempDir::new();
    let model = TestModel::qwen3(1).write(Store::F32);
    let file = |name: &str| std::fs::read(model.path().join(name)).expect("a file");
    dir.write("hub/models--acme--tiny/refs/main", HASH);
    dir.write("hub/models--acme--tiny/blobs/aaa", file("config.json"));
    dir.write("hub/blobs/bb/bbb", file("model.safetensors"));
    let repo = dir.path().join("hub/models--acme--tiny");
    symlink("../../blobs/bb/bbb", repo.join("blobs/bbb")).expect("link");
    let snapshot = repo.join("snapshots").join(HASH);
    std::fs::create_dir_all(&snapshot).expect("folder");
    symlink("../../blobs/aaa", snapshot.join("config.json")).expect("link");
    symlink("../../blobs/bbb", snapshot.join("model.safetensors")).expect("link");
    dir
}

fn find(path: &str, variables: &[(&str, &str)]) -> Result<PathBuf, Error> {
    resolve_with(path, &|name| {
        variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
    })
}

#[test]
fn a_repository_is_found_by_each_variable() {
    let dir = cache();
    let hub = format!("{}/hub", dir.str());
    let snapshot = dir.path().join("hub/models--acme--tiny/snapshots").join(HASH);
    assert_eq!(find("acme/tiny", &[("HF_HUB_CACHE", &hub)]).expect("found"), snapshot);
    assert_eq!(find("acme/tiny", &[("HUGGINGFACE_HUB_CACHE", &hub)]).expect("found"), snapshot);
    assert_eq!(find("acme/tiny", &[("HF_HOME", dir.str())]).expect("found"), snapshot);
    assert_eq!(
        find("acme/tiny", &[("HF_HOME", "~"), ("HOME", dir.str())]).expect("found"),
        snapshot
    );
    // The first that is set decides, as in the Hugging Face libraries; an empty one is not set.
    let elsewhere = [("HF_HUB_CACHE", "/nowhere"), ("HF_HOME", dir.str())];
    assert_eq!(find("acme/tiny", &elsewhere).expect_err("none").kind(), ErrorKind::NotFound);
    let empty = [("HF_HUB_CACHE", ""), ("HF_HOME", dir.str())];
    assert_eq!(find("acme/tiny", &empty).expect("found"), snapshot);

    let home = TempDir::new();
    std::fs::create_dir_all(home.path().join(".cache/huggingface")).expect("folder");
    symlink(&hub, home.path().join(".cache/huggingface/hub")).expect("link");
    assert!(find("acme/tiny", &[("HOME", home.str())]).is_ok());
    let xdg = format!("{}/.cache", home.str());
    assert!(find("acme/tiny", &[("XDG_CACHE_HOME", &xdg)]).is_ok());

    // And what was found can be opened: its links lead into the blobs.
    Model::open(snapshot.to_str().expect("UTF-8")).expect("a good model");
}

#[test]
fn links_of_a_snapshot_may_lead_to_blobs_only() {
    let dir = cache();
    dir.write("hub/models--other--model/blobs/ccc", "{}");
    dir.write("secret", "{}");
    let snapshot = dir.path().join("hub/models--acme--tiny/snapshots").join(HASH);
    for target in
        ["../../../models--other--model/blobs/ccc", "../../../../secret", "../../refs/main"]
    {
        let link = snapshot.join("tokenizer.json");
        let _ = std::fs::remove_file(&link);
        symlink(target, &link).expect("link");
        let folder = Folder::open(&snapshot).expect("a folder");
        let error = folder.read_small_file("tokenizer.json", 100).expect_err("must be refused");
        assert!(error.message().contains("leads out"), "{target}: {error}");
    }
}

#[test]
fn what_is_not_in_the_cache() {
    let dir = cache();
    let home = [("HF_HOME", dir.str())];
    for path in [
        "acme/other",
        "tiny",
        "acme--tiny",
        "acme/tiny/x",
        "../hub",
        "acme/..",
        "/acme/tiny",
        "-a/b",
        "a b/c",
        "acme/tiny ",
    ] {
        let error = find(path, &home).expect_err(path);
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.message().contains(path.trim_end()), "{error}");
    }
    assert_eq!(find("acme/tiny", &[]).expect_err("no cache").kind(), ErrorKind::NotFound);
    for reference in ["", "..", "../../x", "/etc", "beef", "a\0b", &"a".repeat(300)] {
        dir.write("hub/models--acme--tiny/refs/main", reference);
        assert!(find("acme/tiny", &home).is_err(), "{reference}");
    }
    std::fs::remove_file(dir.path().join("hub/models--acme--tiny/refs/main")).expect("remove");
    let error = find("acme/tiny", &home).expect_err("no ref");
    assert!(error.message().contains("refs/main"), "{error}");
    assert!(error.message().contains("`hf download acme/tiny`"), "{error}");
    let error = find("acme/other", &home).expect_err("another");
    assert!(error.message().ends_with("; `hf download acme/other` fetches it"), "{error}");
}

/// Paths that are a model, but not a folder that can be read.
#[test]
fn other_formats_are_named() {
    let dir = TempDir::new();
    dir.write("tiny.Q4_K_M.GGUF", "GGUF");
    let error = find(&format!("{}/tiny.Q4_K_M.GGUF", dir.str()), &[]).expect_err("a file");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("is a GGUF file"), "{error}");
    let unsupported = ErrorKind::Unsupported;
    for (files, kind, what) in [
        (&["model-00001.gguf", "README.md"][..], unsupported, "model-00001.gguf: GGUF"),
        (&["adapter_config.json", "adapter_model.safetensors"], unsupported, "adapters (LoRA)"),
        (&["params.json", "consolidated.safetensors"], unsupported, "params.json"),
        (&["model_index.json"], unsupported, "model_index.json"),
        (&["pytorch_model.bin"], unsupported, "pytorch_model.bin"),
        (&["model.safetensors"], ErrorKind::NotFound, " has no config.json"),
        (&[], ErrorKind::NotFound, "it is empty"),
    ] {
        let dir = TempDir::new();
        files.iter().for_each(|file| dir.write(file, "{}"));
        let error = Model::open(dir.str()).expect_err(what);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(what), "{error}");
        assert!(error.message().contains(&format!("the folder {} has no config", dir.str())));
    }
}

/// A clone without Git LFS holds a note in place of each large file.
#[test]
fn git_lfs_pointers_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\n\
        oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    for name in ["config.json", "model.safetensors"] {
        let dir = TestModel::qwen3(1).write(Store::F32);
        dir.write(name, pointer);
        let error = Model::open(dir.str()).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::InvalidFile);
        let said = format!("{name} is a Git LFS pointer, not the file itself: run `git lfs pull`");
        assert!(error.message().starts_with(&said), "{error}");
    }
}

#[test]
fn paths_that_are_no_folders() {
    let dir = TempDir::new();
    dir.write("config.json", "{}");
    let long = "x/".repeat(5000);
    for (path, kind) in [
        ("", ErrorKind::InvalidArgument),
        ("a\0b", ErrorKind::InvalidArgument),
        ("/nowhere/at/all", ErrorKind::NotFound),
        (&format!("{}/config.json", dir.str()), ErrorKind::InvalidArgument),
        ("/dev/null", ErrorKind::InvalidArgument),
        (&long, ErrorKind::Io),
    ] {
        let error = find(path, &[]).expect_err(path);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().len() < 300, "{error}");
    }
    let empty = TempDir::new();
    let error = Model::open(empty.str()).expect_err("empty");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("config.json"), "{error}");
}

#[test]
fn small_files_stay_small() {
    let dir = TempDir::new();
    dir.write("exact", [7; 100]);
    dir.write("larger", [7; 101]);
    dir.write("empty", "");
    let folder = Folder::open(dir.path()).expect("a folder");
    assert_eq!(folder.read_small_file("exact", 100).expect("fits"), [7; 100]);
    let error = folder.read_small_file("larger", 100).expect_err("too large");
    assert!(error.message().contains("larger") && error.message().contains("100"), "{error}");
    assert!(folder.read_small_file("empty", 100).expect("empty").is_empty());
    assert_eq!(folder.read_optional_file("absent", 100).expect("absent"), None);
    assert!(folder.read_optional_file("../exact", 100).expect("no plain name").is_none());
    let sparse = std::fs::File::create(dir.path().join("sparse")).expect("create");
    sparse.set_len(1 << 40).expect("a sparse file");
    assert!(folder.read_small_file("sparse", 1 << 20).is_err());
    for name in ["config.json", "a b", "..a", "a..", "模型"] {
        check_file_name(name).expect(name);
    }
}

/// A file that the system fails to look up is not taken for absent, and lack of memory is reported
/// as such.
#[test]
fn failures_are_told_from_missing_files() {
    let dir = TempDir::new();
    dir.write("config.json", "{}");
    let longest = libc::PATH_MAX as usize - 1 - "config.json".len();
    let path = format!("{}{}", dir.str(), "/".repeat(longest - dir.str().len()));
    let folder = Folder::open(Path::new(&path)).expect("a folder");
    assert!(folder.contains("config.json").expect("a short name"));
    assert!(!folder.contains("a.json").expect("a short name"));
    assert_eq!(folder.contains("chat_template.jinja").unwrap_err().kind(), ErrorKind::Io);
    let error = folder.read_optional_file("generation_config.json", 100).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");

    for (code, kind) in [
        (libc::ENOENT, ErrorKind::NotFound),
        (libc::ENOTDIR, ErrorKind::NotFound),
        (libc::ENOMEM, ErrorKind::OutOfMemory),
        (libc::ELOOP, ErrorKind::InvalidFile),
        (libc::EIO, ErrorKind::Io),
        (libc::EMFILE, ErrorKind::Io),
        (libc::EACCES, ErrorKind::Io),
    ] {
        let error = io_error("config.json", &std::io::Error::from_raw_os_error(code));
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains("config.json"), "{error}");
        let is_about_files = matches!(kind, ErrorKind::NotFound | ErrorKind::InvalidFile);
        assert_eq!(is_lasting(kind), is_about_files, "{kind:?}");
    }
}
