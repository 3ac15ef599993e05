//! Bytes, shapes and element types. Touches nothing above; used by everything.

mod dtype;
mod host_buffer;

pub use dtype::DType;
pub use host_buffer::{HostBuffer, Pages, Plain};
