//! Reads the golden vectors of the operators: `ops/index.json` and its safetensors files.

use std::path::PathBuf;

/// Returns the folder of golden data: XSERV_GOLDEN, or `../shared/golden` beside the crate. None
/// (with a message) when it is not there.
pub fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("XSERV_GOLDEN").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/golden"),
        PathBuf::from,
    );
    if folder.join("ops/index.json").is_file() {
        Some(folder)
    } else {
        println!("skipped: no golden data in {} (set XSERV_GOLDEN)", folder.display());
        None
    }
}

/// One case of the index.
pub struct Case {
    /// `<case>` with the `.f32` or `.bf16` ending.
    pub name: String,
    pub params: serde_json::Value,
}

/// All cases of an operator, with the file that holds their tensors.
pub struct Golden {
    pub cases: Vec<Case>,
    bytes: Vec<u8>,
}

/// A tensor as f64 values (exact for every stored type).
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Tensor {
    pub fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|&v| v as f32).collect()
    }

    pub fn u32(&self) -> Vec<u32> {
        self.values.iter().map(|&v| v as u32).collect()
    }
}

pub fn open(op: &str) -> Option<Golden> {
    let folder = folder()?.join("ops");
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap();
    let cases = index
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| case["op"] == op)
        .map(|case| Case {
            name: case["case"].as_str().unwrap().to_owned(),
            params: case["params"].clone(),
        })
        .collect::<Vec<_>>();
    assert!(!cases.is_empty(), "no golden cases of {op}");
    let bytes = std::fs::read(folder.join(format!("{op}.safetensors"))).unwrap();
    Some(Golden { cases, bytes })
}

impl Golden {
    pub fn tensor(&self, case: &Case, name: &str) -> Tensor {
        let file = safetensors::SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(&format!("{}.{name}", case.name)).unwrap();
        let data = view.data();
        let values = match view.dtype() {
            safetensors::Dtype::F64 => {
                data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
            }
            safetensors::Dtype::F32 => {
                data.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
            }
            safetensors::Dtype::BF16 => data
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| f64::from(half::bf16::from_le_bytes(*b).to_f32()))
                .collect(),
            safetensors::Dtype::I32 => {
                data.as_chunks::<4>().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect()
            }
            safetensors::Dtype::I64 => {
                data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect()
            }
            other => panic!("golden tensor of type {other:?}"),
        };
        Tensor { shape: view.shape().to_vec(), values }
    }
}
