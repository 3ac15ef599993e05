//! Device memory and pinned host memory as sources of a caching allocator.

use super::device::CudaDevice;
use crate::error::{Error, Result};
use crate::memory::MemorySource;
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory of a GPU.
pub(super) struct DeviceMemory {
    pub device: Arc<CudaDevice>,
}

impl MemorySource for DeviceMemory {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>> {
        let _current = self.device.enter()?;
        let mut start = 0;
        // SAFETY: a context is current; one address is written.
        let status = unsafe { sys::cuMemAlloc_v2(&mut start, bytes) };
        self.device.check(status, "allocating device memory")?;
        NonNull::new(start as *mut u8).ok_or_else(|| Error::out_of_memory("device memory", bytes))
    }

    unsafe fn release(&self, start: NonNull<u8>, _bytes: usize) {
        // A failure here comes from an earlier kernel, and the next synchronisation reports it.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the caller vouches for the address; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(start.as_ptr() as sys::CUdeviceptr) };
        }
    }

    fn name(&self) -> &'static str {
        "device memory"
    }

    fn free_and_total(&self) -> Option<(usize, usize)> {
        self.device.memory_info().ok()
    }
}

/// Host memory that the GPU reads and writes directly, at full speed.
pub(super) struct PinnedMemory {
    pub device: Arc<CudaDevice>,
}

impl MemorySource for PinnedMemory {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>> {
        let _current = self.device.enter()?;
        let mut start = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current; one address is written.
        let status = unsafe { sys::cuMemHostAlloc(&mut start, bytes, flags) };
        self.device.check(status, "allocating pinned memory")?;
        NonNull::new(start.cast()).ok_or_else(|| Error::out_of_memory("pinned memory", bytes))
    }

    unsafe fn release(&self, start: NonNull<u8>, _bytes: usize) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the caller vouches for the address; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFreeHost(start.as_ptr().cast()) };
        }
    }

    fn name(&self) -> &'static str {
        "pinned host memory"
    }
}
