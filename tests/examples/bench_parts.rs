//! The parts of bench that can be judged: its limits, what it finds out about a folder, and that it
//! can measure what a device does. `cargo bench --bench steps` has the limits and the measurement
//! in Rust.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::tensor::{Dtype, TensorView};
use safetensors::SafeTensors;
use serde_json::{json, Value};
use xserv::ffi::{xserv_device_kind, xserv_dtype};

use self::limits::{Ceilings, ModelWork};
use crate::random_model::random_model;
use crate::support::*;

#[path = "../bench/ceilings.rs"]
mod ceilings;
#[allow(dead_code)] // tensors use its part
#[path = "../support/fp8.rs"]
mod fp8;
#[path = "../bench/limits.rs"]
mod limits;
#[allow(dead_code)] // what tensors are filled with
#[path = "../support/random.rs"]
mod random;
#[allow(dead_code)] // only contexts are needed
#[path = "../support/tensors.rs"]
mod tensors;

/// Runs tests/examples/bench_parts.c, and returns the words that it prints.
fn parts(arguments: &[&str]) -> Vec<String> {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = work_folder("bench-parts").join("bench_parts");
        let bench = repository().join("examples/c/bench");
        let mut sources = vec![repository().join("tests/examples/bench_parts.c")];
        let names = [
            "ceilings.c",
            "experts.c",
            "json.c",
            "limits.c",
            "measure.c",
            "report.c",
            "rounds.c",
            "tied.c",
        ];
        sources.extend(names.map(|name| bench.join(name)));
        let include = format!("-I{}", repository().join("examples/c").display());
        let flags = ["-std=c11", &include, "-fsanitize=undefined", "-fno-sanitize-recover"];
        build_program(&cc(), &sources, &flags, &program);
        program
    });
    let said = run(command(program).args(arguments).env("LD_LIBRARY_PATH", staged_library()));
    said.stdout.split_whitespace().map(str::to_string).collect()
}

fn numbers(words: &[String]) -> Vec<f64> {
    words.iter().map(|word| word.parse().expect("a number")).collect()
}

#[track_caller]
fn assert_near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} instead of {expected}");
}

/// bytes of weights, ms of a decode step, ms of a prompt: Qwen3-8B at 4706 GB/s and 680 TFLOP/s.
fn limits_of_8b(tied: &str, batch: &str, context: &str, num_tokens: &str) -> [f64; 3] {
    let said = parts(&["limits", "4706", "680", tied, batch, context, num_tokens]);
    <[f64; 3]>::try_from(numbers(&said)).expect("three numbers")
}

#[test]
fn limits_are_those_computed_by_hand() {
    // 8,190,735,360 weights, of which 151936 * 4096 = 622,329,856 are the embedding and as many the
    // output matrix: 6,946,075,648 in the layers. One sequence is bound by memory in all
    // operations.
    let [bytes, decode, prompt] = limits_of_8b("0", "1", "512", "2048");
    assert_eq!(bytes, 2.0 * (6_946_075_648.0 + 622_329_856.0));
    assert_near(decode, (15_136_811_008.0 + 512.0 * 147_456.0) / 4706e9 * 1e3);
    // The prompt is bound by arithmetic in the layers and in attention, which takes 4 * 32 * 128 *
    // 36 = 589,824 operations for each of 2048 * 2049 / 2 = 2,098,176 pairs, and by memory in the
    // output matrix.
    let layers = 2.0 * 6_946_075_648.0 * 2048.0 / 680e12;
    let (attention, output) = (2_098_176.0 * 589_824.0 / 680e12, 1_244_659_712.0 / 4706e9);
    assert_near(prompt, (layers + attention + output) * 1e3);
    // 256 sequences are bound by arithmetic in all products, and by memory in attention.
    let [_, decode, _] = limits_of_8b("0", "256", "1000", "1");
    let products = 2.0 * (6_946_075_648.0 + 622_329_856.0) * 256.0 / 680e12;
    assert_near(decode, (products + 256.0 * 1000.0 * 147_456.0 / 4706e9) * 1e3);
    // Tied, the same number of weights is that of larger layers, and all of them are read.
    assert_eq!(limits_of_8b("1", "1", "512", "2048")[0], 2.0 * 8_190_735_360.0);
    // Quantised, weights are read as what they take: a matrix of embeddings, in groups of 128, 1 +
    // 2 / 128 bytes a number, and the layers what is left of a total of 6 GB.
    let said = parts(&["limits", "4706", "680", "0", "1", "512", "1", "6000000000", "1"]);
    let embedding = 622_329_856.0 * (1.0 + 2.0 / 128.0);
    assert_eq!(numbers(&said)[0], 6e9 - embedding);
    assert_near(numbers(&said)[1], (6e9 - embedding + 512.0 * 147_456.0) / 4706e9 * 1e3);
    // An unknown rate gives no limit.
    for rates in [["0", "680"], ["4706", "0"]] {
        let said = parts(&["limits", rates[0], rates[1], "0", "1", "512", "2048"]);
        assert_eq!(numbers(&said)[1..], [0.0, 0.0]);
    }
}

