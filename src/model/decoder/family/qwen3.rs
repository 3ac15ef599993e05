//! `Qwen3ForCausalLM` (Qwen3 technical report, arXiv 2505.09388; Transformers 5.17
//! `configuration_qwen3.py` and `modeling_qwen3.py`).

use serde_json::Value;

use crate::error::{try_with_capacity, Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{
    check_activation, declared_dtype, limits, MlpKind, ModelConfig, NormKind, RopeConfig,
    CONFIG_FILE,
};
use crate::model::decoder::block::{
    AttentionWeights, Block, Decoder, DecoderPlan, LinearWeights, MlpWeights, NormWeights,
    QkNormWeights,
};
use crate::model::folder::shown_name;
use crate::model::load::plan::Planner;
use crate::model::load::weights::{MatrixPlan, VectorPlan};
use crate::ops::linear::{ShardAxis, ShardUnit};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "Qwen3ForCausalLM";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "qwen3";

/// Transformers' default where config.json has no `head_dim`. An explicit `null` means
/// `hidden_size / num_attention_heads` instead.
const DEFAULT_HEAD_DIM: usize = 128;
const DEFAULT_MAX_POSITION_EMBEDDINGS: usize = 32_768;
const DEFAULT_RMS_NORM_EPS: f64 = 1e-6;

/// Reads the sizes and kinds that config.json names.
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    check_activation(fields, "hidden_act", &["silu", "swish"])?;
    let hidden_size = fields.count("hidden_size", limits::HIDDEN_SIZE)?;
    let num_layers = fields.count("num_hidden_layers", limits::NUM_LAYERS)?;
    let num_heads = fields.count("num_attention_heads", limits::NUM_HEADS)?;
    let num_kv_heads = match fields.optional_count("num_key_value_heads", limits::NUM_HEADS)? {
        Some(n) => n,
        None if fields.has("num_key_value_heads") => num_heads,
        None => return Err(fields.missing("num_key_value_heads")),
    };
    let head_dim = match fields.optional_count("head_dim", limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if fields.has("head_dim") => head_dim_of(hidden_size, num_heads)?,
        None => DEFAULT_HEAD_DIM,
    };
    let max_position_embeddings = fields
        .optional_count("max_position_embeddings", limits::POSITIONS)?
        .unwrap_or(DEFAULT_MAX_POSITION_EMBEDDINGS);
    refuse_sliding_window(fields, num_layers)?;
    let rope = RopeConfig::parse(fields, max_position_embeddings, limits::POSITIONS)?;
    let norm_eps =
        fields.optional_number("rms_norm_eps", 0.0, 1.0)?.unwrap_or(DEFAULT_RMS_NORM_EPS);
    Ok(ModelConfig {
        architecture: ARCHITECTURE,
        vocab_size: fields.count("vocab_size", limits::VOCAB_SIZE)?,
        hidden_size,
        intermediate_size: fields.count("intermediate_size", limits::INTERMEDIATE_SIZE)?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        max_context_tokens: context_tokens(max_position_embeddings, &rope),
        norm: NormKind::Rms,
        norm_eps: norm_eps as f32,
        has_qk_norm: true,
        mlp: MlpKind::Gated,
        tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
        attention_bias: fields.flag("attention_bias", false)?,
        rope: Some(rope),
        gelu_in_steps: false,
        declared_dtype: declared_dtype(fields),
    })
}

fn head_dim_of(hidden_size: usize, num_heads: usize) -> Result<usize> {
    let head_dim = hidden_size / num_heads;
    if head_dim == 0 || head_dim > limits::HEAD_DIM {
        return Err(Error::invalid_file(format!(
            "{CONFIG_FILE}: hidden_size / num_attention_heads is {head_dim}, expected 1 to {}",
            limits::HEAD_DIM
        )));
    }
    Ok(head_dim)
}

/// Returns the length of the context. Qwen3's model cards leave `max_position_embeddings` (40960)
/// as it is and add YaRN with a factor over the 32768 tokens of the pretraining; the context is
/// then their product.
fn context_tokens(max_position_embeddings: usize, rope: &RopeConfig) -> usize {
    let stretched = rope
        .yarn
        .as_ref()
        .map_or(0.0, |yarn| yarn.factor * yarn.original_max_position_embeddings as f64);
    max_position_embeddings.max(stretched.min(limits::POSITIONS as f64) as usize)
}

