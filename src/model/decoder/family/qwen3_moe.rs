//! `Qwen3MoeForCausalLM`: Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder (Qwen3 technical report, arXiv
//! 2505.09388; Transformers 5.17 `configuration_qwen3_moe.py` and `modeling_qwen3_moe.py`). Qwen3 with
//! experts in place of the MLP of some or all layers.

use serde_json::Value;

use super::llama_like::{self, Differences, KvHeads};
use super::windows;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{
    limits, Biases, ExpertsConfig, ModelConfig, CONFIG_FILE, DEFAULT_THETA,
};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "Qwen3MoeForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "qwen3_moe";

/// Reads the sizes and kinds that config.json names. Tensors are found by [`llama_like::plan`].
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    let attention = fields.flag("attention_bias", false)?;
    let num_layers = llama_like::num_layers(fields)?;
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Count(4),
            default_head_dim: None,
            default_positions: 32_768,
            default_norm_eps: llama_like::DEFAULT_RMS_NORM_EPS,
            default_theta: DEFAULT_THETA,
            has_qk_norm: true,
            biases: Biases { qkv: attention, attention_output: attention, mlp: false },
            windows: windows::of_qwen_moe(fields, num_layers)?,
            experts: experts(fields, num_layers)?,
        },
    )
}

/// Reads which layers have experts, and which these are; `None` if no layer has any.
fn experts(fields: Fields<'_>, num_layers: usize) -> Result<Option<ExpertsConfig>> {
    let num_experts = llama_like::num_experts(fields)?.unwrap_or(128);
    let per_token =
        fields.optional_count("num_experts_per_tok", limits::EXPERTS_PER_TOKEN)?.unwrap_or(8);
    let width =
        fields.optional_count("moe_intermediate_size", limits::INTERMEDIATE_SIZE)?.unwrap_or(768);
    let renormalises = fields.flag("norm_topk_prob", false)?;
    let routing = llama_like::routing(num_experts, per_token, renormalises)?;
    let step = fields.optional_count("decoder_sparse_step", limits::NUM_LAYERS)?.unwrap_or(1);
    let dense = dense_layers(fields)?;
    let mut layers = try_with_capacity(num_layers, "layers")?;
    layers.extend(
        (0..num_layers)
            .map(|layer| !dense.contains(&(layer as u64)) && (layer + 1).is_multiple_of(step)),
    );
    Ok(layers.contains(&true).then_some(ExpertsConfig { routing, width, layers }))
}

/// Reads `mlp_only_layers`, the layers that have an MLP whatever `decoder_sparse_step` says.
fn dense_layers(fields: Fields<'_>) -> Result<Vec<u64>> {
    let Some(value) = fields.get("mlp_only_layers") else { return Ok(Vec::new()) };
    let wrong = || fields.wrong("mlp_only_layers", "a list of layers");
    let Value::Array(list) = value else { return Err(wrong()) };
    if list.len() > limits::NUM_LAYERS {
        return Err(Error::invalid_file(format!(
            "{CONFIG_FILE}: mlp_only_layers has {} entries, expected up to {}",
            list.len(),
            limits::NUM_LAYERS
        )));
    }
    let mut layers = try_with_capacity(list.len(), "layers")?;
    for layer in list {
        layers.push(layer.as_u64().ok_or_else(wrong)?);
    }
    Ok(layers)
}