#[test]
fn limits_of_bench_and_steps_agree() {
    let embedding = 622_329_856.0;
    let work = ModelWork {
        layer_weights: 8_190_735_360.0 - 2.0 * embedding,
        output_weights: embedding,
        expert_weights: 0.0,
        num_experts: 1.0,
        experts_per_token: 1.0,
        expert_bytes: 0.0,
        layer_bytes: 2.0 * (8_190_735_360.0 - 2.0 * embedding),
        output_bytes: 2.0 * embedding,
        kv_bytes: 147_456.0,
        attention_flops: 589_824.0,
        window: f64::INFINITY,
        windowed: 0.0,
    };
    let ceilings = Ceilings { read_gbs: 4706.0, tflops: 680.0 };
    for batch in [1.0, 32.0, 256.0] {
        let [_, decode, _] = limits_of_8b("0", &batch.to_string(), "4096", "1");
        assert_near(ceilings.limit_ms(&work.decode(batch, 4096.0)), decode);
    }
    for num_tokens in [16.0, 512.0, 8192.0] {
        let [_, _, prompt] = limits_of_8b("0", "1", "1", &num_tokens.to_string());
        assert_near(ceilings.limit_ms(&work.prompt(num_tokens)), prompt);
    }
    // Four in seven billion numbers are experts, of which a token takes 8 of 128.
    let in_layers = work.layer_weights - 4e9;
    let sparse = ModelWork {
        layer_weights: in_layers,
        layer_bytes: 2.0 * in_layers,
        expert_weights: 4e9,
        expert_bytes: 8e9,
        num_experts: 128.0,
        experts_per_token: 8.0,
        ..work
    };
    let of_sparse = |batch: &str, num_tokens: &str| {
        let rates = ["limits", "4706", "680", "0", batch, "512", num_tokens];
        numbers(&parts(&[&rates[..], &["16381470720", "0", "4e9", "128", "8"]].concat()))
    };
    for (batch, tokens) in [("1", 1.0), ("8", 8.0), ("256", 256.0)] {
        let decode = of_sparse(batch, "1")[1];
        assert_near(ceilings.limit_ms(&sparse.decode(tokens, 512.0)), decode);
    }
    for (num_tokens, tokens) in [("8", 8.0), ("8192", 8192.0)] {
        let prompt = of_sparse("1", num_tokens)[2];
        assert_near(ceilings.limit_ms(&sparse.prompt(tokens)), prompt);
    }
    // One token reads a sixteenth of the experts, two of them those of 31 in 256.
    let bytes = 2.0 * (in_layers + embedding) + 8e9 / 16.0;
    assert_near(of_sparse("1", "1")[0], bytes);
    assert_near(of_sparse("1", "1")[1], (bytes + 512.0 * 147_456.0) / 4706e9 * 1e3);
    let bytes = 2.0 * (in_layers + embedding) + 8e9 * 31.0 / 256.0;
    assert_near(of_sparse("2", "1")[1], (bytes + 2.0 * 512.0 * 147_456.0) / 4706e9 * 1e3);
}

