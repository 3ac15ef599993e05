//! `Qwen3ForCausalLM` (Qwen3 technical report, arXiv 2505.09388; Transformers 5.17
//! `modeling_qwen3.py`).

use super::forward::Pass;
use super::weights::{HeadAxis, MatrixPlan, Planner, TokenMatrices, VectorPlan, WeightReader};
use super::ModelConfig;
use crate::error::{try_with_capacity, Result};
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::embedding::cpu_packed::embedding;
use crate::ops::linear::cpu::{linear, Store};
use crate::ops::rms_norm::cpu::rms_norm;
use crate::ops::rms_norm::cpu_heads::rms_norm_heads;
use crate::ops::rope::cpu_table::{rope, RopeTable};
use crate::ops::rope::RopePairing;
use crate::ops::silu_mul::cpu_stacked::silu_mul;

/// The weights of the whole model.
#[derive(Debug)]
pub struct Qwen3Weights<M, V> {
    /// Embedding and output matrix.
    pub tokens: TokenMatrices<M>,
    /// From the first to the last.
    pub layers: Vec<Qwen3Layer<M, V>>,
    /// `[hidden_size]`, RMSNorm in front of the output matrix.
    pub final_norm: V,
}

/// The weights of one layer.
#[derive(Debug)]
pub struct Qwen3Layer<M, V> {
    /// `[hidden_size]`, RMSNorm in front of the attention.
    pub input_norm: V,
    /// `[q_size + 2 * kv_size, hidden_size]`: q, k and v stacked.
    pub qkv_proj: M,
    /// `[q_size + 2 * kv_size]`, with `attention_bias`.
    pub qkv_bias: Option<V>,
    /// `[head_dim]`, RMSNorm of each query head.
    pub q_norm: V,
    /// `[head_dim]`, RMSNorm of each key head.
    pub k_norm: V,
    /// `[hidden_size, q_size]`
    pub o_proj: M,
    /// `[hidden_size]`, with `attention_bias`.
    pub o_bias: Option<V>,
    /// `[hidden_size]`, RMSNorm in front of the MLP.
    pub post_norm: V,
    /// `[2 * intermediate_size, hidden_size]`: gate and up stacked.
    pub gate_up_proj: M,
    /// `[hidden_size, intermediate_size]`
    pub down_proj: M,
}

impl Qwen3Weights<MatrixPlan, VectorPlan> {
    /// Finds the tensors. Their names begin with `model.`, or not where the model was saved
    /// without its output matrix.
    pub fn plan(config: &ModelConfig, planner: &mut Planner<'_>) -> Result<Self> {
        let prefix = planner.prefix("model.", "embed_tokens.weight");
        let tokens = planner.token_matrices(config, &format!("{prefix}embed_tokens.weight"))?;
        let mut layers = try_with_capacity(config.num_layers, "layers")?;
        for layer in 0..config.num_layers {
            layers.push(Qwen3Layer::plan(config, planner, &format!("{prefix}layers.{layer}"))?);
        }
        let final_norm = planner.vector(&[(format!("{prefix}norm.weight"), config.hidden_size)])?;
        Ok(Qwen3Weights { tokens, layers, final_norm })
    }

    /// Turns every plan into what `reader` makes of it.
    pub fn read<R: WeightReader>(
        &self,
        reader: &mut R,
    ) -> Result<Qwen3Weights<R::Matrix, R::Vector>> {
        let tokens = self.tokens.read(reader)?;
        let mut layers = try_with_capacity(self.layers.len(), "layers")?;
        for layer in &self.layers {
            layers.push(layer.read(reader)?);
        }
        Ok(Qwen3Weights { tokens, layers, final_norm: reader.vector(&self.final_norm)? })
    }
}

impl Qwen3Layer<MatrixPlan, VectorPlan> {
    fn plan(config: &ModelConfig, planner: &mut Planner<'_>, layer: &str) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_size(), config.kv_size());
        let weight = |name: &str| format!("{layer}.{name}.weight");
        let bias = |name: &str| format!("{layer}.{name}.bias");
        let attention = |kind: &dyn Fn(&str) -> String| {
            [
                (kind("self_attn.q_proj"), q),
                (kind("self_attn.k_proj"), kv),
                (kind("self_attn.v_proj"), kv),
            ]
        };
        let (qkv_bias, o_bias) = if config.attention_bias {
            let o_bias = planner.vector(&[(bias("self_attn.o_proj"), hidden)])?;
            let qkv_bias = planner.vector(&attention(&bias))?;
            (Some(VectorPlan { heads: HeadAxis::Rows, ..qkv_bias }), Some(o_bias))
        } else {
            (None, None)
        };
        Ok(Qwen3Layer {
            input_norm: planner.vector(&[(weight("input_layernorm"), hidden)])?,
            qkv_proj: planner.rows(&attention(&weight), hidden)?.with_heads(HeadAxis::Rows),
            qkv_bias,
            q_norm: planner.vector(&[(weight("self_attn.q_norm"), config.head_dim)])?,
            k_norm: planner.vector(&[(weight("self_attn.k_norm"), config.head_dim)])?,
            o_proj: planner
                .rows(&[(weight("self_attn.o_proj"), hidden)], q)?
                .with_heads(HeadAxis::Columns),
            o_bias,
            post_norm: planner.vector(&[(weight("post_attention_layernorm"), hidden)])?,
            gate_up_proj: planner.rows(
                &[(weight("mlp.gate_proj"), intermediate), (weight("mlp.up_proj"), intermediate)],
                hidden,
            )?,
            down_proj: planner.rows(&[(weight("mlp.down_proj"), hidden)], intermediate)?,
        })
    }

