//! The residual stream of a decoder on a device, `[num_rows, hidden_size]`, and what has been
//! computed but not yet added to it.
//!
//! A sublayer ends with `stream = round(stream + round(W x))`. The sum is done where it costs
//! least: by the product itself, or by the norm that reads the stream next. In any case the product
//! is finished before the sum, which is where devices that share a weight along its input features
//! add up their parts of it.

use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::elementwise::add;
use crate::ops::layer_norm::layer_norm;
use crate::ops::quantised::cuda_activations::{
    has_normalise_inputs, normalise_inputs, quantise_inputs, QuantisedInputs,
};
use crate::ops::rms_norm::cuda_rounded::{add_rms_norm, rms_norm_rounded};

/// A norm with its weights, which have the element type of the stream.
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// RMSNorm.
    Rms {
        /// The weight, [hidden_size].
        weight: &'a Tensor,
        /// The epsilon, inside the root.
        eps: f32,
    },
    /// LayerNorm.
    Layer {
        /// The weight, [hidden_size].
        weight: &'a Tensor,
        /// The bias, [hidden_size].
        bias: Option<&'a Tensor>,
        /// The epsilon, inside the root.
        eps: f32,
    },
}

/// What is still to be added to the stream.
#[derive(Debug)]
pub(super) enum Pending {
    /// Nothing.
    Nothing,
    /// The tensor `projected`.
    Projected,
    /// The sum over the rows of f32 [num_kv_heads, hidden_size], one for each kv head; for a stream
    /// of a single row.
    Sums(DeviceTensor),
}

/// The residual stream; see the head of the file.
#[derive(Debug)]
pub struct ResidualStream {
    /// The stream without what is pending, [num_rows, hidden_size].
    pub hidden: DeviceTensor,
    /// The normalised stream, [num_rows, hidden_size].
    pub normed: DeviceTensor,
    /// The last product, [num_rows, hidden_size].
    pub projected: DeviceTensor,
    pub(super) pending: Pending,
}

impl ResidualStream {
    /// Makes a stream with nothing pending. The three tensors do not overlap and have one shape and
    /// type.
    pub fn new(hidden: DeviceTensor, normed: DeviceTensor, projected: DeviceTensor) -> Self {
        ResidualStream { hidden, normed, projected, pending: Pending::Nothing }
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.hidden.shape().first().map_or(0, |&n| n as usize)
    }

    /// Adds what is pending, and writes the normalised stream to `normed`.
    pub fn normalise(&mut self, context: &ComputeContext, norm: &Norm<'_>) -> Result<()> {
        let pending = self.take_pending()?.then_some(&*self.projected);
        match *norm {
            Norm::Rms { weight, eps } => {
                add_rms_norm(context, pending, &self.hidden, weight, eps, &self.normed)
            }
            Norm::Layer { weight, bias, eps } => {
                if let Some(pending) = pending {
                    add(context, &self.hidden, pending, &self.hidden)?;
                }
                layer_norm(context, &self.hidden, weight, bias, eps, &self.normed)
            }
        }
    }

    /// Notes that nothing is pending. Returns whether `projected` was.
    fn take_pending(&mut self) -> Result<bool> {
        match std::mem::replace(&mut self.pending, Pending::Nothing) {
            Pending::Nothing => Ok(false),
            Pending::Projected => Ok(true),
            Pending::Sums(_) => {
                Err(crate::error::Error::internal("sums of heads for another kernel"))
            }
        }
    }

    /// Adds what is pending, and writes the normalised stream to `inputs` in FP8, of the same bits as
    /// if `normed` were quantised.
    pub(super) fn normalise_in_fp8(
        &mut self,
        context: &ComputeContext,
        norm: &Norm<'_>,
        inputs: &QuantisedInputs,
    ) -> Result<()> {
        match *norm {
            Norm::Rms { weight, eps } if has_normalise_inputs(&self.hidden) => {
                let pending = self.take_pending()?.then_some(&*self.projected);
                normalise_inputs(context, pending, &self.hidden, weight, eps, inputs)
            }
            _ => {
                self.normalise(context, norm)?;
                quantise_inputs(context, &self.normed, inputs)
            }
        }
    }

    /// Writes the normalised stream to `normed` where products add themselves to the stream, as a link of
    /// the chain.
    pub(super) fn normalise_in_chain(
        &self,
        context: &ComputeContext,
        norm: &Norm<'_>,
    ) -> Result<()> {
        match *norm {
            Norm::Rms { weight, eps } => {
                rms_norm_rounded(context, &self.hidden, weight, eps, &self.normed)
            }
            Norm::Layer { .. } => {
                Err(crate::error::Error::internal("the chain of kernels with a LayerNorm"))
            }
        }
    }
}
