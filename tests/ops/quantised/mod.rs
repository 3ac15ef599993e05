//! Quantised matrices: numbers quantised at load, activations in 8 bits, and tiles on a GPU as dense rows.

mod activations;
mod dequantise;
mod quantise;

pub use activations::in_e4m3;
pub use dequantise::*;
