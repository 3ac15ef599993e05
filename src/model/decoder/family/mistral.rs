//! `MistralForCausalLM` (Mistral 7B, arXiv 2310.06825; Transformers 5.17 `configuration_mistral.py` and
//! `modeling_mistral.py`). The first release has a sliding window in all layers, later ones have none
//! (`null`).

use super::llama_like::{self, Differences, KvHeads};
use super::windows;
use crate::error::Result;
use crate::model::config::fields::Fields;
use crate::model::config::{Biases, ModelConfig, DEFAULT_THETA};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "MistralForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "mistral";

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Count(8),
            default_head_dim: None,
            default_positions: 131_072,
            default_norm_eps: llama_like::DEFAULT_RMS_NORM_EPS,
            default_theta: DEFAULT_THETA,
            has_qk_norm: false,
            biases: Biases::default(),
            windows: windows::of_mistral(fields, llama_like::num_layers(fields)?)?,
            experts: None,
        },
    )
}
