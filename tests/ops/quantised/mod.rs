//! Quantised matrices: numbers quantised at load, activations in 8 bits, and tiles on a GPU as
//! dense rows.

mod activations;
mod codes;
mod dequantise;
mod folders;
mod quantise;
mod refusals;
mod tensors;

pub use activations::in_e4m3;
pub use codes::{are_numbers, number};
pub use dequantise::*;
