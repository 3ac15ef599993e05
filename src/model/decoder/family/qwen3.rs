//! `Qwen3ForCausalLM` (Qwen3 technical report, arXiv 2505.09388; Transformers 5.17
//! `configuration_qwen3.py` and `modeling_qwen3.py`).

use super::llama_like::{self, Differences, KvHeads};
use super::windows;
use crate::error::Result;
use crate::model::config::fields::Fields;
use crate::model::config::{Biases, ModelConfig, DEFAULT_THETA};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "Qwen3ForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "qwen3";

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    let attention = fields.flag("attention_bias", false)?;
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Required,
            default_head_dim: Some(128),
            default_positions: 32_768,
            default_norm_eps: llama_like::DEFAULT_RMS_NORM_EPS,
            default_theta: DEFAULT_THETA,
            has_qk_norm: true,
            biases: Biases { qkv: attention, attention_output: attention, mlp: false },
            windows: windows::of_qwen(fields, llama_like::num_layers(fields)?)?,
            experts: None,
        },
    )
}
