//! More damaged model folders, made by rule: every field of every file with every kind of value that it
//! cannot have, files cut at regular places, names and links that lead elsewhere.

use std::fs::File;
use std::os::unix::fs::symlink;

use serde_json::{json, Value};
use xserv::ffi::xserv_status::*;

use crate::hostile_child::Expect::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("more weights", weights),
    ("more indexes", indexes),
    ("config fields", config_fields),
    ("tokenizer fields", tokenizer_fields),
];

#[test]
fn more_weights_are_checked() {
    run_group("more weights");
    run_group("more indexes");
}

#[test]
fn every_field_of_config_json_is_checked() {
    run_group("config fields");
}

#[test]
fn every_field_of_tokenizer_json_is_checked() {
    run_group("tokenizer fields");
}

const WEIGHTS: &str = "model.safetensors";
const NORM: &str = "model.norm.weight";

/// Returns a value of every kind of JSON, for a place where it does not belong.
fn odd_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!("x"),
        json!([]),
        json!({}),
        json!(-1),
        json!(1.5),
        json!(u64::MAX),
        json!([[1]]),
    ]
}

fn weights(bench: &mut Bench) {
    for field in ["dtype", "shape", "data_offsets"] {
        for value in odd_values() {
            // A norm without a dimension is refused as well, by its size.
            bench.folder(format!("{field} of a tensor is {value}"), NotLoaded, move |copy| {
                copy.edit_header(|h| h[NORM][field] = value)
            });
        }
        bench.folder(format!("a tensor without {field}"), NotLoaded, move |copy| {
            copy.edit_header(|h| drop(h[NORM].as_object_mut().unwrap().remove(field)))
        });
    }
    for value in odd_values() {
        bench.folder(format!("a tensor is {value}"), NotLoaded, |copy| {
            copy.edit_header(|h| h[NORM] = value)
        });
    }
    for dtype in ["F64", "I8", "U8", "BOOL", "I32", "I64", "U64", "F8_E4M3", "F8_E5M2", "bf16", ""]
    {
        bench.folder(format!("a tensor of type {dtype:?}"), NotLoaded, move |copy| {
            copy.edit_header(|h| h[NORM]["dtype"] = json!(dtype))
        });
    }
    for value in odd_values() {
        let name = format!("metadata that are {value}");
        let expect = if value == json!({}) { Same } else { Answers };
        bench.folder(name, expect, |copy| copy.edit_header(|h| h["__metadata__"] = value));
    }
    let length = File::open(crate::client::tiny().join(WEIGHTS)).unwrap().metadata().unwrap().len();
    for cut in (1..length).step_by(100_000).map(|at| at | 1) {
        bench.folder(
            format!("cut to {cut} bytes"),
            Refused(XSERV_STATUS_INVALID_FILE, WEIGHTS),
            |copy| {
                File::options().write(true).open(copy.file(WEIGHTS)).unwrap().set_len(cut).unwrap();
            },
        );
    }
    // A byte in the header is replaced.
    for (what, byte) in [("a zero", 0u8), ("no text", 0xff), ("a quote", b'"'), ("a brace", b'}')] {
        for at in [8, 12, 20, 100, 1000] {
            bench.folder(format!("{what} at {at}"), NotLoaded, move |copy| {
                let mut bytes = copy.read(WEIGHTS);
                bytes[at] = byte;
                copy.write(WEIGHTS, bytes);
            });
        }
    }
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 7] = [
        ("a hole between tensors", |h| {
            let from = h[NORM]["data_offsets"][0].as_u64().unwrap();
            h[NORM]["data_offsets"] = json!([from + 2, from + 2 + 384]);
        }),
        ("two tensors at one place", |h| h["model.other.weight"] = h[NORM].clone()),
        ("a tensor of size 0 at the end", |h| {
            h["model.other.weight"] =
                json!({"dtype": "BF16", "shape": [0], "data_offsets": [1u64 << 40, 1u64 << 40]})
        }),
        ("a size of 2^64", |h| {
            h[NORM]["shape"] = serde_json::from_str("[18446744073709551616]").unwrap()
        }),
        ("a size of -0", |h| h[NORM]["shape"] = serde_json::from_str("[-0]").unwrap()),
        ("an offset of 1e2", |h| {
            h[NORM]["data_offsets"] = serde_json::from_str("[1e2, 484]").unwrap()
        }),
        ("three offsets", |h| h[NORM]["data_offsets"] = json!([0, 384, 384])),
    ];
    for (what, change) in changes {
        bench.folder(what, NotLoaded, |copy| copy.edit_header(change));
    }
    for (what, name) in [
        ("of 100,000 letters", "x".repeat(100_000)),
        ("with colours", "\u{1b}[2J\u{7}".to_string()),
        ("with a NUL", "a\0b".to_string()),
        ("of nothing", String::new()),
        ("beyond the basic plane", "\u{1f600}".repeat(40)),
    ] {
        bench.folder(format!("a tensor's name {what}"), NotLoaded, |copy| {
            copy.edit_header(|h| {
                let tensor = h.as_object_mut().unwrap().remove(NORM).unwrap();
                h[name.as_str()] = tensor;
            })
        });
    }
    for count in [65_000, 66_000] {
        bench.folder(format!("{count} tensors of size 0"), Answers, move |copy| {
            copy.edit_header(|h| {
                for n in 0..count {
                    h[format!("t{n}")] =
                        json!({"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]});
                }
            })
        });
    }
    for (what, before, after) in
        [("blanks before", " ", ""), ("blanks after", "", "   "), ("a second value", "", "{}")]
    {
        bench.folder(format!("a header with {what}"), Answers, move |copy| {
            let (header, data) = copy.weights();
            copy.write_weights(format!("{before}{header}{after}"), &data);
        });
    }
}

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Returns the bytes of a shard that has these tensors of the model.
fn shard(header: &Value, data: &[u8], has: impl Fn(&str) -> bool) -> (Value, Vec<u8>) {
    let (mut part, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (name, tensor) in header.as_object().unwrap() {
        if name == "__metadata__" || !has(name) {
            continue;
        }
        let at = |i: usize| tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let begin = bytes.len();
        bytes.extend_from_slice(&data[at(0)..at(1)]);
        let mut tensor = tensor.clone();
        tensor["data_offsets"] = json!([begin, bytes.len()]);
        part.insert(name.clone(), tensor);
    }
    (Value::Object(part), bytes)
}

/// Splits the weights into two shards: the layers from the fourth on are in the second. Returns the
/// index.
fn split(copy: &Copy) -> Value {
    let (header, data) = copy.weights();
    let is_late =
        |name: &str| ["layers.3", "layers.4", "layers.5"].iter().any(|l| name.contains(l));
    let mut map = serde_json::Map::new();
    for (i, file) in SHARDS.iter().enumerate() {
        let (part, bytes) = shard(&header, &data, |name| is_late(name) == (i == 1));
        map.extend(part.as_object().unwrap().keys().map(|name| (name.clone(), json!(file))));
        copy.write_weights(part.to_string(), &bytes);
        std::fs::rename(copy.file(WEIGHTS), copy.file(file)).unwrap();
    }
    json!({"metadata": {"total_size": data.len()}, "weight_map": map})
}

fn indexes(bench: &mut Bench) {
    let mut with = |what: &str, expect: Expect, damage: fn(&Copy, &mut Value)| {
        bench.folder(what, expect, move |copy| {
            let mut index = split(copy);
            damage(copy, &mut index);
            copy.write(INDEX, index.to_string());
        });
    };
    let missing = XSERV_STATUS_NOT_FOUND;
    with("two shards", Same, |_, _| ());
    with("a total size that is wrong", Same, |_, i| i["metadata"]["total_size"] = json!(7));
    with("no metadata", Same, |_, i| drop(i.as_object_mut().unwrap().remove("metadata")));
    with("metadata of another kind", Answers, |_, i| i["metadata"] = json!([1]));
    with("the first shard gone", Refused(missing, SHARDS[0]), |c, _| c.remove(SHARDS[0]));
    with("the second shard gone", Refused(missing, SHARDS[1]), |c, _| c.remove(SHARDS[1]));
    with("shards swapped", NotLoaded, |copy, _| {
        std::fs::rename(copy.file(SHARDS[0]), copy.file("other")).unwrap();
        std::fs::rename(copy.file(SHARDS[1]), copy.file(SHARDS[0])).unwrap();
        std::fs::rename(copy.file("other"), copy.file(SHARDS[1])).unwrap();
    });
    with("a tensor in the wrong shard", NotLoaded, |_, i| i["weight_map"][NORM] = json!(SHARDS[1]));
    with("a tensor not in the map", Answers, |_, i| {
        drop(i["weight_map"].as_object_mut().unwrap().remove(NORM))
    });
    with("an empty shard", NotLoaded, |c, _| c.write(SHARDS[1], ""));
    with("a shard cut short", NotLoaded, |c, _| {
        let bytes = c.read(SHARDS[1]);
        c.write(SHARDS[1], &bytes[..bytes.len() - 1]);
    });
    with("a shard with the tensors of both", Answers, |copy, _| {
        std::fs::copy(crate::client::tiny().join(WEIGHTS), copy.file(SHARDS[1])).unwrap();
    });
    with("the whole model beside the shards", Answers, |copy, _| {
        std::fs::copy(crate::client::tiny().join(WEIGHTS), copy.file(WEIGHTS)).unwrap();
    });
    with("a shard that is a folder", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        std::fs::create_dir(c.file(SHARDS[1])).unwrap();
    });
    with("a shard that is a link to itself", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        symlink(SHARDS[1], c.file(SHARDS[1])).unwrap();
    });
    with("a shard that is a link to the other", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        symlink(SHARDS[0], c.file(SHARDS[1])).unwrap();
    });
    with("a shard that is a link out", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        symlink("/etc/passwd", c.file(SHARDS[1])).unwrap();
    });
    with("a shard that is a device", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        symlink("/dev/zero", c.file(SHARDS[1])).unwrap();
    });
    with("a shard that is a pipe", NotLoaded, |c, _| {
        c.remove(SHARDS[1]);
        let path = crate::client::c_string(c.file(SHARDS[1]).to_str().unwrap());
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    });
    with("the index as a shard", NotLoaded, |_, i| i["weight_map"][NORM] = json!(INDEX));
    for value in odd_values() {
        let shown = value.to_string();
        bench.folder(format!("the map is {shown}"), NotLoaded, |copy| {
            let mut index = split(copy);
            index["weight_map"] = value;
            copy.write(INDEX, index.to_string());
        });
    }
    for value in odd_values() {
        bench.folder(format!("a tensor's shard is {value}"), Answers, |copy| {
            let mut index = split(copy);
            index["weight_map"][NORM] = value;
            copy.write(INDEX, index.to_string());
        });
    }
    for name in
        [" ", "a b", "x\n", "con", "~", "$HOME", "%2e%2e", "..\u{2215}x", "\u{202e}x", "..."]
    {
        bench.folder(format!("a shard called {name:?}"), Answers, move |copy| {
            let mut index = split(copy);
            index["weight_map"][NORM] = json!(name);
            copy.write(INDEX, index.to_string());
        });
    }
    for tenth in 1..10 {
        bench.folder(format!("an index cut at {tenth} tenths"), NotLoaded, move |copy| {
            let text = split(copy).to_string();
            copy.write(INDEX, &text[..text.len() * tenth / 10]);
        });
    }
}

