//! Starts the first CUDA device while the model's files are read: its driver takes a quarter of a
//! second.

use std::thread::JoinHandle;

use crate::backend::cuda::CudaDevice;
use crate::panic_guard;
use crate::thread_state::SignalsBlocked;

/// A device that is being started. Waits for that when dropped: no thread outlives the load.
pub(super) struct DeviceStarter {
    /// `None` if no thread could be made: the first to ask for the device then starts it.
    thread: Option<JoinHandle<()>>,
}

impl DeviceStarter {
    /// Begins to start the first device. [`CudaDevice::get`] waits for it and tells the outcome.
    pub(super) fn start() -> Self {
        let body = || {
            // A failure is reported to the first to ask for the device.
            let _ = panic_guard::catch(|| CudaDevice::get(0));
        };
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new().name("xserv-cuda".to_string()).spawn(body);
        DeviceStarter { thread: thread.ok() }
    }
}

impl Drop for DeviceStarter {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It catches every panic; there is nothing to report here.
            let _ = thread.join();
        }
    }
}
