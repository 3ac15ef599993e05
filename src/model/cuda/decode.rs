//! One token for each of up to 128 sequences on Hopper: a chain of kernels in which each begins to fetch its weights
//! while those in front are still at work, so that the device memory hardly rests. [`super::qwen3`] is the same
//! for any batch and any device.
//!
//! ```text
//! qkv     = W_qkv rms_norm(hidden)
//! attn    = attention of the normalised and rotated heads, which also go to the cache
//! hidden += W_o attn
//! act     = silu(W_gate rms_norm(hidden)) * (W_up rms_norm(hidden))
//! hidden += W_down act
//! ```

use super::one_token::{has_one_token_layers, ONE_TOKEN_SHARED_PERCENT};
use super::pass::Wanted;
use super::record::DeviceRecord;
use super::workspace::DeviceWorkspace;
use super::CudaModel;
use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::model::kv_cache::{DeviceKvLayer, KvCache};
use crate::model::qwen3::{Qwen3Layer, Qwen3Weights};
use crate::model::weights::Weights;
use crate::model::ModelConfig;
use crate::ops::attention::cuda_fused::{decode_attention, has_decode_attention, DecodeSequences};
use crate::ops::embedding::cuda_chosen::embedding_step;
use crate::ops::kv_cache::KvSlots;
use crate::ops::linear::cuda_gemv::{decode_gemv, has_decode_gemv, is_gemv_weight, GEMV_TOKENS};
use crate::ops::linear::cuda_prefill::has_prefill_gemm;
use crate::ops::linear::cuda_skinny::{
    has_skinny_gemm, is_skinny_weight, skinny_gemm, SKINNY_TOKENS,
};
use crate::ops::linear::LinearResult;
use crate::ops::qk_norm_rope_append::QkNormRope;
use crate::ops::rms_norm::cuda_rounded::rms_norm_step;

/// What of this file serves a model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DecodeKernels {
    /// The attention, for any number of sequences.
    pub attention: bool,
    /// The whole chain.
    pub chain: bool,
    /// Its form for one and two sequences, with the norms fused.
    pub gemv: bool,
    /// Its form for one sequence of a small model, with the output projection in the attention.
    pub one_token: bool,
    /// The linear layers for more tokens than the chain takes.
    pub prefill: bool,
}

impl DecodeKernels {
    /// What serves these weights on the device of `context`. `XSERV_CUDA_PORTABLE=1` in the environment: nothing,
    /// for comparing and testing what other devices take.
    pub fn find(
        context: &ComputeContext,
        config: &ModelConfig,
        weights: &Qwen3Weights<DeviceTensor, DeviceTensor>,
        dtype: DType,
        has_gaps: bool,
    ) -> Self {
        let is_portable = std::env::var_os("XSERV_CUDA_PORTABLE").is_some_and(|value| value == "1");
        let attention = !is_portable
            && dtype != DType::F32
            && !has_gaps
            && has_decode_attention(context, config.head_dim);
        let fits = |layer: &Qwen3Layer<DeviceTensor, DeviceTensor>| {
            layer.qkv_bias.is_none()
                && layer.o_bias.is_none()
                && is_skinny_weight(&layer.qkv_proj, LinearResult::Plain)
                && is_skinny_weight(&layer.o_proj, LinearResult::Residual)
                && is_skinny_weight(&layer.gate_up_proj, LinearResult::SwiGlu)
                && is_skinny_weight(&layer.down_proj, LinearResult::Residual)
        };
        let chain = attention
            && has_skinny_gemm(context)
            && config.hidden_size <= 16384
            && is_skinny_weight(weights.tokens.output(), LinearResult::Plain)
            && weights.layers.iter().all(fits);
        let fits = |layer: &Qwen3Layer<DeviceTensor, DeviceTensor>| {
            is_gemv_weight(&layer.qkv_proj, LinearResult::Plain)
                && is_gemv_weight(&layer.o_proj, LinearResult::Residual)
                && is_gemv_weight(&layer.gate_up_proj, LinearResult::SwiGlu)
                && is_gemv_weight(&layer.down_proj, LinearResult::Residual)
        };
        let gemv = chain
            && has_decode_gemv(context)
            && is_gemv_weight(weights.tokens.output(), LinearResult::Plain)
            && weights.layers.iter().all(fits);
        let one_token = gemv && has_one_token_layers(context, config);
        let prefill = chain && has_prefill_gemm(context);
        DecodeKernels { attention, chain, gemv, one_token, prefill }
    }

