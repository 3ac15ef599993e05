//! Mixtures of experts: the names that files give them, what is refused, and the forms of their weights.

use std::sync::Arc;

use serde_json::json;
use xserv::backend::cpu::CpuBackend;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::{inspect, ActivationFormat, KvFormat, LoadOptions, Model, PassLimits};
use xserv::ops::common::packed_matrix::PackedMatrix;
use xserv::ops::quantised::QuantisedPanels;

use crate::driver::{bits, cuda_context, load, Driver};
use crate::files::{Family, Store, TempDir, TestModel, TestTensor};
use crate::packing::{self, Folders, Form};
use crate::quantised_at_load::{open_both, AS_STORED, INT4, INT8};
use crate::quantised_models::relative_rms;

const NUM_EXPERTS: usize = 4;
const LAYER: &str = "model.layers.0.mlp";

/// Enough tokens for every expert to have some.
fn prompt() -> Vec<u32> {
    (0..60).map(|i| i * 37 % 70).collect()
}

fn model() -> TestModel {
    TestModel::qwen3(3).of(Family::Qwen3Moe)
}

/// Returns the same experts in a Mixtral, which has them in all layers, with the names of its files.
fn mixtral() -> TestModel {
    let mut model = model();
    for part in ["gate_proj", "up_proj", "down_proj"] {
        let dense = format!("model.layers.1.mlp.{part}.weight");
        let found = model.tensors.iter().position(|tensor| tensor.name == dense);
        model.tensors.remove(found.expect("the MLP of the second layer"));
    }
    let experts: Vec<TestTensor> =
        model.tensors.iter().filter(|tensor| tensor.name.starts_with(LAYER)).cloned().collect();
    for mut tensor in experts {
        tensor.name = tensor.name.replace("layers.0", "layers.1");
        tensor.values.rotate_left(5);
        model.tensors.push(tensor);
    }
    let is_left_out = |name: &str| name.ends_with(".bias") || name.contains("_norm.");
    model.tensors.retain(|tensor| !tensor.name.contains("self_attn") || !is_left_out(&tensor.name));
    for tensor in &mut model.tensors {
        for (from, to) in [
            (".mlp.gate.", ".block_sparse_moe.gate."),
            (".mlp.experts.", ".block_sparse_moe.experts."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ] {
            tensor.name = tensor.name.replace(from, to);
        }
    }
    let config = model.config.as_object_mut().expect("an object");
    for field in ["num_experts", "norm_topk_prob", "mlp_only_layers", "attention_bias"] {
        config.remove(field);
    }
    let width = config.remove("moe_intermediate_size").expect("a width");
    config.insert("intermediate_size".into(), width);
    config.insert("num_local_experts".into(), NUM_EXPERTS.into());
    config.insert("architectures".into(), json!(["MixtralForCausalLM"]));
    config.insert("model_type".into(), json!("mixtral"));
    model
}

/// Returns the model with the experts of each layer in two tensors, as Transformers 5 holds them.
fn fused(mut model: TestModel) -> TestModel {
    let (experts, rest): (Vec<_>, Vec<_>) =
        model.tensors.into_iter().partition(|tensor| tensor.name.contains(".experts."));
    model.tensors = rest;
    for layer in 0..2 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let of = |expert: usize, kinds: [&str; 2]| -> Option<&TestTensor> {
            experts.iter().find(|tensor| {
                tensor.name.contains(&format!("layers.{layer}."))
                    && tensor.name.contains(&format!(".experts.{expert}."))
                    && kinds.iter().any(|kind| tensor.name.contains(kind))
            })
        };
        let Some(first) = of(0, ["gate_proj", "w1"]) else { continue };
        let (width, hidden) = (first.shape[0], first.shape[1]);
        let values = |kinds: &[[&str; 2]]| -> Vec<f32> {
            let parts = (0..NUM_EXPERTS).flat_map(|e| kinds.iter().map(move |kind| (e, *kind)));
            let tensors = parts.map(|(expert, kind)| of(expert, kind).expect("an expert"));
            tensors.flat_map(|tensor| tensor.values.clone()).collect()
        };
        model.tensors.push(TestTensor {
            name: format!("{prefix}.gate_up_proj"),
            shape: vec![NUM_EXPERTS, 2 * width, hidden],
            values: values(&[["gate_proj", "w1"], ["up_proj", "w3"]]),
        });
        model.tensors.push(TestTensor {
            name: format!("{prefix}.down_proj"),
            shape: vec![NUM_EXPERTS, hidden, width],
            values: values(&[["down_proj", "w2"]]),
        });
    }
    rename(model, ".block_sparse_moe.", ".mlp.")
}

fn rename(mut model: TestModel, from: &str, to: &str) -> TestModel {
    model.tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replace(from, to));
    model
}

fn logits(dir: &TempDir) -> Vec<u32> {
    let model = load(dir.str(), Some(DType::F32), 2);
    bits(&Driver::new(&model, 2).logits(&prompt(), usize::MAX))
}

