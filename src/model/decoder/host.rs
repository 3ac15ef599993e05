//! The forward pass on the CPU.

use super::block::{Block, Decoder, ExpertWeights, LinearWeights, MlpWeights, NormWeights};
use crate::backend::cpu::CpuBackend;
use crate::error::{try_filled, Error, ErrorKind, Result};
use crate::model::batch::ForwardBatch;
use crate::model::config::{ModelConfig, NormKind};
use crate::model::kv_cache::KvCache;
use crate::model::loaded::{Compute, Model};
use crate::model::step::{RowsOut, ScoresOut, TokenLogProb, TokenScore, MAX_TOP_LOG_PROBS};
use crate::model::workspace::{Activations, Workspace};
use crate::ops::activation::cpu::{activation_in_place, Activation};
use crate::ops::attention::cpu_paged::{attention, AttentionBatch};
use crate::ops::embedding::cpu_packed::{embedding, embedding_quantised};
use crate::ops::experts::cpu::{experts, ExpertMatrices};
use crate::ops::layer_norm::cpu::layer_norm;
use crate::ops::linear::cpu::{gated_mlp, linear, LinearScratch, Store, Weights};
use crate::ops::linear::HostMatrix;
use crate::ops::log_probs::cpu::LogSum;
use crate::ops::qk_norm_rope_append::cpu::{qk_norm_rope_append, QkNormRope};
use crate::ops::rms_norm::cpu::rms_norm;
use crate::ops::rope::cpu_table::RopeTable;
use crate::ops::top_k::cpu::top_k;

/// The logits that are computed at a time where tokens are scored: 16 MB.
const SCORED_LOGITS: usize = 4 << 20;

/// Returns the score of a token in a row of logits with this sum.
fn score_of(logits: &[f32], sum: &LogSum, token: u32) -> TokenScore {
    let Some((before, [logit, after @ ..])) = logits.split_at_checked(token as usize) else {
        return TokenScore::default();
    };
    // In this way NaN is never the likeliest.
    let is_below = |other: &f32| other < logit;
    TokenScore {
        log_prob: sum.log_prob(*logit),
        is_likeliest: before.iter().all(is_below) && after.iter().all(|other| other <= logit),
    }
}

/// Writes the `num_top` likeliest tokens of each row of logits, which have these sums, to `top`
/// `[num_rows, num_top]`.
fn likeliest(
    backend: &CpuBackend,
    logits: &[f32],
    sums: &[LogSum],
    vocab_size: usize,
    num_top: usize,
    top: &mut [TokenLogProb],
) -> Result<()> {
    if num_top == 0 {
        return Ok(());
    }
    let mut values = try_filled(top.len(), 0.0f32, "log-probabilities")?;
    let mut ids = try_filled(top.len(), 0i32, "log-probabilities")?;
    top_k(backend, logits, vocab_size, num_top, &mut values, &mut ids)?;
    let found = values.chunks_exact(num_top).zip(ids.chunks_exact(num_top)).zip(sums);
    for (row, ((values, ids), sum)) in top.chunks_exact_mut(num_top).zip(found) {
        for (to, (&value, &id)) in row.iter_mut().zip(values.iter().zip(ids)) {
            *to = TokenLogProb { token_id: id as u32, log_prob: sum.log_prob(value) };
        }
    }
    Ok(())
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the forward pass was cancelled")
}

/// One forward pass in progress: what each layer needs besides its weights.
struct Pass<'a> {
    config: &'a ModelConfig,
    backend: &'a CpuBackend,
    batch: &'a ForwardBatch<'a>,
    kv: &'a mut KvCache,
    act: Activations<'a>,
    /// The number of rows of the activations: all tokens of the batch, or after the last attention
    /// those whose logits are wanted.
    num_rows: usize,
    /// Whether the rows are those whose logits are wanted, in their order.
    only_wanted_rows: bool,
    should_stop: &'a dyn Fn() -> bool,
}

