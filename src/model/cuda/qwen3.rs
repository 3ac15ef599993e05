//! `Qwen3ForCausalLM` on a device; [`crate::model::qwen3`] is the same on the CPU.

use super::workspace::{BatchIndices, DeviceWorkspace};
use super::CudaModel;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{DType, Tensor};
use crate::model::batch::ForwardBatch;
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::model::qwen3::Qwen3Layer;
use crate::model::ModelConfig;
use crate::ops::stepwise::{add_rms_norm, qk_norm_rope_append, silu_mul, KvSlots, QkNormRope};
use crate::ops::tensor::{attention, cast, copy, embedding, gemm, AttentionOptions, GemmOptions};

/// One forward pass under way.
struct Pass<'a> {
    model: &'a CudaModel,
    config: &'a ModelConfig,
    context: &'a ComputeContext,
    indices: &'a BatchIndices,
    /// How every layer attends.
    attention: AttentionOptions,
    /// The rows of the batch that are wanted behind the last attention; `None`: all, in their order.
    wanted: Option<&'a DeviceTensor>,
}

/// The activations cut to the rows of a pass.
struct Activations {
    /// `[num_rows, hidden_size]` each.
    hidden: DeviceTensor,
    normed: DeviceTensor,
    projected: DeviceTensor,
    /// `[num_rows, 2 * intermediate_size]`
    gate_up: DeviceTensor,
    /// `[num_rows, intermediate_size]`
    mlp_act: DeviceTensor,
    /// `[num_rows, num_heads * head_stride]`
    attn_out: DeviceTensor,
}

impl Activations {
    fn new(workspace: &DeviceWorkspace, num_rows: usize) -> Result<Self> {
        let cut = |tensor: &DeviceTensor| rows_of(tensor, num_rows);
        Ok(Activations {
            hidden: cut(&workspace.hidden)?,
            normed: cut(&workspace.normed)?,
            projected: cut(&workspace.projected)?,
            gate_up: cut(&workspace.gate_up)?,
            mlp_act: cut(&workspace.mlp_act)?,
            attn_out: cut(&workspace.attn_out)?,
        })
    }
}

/// The first rows of a matrix.
fn rows_of(matrix: &DeviceTensor, num_rows: usize) -> Result<DeviceTensor> {
    matrix.view(0, &[num_rows, matrix.width() as usize], None)
}

/// `out = x weight^T`, or `+ bias`. x [num_rows, in_features], out [num_rows, out_features].
fn linear(
    context: &ComputeContext,
    x: &Tensor,
    weight: &DeviceTensor,
    bias: Option<&DeviceTensor>,
    out: &DeviceTensor,
) -> Result<()> {
    let mut options = GemmOptions { transpose_b: true, ..GemmOptions::default() };
    if let Some(bias) = bias {
        // The same row for all: the product is added to it in f32 and rounded once.
        let (rows, width) = (out.shape().first().map_or(0, |&n| n as usize), out.width() as usize);
        copy(context, &*bias.view(0, &[rows, width], Some(&[0, 1]))?, out)?;
        options.beta = 1.0;
    }
    gemm(context, &options, x, weight, out)
}

impl CudaModel {
    /// The whole pass over a batch that was checked: keys and values into `kv`, and the logits of the wanted
    /// rows to `logits` `[num_logits_rows, vocab_size]`. All work is done on return.
    pub fn forward(
        &self,
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        kv: &KvCache,
        workspace: &mut DeviceWorkspace,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let context = &*self.context;
        let num_tokens = batch.num_tokens();
        let indices = workspace.upload_indices(&self.context, batch)?;
        let q_lens = batch.cu_seqlens_q.windows(2).map(|ends| match ends {
            [begin, end] => end.saturating_sub(*begin),
            _ => 0,
        });
        let attention = AttentionOptions {
            causal: true,
            scale: Some(config.attention_scale()),
            cu_seqlens_q: Some(*indices.cu_seqlens_q),
            block_tables: Some(*indices.block_tables),
            context_lens: Some(*indices.context_lens),
            max_q_len: q_lens.max().unwrap_or(0),
            max_kv_len: batch.context_lens.iter().copied().max().unwrap_or(0),
            ..AttentionOptions::default()
        };
        let all_rows = batch.logits_rows.iter().copied().eq(0..num_tokens as u32);
        let wanted = (!all_rows).then_some(&indices.logits_rows);
        let pass = Pass { model: self, config, context, indices: &indices, attention, wanted };

        let mut act = Activations::new(workspace, num_tokens)?;
        let qkv = pass.qkv_view(workspace, num_tokens)?;
        embedding(context, &self.weights.tokens.embedding, &indices.token_ids, &act.hidden)?;
        // What the layer before has not yet added to the residual stream.
        let mut pending = None;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if should_stop() {
                return Err(Error::new(ErrorKind::Cancelled, "the forward pass was cancelled"));
            }
            let is_last = index + 1 == config.num_layers;
            pass.attend(layer, kv.device_layer(index)?, pending.as_ref(), &act, &qkv)?;
            if is_last && batch.logits_rows.is_empty() {
                return context.synchronize();
            }
            if is_last && !all_rows {
                act = pass.keep_wanted_rows(workspace, &act, batch.logits_rows.len())?;
            }
            pass.mlp(layer, &act)?;
            pending = Some(act.projected.clone());
        }
        let normed = &act.normed;
        let final_norm = &self.weights.final_norm;
        let pending = pending.as_deref();
        add_rms_norm(context, pending, &act.hidden, final_norm, config.norm_eps, normed)?;
        self.logits(config, normed, workspace, logits)
    }

    /// The logits of all rows of `normed`, a few rows at a time.
    fn logits(
        &self,
        config: &ModelConfig,
        normed: &DeviceTensor,
        workspace: &mut DeviceWorkspace,
        logits: &mut [f32],
    ) -> Result<()> {
        let (context, output) = (&*self.context, self.weights.tokens.output());
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let most = workspace.logits_rows();
        for (index, out) in logits.chunks_mut(most * vocab_size).enumerate() {
            let rows = out.len() / vocab_size;
            let x = normed.view(index * most * hidden_size, &[rows, hidden_size], None)?;
            let f32s = rows_of(&workspace.logits_f32, rows)?;
            if self.dtype == DType::F32 {
                linear(context, &x, output, None, &f32s)?;
            } else {
                // Rounded to the element type first, as Transformers has them.
                let rounded = rows_of(&workspace.logits, rows)?;
                linear(context, &x, output, None, &rounded)?;
                cast(context, &rounded, &f32s)?;
            }
            workspace.read_logits(&f32s, out)?;
        }
        Ok(())
    }
}

