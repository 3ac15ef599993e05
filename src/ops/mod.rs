//! The operators of the forward pass: contract, checks and kernels, one file each.
//!
//! Activations are f32, row-major and contiguous unless a stride is passed. Every function checks all
//! shapes once, before anything is computed, and reports a mismatch as an error.

pub mod argmax;
pub mod attention;
pub mod embedding;
pub mod gelu_tanh;
pub mod host;
pub mod kv_blocks;
pub mod kv_cache_append;
pub mod layer_norm;
pub mod linear;
mod online_softmax;
pub mod packed_matrix;
mod panel_product;
pub mod rms_norm;
pub mod rope;
pub mod silu_mul;
pub mod softmax;
pub mod stepwise;
pub mod tensor;

pub use argmax::argmax;
pub use attention::{attention, AttentionBatch, AttentionScratch};
pub use embedding::embedding;
pub use gelu_tanh::gelu_tanh;
pub use kv_blocks::{KvBlocks, KvLayout, BLOCK_SIZE};
pub use kv_cache_append::kv_cache_append;
pub use layer_norm::layer_norm;
pub use linear::{linear, LinearScratch, Store};
pub use packed_matrix::{PackedMatrix, PanelWriter};
pub use rms_norm::{rms_norm, rms_norm_heads};
pub use rope::{rope, RopePairing, RopeTable};
pub use silu_mul::{silu, silu_mul};
pub use softmax::softmax;

use crate::error::{Error, Result};

/// Checks a strided tensor [num_tokens, num_heads, head_dim] with token rows `row_stride` apart.
fn check_strided(
    op: &str,
    len: usize,
    num_tokens: usize,
    row_stride: usize,
    num_heads: usize,
    head_dim: usize,
) -> Result<()> {
    let row_len = num_heads.checked_mul(head_dim);
    let needed = row_len.and_then(|row_len| match num_tokens {
        0 => Some(0),
        n => (n - 1).checked_mul(row_stride)?.checked_add(row_len),
    });
    match (row_len, needed) {
        (Some(row_len), Some(needed)) if needed <= len && row_len <= row_stride => Ok(()),
        _ => Err(Error::internal(format!(
            "{op}: {num_tokens} tokens of {num_heads} x {head_dim}, rows {row_stride} apart, in {len} \
             values"
        ))),
    }
}
