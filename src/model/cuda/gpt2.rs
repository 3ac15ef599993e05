//! `GPT2LMHeadModel` on a device; [`crate::model::gpt2`] is the same on the CPU. Its matrices lie as they are
//! stored, `[in_features, out_features]`.

use super::decode::mark_linear;
use super::pass::{biased_product, Activations, Pass};
use super::workspace::DeviceWorkspace;
use crate::backend::DeviceTensor;
use crate::error::Result;
use crate::model::gpt2::{BiasedMatrix, Gpt2Layer, Gpt2Weights, LayerNormWeights};
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::ops::activation::activation;
use crate::ops::activation::cpu::Activation;
use crate::ops::activation::cuda_rounded::gelu_tanh;
use crate::ops::elementwise::add;
use crate::ops::embedding::embedding;
use crate::ops::kv_cache::cuda::kv_cache_append;
use crate::ops::kv_cache::KvSlots;
use crate::ops::layer_norm::layer_norm;
use crate::ops::linear::LinearResult;

type Matrix = BiasedMatrix<DeviceTensor, DeviceTensor>;
type Layer = Gpt2Layer<DeviceTensor, DeviceTensor>;

impl Pass<'_> {
    /// See [`super::CudaModel::hidden_states`].
    pub fn gpt2(
        &self,
        weights: &Gpt2Weights<DeviceTensor, DeviceTensor>,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
    ) -> Result<Option<DeviceTensor>> {
        let num_tokens = self.record.token_ids.num_elements() as usize;
        let mut act = Activations::new(workspace, num_tokens)?;
        let qkv = self.qkv_view(workspace, num_tokens)?;
        self.embed(&weights.tokens.embedding, workspace, &act)?;
        self.add_positions(&weights.position_embedding, &act)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.check_stop(index)?;
            self.attend_gpt2(layer, kv.device_layer(index)?, &act, &qkv)?;
            if index + 1 == self.config.num_layers {
                match self.wanted_rows(workspace, act)? {
                    Some(rows) => act = rows,
                    None => return Ok(None),
                }
            }
            self.mlp_gpt2(layer, &act)?;
        }
        self.norm(&weights.final_norm, &act)?;
        Ok(Some(act.normed))
    }

    /// Adds to each token the learned vector of its position. table `[max_context_tokens * hidden_size]`
    fn add_positions(&self, table: &DeviceTensor, act: &Activations) -> Result<()> {
        let shape = [self.config.max_context_tokens, self.config.hidden_size];
        let learned = &act.projected;
        embedding(self.context, &*table.view(0, &shape, None)?, &self.record.positions, learned)?;
        add(self.context, &act.hidden, learned, &act.hidden)?;
        self.cuda.mark("positions", 0, 0.0)
    }

    /// ```text
    /// q, k, v  = W_qkv layer_norm(hidden) + b_qkv               k, v into the cache
    /// attn_out = attention(q, cache)
    /// ```
    fn attend_gpt2(
        &self,
        layer: &Layer,
        kv: &DeviceKvLayer,
        act: &Activations,
        qkv: &DeviceTensor,
    ) -> Result<()> {
        self.norm(&layer.attn_norm, act)?;
        let num_tokens = qkv.shape().first().map_or(0, |&n| n as usize);
        let row_len = qkv.num_elements() as usize / num_tokens.max(1);
        let rows = qkv.view(0, &[num_tokens, row_len], None)?;
        self.conv1d("qkv_proj", &act.normed, &layer.qkv_proj, &rows)?;
        let slots = KvSlots { k: &kv.k, v: &kv.v, slots: &self.record.slots };
        kv_cache_append(self.context, qkv, &slots)?;
        self.cuda.mark("kv_cache_append", 0, 0.0)?;
        self.attend_cached(kv, qkv, &act.attn_out)
    }

    /// ```text
    /// hidden += W_o attn_out + b_o
    /// hidden += W_down gelu_tanh(W_up layer_norm(hidden) + b_up) + b_down
    /// ```
    fn mlp_gpt2(&self, layer: &Layer, act: &Activations) -> Result<()> {
        let (context, up) = (self.context, &act.gate_up);
        self.conv1d("o_proj", &act.attn_out, &layer.o_proj, &act.projected)?;
        add(context, &act.hidden, &act.projected, &act.hidden)?;
        self.norm(&layer.mlp_norm, act)?;
        self.conv1d("up_proj", &act.normed, &layer.up_proj, up)?;
        match self.config.gelu_in_steps {
            true => gelu_tanh(context, up)?,
            false => activation(context, Activation::GeluTanh, up, up)?,
        }
        self.cuda.mark("gelu_tanh", 0, 0.0)?;
        self.conv1d("down_proj", up, &layer.down_proj, &act.projected)?;
        add(context, &act.hidden, &act.projected, &act.hidden)
    }

    /// `act.normed = layer_norm(act.hidden)`
    fn norm(&self, norm: &LayerNormWeights<DeviceTensor>, act: &Activations) -> Result<()> {
        let (eps, bias) = (self.config.norm_eps, Some(&*norm.bias));
        layer_norm(self.context, &act.hidden, &norm.weight, bias, eps, &act.normed)?;
        self.cuda.mark("norm", 0, 0.0)
    }

    /// `out = x weight + bias`. x [num_rows, in_features], out [num_rows, out_features].
    fn conv1d(
        &self,
        name: &'static str,
        x: &DeviceTensor,
        matrix: &Matrix,
        out: &DeviceTensor,
    ) -> Result<()> {
        let (weight, bias) = (&matrix.weight, Some(&matrix.bias));
        let order = self.model.sum_order(weight, LinearResult::Plain);
        biased_product(self.context, order, x, weight, false, bias, out)?;
        let num_rows = x.shape().first().map_or(0, |&n| n as usize);
        mark_linear(self.cuda, name, weight, num_rows)
    }
}
