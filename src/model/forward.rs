//! What the forward passes of all architectures share: the frame around the layers.

use super::batch::ForwardBatch;
use super::kv_cache::KvCache;
use super::weights::Weights;
use super::workspace::{Activations, Workspace};
use super::{Compute, Model, ModelConfig};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::attention::cpu_paged::{attention, AttentionBatch};
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::kv_cache::cpu::kv_cache_append;
use crate::ops::linear::cpu::{linear, Store};
use crate::thread_state::StandardFloats;

/// One forward pass under way: what each layer needs besides its weights.
pub(super) struct Pass<'a> {
    pub config: &'a ModelConfig,
    pub backend: &'a CpuBackend,
    pub batch: &'a ForwardBatch<'a>,
    pub kv: &'a mut KvCache,
    pub act: Activations<'a>,
    /// Rows of the activations: the tokens of the batch, or behind the last attention those whose
    /// logits are wanted.
    pub num_rows: usize,
    /// Whether the rows are those whose logits are wanted, in their order.
    only_wanted_rows: bool,
    pub should_stop: &'a dyn Fn() -> bool,
}

impl Model {
    /// Runs the tokens of `batch`: writes their keys and values into `kv`, and the logits of
    /// `batch.logits_rows` to `logits` `[num_logits_rows, vocab_size]`.
    ///
    /// On the CPU every row's result depends on its own sequence alone, bit for bit: not on the other
    /// sequences of the batch, not on how the sequence was cut into batches, not on the number of
    /// threads. On CUDA the kernels, and with them the last bits, depend on the number of rows.
    /// `should_stop` is asked between layers; true ends the pass with
    /// [`ErrorKind::Cancelled`], after which the keys and values of this batch are to be considered
    /// unwritten.
    pub fn forward(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let _mode = StandardFloats::new();
        let config = self.config();
        if kv.layout() != self.kv_layout() {
            return Err(Error::internal("the KV cache was made for another model"));
        }
        batch.validate(config, kv)?;
        let num_logits = batch.logits_rows.len().checked_mul(config.vocab_size);
        if num_logits != Some(logits.len()) {
            return Err(Error::invalid_argument(format!(
                "room for {} logits, but {} rows of {} are wanted",
                logits.len(),
                batch.logits_rows.len(),
                config.vocab_size
            )));
        }
        if batch.num_tokens() == 0 {
            return Ok(());
        }
        let cpu = match &self.compute {
            Compute::Cpu(cpu) => cpu,
            Compute::Cuda(cuda) => {
                let most_rows = batch.num_tokens().max(batch.logits_rows.len());
                let workspace = workspace.on_device(cuda, config, most_rows)?;
                return cuda.forward(config, batch, kv, workspace, logits, should_stop);
            }
        };
        let act = workspace.activations(config, batch.num_tokens(), batch.logits_rows.len())?;
        let num_rows = batch.num_tokens();
        let mut pass = Pass {
            config,
            backend: &cpu.backend,
            batch,
            kv,
            act,
            num_rows,
            only_wanted_rows: false,
            should_stop,
        };
        match &cpu.weights {
            Weights::Qwen3(weights) => {
                let rope = cpu
                    .rope
                    .as_ref()
                    .ok_or_else(|| Error::internal("Qwen3 without rotary positions"))?;
                weights.forward(&mut pass, rope, logits)
            }
            Weights::Gpt2(weights) => weights.forward(&mut pass, logits),
        }
    }
}

impl Pass<'_> {
    /// Ends the pass if the caller wants so; called in front of each layer.
    pub fn check_stop(&self) -> Result<()> {
        if (self.should_stop)() {
            return Err(Error::new(ErrorKind::Cancelled, "the forward pass was cancelled"));
        }
        Ok(())
    }

    /// Writes the keys and values in `act.qkv` to the cache and lets every query see those up to
    /// its own position: `act.attn_out = softmax(q k^T / sqrt(head_dim)) v` per head (Vaswani et
    /// al. 2017, section 3.2.1; grouped queries: Ainslie et al. 2023). Behind the last layer's
    /// attention `num_rows` may be fewer than before.
    pub fn attend(&mut self, layer: usize) -> Result<()> {
        let (q_size, kv_size) = (self.config.q_size(), self.config.kv_size());
        let row_stride = q_size + 2 * kv_size;
        let k = self.act.qkv.get(q_size..).unwrap_or_default();
        let v = k.get(kv_size..).unwrap_or_default();
        let mut blocks = self.kv.layer(layer)?;
        kv_cache_append(self.backend, k, v, row_stride, self.batch.slot_mapping, &mut blocks)?;
        attention(
            self.backend,
            self.act.qkv,
            row_stride,
            &blocks,
            &AttentionBatch {
                cu_seqlens_q: self.batch.cu_seqlens_q,
                context_lens: self.batch.context_lens,
                block_tables: self.batch.block_tables,
                max_blocks_per_seq: self.batch.max_blocks_per_seq,
            },
            self.config.num_heads,
            self.config.attention_scale(),
            self.act.attn_out,
            self.act.attention,
        )?;
        if layer + 1 == self.config.num_layers {
            self.keep_wanted_rows();
        }
        Ok(())
    }

    /// Behind the last attention nothing but the rows whose logits are wanted matters: moves them to
    /// the front of the activations and cuts off the rest. In a prefill that spares most of the last
    /// layer. Rows that are not in rising order are left where they are.
    fn keep_wanted_rows(&mut self) {
        let rows = self.batch.logits_rows;
        if !rows.is_sorted_by(|row, next| row < next) {
            return;
        }
        let act = &mut self.act;
        for buffer in [&mut act.hidden, &mut act.attn_out] {
            let width = buffer.len() / self.num_rows;
            for (to, &from) in rows.iter().enumerate() {
                // `validate` has found `from` to be a row, and rising order makes `to <= from`.
                let from = from as usize * width;
                buffer.copy_within(from..from + width, to * width);
            }
        }
        let buffers = [
            &mut act.hidden,
            &mut act.normed,
            &mut act.attn_out,
            &mut act.mlp_up,
            &mut act.mlp_act,
        ];
        for buffer in buffers {
            let width = buffer.len() / self.num_rows;
            let whole = std::mem::take(buffer);
            *buffer = whole.get_mut(..rows.len() * width).unwrap_or_default();
        }
        self.num_rows = rows.len();
        self.only_wanted_rows = true;
    }

    /// Logits of the wanted rows: normalises them with `norm(x, out)` and multiplies with the
    /// output matrix.
    pub fn logits(
        &mut self,
        output: &PackedMatrix,
        norm: impl FnOnce(&[f32], &mut [f32]) -> Result<()>,
        logits: &mut [f32],
    ) -> Result<()> {
        let act = &mut self.act;
        let hidden_size = self.config.hidden_size;
        let rows = self.batch.logits_rows;
        let normed = if self.only_wanted_rows {
            norm(act.hidden, act.normed)?;
            &*act.normed
        } else {
            let (wanted, normed) = act.logits_hidden.split_at_mut(rows.len() * hidden_size);
            for (out, &row) in wanted.chunks_exact_mut(hidden_size).zip(rows) {
                let begin = row as usize * hidden_size;
                let hidden = act.hidden.get(begin..begin + hidden_size);
                out.copy_from_slice(hidden.ok_or_else(|| Error::internal("a row out of range"))?);
            }
            norm(wanted, normed)?;
            &*normed
        };
        linear(self.backend, normed, rows.len(), output, None, logits, Store::Overwrite, act.linear)
    }
}
