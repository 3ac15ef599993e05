//! The device or host memory that a model takes.

/// The device or host memory that a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// The weights, and on a device the tables of rotary positions.
    pub weights_bytes: u64,
    /// The activations of the longest pass and the scratch of the operators, which are set apart at
    /// load on a device.
    pub workspace_bytes: u64,
    /// The keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
}
