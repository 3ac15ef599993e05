//! Matrices whose numbers are stored in 4 or 8 bits, with a scale for every group of inputs of a
//! row: their [formats](QuantFormat) and their [numbers on the host](QuantisedMatrix). The products
//! with them are those of [`linear`](super::linear).

mod format;
mod matrix;

pub use format::{Code, QuantFormat};
pub use matrix::{fp8_to_f32, QuantisedMatrix};
