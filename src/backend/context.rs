//! A compute context: a device, a stream of work on it, and the memory that the work uses.

use super::cpu::CpuBackend;
use super::cuda::{CudaContext, StreamChoice};
use crate::error::{Error, Result};
use crate::memory::{
    Block, CachingAllocator, Device, HostBuffer, MemorySource, MemoryStats, Pages, SetApart, Tensor,
};
use std::ptr::NonNull;
use std::sync::Arc;

/// A device, its stream of work and its allocator. May be shared between threads.
pub struct ComputeContext {
    backend: ContextBackend,
    /// Whether all tensors that operators get are the library's own, so that they need not be
    /// looked up.
    is_private: bool,
}

/// The half of a context that differs between devices.
pub enum ContextBackend {
    /// Computes immediately, on the calling thread and a pool.
    Cpu {
        /// The pool and the instruction set.
        backend: CpuBackend,
        /// Host memory.
        allocator: Arc<CachingAllocator>,
    },
    /// Queues work on a stream.
    Cuda(Box<CudaContext>),
}

/// Host memory of a CPU context.
struct HostMemory;

impl MemorySource for HostMemory {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>> {
        let mut buffer = std::mem::ManuallyDrop::new(HostBuffer::zeroed(bytes, Pages::Huge)?);
        NonNull::new(buffer.as_bytes_mut().as_mut_ptr())
            .ok_or_else(|| Error::out_of_memory("host memory", bytes))
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) {
        // SAFETY: `allocate` took the buffer apart with this address and length.
        drop(unsafe { HostBuffer::from_raw_parts(start, bytes) });
    }

    fn name(&self) -> &'static str {
        "host memory"
    }
}

impl ComputeContext {
    /// Makes a context on the CPU with `num_threads` threads, using at most `memory_budget` bytes.
    pub fn cpu(num_threads: usize, memory_budget: usize) -> Result<Self> {
        let backend = CpuBackend::new(num_threads)?;
        let allocator = CachingAllocator::new(Box::new(HostMemory), memory_budget);
        Ok(ComputeContext {
            backend: ContextBackend::Cpu { backend, allocator },
            is_private: false,
        })
    }

    /// Makes a context on a CUDA device, using at most `memory_budget` bytes of its memory.
    pub fn cuda(index: i32, stream: StreamChoice, memory_budget: usize) -> Result<Self> {
        let context = CudaContext::new(index, stream, memory_budget)?;
        Ok(ComputeContext { backend: ContextBackend::Cuda(Box::new(context)), is_private: false })
    }

    /// Makes a CUDA context with a stream of its own, for the library's own tensors only, which
    /// operators then do not look up in the driver.
    pub fn cuda_private(index: i32, memory_budget: usize) -> Result<Self> {
        let context = CudaContext::new(index, StreamChoice::Own, memory_budget)?;
        Ok(ComputeContext { backend: ContextBackend::Cuda(Box::new(context)), is_private: true })
    }

    /// Returns the half that differs between devices.
    pub fn backend(&self) -> &ContextBackend {
        &self.backend
    }

    /// Returns the device whose memory the context uses.
    pub fn device(&self) -> Device {
        match &self.backend {
            ContextBackend::Cpu { .. } => Device::Cpu,
            ContextBackend::Cuda(context) => context.place(),
        }
    }

    fn allocator(&self) -> &Arc<CachingAllocator> {
        match &self.backend {
            ContextBackend::Cpu { allocator, .. } => allocator,
            ContextBackend::Cuda(context) => context.allocator(),
        }
    }

    /// Allocates memory of the device for `what`. Its content is arbitrary.
    pub fn allocate(&self, len_bytes: usize, what: &str) -> Result<Block> {
        self.allocator().allocate(len_bytes, what)
    }

    /// As [`ComputeContext::allocate`], for large memory that is kept for long: takes no byte more
    /// than asked for.
    pub fn allocate_exact(&self, len_bytes: usize, what: &str) -> Result<Block> {
        self.allocator().allocate_exact(len_bytes, what)
    }

    /// Sets memory apart for what operators need temporarily; see [`CachingAllocator::set_apart`].
    pub(crate) fn set_apart(&self, len_bytes: usize, what: &str) -> Result<SetApart> {
        self.allocator().set_apart(len_bytes, what)
    }

    /// Allocates host memory that the device copies from and to at full speed; ordinary memory on
    /// the CPU.
    pub fn allocate_pinned(&self, len_bytes: usize, what: &str) -> Result<Block> {
        match &self.backend {
            ContextBackend::Cpu { allocator, .. } => allocator.allocate(len_bytes, what),
            ContextBackend::Cuda(context) => context.pinned().allocate(len_bytes, what),
        }
    }

    /// Runs `body`, and takes the memory that it allocated and gave back out of circulation for as
    /// long as the returned blocks live. Used for work that is recorded now and runs later.
    pub(crate) fn hold_memory<R>(
        &self,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<(R, Vec<Block>)> {
        self.allocator().begin_holding();
        let done = body();
        let held = self.allocator().end_holding()?;
        done.map(|result| (result, held))
    }

    /// Returns the statistics of the allocator of device memory.
    pub fn memory_stats(&self) -> MemoryStats {
        self.allocator().stats()
    }

    /// Returns memory that is not in use to the system.
    pub fn trim(&self) {
        self.allocator().trim();
        if let ContextBackend::Cuda(context) = &self.backend {
            context.pinned().trim();
        }
    }

    /// Waits for all work, and reports what went wrong in it.
    pub fn synchronize(&self) -> Result<()> {
        match &self.backend {
            ContextBackend::Cpu { .. } => Ok(()),
            ContextBackend::Cuda(context) => context.synchronize(),
        }
    }

    /// Fails if a tensor is not on this context's device.
    pub fn check_reachable(&self, tensor: &Tensor, name: &str) -> Result<()> {
        if tensor.device() != self.device() {
            return Err(Error::invalid_argument(format!(
                "{name} lies on {}, but the context works on {}",
                tensor.device(),
                self.device()
            )));
        }
        match &self.backend {
            ContextBackend::Cuda(context) if !self.is_private => {
                context.check_reachable(tensor, name)
            }
            _ => Ok(()),
        }
    }
}
