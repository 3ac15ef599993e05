//! Chooses the algorithm that serves a call.

use crate::error::{Error, Result};
use crate::ops::attention::{size, Form, Problem};
use crate::ops::kv_cache::layout::MAX_HEAD_DIM;

/// The algorithms of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBackend {
    /// Split-KV for one query per sequence, otherwise flash, otherwise naive.
    #[default]
    Auto,
    /// Keeps all scores in memory; the batched form only.
    Naive,
    /// Uses tiles and an online softmax.
    Flash,
    /// Like `Flash`, for one query per sequence, with the keys split among thread blocks.
    SplitKv,
}

/// The head dims that the fused CUDA kernels are compiled for; they take the list from here.
pub(crate) const KERNEL_HEAD_DIMS: [i64; 5] = [64, 80, 96, 128, 256];
/// The smallest block size: keys that the decode kernel loads at once lie in one block.
const LEAST_BLOCK_SIZE: i64 = 16;

/// Returns why the fused kernels cannot serve a call.
fn fused_obstacle(problem: &Problem<'_>, on_cuda: bool) -> Option<String> {
    if !on_cuda {
        return None;
    }
    if !KERNEL_HEAD_DIMS.contains(&problem.head_dim) {
        return Some(format!(
            "there is no fused kernel for head_dim {}, only for one of {KERNEL_HEAD_DIMS:?}",
            problem.head_dim
        ));
    }
    let block_size = size(problem.k, 1);
    let is_served = block_size >= LEAST_BLOCK_SIZE && block_size.count_ones() == 1;
    if problem.form == Form::Paged && !is_served {
        return Some(format!(
            "k has block_size {block_size}, but a power of two of at least 16 is needed"
        ));
    }
    None
}

/// Returns the algorithm, never `Auto`, that serves the call.
pub(super) fn choose(problem: &Problem<'_>, on_cuda: bool) -> Result<AttentionBackend> {
    use AttentionBackend::*;
    let refuse = |what: String| Err(Error::unsupported(format!("attention: {what}")));
    if !on_cuda && problem.head_dim > MAX_HEAD_DIM as i64 {
        return refuse(format!("head_dim {} is more than {MAX_HEAD_DIM}", problem.head_dim));
    }
    let obstacle = fused_obstacle(problem, on_cuda);
    let is_batched = problem.form == Form::Batched;
    match (problem.options.backend, obstacle) {
        (Naive, _) if !is_batched => refuse(
            "the naive backend serves the batched form only, not packed or paged".to_string(),
        ),
        (Naive, _) => Ok(Naive),
        (Auto, Some(_)) if is_batched => Ok(Naive),
        (_, Some(obstacle)) => refuse(obstacle),
        (Flash, None) => Ok(Flash),
        (SplitKv, None) if problem.max_q_len > 1 => refuse(format!(
            "the split-KV backend serves one query a sequence, but there may be {}",
            problem.max_q_len
        )),
        (Auto, None) if problem.max_q_len > 1 => Ok(Flash),
        (Auto | SplitKv, None) => Ok(SplitKv),
    }
}
