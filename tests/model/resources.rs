//! Time and memory: hostile folders within 2 s and 256 MiB, loading within the weights and 10 %.
//!
//! Each case runs in a process of its own, so that the peak is its own.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::{json, Map};
use xserv::backend::cpu::CpuBackend;
use xserv::memory::DType;
use xserv::model::{inspect, LoadOptions, Model};

use crate::files::{cpu_seconds, raw_safetensors, TempDir, TestModel};

const HOSTILE_BYTES: u64 = 256 << 20;
const HOSTILE_SECONDS: f64 = 2.0;

/// The measurements of a child process; the seconds are those of its thread's computing.
struct Measured {
    peak_bytes: u64,
    seconds: f64,
    result: String,
}

/// Runs `what` (`open`, `inspect`, `load`) on a folder in a child process.
fn measure(what: &str, folder: &Path) -> Measured {
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "resources::child", "--ignored", "--nocapture"])
        .env("XSERV_TEST_WHAT", what)
        .env("XSERV_TEST_FOLDER", folder)
        .output()
        .expect("a child process");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{what}: {text} {}", String::from_utf8_lossy(&output.stderr));
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.split_once(name).map(|(_, value)| value.to_owned()))
            .unwrap_or_else(|| panic!("no {name} in {text}"))
    };
    Measured {
        peak_bytes: field("peak_bytes=").parse().expect("a number"),
        seconds: field("seconds=").parse().expect("a number"),
        result: field("result="),
    }
}

/// `VmHWM` of `/proc/self/status`: the peak of resident memory.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("VmHWM");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    kib * 1024
}

#[test]
#[ignore = "run by the other tests of this module, as a child process"]
fn child() {
    let Ok(what) = std::env::var("XSERV_TEST_WHAT") else { return };
    let folder = std::env::var("XSERV_TEST_FOLDER").expect("a folder");
    let before = peak_rss_bytes();
    let start = cpu_seconds();
    let result = match what.as_str() {
        "open" => format!("{:?}", Model::open(&folder).map(|_| ()).map_err(|e| e.to_string())),
        "inspect" => format!("{:?}", inspect(&folder).expect("a report").reason),
        _ => {
            let dtype = if what == "load f32" { Some(DType::F32) } else { None };
            let map_files = what == "load mapped";
            let backend = Arc::new(CpuBackend::new(2).expect("threads"));
            let model = Model::open(&folder)
                .and_then(|f| {
                    f.load(
                        backend,
                        &LoadOptions { dtype, map_files, ..LoadOptions::default() },
                        &mut |_| true,
                    )
                })
                .expect("loads");
            model.weights_bytes().to_string()
        }
    };
    let seconds = cpu_seconds() - start;
    println!("\npeak_bytes={}\nseconds={seconds}\nresult={result}", peak_rss_bytes() - before);
}

#[track_caller]
fn hostile(name: &str, dir: &TempDir) {
    for what in ["open", "inspect"] {
        let measured = measure(what, dir.path());
        eprintln!(
            "{name}, {what}: {:.2} s, {} MiB: {:.150}",
            measured.seconds,
            measured.peak_bytes >> 20,
            measured.result
        );
        assert!(measured.result.contains("Err") || measured.result.contains("Some"));
        assert!(measured.seconds < HOSTILE_SECONDS, "{name}: {} s", measured.seconds);
        assert!(measured.peak_bytes < HOSTILE_BYTES, "{name}: {} bytes", measured.peak_bytes);
    }
}

fn folder_with_config() -> TempDir {
    let dir = TempDir::new();
    dir.write("config.json", TestModel::qwen3(1).config.to_string());
    dir
}

/// Returns a header of `count` empty tensors, filled up with long names to `len` bytes.
fn crowded_header(prefix: &str, count: usize, len: usize) -> String {
    let tail = "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
    let fill = (len / count).saturating_sub(tail.len() + prefix.len() + 10);
    let mut header = String::from("{");
    for i in 0..count {
        let comma = if i == 0 { "" } else { "," };
        write!(header, "{comma}\"{prefix}{i:06}{}{tail}", "x".repeat(fill)).expect("a string");
    }
    header.push('}');
    header
}

