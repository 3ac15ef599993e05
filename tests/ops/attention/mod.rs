//! Attention, in each of its forms.

mod cpu;
mod cpu_paged;
mod fp8_cache;
mod fused;
mod tensors;
mod window;
