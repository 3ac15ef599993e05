//! What the descendants of Llama have in common (Touvron et al. 2023, arXiv 2302.13971): RMSNorm,
//! rotary positions, grouped queries and a gated MLP. A family of this shape is the few things in
//! which it differs: see [`Differences`].

use super::windows::Windows;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{
    check_activation, declared_dtype, limits, Biases, ExpertsConfig, MlpKind, ModelConfig,
    NormKind, RopeConfig, RopeScaling, CONFIG_FILE,
};
use crate::model::decoder::block::{
    AttentionWeights, Block, Decoder, DecoderPlan, ExpertWeights, LinearWeights, MlpWeights,
    NormWeights, QkNormWeights,
};
use crate::model::load::plan::Planner;
use crate::model::load::weights::{MatrixPlan, VectorPlan};
use crate::ops::experts::Routing;
use crate::ops::linear::{ShardAxis, ShardUnit};

/// The epsilon of the norms of most families where config.json has no `rms_norm_eps`.
pub(super) const DEFAULT_RMS_NORM_EPS: f64 = 1e-6;

/// What sets a family apart from the others of this shape.
pub(super) struct Differences {
    /// The name in `architectures` of config.json.
    pub architecture: &'static str,
    /// The number of key and value heads where config.json has no `num_key_value_heads`. An explicit
    /// `null` means as many as query heads.
    pub default_kv_heads: KvHeads,
    /// The head_dim where config.json has none; `None` and an explicit `null` mean
    /// `hidden_size / num_attention_heads`.
    pub default_head_dim: Option<usize>,
    /// `max_position_embeddings` where config.json has none.
    pub default_positions: usize,
    /// `rms_norm_eps` where config.json has none.
    pub default_norm_eps: f64,
    /// `rope_theta` where config.json has none.
    pub default_theta: f64,
    /// Whether each head of q and k is normalised.
    pub has_qk_norm: bool,
    /// Which linear layers have biases.
    pub biases: Biases,
    /// The sliding window of each layer.
    pub windows: Windows,
    /// The experts that layers have instead of an MLP.
    pub experts: Option<ExpertsConfig>,
}

/// See [`Differences::default_kv_heads`].
pub(super) enum KvHeads {
    /// config.json must say.
    Required,
    /// As many as query heads.
    AsQueries,
    /// This many.
    Count(usize),
}

/// Reads the sizes that config.json names.
pub(super) fn parse(fields: Fields<'_>, family: Differences) -> Result<ModelConfig> {
    check_activation(fields, "hidden_act", &["silu", "swish"])?;
    let hidden_size = fields.count("hidden_size", limits::HIDDEN_SIZE)?;
    let num_heads = fields.count("num_attention_heads", limits::NUM_HEADS)?;
    let num_kv_heads = match fields.optional_count("num_key_value_heads", limits::NUM_HEADS)? {
        Some(n) => n,
        None if fields.has("num_key_value_heads") => num_heads,
        None => match family.default_kv_heads {
            KvHeads::Required => return Err(fields.missing("num_key_value_heads")),
            KvHeads::AsQueries => num_heads,
            KvHeads::Count(n) => n,
        },
    };
    let head_dim = match fields.optional_count("head_dim", limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None => match family.default_head_dim.filter(|_| !fields.has("head_dim")) {
            Some(head_dim) => head_dim,
            None => head_dim_of(hidden_size, num_heads)?,
        },
    };
    let max_position_embeddings = fields
        .optional_count("max_position_embeddings", limits::POSITIONS)?
        .unwrap_or(family.default_positions);
    let rope = RopeConfig::parse(
        fields,
        family.default_theta,
        max_position_embeddings,
        limits::POSITIONS,
    )?;
    let max_context_tokens = context_tokens(max_position_embeddings, &rope);
    let mut windows = family.windows;
    // One that is as long as the context hides nothing.
    windows.iter_mut().for_each(|of| *of = of.filter(|&window| window < max_context_tokens));
    let norm_eps =
        fields.optional_number("rms_norm_eps", 0.0, 1.0)?.unwrap_or(family.default_norm_eps);
    Ok(ModelConfig {
        architecture: family.architecture,
        vocab_size: fields.count("vocab_size", limits::VOCAB_SIZE)?,
        hidden_size,
        intermediate_size: fields.count("intermediate_size", limits::INTERMEDIATE_SIZE)?,
        num_layers: num_layers(fields)?,
        num_heads,
        num_kv_heads,
        head_dim,
        max_context_tokens,
        windows,
        norm: NormKind::Rms,
        norm_eps: norm_eps as f32,
        has_qk_norm: family.has_qk_norm,
        mlp: MlpKind::Gated,
        experts: family.experts,
        tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
        biases: family.biases,
        rope: Some(rope),
        gelu_in_steps: false,
        declared_dtype: declared_dtype(fields),
        quantisation: None,
    })
}

