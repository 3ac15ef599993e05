//! `config.json`: what the model is, checked against what this library can run.
//!
//! The meaning and the default of each field are those of Transformers 5.17. Everything that would
//! change the computation and is not implemented is refused by name here, before any weight is
//! looked at. Sizes are limited, so that no product of them can overflow and no absurd value gets
//! as far as an allocation.

pub(in crate::model) mod fields;
mod rope;

use serde_json::Value;

use super::load::heads::HeadSpacing;
use crate::error::{check_room_for_json, Error, Result};
use crate::memory::DType;
use crate::model::folder::shown_name;
use crate::model::quantised::QuantConfig;
use crate::ops::experts::Routing;
use crate::ops::kv_cache::layout::{KvFormat, KvLayout};
use fields::Fields;
pub(super) use rope::DEFAULT_THETA;
pub use rope::{ByWavelength, RopeConfig, RopeScaling, YarnConfig};

/// The name of the configuration file.
pub const CONFIG_FILE: &str = "config.json";
/// The maximum size of the file in bytes; real ones have some kilobytes.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// The largest sizes that are accepted, each several times what is published today.
pub mod limits {
    /// The limit of `hidden_size`.
    pub const HIDDEN_SIZE: usize = 1 << 16;
    /// The limit of `intermediate_size`.
    pub const INTERMEDIATE_SIZE: usize = 1 << 20;
    /// The limit of the number of layers.
    pub const NUM_LAYERS: usize = 1024;
    /// The limit of the number of query heads.
    pub const NUM_HEADS: usize = 1024;
    /// The limit of `head_dim`, which is that of the attention kernels.
    pub const HEAD_DIM: usize = 256;
    /// The limit of the number of entries of the vocabulary.
    pub const VOCAB_SIZE: usize = 1 << 22;
    /// The limit of the number of experts of a layer.
    pub const NUM_EXPERTS: usize = 1024;
    /// The limit of the number of experts of a token.
    pub const EXPERTS_PER_TOKEN: usize = 32;
    /// The limit of the number of experts of all layers: each is planned by itself, however small it is.
    pub const ALL_EXPERTS: usize = 1 << 16;
    /// The limit of the context length in tokens.
    pub const POSITIONS: usize = 1 << 24;
}

/// The kind of norm of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm.
    Rms,
    /// LayerNorm.
    Layer,
}

/// The kind of a block's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// `W_down (silu(W_gate x) * (W_up x))`
    Gated,
    /// `W_down gelu_tanh(W_up x)`
    Plain,
}

/// Which linear layers of a block have biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// The projections to queries, keys and values.
    pub qkv: bool,
    /// The projection of the attention back into the residual stream.
    pub attention_output: bool,
    /// Those of the MLP.
    pub mlp: bool,
}

/// The mixtures of experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How tokens choose their experts.
    pub routing: Routing,
    /// The width of an expert's MLP.
    pub width: usize,
    /// Which layers have one instead of an MLP, `[num_layers]`; at least one does.
    pub layers: Vec<bool>,
}

/// The structure of a model, whatever its family. All counts are at least 1 and within [`limits`];
/// `num_heads` is a multiple of `num_kv_heads`; `head_dim` is even.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The name in `architectures` of config.json, by which the family is known that names the
    /// tensors.
    pub architecture: &'static str,
    /// The number of rows of the embedding; token ids are below it.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP of layers without experts.
    pub intermediate_size: usize,
    /// The number of transformer layers.
    pub num_layers: usize,
    /// The number of query heads.
    pub num_heads: usize,
    /// The number of key and value heads.
    pub num_kv_heads: usize,
    /// The dimension of one head; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// The longest sequence, in tokens, YaRN's extension included.
    pub max_context_tokens: usize,
    /// The most keys that a query of each layer sees, its own included, `[num_layers]`; `None`: all.
    /// All windows are shorter than the context.
    pub windows: Vec<Option<usize>>,
    /// The kind of the norms.
    pub norm: NormKind,
    /// The epsilon of the norms.
    pub norm_eps: f32,
    /// Whether each head of q and k is normalised.
    pub has_qk_norm: bool,
    /// The kind of the MLP, and of each expert.
    pub mlp: MlpKind,
    /// The experts that some or all layers have instead of an MLP.
    pub experts: Option<ExpertsConfig>,
    /// Whether the output matrix is the embedding.
    pub tie_word_embeddings: bool,
    /// Which linear layers have biases.
    pub biases: Biases,
    /// Rotary embedding; `None` with learned positions.
    pub rope: Option<RopeConfig>,
    /// Whether Transformers computes GELU step by step, which bf16 and f16 round each time
    /// (`gelu_new`), or at once (`gelu_pytorch_tanh`).
    pub gelu_in_steps: bool,
    /// The `dtype` (or `torch_dtype`) entry, when it names one that is known. Informative: the
    /// tensors say themselves what they are. Random weights, which have no files, are of this type.
    pub declared_dtype: Option<DType>,
    /// The quantisation of the weights in the files, if there is any.
    pub quantisation: Option<QuantConfig>,
}

