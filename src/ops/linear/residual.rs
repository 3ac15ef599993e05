//! The residual stream of a decoder on a device, `[num_rows, hidden_size]`, and what has been computed and not yet
//! added to it.
//!
//! A sublayer ends with `stream = round(stream + round(W x))`. The sum is done where it costs least: by the product
//! itself, or by the norm that reads the stream next. The product is finished before the sum in any case, which is
//! where devices that share a weight along its input features add up what each of them has.

use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::elementwise::add;
use crate::ops::layer_norm::layer_norm;
use crate::ops::rms_norm::cuda_rounded::{add_rms_norm, rms_norm_step};

/// A norm with its weights, which have the element type of the stream.
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// RMSNorm.
    Rms {
        /// [hidden_size]
        weight: &'a Tensor,
        /// Inside the root.
        eps: f32,
    },
    /// LayerNorm.
    Layer {
        /// [hidden_size]
        weight: &'a Tensor,
        /// [hidden_size]
        bias: Option<&'a Tensor>,
        /// Inside the root.
        eps: f32,
    },
}

/// What is still to be added to the stream.
#[derive(Debug)]
pub(super) enum Pending {
    /// Nothing.
    Nothing,
    /// `projected`.
    Projected,
    /// The sum over the rows of f32 [num_kv_heads, hidden_size], one for each kv head: of a single row.
    Sums(DeviceTensor),
}

/// See the head of the file.
#[derive(Debug)]
pub struct ResidualStream {
    /// [num_rows, hidden_size], without what is pending.
    pub hidden: DeviceTensor,
    /// [num_rows, hidden_size], the stream normalised.
    pub normed: DeviceTensor,
    /// [num_rows, hidden_size], the last product.
    pub projected: DeviceTensor,
    pub(super) pending: Pending,
}

impl ResidualStream {
    /// A stream with nothing pending. The three are apart from each other and of one shape and type.
    pub fn new(hidden: DeviceTensor, normed: DeviceTensor, projected: DeviceTensor) -> Self {
        ResidualStream { hidden, normed, projected, pending: Pending::Nothing }
    }

    /// The number of rows.
    pub fn num_rows(&self) -> usize {
        self.hidden.shape().first().map_or(0, |&n| n as usize)
    }

    /// Adds what is pending, and writes the normalised stream to `normed`.
    pub fn normalise(&mut self, context: &ComputeContext, norm: &Norm<'_>) -> Result<()> {
        let pending = match std::mem::replace(&mut self.pending, Pending::Nothing) {
            Pending::Nothing => None,
            Pending::Projected => Some(&*self.projected),
            Pending::Sums(_) => {
                return Err(crate::error::Error::internal("sums of heads for another kernel"))
            }
        };
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

    /// The same of a stream to which products add by themselves, as a link of the chain.
    pub(super) fn normalise_in_chain(
        &self,
        context: &ComputeContext,
        norm: &Norm<'_>,
    ) -> Result<()> {
        match *norm {
            Norm::Rms { weight, eps } => {
                rms_norm_step(context, &self.hidden, weight, eps, &self.normed)
            }
            Norm::Layer { .. } => {
                Err(crate::error::Error::internal("the chain of kernels with a LayerNorm"))
            }
        }
    }
}