/// Reads the number of layers.
pub(super) fn num_layers(fields: Fields<'_>) -> Result<usize> {
    fields.count("num_hidden_layers", limits::NUM_LAYERS)
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

/// Returns the length of the context. The model cards of Qwen leave `max_position_embeddings` as it
/// is and add YaRN with a factor over the tokens of the pretraining; the context is then their
/// product. Other kinds of scaling are counted in `max_position_embeddings`.
fn context_tokens(max_position_embeddings: usize, rope: &RopeConfig) -> usize {
    let stretched = match &rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.factor * yarn.original_max_position_embeddings as f64,
        _ => 0.0,
    };
    max_position_embeddings.max(stretched.min(limits::POSITIONS as f64) as usize)
}

/// Reads the number of experts, which has two names: Transformers 5 takes either in all families, and
/// writes the first.
pub(super) fn num_experts(fields: Fields<'_>) -> Result<Option<usize>> {
    let [first, second] = ["num_local_experts", "num_experts"];
    match (
        fields.optional_count(first, limits::NUM_EXPERTS)?,
        fields.optional_count(second, limits::NUM_EXPERTS)?,
    ) {
        (Some(count), Some(other)) if count != other => Err(Error::invalid_file(format!(
            "{CONFIG_FILE}: {first} is {count}, but {second} is {other}"
        ))),
        (count, other) => Ok(count.or(other)),
    }
}

/// Returns how tokens choose `num_experts_per_tok` of `num_experts` experts.
pub(super) fn routing(num_experts: usize, per_token: usize, renormalises: bool) -> Result<Routing> {
    Routing::new(num_experts, per_token, renormalises)
        .map_err(|e| Error::invalid_file(format!("{CONFIG_FILE}: {}", e.message())))
}