#[test]
fn all_names_of_experts_are_known() {
    let without_prefix = |model| rename(model, "model.", "");
    for (base, others) in [
        (model(), vec![fused(model()), without_prefix(model()), without_prefix(fused(model()))]),
        (
            mixtral(),
            vec![
                fused(mixtral()),
                rename(mixtral(), ".block_sparse_moe.", ".mlp."),
                without_prefix(mixtral()),
                without_prefix(fused(mixtral())),
            ],
        ),
    ] {
        let numbers: usize = base.tensors.iter().map(|tensor| tensor.values.len()).sum();
        let expected = logits(&base.write(Store::BF16));
        for other in others {
            let dir = other.write(Store::BF16);
            let report = inspect(dir.str()).expect("a report");
            assert!(report.supported, "{:?}", report.reason);
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
            assert_eq!(report.num_parameters, Some(numbers as u64));
            assert_eq!(report.stored_dtypes, [("BF16".to_owned(), 2 * numbers as u64)]);
            let loaded = load(dir.str(), None, 1);
            assert_eq!(report.weights_bytes, Some(loaded.weights_bytes()));
            assert!(logits(&dir) == expected);
        }
    }
}

/// In the last layer only the rows are left whose logits are wanted.
#[test]
fn a_row_has_the_same_bits_alone() {
    let dir = mixtral().write(Store::BF16);
    for dtype in [DType::F32, DType::BF16] {
        let model = load(dir.str(), Some(dtype), 2);
        let mut driver = Driver::new(&model, 8);
        let all = bits(&driver.logits(&prompt(), usize::MAX));
        let (_, last) = driver.greedy(&prompt(), usize::MAX, 1);
        assert!(all.ends_with(&bits(&last)));
        assert_eq!(bits(&driver.logits(&prompt(), 1)), all);
    }
}

#[test]
fn every_number_of_every_expert_counts() {
    for base in [model(), fused(model()), mixtral()] {
        let expected = logits(&base.write(Store::F32));
        let is_expert = |name: &str| name.contains(".experts") || name.contains(".gate.");
        for index in 0..base.tensors.len() {
            if !is_expert(&base.tensors[index].name) {
                continue;
            }
            let mut changed = base.clone();
            let tensor = &mut changed.tensors[index];
            // All numbers, as no token may take the first expert of a tensor of all.
            tensor.values.iter_mut().for_each(|value| *value *= 1.5);
            let name = tensor.name.clone();
            assert!(logits(&changed.write(Store::F32)) != expected, "{name}");
        }
    }
}

#[track_caller]
fn refused(model: &TestModel, words: &[&str]) {
    let dir = model.write(Store::BF16);
    let error = Model::open(dir.str()).expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::InvalidFile, "{error}");
    for word in words {
        assert!(error.message().contains(word), "{error} does not say {word}");
    }
}

#[test]
fn files_that_lack_an_expert_are_refused_by_its_name() {
    for name in ["gate.weight", "experts.3.up_proj.weight", "experts.0.down_proj.weight"] {
        let mut model = model();
        let name = format!("{LAYER}.{name}");
        model.tensors.retain(|tensor| tensor.name != name);
        refused(&model, &[&name]);
    }
    let name = format!("{LAYER}.experts.down_proj");
    let mut without = fused(model());
    without.tensors.retain(|tensor| tensor.name != name);
    refused(&without, &[&name]);
    let mut narrow = fused(model());
    let tensor = narrow.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor");
    tensor.shape[0] -= 1;
    tensor.values.truncate(tensor.shape.iter().product());
    refused(&narrow, &[&name, "[3, 24, 40]", "[4, 24, 40]"]);
    let mut more = model();
    more.config["num_experts"] = json!(5);
    refused(&more, &[&format!("{LAYER}.gate.weight")]);
}

/// Quantises what a caller may have quantised while it is read: experts, and not their router.
#[test]
fn routers_stay_as_they_are_when_weights_are_quantised() {
    for made in [TestModel::wide_qwen3(4).of(Family::Qwen3Moe), mixtral(), fused(model())] {
        let dir = made.write(Store::BF16);
        for weights in [INT8, INT4] {
            let format = weights.format(0).expect("a format").expect("a format");
            let folder = open_both(dir.str(), weights, 0, AS_STORED).expect("a folder");
            let planned = folder.weights_bytes(DType::BF16).expect("a plan");
            let options = LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() };
            let backend = Arc::new(CpuBackend::new(2).expect("threads"));
            let model = folder.load(backend, &options, &mut |_| true).expect("a model");
            assert_eq!(model.weights_bytes(), planned);
            let config = model.config();
            let experts = config.experts.as_ref().expect("experts");
            let hidden = config.hidden_size;
            let dense = |rows, columns| PackedMatrix::bytes_for(rows, columns, DType::BF16);
            let packed = |rows, columns| QuantisedPanels::bytes_for(rows, columns, &format, false);
            let mut expected = 2 * dense(config.vocab_size, hidden).expect("a size");
            for layer in 0..config.num_layers {
                let qkv = config.q_size() + 2 * config.kv_size();
                expected += packed(qkv, hidden).expect("a size");
                expected += packed(hidden, config.q_size()).expect("a size");
                let (width, count) = match config.experts_of(layer) {
                    Some(experts) => (experts.width, experts.routing.num_experts()),
                    None => (config.intermediate_size, 1),
                };
                let mlp = packed(2 * width, hidden).expect("a size")
                    + packed(hidden, width).expect("a size");
                expected += count * mlp;
                if config.experts_of(layer).is_some() {
                    expected += dense(experts.routing.num_experts(), hidden).expect("a size");
                }
            }
            let is_vector = |tensor: &&TestTensor| tensor.shape.len() == 1;
            let vectors = made.tensors.iter().filter(is_vector).map(|tensor| tensor.values.len());
            expected += 4 * vectors.sum::<usize>();
            assert_eq!(model.weights_bytes(), expected as u64, "{weights:?}");
        }
    }
}

