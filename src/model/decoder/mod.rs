//! The decoder: one block and one forward pass each for the CPU and for a device, whatever the
//! family of the model.
//!
//! ```text
//! family   the fields of config.json and the names of the tensors of each family
//! block    the weights
//! host     the forward pass on the CPU
//! device   the forward pass on a device
//! ```

pub mod block;
pub(super) mod device;
pub mod family;
pub(super) mod host;
