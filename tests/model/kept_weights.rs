//! Quantised weights that are kept in a file: the same numbers as without it, or a refusal.

use std::fs::{File, FileTimes};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use safetensors::SafeTensors;
use serde_json::{json, Value};
use xserv::backend::cpu::CpuBackend;
use xserv::error::{Error, ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::{LoadOptions, Model, WeightStorage};
use xserv::ops::quantised::{quantise_row, RowOut};

use crate::driver::{bits, cuda_context, Driver};
use crate::files::{raw_safetensors, Random, Store, TempDir, TestModel};
use crate::quantised_at_load::{models, open_both, AS_STORED, CHOICES, INT4, INT8};
use crate::tied::{declared_tied, Output};

const UP: &str = "model.layers.1.mlp.up_proj.weight";

/// What a test loads, and how.
#[derive(Clone, Copy)]
struct Load<'a> {
    folder: &'a str,
    weights: WeightStorage,
    group_size: usize,
    embeddings: WeightStorage,
    num_threads: usize,
}

fn int4(folder: &str) -> Load<'_> {
    Load { folder, weights: INT4, group_size: 0, embeddings: AS_STORED, num_threads: 2 }
}

impl Load<'_> {
    fn with(&self, file: Option<&Path>, progress: &mut dyn FnMut(f32) -> bool) -> Result<Model> {
        let backend = Arc::new(CpuBackend::new(self.num_threads)?);
        let options = LoadOptions {
            dtype: Some(DType::F32),
            kept_weights: file.map(Path::to_owned),
            ..LoadOptions::default()
        };
        open_both(self.folder, self.weights, self.group_size, self.embeddings)?
            .load(backend, &options, progress)
    }

    /// Returns the bits of the logits of a model that was loaded with the file.
    fn logits(&self, file: Option<&Path>) -> Result<Vec<u32>> {
        let prompt: Vec<u32> = (0..9).map(|i| i * 37 % 70).collect();
        let model = self.with(file, &mut |_| true)?;
        let logits = bits(&Driver::new(&model, 8).logits(&prompt, usize::MAX));
        Ok(logits)
    }

    #[track_caller]
    fn is_refused(&self, file: &Path, words: &[&str]) {
        let before = std::fs::read(file).ok();
        let error = self.logits(Some(file)).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
        says(&error, words);
        says(&error, &[file.to_str().expect("UTF-8")]);
        assert!(before == std::fs::read(file).ok(), "the file has changed");
    }
}

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    for words in words {
        assert!(error.message().contains(words), "{error} does not say {words}");
    }
}

/// Returns the names of the files beside one, which is among them.
fn names(file: &Path) -> Vec<String> {
    let folder = std::fs::read_dir(file.parent().expect("a folder")).expect("a folder");
    folder.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
}

/// A file as its header describes it.
struct Parts {
    header: Value,
    description: Value,
    data: Vec<u8>,
}

