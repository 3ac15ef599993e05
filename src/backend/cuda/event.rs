//! A mark in a stream of work that the host can wait for.

use super::context::CudaContext;
use super::device::CudaDevice;
use super::driver::check;
use crate::error::Result;
use cudarc::driver::sys::{self, CUevent};
use std::sync::Arc;

/// See the head of the file.
pub(crate) struct Event {
    raw: CUevent,
    device: Arc<CudaDevice>,
}

// SAFETY: event handles may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that was never recorded; waiting for it ends at once.
    pub(crate) fn new(context: &CudaContext) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        context.with_current(|| {
            // SAFETY: a context is current; one handle is written.
            check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "making a CUDA event")
        })?;
        Ok(Event { raw, device: context.shared_device().clone() })
    }

    /// Puts the mark behind everything queued on the context's stream.
    pub(crate) fn record(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a live event and a live stream of the same device.
            let status = unsafe { sys::cuEventRecord(self.raw, context.raw_stream()) };
            context.check(status, "recording a CUDA event")
        })
    }

    /// Waits until the work before the mark is done.
    pub(crate) fn wait(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a live event.
            let status = unsafe { sys::cuEventSynchronize(self.raw) };
            context.check(status, "waiting for the device")
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `new`, used by nobody any more; the driver keeps it until it has come to pass.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
