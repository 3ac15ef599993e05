//! Linear layers, in each of their forms.

mod cpu;
mod gemv;
mod gemv_mma;
mod prefill;
mod prefill_heads;
mod skinny;
