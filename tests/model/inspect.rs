//! Reports on folders.

use serde_json::json;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::{inspect, Model};

use crate::driver::load;
use crate::files::{Family, Store, TempDir, TestModel};
use crate::golden;

#[test]
fn a_report_says_what_loading_would_find() {
    for family in Family::ALL {
        a_report_says_what_loading_finds(TestModel::qwen3(1).of(family), &format!("{family:?}"));
    }
}

fn a_report_says_what_loading_finds(mut model: TestModel, family: &str) {
    model.tensors.push(crate::files::TestTensor {
        name: "model.layers.0.odd".to_owned(),
        shape: vec![3],
        values: vec![0.0; 3],
    });
    let dir = model.write(Store::BF16);
    let report = inspect(dir.str()).expect("a report");
    assert!(report.supported, "{:?}", report.reason);
    assert_eq!(report.architecture, Some(format!("{family}ForCausalLM")));
    let numbers: usize = model.tensors.iter().map(|t| t.values.len()).sum();
    assert_eq!(report.num_parameters, Some(numbers as u64 - 3));
    assert_eq!(report.stored_dtypes, [("BF16".to_owned(), 2 * numbers as u64)]);
    assert_eq!(report.dtype, Some(DType::BF16));
    assert!(report.warnings[0].contains("model.layers.0.odd"), "{:?}", report.warnings);

    let loaded = load(dir.str(), None, 1);
    assert_eq!(report.weights_bytes, Some(loaded.weights_bytes()));
    assert_eq!(report.num_parameters, Some(loaded.num_parameters()));
    assert_eq!(report.config.as_ref(), Some(loaded.config()));
    assert_eq!(report.kv_bytes_per_token, Some(loaded.kv_layout().bytes_per_token() as u64));
}

#[test]
fn a_report_says_why_a_folder_is_unsupported() {
    let dir = TestModel::qwen3(1).write(Store::F32);
    let mut config = TestModel::qwen3(1).config;
    config["architectures"] = json!(["MambaForCausalLM"]);
    dir.write("config.json", config.to_string());
    let report = inspect(dir.str()).expect("a report");
    assert!(!report.supported);
    assert_eq!(report.architecture.as_deref(), Some("MambaForCausalLM"));
    assert!(report.reason.expect("a reason").contains("MambaForCausalLM"));
    // The contents of the headers are reported all the same.
    assert!(report.num_parameters > Some(0));
    assert_eq!(report.stored_dtypes.len(), 1);

    dir.write("config.json", "{");
    let report = inspect(dir.str()).expect("a report");
    assert!(!report.supported && report.reason.expect("a reason").contains("config.json"));

    let report = inspect(TempDir::new().str()).expect("an empty folder is a folder");
    assert!(!report.supported && report.reason.is_some());
    assert_eq!(inspect("/nowhere/at/all").expect_err("none").kind(), ErrorKind::NotFound);
}

#[test]
fn the_golden_models_are_reported() {
    for golden in golden::all() {
        let report = inspect(golden.model_path()).expect("a report");
        assert!(report.supported, "{}: {:?}", golden.name, report.reason);
        assert!(report.warnings.is_empty(), "{}", golden.name);
        if golden.name.starts_with("mistral-7b-v0.1") {
            let config = report.config.expect("a config");
            assert_eq!((config.max_context_tokens, config.windows), (1024, vec![Some(128); 2]));
        }
        let folder = Model::open(golden.model_path()).expect("opens");
        assert_eq!(report.dtype, Some(folder.stored_dtype().expect("a type")));
    }
}
