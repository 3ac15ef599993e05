//! Devices, and how work runs on them. Nothing here knows an operator.

mod context;
pub mod cpu;
pub mod cuda;
mod device_tensor;
mod graph_cache;

pub use context::{ComputeContext, ContextBackend};
pub use device_tensor::{Arena, DeviceTensor, PinnedBuffer};
pub(crate) use graph_cache::GraphCache;
