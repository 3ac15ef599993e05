//! Whole models whose files are quantised, against the same models with every number written out.

use std::sync::Arc;

use serde_json::{json, Value};
use xserv::backend::cpu::CpuBackend;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::{ActivationFormat, KvFormat, LoadOptions, Model, ModelFolder};
use xserv::ops::linear::cuda_prefill_int8::has_prefill_int8;

use crate::driver::{argmax, cuda_context, load, load_on_cuda, Driver, Sequence};
use crate::files::{Family, TempDir, TestModel};
use crate::golden;
use crate::packing::{self, file_bytes, folders, Folders, Form, OUTPUT};
use crate::quantised::Stored;

/// Bar on the difference of f32 logits, relative to the root of their mean square. Only the order
/// of sums differs.
const F32_BAR: f64 = 1e-4;
/// Bars of bf16 on what the numbers written out lose as bf16, and on the logits.
const BF16_FACTOR: f64 = 2.0;
const BF16_FLOOR: f64 = 0.01;
/// Two tokens whose logits are closer may change places.
const CLEAR_MARGIN: f32 = 2e-3;

/// A model and how its layers are stored.
struct Case {
    name: &'static str,
    config: Value,
    /// The form of each layer of the blocks.
    form_of: fn(&str) -> Option<Form>,
    /// The form of the output matrix.
    output: Option<Form>,
}

impl Case {
    fn folders(&self, model: &TestModel) -> Folders {
        folders(model, self.config.clone(), &|layer| match layer {
            OUTPUT => self.output,
            _ => (self.form_of)(layer),
        })
    }
}

fn awq(skipped: &[&str]) -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true,
        "version": "gemm", "modules_to_not_convert": skipped})
}

fn gptq(desc_act: bool) -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true,
        "desc_act": desc_act, "checkpoint_format": "gptq", "lm_head": false})
}

fn compressed(format: &str, ignored: &[&str], weights: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": format, "ignore": ignored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

fn int4(symmetric: bool) -> Value {
    json!({"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group",
        "group_size": 32, "dynamic": false})
}

fn fp8(strategy: &str) -> Value {
    json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
        "block_structure": [128, 128], "dynamic": false})
}

fn packed(bits: usize, group: usize, symmetric: bool) -> Form {
    Form::Packed { bits, group, symmetric }
}

fn cases() -> Vec<Case> {
    vec![
        Case {
            name: "AWQ",
            config: awq(&[]),
            form_of: |_| Some(Form::Awq { group: 32 }),
            output: None,
        },
        Case {
            name: "GPTQ",
            config: gptq(false),
            form_of: |_| Some(Form::Gptq { group: 32, scattered: false }),
            output: None,
        },
        Case {
            name: "GPTQ with scattered groups",
            config: gptq(true),
            form_of: |_| Some(Form::Gptq { group: 32, scattered: true }),
            output: None,
        },
        Case {
            name: "FP8 in blocks",
            config: compressed("float-quantized", &["lm_head"], fp8("block")),
            form_of: |_| Some(Form::Fp8 { block: [128, 128] }),
            output: None,
        },
        Case {
            name: "FP8 in rows",
            config: compressed("float-quantized", &["lm_head"], fp8("channel")),
            form_of: |_| Some(Form::Fp8 { block: [1, usize::MAX] }),
            output: None,
        },
        Case {
            name: "W4A16 with zeros",
            config: compressed("pack-quantized", &["lm_head"], int4(false)),
            form_of: |_| Some(packed(4, 32, false)),
            output: None,
        },
        Case {
            name: "W8A16",
            config: compressed(
                "pack-quantized",
                &["lm_head"],
                json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "group",
                    "group_size": 32}),
            ),
            form_of: |_| Some(packed(8, 32, true)),
            output: None,
        },
        Case {
            name: "W8A8",
            config: compressed(
                "int-quantized",
                &["lm_head"],
                json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"}),
            ),
            form_of: |_| Some(Form::Int8Channel),
            output: None,
        },
        Case {
            name: "W4A16 but for some layers",
            config: compressed(
                "pack-quantized",
                &[
                    "lm_head",
                    "re:.*layers\\.0\\.mlp\\.down_proj$",
                    "model.layers.1.self_attn.o_proj",
                ],
                int4(true),
            ),
            form_of: |layer| {
                let is_dense = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"];
                (!is_dense.contains(&layer)).then_some(packed(4, 32, true))
            },
            output: None,
        },
        Case {
            name: "AWQ of the queries alone",
            config: awq(&["k_proj", "v_proj", "mlp"]),
            form_of: |layer| {
                let is_dense = ["k_proj", "v_proj", "mlp"].iter().any(|part| layer.contains(part));
                (!is_dense).then_some(Form::Awq { group: 32 })
            },
            output: None,
        },
        Case {
            name: "GPTQ of the output matrix too",
            config: {
                let mut config = gptq(false);
                config["lm_head"] = json!(true);
                config
            },
            form_of: |_| Some(Form::Gptq { group: 32, scattered: false }),
            output: Some(Form::Gptq { group: 32, scattered: false }),
        },
    ]
}

