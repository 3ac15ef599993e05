//! The devices that memory is on.

use std::fmt;

/// A device with memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host.
    Cpu,
    /// An NVIDIA GPU, by the number that the CUDA driver gives it.
    Cuda(i32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("the CPU"),
            Device::Cuda(index) => write!(f, "CUDA device {index}"),
        }
    }
}
