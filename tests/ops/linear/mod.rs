//! Linear layers, in each of their forms.

mod cpu;
mod cpu_quantised;
mod gemv;
mod gemv_mma;
mod prefill;
mod prefill_heads;
mod quantised;
mod skinny;
