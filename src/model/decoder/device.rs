//! The forward pass on a device, which queues operators on a stream. The residual stream and all
//! activations have the model's element type, and are rounded where Transformers rounds them.

use super::block::{Block, ExpertWeights, LinearWeights, MlpWeights, NormWeights};
use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, ErrorKind, Result};
use crate::model::batch::ForwardBatch;
use crate::model::config::{ModelConfig, NormKind};
use crate::model::device::lead::Lead;
use crate::model::device::model::DeviceModel;
use crate::model::device::record::DeviceRecord;
use crate::model::device::workspace::DeviceWorkspace;
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::ops::activation::activation;
use crate::ops::activation::cpu::Activation;
use crate::ops::activation::cuda_rounded::gelu_tanh;
use crate::ops::attention::{attention, AttentionOptions, AttentionPlan, DecodeSequences};
use crate::ops::elementwise::add;
use crate::ops::embedding::cuda_chosen::embedding_chosen;
use crate::ops::embedding::cuda_quantised::embedding_quantised;
use crate::ops::embedding::embedding;
use crate::ops::experts::{experts, has_normed_experts, normed_experts, Stream};
use crate::ops::kv_cache::cuda::kv_cache_append;
use crate::ops::kv_cache::KvSlots;
use crate::ops::linear::{Layer, LinearPass, Matrix, Norm, ResidualStream, WeightFormat};
use crate::ops::qk_norm_rope_append::{qk_norm_rope_append, QkNormRope, QkNorms};
use crate::ops::quantised::cuda::QuantisedTiles;

type DeviceBlock = Block<Matrix, DeviceTensor>;

/// One forward pass in progress.
pub(in crate::model) struct DevicePass<'a> {
    pub model: &'a DeviceModel,
    pub config: &'a ModelConfig,
    pub context: &'a ComputeContext,
    pub cuda: &'a CudaContext,
    pub record: &'a DeviceRecord,
    pub wanted: &'a Wanted,
    /// How the linear layers are computed.
    pub linear: LinearPass<'a>,
    pub should_stop: &'a dyn Fn() -> bool,
    /// The number of layers that may be queued and not yet computed; `None` if all may be.
    pub lead: Option<(&'a Lead, usize)>,
}

/// The parts of a pass's task that its record does not hold.
pub(in crate::model) struct Wanted {
    /// The attention of every layer but for its window: first that of the sequences with one token,
    /// then that of the others.
    attention: [Option<AttentionOptions>; 2],
    /// Whether all rows are wanted after the last attention, in their order.
    all_rows: bool,
    /// Whether every sequence has one token; padding rows count as such.
    pub is_decode: bool,
}

impl Wanted {
    /// Returns the task of a batch.
    pub fn of(
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        record: &DeviceRecord,
        plan: &AttentionPlan,
    ) -> Result<Self> {
        let all_rows = batch.logits_rows.iter().copied().eq(0..batch.num_tokens() as u32);
        let attention = attention_parts(config, batch, record, plan)?;
        Ok(Wanted { attention, all_rows, is_decode: false })
    }

    /// Returns the task of a decode step: one token of every sequence and the logits of all,
    /// whatever their lengths.
    pub fn of_decode(config: &ModelConfig, record: &DeviceRecord, plan: &AttentionPlan) -> Self {
        let attention = AttentionOptions {
            scale: Some(config.attention_scale()),
            cu_seqlens_q: Some(*record.cu_seqlens_q),
            block_tables: Some(*record.block_tables),
            context_lens: Some(*record.context_lens),
            max_q_len: 1,
            ..plan.options()
        };
        Wanted { attention: [Some(attention), None], all_rows: true, is_decode: true }
    }
}

/// The activations cut to the rows of a pass.
pub(in crate::model) struct Activations {
    /// `[num_rows, hidden_size]`
    pub stream: ResidualStream,
    /// `[num_rows, num_heads + 2 * num_kv_heads, head_stride]`
    qkv: DeviceTensor,
    /// `[num_rows, num_heads * head_stride]`
    attn_out: DeviceTensor,
    /// `[num_rows, mlp_up_size]`
    mlp_up: DeviceTensor,
    /// `[num_rows, mlp_act_size]`
    mlp_act: DeviceTensor,
}

