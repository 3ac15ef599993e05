//! The self-test: runs every operator that C sees on a device, and compares its results with plain
//! loops in f64 ([`reference`]) and, on a GPU, with the operator's CPU half.
//!
//! The cases are in `cases_*.rs`, one file for each file of operators in `src/ffi`. Sizes are small
//! and odd. Each result lies between two guards, which have to stay as they are, and begins as NaN.
//! The error of an element is its distance from the reference, divided by the reference's size or,
//! where that is larger, by the mean size of the tensor's elements.

pub mod case;
mod cases_attention;
mod cases_elementwise;
mod cases_gemm;
mod cases_index;
mod cases_quantised;
mod cases_rows;
pub mod reference;
mod run;

pub use run::{self_test, self_test_with, Line, Outcome, Reference};
