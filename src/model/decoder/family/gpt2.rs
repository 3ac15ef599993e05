//! `GPT2LMHeadModel` (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
//! Transformers 5.17 `configuration_gpt2.py`, whose fields have two names each, and
//! `modeling_gpt2.py`).

use super::windows;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{
    check_activation, declared_dtype, limits, Biases, MlpKind, ModelConfig, NormKind, CONFIG_FILE,
};
use crate::model::decoder::block::{
    AttentionWeights, Block, Decoder, DecoderPlan, LinearWeights, MlpWeights, NormWeights,
};
use crate::model::load::plan::Planner;
use crate::model::load::weights::{MatrixPlan, VectorPlan};
use crate::ops::linear::{ShardAxis, ShardUnit};

/// The name in `architectures` of config.json.
pub(super) const ARCHITECTURE: &str = "GPT2LMHeadModel";
/// The name in `model_type` of config.json.
pub(super) const MODEL_TYPE: &str = "gpt2";

const DEFAULT_LAYER_NORM_EPSILON: f64 = 1e-5;

/// Reads the sizes and kinds that config.json names.
pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
    // All three compute the tanh form (Transformers: activations.py).
    check_activation(
        fields,
        "activation_function",
        &["gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"],
    )?;
    // `reorder_and_upcast_attn` only chooses a precision, and ours is f32 in any case.
    fields.flag("reorder_and_upcast_attn", false)?;
    fields.refuse_flag("scale_attn_by_inverse_layer_idx")?;
    if !fields.flag("scale_attn_weights", true)? {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: scale_attn_weights = false is not supported"
        )));
    }
    let activation = fields.optional_string("activation_function")?;
    let hidden_size = fields.count_of(&["n_embd", "hidden_size"], limits::HIDDEN_SIZE)?;
    let num_heads = fields.count_of(&["n_head", "num_attention_heads"], limits::NUM_HEADS)?;
    let head_dim = hidden_size / num_heads;
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(Error::invalid_file(format!(
            "{CONFIG_FILE}: n_embd {hidden_size} is not a multiple of n_head {num_heads}"
        )));
    }
    if head_dim > limits::HEAD_DIM {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: n_embd / n_head is {head_dim}, more than the {} that is supported",
            limits::HEAD_DIM
        )));
    }
    let norm_eps = fields
        .optional_number("layer_norm_epsilon", 0.0, 1.0)?
        .unwrap_or(DEFAULT_LAYER_NORM_EPSILON);
    let intermediate_size =
        fields.optional_count("n_inner", limits::INTERMEDIATE_SIZE)?.unwrap_or(4 * hidden_size);
    let num_layers = fields.count_of(&["n_layer", "num_hidden_layers"], limits::NUM_LAYERS)?;
    Ok(ModelConfig {
        architecture: ARCHITECTURE,
        vocab_size: fields.count("vocab_size", limits::VOCAB_SIZE)?,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim,
        max_context_tokens: fields
            .count_of(&["n_positions", "max_position_embeddings"], limits::POSITIONS)?,
        windows: windows::of_all(None, num_layers)?,
        norm: NormKind::Layer,
        norm_eps: norm_eps as f32,
        has_qk_norm: false,
        mlp: MlpKind::Plain,
        experts: None,
        tie_word_embeddings: fields.flag("tie_word_embeddings", true)?,
        biases: Biases { qkv: true, attention_output: true, mlp: true },
        rope: None,
        gelu_in_steps: activation != Some("gelu_pytorch_tanh"),
        declared_dtype: declared_dtype(fields),
        quantisation: None,
    })
}

/// Finds the tensors. Their names begin with `transformer.`, except in the files of the original
/// release.
pub(super) fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<DecoderPlan> {
    let prefix = planner.prefix("transformer.", "wte.weight");
    let tokens = planner.token_matrices(config, &format!("{prefix}wte.weight"))?;
    let position_embedding = planner.table(
        &format!("{prefix}wpe.weight"),
        config.max_context_tokens,
        config.hidden_size,
    )?;
    let mut blocks = try_with_capacity(config.num_layers, "layers")?;
    for layer in 0..config.num_layers {
        blocks.push(plan_block(config, planner, &format!("{prefix}h.{layer}"))?);
    }
    let final_norm = norm(planner, &format!("{prefix}ln_f"), config.hidden_size)?;
    Ok(Decoder { tokens, position_embedding: Some(position_embedding), blocks, final_norm })
}

fn plan_block(
    config: &ModelConfig,
    planner: &mut Planner<'_>,
    layer: &str,
) -> Result<Block<MatrixPlan, VectorPlan>> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let attention_norm = norm(planner, &format!("{layer}.ln_1"), hidden)?;
    let mlp_norm = norm(planner, &format!("{layer}.ln_2"), hidden)?;
    let mut linear = |name: &str, in_features, out_features, shard| {
        linear(planner, &format!("{layer}.{name}"), in_features, out_features, shard)
    };
    let (heads, head_inputs) = (ShardAxis::Out(ShardUnit::Head), ShardAxis::In(ShardUnit::Head));
    let (features, inputs) =
        (ShardAxis::Out(ShardUnit::Feature), ShardAxis::In(ShardUnit::Feature));
    let attention = AttentionWeights {
        qkv: linear("attn.c_attn", hidden, 3 * hidden, heads)?,
        qk_norm: None,
        window: None,
        output: linear("attn.c_proj", hidden, hidden, head_inputs)?,
    };
    let mlp = MlpWeights::Plain {
        up: linear("mlp.c_fc", hidden, intermediate, features)?,
        down: linear("mlp.c_proj", intermediate, hidden, inputs)?,
    };
    Ok(Block { attention_norm, attention, mlp_norm, mlp })
}

fn norm(planner: &mut Planner<'_>, name: &str, len: usize) -> Result<NormWeights<VectorPlan>> {
    Ok(NormWeights {
        weight: planner.vector(&[(format!("{name}.weight"), len)])?,
        bias: Some(planner.vector(&[(format!("{name}.bias"), len)])?),
    })
}

fn linear(
    planner: &mut Planner<'_>,
    name: &str,
    in_features: usize,
    out_features: usize,
    shard: ShardAxis,
) -> Result<LinearWeights<MatrixPlan, VectorPlan>> {
    let weight = planner.columns(&format!("{name}.weight"), in_features, out_features)?;
    let bias = planner.vector(&[(format!("{name}.bias"), out_features)])?;
    // The bias of a sum over devices is added only once, so it is not divided.
    let of_bias = if matches!(shard, ShardAxis::Out(_)) { shard } else { ShardAxis::None };
    Ok(LinearWeights { weight: weight.sharded(shard), bias: Some(bias.sharded(of_bias)) })
}
