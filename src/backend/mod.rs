//! How to run anything anywhere; knows no operator.

mod context;
pub mod cpu;
pub mod cuda;
mod device_tensor;

pub use context::{ComputeContext, ContextBackend};
pub(crate) use cuda::Graph as WorkGraph;
pub use device_tensor::{Arena, DeviceTensor, PinnedBuffer};
