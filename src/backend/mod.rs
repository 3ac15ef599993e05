//! How to run anything anywhere; knows no operator.

mod context;
pub mod cpu;
pub mod cuda;

pub use context::{ComputeContext, ContextBackend};
