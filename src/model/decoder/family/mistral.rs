//! `MistralForCausalLM` (Mistral 7B, arXiv 2310.06825; Transformers 5.17 `configuration_mistral.py` and
//! `modeling_mistral.py`).
//!
//! The sliding window of the first release hides keys that are `sliding_window` or more tokens
//! back. Within a context of that length it hides nothing, so the context ends there; later releases
//! have none (`null`).

use super::llama_like::{self, Differences, KvHeads};
use crate::error::Result;
use crate::model::config::fields::Fields;
use crate::model::config::{limits, Biases, ModelConfig};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "MistralForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "mistral";

/// The window where config.json has no `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    llama_like::check_layer_types(fields, llama_like::num_layers(fields)?)?;
    let window = match fields.optional_count("sliding_window", limits::POSITIONS)? {
        None if !fields.has("sliding_window") => Some(DEFAULT_WINDOW),
        window => window,
    };
    llama_like::parse(
        fields,
        &Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Count(8),
            default_head_dim: None,
            default_positions: 131_072,
            has_qk_norm: false,
            biases: Biases::default(),
            window,
        },
    )
}
