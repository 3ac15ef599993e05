//! Starts a CUDA device while the model's files are read: its driver takes a quarter of a
//! second.

use crate::backend::cuda::CudaDevice;
use crate::threads::{Thread, STACK_BYTES};

/// A device that is being started. Waits for that when dropped: no thread outlives the load.
pub(super) struct DeviceStarter {
    /// `None` if no thread could be made: the first to ask for the device then starts it.
    thread: Option<Thread<()>>,
}

impl DeviceStarter {
    /// Begins to start the device with this index. [`CudaDevice::get`] waits for it and tells the outcome.
    pub(super) fn start(index: i32) -> Self {
        let body = move || {
            // A failure is reported to the first to ask for the device.
            CudaDevice::get(index).map(drop)
        };
        DeviceStarter { thread: Thread::start("xserv-cuda", STACK_BYTES, body).ok() }
    }
}

impl Drop for DeviceStarter {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // There is nothing to report here.
            let _ = thread.join();
        }
    }
}
