//! Attention, in each of its forms.

mod cpu;
mod cpu_paged;
mod fused;
mod tensors;
