//! Linear layers, in each of their forms.

mod cpu;
pub mod cpu_quantised;
mod fp8;
mod fused;
mod gemv;
mod gemv_mma;
mod narrow;
mod narrow_quantised;
mod prefill;
mod prefill_heads;
mod prefill_int8;
mod quantised;
mod quantised_one;
mod residual;
mod skinny;
