//! `Qwen2ForCausalLM`: Qwen2 and Qwen2.5 (Qwen2.5 technical report, arXiv 2412.15115; Transformers
//! 5.17 `configuration_qwen2.py` and `modeling_qwen2.py`). Queries, keys and values always have
//! biases.

use super::llama_like::{self, Differences, KvHeads};
use super::windows;
use crate::error::Result;
use crate::model::config::fields::Fields;
use crate::model::config::{Biases, ModelConfig, DEFAULT_THETA};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "Qwen2ForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "qwen2";

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Required,
            default_head_dim: None,
            default_positions: 32_768,
            default_norm_eps: llama_like::DEFAULT_RMS_NORM_EPS,
            default_theta: DEFAULT_THETA,
            has_qk_norm: false,
            biases: Biases { qkv: true, ..Biases::default() },
            windows: windows::of_qwen(fields, llama_like::num_layers(fields)?)?,
            experts: None,
        },
    )
}
