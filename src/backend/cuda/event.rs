//! Marks in a stream of work, to wait for what was queued before them and for nothing else.

use super::context::CudaContext;
use super::device::CudaDevice;
use crate::error::Result;
use cudarc::driver::sys::{self, CUevent};
use std::sync::Arc;

/// A mark in the stream of one context.
pub(crate) struct Event {
    handle: CUevent,
    device: Arc<CudaDevice>,
}

// SAFETY: event handles may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A mark that is nowhere yet: waiting for it returns at once.
    pub(crate) fn new(context: &CudaContext) -> Result<Self> {
        context.with_current(|| {
            let mut handle = std::ptr::null_mut();
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: a context is current; one handle is written.
            let status = unsafe { sys::cuEventCreate(&mut handle, flags) };
            context.check(status, "making a CUDA event")?;
            Ok(Event { handle, device: context.shared_device().clone() })
        })
    }

    /// Puts the mark behind all work queued so far, from where it was before.
    pub(crate) fn record(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a living event and the context's stream, both of its device.
            let status = unsafe { sys::cuEventRecord(self.handle, context.raw_stream()) };
            context.check(status, "recording a CUDA event")
        })
    }

    /// Waits for the work in front of the mark. Bad indices are reported by
    /// [`CudaContext::synchronize`], not here.
    pub(crate) fn synchronize(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a living event.
            let status = unsafe { sys::cuEventSynchronize(self.handle) };
            context.check(status, "waiting for a CUDA event")
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `new`, destroyed once; the driver keeps what a recorded event still needs.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