impl Pass<'_> {
    /// `[num_tokens, num_heads + 2 * num_kv_heads, head_stride]`
    fn qkv_view(&self, workspace: &DeviceWorkspace, num_tokens: usize) -> Result<DeviceTensor> {
        let heads = self.config.num_heads + 2 * self.config.num_kv_heads;
        workspace.qkv.view(0, &[num_tokens, heads, self.model.spacing.stride], None)
    }

    /// ```text
    /// hidden += pending
    /// q, k, v = W_qkv rms_norm(hidden) + b_qkv
    /// q, k    = rope(rms_norm(q)), rope(rms_norm(k))      each head by itself; k, v into the cache
    /// attn_out = attention(q, cache)
    /// ```
    fn attend(
        &self,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        kv: &DeviceKvLayer,
        pending: Option<&DeviceTensor>,
        act: &Activations,
        qkv: &DeviceTensor,
    ) -> Result<()> {
        let (context, eps) = (self.context, self.config.norm_eps);
        let (num_heads, stride) = (self.config.num_heads, self.model.spacing.stride);
        let num_tokens = qkv.shape().first().map_or(0, |&n| n as usize);
        let row_len = qkv.num_elements() as usize / num_tokens.max(1);

        let pending = pending.map(|pending| &**pending);
        add_rms_norm(context, pending, &act.hidden, &layer.input_norm, eps, &act.normed)?;
        let rows = qkv.view(0, &[num_tokens, row_len], None)?;
        linear(context, &act.normed, &layer.qkv_proj, layer.qkv_bias.as_ref(), &rows)?;
        let how = QkNormRope {
            q_norm: &layer.q_norm,
            k_norm: &layer.k_norm,
            eps,
            cos: &self.model.cos,
            sin: &self.model.sin,
            positions: &self.indices.positions,
        };
        let slots = KvSlots { k: &kv.k, v: &kv.v, slots: &self.indices.slots };
        qk_norm_rope_append(context, qkv, &how, &slots)?;
        let q = qkv.view(0, &[num_tokens, num_heads, stride], Some(&[row_len, stride, 1]))?;
        let out = act.attn_out.view(0, &[num_tokens, num_heads, stride], None)?;
        attention(context, &self.attention, &q, &kv.k, &kv.v, &out)
    }

    /// ```text
    /// hidden   += W_o attn_out + b_o
    /// gate, up  = W_gate_up rms_norm(hidden)
    /// projected = W_down (silu(gate) * up)                to be added to hidden
    /// ```
    fn mlp(&self, layer: &Qwen3Layer<DeviceTensor, DeviceTensor>, act: &Activations) -> Result<()> {
        let (context, eps) = (self.context, self.config.norm_eps);
        linear(context, &act.attn_out, &layer.o_proj, layer.o_bias.as_ref(), &act.projected)?;
        let attended = Some(&*act.projected);
        add_rms_norm(context, attended, &act.hidden, &layer.post_norm, eps, &act.normed)?;
        linear(context, &act.normed, &layer.gate_up_proj, None, &act.gate_up)?;
        silu_mul(context, &act.gate_up, &act.mlp_act)?;
        linear(context, &act.mlp_act, &layer.down_proj, None, &act.projected)
    }

    /// Behind the last attention nothing but the rows whose logits are wanted matters: gathers them. In a
    /// prefill that spares most of the last layer.
    fn keep_wanted_rows(
        &self,
        workspace: &DeviceWorkspace,
        act: &Activations,
        num_rows: usize,
    ) -> Result<Activations> {
        // Rows may be wanted more than once.
        if !workspace.fits(num_rows) {
            return Err(Error::unsupported(format!("the logits of {num_rows} rows at a time")));
        }
        let rows = self.wanted.ok_or_else(|| Error::internal("no rows to gather"))?;
        let hidden = rows_of(&workspace.wanted, num_rows)?;
        // Queries, keys and values are not needed any more.
        let attn_out = workspace.qkv.view(0, &[num_rows, act.attn_out.width() as usize], None)?;
        embedding(self.context, &act.hidden, rows, &hidden)?;
        embedding(self.context, &act.attn_out, rows, &attn_out)?;
        Ok(Activations { hidden, attn_out, ..Activations::new(workspace, num_rows)? })
    }
}
