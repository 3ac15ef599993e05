//! Quantised matrices: numbers quantised at load, and tiles on a GPU as dense rows.

mod dequantise;
mod quantise;
mod tensors;

pub use dequantise::*;
