//! A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router gives every token a few of a
//! layer's MLPs, whose results are added up with the router's weights.
//!
//! ```text
//! p     = softmax(W_router x)                         over all experts
//! E     = the experts_per_token experts with the largest p, of equal ones the first
//! w_e   = p_e, or p_e / (sum of p over E)             if it renormalises
//! out  += sum over E of w_e * W_down,e (silu(W_gate,e x) * (W_up,e x))
//! ```
//!
//! x and out [num_tokens, hidden_size], W_router [num_experts, hidden_size], gate on top of up
//! [2 * width, hidden_size] and W_down [hidden_size, width] of each expert. As in Transformers
//! (`modeling_qwen3_moe.py`, `modeling_mixtral.py`), the softmax is computed in f32 and w_e is rounded to
//! the type of x.

pub mod cpu;
pub mod cuda;
mod cuda_products;
mod cuda_routes;
mod matrices;

pub use cuda::{experts, normed_experts, scratch_bytes};
pub use cuda_products::{check_experts, has_products};
pub use cuda_routes::{has_normed_experts, Stream};
pub use matrices::{ExpertKernels, ExpertLayer, StridedMatrices};

use crate::error::{Error, Result};

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    num_experts: usize,
    experts_per_token: usize,
    renormalises: bool,
}

impl Routing {
    /// Refuses more experts for a token than there are, and none.
    pub fn new(num_experts: usize, experts_per_token: usize, renormalises: bool) -> Result<Self> {
        if experts_per_token == 0 || experts_per_token > num_experts {
            return Err(Error::invalid_argument(format!(
                "a token cannot take {experts_per_token} of {num_experts} experts"
            )));
        }
        Ok(Routing { num_experts, experts_per_token, renormalises })
    }

    /// Returns how many experts a layer has.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Returns how many a token takes.
    pub fn experts_per_token(&self) -> usize {
        self.experts_per_token
    }

    /// Whether the weights of a token's experts are divided by their sum.
    pub fn renormalises(&self) -> bool {
        self.renormalises
    }
}

/// The sizes of a mixture of experts, on which its memory depends.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSizes {
    /// How tokens choose their experts.
    pub routing: Routing,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of an expert.
    pub width: usize,
}
