//! NVIDIA GPUs through the CUDA driver, which is found at run time.

mod blas;
mod context;
mod device;
mod driver;
mod event;
mod fatbins;
mod graph;
pub(crate) mod kernels;
pub(crate) mod layout;
mod marks;
mod memory;
mod profile;
mod registered;
mod tensor_map;

pub(crate) use blas::{is_present as is_cublas_present, MatmulShape, MAX_CUBLAS_WORKSPACE_BYTES};
#[cfg(test)]
pub(crate) use context::FaultRecord;
pub(crate) use context::{Arguments, Launch, MAX_COUNTERS};
pub use context::{CudaContext, StreamChoice};
pub use device::{num_cuda_devices, CudaDevice, CudaDeviceInfo};
pub use driver::{available, is_present};
pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use kernels::{Kernel, KernelByHalf};
pub(crate) use layout::kernel_struct;
pub use profile::ProfiledPart;
pub(crate) use registered::RegisteredBuffer;
pub(crate) use tensor_map::TensorMap;