fn config_fields(bench: &mut Bench) {
    const FILE: &str = "config.json";
    let config = Copy::new().json(FILE);
    let sizes = [
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ];
    for field in config.as_object().unwrap().keys() {
        let is_size = sizes.contains(&field.as_str());
        let mut values = odd_values();
        values.extend([json!(0), json!(1), json!(1u64 << 31), json!(1e300), json!("1e309")]);
        for value in values {
            // Numbers were tried in "configurations".
            if is_size && value.as_f64().is_some_and(|v| v.fract() == 0.0) {
                continue;
            }
            // A size that is null may be one that has a default.
            let expect = if is_size && !value.is_null() { NotLoaded } else { Answers };
            let field = field.clone();
            bench.folder(format!("{field} is {value}"), expect, move |copy| {
                copy.edit(FILE, |c| c[field.as_str()] = value)
            });
        }
        let gone = field.clone();
        let has_default = ["head_dim", "num_key_value_heads", "max_position_embeddings"];
        let has_default = has_default.contains(&field.as_str());
        let expect = if is_size && !has_default { NotLoaded } else { Answers };
        bench.folder(format!("no {gone}"), expect, move |copy| {
            copy.edit(FILE, |c| drop(c.as_object_mut().unwrap().remove(&gone)))
        });
    }
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "truncate": true});
    for field in yarn.as_object().unwrap().keys() {
        let mut values = odd_values();
        values.extend([json!(0), json!(1e300), json!(1e-300)]);
        for value in values {
            let (field, mut yarn) = (field.clone(), yarn.clone());
            bench.folder(format!("rope_scaling.{field} is {value}"), Answers, move |copy| {
                yarn[field.as_str()] = value;
                copy.edit(FILE, |c| c["rope_scaling"] = yarn)
            });
        }
    }
}

/// The places of a JSON value, with its lists and objects shortened.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    const MANY: usize = 12;
    if !at.is_empty() {
        all.push(at.to_string());
    }
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter().take(MANY) {
                places(value, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), all);
            }
        }
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate().take(2) {
                places(value, &format!("{at}/{i}"), all);
            }
        }
        _ => {}
    }
}

fn tokenizer_fields(bench: &mut Bench) {
    const FILE: &str = "tokenizer.json";
    let tokenizer = Copy::new().json(FILE);
    let mut all = Vec::new();
    places(&tokenizer, "", &mut all);
    all.retain(|place| !place.starts_with("/model/vocab/") || place.len() < 16);
    let values = [
        json!(null),
        json!(true),
        json!("\u{1f600}"),
        json!([]),
        json!({}),
        json!(-1),
        json!(1e300),
    ];
    for place in &all {
        for value in &values {
            let (place, value) = (place.clone(), value.clone());
            bench.folder(format!("{place} is {value}"), Answers, move |copy| {
                copy.edit(FILE, |t| *t.pointer_mut(&place).unwrap() = value)
            });
        }
    }
}