/// Refuses sliding-window layers, which are not implemented. Published Qwen3 files carry the fields
/// and switch them off.
fn refuse_sliding_window(fields: Fields<'_>, num_layers: usize) -> Result<()> {
    match fields.get("layer_types") {
        None => {}
        Some(Value::Array(types)) => {
            if let Some(other) = types.iter().find(|t| t.as_str() != Some("full_attention")) {
                return Err(Error::unsupported(format!(
                    "{CONFIG_FILE}: layer type {} is not supported (supported: full_attention)",
                    shown_name(&other.to_string())
                )));
            }
            if types.len() != num_layers {
                return Err(Error::invalid_file(format!(
                    "{CONFIG_FILE}: layer_types has {} entries, but num_hidden_layers is {num_layers}",
                    types.len()
                )));
            }
            return Ok(());
        }
        Some(_) => return Err(fields.wrong("layer_types", "a list of names")),
    }
    if !fields.flag("use_sliding_window", false)? {
        return Ok(());
    }
    // The window begins at layer max_window_layers; with `null` there is no window.
    let has_window = fields.get("sliding_window").is_some() || !fields.has("sliding_window");
    let first = match fields.get("max_window_layers") {
        None => 28,
        Some(value) => {
            value.as_u64().ok_or_else(|| fields.wrong("max_window_layers", "a whole number"))?
        }
    };
    if has_window && first < num_layers as u64 {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: use_sliding_window = true is not supported"
        )));
    }
    Ok(())
}

/// Finds the tensors. Their names begin with `model.`, unless the model was saved without its
/// output matrix.
pub(super) fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<DecoderPlan> {
    let prefix = planner.prefix("model.", "embed_tokens.weight");
    let tokens = planner.token_matrices(config, &format!("{prefix}embed_tokens.weight"))?;
    let mut blocks = try_with_capacity(config.num_layers, "layers")?;
    for layer in 0..config.num_layers {
        blocks.push(plan_block(config, planner, &format!("{prefix}layers.{layer}"))?);
    }
    let final_norm = norm(planner, format!("{prefix}norm.weight"), config.hidden_size)?;
    Ok(Decoder { tokens, position_embedding: None, blocks, final_norm })
}

fn norm(planner: &mut Planner<'_>, name: String, len: usize) -> Result<NormWeights<VectorPlan>> {
    Ok(NormWeights { weight: planner.vector(&[(name, len)])?, bias: None })
}

fn plan_block(
    config: &ModelConfig,
    planner: &mut Planner<'_>,
    layer: &str,
) -> Result<Block<MatrixPlan, VectorPlan>> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.q_size(), config.kv_size());
    let weight = |name: &str| format!("{layer}.{name}.weight");
    let bias = |name: &str| format!("{layer}.{name}.bias");
    let qkv = |kind: &dyn Fn(&str) -> String| {
        [
            (kind("self_attn.q_proj"), q),
            (kind("self_attn.k_proj"), kv),
            (kind("self_attn.v_proj"), kv),
        ]
    };
    let (heads, head_inputs) = (ShardAxis::Out(ShardUnit::Head), ShardAxis::In(ShardUnit::Head));
    let (features, inputs) =
        (ShardAxis::Out(ShardUnit::Feature), ShardAxis::In(ShardUnit::Feature));
    let (qkv_bias, output_bias) = if config.attention_bias {
        let output_bias = planner.vector(&[(bias("self_attn.o_proj"), hidden)])?;
        (Some(planner.vector(&qkv(&bias))?.sharded(heads)), Some(output_bias))
    } else {
        (None, None)
    };
    let attention_norm = norm(planner, weight("input_layernorm"), hidden)?;
    let attention = AttentionWeights {
        qkv: LinearWeights {
            weight: planner.rows(&qkv(&weight), hidden)?.sharded(heads),
            bias: qkv_bias,
        },
        qk_norm: Some(QkNormWeights {
            q: planner.vector(&[(weight("self_attn.q_norm"), config.head_dim)])?,
            k: planner.vector(&[(weight("self_attn.k_norm"), config.head_dim)])?,
        }),
        output: LinearWeights {
            weight: planner.rows(&[(weight("self_attn.o_proj"), hidden)], q)?.sharded(head_inputs),
            bias: output_bias,
        },
    };
    let mlp_norm = norm(planner, weight("post_attention_layernorm"), hidden)?;
    let gate_up = [(weight("mlp.gate_proj"), intermediate), (weight("mlp.up_proj"), intermediate)];
    let mlp = MlpWeights::Gated {
        gate_up: LinearWeights {
            weight: planner.rows(&gate_up, hidden)?.sharded(features),
            bias: None,
        },
        down: LinearWeights {
            weight: planner
                .rows(&[(weight("mlp.down_proj"), hidden)], intermediate)?
                .sharded(inputs),
            bias: None,
        },
    };
    Ok(Block { attention_norm, attention, mlp_norm, mlp })
}