/// Returns the first `num_rows` rows of a matrix.
pub(in crate::model) fn rows_of(matrix: &DeviceTensor, num_rows: usize) -> Result<DeviceTensor> {
    matrix.view(0, &[num_rows, matrix.width() as usize], None)
}

/// Returns the attention of the leading sequences with one token, and that of all others.
fn attention_parts(
    config: &ModelConfig,
    batch: &ForwardBatch<'_>,
    record: &DeviceRecord,
    plan: &AttentionPlan,
) -> Result<[Option<AttentionOptions>; 2]> {
    let q_lens = batch.cu_seqlens_q.windows(2).map(|ends| match ends {
        [begin, end] => end.saturating_sub(*begin),
        _ => 0,
    });
    let num_short = q_lens.clone().take_while(|&len| len <= 1).count();
    let mut parts = [None, None];
    let ranges = [0..num_short, num_short..batch.num_seqs()];
    for (part, range) in parts.iter_mut().zip(ranges) {
        let (begin, num_seqs) = (range.start, range.len());
        if num_seqs == 0 {
            continue;
        }
        let lens = batch.context_lens.get(range.clone()).unwrap_or_default();
        let width = record.block_tables.width() as usize;
        let block_tables = record.block_tables.view(begin * width, &[num_seqs, width], None)?;
        *part = Some(AttentionOptions {
            scale: Some(config.attention_scale()),
            cu_seqlens_q: Some(*record.cu_seqlens_q.view(begin, &[num_seqs + 1], None)?),
            block_tables: Some(*block_tables),
            context_lens: Some(*record.context_lens.view(begin, &[num_seqs], None)?),
            max_q_len: q_lens.clone().skip(begin).take(num_seqs).max().unwrap_or(0),
            max_kv_len: lens.iter().copied().max().unwrap_or(0),
            ..plan.options()
        });
    }
    Ok(parts)
}

