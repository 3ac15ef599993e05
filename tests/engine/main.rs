//! The engine's parts without a model, and its loop around a toy. Whole requests are tested through the C
//! interface (`tests/abi`).

#[path = "../support/chi_square.rs"]
mod chi_square;
mod failing_steps;
mod masked_steps;
mod sampler;
mod scheduler;
mod service;
mod toy_model;
