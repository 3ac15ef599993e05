//! Bytes, shapes and element types. Uses nothing above; used by everything.

mod caching_allocator;
mod device;
mod dtype;
mod host_buffer;
mod host_tensor;
mod tensor;

pub use caching_allocator::{Block, CachingAllocator, MemorySource, MemoryStats, SetApart};
pub use device::Device;
pub use dtype::DType;
pub use host_buffer::{HostArena, HostBuffer, Pages, Plain};
pub use host_tensor::HostTensor;
pub use tensor::{Dims, ElementType, RowLayout, Tensor, MAX_RANK};