/// The results that are compared of a model.
struct Run {
    /// The logits of a prompt, fed whole and in pieces, and of batches.
    logits: Vec<f32>,
    greedy: Vec<u32>,
    /// First minus second logit of each greedy step.
    margins: Vec<f32>,
}

fn run(model: &Model, prompt: &[u32]) -> Run {
    let mut driver = Driver::new(model, 256);
    let mut logits = driver.logits(prompt, usize::MAX);
    logits.extend(driver.logits(prompt, 1));
    logits.extend(driver.logits(prompt, 7));
    // Prompts of several lengths, then a token more of each.
    for num_sequences in [1, 3, 40] {
        let mut sequences: Vec<Sequence> =
            (0..num_sequences).map(|_| Sequence::default()).collect();
        for round in 0..3 {
            let piece = |i: usize| match round {
                0 => &prompt[..3 + i % 7],
                _ => &prompt[10 + i % 7 + round..][..1],
            };
            let mut parts: Vec<(&mut Sequence, &[u32])> =
                sequences.iter_mut().enumerate().map(|(i, s)| (s, piece(i))).collect();
            logits.extend(driver.step(&mut parts, false).concat());
        }
        sequences.into_iter().for_each(|sequence| driver.free(sequence));
    }
    let (greedy, chosen_from) = driver.greedy(prompt, usize::MAX, 32);
    let margins = chosen_from.chunks(chosen_from.len() / greedy.len()).map(margin).collect();
    Run { logits, greedy, margins }
}

fn margin(logits: &[f32]) -> f32 {
    let best = argmax(logits) as usize;
    let others = logits.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, &x)| x);
    logits[best] - others.fold(f32::NEG_INFINITY, f32::max)
}

/// Returns the root of the mean square of the difference over that of what is wanted.
pub fn relative_rms(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let difference: f64 =
        got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    let whole: f64 = want.iter().map(|&w| square(f64::from(w))).sum();
    assert!(difference.is_finite(), "NaN among the logits");
    (difference / whole).sqrt()
}

/// The first tokens that are the likeliest are the same, unless the margin is not clear.
#[track_caller]
fn assert_greedy(what: &str, got: &Run, want: &Run) {
    let same = got.greedy.iter().zip(&want.greedy).take_while(|(a, b)| a == b).count();
    if let Some(margin) = want.margins.get(same) {
        assert!(*margin < CLEAR_MARGIN, "{what}: token {same} differs, margin {margin}");
    }
}

/// Returns the model of the repository, and made ones of other families (with biases, or untied).
fn models() -> Vec<(&'static str, TestModel, Vec<u32>)> {
    let mut found = Vec::new();
    if let Some(golden) = golden::tiny_qwen3() {
        let prompt = golden.prompts.iter().find(|p| p.name == "chat_story").expect("a prompt");
        found.push(("tiny-qwen3", packing::read(golden.model_path()), prompt.ids.clone()));
    }
    let prompt: Vec<u32> = (0..32).map(|i| i * 37 % 1000).collect();
    for (name, family) in
        [("Llama", Family::Llama), ("Qwen2", Family::Qwen2), ("Qwen3-MoE", Family::Qwen3Moe)]
    {
        found.push((name, TestModel::wide_qwen3(5).of(family), prompt.clone()));
    }
    found
}

