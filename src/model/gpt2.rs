//! `GPT2LMHeadModel` (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
//! Transformers 5.17 `modeling_gpt2.py`).

use super::forward::Pass;
use super::weights::{HeadAxis, MatrixPlan, Planner, TokenMatrices, VectorPlan, WeightReader};
use super::ModelConfig;
use crate::backend::cpu::CpuBackend;
use crate::error::{try_with_capacity, Error, Result};
use crate::ops::activation::cpu::{activation_in_place, Activation};
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::embedding::cpu_packed::embedding;
use crate::ops::layer_norm::cpu::layer_norm;
use crate::ops::linear::cpu::{linear, LinearScratch, Store};

/// The weights of the whole model.
#[derive(Debug)]
pub struct Gpt2Weights<M, V> {
    /// Embedding and output matrix.
    pub tokens: TokenMatrices<M>,
    /// `[max_context_tokens, hidden_size]`
    pub position_embedding: V,
    /// From the first to the last.
    pub layers: Vec<Gpt2Layer<M, V>>,
    /// LayerNorm in front of the output matrix.
    pub final_norm: LayerNormWeights<V>,
}

/// The weights of one layer.
#[derive(Debug)]
pub struct Gpt2Layer<M, V> {
    /// LayerNorm in front of the attention.
    pub attn_norm: LayerNormWeights<V>,
    /// `[3 * hidden_size, hidden_size]`: q, k and v stacked (`attn.c_attn`).
    pub qkv_proj: BiasedMatrix<M, V>,
    /// `[hidden_size, hidden_size]` (`attn.c_proj`).
    pub o_proj: BiasedMatrix<M, V>,
    /// LayerNorm in front of the MLP.
    pub mlp_norm: LayerNormWeights<V>,
    /// `[intermediate_size, hidden_size]` (`mlp.c_fc`).
    pub up_proj: BiasedMatrix<M, V>,
    /// `[hidden_size, intermediate_size]` (`mlp.c_proj`).
    pub down_proj: BiasedMatrix<M, V>,
}

/// A LayerNorm's `[hidden_size]` weight and bias.
#[derive(Debug)]
pub struct LayerNormWeights<V> {
    /// `[hidden_size]`
    pub weight: V,
    /// `[hidden_size]`
    pub bias: V,
}

/// A matrix `[out_features, in_features]` and its bias `[out_features]`.
#[derive(Debug)]
pub struct BiasedMatrix<M, V> {
    /// `[out_features, in_features]`
    pub weight: M,
    /// `[out_features]`
    pub bias: V,
}

impl Gpt2Weights<MatrixPlan, VectorPlan> {
    /// Finds the tensors. Their names begin with `transformer.`, or not, as in the files of the
    /// original release.
    pub fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<Self> {
        let prefix = planner.prefix("transformer.", "wte.weight");
        let tokens = planner.token_matrices(config, &format!("{prefix}wte.weight"))?;
        let position_embedding = planner.table(
            &format!("{prefix}wpe.weight"),
            config.max_context_tokens,
            config.hidden_size,
        )?;
        let mut layers = try_with_capacity(config.num_layers, "layers")?;
        for layer in 0..config.num_layers {
            layers.push(Gpt2Layer::plan(config, planner, &format!("{prefix}h.{layer}"))?);
        }
        let final_norm =
            LayerNormWeights::plan(planner, &format!("{prefix}ln_f"), config.hidden_size)?;
        Ok(Gpt2Weights { tokens, position_embedding, layers, final_norm })
    }

    /// Turns every plan into what `reader` makes of it.
    pub fn read<R: WeightReader>(
        &self,
        reader: &mut R,
    ) -> Result<Gpt2Weights<R::Matrix, R::Vector>> {
        let tokens = self.tokens.read(reader)?;
        let position_embedding = reader.vector(&self.position_embedding)?;
        let mut layers = try_with_capacity(self.layers.len(), "layers")?;
        for layer in &self.layers {
            layers.push(layer.read(reader)?);
        }
        let final_norm = self.final_norm.read(reader)?;
        Ok(Gpt2Weights { tokens, position_embedding, layers, final_norm })
    }
}

impl Gpt2Layer<MatrixPlan, VectorPlan> {
    fn plan(config: &ModelConfig, planner: &mut Planner<'_>, layer: &str) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let mut norm =
            |name: &str| LayerNormWeights::plan(planner, &format!("{layer}.{name}"), hidden);
        let (attn_norm, mlp_norm) = (norm("ln_1")?, norm("ln_2")?);
        let mut matrix = |name: &str, in_features, out_features| {
            BiasedMatrix::plan(planner, &format!("{layer}.{name}"), in_features, out_features)
        };
        Ok(Gpt2Layer {
            attn_norm,
            qkv_proj: matrix("attn.c_attn", hidden, 3 * hidden)?.with_heads(HeadAxis::Rows),
            o_proj: matrix("attn.c_proj", hidden, hidden)?.with_heads(HeadAxis::Columns),
            mlp_norm,
            up_proj: matrix("mlp.c_fc", hidden, intermediate)?,
            down_proj: matrix("mlp.c_proj", intermediate, hidden)?,
        })
    }

    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<Gpt2Layer<R::Matrix, R::Vector>> {
        Ok(Gpt2Layer {
            attn_norm: self.attn_norm.read(reader)?,
            qkv_proj: self.qkv_proj.read(reader)?,
            o_proj: self.o_proj.read(reader)?,
            mlp_norm: self.mlp_norm.read(reader)?,
            up_proj: self.up_proj.read(reader)?,
            down_proj: self.down_proj.read(reader)?,
        })
    }
}