impl Model {
    /// Runs the tokens of `batch`: writes their keys and values into `kv`, and the logits of
    /// `batch.logits_rows` to `logits` `[num_logits_rows, vocab_size]`.
    ///
    /// On the CPU every row's result depends on its own sequence alone, bit for bit: not on the
    /// other sequences of the batch, not on how the sequence was cut into batches, not on the
    /// number of threads. Models of bf16 with quantised weights are an exception unless they were loaded
    /// as deterministic: on a processor with AMX or AMD's AVX-512 BF16, batches of many tokens may round
    /// weights and inputs to bf16. On CUDA the kernels, and with them the last bits, depend on the
    /// number of rows. `should_stop` is asked between layers; true ends the pass with
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
        let config = self.config();
        let num_logits = batch.logits_rows.len().checked_mul(config.vocab_size);
        if num_logits != Some(logits.len()) {
            return Err(Error::invalid_argument(format!(
                "room for {} logits, but {} rows of {} are wanted",
                logits.len(),
                batch.logits_rows.len(),
                config.vocab_size
            )));
        }
        self.forward_into(batch, kv, workspace, RowsOut::Logits(logits), should_stop)
    }

    /// Runs the tokens of `batch` as [`Model::forward`] does, and scores one token for each row of
    /// `batch.logits_rows`. The logits stay where they are computed.
    pub fn score(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        out: ScoresOut<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let (num_rows, num_top) = (batch.logits_rows.len(), out.num_top());
        let vocab_size = self.config().vocab_size;
        let is_whole = out.tokens.len() == num_rows
            && out.scores.len() == num_rows
            && out.top.len() == num_rows * num_top;
        if !is_whole {
            return Err(Error::internal("scores of other rows than are wanted"));
        }
        if num_top > vocab_size.min(MAX_TOP_LOG_PROBS as usize) {
            return Err(Error::internal("more of the likeliest tokens than are told"));
        }
        if out.tokens.iter().any(|&token| token as usize >= vocab_size) {
            return Err(Error::internal("the score of a token that is not in the vocabulary"));
        }
        self.forward_into(batch, kv, workspace, RowsOut::Scores(out), should_stop)
    }

    fn forward_into(
        &self,
        batch: &ForwardBatch<'_>,
        kv: &mut KvCache,
        workspace: &mut Workspace,
        out: RowsOut<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let config = self.config();
        if kv.layout() != self.kv_layout() {
            return Err(Error::internal("the KV cache was made for another model"));
        }
        batch.validate(config, kv)?;
        if batch.num_tokens() == 0 {
            return Ok(());
        }
        let cpu = match &self.compute {
            Compute::Cpu(cpu) => cpu,
            Compute::Device(cuda) => {
                let most_rows = batch.num_tokens().max(batch.logits_rows.len());
                let workspace = workspace.on_device(cuda, config, most_rows)?;
                return cuda.forward(config, batch, kv, workspace, out, should_stop);
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
        cpu.weights.forward(&mut pass, cpu.rope.as_ref(), out)
    }
}

impl Decoder<HostMatrix, Vec<f32>> {
    /// Runs the whole pass.
    fn forward(
        &self,
        pass: &mut Pass<'_>,
        rope_table: Option<&RopeTable>,
        out: RowsOut<'_>,
    ) -> Result<()> {
        let (token_ids, hidden) = (pass.batch.token_ids, &mut *pass.act.hidden);
        match &self.tokens.embedding {
            HostMatrix::Dense(table) => embedding(pass.backend, table, token_ids, hidden)?,
            HostMatrix::Quantised(table) => {
                embedding_quantised(pass.backend, table, token_ids, hidden)?
            }
        }
        if let Some(table) = &self.position_embedding {
            pass.add_positions(table)?;
        }
        for (index, block) in self.blocks.iter().enumerate() {
            pass.check_stop()?;
            block.forward(pass, index, rope_table)?;
        }
        pass.logits(self.tokens.output(), &self.final_norm, out)
    }
}

impl Block<HostMatrix, Vec<f32>> {
    /// Computes one layer, as described in [`super::block`].
    fn forward(
        &self,
        pass: &mut Pass<'_>,
        index: usize,
        rope_table: Option<&RopeTable>,
    ) -> Result<()> {
        let num_tokens = pass.batch.num_tokens();
        pass.norm(&self.attention_norm)?;
        let (backend, act) = (pass.backend, &mut pass.act);
        let qkv = &self.attention.qkv;
        qkv.forward(backend, act.normed, num_tokens, act.qkv, Store::Overwrite, act.linear)?;
        pass.keep_heads(index, self, rope_table)?;
        pass.attend(index, self.attention.window)?;

        // After the attention, only the rows whose logits are wanted may be left.
        let (num_rows, act) = (pass.num_rows, &mut pass.act);
        let output = &self.attention.output;
        output.forward(backend, act.attn_out, num_rows, act.hidden, Store::Add, act.linear)?;
        pass.norm(&self.mlp_norm)?;
        let Activations { hidden, normed, mlp_up, mlp_act, linear, experts: scratch, .. } =
            &mut pass.act;
        match &self.mlp {
            MlpWeights::Gated { gate_up: up, down } => {
                let (up, down) = (up.weights(), down.weights());
                gated_mlp(backend, normed, num_rows, up, down, mlp_up, mlp_act, hidden, linear)
            }
            MlpWeights::Plain { up, down } => {
                up.forward(backend, normed, num_rows, mlp_up, Store::Overwrite, linear)?;
                activation_in_place(backend, Activation::GeluTanh, mlp_up)?;
                down.forward(backend, mlp_up, num_rows, hidden, Store::Add, linear)
            }
            MlpWeights::Experts(ExpertWeights { router, gate_up, down }) => {
                let of_layer = pass.config.experts_of(index);
                let routing = of_layer.ok_or_else(|| Error::internal("no experts here"))?.routing;
                let matrices = ExpertMatrices { router, gate_up, down };
                experts(backend, normed, num_rows, routing, matrices, hidden, linear, scratch)
            }
        }
    }
}

impl LinearWeights<HostMatrix, Vec<f32>> {
    fn weights(&self) -> Weights<'_> {
        ((&self.weight).into(), self.bias.as_deref())
    }

    fn forward(
        &self,
        backend: &CpuBackend,
        x: &[f32],
        num_tokens: usize,
        out: &mut [f32],
        store: Store,
        scratch: &mut LinearScratch,
    ) -> Result<()> {
        let bias = self.bias.as_deref();
        linear(backend, x, num_tokens, &self.weight, bias, out, store, scratch)
    }
}