fn every_case(check: &dyn Fn(&str, &Folders, &[u32])) {
    for (model_name, model, prompt) in models() {
        for case in cases() {
            let what = format!("{model_name}, {}", case.name);
            check(&what, &case.folders(&model), &prompt);
        }
    }
}

#[test]
fn quantised_files_are_the_numbers_that_they_stand_for() {
    every_case(&|what, made, prompt| {
        let quantised = load(made.quantised.str(), Some(DType::F32), 2);
        let dense = load(made.dense.str(), Some(DType::F32), 2);
        assert_eq!(quantised.num_parameters(), dense.num_parameters(), "{what}");
        assert!(quantised.weights_bytes() < dense.weights_bytes(), "{what}");
        let (got, want) = (run(&quantised, prompt), run(&dense, prompt));
        let off = relative_rms(&got.logits, &want.logits);
        println!("{what}: f32 logits differ by {off:.1e}");
        // The weights of a token's experts add to what products lose.
        let bar = if what.starts_with("Qwen3-MoE") { 3.0 * F32_BAR } else { F32_BAR };
        assert!(off <= bar, "{what}: f32 logits differ by {off:.1e}");
        assert_greedy(what, &got, &want);
    });
}

#[test]
fn quantised_files_take_the_memory_that_was_planned() {
    every_case(&|what, made, prompt| {
        for dtype in [DType::F32, DType::BF16] {
            let folder = Model::open(made.quantised.str()).expect("a folder");
            assert!(folder.warnings().is_empty(), "{what}: {:?}", folder.warnings());
            let planned = folder.weights_bytes(dtype).expect("a plan");
            let model = load(made.quantised.str(), Some(dtype), 2);
            assert_eq!(planned, model.weights_bytes(), "{what}, {dtype}");
            // Matrices of one model may be multiplied in several ways, each with scratch of its own.
            let plan = folder
                .host_plan(
                    dtype,
                    KvFormat::Dense,
                    ActivationFormat::AsComputed,
                    2,
                    prompt.len(),
                    prompt.len(),
                )
                .expect("a plan");
            let mut driver = Driver::new(&model, 256);
            driver.logits(prompt, usize::MAX);
            let used = driver.workspace_bytes() as u64;
            assert!(used <= plan.workspace_bytes, "{what}: {used} > {}", plan.workspace_bytes);
        }
    });
}

#[test]
fn quantised_files_as_bf16_lose_no_more_than_the_numbers() {
    let (_, model, prompt) = models().remove(0);
    for case in cases() {
        let (name, made) = (case.name, case.folders(&model));
        let of = |dir: &TempDir, dtype| run(&load(dir.str(), Some(dtype), 2), &prompt).logits;
        let want = of(&made.dense, DType::F32);
        let loss = relative_rms(&of(&made.dense, DType::BF16), &want);
        let off = relative_rms(&of(&made.quantised, DType::BF16), &want);
        println!("{name}: bf16 logits differ by {off:.1e}, those of the numbers by {loss:.1e}");
        assert!(off <= (BF16_FACTOR * loss).max(BF16_FLOOR), "{name}: {off:.1e}, {loss:.1e}");
    }
}

#[test]
fn quantised_files_on_cuda_are_the_numbers_that_they_stand_for() {
    if cuda_context().is_none() {
        return;
    }
    every_case(&|what, made, prompt| {
        let on_cuda = |dir: &TempDir, dtype| {
            let context = cuda_context().expect("there is a device");
            load_on_cuda(dir.str(), Some(dtype), context)
                .unwrap_or_else(|e| panic!("{what}, {dtype}: {e}"))
        };
        let want = run(&load(made.dense.str(), Some(DType::F32), 2), prompt);
        let loss =
            relative_rms(&run(&on_cuda(&made.dense, DType::BF16), prompt).logits, &want.logits);
        for (dtype, bar) in
            [(DType::F32, F32_BAR), (DType::BF16, (BF16_FACTOR * loss).max(BF16_FLOOR))]
        {
            let got = run(&on_cuda(&made.quantised, dtype), prompt);
            let off = relative_rms(&got.logits, &want.logits);
            println!("{what} on CUDA: {dtype} logits differ by {off:.1e} (bar {bar:.1e})");
            assert!(
                off <= bar,
                "{what} on CUDA: {dtype} logits differ by {off:.1e}, bar {bar:.1e}"
            );
            if dtype == DType::F32 {
                assert_greedy(what, &got, &want);
            }
        }
    });
}

