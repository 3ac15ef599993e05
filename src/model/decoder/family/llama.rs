//! `LlamaForCausalLM`: Llama 1 to 3.3 (The Llama 3 Herd of Models, arXiv 2407.21783; Transformers 5.17
//! `configuration_llama.py` and `modeling_llama.py`), and the many models published under its name.

use super::llama_like::{self, Differences, KvHeads};
use super::windows;
use crate::error::Result;
use crate::model::config::fields::Fields;
use crate::model::config::{Biases, ModelConfig, DEFAULT_THETA};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "LlamaForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "llama";

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
/// `pretraining_tp` only divides products into parts and is not read.
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::AsQueries,
            default_head_dim: None,
            default_positions: 2048,
            default_norm_eps: llama_like::DEFAULT_RMS_NORM_EPS,
            default_theta: DEFAULT_THETA,
            has_qk_norm: false,
            biases: Biases { qkv: attention, attention_output: attention, mlp },
            windows: windows::none(fields, llama_like::num_layers(fields)?)?,
            experts: None,
        },
    )
}
