//! The first CUDA device, started while the model's files are looked at: its driver takes a quarter of a second.

use std::thread::JoinHandle;

use crate::backend::cuda::CudaDevice;
use crate::panic_guard;
use crate::thread_state::SignalsBlocked;

/// A device that is being started. When dropped, waits for the end of it: no thread outlives the load.
pub(super) struct DeviceStarter {
    /// `None` if no thread could be made: then whoever asks for the device starts it.
    thread: Option<JoinHandle<()>>,
}

impl DeviceStarter {
    /// Begins to start the first device. What came of it is what [`CudaDevice::get`] says, which waits for it.
    pub(super) fn start() -> Self {
        let body = || {
            // Failures are those of whoever asks for the device.
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