impl Parts {
    fn read(file: &Path) -> Self {
        let bytes = std::fs::read(file).expect("a file");
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("JSON");
        let text = header["__metadata__"]["xserv.kept_weights"].as_str().expect("a description");
        let description = serde_json::from_str(text).expect("JSON");
        Parts { description, header, data: bytes[8 + len..].to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = self.header.clone();
        header["__metadata__"]["xserv.kept_weights"] = json!(self.description.to_string());
        raw_safetensors(&header.to_string(), &self.data)
    }

    /// The bytes of a tensor.
    fn tensor(&mut self, name: &str) -> &mut [u8] {
        let offset = |i: usize| self.header[name]["data_offsets"][i].as_u64().expect("an offset");
        let (begin, end) = (offset(0) as usize, offset(1) as usize);
        &mut self.data[begin..end]
    }

    fn described(&mut self, name: &str) -> &mut Value {
        let tensors = self.description["tensors"].as_array_mut().expect("a list");
        tensors.iter_mut().find(|t| t["name"] == name).expect("a tensor")
    }

    /// Changes what is kept of a tensor, and its checksum with it.
    fn forge(&mut self, name: &str, part: &str, edit: impl Fn(&mut [u8])) {
        let bytes = self.tensor(&format!("{name}.{part}"));
        edit(bytes);
        let sum = crc32(bytes);
        self.described(name)[format!("{part}_crc32")] = json!(format!("{sum:08x}"));
    }
}

/// CRC-32 bit by bit, as its definition has it.
fn crc32(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| (0..8).fold(crc, |c, _| c >> 1 ^ (0xedb8_8320 & (c & 1).wrapping_neg()));
    !bytes.iter().fold(u32::MAX, |crc, &byte| shift(crc ^ u32::from(byte)))
}

/// Changes bytes of a file in place. Its time stays, unless `later`.
fn change(file: &Path, later: bool, edit: impl Fn(&mut Vec<u8>)) {
    let modified = std::fs::metadata(file).expect("a file").modified().expect("a time");
    let mut bytes = std::fs::read(file).expect("a file");
    edit(&mut bytes);
    std::fs::write(file, bytes).expect("written");
    let more = Duration::from_secs(if later { 5 } else { 0 });
    set_time(file, modified + more);
}

fn set_time(file: &Path, time: SystemTime) {
    let file = File::options().write(true).open(file).expect("a file");
    file.set_times(FileTimes::new().set_modified(time)).expect("a time");
}

/// A model in its folder, and a file that was kept of it.
struct Kept {
    dir: TempDir,
    beside: TempDir,
    want: Vec<u32>,
}

impl Kept {
    fn new() -> Self {
        let dir = TestModel::qwen3(5).write(Store::BF16);
        let beside = TempDir::new();
        let file = beside.path().join("kept.safetensors");
        let want = int4(dir.str()).logits(Some(&file)).expect("a model");
        Kept { dir, beside, want }
    }

    fn file(&self) -> PathBuf {
        self.beside.path().join("kept.safetensors")
    }

    fn load(&self) -> Load<'_> {
        int4(self.dir.str())
    }

    fn source(&self) -> PathBuf {
        self.dir.path().join("model.safetensors")
    }

    /// Writes the file changed.
    fn write(&self, edit: impl Fn(&mut Parts)) -> PathBuf {
        let mut parts = Parts::read(&self.file());
        edit(&mut parts);
        self.beside.write("changed.safetensors", parts.bytes());
        self.beside.path().join("changed.safetensors")
    }
}

#[test]
fn kept_weights_are_those_of_a_load_without() {
    for (name, dir, _) in models() {
        for (weights, embeddings) in CHOICES {
            for group_size in if weights == AS_STORED { [0, 0] } else { [0, 96] } {
                let what = format!("{name}, {weights:?} {group_size}, embeddings {embeddings:?}");
                let beside = TempDir::new();
                let file = beside.path().join("kept.safetensors");
                let folder = dir.str();
                let load = Load { folder, weights, group_size, embeddings, num_threads: 1 };
                let want = load.logits(None).expect("a model");
                assert!(load.logits(Some(&file)).expect("a model") == want, "{what}: as made");
                let modified =
                    std::fs::metadata(&file).expect("a file").modified().expect("a time");
                for num_threads in [1, 2, 5] {
                    let load = Load { num_threads, ..load };
                    let got = load.logits(Some(&file)).expect("a model");
                    assert!(got == want, "{what}: as read on {num_threads} threads");
                }
                assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), modified);
                assert_eq!(names(&file), ["kept.safetensors"]);
            }
        }
    }
}

