//! CUDA graphs: work that is recorded once and queued as a whole many times, so that the driver
//! starts its kernels without the host.

use super::context::CudaContext;
use super::device::CudaDevice;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use std::sync::Arc;

/// A recorded graph. The memory that its work uses must outlive it.
pub(crate) struct Graph {
    executable: CUgraphExec,
    device: Arc<CudaDevice>,
}

// SAFETY: graph handles may be moved between threads; launches go through `&self` of one owner.
unsafe impl Send for Graph {}
// SAFETY: as above; the driver allows launches from several threads of different launches only, and
// the owner's stream orders ours.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `body` queues on the context's stream instead of running it. `body` may neither
    /// wait for the device nor allocate from the driver.
    pub(crate) fn record(context: &CudaContext, body: impl FnOnce() -> Result<()>) -> Result<Self> {
        context.with_current(|| {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: a live stream; if it is being recorded already, the status is an error.
            let status = unsafe { sys::cuStreamBeginCapture_v2(context.raw_stream(), mode) };
            context.check(status, "beginning a CUDA graph")?;
            let done = body();
            let mut graph: CUgraph = std::ptr::null_mut();
            // SAFETY: the recording begun above; one handle is written.
            let status = unsafe { sys::cuStreamEndCapture(context.raw_stream(), &mut graph) };
            let ended = done.and_then(|()| context.check(status, "ending a CUDA graph"));
            let mut executable: CUgraphExec = std::ptr::null_mut();
            let made = ended.and_then(|()| {
                if graph.is_null() {
                    return Err(Error::internal("a CUDA graph was not recorded"));
                }
                // SAFETY: a whole graph; one handle is written.
                let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
                context.check(status, "making a CUDA graph")
            });
            if !graph.is_null() {
                // SAFETY: made above; the executable is independent of it.
                let _ = unsafe { sys::cuGraphDestroy(graph) };
            }
            made.map(|()| Graph { executable, device: context.shared_device().clone() })
        })
    }

    /// Queues the recorded work.
    ///
    /// # Safety
    /// The recorded work is as valid now as it was when recorded: its memory is alive, and the
    /// contents of its index arrays are in range.
    pub(crate) unsafe fn launch(&self, context: &CudaContext) -> Result<()> {
        context.with_current(|| {
            // SAFETY: a live graph; the caller vouches for its work.
            let status = unsafe { sys::cuGraphLaunch(self.executable, context.raw_stream()) };
            context.check(status, "launching a CUDA graph")
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `record`; the driver keeps it until its launches are done.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