/// The FP8 models whose configs have activations in FP8 too.
fn cases_with_fp8_inputs() -> Vec<Case> {
    let by_groups = |weights: Value, inputs: Value| {
        let mut config = compressed("float-quantized", &["lm_head"], weights);
        config["config_groups"]["group_0"]["input_activations"] = inputs;
        config
    };
    let tokens = json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
    let measured = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false});
    vec![
        Case {
            name: "blocks, dynamic",
            config: json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}),
            form_of: |_| Some(Form::Fp8Blocks),
            output: None,
        },
        Case {
            name: "blocks, static",
            config: json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static",
                "weight_block_size": [128, 128]}),
            form_of: |_| Some(Form::Fp8Blocks),
            output: None,
        },
        Case {
            name: "rows, a scale for each token",
            config: by_groups(fp8("channel"), tokens),
            form_of: |_| Some(Form::Fp8 { block: [1, usize::MAX] }),
            output: None,
        },
        Case {
            name: "matrices, a scale that was measured",
            config: by_groups(fp8("tensor"), measured),
            form_of: |_| Some(Form::Fp8 { block: [usize::MAX, usize::MAX] }),
            output: None,
        },
        Case {
            name: "matrices of Model Optimizer",
            config: json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
            form_of: |_| Some(Form::Fp8 { block: [usize::MAX, usize::MAX] }),
            output: None,
        },
    ]
}

/// Activations in FP8 are the same numbers on the CPU and on a GPU. A number that falls on the other side
/// of the middle of two codes changes by a step of FP8, and with it what later layers round: a few rows
/// of f32, all rows of bf16, which are then as far from each other as two roundings to FP8 are.
#[test]
fn activations_in_fp8_are_the_same_on_every_device() {
    for (what, model, prompt) in models() {
        for case in cases_with_fp8_inputs() {
            check_fp8_inputs(&format!("{what}, {}", case.name), &case.folders(&model), &prompt);
        }
    }
}

fn check_fp8_inputs(what: &str, made: &Folders, prompt: &[u32]) {
    let whole = run(&load(made.dense.str(), Some(DType::F32), 2), prompt);
    let want = run(&load(made.quantised.str(), Some(DType::F32), 2), prompt);
    let loss = relative_rms(&want.logits, &whole.logits);
    println!("{what}: activations in FP8 change logits by {loss:.1e}");
    assert!((1e-3..0.15).contains(&loss), "{what}: FP8 changes logits by {loss:.1e}");
    let folder = Model::open(made.quantised.str()).expect("a folder");
    let plan = folder
        .host_plan(
            DType::F32,
            KvFormat::Dense,
            ActivationFormat::AsComputed,
            2,
            prompt.len(),
            prompt.len(),
        )
        .expect("a plan");
    let model = load(made.quantised.str(), Some(DType::F32), 2);
    let mut driver = Driver::new(&model, 256);
    driver.logits(prompt, usize::MAX);
    let used = driver.workspace_bytes() as u64;
    assert!(used <= plan.workspace_bytes, "{what}: {used} > {}", plan.workspace_bytes);

    let halved = run(&load(made.dense.str(), Some(DType::BF16), 2), prompt);
    let of_bf16 = relative_rms(&halved.logits, &whole.logits);
    for (dtype, bar) in [
        (DType::F32, 0.7 * loss),
        (DType::BF16, (BF16_FACTOR * of_bf16).max(BF16_FLOOR) + 1.6 * loss),
    ] {
        // If heads are padded, their matrices are dense on a GPU.
        let (false, Some(context)) = (what.starts_with("tiny-qwen3"), cuda_context()) else {
            break;
        };
        let got = load_on_cuda(made.quantised.str(), Some(dtype), context).expect("a model");
        let off = relative_rms(&run(&got, prompt).logits, &want.logits);
        println!("{what} on CUDA: {dtype} logits differ by {off:.1e} (bar {bar:.1e})");
        assert!(off <= bar, "{what} on CUDA: {dtype} logits differ by {off:.1e}, bar {bar:.1e}");
    }
}