impl ModelConfig {
    /// Refuses numbers of heads that no family can mean.
    pub(super) fn check_heads(&self) -> Result<()> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(Error::invalid_file(format!(
                "{CONFIG_FILE}: num_attention_heads {} is not a multiple of num_key_value_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::unsupported(format!(
                "{CONFIG_FILE}: an odd head_dim ({}) is not supported",
                self.head_dim
            )));
        }
        Ok(())
    }

    /// Refuses more experts in all than any model has.
    pub(super) fn check_experts(&self) -> Result<()> {
        let Some(experts) = &self.experts else { return Ok(()) };
        let num_layers = experts.layers.iter().filter(|&&has_experts| has_experts).count();
        let num_experts = experts.routing.num_experts();
        if num_layers.saturating_mul(num_experts) > limits::ALL_EXPERTS {
            return Err(Error::invalid_file(format!(
                "{CONFIG_FILE}: {num_layers} layers have {num_experts} experts each, expected up to {} \
                 experts in all",
                limits::ALL_EXPERTS
            )));
        }
        Ok(())
    }

    /// Returns `num_heads * head_dim`, the number of columns of q.
    pub fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Returns `num_kv_heads * head_dim`, the number of columns of k, and of v.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Returns the experts of a layer, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.layers.get(layer) == Some(&true))
    }

    /// Returns the width of the widest MLP that all tokens pass; 0 if every layer has experts.
    pub fn dense_mlp_width(&self) -> usize {
        let is_dense = |layer| self.experts_of(layer).is_none();
        if (0..self.num_layers).any(is_dense) {
            self.intermediate_size
        } else {
            0
        }
    }

    /// Returns the width of all that a token passes in a layer's MLP or experts.
    pub(super) fn mlp_width_of_token(&self) -> usize {
        let of_experts = self
            .experts
            .as_ref()
            .map_or(0, |experts| experts.routing.experts_per_token().saturating_mul(experts.width));
        self.dense_mlp_width().max(of_experts)
    }

    /// Returns the number of columns of the first product of the MLP: gate and up together if it is
    /// gated.
    pub(super) fn mlp_up_size(&self) -> usize {
        match self.mlp {
            MlpKind::Gated => 2 * self.dense_mlp_width(),
            MlpKind::Plain => self.dense_mlp_width(),
        }
    }

    /// Returns the number of columns of the result of silu_mul; 0 for other activations, which work
    /// in place.
    pub(super) fn mlp_act_size(&self) -> usize {
        match self.mlp {
            MlpKind::Gated => self.dense_mlp_width(),
            MlpKind::Plain => 0,
        }
    }

    /// Returns the layout of a KV cache that is computed with as `dtype`.
    pub fn kv_layout(&self, dtype: DType, format: KvFormat) -> KvLayout {
        KvLayout {
            dtype,
            format,
            num_layers: self.num_layers,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Returns the layout of a KV cache on a device, where short heads are followed by zeros.
    pub(super) fn device_kv_layout(&self, dtype: DType, format: KvFormat) -> Result<KvLayout> {
        let head_dim = HeadSpacing::new(self.head_dim)?.stride;
        Ok(KvLayout { head_dim, ..self.kv_layout(dtype, format) })
    }

    /// Returns the factor of the attention scores before the softmax, `1 / sqrt(head_dim)`.
    pub fn attention_scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }
}

/// Returns the architecture that a `config.json` names, supported or not, for a report. `None` if
/// it names none. Fails for lack of memory alone.
pub fn declared_architecture(json: &[u8]) -> Result<Option<String>> {
    check_room_for_json(json, CONFIG_FILE)?;
    let value: Value = serde_json::from_slice(json).unwrap_or_default();
    let named = value.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
    let name = named.or_else(|| value.get("model_type").and_then(Value::as_str));
    Ok(name.map(shown_name))
}

/// Refuses fields that any Transformers configuration may carry and that would change the
/// computation.
pub(super) fn refuse_what_changes_every_model(fields: Fields<'_>) -> Result<()> {
    fields.refuse_flag("is_encoder_decoder")?;
    // Llama 4 scales queries by their position.
    fields.refuse_flag("attn_temperature_tuning")?;
    fields.refuse_flag("add_cross_attention")?;
    if !fields.flag("is_causal", true)? {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: is_causal = false is not supported"
        )));
    }
    Ok(())
}

/// Returns the entry `dtype` or `torch_dtype`, if it names a supported element type.
pub(in crate::model) fn declared_dtype(fields: Fields<'_>) -> Option<DType> {
    let name = fields.get("dtype").or_else(|| fields.get("torch_dtype"))?.as_str()?;
    match name.trim_start_matches("torch.") {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }
}

/// Refuses an activation function that is none of `supported`, which all compute the same.
pub(in crate::model) fn check_activation(
    fields: Fields<'_>,
    name: &str,
    supported: &[&str],
) -> Result<()> {
    match fields.optional_string(name)? {
        Some(activation) if !supported.contains(&activation) => Err(Error::unsupported(format!(
            "{CONFIG_FILE}: {name} \"{}\" is not supported (supported: {})",
            shown_name(activation),
            supported.join(", ")
        ))),
        _ => Ok(()),
    }
}
