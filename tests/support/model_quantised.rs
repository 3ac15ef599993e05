//! Quantised modules of tests/golden/quantised, as they are or damaged.

#![allow(dead_code)] // each test binary uses its part

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{json, Map, Value};
use xserv::error::{ErrorKind, Result};
use xserv::model::checkpoint::{Checkpoint, RawTensor};
use xserv::model::folder::Folder;
use xserv::model::quantised::{QuantConfig, QuantModule};
use xserv::ops::quantised::QuantisedMatrix;

use crate::files::{raw_safetensors, TempDir};

pub const UP: &str = "model.layers.0.mlp.up_proj";
pub const DOWN: &str = "model.layers.0.mlp.down_proj";
/// Module, out, in.
pub const MODULES: [(&str, usize, usize); 2] = [(UP, 96, 64), (DOWN, 64, 96)];

pub fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quantised")
}

/// A folder as it is read: its config, its headers, its one file.
pub struct Opened {
    pub config: QuantConfig,
    pub checkpoint: Checkpoint,
    pub file: Vec<u8>,
}

impl Opened {
    pub fn new(path: &Path) -> Result<Self> {
        let json = std::fs::read(path.join("config.json")).expect("a config");
        let json: Value = serde_json::from_slice(&json).expect("JSON");
        Ok(Opened {
            config: QuantConfig::parse(&json)?.expect("a quantised model"),
            checkpoint: Checkpoint::open(&Folder::open(path)?)?,
            file: std::fs::read(path.join("model.safetensors")).expect("a file"),
        })
    }

    pub fn find(&self, (name, out, inputs): (&str, usize, usize)) -> Result<Option<QuantModule>> {
        QuantModule::find(&self.checkpoint, &self.config, name, out, inputs)
    }

    pub fn bytes(&self, tensor: &RawTensor) -> Result<&[u8]> {
        let begin = tensor.file_offset as usize;
        Ok(&self.file[begin..begin + tensor.len_bytes as usize])
    }
}

/// A tensor that a test may change.
#[derive(Clone)]
pub struct Stored {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A case that a test may damage.
pub struct Case {
    pub config: Value,
    pub tensors: BTreeMap<String, Stored>,
}

impl Case {
    pub fn read(name: &str) -> Self {
        let path = cases().join(name);
        let config = std::fs::read(path.join("config.json")).expect("a config");
        let bytes = std::fs::read(path.join("model.safetensors")).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("a valid file");
        let stored = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
            let (dtype, shape) = (view.dtype().to_string(), view.shape().to_vec());
            (name.to_owned(), Stored { dtype, shape, bytes: view.data().to_vec() })
        };
        Case {
            config: serde_json::from_slice(&config).expect("JSON"),
            tensors: file.iter().map(stored).collect(),
        }
    }

    pub fn say(mut self, key: &str, value: Value) -> Self {
        self.config["quantization_config"][key] = value;
        self
    }

    pub fn tensor(&mut self, last: &str) -> &mut Stored {
        self.tensors.get_mut(&format!("{UP}.{last}")).unwrap_or_else(|| panic!("no {last}"))
    }

    pub fn without(mut self, last: &str) -> Self {
        self.tensors.remove(&format!("{UP}.{last}")).expect("a tensor");
        self
    }

    pub fn with(mut self, last: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Self {
        let tensor =
            Stored { dtype: dtype.to_owned(), shape: shape.to_vec(), bytes: bytes.to_vec() };
        self.tensors.insert(format!("{UP}.{last}"), tensor);
        self
    }

    /// The same tensor in another shape, cut to it or filled up.
    pub fn reshaped(mut self, last: &str, shape: &[usize]) -> Self {
        let tensor = self.tensor(last);
        let size = tensor.bytes.len() / tensor.shape.iter().product::<usize>();
        tensor.bytes.resize(size * shape.iter().product::<usize>(), 0);
        tensor.shape = shape.to_vec();
        self
    }

    /// The same bytes, with others from `at` on.
    pub fn patched(mut self, last: &str, at: usize, bytes: &[u8]) -> Self {
        self.tensor(last).bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub fn decode(&self) -> Result<Option<QuantisedMatrix>> {
        let dir = TempDir::new();
        dir.write("config.json", self.config.to_string());
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, tensor) in &self.tensors {
            let begin = data.len();
            data.extend(&tensor.bytes);
            header.insert(
                name.clone(),
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]}),
            );
        }
        dir.write("model.safetensors", raw_safetensors(&Value::Object(header).to_string(), &data));
        let opened = Opened::new(dir.path())?;
        let found = opened.find(MODULES[0])?;
        found.map(|module| module.decode(|tensor| opened.bytes(tensor))).transpose()
    }

    #[track_caller]
    pub fn is_good(&self) -> QuantisedMatrix {
        self.decode().expect("a good module").expect("a quantised module")
    }

    #[track_caller]
    pub fn is_dense(&self) {
        assert!(self.decode().expect("a good module").is_none());
    }

    /// Refused in words that name the file, the tensor `last` and the rest.
    #[track_caller]
    pub fn refused(&self, last: &str, named: &[&str]) {
        let error = self.decode().expect_err("must be refused");
        let tensor = format!("{UP}.{last}");
        for name in named.iter().copied().chain([tensor.as_str(), "model.safetensors"]) {
            assert!(error.message().contains(name), "{error} does not name {name}");
        }
        assert!(error.message().len() < 400, "{error} is no sentence");
        let kinds = [ErrorKind::InvalidFile, ErrorKind::Unsupported];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
}
