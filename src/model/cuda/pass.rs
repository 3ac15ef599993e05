//! What the forward passes of all architectures on a device share: the frame around the layers.
//! [`crate::model::forward`] is the same on the CPU.

use super::lead::{layers_ahead, Lead};
use super::record::{DeviceRecord, RecordExtras, RecordShape};
use super::workspace::DeviceWorkspace;
use super::CudaModel;
use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{DType, Tensor};
use crate::model::batch::ForwardBatch;
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::model::weights::Weights;
use crate::model::ModelConfig;
use crate::ops::attention::{attention, AttentionBackend, AttentionOptions};
use crate::ops::copy::copy;
use crate::ops::elementwise::cast;
use crate::ops::embedding::cuda_chosen::embedding_step;
use crate::ops::embedding::embedding;
use crate::ops::gemm::{gemm, GemmOptions, SumOrder};

/// One forward pass under way.
pub(super) struct Pass<'a> {
    pub model: &'a CudaModel,
    pub config: &'a ModelConfig,
    pub context: &'a ComputeContext,
    pub cuda: &'a CudaContext,
    pub record: &'a DeviceRecord,
    pub wanted: &'a Wanted,
    pub should_stop: &'a dyn Fn() -> bool,
    /// How many layers may be queued and not computed, if it is not all of them.
    pub lead: Option<(&'a Lead, usize)>,
}

/// What a pass is to compute, besides what its record says.
pub(super) struct Wanted {
    /// How every layer attends: the sequences with one token, and the others.
    attention: [Option<AttentionOptions>; 2],
    /// Behind the last attention all rows are wanted, in their order.
    all_rows: bool,
    /// Every sequence has one token, or is a row that fills up.
    pub is_decode: bool,
}

impl Wanted {
    /// What a batch asks for.
    pub fn of(
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        record: &DeviceRecord,
        is_deterministic: bool,
    ) -> Result<Self> {
        let all_rows = batch.logits_rows.iter().copied().eq(0..batch.num_tokens() as u32);
        let attention = attention_parts(config, batch, record, backend(is_deterministic))?;
        Ok(Wanted { attention, all_rows, is_decode: false })
    }

    /// One token of every sequence, and the logits of all, whatever their lengths.
    pub fn of_decode(
        config: &ModelConfig,
        record: &DeviceRecord,
        is_deterministic: bool,
    ) -> Result<Self> {
        let attention = AttentionOptions {
            causal: true,
            scale: Some(config.attention_scale()),
            cu_seqlens_q: Some(*record.cu_seqlens_q),
            block_tables: Some(*record.block_tables),
            context_lens: Some(*record.context_lens),
            max_q_len: 1,
            backend: backend(is_deterministic),
            in_segments: is_deterministic,
            has_settled_indices: true,
            ..AttentionOptions::default()
        };
        Ok(Wanted { attention: [Some(attention), None], all_rows: true, is_decode: true })
    }
}

/// Flash attention goes over a row's keys in the same order whatever the number of rows.
fn backend(is_deterministic: bool) -> AttentionBackend {
    match is_deterministic {
        true => AttentionBackend::Flash,
        false => AttentionBackend::Auto,
    }
}

/// The activations cut to the rows of a pass.
pub(super) struct Activations {
    /// `[num_rows, hidden_size]` each.
    pub hidden: DeviceTensor,
    pub normed: DeviceTensor,
    pub projected: DeviceTensor,
    /// `[num_rows, mlp_up_size]`
    pub gate_up: DeviceTensor,
    /// `[num_rows, mlp_act_size]`
    pub mlp_act: DeviceTensor,
    /// `[num_rows, num_heads * head_stride]`
    pub attn_out: DeviceTensor,
}

