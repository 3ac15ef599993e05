//! What a model takes of the memory of a device or of the host.

/// What a model takes of the memory of a device or of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Weights, and on a device the tables of rotary positions.
    pub weights_bytes: u64,
    /// Activations of the longest pass and scratch of the operators: on a device set apart at load.
    pub workspace_bytes: u64,
    /// Keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
}
