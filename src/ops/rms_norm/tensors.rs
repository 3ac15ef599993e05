//! What the operator takes and gives, by name.

use crate::memory::Tensor;

/// The tensors of [`add_rms_norm`](super::add_rms_norm). `residual_out` may be the same view as
/// `residual` or `x`, and `out` as `x`.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm<'a> {
    /// The output of the preceding layer.
    pub x: &'a Tensor,
    /// The tensor that it is added to.
    pub residual: &'a Tensor,
    /// The weight of the norm, [width].
    pub weight: &'a Tensor,
    /// The sum, rounded to the element type.
    pub residual_out: &'a Tensor,
    /// The norm of the sum.
    pub out: &'a Tensor,
}