    /// Those whose results do not depend on the number of sequences.
    pub fn deterministic(self) -> Self {
        DecodeKernels { attention: false, gemv: false, one_token: false, ..self }
    }
}

/// The most sequences of a chain.
pub(super) const MOST_CHAIN_ROWS: usize = SKINNY_TOKENS;

/// The end of a product with a weight in a profile.
pub(super) fn mark_linear(
    cuda: &CudaContext,
    name: &'static str,
    weight: &DeviceTensor,
    num_rows: usize,
) -> Result<()> {
    let flops = 2.0 * weight.num_elements() as f64 * num_rows as f64;
    cuda.mark(name, weight.size_bytes() as u64, flops)
}

impl CudaModel {
    /// Queues the chain for a record of one token a sequence, up to the logits, which it returns:
    /// `[num_seqs, vocab_size]`.
    pub(super) fn decode(
        &self,
        config: &ModelConfig,
        record: &DeviceRecord,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
    ) -> Result<DeviceTensor> {
        let num_seqs = record.context_lens.num_elements() as usize;
        let is_gemv = self.decode_kernels.gemv && num_seqs <= GEMV_TOKENS;
        let cuda = self.cuda()?;
        let is_one_token = self.decode_kernels.one_token && num_seqs == 1;
        if is_gemv {
            // Loads under way need the first-level cache: without it a step of Qwen3-8B takes 5 % longer. Small models
            // wait for each other's kernels rather than for memory, unless these are made for them.
            let is_small = num_seqs == 1 && config.hidden_size < 2048;
            cuda.prefer_shared_memory(Some(match (is_one_token, is_small) {
                (true, _) => ONE_TOKEN_SHARED_PERCENT,
                (false, true) => 100,
                (false, false) => 75,
            }));
        }
        let done = self.decode_layers(config, record, kv, workspace, is_gemv, cuda);
        cuda.prefer_shared_memory(None);
        done
    }