#[test]
fn older_folders_of_model_optimizer_say_it_in_a_file_of_its_own() {
    let (_, model, prompt) = models().pop().expect("a model");
    let case = cases_with_fp8_inputs().pop().expect("that of Model Optimizer");
    let (new, old) = (case.folders(&model).quantised, case.folders(&model).quantised);
    let path = std::path::Path::new(old.str()).join("config.json");
    let json = std::fs::read(path).expect("a config");
    let mut config: Value = serde_json::from_slice(&json).expect("a config");
    config.as_object_mut().expect("an object").remove("quantization_config");
    old.write("config.json", config.to_string());
    let said = json!({"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization":
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}});
    old.write("hf_quant_config.json", said.to_string());
    let [want, got] = [new, old].map(|dir| run(&load(dir.str(), Some(DType::F32), 2), &prompt));
    assert_eq!(want.logits, got.logits);
}

#[test]
fn activations_that_are_kept_multiply_the_numbers_of_the_weights() {
    for (what, model, prompt) in models() {
        for case in cases_with_fp8_inputs() {
            let what = format!("{what}, {}", case.name);
            let made = case.folders(&model);
            let folder = || {
                let mut headers = Model::read_headers(made.quantised.str()).expect("headers");
                headers.keep_activations();
                headers.settle(None, &mut |_| true).expect("a folder")
            };
            let options = LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() };
            let backend = CpuBackend::new(2).expect("threads");
            let want = run(&load(made.dense.str(), Some(DType::F32), 2), &prompt);
            let mut kept = Vec::new();
            if let Some(context) = cuda_context() {
                let loaded = folder().load_on_device(context, &backend, &options, &mut |_| true);
                kept.push(("a GPU", loaded.expect("a model")));
            }
            let loaded = folder().load(Arc::new(backend), &options, &mut |_| true);
            kept.push(("the CPU", loaded.expect("a model")));
            for (device, model) in kept {
                let got = run(&model, &prompt);
                let off = relative_rms(&got.logits, &want.logits);
                assert!(off <= F32_BAR, "{what} on {device}: f32 logits differ by {off:.1e}");
                assert_greedy(&what, &got, &want);
            }
        }
    }
}

/// Returns the model of a folder on a device, whose products take their activations as its config says or
/// keep them.
fn on_device(folder: &TempDir, dtype: DType, keeps: bool) -> Model {
    let mut headers = Model::read_headers(folder.str()).expect("headers");
    if keeps {
        headers.keep_activations();
    }
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    let backend = CpuBackend::new(2).expect("threads");
    let context = cuda_context().expect("there is a device");
    let folder = headers.settle(None, &mut |_| true).expect("a folder");
    folder.load_on_device(context, &backend, &options, &mut |_| true).expect("a model")
}

/// Prompts of W8A8 are products of integers where the device has them, unless activations are to be kept;
/// few tokens are computed as if they were.
#[test]
fn prompts_of_integers_on_cuda_take_activations_as_the_config_says() {
    let Some(context) = cuda_context() else { return };
    let takes_integers = has_prefill_int8(&context).expect("the kernels");
    let weights = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"});
    let mut config = compressed("int-quantized", &["lm_head"], weights);
    config["config_groups"]["group_0"]["input_activations"] =
        json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true});
    let (form_of, output) = (|_: &str| Some(Form::Int8Channel), None);
    let case = Case { name: "W8A8", config, form_of, output };
    let prompt: Vec<u32> = (0..900).map(|i| i * 37 % 1000).collect();
    for (family, dtype) in [(Family::Llama, DType::BF16), (Family::Qwen2, DType::F16)] {
        let made = case.folders(&TestModel::small_qwen3(7).of(family));
        let logits = |model: &Model, tokens: usize| {
            Driver::new(model, 1024).logits(&prompt[..tokens], usize::MAX)
        };
        let want = logits(&load(made.dense.str(), Some(DType::F32), 2), prompt.len());
        let [kept, taken] = [true, false].map(|keeps| on_device(&made.quantised, dtype, keeps));
        assert_eq!(logits(&taken, 100), logits(&kept, 100), "{dtype}: few tokens");
        let [kept, taken] = [kept, taken].map(|model| logits(&model, prompt.len()));
        let [of_kept, of_taken] = [&kept, &taken].map(|logits| relative_rms(logits, &want));
        println!("W8A8 on CUDA, {dtype}: {of_kept:.1e} kept, {of_taken:.1e} in integers");
        assert_eq!(kept != taken, takes_integers, "{dtype}: what the config says");
        assert!(of_kept <= 2.0 * BF16_FLOOR && of_taken <= 0.06, "{dtype}: {of_kept}, {of_taken}");
    }
}