/// Computes `out = norm(x)`, row by row.
fn normalise(
    backend: &CpuBackend,
    config: &ModelConfig,
    norm: &NormWeights<Vec<f32>>,
    x: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let (weight, eps) = (&norm.weight, config.norm_eps);
    match config.norm {
        NormKind::Rms => rms_norm(backend, x, weight, eps, out),
        NormKind::Layer => layer_norm(backend, x, weight, norm.bias.as_deref(), eps, out),
    }
}

impl Pass<'_> {
    /// Ends the pass if the caller asks for it. Called before each layer.
    fn check_stop(&self) -> Result<()> {
        if (self.should_stop)() {
            return Err(cancelled());
        }
        Ok(())
    }

    /// Adds to each token the learned vector of its position.
    fn add_positions(&mut self, table: &[f32]) -> Result<()> {
        let hidden_size = self.config.hidden_size;
        let rows = self.act.hidden.chunks_exact_mut(hidden_size);
        for (row, &position) in rows.zip(self.batch.positions) {
            let begin = position as usize * hidden_size;
            let learned = table.get(begin..begin + hidden_size).ok_or_else(|| {
                Error::invalid_argument(format!("there is no position {position}"))
            })?;
            row.iter_mut().zip(learned).for_each(|(x, y)| *x += y);
        }
        Ok(())
    }

    /// Computes `act.normed = norm(act.hidden)`.
    fn norm(&mut self, norm: &NormWeights<Vec<f32>>) -> Result<()> {
        normalise(self.backend, self.config, norm, self.act.hidden, self.act.normed)
    }

    /// Normalises and rotates the heads of q and k in `act.qkv`, where the model does so, and writes the
    /// keys and values to the cache.
    fn keep_heads(
        &mut self,
        layer: usize,
        block: &Block<HostMatrix, Vec<f32>>,
        rope: Option<&RopeTable>,
    ) -> Result<()> {
        let norms = block.attention.qk_norm.as_ref();
        let how = QkNormRope {
            num_heads: self.config.num_heads,
            norms: norms.map(|norm| (&norm.q[..], &norm.k[..])),
            eps: self.config.norm_eps,
            rope,
            positions: self.batch.positions,
            slots: self.batch.slot_mapping,
        };
        qk_norm_rope_append(self.backend, self.act.qkv, &how, &mut self.kv.layer(layer)?)
    }

    /// Lets every query attend to the keys up to its own position, or to the last `window` of them:
    /// `act.attn_out = softmax(q k^T / sqrt(head_dim)) v` per head (Vaswani et al. 2017, section 3.2.1;
    /// grouped queries: Ainslie et al. 2023). After the last layer's attention `num_rows` may be fewer
    /// than before.
    fn attend(&mut self, layer: usize, window: Option<usize>) -> Result<()> {
        let row_stride = self.config.q_size() + 2 * self.config.kv_size();
        attention(
            self.backend,
            self.act.qkv,
            row_stride,
            &self.kv.layer(layer)?,
            &AttentionBatch {
                cu_seqlens_q: self.batch.cu_seqlens_q,
                context_lens: self.batch.context_lens,
                block_tables: self.batch.block_tables,
                max_blocks_per_seq: self.batch.max_blocks_per_seq,
            },
            self.config.num_heads,
            (self.config.attention_scale(), window),
            self.act.attn_out,
            self.act.attention,
        )?;
        if layer + 1 == self.config.num_layers {
            self.keep_wanted_rows();
        }
        Ok(())
    }

    /// Moves the rows whose logits are wanted to the front of the activations and cuts off the
    /// rest, which do not matter after the last attention. In a prefill this saves most of the last
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

    /// Computes the logits of the wanted rows, or scores from them: normalises the rows and
    /// multiplies them with the output matrix.
    fn logits(
        &mut self,
        output: &HostMatrix,
        final_norm: &NormWeights<Vec<f32>>,
        out: RowsOut<'_>,
    ) -> Result<()> {
        let should_stop = self.should_stop;
        let (config, backend, act) = (self.config, self.backend, &mut self.act);
        let norm = |x: &[f32], out: &mut [f32]| normalise(backend, config, final_norm, x, out);
        let hidden_size = config.hidden_size;
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
        let mut linear = |x: &[f32], num_rows: usize, logits: &mut [f32]| {
            linear(backend, x, num_rows, output, None, logits, Store::Overwrite, act.linear)
        };
        let out = match out {
            RowsOut::Logits(logits) => return linear(normed, rows.len(), logits),
            RowsOut::Scores(out) => out,
        };
        let num_top = out.num_top();
        let ScoresOut { tokens, scores, mut top } = out;
        let at_a_time = (SCORED_LOGITS / config.vocab_size.max(1)).clamp(1, rows.len().max(1));
        let len = at_a_time.saturating_mul(config.vocab_size);
        let mut logits = try_filled(len, 0.0f32, "the logits of scored tokens")?;
        let mut sums = try_filled(at_a_time, LogSum::default(), "the sums of scored tokens")?;
        let pieces = normed.chunks(at_a_time * hidden_size).zip(tokens.chunks(at_a_time));
        for ((x, tokens), scores) in pieces.zip(scores.chunks_mut(at_a_time)) {
            if should_stop() {
                return Err(cancelled());
            }
            let logits = logits.get_mut(..tokens.len() * config.vocab_size).unwrap_or_default();
            linear(x, tokens.len(), logits)?;
            let rows = logits.chunks_exact(config.vocab_size).zip(tokens);
            let sums = sums.get_mut(..tokens.len()).unwrap_or_default();
            backend.parallel_each_row(sums, 1, |first, sums| {
                for (sum, (logits, _)) in sums.iter_mut().zip(rows.clone().skip(first)) {
                    *sum = LogSum::of(backend, logits, 1.0);
                }
            })?;
            backend.parallel_each_row(scores, 1, |first, scores| {
                let rows = rows.clone().zip(&*sums).skip(first);
                for (score, ((logits, &token), sum)) in scores.iter_mut().zip(rows) {
                    *score = score_of(logits, sum, token);
                }
            })?;
            let (piece, rest) = top.split_at_mut(tokens.len() * num_top);
            top = rest;
            likeliest(backend, logits, sums, config.vocab_size, num_top, piece)?;
        }
        Ok(())
    }
}