    fn decode_layers(
        &self,
        config: &ModelConfig,
        record: &DeviceRecord,
        kv: &KvCache,
        workspace: &DeviceWorkspace,
        is_gemv: bool,
        cuda: &CudaContext,
    ) -> Result<DeviceTensor> {
        let context = &*self.context;
        let num_seqs = record.context_lens.num_elements() as usize;
        let rows =
            |matrix: &DeviceTensor| matrix.view(0, &[num_seqs, matrix.width() as usize], None);
        let (hidden, normed) = (rows(&workspace.hidden)?, rows(&workspace.normed)?);
        let (qkv, attn_out) = (rows(&workspace.qkv)?, rows(&workspace.attn_out)?);
        let mlp_act = rows(&workspace.mlp_act)?;
        let logits = rows(&workspace.logits)?;
        let DeviceRecord { token_ids, token_sources, .. } = record;
        let Weights::Qwen3(weights) = &self.weights else {
            return Err(Error::internal("a chain of kernels for another architecture"));
        };
        let eps = config.norm_eps;
        let (table, chosen) = (&weights.tokens.embedding, &workspace.steps.chosen);
        let is_fixed = self.is_deterministic;
        cuda.begin_marks()?;
        embedding_step(context, table, token_ids, token_sources, chosen, &hidden)?;
        cuda.mark("embedding", 0, 0.0)?;
        let mark = |name, weight: &DeviceTensor| mark_linear(cuda, name, weight, num_seqs);
        let linear = |norm: &DeviceTensor, weight: &DeviceTensor, result, out: &DeviceTensor| {
            if is_gemv {
                return decode_gemv(context, &hidden, Some((norm, eps)), weight, result, out);
            }
            rms_norm_step(context, &hidden, norm, eps, &normed)?;
            cuda.mark("norm", 0, 0.0)?;
            skinny_gemm(context, &normed, weight, result, is_fixed, out)
        };
        let add_linear = |x: &DeviceTensor, weight: &DeviceTensor| {
            let result = LinearResult::Residual;
            match is_gemv {
                true => decode_gemv(context, x, None, weight, result, &hidden),
                false => skinny_gemm(context, x, weight, result, is_fixed, &hidden),
            }
        };
        let wanted = match self.is_deterministic {
            true => Some(Wanted::of_decode(config, record, true)?),
            false => None,
        };
        let is_one_token = is_gemv && self.decode_kernels.one_token && num_seqs == 1;
        for (index, layer) in weights.layers.iter().enumerate() {
            if is_one_token {
                let cache = kv.device_layer(index)?;
                self.decode_one_token_layer(config, layer, cache, record, workspace)?;
                continue;
            }
            linear(&layer.input_norm, &layer.qkv_proj, LinearResult::Plain, &qkv)?;
            mark("qkv_proj", &layer.qkv_proj)?;
            let cache = kv.device_layer(index)?;
            match &wanted {
                Some(wanted) => {
                    self.attend_as_prompts(config, layer, cache, record, wanted, workspace)?
                }
                None => {
                    let out = &attn_out;
                    self.attend_new_tokens(config, layer, cache, record, workspace, &qkv, out)?;
                    cuda.mark("attention", 0, 0.0)?;
                }
            }
            add_linear(&attn_out, &layer.o_proj)?;
            mark("o_proj", &layer.o_proj)?;
            linear(&layer.post_norm, &layer.gate_up_proj, LinearResult::SwiGlu, &mlp_act)?;
            mark("gate_up_proj", &layer.gate_up_proj)?;
            add_linear(&mlp_act, &layer.down_proj)?;
            mark("down_proj", &layer.down_proj)?;
        }
        linear(&weights.final_norm, weights.tokens.output(), LinearResult::Plain, &logits)?;
        mark("output", weights.tokens.output())?;
        Ok(logits)
    }

    /// Queues what is between the projections for one token a sequence: qkv and out as matrices of
    /// `[num_seqs, ...]`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_new_tokens(
        &self,
        config: &ModelConfig,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        cache: &DeviceKvLayer,
        record: &DeviceRecord,
        workspace: &DeviceWorkspace,
        qkv: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let num_seqs = record.context_lens.num_elements() as usize;
        let (num_heads, head_dim) = (config.num_heads, config.head_dim);
        let all_heads = num_heads + 2 * config.num_kv_heads;
        let qkv = qkv.view(0, &[num_seqs, all_heads, head_dim], None)?;
        let out = out.view(0, &[num_seqs, num_heads, head_dim], None)?;
        let (how, slots, sequences) = self.attention_operands(config, layer, cache, record)?;
        let scratch = workspace.decode_scratch.as_ref();
        let scratch = scratch.ok_or_else(|| Error::internal("no memory for decoding"))?;
        decode_attention(&self.context, &qkv, &how, &slots, &sequences, scratch, &out)
    }

    /// What the attention of new tokens reads besides q, k and v.
    pub(super) fn attention_operands<'a>(
        &'a self,
        config: &ModelConfig,
        layer: &'a Qwen3Layer<DeviceTensor, DeviceTensor>,
        cache: &'a DeviceKvLayer,
        record: &'a DeviceRecord,
    ) -> Result<(QkNormRope<'a>, KvSlots<'a>, DecodeSequences<'a>)> {
        let rope = self.rope()?;
        let how = QkNormRope {
            q_norm: &layer.q_norm,
            k_norm: &layer.k_norm,
            eps: config.norm_eps,
            cos: &rope.cos,
            sin: &rope.sin,
            positions: &record.positions,
        };
        let slots = KvSlots { k: &cache.k, v: &cache.v, slots: &record.slots };
        let (block_tables, context_lens): (&Tensor, &Tensor) =
            (&record.block_tables, &record.context_lens);
        let scale = config.attention_scale();
        Ok((how, slots, DecodeSequences { block_tables, context_lens, scale }))
    }
}
