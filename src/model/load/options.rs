//! How a model is loaded.

use crate::memory::DType;

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Element type of the weights and the KV cache; `None` takes the one that is stored.
    pub dtype: Option<DType>,
    /// Read through a mapping of the files instead of `pread`. A file that another process cuts
    /// short meanwhile then kills this process.
    pub map_files: bool,
    /// On a GPU: a row's logits have the same bits whatever is computed beside it, however its
    /// prompt is cut, and whether it is computed for the first time or again. On the CPU that is
    /// always so.
    pub deterministic: bool,
}
