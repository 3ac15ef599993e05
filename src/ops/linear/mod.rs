//! Linear layers.

pub mod cpu;
pub mod cuda_gemv;
pub mod cuda_gemv_mma;
pub mod cuda_prefill;
pub mod cuda_prefill_heads;
pub mod cuda_skinny;

/// What becomes of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearResult {
    /// `out = round(W x)`
    Plain,
    /// `out = round(out + round(W x))`
    Residual,
    /// `out = round(round(silu(round(G x))) * round(U x))`, where W is G on top of U.
    SwiGlu,
}
