//! What a decoder-only model is made of, whatever its family: the weights, generic over what stands
//! for a matrix `M` and for a vector `V`. First they are *plans*, which check names, shapes and
//! types against the headers and need no weight; then a [`WeightReader`] turns each plan into a
//! loaded weight, or into its size.
//!
//! ```text
//! hidden  = embedding[token] (+ position_embedding[position])
//! for each block:
//!     q, k, v = W_qkv norm(hidden) + b_qkv
//!     q, k    = rope(q_norm(q)), rope(k_norm(k))          where there are such: each head by itself
//!     hidden += W_o attention(q, k, v) + b_o              over all keys, or those of a window
//!     hidden += W_down act(norm(hidden))                  act: gated or plain
//!            or the weighted sum of that over the experts that a router chooses
//! logits  = W_output norm(hidden)
//! ```

use crate::error::{try_with_capacity, Result};
use crate::model::load::weights::{MatrixPlan, VectorPlan, WeightReader};

/// The weights of the whole model.
#[derive(Debug)]
pub struct Decoder<M, V> {
    /// Embedding and output matrix.
    pub tokens: TokenMatrices<M>,
    /// `[max_context_tokens * hidden_size]`, learned positions.
    pub position_embedding: Option<V>,
    /// From the first to the last.
    pub blocks: Vec<Block<M, V>>,
    /// Before the output matrix.
    pub final_norm: NormWeights<V>,
}

/// The embedding and the output matrix.
#[derive(Debug)]
pub struct TokenMatrices<M> {
    /// `[vocab_size, hidden_size]`
    pub embedding: M,
    /// `[vocab_size, hidden_size]`; `None` when it is the embedding.
    pub output: Option<M>,
}

/// The weights of one layer.
#[derive(Debug)]
pub struct Block<M, V> {
    /// Before the attention.
    pub attention_norm: NormWeights<V>,
    /// The attention.
    pub attention: AttentionWeights<M, V>,
    /// Before the MLP.
    pub mlp_norm: NormWeights<V>,
    /// The MLP.
    pub mlp: MlpWeights<M, V>,
}

/// The weights of a norm.
#[derive(Debug)]
pub struct NormWeights<V> {
    /// `[hidden_size]`
    pub weight: V,
    /// `[hidden_size]`
    pub bias: Option<V>,
}

/// A linear layer.
#[derive(Debug)]
pub struct LinearWeights<M, V> {
    /// `[out_features, in_features]`
    pub weight: M,
    /// `[out_features]`
    pub bias: Option<V>,
}

/// The weights of an attention.
#[derive(Debug)]
pub struct AttentionWeights<M, V> {
    /// `[q_size + 2 * kv_size, hidden_size]`: q, k and v stacked.
    pub qkv: LinearWeights<M, V>,
    /// RMSNorm of each query head and of each key head.
    pub qk_norm: Option<QkNormWeights<V>>,
    /// The most keys that a query sees, its own included; `None`: all.
    pub window: Option<usize>,
    /// `[hidden_size, q_size]`
    pub output: LinearWeights<M, V>,
}

/// The norms of heads.
#[derive(Debug)]
pub struct QkNormWeights<V> {
    /// `[head_dim]`
    pub q: V,
    /// `[head_dim]`
    pub k: V,
}

/// The weights of an MLP.
#[derive(Debug)]
pub enum MlpWeights<M, V> {
    /// `W_down (silu(W_gate x) * (W_up x))`
    Gated {
        /// `[2 * intermediate_size, hidden_size]`: gate and up stacked.
        gate_up: LinearWeights<M, V>,
        /// `[hidden_size, intermediate_size]`
        down: LinearWeights<M, V>,
    },
    /// `W_down gelu(W_up x + b_up) + b_down`
    Plain {
        /// `[intermediate_size, hidden_size]`
        up: LinearWeights<M, V>,
        /// `[hidden_size, intermediate_size]`
        down: LinearWeights<M, V>,
    },
    /// `sum of w_e * W_down,e (silu(W_gate,e x) * (W_up,e x))` over the experts e of each token
    Experts(ExpertWeights<M>),
}

/// The weights of a mixture of experts; see [`crate::ops::experts`].
#[derive(Debug)]
pub struct ExpertWeights<M> {
    /// `[num_experts, hidden_size]`
    pub router: M,
    /// `[2 * width, hidden_size]` of each expert: gate and up stacked.
    pub gate_up: Vec<M>,
    /// `[hidden_size, width]` of each expert.
    pub down: Vec<M>,
}

/// The weights before they are read.
pub type DecoderPlan = Decoder<MatrixPlan, VectorPlan>;

