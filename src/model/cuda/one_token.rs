//! The layers of the chain of [`super::decode`] for one token of a small model, whose step is a chain of trips to
//! memory rather than a stream: four kernels a layer instead of five, with products by tensor cores.
//!
//! ```text
//! qkv     = W_qkv rms_norm(hidden)
//! sums[g] = W_o[:, heads over g] attn[heads over g]      for each kv head g
//! mid     = hidden + the sum of sums
//! act     = silu(W_gate rms_norm(mid)) * (W_up rms_norm(mid))
//! hidden  = mid + W_down act
//! ```

use super::decode::mark_linear;
use super::record::DeviceRecord;
use super::workspace::DeviceWorkspace;
use super::CudaModel;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::model::kv_cache::DeviceKvLayer;
use crate::model::qwen3::Qwen3Layer;
use crate::model::ModelConfig;
use crate::ops::attention::cuda_fused_project::{decode_attention_o, has_decode_attention_o};
use crate::ops::linear::cuda_gemv_mma::{decode_gemv_mma, has_decode_gemv_mma, OneTokenLinear};

/// Of the memory of a multiprocessor, as shared memory: the weights under way need the rest (H200; a step of Qwen3-0.6B
/// with 512 tokens behind it takes a quarter longer with 75).
pub(super) const ONE_TOKEN_SHARED_PERCENT: i32 = 50;

/// Whether there are kernels for the layers of such a model.
pub(super) fn has_one_token_layers(context: &ComputeContext, config: &ModelConfig) -> bool {
    let (hidden, kv_heads) = (config.hidden_size, config.num_kv_heads);
    has_decode_gemv_mma(context, hidden, config.intermediate_size, kv_heads)
        && has_decode_attention_o(context, config.num_heads, kv_heads, config.head_dim, hidden)
}

impl CudaModel {
    /// Queues a layer.
    pub(super) fn decode_one_token_layer(
        &self,
        config: &ModelConfig,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        cache: &DeviceKvLayer,
        record: &DeviceRecord,
        workspace: &DeviceWorkspace,
    ) -> Result<()> {
        let (context, cuda) = (&*self.context, self.cuda()?);
        let row = |matrix: &DeviceTensor| matrix.view(0, &[1, matrix.width() as usize], None);
        let (hidden, mid) = (row(&workspace.hidden)?, row(&workspace.projected)?);
        let (qkv, act) = (row(&workspace.qkv)?, row(&workspace.mlp_act)?);
        let scratch = workspace.decode_scratch.as_ref();
        let scratch = scratch.ok_or_else(|| Error::internal("no memory for decoding"))?;
        let sums = scratch.as_matrix(config.num_kv_heads, config.hidden_size)?;
        let mark = |name, weight: &DeviceTensor| mark_linear(cuda, name, weight, 1);
        let eps = config.norm_eps;

        let norm = OneTokenLinear::Norm { norm: &layer.input_norm, eps };
        decode_gemv_mma(context, &hidden, norm, &layer.qkv_proj, &qkv)?;
        mark("qkv_proj", &layer.qkv_proj)?;
        let all_heads = config.num_heads + 2 * config.num_kv_heads;
        let heads = qkv.view(0, &[1, all_heads, config.head_dim], None)?;
        let (how, slots, sequences) = self.attention_operands(config, layer, cache, record)?;
        decode_attention_o(context, &heads, &how, &slots, &sequences, &layer.o_proj, &sums)?;
        mark("attention_o_proj", &layer.o_proj)?;
        let norm = &layer.post_norm;
        let gated = OneTokenLinear::SumsSwiGlu { norm, eps, sums: &sums, hidden: &mid };
        decode_gemv_mma(context, &hidden, gated, &layer.gate_up_proj, &act)?;
        mark("gate_up_proj", &layer.gate_up_proj)?;
        let added = OneTokenLinear::Residual { residual: &mid };
        decode_gemv_mma(context, &act, added, &layer.down_proj, &hidden)?;
        mark("down_proj", &layer.down_proj)
    }
}