    fn read<R: WeightReader>(&self, reader: &mut R) -> Result<Qwen3Layer<R::Matrix, R::Vector>> {
        Ok(Qwen3Layer {
            input_norm: reader.vector(&self.input_norm)?,
            qkv_proj: reader.matrix(&self.qkv_proj)?,
            qkv_bias: self.qkv_bias.as_ref().map(|plan| reader.vector(plan)).transpose()?,
            q_norm: reader.vector(&self.q_norm)?,
            k_norm: reader.vector(&self.k_norm)?,
            o_proj: reader.matrix(&self.o_proj)?,
            o_bias: self.o_bias.as_ref().map(|plan| reader.vector(plan)).transpose()?,
            post_norm: reader.vector(&self.post_norm)?,
            gate_up_proj: reader.matrix(&self.gate_up_proj)?,
            down_proj: reader.matrix(&self.down_proj)?,
        })
    }
}

impl Qwen3Weights<PackedMatrix, Vec<f32>> {
    /// The whole pass.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        rope_table: &RopeTable,
        logits: &mut [f32],
    ) -> Result<()> {
        let (backend, eps) = (pass.backend, pass.config.norm_eps);
        embedding(backend, &self.tokens.embedding, pass.batch.token_ids, pass.act.hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            pass.check_stop()?;
            layer.forward(pass, index, rope_table)?;
        }
        let norm = |x: &[f32], out: &mut [f32]| rms_norm(backend, x, &self.final_norm, eps, out);
        pass.logits(self.tokens.output(), norm, logits)
    }
}

impl Qwen3Layer<PackedMatrix, Vec<f32>> {
    /// ```text
    /// q, k, v = W_qkv rms_norm(hidden) + b_qkv
    /// q, k    = rope(rms_norm(q)), rope(rms_norm(k))      each head by itself
    /// hidden += W_o attention(q, k, v) + b_o
    /// gate, up = W_gate_up rms_norm(hidden)
    /// hidden += W_down (silu(gate) * up)
    /// ```
    fn forward(&self, pass: &mut Pass<'_>, index: usize, rope_table: &RopeTable) -> Result<()> {
        let (config, backend, batch) = (pass.config, pass.backend, pass.batch);
        let (num_tokens, eps) = (batch.num_tokens(), config.norm_eps);
        let (num_heads, num_kv_heads) = (config.num_heads, config.num_kv_heads);
        let row_stride = config.q_size() + 2 * config.kv_size();

        let act = &mut pass.act;
        rms_norm(backend, act.hidden, &self.input_norm, eps, act.normed)?;
        linear(
            backend,
            act.normed,
            num_tokens,
            &self.qkv_proj,
            self.qkv_bias.as_deref(),
            act.qkv,
            Store::Overwrite,
            act.linear,
        )?;
        rms_norm_heads(backend, act.qkv, num_tokens, row_stride, num_heads, &self.q_norm, eps)?;
        let k = act.qkv.get_mut(config.q_size()..).unwrap_or_default();
        rms_norm_heads(backend, k, num_tokens, row_stride, num_kv_heads, &self.k_norm, eps)?;
        // The heads of k follow those of q in each row: one call turns both.
        rope(
            backend,
            act.qkv,
            row_stride,
            num_heads + num_kv_heads,
            batch.positions,
            rope_table,
            RopePairing::SplitHalf,
        )?;
        pass.attend(index)?;

        let (num_rows, act) = (pass.num_rows, &mut pass.act);
        linear(
            backend,
            act.attn_out,
            num_rows,
            &self.o_proj,
            self.o_bias.as_deref(),
            act.hidden,
            Store::Add,
            act.linear,
        )?;
        rms_norm(backend, act.hidden, &self.post_norm, eps, act.normed)?;
        linear(
            backend,
            act.normed,
            num_rows,
            &self.gate_up_proj,
            None,
            act.mlp_up,
            Store::Overwrite,
            act.linear,
        )?;
        silu_mul(backend, act.mlp_up, config.intermediate_size, act.mlp_act)?;
        linear(
            backend,
            act.mlp_act,
            num_rows,
            &self.down_proj,
            None,
            act.hidden,
            Store::Add,
            act.linear,
        )
    }
}
