//! Hostile safetensors files: each is refused with a sentence that names the file.

use serde_json::json;
use xserv::error::{Error, ErrorKind};
use xserv::model::safetensors::{parse_header, MAX_HEADER_BYTES, MAX_TENSORS};
use xserv::model::Model;

use crate::files::{cpu_seconds, raw_safetensors, safetensors_bytes, Store, TempDir, TestModel};

/// Opens a Qwen3 folder whose weights are `bytes`.
fn open(bytes: &[u8]) -> Result<(), Error> {
    let dir = TempDir::new();
    dir.write("config.json", TestModel::qwen3(1).config.to_string());
    dir.write("model.safetensors", bytes);
    let start = cpu_seconds();
    let result = Model::open(dir.str()).map(|_| ());
    assert!(cpu_seconds() - start < 2.0, "took {} s", cpu_seconds() - start);
    result
}

#[track_caller]
fn refused(bytes: &[u8], kind: ErrorKind, named: &str) {
    let error = open(bytes).expect_err("must be refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains("model.safetensors"), "{error} does not name the file");
    assert!(error.message().contains(named), "{error} does not name {named}");
    assert!(error.message().len() < 500, "{error} is no sentence");
}

fn bad(header: &str, data: &[u8], named: &str) {
    refused(&raw_safetensors(header, data), ErrorKind::InvalidFile, named);
}

fn entry(dtype: &str, shape: serde_json::Value, begin: u64, end: u64) -> serde_json::Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})
}

#[test]
fn a_good_file_is_taken() {
    open(&safetensors_bytes(&TestModel::qwen3(1).tensors, Store::F32)).expect("a good file");
}

#[test]
fn lengths_that_lie() {
    for len in 0..8 {
        refused(&vec![0; len], ErrorKind::InvalidFile, "too few");
    }
    refused(&[0; 8], ErrorKind::InvalidFile, "bad header");
    for claimed in [u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 40, MAX_HEADER_BYTES + 1] {
        refused(&claimed.to_le_bytes(), ErrorKind::InvalidFile, "the header claims");
    }
    for claimed in [1, 3, 1000, MAX_HEADER_BYTES] {
        let mut bytes = u64::to_le_bytes(claimed).to_vec();
        refused(&bytes, ErrorKind::InvalidFile, "cut off");
        bytes.extend(b"{}");
        if claimed > 2 {
            refused(&bytes, ErrorKind::InvalidFile, "cut off");
        }
    }
}

/// The file cut at every byte of its header and at steps through its data.
#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = safetensors_bytes(&TestModel::qwen3(1).tensors, Store::F32);
    let steps = (0..64).chain((64..whole.len()).step_by(509)).chain([whole.len() - 1]);
    for len in steps {
        let error = open(&whole[..len]).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
    }
    let mut longer = whole;
    longer.push(0);
    refused(&longer, ErrorKind::InvalidFile, "trailing");
}

#[test]
fn headers_that_are_no_headers() {
    let deep = "{\"a\":".repeat(10_000);
    for header in [
        "",
        " ",
        "null",
        "[]",
        "1",
        "\"a\"",
        "{",
        "{}x",
        "{\"a\":1}",
        "{\"a\":{}}",
        &deep,
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}",
        "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,0]}}",
        "{\"a\":{\"shape\":[0],\"data_offsets\":[0,0]}}",
        "{\"a\":{\"dtype\":7,\"shape\":[0],\"data_offsets\":[0,0]}}",
        "{\"__metadata__\":[]}",
        "{\"__metadata__\":{\"a\":1}}",
        "{\"__metadata__\":{},\"__metadata__\":{}}",
    ] {
        bad(header, b"", "bad header");
    }
    let mut bytes = raw_safetensors("{\"aa\":1}", b"");
    bytes[10] = 0xff;
    refused(&bytes, ErrorKind::InvalidFile, "UTF-8");
    // Without tensors it is a valid file that lacks what the model needs.
    bad("{}", b"", "model.embed_tokens.weight");
}

#[test]
fn numbers_that_are_no_sizes() {
    for number in
        ["-1", "0.5", "1e3", "1e308", "1e309", "18446744073709551616", "\"1\"", "null", "[1]"]
    {
        bad(
            &format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{number}],\"data_offsets\":[0,4]}}}}"),
            &[0; 4],
            "a",
        );
        bad(
            &format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,{number}]}}}}"),
            &[0; 4],
            "a",
        );
    }
}

/// What is in fields that nobody needs must be JSON as the format's own reader takes it. The thread
/// has half of the stack that the header asks callers for.
#[test]
fn fields_that_are_not_known_are_read_as_the_reference_reads_them() {
    let digits = "1".repeat(400);
    let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    let fields = [
        ("1e308".to_string(), true),
        ("1e309".to_string(), false),
        ("-1e309".to_string(), false),
        (format!("[{{\"b\":[0,{digits}]}}]"), false),
        (nested(124), true),
        (nested(126), false),
        (nested(100_000), false),
        ("{\"b\":[null,true,-1,0.5,\"c\",{}]}".to_string(), true),
        ("\"\\ud800\"".to_string(), false),
        ("{\"\\ud800\":1}".to_string(), false),
        ("01".to_string(), false),
        ("tru".to_string(), false),
    ];
    let check = move || {
        for (field, is_taken) in fields {
            let header = format!(
                "{{\"a\":{{\"note\":{field},\"dtype\":\"F16\",\"shape\":[0],\"data_offsets\":[0,0]}}}}"
            );
            let file = raw_safetensors(&header, b"");
            let reference = safetensors::SafeTensors::deserialize(&file);
            assert_eq!(reference.is_ok(), is_taken, "the reference: {header:.200}");
            let found = parse_header(header.as_bytes(), 0);
            assert_eq!(found.is_ok(), is_taken, "{header:.200}: {found:?}");
        }
    };
    let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(check);
    thread.unwrap().join().unwrap();
}