const DOWN: &str = "model.layers.0.mlp.down_proj";

/// Returns a small AWQ model whose tensors or config a test may damage.
fn damaged(damage: impl FnOnce(&mut Vec<(String, Stored)>, &mut Value)) -> TempDir {
    let model = TestModel::wide_qwen3(6);
    let (mut tensors, _) =
        packing::stored(&model, &|layer| (layer != OUTPUT).then_some(Form::Awq { group: 32 }));
    let mut config = model.config;
    config["quantization_config"] = awq(&[]);
    damage(&mut tensors, &mut config);
    let dir = TempDir::new();
    dir.write("config.json", config.to_string());
    dir.write("model.safetensors", file_bytes(&tensors));
    dir
}

#[track_caller]
fn refused(found: xserv::error::Result<ModelFolder>, named: &[&str]) {
    let error = found.expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
    for name in named {
        assert!(error.message().contains(name), "{error} does not name {name}");
    }
    assert!(error.message().len() < 400, "{error} is no sentence");
}

#[test]
fn files_that_are_not_what_the_config_says_are_refused() {
    let whole = damaged(|_, _| {});
    Model::open(whole.str()).expect("a folder in order");
    let qweight = format!("{DOWN}.qweight");
    let is = |name: &str| {
        let wanted = format!("{DOWN}.{name}");
        move |(found, _): &(String, Stored)| *found == wanted
    };

    let short = damaged(|tensors, _| {
        let (_, tensor) = tensors.iter_mut().find(|t| is("qweight")(t)).expect("a tensor");
        tensor.bytes.truncate(tensor.bytes.len() / 2);
    });
    refused(Model::open(short.str()), &["model.safetensors", &qweight]);
    let flat = damaged(|tensors, _| {
        let (_, tensor) = tensors.iter_mut().find(|t| is("qweight")(t)).expect("a tensor");
        tensor.shape[0] /= 2;
        tensor.bytes.truncate(tensor.bytes.len() / 2);
    });
    refused(Model::open(flat.str()), &["model.safetensors", &qweight, "shape"]);
    // The file ends in the middle of its last tensor.
    let cut = damaged(|_, _| {});
    let mut bytes = std::fs::read(cut.path().join("model.safetensors")).expect("a file");
    bytes.truncate(bytes.len() - 100);
    cut.write("model.safetensors", bytes);
    refused(Model::open(cut.str()), &["model.safetensors"]);

    for name in ["qweight", "qzeros", "scales"] {
        let missing = damaged(|tensors, _| tensors.retain(|t| !is(name)(t)));
        let named = format!("{DOWN}.{name}");
        refused(Model::open(missing.str()), &[&named, "missing"]);
    }
    let another = damaged(|_, config| {
        config["quantization_config"]["quant_method"] = json!("gptq");
    });
    refused(Model::open(another.str()), &["qweight", "quantization_config"]);
    let none = damaged(|_, config| {
        config.as_object_mut().expect("an object").remove("quantization_config");
    });
    refused(Model::open(none.str()), &["_proj.weight"]);
    // A config that says so of a model that is not.
    let mut model = TestModel::wide_qwen3(6);
    model.config["quantization_config"] = compressed("pack-quantized", &["lm_head"], int4(true));
    let plain = model.write(crate::files::Store::BF16);
    refused(Model::open(plain.str()), &["_proj.weight", "quantised"]);
}
