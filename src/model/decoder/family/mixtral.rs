//! `MixtralForCausalLM`: Mixtral 8x7B and 8x22B (Mixtral of Experts, arXiv 2401.04088; Transformers 5.17
//! `configuration_mixtral.py` and `modeling_mixtral.py`). Mistral with experts in place of every MLP.

use super::llama_like::{self, Differences, ExpertNames, KvHeads};
use super::windows;
use crate::error::{try_filled, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{limits, Biases, ExpertsConfig, ModelConfig};
use crate::model::decoder::block::DecoderPlan;
use crate::model::load::plan::Planner;

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "MixtralForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "mixtral";

/// The names in published files.
const EXPERT_NAMES: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    experts: "block_sparse_moe.experts",
    projections: ["w1", "w3", "w2"],
};

/// The names that modules have in Transformers 5, which renames what it reads.
const RENAMED: ExpertNames =
    ExpertNames { router: "mlp.gate", experts: "mlp.experts", projections: ["w1", "w3", "w2"] };

/// Reads the sizes and kinds that config.json names. The weights of a token's experts always have the
/// sum 1.
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    let num_layers = llama_like::num_layers(fields)?;
    let num_experts = llama_like::num_experts(fields)?.unwrap_or(8);
    let per_token =
        fields.optional_count("num_experts_per_tok", limits::EXPERTS_PER_TOKEN)?.unwrap_or(2);
    llama_like::parse(
        fields,
        Differences {
            architecture: ARCHITECTURE,
            default_kv_heads: KvHeads::Count(8),
            default_head_dim: None,
            default_positions: 131_072,
            default_norm_eps: 1e-5,
            default_theta: 1e6,
            has_qk_norm: false,
            biases: Biases::default(),
            windows: windows::of_mixtral(fields, num_layers)?,
            experts: Some(ExpertsConfig {
                routing: llama_like::routing(num_experts, per_token, true)?,
                width: fields.count("intermediate_size", limits::INTERMEDIATE_SIZE)?,
                layers: try_filled(num_layers, true, "layers")?,
            }),
        },
    )
}

/// Finds the tensors.
pub(super) fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<DecoderPlan> {
    let is_renamed = ["", "model."]
        .into_iter()
        .any(|prefix| planner.contains(&format!("{prefix}layers.0.{}.weight", RENAMED.router)));
    llama_like::plan_named(config, planner, if is_renamed { &RENAMED } else { &EXPERT_NAMES })
}