/// The numbers are the quantiser's, where the comment of the format says; the reference crate reads them.
#[test]
fn the_file_is_as_documented() {
    let kept = Kept::new();
    let model = TestModel::qwen3(5);
    let bytes = std::fs::read(kept.file()).expect("a file");
    let read = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let backend = CpuBackend::new(1).expect("threads");
    let format = INT4.format(0).expect("a format").expect("one");
    let matrices: Vec<_> =
        model.tensors.iter().filter(|t| t.name.contains("proj.weight")).collect();
    assert_eq!(read.len(), 3 * matrices.len());
    let mut parts = Parts::read(&kept.file());
    assert_eq!(parts.description["version"], 1);
    assert_eq!(parts.description["source"][0]["name"], "model.safetensors");
    for matrix in matrices {
        let name = &matrix.name;
        let stored = Store::BF16.bytes(&matrix.values);
        let (columns, groups) = (matrix.shape[1], matrix.shape[1].div_ceil(32));
        let [mut all_codes, mut all_scales, mut all_zeros] = [Vec::new(), Vec::new(), Vec::new()];
        for row in stored.chunks(2 * columns) {
            let row: Vec<f32> =
                row.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            let (mut codes, mut zeros) = (vec![0; columns.div_ceil(2)], vec![0; groups]);
            let mut scales = vec![0.0; groups];
            let out = RowOut { codes: &mut codes, scales: &mut scales, zeros: &mut zeros };
            quantise_row(&backend, &row, &format, out).expect("numbers");
            all_codes.extend(codes);
            all_scales.extend(Store::BF16.bytes(&scales));
            all_zeros.extend(zeros);
        }
        let described = parts.described(name).clone();
        assert_eq!((&described["code"], &described["group_size"]), (&json!("int4"), &json!(32)));
        assert_eq!(described["source_crc32"], format!("{:08x}", crc32(&stored)));
        let expected = [
            ("codes", "U8", all_codes),
            ("scales", "BF16", all_scales),
            ("zeros", "U8", all_zeros),
        ];
        for (part, dtype, bytes) in expected {
            let tensor = read.tensor(&format!("{name}.{part}")).expect("a tensor");
            assert_eq!(tensor.dtype().to_string(), dtype);
            assert_eq!(tensor.shape()[0], matrix.shape[0]);
            assert!(tensor.data() == bytes, "{name}.{part}");
            assert_eq!(described[format!("{part}_crc32")], format!("{:08x}", crc32(&bytes)));
        }
    }
}

/// Its bytes are others, and nothing but a look at them could tell.
#[test]
fn what_was_quantised_is_not_read_again() {
    let kept = Kept::new();
    let source = std::fs::read(kept.source()).expect("a file");
    let read = SafeTensors::deserialize(&source).expect("a file");
    let up = read.tensor(UP).expect("a tensor").data();
    let begin = up.as_ptr() as usize - source.as_ptr() as usize;
    let range = begin..begin + up.len();
    change(&kept.source(), false, |bytes| bytes[range.clone()].fill(0x3f));
    assert!(kept.load().logits(Some(&kept.file())).expect("a model") == kept.want);
    assert!(kept.load().logits(None).expect("a model") != kept.want);
    // With another time the change is seen, and the tensor that has it named.
    change(&kept.source(), true, |_| ());
    kept.load().is_refused(&kept.file(), &["another model", UP]);
}

#[test]
fn a_copy_of_the_model_is_known_by_its_checksums() {
    let kept = Kept::new();
    change(&kept.source(), true, |_| ());
    assert!(kept.load().logits(Some(&kept.file())).expect("a model") == kept.want);
    // An archive drops the part of a second.
    let modified = std::fs::metadata(kept.source()).expect("a file").modified().expect("a time");
    let since = modified.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
    set_time(&kept.source(), SystemTime::UNIX_EPOCH + Duration::from_secs(since - 5));
    assert!(kept.load().logits(Some(&kept.file())).expect("a model") == kept.want);
    let copy = TempDir::new();
    for name in ["config.json", "model.safetensors"] {
        copy.write(name, std::fs::read(kept.dir.path().join(name)).expect("a file"));
    }
    assert!(int4(copy.str()).logits(Some(&kept.file())).expect("a model") == kept.want);
    // Norms are not kept, so that they may change.
    let other = TestModel::qwen3(6).write(Store::BF16);
    int4(other.str()).is_refused(&kept.file(), &["another model", "had other numbers"]);
}