impl LayerNormWeights<VectorPlan> {
    fn plan(planner: &mut Planner<'_>, name: &str, len: usize) -> Result<Self> {
        Ok(LayerNormWeights {
            weight: planner.vector(&[(format!("{name}.weight"), len)])?,
            bias: planner.vector(&[(format!("{name}.bias"), len)])?,
        })
    }

    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<LayerNormWeights<R::Vector>> {
        let weight = reader.vector(&self.weight)?;
        Ok(LayerNormWeights { weight, bias: reader.vector(&self.bias)? })
    }
}

impl BiasedMatrix<MatrixPlan, VectorPlan> {
    fn plan(
        planner: &mut Planner<'_>,
        name: &str,
        in_features: usize,
        out_features: usize,
    ) -> Result<Self> {
        Ok(BiasedMatrix {
            weight: planner.columns(&format!("{name}.weight"), in_features, out_features)?,
            bias: planner.vector(&[(format!("{name}.bias"), out_features)])?,
        })
    }

    /// The same, one of whose axes consists of heads.
    fn with_heads(self, heads: HeadAxis) -> Self {
        let of_bias = if heads == HeadAxis::Rows { heads } else { HeadAxis::None };
        let bias = VectorPlan { heads: of_bias, ..self.bias };
        BiasedMatrix { weight: self.weight.with_heads(heads), bias }
    }

    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<BiasedMatrix<R::Matrix, R::Vector>> {
        let weight = reader.matrix(&self.weight)?;
        Ok(BiasedMatrix { weight, bias: reader.vector(&self.bias)? })
    }
}

impl Gpt2Weights<PackedMatrix, Vec<f32>> {
    /// The whole pass.
    pub(super) fn forward(&self, pass: &mut Pass<'_>, logits: &mut [f32]) -> Result<()> {
        let (backend, eps) = (pass.backend, pass.config.norm_eps);
        embedding(backend, &self.tokens.embedding, pass.batch.token_ids, pass.act.hidden)?;
        self.add_positions(pass)?;
        for (index, layer) in self.layers.iter().enumerate() {
            pass.check_stop()?;
            layer.forward(pass, index)?;
        }
        let norm = |x: &[f32], out: &mut [f32]| self.final_norm.forward(backend, x, eps, out);
        pass.logits(self.tokens.output(), norm, logits)
    }

    /// Adds to each token the learned vector of its position.
    fn add_positions(&self, pass: &mut Pass<'_>) -> Result<()> {
        let hidden_size = pass.config.hidden_size;
        let rows = pass.act.hidden.chunks_exact_mut(hidden_size);
        for (row, &position) in rows.zip(pass.batch.positions) {
            let begin = position as usize * hidden_size;
            let learned =
                self.position_embedding.get(begin..begin + hidden_size).ok_or_else(|| {
                    Error::invalid_argument(format!("there is no position {position}"))
                })?;
            row.iter_mut().zip(learned).for_each(|(x, y)| *x += y);
        }
        Ok(())
    }
}

impl Gpt2Layer<PackedMatrix, Vec<f32>> {
    /// ```text
    /// q, k, v = W_qkv layer_norm(hidden) + b_qkv
    /// hidden += W_o attention(q, k, v) + b_o
    /// hidden += W_down gelu_tanh(W_up layer_norm(hidden) + b_up) + b_down
    /// ```
    fn forward(&self, pass: &mut Pass<'_>, index: usize) -> Result<()> {
        let (backend, eps) = (pass.backend, pass.config.norm_eps);
        let num_tokens = pass.batch.num_tokens();

        let act = &mut pass.act;
        self.attn_norm.forward(backend, act.hidden, eps, act.normed)?;
        self.qkv_proj.forward(
            backend,
            act.normed,
            num_tokens,
            act.qkv,
            Store::Overwrite,
            act.linear,
        )?;
        pass.attend(index)?;

        let (num_rows, act) = (pass.num_rows, &mut pass.act);
        self.o_proj.forward(backend, act.attn_out, num_rows, act.hidden, Store::Add, act.linear)?;
        self.mlp_norm.forward(backend, act.hidden, eps, act.normed)?;
        self.up_proj.forward(
            backend,
            act.normed,
            num_rows,
            act.mlp_up,
            Store::Overwrite,
            act.linear,
        )?;
        activation_in_place(backend, Activation::GeluTanh, act.mlp_up)?;
        self.down_proj.forward(backend, act.mlp_up, num_rows, act.hidden, Store::Add, act.linear)
    }
}

impl LayerNormWeights<Vec<f32>> {
    fn forward(&self, backend: &CpuBackend, x: &[f32], eps: f32, out: &mut [f32]) -> Result<()> {
        layer_norm(backend, x, &self.weight, Some(&self.bias), eps, out)
    }
}

impl BiasedMatrix<PackedMatrix, Vec<f32>> {
    fn forward(
        &self,
        backend: &CpuBackend,
        x: &[f32],
        num_tokens: usize,
        out: &mut [f32],
        store: Store,
        scratch: &mut LinearScratch,
    ) -> Result<()> {
        linear(backend, x, num_tokens, &self.weight, Some(&self.bias), out, store, scratch)
    }
}