impl DevicePass<'_> {
    /// Queues everything up to the final norm, and returns the activations of the wanted rows, or
    /// `None` if no row is wanted.
    pub fn run(&self, kv: &KvCache, workspace: &DeviceWorkspace) -> Result<Option<Activations>> {
        let weights = &self.model.weights;
        let mut act = self.activations(workspace, self.num_tokens())?;
        self.embed(&weights.tokens.embedding, workspace, &act)?;
        if let Some(table) = &weights.position_embedding {
            self.add_positions(table, &act)?;
        }
        for (index, block) in weights.blocks.iter().enumerate() {
            self.check_stop(index)?;
            self.attend(block, kv.device_layer(index)?, workspace, &mut act)?;
            if index + 1 == weights.blocks.len() {
                match self.wanted_rows(workspace, act)? {
                    Some(rows) => act = rows,
                    None => return Ok(None),
                }
            }
            self.project_and_mlp(block, &mut act)?;
        }
        Ok(Some(act))
    }

    /// Computes `logits = W_output norm(stream)`. `logits` is `[num_rows, vocab_size]` of the
    /// model's element type.
    pub fn logits(&self, act: &mut Activations, logits: &DeviceTensor) -> Result<()> {
        let norm = self.norm(&self.model.weights.final_norm);
        self.linear.normed_output(&mut act.stream, &norm, &self.model.output(), logits)
    }

    /// Computes `stream.normed = norm(stream)` with the final norm.
    pub fn final_norm(&self, act: &mut Activations) -> Result<()> {
        self.linear.normalise(&mut act.stream, &self.norm(&self.model.weights.final_norm))
    }

    fn num_tokens(&self) -> usize {
        self.record.token_ids.num_elements() as usize
    }

    fn activations(&self, workspace: &DeviceWorkspace, num_rows: usize) -> Result<Activations> {
        let cut = |tensor: &DeviceTensor| rows_of(tensor, num_rows);
        let heads = self.config.num_heads + 2 * self.config.num_kv_heads;
        let stream = ResidualStream::new(
            cut(&workspace.hidden)?,
            cut(&workspace.normed)?,
            cut(&workspace.projected)?,
        );
        Ok(Activations {
            stream,
            qkv: workspace.qkv.view(0, &[num_rows, heads, self.model.spacing.stride], None)?,
            attn_out: cut(&workspace.attn_out)?,
            mlp_up: cut(&workspace.gate_up)?,
            mlp_act: cut(&workspace.mlp_act)?,
        })
    }

    fn norm<'w>(&self, weights: &'w NormWeights<DeviceTensor>) -> Norm<'w> {
        let (weight, eps) = (&*weights.weight, self.config.norm_eps);
        match self.config.norm {
            NormKind::Rms => Norm::Rms { weight, eps },
            NormKind::Layer => Norm::Layer { weight, bias: weights.bias.as_deref(), eps },
        }
    }

    /// Ends the pass if the caller asks for it. Called before each layer, and waits while the
    /// device is too far behind.
    fn check_stop(&self, layer: usize) -> Result<()> {
        if let Some((lead, layers)) = self.lead {
            lead.keep(self.cuda, layer, layers)?;
        }
        if (self.should_stop)() {
            return Err(Error::new(ErrorKind::Cancelled, "the forward pass was cancelled"));
        }
        Ok(())
    }

    /// Copies the tokens' rows of `table` `[vocab_size, hidden_size]` to the residual stream.
    fn embed(&self, table: &Matrix, workspace: &DeviceWorkspace, act: &Activations) -> Result<()> {
        let DeviceRecord { token_ids: ids, token_sources: sources, .. } = self.record;
        let (chosen, hidden) = (&workspace.steps.chosen, &act.stream.hidden);
        self.cuda.begin_marks()?;
        match table.format() {
            WeightFormat::Dense(_) => {
                embedding_chosen(self.context, table.dense_data()?, ids, sources, chosen, hidden)?
            }
            WeightFormat::Quantised(layout) => {
                let tiles = QuantisedTiles::new(layout, table.data())?;
                embedding_quantised(self.context, &tiles, ids, sources, chosen, hidden)?
            }
        }
        self.cuda.mark("embedding", 0, 0.0)
    }

    /// Adds to each token the learned vector of its position. `table` is
    /// `[max_context_tokens * hidden_size]`.
    fn add_positions(&self, table: &DeviceTensor, act: &Activations) -> Result<()> {
        let shape = [self.config.max_context_tokens, self.config.hidden_size];
        let (hidden, learned) = (&act.stream.hidden, &act.stream.projected);
        embedding(self.context, &*table.view(0, &shape, None)?, &self.record.positions, learned)?;
        add(self.context, hidden, learned, hidden)?;
        self.cuda.mark("positions", 0, 0.0)
    }

    /// Returns how the heads of a block are normalised and rotated, if they are, and where its keys
    /// and values go.
    fn rotation<'b>(
        &'b self,
        block: &'b DeviceBlock,
        kv: &'b DeviceKvLayer,
    ) -> Result<(Option<QkNormRope<'b>>, KvSlots<'b>)> {
        let slots = KvSlots { k: &kv.k, v: &kv.v, slots: &self.record.slots };
        let norms = block.attention.qk_norm.as_ref().map(|norm| QkNorms {
            q: &norm.q,
            k: &norm.k,
            eps: self.config.norm_eps,
        });
        match (&self.model.rope, norms) {
            (Some(rope), norms) => {
                let (cos, sin, positions) = (&*rope.cos, &*rope.sin, &*self.record.positions);
                Ok((Some(QkNormRope { norms, cos, sin, positions }), slots))
            }
            (None, None) => Ok((None, slots)),
            (None, Some(_)) => {
                Err(Error::unsupported("norms of q and k without rotary positions on CUDA"))
            }
        }
    }

    /// Computes the attention of a block.
    ///
    /// ```text
    /// q, k, v  = W_qkv norm(stream) + b_qkv
    /// q, k     = rope(q_norm(q)), rope(k_norm(k))         k, v into the cache
    /// attn_out = attention(q, cache)
    /// ```
    fn attend(
        &self,
        block: &DeviceBlock,
        kv: &DeviceKvLayer,
        workspace: &DeviceWorkspace,
        act: &mut Activations,
    ) -> Result<()> {
        let plan = &self.model.attention;
        let is_fused = self.wanted.is_decode && plan.is_fused();
        let norm = self.norm(&block.attention_norm);
        let layer = layer("qkv_proj", &block.attention.qkv);
        let (how, slots) = self.rotation(block, kv)?;
        // The product that treats its heads itself writes numbers of its own type.
        let is_dense = kv.k.element() == act.qkv.element();
        let heads = how.as_ref().filter(|_| !is_fused && is_dense).map(|how| (how, &slots));
        let is_cached =
            self.linear.normed_heads(&mut act.stream, &norm, &layer, heads, &act.qkv)?;
        match &how {
            Some(how) if is_fused => {
                return self.attend_new_tokens(block, how, &slots, workspace, act)
            }
            _ if is_cached => {}
            Some(how) => {
                qk_norm_rope_append(self.context, &act.qkv, how, &slots)?;
                self.cuda.mark("qk_norm_rope_append", 0, 0.0)?;
            }
            None => {
                kv_cache_append(self.context, &act.qkv, &slots)?;
                self.cuda.mark("kv_cache_append", 0, 0.0)?;
            }
        }
        self.attend_cached(block, kv, &act.qkv, &act.attn_out)
    }

    /// Computes the attention after the projection for sequences with one new token each, including
    /// the output projection where one kernel does both.
    fn attend_new_tokens(
        &self,
        block: &DeviceBlock,
        how: &QkNormRope<'_>,
        slots: &KvSlots<'_>,
        workspace: &DeviceWorkspace,
        act: &mut Activations,
    ) -> Result<()> {
        let (context, plan) = (self.context, &self.model.attention);
        let sequences = DecodeSequences {
            block_tables: &self.record.block_tables,
            context_lens: &self.record.context_lens,
            scale: self.config.attention_scale(),
            window: block.attention.window,
        };
        let partials = workspace.attention_partials.as_ref();
        if self.linear.projects_in_attention() {
            let layer = layer("attention_o_proj", &block.attention.output);
            let sums = plan.attend_and_project(
                context,
                &act.qkv,
                how,
                slots,
                &sequences,
                partials,
                layer.weight.dense_data()?,
            )?;
            return self.linear.add_sums(&mut act.stream, sums, &layer);
        }
        let out = &act.attn_out;
        plan.attend_new_tokens(context, &act.qkv, how, slots, &sequences, partials, out)?;
        self.cuda.mark("attention", 0, 0.0)
    }

    /// Computes `attn_out = attention(q, cache)`, for every sequence up to its new tokens.
    fn attend_cached(
        &self,
        block: &DeviceBlock,
        kv: &DeviceKvLayer,
        qkv: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let (num_heads, stride) = (self.config.num_heads, self.model.spacing.stride);
        let num_tokens = qkv.shape().first().map_or(0, |&n| n as usize);
        let row_len = qkv.num_elements() as usize / num_tokens.max(1);
        let q = qkv.view(0, &[num_tokens, num_heads, stride], Some(&[row_len, stride, 1]))?;
        let out = out.view(0, &[num_tokens, num_heads, stride], None)?;
        let window = block.attention.window.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        for part in self.wanted.attention.iter().flatten() {
            let options = AttentionOptions { window, ..*part };
            attention(self.context, &options, &q, &kv.k, &kv.v, &out)?;
        }
        self.cuda.mark("attention", 0, 0.0)
    }

    /// Gathers the rows whose logits are wanted, the only ones that matter after the last
    /// attention; `None` if there are none. In a prefill this saves most of the last layer.
    fn wanted_rows(
        &self,
        workspace: &DeviceWorkspace,
        act: Activations,
    ) -> Result<Option<Activations>> {
        let num_rows = self.record.logits_rows.num_elements() as usize;
        if num_rows == 0 {
            return Ok(None);
        }
        if self.wanted.all_rows {
            return Ok(Some(act));
        }
        // Rows may be wanted more than once.
        if !workspace.fits(num_rows) {
            return Err(Error::unsupported(format!("the logits of {num_rows} rows at a time")));
        }
        let rows = &self.record.logits_rows;
        let hidden = rows_of(&workspace.wanted, num_rows)?;
        // Queries, keys and values are no longer needed.
        let attn_out = workspace.qkv.view(0, &[num_rows, act.attn_out.width() as usize], None)?;
        embedding(self.context, &act.stream.hidden, rows, &hidden)?;
        embedding(self.context, &act.attn_out, rows, &attn_out)?;
        let cut = self.activations(workspace, num_rows)?;
        let ResidualStream { normed, projected, .. } = cut.stream;
        let stream = ResidualStream::new(hidden, normed, projected);
        Ok(Some(Activations {
            stream,
            attn_out,
            qkv: cut.qkv,
            mlp_up: cut.mlp_up,
            mlp_act: cut.mlp_act,
        }))
    }

    /// Computes the rest of a block.
    ///
    /// ```text
    /// stream += W_o attn_out + b_o
    /// stream += W_down act(W_up norm(stream) + b_up) + b_down        act: gated or plain
    /// ```
    fn project_and_mlp(&self, block: &DeviceBlock, act: &mut Activations) -> Result<()> {
        let stream = &mut act.stream;
        if !(self.wanted.is_decode && self.linear.projects_in_attention()) {
            let output = layer("o_proj", &block.attention.output);
            self.linear.add_to(stream, &act.attn_out, &output)?;
        }
        let norm = self.norm(&block.mlp_norm);
        match &block.mlp {
            MlpWeights::Gated { gate_up, down } => {
                let gate_up = layer("gate_up_proj", gate_up);
                self.linear.normed_gated(stream, &norm, &gate_up, &act.mlp_up, &act.mlp_act)?;
                self.linear.add_to(stream, &act.mlp_act, &layer("down_proj", down))
            }
            MlpWeights::Plain { up, down } => {
                self.linear.normed(stream, &norm, &layer("up_proj", up), &act.mlp_up)?;
                self.gelu(&act.mlp_up)?;
                self.linear.add_to(stream, &act.mlp_up, &layer("down_proj", down))
            }
            MlpWeights::Experts(weights) => self.experts(weights, &norm, stream),
        }
    }

    /// Returns the stream as that from which tokens choose their experts, if one kernel normalises it, multiplies
    /// it with the router and chooses.
    fn choosing_stream<'s>(
        &self,
        weights: &'s ExpertWeights<Matrix>,
        norm: &Norm<'s>,
        stream: &'s ResidualStream,
    ) -> Result<Option<Stream<'s>>> {
        let is_dense = matches!(weights.router.format(), WeightFormat::Dense(_));
        let Norm::Rms { weight, eps } = *norm else { return Ok(None) };
        if !is_dense || !self.linear.has_whole_stream() {
            return Ok(None);
        }
        let router = weights.router.dense_data()?;
        let (hidden, normed) = (&stream.hidden, &stream.normed);
        let stream = Stream { hidden, norm: (weight, eps), router, normed };
        Ok(has_normed_experts(&stream).then_some(stream))
    }

    /// Adds the experts of every token to the stream.
    fn experts(
        &self,
        weights: &ExpertWeights<Matrix>,
        norm: &Norm<'_>,
        stream: &mut ResidualStream,
    ) -> Result<()> {
        let layer = self.model.expert_layer(self.config, weights)?;
        if let Some(stream) = self.choosing_stream(weights, norm, stream)? {
            return normed_experts(self.context, &layer, &stream);
        }
        self.linear.normalise_whole(stream, norm)?;
        let shape = [stream.num_rows(), layer.routing.num_experts()];
        let element = stream.normed.element();
        let logits = DeviceTensor::temporary(self.context, element, &shape, "logits of experts")?;
        let router = Layer { name: "router", weight: &weights.router, bias: None };
        self.linear.plain(&stream.normed, &router, &logits)?;
        experts(self.context, &layer, &stream.normed, &logits, &stream.hidden)
    }

    /// Computes `x = gelu_tanh(x)`.
    fn gelu(&self, x: &DeviceTensor) -> Result<()> {
        if self.config.gelu_in_steps {
            gelu_tanh(self.context, x)?;
        } else {
            activation(self.context, Activation::GeluTanh, x, x)?;
        }
        self.cuda.mark("gelu_tanh", 0, 0.0)
    }
}

fn layer<'w>(name: &'static str, weights: &'w LinearWeights<Matrix, DeviceTensor>) -> Layer<'w> {
    Layer { name, weight: &weights.weight, bias: weights.bias.as_ref() }
}
