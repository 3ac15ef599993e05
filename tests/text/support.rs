//! The folders of the vectors, and small tokenizers.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use xserv::text::{SpecialTokens, Tokenizer};
use xserv::thread_state::thread_cpu_time;

/// Measures the processor time of the thread that started it: unlike a clock it does not run while
/// other programs do.
pub struct Watch {
    began: Duration,
}

impl Watch {
    pub fn start() -> Self {
        Watch { began: thread_cpu_time() }
    }

    pub fn elapsed(&self) -> Duration {
        thread_cpu_time() - self.began
    }
}

/// Returns a file or folder of the reference data, or a printed word that it is not there.
fn data(variable: &str, default: &str) -> Option<PathBuf> {
    let folder = match std::env::var_os(variable) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(default),
    };
    if folder.is_dir() {
        return Some(folder);
    }
    println!("skipped: {} is not there (set {variable})", folder.display());
    None
}

/// Returns the reference data made with Transformers.
pub fn golden() -> Option<PathBuf> {
    data("XSERV_GOLDEN", "../shared/golden")
}

/// Returns the published vocabularies.
pub fn real_tokenizers() -> Option<PathBuf> {
    data("XSERV_REAL_TOKENIZER", "../shared/real-tokenizer")
}

/// Returns the vectors in the repository.
pub fn own(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn tokenizer(folder: &Path) -> Arc<Tokenizer> {
    let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let config = std::fs::read(folder.join("tokenizer_config.json")).ok();
    Arc::new(Tokenizer::from_bytes(&json, config.as_deref()).unwrap())
}

pub fn special_tokens(folder: &Path) -> SpecialTokens {
    SpecialTokens::from_config(&std::fs::read(folder.join("tokenizer_config.json")).unwrap())
        .unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
