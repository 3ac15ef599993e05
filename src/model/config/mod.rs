//! `config.json`: what the model is, checked against what this library can run.
//!
//! The meaning and the default of each field are those of Transformers 5.17. Everything that would
//! change the computation and is not implemented is refused by name here, before any weight is
//! looked at. Sizes are limited, so that no product of them can overflow and no absurd value gets
//! as far as an allocation.

mod fields;
mod gpt2;
mod qwen3;
mod rope;

use serde_json::Value;

use super::cuda::HeadSpacing;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::folder::{shown_name, Folder};
use crate::ops::kv_cache::layout::KvLayout;
use fields::Fields;
pub use rope::{RopeConfig, YarnConfig};

/// The name of the file.
pub const CONFIG_FILE: &str = "config.json";
/// Real ones have some kilobytes.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// The largest sizes that are accepted, each several times what is published today.
pub mod limits {
    /// `hidden_size`.
    pub const HIDDEN_SIZE: usize = 1 << 16;
    /// `intermediate_size`.
    pub const INTERMEDIATE_SIZE: usize = 1 << 20;
    /// Layers.
    pub const NUM_LAYERS: usize = 1024;
    /// Query heads.
    pub const NUM_HEADS: usize = 1024;
    /// What the attention kernels take.
    pub const HEAD_DIM: usize = 256;
    /// Entries of the vocabulary.
    pub const VOCAB_SIZE: usize = 1 << 22;
    /// Context length in tokens.
    pub const POSITIONS: usize = 1 << 24;
}

/// The architectures that can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`
    Qwen3,
    /// `GPT2LMHeadModel`
    Gpt2,
}

impl Architecture {
    /// The name that `architectures` of config.json has.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Qwen3 => "Qwen3ForCausalLM",
            Architecture::Gpt2 => "GPT2LMHeadModel",
        }
    }
}

/// What a model is made of, whatever its architecture. All counts are at least 1 and within
/// [`limits`]; `num_heads` is a multiple of `num_kv_heads`; `head_dim` is even.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which forward pass.
    pub architecture: Architecture,
    /// Rows of the embedding; token ids are below it.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Dimension of one head; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// The longest sequence, in tokens, YaRN's extension included.
    pub max_context_tokens: usize,
    /// Epsilon of RMSNorm or LayerNorm.
    pub norm_eps: f32,
    /// Whether the output matrix is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v and the output projection have biases.
    pub attention_bias: bool,
    /// Rotary embedding; `None` with learned positions (GPT-2).
    pub rope: Option<RopeConfig>,
    /// Whether Transformers computes GELU step by step, which bf16 and f16 round each time (`gelu_new` of GPT-2), or
    /// at once (`gelu_pytorch_tanh`).
    pub gelu_in_steps: bool,
    /// The `dtype` (or `torch_dtype`) entry, when it names one that is known. Informative: the
    /// tensors say themselves what they are.
    pub declared_dtype: Option<DType>,
}

impl ModelConfig {
    /// Reads and checks `config.json` of `folder`.
    pub fn read(folder: &Folder) -> Result<Self> {
        Self::parse(&folder.read_small_file(CONFIG_FILE, MAX_CONFIG_BYTES)?)
    }

