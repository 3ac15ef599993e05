//! A model: its folder, its configuration, its weights and its forward pass.
//!
//! ```text
//! folder, config, safetensors, shard_index, checkpoint   what is on disk; headers only
//! decoder                                                the block, the families, the forward passes
//! headers                                                whether tied matrices are: decided before anything is counted
//! quantised                                              weights of 4 and 8 bits in files: configs, tensors, numbers
//! load                                                   which tensors make which weight; reads and packs them, or makes them up
//! device                                                 a model on a device: its memory, its steps
//! batch, kv_cache, workspace                             what a forward pass needs besides the weights
//! kv_swap                                                blocks of the KV cache that wait on the host
//! other_formats                                          folders that are no models of this kind
//! opened, loaded                                         a folder in order, a model in memory
//! step, run                                              a forward pass and the choice of the next tokens
//! memory_needs                                           what a model takes
//! inspect                                                a report on a folder
//! ```

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod decoder;
mod device;
pub mod folder;
mod headers;
pub mod inspect;
pub mod kv_cache;
mod kv_swap;
pub mod load;
mod loaded;
mod memory_needs;
mod opened;
mod other_formats;
pub mod quantised;
mod run;
pub mod safetensors;
pub mod shard_index;
pub mod step;
pub mod workspace;

pub use batch::ForwardBatch;
pub use config::{Biases, ByWavelength, ModelConfig, RopeConfig, RopeScaling, YarnConfig};
pub use device::limits::PassLimits;
pub use headers::ModelHeaders;
pub use inspect::{inspect, Inspection};
pub use kv_cache::KvCache;
pub use kv_swap::{BlockCopy, CopyDirection, KvSwap};
pub use load::{ActivationFormat, LoadOptions, WeightStorage};
pub use loaded::Model;
pub use memory_needs::MemoryNeeds;
pub use opened::{DeviceLoad, ModelFolder};
pub use step::{
    mask_words, Draw, LogProbs, LogProbsWanted, ScoresOut, Step, StepResult, StepTime, TokenChoice,
    TokenLogProb, TokenScore, WriteMasks, FROM_BATCH, MAX_TOP_LOG_PROBS, NO_TOKEN,
};
pub use workspace::Workspace;

pub use crate::ops::kv_cache::layout::KvFormat;
