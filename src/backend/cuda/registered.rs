//! Ordinary host memory, pinned for a device.

use super::context::CudaContext;
use super::device::CudaDevice;
use crate::memory::HostBuffer;
use cudarc::driver::sys;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Host memory that a device copies from and to at full speed while this lives.
pub(crate) struct RegisteredBuffer {
    memory: ManuallyDrop<HostBuffer>,
    start: *mut u8,
    device: Arc<CudaDevice>,
}

// SAFETY: the buffer owns its memory; the address is a number here.
unsafe impl Send for RegisteredBuffer {}
// SAFETY: as above: nothing is read or written through `&RegisteredBuffer`.
unsafe impl Sync for RegisteredBuffer {}

impl RegisteredBuffer {
    /// Pins memory for the context's device; `None` where that is refused.
    pub(crate) fn new(context: &CudaContext, mut memory: HostBuffer) -> Option<Self> {
        // If a child were forked meanwhile it would share the pages, and the next write here would
        // go to a copy that the device does not see.
        memory.keep_from_children();
        let device = context.shared_device();
        let start = memory.as_bytes_mut().as_mut_ptr();
        let len = memory.len_bytes();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let registered = device.enter().and_then(|_current| {
            // SAFETY: a context is current; the memory is ours and stays mapped until it is
            // unregistered.
            let status = unsafe { sys::cuMemHostRegister_v2(start.cast(), len, flags) };
            device.check(status, "pinning host memory")
        });
        registered.ok()?;
        let memory = ManuallyDrop::new(memory);
        let buffer = RegisteredBuffer { memory, start, device: device.clone() };
        // Not every system lets kernels use the host's addresses of such memory.
        buffer.is_addressed_alike().then_some(buffer)
    }

    /// Whether the address of the memory is the same on the device.
    fn is_addressed_alike(&self) -> bool {
        let mut there: sys::CUdeviceptr = 0;
        let told = self.device.enter().and_then(|_current| {
            // SAFETY: a context is current; registered memory, mapped to the device; one address is
            // written.
            let status =
                unsafe { sys::cuMemHostGetDevicePointer_v2(&mut there, self.start.cast(), 0) };
            self.device.check(status, "finding pinned memory on the device")
        });
        told.is_ok() && there == self.start as sys::CUdeviceptr
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: registered by `new`, once; the driver waits for work that uses it.
        let status = unsafe { sys::cuMemHostUnregister(self.start.cast()) };
        if status == sys::CUresult::CUDA_SUCCESS {
            // SAFETY: dropped here only. Memory that the driver may still use is left where it is.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