impl<M> TokenMatrices<M> {
    /// The matrix that turns hidden states into logits.
    pub fn output(&self) -> &M {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

impl<M, V> MlpWeights<M, V> {
    /// Returns every matrix that each token is multiplied by, but for a router.
    pub fn matrices(&self) -> impl Iterator<Item = &M> {
        let (one, several) = match self {
            MlpWeights::Gated { gate_up, down } => (Some([&gate_up.weight, &down.weight]), None),
            MlpWeights::Plain { up, down } => (Some([&up.weight, &down.weight]), None),
            MlpWeights::Experts(experts) => {
                (None, Some(experts.gate_up.iter().chain(&experts.down)))
            }
        };
        one.into_iter().flatten().chain(several.into_iter().flatten())
    }

    /// The same, to be changed.
    pub fn matrices_mut(&mut self) -> impl Iterator<Item = &mut M> {
        let (one, several) = match self {
            MlpWeights::Gated { gate_up, down } => {
                (Some([&mut gate_up.weight, &mut down.weight]), None)
            }
            MlpWeights::Plain { up, down } => (Some([&mut up.weight, &mut down.weight]), None),
            MlpWeights::Experts(experts) => {
                (None, Some(experts.gate_up.iter_mut().chain(&mut experts.down)))
            }
        };
        one.into_iter().flatten().chain(several.into_iter().flatten())
    }
}

impl DecoderPlan {
    /// Turns every plan into what `reader` makes of it.
    pub fn read<R: WeightReader>(&self, reader: &mut R) -> Result<Decoder<R::Matrix, R::Vector>> {
        let tokens = self.tokens.read(reader)?;
        let position_embedding = &self.position_embedding;
        let position_embedding =
            position_embedding.as_ref().map(|plan| reader.table(plan)).transpose()?;
        let mut blocks = try_with_capacity(self.blocks.len(), "layers")?;
        for block in &self.blocks {
            blocks.push(block.read(reader)?);
        }
        let final_norm = self.final_norm.read(reader)?;
        Ok(Decoder { tokens, position_embedding, blocks, final_norm })
    }
}

impl TokenMatrices<MatrixPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<TokenMatrices<R::Matrix>> {
        let output = match &self.output {
            Some(output) => Some(reader.matrix(output)?),
            None => None,
        };
        let embedding = reader.matrix(&self.embedding)?;
        Ok(TokenMatrices { embedding, output })
    }
}

impl Block<MatrixPlan, VectorPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<Block<R::Matrix, R::Vector>> {
        let attention_norm = self.attention_norm.read(reader)?;
        let attention = self.attention.read(reader)?;
        let mlp_norm = self.mlp_norm.read(reader)?;
        Ok(Block { attention_norm, attention, mlp_norm, mlp: self.mlp.read(reader)? })
    }
}

impl NormWeights<VectorPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<NormWeights<R::Vector>> {
        let weight = reader.norm_weight(&self.weight)?;
        Ok(NormWeights { weight, bias: optional(&self.bias, reader)? })
    }
}

impl LinearWeights<MatrixPlan, VectorPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<LinearWeights<R::Matrix, R::Vector>> {
        let weight = reader.matrix(&self.weight)?;
        Ok(LinearWeights { weight, bias: optional(&self.bias, reader)? })
    }
}

impl AttentionWeights<MatrixPlan, VectorPlan> {
    fn read<R: WeightReader>(
        &self,
        reader: &mut R,
    ) -> Result<AttentionWeights<R::Matrix, R::Vector>> {
        let qkv = self.qkv.read(reader)?;
        let qk_norm = match &self.qk_norm {
            Some(QkNormWeights { q, k }) => {
                Some(QkNormWeights { q: reader.norm_weight(q)?, k: reader.norm_weight(k)? })
            }
            None => None,
        };
        let (window, output) = (self.window, self.output.read(reader)?);
        Ok(AttentionWeights { qkv, qk_norm, window, output })
    }
}

impl MlpWeights<MatrixPlan, VectorPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<MlpWeights<R::Matrix, R::Vector>> {
        Ok(match self {
            MlpWeights::Gated { gate_up, down } => {
                MlpWeights::Gated { gate_up: gate_up.read(reader)?, down: down.read(reader)? }
            }
            MlpWeights::Plain { up, down } => {
                MlpWeights::Plain { up: up.read(reader)?, down: down.read(reader)? }
            }
            MlpWeights::Experts(experts) => MlpWeights::Experts(experts.read(reader)?),
        })
    }
}

impl ExpertWeights<MatrixPlan> {
    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<ExpertWeights<R::Matrix>> {
        let router = reader.matrix(&self.router)?;
        let takes_formats = reader.takes_formats_of_experts(&self.gate_up, &self.down)?;
        let mut read = |plans: &[MatrixPlan]| {
            let mut matrices = try_with_capacity(plans.len(), "experts")?;
            for plan in plans {
                matrices.push(match takes_formats {
                    true => reader.matrix(plan)?,
                    false => reader.matrix(&plan.dense())?,
                });
            }
            Ok(matrices)
        };
        // Those of one kind one after the other: on a device they then lie at equal distances.
        let (gate_up, down) = (read(&self.gate_up)?, read(&self.down)?);
        Ok(ExpertWeights { router, gate_up, down })
    }
}

fn optional<R: WeightReader>(
    plan: &Option<VectorPlan>,
    reader: &mut R,
) -> Result<Option<R::Vector>> {
    plan.as_ref().map(|plan| reader.vector(plan)).transpose()
}
