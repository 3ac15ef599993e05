//! Matrices whose numbers are stored in 4 or 8 bits, with a scale for every group of inputs of a
//! row: their [formats](QuantFormat), their [numbers on the host](QuantisedMatrix), and the layouts
//! that kernels read. The products with them are those of [`linear`](super::linear).

pub mod activations;
pub mod cuda;
pub mod cuda_activations;
pub mod cuda_integers;
mod format;
mod four_bits;
mod matrix;
mod panel_tiles;
mod panels;
mod quantise;
pub mod tensors;
pub mod tiles;

pub use crate::backend::cpu::math::fp8_to_f32;
pub use format::{Code, QuantFormat};
pub use matrix::QuantisedMatrix;
pub(crate) use panel_tiles::can_make_tiles;
pub use panels::QuantisedPanels;
pub(crate) use panels::{unit_bytes, vectors_of, Dequantise, Division, Group, PanelDivision};
pub use quantise::{quantise_row, quantised_format, RowOut};