/// Returns a folder of which the layers are quantised that `is_left` does not name, as the pattern `ignored` says.
fn partly_quantised(ignored: &str, is_left: &dyn Fn(&str) -> bool) -> Folders {
    let made = TestModel::wide_qwen3(6).of(Family::Qwen3Moe);
    // That the router is dense need not be said.
    let ignored = ["lm_head", ignored];
    let weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "block",
        "block_structure": [128, 128], "dynamic": false});
    let config = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": ignored, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}});
    packing::folders(&made, config, &|layer| {
        let is_left = layer == packing::OUTPUT || is_left(layer);
        (!is_left).then_some(Form::Fp8 { block: [128, 128] })
    })
}

/// On a device the experts of a layer are multiplied together: those that are not all alike are dense there.
#[test]
fn experts_in_several_forms_on_cuda() {
    let ids: Vec<u32> = (0..64).map(|i| i * 37 % 1000).collect();
    let is_down = |layer: &str| layer.contains(".experts.") && layer.ends_with("down_proj");
    let folders = [
        ("alike", partly_quantised("nothing", &|_| false)),
        ("one dense", partly_quantised("re:.*experts.2.*", &|l| l.contains(".experts.2."))),
        ("downs dense", partly_quantised("re:.*experts.*down_proj", &is_down)),
    ];
    let mut bytes = Vec::new();
    for (name, made) in &folders {
        for dtype in [DType::F32, DType::F16] {
            let logits = |dir: &TempDir| {
                let context = cuda_context()?;
                let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
                let folder = Model::open(dir.str()).expect("a folder");
                let limits = PassLimits::of_tokens(folder.config(), 64);
                let plan =
                    folder.device_plan(dtype, KvFormat::Dense, &limits, false).expect("a plan");
                let backend = CpuBackend::new(2).expect("threads");
                let model = folder
                    .load_on_device(context, &backend, &options, &mut |_| true)
                    .unwrap_or_else(|e| panic!("{name}, {dtype}: {e}"));
                assert_eq!(plan.weights_bytes, model.weights_bytes(), "{name}, {dtype}");
                let mut all = Driver::new(&model, 8).logits(&ids, usize::MAX);
                all.extend(Driver::new(&model, 8).logits(&ids, 1));
                Some((all, plan.weights_bytes))
            };
            let Some((quantised, size)) = logits(&made.quantised) else { return };
            let Some((dense, _)) = logits(&made.dense) else { return };
            let off = relative_rms(&quantised, &dense);
            println!("{name}, {dtype}: {size} bytes, {off:.1e}");
            assert!(
                off < if dtype == DType::F32 { 1e-4 } else { 0.05 },
                "{name}, {dtype}: {off:.1e}"
            );
            bytes.push(size);
        }
    }
    // Only those that are alike are kept in 8 bits, and attention in all folders.
    let in_f16: Vec<u64> = bytes.iter().copied().skip(1).step_by(2).collect();
    assert!(matches!(in_f16[..], [alike, one, downs] if alike < one && one == downs), "{bytes:?}");
}

/// A folder may quantise some experts and leave others.
#[test]
fn experts_may_be_stored_in_several_forms() {
    let made = partly_quantised("re:.*experts.2.*", &|layer| layer.contains(".experts.2."));
    // Otherwise some processors round these weights for many tokens.
    let options =
        LoadOptions { dtype: Some(DType::F32), deterministic: true, ..LoadOptions::default() };
    let as_computed = ActivationFormat::AsComputed;
    let logits = |dir: &TempDir| {
        let folder = Model::open(dir.str()).expect("a folder");
        assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
        let backend = Arc::new(CpuBackend::new(2).expect("threads"));
        let plan =
            folder.host_plan(DType::F32, KvFormat::Dense, as_computed, 2, 64, 64).expect("a plan");
        let model = folder.load(backend, &options, &mut |_| true).expect("a model");
        assert_eq!(plan.weights_bytes, model.weights_bytes());
        let ids: Vec<u32> = (0..64).map(|i| i * 37 % 1000).collect();
        let mut driver = Driver::new(&model, 8);
        let logits = driver.logits(&ids, usize::MAX);
        assert!(driver.workspace_bytes() as u64 <= plan.workspace_bytes);
        logits
    };
    let off = relative_rms(&logits(&made.quantised), &logits(&made.dense));
    assert!(off < 1e-4, "{off:.1e}");
}
