//! The engine's parts without a model. Whole requests are tested through the C interface (`tests/abi`).

mod sampler;
mod scheduler;
