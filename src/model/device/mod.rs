//! Models on a CUDA device: the weights in device memory, and steps that queue operators on a
//! stream.
//!
//! ```text
//! limits       limits on the size of passes
//! scratch      temporary memory of operators
//! record       the inputs of a step, as the host sends them
//! mask_uploads the masks of steps on their way to the device
//! choice_extras  changed logits and log-probabilities of steps
//! step_memory  the inputs of steps, and where their results arrive
//! workspace    activations, and the memory of steps
//! model        a model's state on a device
//! needs        the device memory that it takes
//! load         loading it onto the device
//! logits       passes, and the logits that the host asks for
//! steps        steps
//! ```

mod choice_extras;
mod graphs;
pub(super) mod lead;
pub(super) mod limits;
pub(super) mod load;
mod logits;
mod mask_uploads;
pub(super) mod model;
mod needs;
pub(super) mod record;
mod scratch;
mod step_clock;
mod step_memory;
mod steps;
pub(super) mod workspace;