/// In the layers that have them, with the defaults of the family for what the config leaves out.
#[test]
fn experts_are_those_of_the_config() {
    let found = |folder: &Path| {
        let config: Value =
            serde_json::from_slice(&fs::read(folder.join("config.json")).expect("a config"))
                .expect("JSON");
        let [layers, hidden] =
            ["num_hidden_layers", "hidden_size"].map(|key| config[key].to_string());
        numbers(&parts(&["experts", folder.to_str().expect("a path"), &layers, &hidden]))
    };
    let moe = random_model("experts-moe", &["qwen3-30b-a3b", "--config-only"]);
    let of_a_layer = 128.0 * 3.0 * 768.0 * 2048.0;
    assert_eq!(found(&moe), [48.0 * of_a_layer, 128.0, 8.0]);
    change_config(&moe, |config| {
        config.retain(|key, _| !["num_experts", "moe_intermediate_size"].contains(&key.as_str()));
        config.insert("decoder_sparse_step".into(), 2.into());
        config.insert("mlp_only_layers".into(), json!([0, 3, 47]));
        config.insert("num_experts_per_tok".into(), 4.into());
    });
    // Every second one of 48, but two.
    assert_eq!(found(&moe), [22.0 * of_a_layer, 128.0, 4.0]);
    change_config(&moe, |config| {
        config.insert("model_type".into(), "mixtral".into());
        config.insert("num_local_experts".into(), 4.into());
        config.insert("intermediate_size".into(), 100.into());
        config.remove("num_experts_per_tok");
    });
    assert_eq!(found(&moe), [48.0 * 4.0 * 3.0 * 100.0 * 2048.0, 4.0, 2.0]);
    let dense = random_model("experts-none", &["qwen3-tiny", "--config-only"]);
    assert_eq!(found(&dense)[0], 0.0);
}

/// A query reads the keys of its window, and a prompt each key once.
#[test]
fn limits_of_steps_know_windows() {
    let all = ModelWork {
        layer_weights: 1e6,
        output_weights: 1e5,
        expert_weights: 0.0,
        num_experts: 1.0,
        experts_per_token: 1.0,
        expert_bytes: 0.0,
        layer_bytes: 2e6,
        output_bytes: 2e5,
        kv_bytes: 100.0,
        attention_flops: 10.0,
        window: 64.0,
        windowed: 1.0,
    };
    let half = ModelWork { windowed: 0.5, ..all };
    let attention = |work: &ModelWork, context: f64| work.decode(3.0, context)[2].bytes;
    assert_near(attention(&all, 50.0), 3.0 * 50.0 * 100.0);
    assert_near(attention(&all, 500.0), 3.0 * 64.0 * 100.0);
    assert_near(attention(&half, 500.0), 3.0 * (64.0 + 500.0) / 2.0 * 100.0);
    let seen: u32 = (1..=200).map(|n: u32| n.min(64)).sum();
    let prompt = all.prompt(200.0)[2];
    assert_near(prompt.flops, f64::from(seen) * 10.0);
    assert_near(prompt.bytes, 200.0 * 100.0);
    assert_near(half.prompt(200.0)[2].flops, (f64::from(seen) + 200.0 * 201.0 / 2.0) / 2.0 * 10.0);
}

#[test]
fn ceilings_are_measured_on_any_device() {
    let context = tensors::context(xserv_device_kind::XSERV_DEVICE_CPU).expect("the CPU");
    for dtype in [xserv_dtype::XSERV_DTYPE_BF16, xserv_dtype::XSERV_DTYPE_F32] {
        let by_c = numbers(&parts(&["ceilings", &(dtype as u32).to_string()]));
        assert_eq!(by_c[0], (64 << 20) as f64);
        let (num_bytes, gemm_size, round_seconds) = (64 << 20, 256, 0.01);
        let probes = ceilings::Probes { dtype, num_bytes, gemm_size, round_seconds };
        let by_rust = ceilings::measure(&context, &probes);
        for rate in [by_c[1], by_rust.read_gbs] {
            assert!((0.05..1e5).contains(&rate), "{rate} GB/s");
        }
        for rate in [by_c[2], by_rust.tflops] {
            assert!((1e-5..1e3).contains(&rate), "{rate} TFLOP/s");
        }
    }
}