/// What a family calls the tensors of its experts, after the name of the layer.
pub(super) struct ExpertNames {
    /// The router, before `.weight`.
    pub router: &'static str,
    /// What the experts' names begin with, before their numbers.
    pub experts: &'static str,
    /// Gate, up and down of an expert, before `.weight`.
    pub projections: [&'static str; 3],
}

/// The names of Qwen's experts.
pub(super) const EXPERT_NAMES: ExpertNames = ExpertNames {
    router: "mlp.gate",
    experts: "mlp.experts",
    projections: ["gate_proj", "up_proj", "down_proj"],
};

/// Finds the tensors; see [`plan_named`].
pub(super) fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<DecoderPlan> {
    plan_named(config, planner, &EXPERT_NAMES)
}

/// Finds the tensors. Their names begin with `model.`, unless the model was saved without its
/// output matrix.
pub(super) fn plan_named(
    config: &ModelConfig,
    planner: &mut Planner<'_>,
    names: &ExpertNames,
) -> Result<DecoderPlan> {
    let prefix = planner.prefix("model.", "embed_tokens.weight");
    let tokens = planner.token_matrices(config, &format!("{prefix}embed_tokens.weight"))?;
    let mut blocks = try_with_capacity(config.num_layers, "layers")?;
    for layer in 0..config.num_layers {
        let window = config.windows.get(layer).copied().flatten();
        let name = format!("{prefix}layers.{layer}");
        let experts = match config.experts_of(layer) {
            Some(experts) => {
                let weights = plan_experts(config.hidden_size, experts, planner, &name, names)?;
                Some(MlpWeights::Experts(weights))
            }
            None => None,
        };
        blocks.push(plan_block(config, planner, &name, window, experts)?);
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
    window: Option<usize>,
    experts: Option<MlpWeights<MatrixPlan, VectorPlan>>,
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
    let mut biases = |parts: &[(String, usize)], is_there: bool, shard: ShardAxis| {
        is_there.then(|| Ok(planner.vector(parts)?.sharded(shard))).transpose()
    };
    let Biases { qkv: of_qkv, attention_output: of_output, mlp: of_mlp } = config.biases;
    let qkv_bias = biases(&qkv(&bias), of_qkv, heads)?;
    // The bias of a sum over devices is added only once, so it is not divided.
    let output_bias = biases(&[(bias("self_attn.o_proj"), hidden)], of_output, ShardAxis::None)?;
    let gate_up = |kind: &dyn Fn(&str) -> String| {
        [(kind("mlp.gate_proj"), intermediate), (kind("mlp.up_proj"), intermediate)]
    };
    let of_mlp = of_mlp && experts.is_none();
    let gate_up_bias = biases(&gate_up(&bias), of_mlp, features)?;
    let down_bias = biases(&[(bias("mlp.down_proj"), hidden)], of_mlp, ShardAxis::None)?;
    let qk_norm = if config.has_qk_norm {
        Some(QkNormWeights {
            q: planner.vector(&[(weight("self_attn.q_norm"), config.head_dim)])?,
            k: planner.vector(&[(weight("self_attn.k_norm"), config.head_dim)])?,
        })
    } else {
        None
    };
    let attention_norm = norm(planner, weight("input_layernorm"), hidden)?;
    let attention = AttentionWeights {
        qkv: LinearWeights {
            weight: planner.rows(&qkv(&weight), hidden)?.sharded(heads),
            bias: qkv_bias,
        },
        qk_norm,
        window,
        output: LinearWeights {
            weight: planner.rows(&[(weight("self_attn.o_proj"), hidden)], q)?.sharded(head_inputs),
            bias: output_bias,
        },
    };
    let mlp_norm = norm(planner, weight("post_attention_layernorm"), hidden)?;
    let mlp = match experts {
        Some(experts) => experts,
        None => MlpWeights::Gated {
            gate_up: LinearWeights {
                weight: planner.rows(&gate_up(&weight), hidden)?.sharded(features).gated(),
                bias: gate_up_bias,
            },
            down: LinearWeights {
                weight: planner
                    .rows(&[(weight("mlp.down_proj"), hidden)], intermediate)?
                    .sharded(inputs),
                bias: down_bias,
            },
        },
    };
    Ok(Block { attention_norm, attention, mlp_norm, mlp })
}

/// Finds the router and the experts of a layer. Each expert has tensors of its own, unless Transformers 5
/// has written all experts as one tensor `[num_experts, 2 * width, hidden_size]` and one
/// `[num_experts, hidden_size, width]`.
fn plan_experts(
    hidden: usize,
    experts: &ExpertsConfig,
    planner: &mut Planner<'_>,
    layer: &str,
    names: &ExpertNames,
) -> Result<ExpertWeights<MatrixPlan>> {
    let (num_experts, width) = (experts.routing.num_experts(), experts.width);
    let router = format!("{layer}.{}.weight", names.router);
    let router = planner.router(router, num_experts, hidden)?;
    let mut gate_up = try_with_capacity(num_experts, "experts")?;
    let mut down = try_with_capacity(num_experts, "experts")?;
    let all = format!("{layer}.{}", names.experts);
    let stacked = format!("{all}.gate_up_proj");
    let is_stacked = planner.contains(&stacked);
    for index in 0..num_experts {
        let (first, last) = if is_stacked {
            let rows = planner.expert_rows(&stacked, index, num_experts, (2 * width, hidden))?;
            let narrowing = format!("{all}.down_proj");
            (rows, planner.expert_rows(&narrowing, index, num_experts, (hidden, width))?)
        } else {
            let [gate, up, narrowing] =
                names.projections.map(|name| format!("{all}.{index}.{name}.weight"));
            let rows = planner.rows(&[(gate, width), (up, width)], hidden)?;
            (rows, planner.rows(&[(narrowing, hidden)], width)?)
        };
        // Products of experts keep their activations.
        let (mut first, mut last) = (first, last);
        first.keep_activations();
        last.keep_activations();
        gate_up.push(first.sharded(ShardAxis::Out(ShardUnit::Feature)).gated());
        down.push(last.sharded(ShardAxis::In(ShardUnit::Feature)));
    }
    Ok(ExpertWeights { router, gate_up, down })
}
