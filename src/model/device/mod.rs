//! Models on a CUDA device: the weights in device memory, and steps that queue operators on a stream.
//!
//! ```text
//! limits       how large passes become
//! scratch      memory that operators take from time to time
//! record       what the host tells the device about a step
//! step_memory  what steps are told, and where their results arrive
//! workspace    activations, and the memory of steps
//! model        what a model has on a device
//! needs        what it takes of the device's memory
//! load         how it gets there
//! logits       passes, and the logits that the host wants of them
//! steps        steps
//! ```

mod graphs;
pub(super) mod lead;
pub(super) mod limits;
pub(super) mod load;
mod logits;
pub(super) mod model;
mod needs;
pub(super) mod record;
mod scratch;
mod step_clock;
mod step_memory;
mod steps;
pub(super) mod workspace;