impl Activations {
    pub fn new(workspace: &DeviceWorkspace, num_rows: usize) -> Result<Self> {
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
pub(super) fn linear(
    context: &ComputeContext,
    order: SumOrder,
    x: &Tensor,
    weight: &DeviceTensor,
    bias: Option<&DeviceTensor>,
    out: &DeviceTensor,
) -> Result<()> {
    biased_product(context, order, x, weight, true, bias, out)
}

/// The same with a weight that is stored transposed if `transpose` says so, else [in_features, out_features].
pub(super) fn biased_product(
    context: &ComputeContext,
    order: SumOrder,
    x: &Tensor,
    weight: &DeviceTensor,
    transpose: bool,
    bias: Option<&DeviceTensor>,
    out: &DeviceTensor,
) -> Result<()> {
    let mut options = GemmOptions { transpose_b: transpose, order, ..GemmOptions::default() };
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
        let extras = RecordExtras {
            token_sources: &[],
            choices: &[],
            host_tokens: 0,
            spare_block: kv.spare_block(),
        };
        let record = workspace.steps.upload(&RecordShape::of(batch), batch, &extras)?;
        let wanted = Wanted::of(config, batch, &record, self.is_deterministic)?;
        let normed = self.hidden_states(config, &record, &wanted, kv, workspace, should_stop)?;
        if let Some(normed) = normed {
            self.read_logits(config, &normed, workspace, logits)?;
        }
        self.context.synchronize()
    }

    /// Queues everything up to the final norm, and returns the wanted rows behind it; `None` if no row is
    /// wanted.
    pub(super) fn hidden_states(
        &self,
        config: &ModelConfig,
        record: &DeviceRecord,
        wanted: &Wanted,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<Option<DeviceTensor>> {
        let (context, cuda) = (&*self.context, self.cuda()?);
        let num_tokens = record.token_ids.num_elements() as usize;
        // Of a graph nothing is waited for, and nobody's tokens may come late because a later step can be stopped.
        let lead = match !wanted.is_decode && workspace.steps.may_lag() {
            true => layers_ahead(config, num_tokens).map(|layers| (&workspace.steps.lead, layers)),
            false => None,
        };
        let pass = Pass { model: self, config, context, cuda, record, wanted, should_stop, lead };
        match &self.weights {
            Weights::Qwen3(weights) => pass.qwen3(weights, kv, workspace),
            Weights::Gpt2(weights) => pass.gpt2(weights, kv, workspace),
        }
    }

    /// Queues the product with the output matrix: normed [num_rows, hidden_size], logits
    /// [num_rows, vocab_size] of the model's element type.
    pub(super) fn project(&self, normed: &DeviceTensor, logits: &DeviceTensor) -> Result<()> {
        self.linear(normed, self.weights.tokens().output(), None, logits)
    }

    /// The logits of all rows of `normed`, a few rows at a time.
    fn read_logits(
        &self,
        config: &ModelConfig,
        normed: &DeviceTensor,
        workspace: &mut DeviceWorkspace,
        logits: &mut [f32],
    ) -> Result<()> {
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let most = workspace.copied_rows();
        for (index, out) in logits.chunks_mut(most * vocab_size).enumerate() {
            let rows = out.len() / vocab_size;
            let x = normed.view(index * most * hidden_size, &[rows, hidden_size], None)?;
            let f32s = rows_of(&workspace.logits_f32, rows)?;
            if self.dtype == DType::F32 {
                self.project(&x, &f32s)?;
            } else {
                // Rounded to the element type first, as Transformers has them.
                let rounded = rows_of(&workspace.logits, rows)?;
                self.project(&x, &rounded)?;
                cast(&self.context, &rounded, &f32s)?;
            }
            workspace.read_logits(&self.context, &f32s, out)?;
        }
        Ok(())
    }
}

/// How the leading sequences with one token attend, and all others.
fn attention_parts(
    config: &ModelConfig,
    batch: &ForwardBatch<'_>,
    record: &DeviceRecord,
    backend: AttentionBackend,
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
            causal: true,
            scale: Some(config.attention_scale()),
            cu_seqlens_q: Some(*record.cu_seqlens_q.view(begin, &[num_seqs + 1], None)?),
            block_tables: Some(*block_tables),
            context_lens: Some(*record.context_lens.view(begin, &[num_seqs], None)?),
            max_q_len: q_lens.clone().skip(begin).take(num_seqs).max().unwrap_or(0),
            max_kv_len: lens.iter().copied().max().unwrap_or(0),
            backend,
            in_segments: backend == AttentionBackend::Flash,
            has_settled_indices: true,
            ..AttentionOptions::default()
        });
    }
    Ok(parts)
}

impl Pass<'_> {
    /// Ends the pass if the caller wants so; called in front of each layer, which is not queued before the device has
    /// come near.
    pub fn check_stop(&self, layer: usize) -> Result<()> {
        if let Some((lead, layers)) = self.lead {
            lead.keep(self.cuda, layer, layers)?;
        }
        match (self.should_stop)() {
            true => Err(Error::new(ErrorKind::Cancelled, "the forward pass was cancelled")),
            false => Ok(()),
        }
    }

    /// The rows of the tokens in `table` [vocab_size, hidden_size], into `act.hidden`.
    pub fn embed(
        &self,
        table: &DeviceTensor,
        workspace: &DeviceWorkspace,
        act: &Activations,
    ) -> Result<()> {
        let DeviceRecord { token_ids, token_sources, .. } = self.record;
        let chosen = &workspace.steps.chosen;
        self.cuda.begin_marks()?;
        embedding_step(self.context, table, token_ids, token_sources, chosen, &act.hidden)?;
        self.cuda.mark("embedding", 0, 0.0)
    }

    /// `[num_tokens, num_heads + 2 * num_kv_heads, head_stride]`
    pub(super) fn qkv_view(
        &self,
        workspace: &DeviceWorkspace,
        num_tokens: usize,
    ) -> Result<DeviceTensor> {
        let heads = self.config.num_heads + 2 * self.config.num_kv_heads;
        workspace.qkv.view(0, &[num_tokens, heads, self.model.spacing.stride], None)
    }

    /// `attn_out = attention(q, cache)`, of every sequence up to its new tokens.
    pub fn attend_cached(
        &self,
        kv: &DeviceKvLayer,
        qkv: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let (num_heads, stride) = (self.config.num_heads, self.model.spacing.stride);
        let num_tokens = qkv.shape().first().map_or(0, |&n| n as usize);
        let row_len = qkv.num_elements() as usize / num_tokens.max(1);
        let q = qkv.view(0, &[num_tokens, num_heads, stride], Some(&[row_len, stride, 1]))?;
        let out = out.view(0, &[num_tokens, num_heads, stride], None)?;
        for part in self.wanted.attention.iter().flatten() {
            attention(self.context, part, &q, &kv.k, &kv.v, &out)?;
        }
        self.cuda.mark("attention", 0, 0.0)
    }

    /// Behind the last attention nothing but the rows whose logits are wanted matters: gathers them; `None` if
    /// there are none. In a prefill that spares most of the last layer.
    pub fn wanted_rows(
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
        // Queries, keys and values are not needed any more.
        let attn_out = workspace.qkv.view(0, &[num_rows, act.attn_out.width() as usize], None)?;
        embedding(self.context, &act.hidden, rows, &hidden)?;
        embedding(self.context, &act.attn_out, rows, &attn_out)?;
        Ok(Some(Activations { hidden, attn_out, ..Activations::new(workspace, num_rows)? }))
    }
}
