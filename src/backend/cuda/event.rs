//! CUDA events: marks in a stream of work, by which to wait for what was queued before them and
//! nothing else.

use super::context::CudaContext;
use super::device::CudaDevice;
use crate::error::Result;
use cudarc::driver::sys::{self, CUevent};
use std::sync::Arc;
use std::time::Duration;

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
    /// Makes an event that is not recorded yet: waiting for it returns at once.
    pub(crate) fn new(context: &CudaContext) -> Result<Self> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event that also stores when the stream reached it, by the clock of the device.
    pub(crate) fn timed(context: &CudaContext) -> Result<Self> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &CudaContext, flags: sys::CUevent_flags) -> Result<Self> {
        context.with_current(|| {
            let mut handle = std::ptr::null_mut();
            let flags = flags as u32;
            // SAFETY: a context is current; one handle is written.
            let status = unsafe { sys::cuEventCreate(&mut handle, flags) };
            context.check(status, "making a CUDA event")?;
            Ok(Event { handle, device: context.shared_device().clone() })
        })
    }

    /// Moves the mark after all work queued so far.
    pub(crate) fn record(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a living event and the context's stream, both of its device.
            let status = unsafe { sys::cuEventRecord(self.handle, context.raw_stream()) };
            context.check(status, "recording a CUDA event")
        })
    }

    /// Waits for the work before the mark. Bad indices are reported by
    /// [`CudaContext::synchronize`], not here.
    pub(crate) fn synchronize(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a living event.
            let status = unsafe { sys::cuEventSynchronize(self.handle) };
            context.check(status, "waiting for a CUDA event")
        })
    }

    /// Has the work that is queued to `context` from now on wait for the work before the mark, which is
    /// of another stream of the same device.
    pub(crate) fn hold_back(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
            // SAFETY: a living event and the context's stream, both of one device.
            let status =
                unsafe { sys::cuStreamWaitEvent(context.raw_stream(), self.handle, flags) };
            context.check(status, "ordering two CUDA streams")
        })
    }

    /// Whether the stream has reached the mark. Does not wait.
    pub(crate) fn is_reached(&self, context: &CudaContext) -> Result<bool> {
        context.with_current(|| {
            // SAFETY: a living event.
            let status = unsafe { sys::cuEventQuery(self.handle) };
            if status == sys::CUresult::CUDA_ERROR_NOT_READY {
                return Ok(false);
            }
            context.check(status, "looking at a CUDA event").map(|()| true)
        })
    }

    /// Returns the time from `earlier` to this mark. Both must be [`Event::timed`] and reached by
    /// the stream.
    pub(crate) fn since(&self, earlier: &Event, context: &CudaContext) -> Result<Duration> {
        context.with_current(|| {
            let mut millis = 0.0f32;
            // SAFETY: living events of one device; one number is written.
            let status =
                unsafe { sys::cuEventElapsedTime_v2(&mut millis, earlier.handle, self.handle) };
            context.check(status, "timing with CUDA events")?;
            Ok(Duration::try_from_secs_f64(f64::from(millis) / 1e3).unwrap_or_default())
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `new`, destroyed once; the driver keeps what a recorded event still
            // needs.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