/// Whether a stored output matrix is the embedding is told by the file as long as the model is the
/// one it was made from, and else found out anew.
#[test]
fn tied_matrices_are_compared_once() {
    let embedding = "model.embed_tokens.weight";
    let prompt: Vec<u32> = (0..9).map(|i| i * 37 % 70).collect();
    for output in [Output::Equal, Output::Differs(69)] {
        let (dir, _) = declared_tied(TestModel::qwen3(5), embedding, output);
        let beside = TempDir::new();
        let file = beside.path().join("kept.safetensors");
        let source = dir.path().join("model.safetensors");
        let logits = || {
            let mut headers = Model::read_headers(dir.str())?;
            headers.quantise(INT4.format(0)?.expect("a format"));
            headers.recall_output(&file);
            let backend = Arc::new(CpuBackend::new(2)?);
            let kept_weights = Some(file.clone());
            let options =
                LoadOptions { dtype: Some(DType::F32), kept_weights, ..LoadOptions::default() };
            let model =
                headers.settle(None, &mut |_| true)?.load(backend, &options, &mut |_| true)?;
            Result::Ok(bits(&Driver::new(&model, 8).logits(&prompt, usize::MAX)))
        };
        let want = logits().expect("a model");
        let is_tied = output == Output::Equal;
        assert_eq!(Parts::read(&file).description["output_is_embedding"], json!(is_tied));
        assert!(logits().expect("a model") == want, "{output:?}");
        // In the middle of the output matrix, where a comparison would see it and a model without
        // it would not.
        let bytes = std::fs::read(&source).expect("a file");
        let read = SafeTensors::deserialize(&bytes).expect("a file");
        let matrix = read.tensor("lm_head.weight").expect("a tensor").data();
        let at = matrix.as_ptr() as usize - bytes.as_ptr() as usize + 4 * 24 * 1000;
        change(&source, false, |bytes| bytes[at..at + 4].fill(0x3f));
        let changed = logits().expect("a model");
        assert_eq!(changed == want, is_tied, "{output:?}: one matrix, as before, or two");
        change(&source, true, |_| ());
        assert!(logits().expect("a model") != want, "{output:?}: compared again");
        // What is wrong with the file is told where it is opened.
        std::fs::write(&file, "no such file").expect("written");
        let error = logits().expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
    }
}

#[test]
fn a_file_of_other_options_is_refused() {
    let kept = Kept::new();
    let load = kept.load();
    let with = |weights, group_size, embeddings| Load { weights, group_size, embeddings, ..load };
    with(INT8, 0, AS_STORED).is_refused(
        &kept.file(),
        &["int4 in groups of 32", "int8 in groups of 128", "model.layers.0.self_attn"],
    );
    with(INT4, 64, AS_STORED).is_refused(&kept.file(), &["groups of 32", "groups of 64"]);
    with(INT4, 0, INT8).is_refused(&kept.file(), &["other options", "it lacks lm_head.weight"]);
    with(AS_STORED, 0, INT8).is_refused(&kept.file(), &["other options"]);
    let both = kept.beside.path().join("both.safetensors");
    with(INT4, 0, INT8).logits(Some(&both)).expect("a model");
    load.is_refused(&both, &["other options", "it has lm_head.weight"]);
}

#[test]
fn a_file_of_another_model_is_refused() {
    let kept = Kept::new();
    let mut wider = TestModel::qwen3(5);
    wider.tensors.retain(|t| t.name != "lm_head.weight");
    wider.config["tie_word_embeddings"] = json!(true);
    let wider = wider.write(Store::BF16);
    int4(wider.str())
        .is_refused(&kept.file(), &["another model", "model.safetensors had", "bytes"]);
    let other = TestModel::qwen3(5).write(Store::F16);
    int4(other.str()).is_refused(&kept.file(), &["another model", "model.safetensors"]);
    let source = |edit: &dyn Fn(&mut Value)| {
        let file = kept.write(|parts| edit(&mut parts.description["source"]));
        kept.load().is_refused(&file, &["another model"]);
    };
    source(&|files| files[0]["name"] = json!("other.safetensors"));
    source(&|files| files[0]["header_crc32"] = json!("00000000"));
    source(&|files| files.as_array_mut().expect("a list").clear());
    source(&|files| {
        let first = files[0].clone();
        files.as_array_mut().expect("a list").push(first);
    });
}