#[test]
fn crowded_headers() {
    let dir = folder_with_config();
    let header = crowded_header("", 65_536, 16 << 20);
    dir.write("model.safetensors", raw_safetensors(&header, b""));
    hostile("65,536 tensors in 16 MiB", &dir);
    let header = format!("{{\"{}\":1}}", "x".repeat((16 << 20) - 7));
    dir.write("model.safetensors", raw_safetensors(&header, b""));
    hostile("one name of 16 MiB", &dir);
    let header = format!("{{\"a\":{{\"shape\":[{}0]}}}}", "0,".repeat((8 << 20) - 12));
    dir.write("model.safetensors", raw_safetensors(&header, b""));
    hostile("eight million dimensions", &dir);
}

#[test]
fn many_crowded_shards() {
    let dir = folder_with_config();
    let mut map = Map::new();
    // The limit on the bytes of all headers, nearly; the limit on their tensors, beyond.
    for shard in 0..5 {
        let name = format!("{shard}.safetensors");
        let header = crowded_header(&format!("{shard}-"), 60_000, 6 << 20);
        dir.write(&name, raw_safetensors(&header, b""));
        map.insert(format!("{shard}"), json!(name));
    }
    dir.write("model.safetensors.index.json", json!({"weight_map": map}).to_string());
    hostile("300,000 tensors in five files", &dir);
}

#[test]
fn crowded_indexes() {
    let dir = folder_with_config();
    let mut index = String::from("{\"weight_map\":{");
    while index.len() < (16 << 20) - 100 {
        let next = index.len();
        write!(index, "\"{next}\":\"a\",").expect("a string");
    }
    index.push_str("\"z\":\"a\"}}");
    dir.write("model.safetensors.index.json", &index);
    hostile("an index of 16 MiB", &dir);
    let numbers = format!("{{\"a\":[{}0]}}", "0,".repeat((8 << 20) - 12));
    dir.write("model.safetensors.index.json", &numbers);
    hostile("an index of eight million zeros", &dir);
}

#[test]
fn crowded_configurations() {
    let dir = TempDir::new();
    for (name, text) in [
        ("half a million zeros", format!("{{\"a\":[{}0]}}", "0,".repeat(524_000))),
        ("many empty objects", format!("{{\"a\":[{}0]}}", "{},".repeat(349_000))),
    ] {
        dir.write("config.json", &text);
        dir.write("tokenizer_config.json", format!("[{}0]", "{},".repeat(5 << 20)));
        hostile(name, &dir);
    }
}

/// Returns a model of some 180 MiB whose weights are zeros in a sparse file.
fn large_model() -> TempDir {
    let (hidden, intermediate, layers, vocab) = (1024, 3072, 6, 32_768);
    let mut model = TestModel::qwen3(1);
    for (name, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
        ("num_hidden_layers", layers),
        ("vocab_size", vocab),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
    ] {
        model.config[name] = json!(value);
    }
    model.config["attention_bias"] = json!(false);
    model.config["tie_word_embeddings"] = json!(true);
    let mut header = Map::new();
    let mut end = 0;
    let mut add = |name: String, shape: &[usize]| {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}));
    };
    add("model.embed_tokens.weight".to_owned(), &[vocab, hidden]);
    add("model.norm.weight".to_owned(), &[hidden]);
    for layer in 0..layers {
        for (part, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_norm", vec![128]),
            ("self_attn.k_norm", vec![128]),
            ("self_attn.q_proj", vec![2048, hidden]),
            ("self_attn.k_proj", vec![1024, hidden]),
            ("self_attn.v_proj", vec![1024, hidden]),
            ("self_attn.o_proj", vec![hidden, 2048]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
        ] {
            add(format!("model.layers.{layer}.{part}.weight"), &shape);
        }
    }
    let dir = TempDir::new();
    dir.write("config.json", model.config.to_string());
    let bytes = raw_safetensors(&serde_json::Value::Object(header).to_string(), b"");
    let mut file = File::create(dir.path().join("model.safetensors")).expect("create");
    file.write_all(&bytes).expect("write");
    file.set_len((bytes.len() + end) as u64).expect("a sparse file");
    dir
}

#[test]
fn the_peak_of_loading_is_the_weights_and_a_tenth() {
    let dir = large_model();
    for what in ["load", "load f32"] {
        let measured = measure(what, dir.path());
        let weights: u64 = measured.result.parse().expect("a number");
        let ratio = measured.peak_bytes as f64 / weights as f64;
        eprintln!(
            "{what}: {} MiB of weights in {:.2} s of this thread, peak {ratio:.3} of them",
            weights >> 20,
            measured.seconds
        );
        assert!(ratio <= 1.1, "{what}: peak {ratio:.3} of the weights");
    }
}
