//! A profile of a chain of kernels, which [`super::marks`] fills.

use crate::memory::Block;
use std::time::Instant;

/// A part of a chain of kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfiledPart {
    /// The name of what the part computes.
    pub name: &'static str,
    /// The bytes of weights, which any kernel must read.
    pub bytes: u64,
    /// The multiplications and additions of its matrix products.
    pub flops: f64,
    /// The time from the end of the part before to its own end.
    pub seconds: f64,
    /// The host's time for queueing or recording it.
    pub queue_seconds: f64,
}

/// The marks of the chain that was queued or recorded last.
pub(super) struct Profile {
    /// A word of device memory for each mark.
    pub times: Block,
    pub parts: Vec<ProfiledPart>,
    /// The number of the profile, which no other of the context has.
    pub generation: u64,
    /// When the queueing of the last mark was complete.
    pub queued: Instant,
}