#[test]
fn damaged_and_foreign_files_are_refused() {
    let kept = Kept::new();
    let load = kept.load();
    let file = kept.file();
    let bytes = std::fs::read(&file).expect("a file");
    let changed = |name: &str, bytes: &[u8]| {
        kept.beside.write(name, bytes);
        kept.beside.path().join(name)
    };
    for len in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        load.is_refused(&changed("cut", &bytes[..len]), &[]);
    }
    load.is_refused(&changed("cut", &bytes[..bytes.len() - 1]), &["the file is cut off"]);
    load.is_refused(&changed("long", &[&bytes[..], b"x"].concat()), &["trailing bytes"]);
    load.is_refused(&changed("text", b"not a file of this kind at all"), &["header claims"]);
    load.is_refused(&kept.source(), &["no kept weights", "xserv.kept_weights"]);
    load.is_refused(kept.dir.path(), &["not a regular file"]);
    for part in ["codes", "scales", "zeros"] {
        let name = format!("{UP}.{part}");
        let file = kept.write(|parts| *parts.tensor(&name).last_mut().expect("a byte") ^= 1);
        load.is_refused(&file, &["damaged", "checksum", &name]);
        let file =
            kept.write(|parts| parts.described(UP)[format!("{part}_crc32")] = json!("00000000"));
        load.is_refused(&file, &["damaged", &name]);
    }
    let file = kept.write(|parts| parts.description["version"] = json!(2));
    load.is_refused(&file, &["version 2", "reads and writes 1"]);
    let file = kept.write(|parts| parts.description = json!({"version": 3, "other": [1]}));
    load.is_refused(&file, &["version 3"]);
    let twice = kept.write(|parts| {
        let copy = parts.described(UP).clone();
        parts.description["tensors"].as_array_mut().expect("a list").push(copy);
    });
    load.is_refused(&twice, &["twice", UP]);
    for (field, value) in
        [("code", json!("int5")), ("group_size", json!(0)), ("group_size", json!(u64::MAX))]
    {
        let file = kept.write(|parts| parts.described(UP)[field] = value.clone());
        load.is_refused(&file, &["was asked for"]);
    }
    for description in
        [json!(1), json!({}), json!({"version": "1"}), json!({"version": 1}), json!([])]
    {
        load.is_refused(&kept.write(|parts| parts.description = description.clone()), &[]);
    }
    let dangling = kept.beside.path().join("dangling");
    std::os::unix::fs::symlink(kept.beside.path().join("nothing"), &dangling).expect("a link");
    load.is_refused(&dangling, &["link"]);
}

/// Checksums that fit make no file sound.
#[test]
fn numbers_that_no_quantiser_writes_are_refused() {
    let mut model = TestModel::qwen3(5);
    // Rows of an odd length end in half a byte.
    model = odd(model);
    let dir = model.write(Store::F32);
    let beside = TempDir::new();
    let file = beside.path().join("kept.safetensors");
    let load = int4(dir.str());
    load.logits(Some(&file)).expect("a model");
    let name = "model.layers.0.mlp.down_proj.weight";
    let forged = beside.path().join("forged.safetensors");
    let forge = |part: &str, edit: &dyn Fn(&mut [u8])| {
        let mut parts = Parts::read(&file);
        parts.forge(name, part, edit);
        beside.write("forged.safetensors", parts.bytes());
    };
    forge("codes", &|_| ());
    load.logits(Some(&forged)).expect("nothing was changed");
    for scale in [half::bf16::NAN, half::bf16::INFINITY, half::bf16::NEG_INFINITY] {
        forge("scales", &|bytes| bytes[4..6].copy_from_slice(&scale.to_le_bytes()));
        load.is_refused(&forged, &["not what xserv writes", name]);
    }
    for zero in [16, 255] {
        forge("zeros", &|bytes| bytes[3] = zero);
        load.is_refused(&forged, &["not what xserv writes", name]);
    }
    forge("codes", &|bytes| *bytes.last_mut().expect("a byte") |= 0x10);
    load.is_refused(&forged, &["not what xserv writes", name]);
    let mut parts = Parts::read(&file);
    let shape = parts.header[format!("{name}.codes")]["shape"].clone();
    parts.header[format!("{name}.codes")]["shape"] = json!([shape[1], shape[0]]);
    beside.write("forged.safetensors", parts.bytes());
    load.is_refused(&forged, &[name, "expected"]);
    let mut parts = Parts::read(&file);
    parts.header["more"] = json!({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]});
    beside.write("forged.safetensors", parts.bytes());
    load.is_refused(&forged, &["too many"]);
}