    /// Checks the content of a `config.json`.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let value: Value = serde_json::from_slice(json).map_err(|e| {
            Error::invalid_file(format!(
                "{CONFIG_FILE} is not valid JSON: {}",
                shown_name(&e.to_string())
            ))
        })?;
        let Value::Object(map) = value else {
            return Err(Error::invalid_file(format!("{CONFIG_FILE} is not a JSON object")));
        };
        let fields = Fields::new(&map, CONFIG_FILE);
        let architecture = architecture(fields)?;
        refuse_what_changes_every_model(fields)?;
        let config = match architecture {
            Architecture::Qwen3 => qwen3::parse(fields)?,
            Architecture::Gpt2 => gpt2::parse(fields)?,
        };
        config.check_heads()?;
        Ok(config)
    }

    fn check_heads(&self) -> Result<()> {
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

    /// `num_heads * head_dim`: columns of q.
    pub fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// `num_kv_heads * head_dim`: columns of k, and of v.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Columns of the first product of the MLP: gate and up together in Qwen3.
    pub(super) fn mlp_up_size(&self) -> usize {
        match self.architecture {
            Architecture::Qwen3 => 2 * self.intermediate_size,
            Architecture::Gpt2 => self.intermediate_size,
        }
    }

    /// Columns of what silu_mul makes of that; GPT-2's activation works in place.
    pub(super) fn mlp_act_size(&self) -> usize {
        match self.architecture {
            Architecture::Qwen3 => self.intermediate_size,
            Architecture::Gpt2 => 0,
        }
    }

    /// What a KV cache of element type `dtype` looks like.
    pub fn kv_layout(&self, dtype: DType) -> KvLayout {
        KvLayout {
            dtype,
            num_layers: self.num_layers,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// The same on a device, where short heads are followed by zeros.
    pub(super) fn device_kv_layout(&self, dtype: DType) -> Result<KvLayout> {
        let head_dim = HeadSpacing::new(self.head_dim)?.stride;
        Ok(KvLayout { head_dim, ..self.kv_layout(dtype) })
    }

    /// The factor of the attention scores before the softmax, `1 / sqrt(head_dim)`.
    pub fn attention_scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }
}

/// The architecture that a `config.json` names, supported or not, for a report. `None` if it cannot
/// be made out.
pub fn declared_architecture(json: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(json).ok()?;
    let named = value.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
    let name = named.or_else(|| value.get("model_type").and_then(Value::as_str))?;
    Some(shown_name(name))
}

/// Which architecture config.json names, in `architectures` or, without it, in `model_type`.
fn architecture(fields: Fields<'_>) -> Result<Architecture> {
    let model_type = fields.optional_string("model_type")?;
    let by_model_type = match model_type {
        Some("qwen3") => Some(Architecture::Qwen3),
        Some("gpt2") => Some(Architecture::Gpt2),
        _ => None,
    };
    let refuse = |name: &str| {
        Err(Error::unsupported(format!(
            "architecture {} is not supported (supported: {}, {})",
            shown_name(name),
            Architecture::Qwen3.name(),
            Architecture::Gpt2.name()
        )))
    };
    let named = match fields.get("architectures") {
        None => None,
        Some(Value::Array(names)) => match names.as_slice() {
            [] => None,
            [Value::String(name)] => Some(name.as_str()),
            [_] => return Err(fields.wrong("architectures", "a list with one name")),
            [first, ..] => {
                let mut all = first.as_str().unwrap_or("?").to_owned();
                all.push_str(" with others");
                return refuse(&all);
            }
        },
        Some(_) => return Err(fields.wrong("architectures", "a list with one name")),
    };
    let architecture = match named {
        Some("Qwen3ForCausalLM") => Architecture::Qwen3,
        Some("GPT2LMHeadModel") => Architecture::Gpt2,
        Some(other) => return refuse(other),
        None => match (by_model_type, model_type) {
            (Some(architecture), _) => architecture,
            (None, Some(other)) => return refuse(other),
            (None, None) => return Err(fields.missing("architectures")),
        },
    };
    match model_type {
        Some(model_type) if by_model_type != Some(architecture) => Err(fields.wrong(
            "model_type",
            &format!("the one of {} (found {})", architecture.name(), shown_name(model_type)),
        )),
        _ => Ok(architecture),
    }
}

/// Fields that any Transformers configuration may carry and that would change the computation.
fn refuse_what_changes_every_model(fields: Fields<'_>) -> Result<()> {
    for name in ["quantization_config", "quantization", "compression_config"] {
        if let Some(value) = fields.get(name) {
            let method = value.get("quant_method").and_then(Value::as_str);
            return Err(Error::unsupported(format!(
                "{CONFIG_FILE}: {name}{} is not supported; only f32, f16 and bf16 weights are",
                method.map(|m| format!(" ({})", shown_name(m))).unwrap_or_default()
            )));
        }
    }
    fields.refuse_flag("is_encoder_decoder")?;
    fields.refuse_flag("add_cross_attention")?;
    if !fields.flag("is_causal", true)? {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: is_causal = false is not supported"
        )));
    }
    Ok(())
}

/// The entry `dtype` or `torch_dtype`, if it names an element type of ours.
fn declared_dtype(fields: Fields<'_>) -> Option<DType> {
    let name = fields.get("dtype").or_else(|| fields.get("torch_dtype"))?.as_str()?;
    match name.trim_start_matches("torch.") {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }
}

/// Refuses an activation function that is none of `supported`, which all compute the same.
fn check_activation(fields: Fields<'_>, name: &str, supported: &[&str]) -> Result<()> {
    match fields.optional_string(name)? {
        Some(activation) if !supported.contains(&activation) => Err(Error::unsupported(format!(
            "{CONFIG_FILE}: {name} \"{}\" is not supported (supported: {})",
            shown_name(activation),
            supported.join(", ")
        ))),
        _ => Ok(()),
    }
}
