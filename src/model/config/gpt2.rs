//! `GPT2LMHeadModel`: the fields of Transformers' `GPT2Config`, under both of their names.

use super::fields::Fields;
use super::{check_activation, declared_dtype, limits, Architecture, ModelConfig, CONFIG_FILE};
use crate::error::{Error, Result};

const DEFAULT_LAYER_NORM_EPSILON: f64 = 1e-5;

pub fn parse(fields: Fields<'_>) -> Result<ModelConfig> {
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
    Ok(ModelConfig {
        architecture: Architecture::Gpt2,
        vocab_size: fields.count("vocab_size", limits::VOCAB_SIZE)?,
        hidden_size,
        intermediate_size,
        num_layers: fields.count_of(&["n_layer", "num_hidden_layers"], limits::NUM_LAYERS)?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim,
        max_context_tokens: fields
            .count_of(&["n_positions", "max_position_embeddings"], limits::POSITIONS)?,
        norm_eps: norm_eps as f32,
        tie_word_embeddings: fields.flag("tie_word_embeddings", true)?,
        attention_bias: true,
        rope: None,
        gelu_in_steps: activation != Some("gelu_pytorch_tanh"),
        declared_dtype: declared_dtype(fields),
    })
}