/// The same with 41 instead of 40 rows in the middle of an MLP.
fn odd(mut model: TestModel) -> TestModel {
    model.config["intermediate_size"] = json!(41);
    for tensor in &mut model.tensors {
        if let Some(size) = tensor.shape.iter_mut().find(|size| **size == 40) {
            if tensor.name.contains("mlp") {
                *size = 41;
                tensor.values = (0..tensor.shape.iter().product::<usize>())
                    .map(|i| (i * 37 % 101) as f32 / 101.0 - 0.5)
                    .collect();
            }
        }
    }
    model
}

/// Damage anywhere is refused, or has changed nothing that is read.
#[test]
fn random_damage_is_refused_or_harmless() {
    let kept = Kept::new();
    let bytes = std::fs::read(kept.file()).expect("a file");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut random = Random(7);
    let mut taken = 0;
    for round in 0..400 {
        let mut bytes = bytes.clone();
        for _ in 0..1 + random.below(3) {
            // Half of it in the header.
            let len = if round % 2 == 0 { 8 + header_len } else { bytes.len() };
            let at = random.below(len.min(bytes.len()));
            match random.below(4) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = b"0123456789{}[],:\"\\"[random.below(18)],
                2 if round % 5 == 0 => bytes.truncate(at),
                _ => bytes[at] = random.next() as u8,
            }
            if bytes.is_empty() {
                break;
            }
        }
        kept.beside.write("damaged", &bytes);
        match kept.load().logits(Some(&kept.beside.path().join("damaged"))) {
            Ok(logits) => {
                taken += 1;
                assert!(logits == kept.want, "round {round}: other logits");
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}"),
        }
    }
    println!("{taken} taken");
}

#[test]
fn loads_that_make_one_file_at_once_all_succeed() {
    let dir = TestModel::wide_qwen3(5).write(Store::BF16);
    let want = int4(dir.str()).logits(None).expect("a model");
    for _ in 0..3 {
        let beside = TempDir::new();
        let file = beside.path().join("kept.safetensors");
        std::thread::scope(|scope| {
            let load = || int4(dir.str()).logits(Some(&file)).expect("a model");
            let loads: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
            for load in loads {
                assert!(load.join().expect("no panic") == want);
            }
        });
        assert_eq!(names(&file), ["kept.safetensors"]);
        assert!(int4(dir.str()).logits(Some(&file)).expect("a model") == want);
    }
}

/// Neither a file nor a part of it.
#[test]
fn a_load_that_ends_early_leaves_nothing() {
    let dir = TestModel::wide_qwen3(5).write(Store::BF16);
    let beside = TempDir::new();
    let file = beside.path().join("kept.safetensors");
    for limit in [0.0, 0.3, 0.9] {
        let mut progress = |fraction: f32| fraction <= limit;
        let error = int4(dir.str()).with(Some(&file), &mut progress).expect_err("cancelled");
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        assert!(names(&file).is_empty());
    }
    // Reading a file can be cancelled like any load, and ends at 1.
    int4(dir.str()).logits(Some(&file)).expect("a model");
    let mut fractions = Vec::new();
    let mut progress = |fraction: f32| {
        fractions.push(fraction);
        true
    };
    int4(dir.str()).with(Some(&file), &mut progress).expect("a model");
    assert!(fractions.is_sorted() && fractions.last() == Some(&1.0), "{fractions:?}");
    assert!(fractions.len() > 10);
    let mut progress = |fraction: f32| fraction <= 0.5;
    let error = int4(dir.str()).with(Some(&file), &mut progress).expect_err("cancelled");
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
}