#[test]
fn tensors_that_do_not_cover_the_data() {
    let two = |first, second| json!({"first": first, "second": second}).to_string();
    let f32s = |begin, end| entry("F32", json!([1]), begin, end);
    bad(&two(f32s(0, 4), f32s(2, 6)), &[0; 6], "inside another");
    bad(&two(f32s(0, 4), f32s(0, 4)), &[0; 4], "inside another");
    bad(&two(f32s(0, 4), f32s(6, 10)), &[0; 10], "nothing covers");
    bad(&two(f32s(4, 8), f32s(8, 12)), &[0; 12], "nothing covers");
    bad(&two(f32s(0, 4), f32s(4, 8)), &[0; 9], "trailing");
    bad(&two(f32s(0, 4), f32s(4, 8)), &[0; 7], "cut off");
    bad(&two(f32s(0, 4), f32s(8, 4)), &[0; 8], "before it begins");
    bad(
        &two(f32s(0, 4), entry("F32", json!([1]), u64::MAX - 3, u64::MAX)),
        &[0; 4],
        "nothing covers",
    );
    for shape in [json!([2]), json!([]), json!([1, 2]), json!([0])] {
        bad(&two(f32s(0, 4), entry("F64", shape, 4, 8)), &[0; 8], "does not fill");
    }
    for dim in [1_u64 << 32, 1 << 62, u64::MAX] {
        bad(&two(f32s(0, 4), entry("F32", json!([dim, dim, 4]), 4, 8)), &[0; 8], "does not fill");
    }
    bad(&two(f32s(0, 4), entry("F4", json!([1]), 4, 5)), &[0; 5], "does not fill");
}

#[test]
fn names_and_types_that_are_wrong() {
    let twice = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\
                  \"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}";
    bad(twice, &[0; 8], "a occurs twice");
    bad(&json!({"a": entry("Q4_K", json!([1]), 0, 4)}).to_string(), &[0; 4], "Q4_K");
    bad(&json!({"a": entry("f32", json!([1]), 0, 4)}).to_string(), &[0; 4], "f32");
    let rank = json!({"a": entry("F32", json!([1, 1, 1, 1, 1, 1, 1, 1, 1]), 0, 4)});
    bad(&rank.to_string(), &[0; 4], "dimensions");
    let long = "x\u{1b}\n".repeat(100_000);
    bad(&json!({long: entry("F32", json!([1]), 4, 8)}).to_string(), &[0; 8], "nothing covers");
}

#[test]
fn tensors_that_the_model_cannot_use() {
    let good = TestModel::qwen3(1);
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut model = good.clone();
    model.tensors.retain(|tensor| tensor.name != name);
    refused(&safetensors_bytes(&model.tensors, Store::F32), ErrorKind::InvalidFile, name);

    for shape in [vec![24, 40], vec![960], vec![40, 24, 1], vec![1, 40, 24]] {
        let mut model = good.clone();
        for tensor in model.tensors.iter_mut().filter(|tensor| tensor.name == name) {
            tensor.shape = shape.clone();
        }
        let bytes = safetensors_bytes(&model.tensors, Store::F32);
        refused(&bytes, ErrorKind::InvalidFile, "expected [40, 24]");
    }
    let bytes = safetensors_bytes(&good.tensors, Store::F32);
    let text = String::from_utf8_lossy(&bytes[8..]).into_owned();
    let header = &text[..text.find("}}").expect("the end of the header") + 2];
    let as_integers = header.replace("\"F32\"", "\"I32\"");
    let data = &bytes[8 + header.len()..];
    refused(&raw_safetensors(&as_integers, data), ErrorKind::Unsupported, "I32");
}

#[test]
fn limits_hold_at_the_limit_and_one_beyond() {
    let header = |count: usize| {
        let entries: Vec<String> = (0..count)
            .map(|i| format!("\"{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
            .collect();
        format!("{{{}}}", entries.join(","))
    };
    let start = cpu_seconds();
    assert_eq!(
        parse_header(header(MAX_TENSORS).as_bytes(), 0).expect("at the limit").len(),
        MAX_TENSORS
    );
    let error = parse_header(header(MAX_TENSORS + 1).as_bytes(), 0).expect_err("beyond");
    assert!(error.message().contains("65536"), "{error}");
    assert!(cpu_seconds() - start < 2.0, "took {} s", cpu_seconds() - start);

    let filled = "{}".to_owned() + &" ".repeat(MAX_HEADER_BYTES as usize - 2);
    bad(&filled, b"", "model.embed_tokens.weight");
    bad(&(filled + " "), b"", "more than the");
}
