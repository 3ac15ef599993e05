//! `Qwen3ForCausalLM` on a device; [`crate::model::qwen3`] is the same on the CPU.

use super::decode::mark_linear;
use super::pass::{Activations, Pass};
use super::workspace::DeviceWorkspace;
use crate::backend::DeviceTensor;
use crate::error::Result;
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::model::qwen3::{Qwen3Layer, Qwen3Weights};
use crate::ops::kv_cache::KvSlots;
use crate::ops::linear::cuda_prefill_heads::prefill_heads;
use crate::ops::qk_norm_rope_append::{qk_norm_rope_append, QkNormRope};
use crate::ops::rms_norm::cuda_rounded::add_rms_norm;

impl Pass<'_> {
    /// See [`super::CudaModel::hidden_states`].
    pub fn qwen3(
        &self,
        weights: &Qwen3Weights<DeviceTensor, DeviceTensor>,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
    ) -> Result<Option<DeviceTensor>> {
        let Pass { model, config, context, record, wanted, .. } = *self;
        let num_tokens = record.token_ids.num_elements() as usize;
        let mut act = Activations::new(workspace, num_tokens)?;
        let qkv = self.qkv_view(workspace, num_tokens)?;
        self.embed(&weights.tokens.embedding, workspace, &act)?;
        // What the layer before has not yet added to the residual stream.
        let mut pending = None;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.check_stop(index)?;
            let cache = kv.device_layer(index)?;
            let is_chained = wanted.is_decode && model.decode_kernels.attention;
            let is_ready =
                self.project_heads(layer, pending.as_ref(), &act, cache, &qkv, is_chained)?;
            if is_chained {
                let out = &act.attn_out;
                model.attend_new_tokens(config, layer, cache, record, workspace, &qkv, out)?;
                self.cuda.mark("attention", 0, 0.0)?;
            } else if is_ready {
                self.attend_cached(cache, &qkv, &act.attn_out)?;
            } else {
                self.attend(layer, cache, &qkv, &act.attn_out)?;
            }
            if index + 1 == config.num_layers {
                match self.wanted_rows(workspace, act)? {
                    Some(rows) => act = rows,
                    None => return Ok(None),
                }
            }
            self.mlp(layer, &act)?;
            pending = Some(act.projected.clone());
        }
        let (normed, final_norm) = (&act.normed, &weights.final_norm);
        let pending = pending.as_deref();
        add_rms_norm(context, pending, &act.hidden, final_norm, config.norm_eps, normed)?;
        self.cuda.mark("norm", 0, 0.0)?;
        Ok(Some(normed.clone()))
    }

    /// ```text
    /// hidden += pending
    /// q, k, v = W_qkv rms_norm(hidden) + b_qkv
    /// ```
    /// True if the heads are normalised and rotated, and keys and values in the cache, which is not done with
    /// `is_plain`.
    fn project_heads(
        &self,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        pending: Option<&DeviceTensor>,
        act: &Activations,
        kv: &DeviceKvLayer,
        qkv: &DeviceTensor,
        is_plain: bool,
    ) -> Result<bool> {
        let (context, eps) = (self.context, self.config.norm_eps);
        let num_tokens = qkv.shape().first().map_or(0, |&n| n as usize);
        let row_len = qkv.num_elements() as usize / num_tokens.max(1);
        let pending = pending.map(|pending| &**pending);
        add_rms_norm(context, pending, &act.hidden, &layer.input_norm, eps, &act.normed)?;
        self.cuda.mark("norm", 0, 0.0)?;
        let is_ready = !is_plain && self.model.is_prefill_heads(self.config, &act.normed, layer);
        if is_ready {
            let (how, slots) = self.rotation(layer, kv)?;
            prefill_heads(context, &act.normed, &layer.qkv_proj, &how, &slots, qkv)?;
        } else {
            let rows = qkv.view(0, &[num_tokens, row_len], None)?;
            self.model.linear(&act.normed, &layer.qkv_proj, layer.qkv_bias.as_ref(), &rows)?;
        }
        mark_linear(self.cuda, "qkv_proj", &layer.qkv_proj, num_tokens)?;
        Ok(is_ready)
    }

    /// How the heads of a layer are normalised and turned, and where its keys and values go.
    fn rotation<'a>(
        &'a self,
        layer: &'a Qwen3Layer<DeviceTensor, DeviceTensor>,
        kv: &'a DeviceKvLayer,
    ) -> Result<(QkNormRope<'a>, KvSlots<'a>)> {
        let rope = self.model.rope()?;
        let how = QkNormRope {
            q_norm: &layer.q_norm,
            k_norm: &layer.k_norm,
            eps: self.config.norm_eps,
            cos: &rope.cos,
            sin: &rope.sin,
            positions: &self.record.positions,
        };
        Ok((how, KvSlots { k: &kv.k, v: &kv.v, slots: &self.record.slots }))
    }

    /// ```text
    /// q, k    = rope(rms_norm(q)), rope(rms_norm(k))      each head by itself; k, v into the cache
    /// attn_out = attention(q, cache)
    /// ```
    pub(super) fn attend(
        &self,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        kv: &DeviceKvLayer,
        qkv: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let (how, slots) = self.rotation(layer, kv)?;
        qk_norm_rope_append(self.context, qkv, &how, &slots)?;
        self.cuda.mark("qk_norm_rope_append", 0, 0.0)?;
        self.attend_cached(kv, qkv, out)
    }

    /// ```text
    /// hidden   += W_o attn_out + b_o
    /// gate, up  = W_gate_up rms_norm(hidden)
    /// projected = W_down (silu(gate) * up)                to be added to hidden
    /// ```
    fn mlp(&self, layer: &Qwen3Layer<DeviceTensor, DeviceTensor>, act: &Activations) -> Result<()> {
        let (context, eps) = (self.context, self.config.norm_eps);
        let num_rows = act.hidden.shape().first().map_or(0, |&n| n as usize);
        let mark = |name, weight| mark_linear(self.cuda, name, weight, num_rows);
        let model = self.model;
        model.linear(&act.attn_out, &layer.o_proj, layer.o_bias.as_ref(), &act.projected)?;
        mark("o_proj", &layer.o_proj)?;
        let attended = Some(&*act.projected);
        add_rms_norm(context, attended, &act.hidden, &layer.post_norm, eps, &act.normed)?;
        self.cuda.mark("norm", 0, 0.0)?;
        model.swiglu(&act.normed, &layer.gate_up_proj, &act.gate_up, &act.mlp_act)?;
        mark("gate_up_proj", &layer.gate_up_proj)?;
        model.linear(&act.mlp_act, &layer.down_proj, None, &act.projected)?;
        mark("down_proj", &layer.down_proj)
    }
}