/// Also with more threads than cores.
#[test]
fn a_round_takes_as_long_as_its_slowest_thread() {
    for num_threads in [1, 2, 20] {
        let found = numbers(&parts(&["rounds", &num_threads.to_string()]));
        let (seconds, calls) = found.split_first().expect("seconds");
        let least = 0.01 * f64::from(num_threads);
        assert!(*seconds >= least, "{seconds} s instead of {least} and more");
        assert!(calls.len() == 3 * num_threads as usize && calls.iter().all(|&n| n == 1.0));
    }
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn read_tensors(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let copy =
        |(name, view): (String, TensorView)| (name, (view.shape().to_vec(), view.data().to_vec()));
    file.tensors().into_iter().map(copy).collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (shape, data))| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), data).expect("a tensor"))
    });
    fs::write(path, safetensors::serialize(views, None).expect("a file")).expect("weights");
}

fn change_config(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&fs::read(&path).expect("a config")).expect("JSON");
    change(config.as_object_mut().expect("an object"));
    fs::write(path, config.to_string()).expect("a config");
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";

#[test]
fn tied_and_untied_models_are_told_apart() {
    let mut folders = Vec::new();
    let mut expect = |folder: &Path, tied: bool| {
        folders.push((folder.to_str().expect("a path").to_string(), tied));
    };
    let tied = |name: &str| random_model(&format!("tied-{name}"), &["qwen3-tiny"]);

    expect(&tied("as-said"), true);
    expect(&random_model("untied-as-said", &["qwen3-tiny", "--untied"]), false);
    // If the config does not say, the default of the family holds; a statement elsewhere in it does
    // not count.
    let silent = random_model("untied-silent", &["qwen3-tiny", "--untied"]);
    change_config(&silent, |config| {
        config.remove("tie_word_embeddings");
    });
    expect(&silent, false);
    let gpt2 = random_model("tied-gpt2", &["gpt2-tiny"]);
    change_config(&gpt2, |config| {
        let family = config.remove("model_type").expect("a family");
        config.insert("note".into(), json!({"text": "\"}, {", "tie_word_embeddings": false}));
        config.insert("model_type".into(), family);
    });
    expect(&gpt2, true);

    // A copy of the embedding is stored as the output matrix, as in Qwen3-0.6B; and alone.
    let copied = tied("copied");
    let mut tensors = read_tensors(&copied);
    tensors.insert(OUTPUT.into(), tensors[EMBEDDING].clone());
    write_tensors(&copied.join("model.safetensors"), &tensors);
    expect(&copied, true);
    let swapped = tied("swapped");
    tensors.remove(EMBEDDING);
    write_tensors(&swapped.join("model.safetensors"), &tensors);
    expect(&swapped, true);

    // A matrix of its own, in one file and in another than the embedding.
    let other = tied("other");
    let mut tensors = read_tensors(&other);
    let (shape, mut data) = tensors[EMBEDDING].clone();
    data[1000] ^= 1;
    tensors.insert(OUTPUT.into(), (shape, data));
    write_tensors(&other.join("model.safetensors"), &tensors);
    expect(&other, false);
    let sharded = tied("sharded");
    let output: Tensors = tensors.remove_entry(OUTPUT).into_iter().collect();
    fs::remove_file(sharded.join("model.safetensors")).expect("the one file");
    let mut weight_map = serde_json::Map::new();
    for (name, shard) in [("1.safetensors", &tensors), ("2.safetensors", &output)] {
        write_tensors(&sharded.join(name), shard);
        weight_map.extend(shard.keys().map(|key| (key.clone(), json!(name))));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(sharded.join("model.safetensors.index.json"), index.to_string()).expect("an index");
    expect(&sharded, false);

    let mut arguments = vec!["tied"];
    arguments.extend(folders.iter().map(|(folder, _)| folder.as_str()));
    let said = parts(&arguments);
    assert_eq!(said.len(), folders.len());
    for ((folder, tied), said) in folders.iter().zip(&said) {
        assert_eq!(said, if *tied { "tied" } else { "untied" }, "{folder}");
        let loaded = xserv::model::Model::open(folder);
        assert!(loaded.is_ok(), "{folder}: {:?}", loaded.err());
    }
    // Random weights are tied where the config says so, whatever is stored.
    let [other, untied] = [&other, &silent].map(|folder| folder.to_str().expect("a path"));
    assert_eq!(parts(&["declared", other, untied]), ["tied", "untied"]);
}