#[test]
fn a_file_that_cannot_be_written_fails_the_load() {
    let dir = TestModel::qwen3(5).write(Store::BF16);
    for file in ["/proc/kept", "no/such/folder/kept"] {
        let error = int4(dir.str()).logits(Some(Path::new(file))).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        says(&error, &[file, "cannot be written"]);
    }
    // Names of unfinished files that killed loads have left are no hindrance.
    let beside = TempDir::new();
    let file = beside.path().join("kept");
    beside.write("kept.0.tmp", "x");
    int4(dir.str()).logits(Some(&file)).expect("a model");
    assert_eq!(std::fs::read(beside.path().join("kept.0.tmp")).expect("a file"), b"x");
    let mut found = names(&file);
    found.sort();
    assert_eq!(found, ["kept", "kept.0.tmp"]);
}

/// A source that changes while it is read makes no file.
#[test]
fn a_source_that_changes_meanwhile_makes_no_file() {
    let dir = TestModel::wide_qwen3(5).write(Store::BF16);
    let beside = TempDir::new();
    let file = beside.path().join("kept.safetensors");
    let source = dir.path().join("model.safetensors");
    let mut progress = |fraction: f32| {
        if fraction > 0.5 {
            let source = File::options().write(true).open(&source).expect("a file");
            source.write_all_at(b"x", 4000).expect("written");
            source.set_modified(SystemTime::now() + Duration::from_secs(9)).expect("a time");
        }
        true
    };
    let error = int4(dir.str()).with(Some(&file), &mut progress).expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(names(&file).is_empty());
}

/// One file serves both, whichever made it, also where heads are padded on a device and the
/// matrices of attention stay dense there.
#[test]
fn kept_weights_on_cuda_are_those_of_the_cpu() {
    if cuda_context().is_none() {
        return;
    }
    for (name, model) in [("wide", TestModel::wide_qwen3(5)), ("padded", TestModel::qwen3(5))] {
        let dir = model.write(Store::BF16);
        let beside = TempDir::new();
        for (weights, embeddings) in CHOICES {
            let what = format!("{name}, {weights:?}, embeddings {embeddings:?}");
            let load = Load { weights, embeddings, ..int4(dir.str()) };
            let on_device = |file: Option<&Path>| {
                let context = cuda_context().expect("there is a device");
                let backend = CpuBackend::new(2).expect("threads");
                let options = LoadOptions {
                    kept_weights: file.map(Path::to_owned),
                    deterministic: true,
                    ..LoadOptions::default()
                };
                let model = open_both(dir.str(), weights, 0, embeddings)
                    .and_then(|f| f.load_on_device(context, &backend, &options, &mut |_| true))
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                let prompt: Vec<u32> = (0..9).map(|i| i * 37 % 70).collect();
                let logits = bits(&Driver::new(&model, 8).logits(&prompt, usize::MAX));
                logits
            };
            let file =
                |maker: &str| beside.path().join(format!("{maker}-{weights:?}-{embeddings:?}"));
            let (of_cpu, of_device) = (file("cpu"), file("device"));
            load.logits(Some(&of_cpu)).expect("a model");
            let want = on_device(None);
            assert!(on_device(Some(&of_device)) == want, "{what}: as made");
            let bytes = [&of_cpu, &of_device].map(|file| std::fs::read(file).expect("a file"));
            assert!(bytes[0] == bytes[1], "{what}: the files differ");
            assert!(on_device(Some(&of_device)) == want, "{what}: as read");
            assert!(on_device(Some(&of_cpu)) == want, "{what}: as read, made by the CPU");
        }
    }
}
