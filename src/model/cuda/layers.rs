//! Which kernels compute the layers of a pass over prompts: up to 128 rows those of the chain of [`super::decode`]
//! where they serve the weights, above them the kernel for prompts where it is the fastest, else `gemm`.
//!
//! Of a model that is to be deterministic, every row of a linear layer and of the attention is summed in an order that
//! follows from the shape of the weight and from the row's own position alone. The other rows of a batch, the pieces
//! that a prompt is cut into, a preemption or a warm prefix then change nothing.
//!
//! * Linear layers on Hopper, where the weights suit the chain of [`super::decode`]: up to 128 rows
//!   [`skinny_gemm`], more by `gemm` with [`SumOrder::Parts`]; both add up k by wgmma, 16 at a time from the first to
//!   the last, in as many parts as the shape of the weight says.
//! * Linear layers elsewhere, and those of GPT-2: [`SumOrder::ByRow`].
//! * Attention: flash, for decoding too.
//! * Norms, rotary positions and the choice of tokens go row by row in any case, and
//!   [`rms_norm_step`](crate::ops::stepwise::rms_norm_step) adds as [`add_rms_norm`](crate::ops::stepwise::add_rms_norm).

use super::pass::{linear, Pass, Wanted};
use super::record::DeviceRecord;
use super::workspace::DeviceWorkspace;
use super::CudaModel;
use crate::backend::DeviceTensor;
use crate::error::Result;
use crate::memory::Tensor;
use crate::model::kv_cache::DeviceKvLayer;
use crate::model::qwen3::Qwen3Layer;
use crate::model::ModelConfig;
use crate::ops::gemm::SumOrder;
use crate::ops::linear::cuda_prefill::{is_prefill_faster, prefill_gemm};
use crate::ops::linear::cuda_prefill_heads::is_prefill_heads_faster;
use crate::ops::linear::cuda_skinny::{num_fixed_parts, skinny_gemm, SKINNY_TOKENS};
use crate::ops::linear::LinearResult;
use crate::ops::silu_mul::cuda_rounded::silu_mul;

fn num_rows(x: &Tensor) -> usize {
    x.shape().first().map_or(0, |&n| n as usize)
}

impl CudaModel {
    /// Do the kernels of the chain compute so many rows, of prompts too?
    fn is_skinny(&self, rows: usize) -> bool {
        self.decode_kernels.chain && rows <= SKINNY_TOKENS
    }

    /// Is the kernel for prompts the fastest for these rows?
    fn is_prefill(&self, x: &Tensor, weight: &Tensor, result: LinearResult) -> bool {
        !self.is_deterministic
            && self.decode_kernels.prefill
            && is_prefill_faster(num_rows(x), weight, result)
    }

    /// Does one kernel project a prompt to heads, normalise and rotate them, and faster than several?
    pub(super) fn is_prefill_heads(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
    ) -> bool {
        let (head_dim, stride) = (config.head_dim, self.spacing.stride);
        layer.qkv_bias.is_none()
            && !self.is_skinny(num_rows(x))
            && self.is_prefill(x, &layer.qkv_proj, LinearResult::Plain)
            && is_prefill_heads_faster(
                &self.context,
                num_rows(x),
                &layer.qkv_proj,
                head_dim,
                stride,
            )
    }

    /// In which order `gemm` adds up the products with a weight.
    pub(super) fn sum_order(&self, weight: &Tensor, result: LinearResult) -> SumOrder {
        match (self.is_deterministic, self.decode_kernels.chain) {
            (false, _) => SumOrder::Fastest,
            (true, false) => SumOrder::ByRow,
            (true, true) => SumOrder::Parts(num_fixed_parts(weight, result)),
        }
    }

    /// `out = x weight^T`, or `+ bias`. x [num_rows, in_features], out [num_rows, out_features].
    pub(super) fn linear(
        &self,
        x: &Tensor,
        weight: &DeviceTensor,
        bias: Option<&DeviceTensor>,
        out: &DeviceTensor,
    ) -> Result<()> {
        // The chain's weights have no biases.
        if bias.is_none() && self.is_skinny(num_rows(x)) {
            return skinny_gemm(
                &self.context,
                x,
                weight,
                LinearResult::Plain,
                self.is_deterministic,
                out,
            );
        }
        if bias.is_none() && self.is_prefill(x, weight, LinearResult::Plain) {
            return prefill_gemm(&self.context, x, weight, LinearResult::Plain, out);
        }
        let order = self.sum_order(weight, LinearResult::Plain);
        linear(&self.context, order, x, weight, bias, out)
    }

    /// `out = silu(gate) * up` with `gate_up = x weight^T`. x [num_rows, in_features], gate_up
    /// [num_rows, 2 * width], which may stay as it is, out [num_rows, width].
    pub(super) fn swiglu(
        &self,
        x: &Tensor,
        weight: &DeviceTensor,
        gate_up: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let result = LinearResult::SwiGlu;
        if self.is_skinny(num_rows(x)) {
            return skinny_gemm(&self.context, x, weight, result, self.is_deterministic, out);
        }
        if self.is_prefill(x, weight, result) {
            return prefill_gemm(&self.context, x, weight, result, out);
        }
        linear(&self.context, self.sum_order(weight, result), x, weight, None, gate_up)?;
        silu_mul(&self.context, gate_up, out)
    }

    /// What is between the projections for one token a sequence, by the kernels that prompts take. Reads the
    /// workspace's qkv and writes its attn_out.
    pub(super) fn attend_as_prompts(
        &self,
        config: &ModelConfig,
        layer: &Qwen3Layer<DeviceTensor, DeviceTensor>,
        cache: &DeviceKvLayer,
        record: &DeviceRecord,
        wanted: &Wanted,
        workspace: &DeviceWorkspace,
    ) -> Result<()> {
        let num_seqs = record.context_lens.num_elements() as usize;
        let (context, cuda) = (&*self.context, self.cuda()?);
        let should_stop = &|| false;
        let pass =
            Pass { model: self, config, context, cuda, record, wanted, should_stop, lead: None };
        let qkv = pass.qkv_view(workspace, num_seqs)?;
        let out = &workspace.attn_out;
        let out = out.view(0, &[num_seqs, out.width() as usize], None)?;
        pass.attend(layer, cache, &qkv, &out)
    }
}
