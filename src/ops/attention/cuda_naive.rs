//! `csrc/ops/attention/naive.cu`: all scores in memory, softmax, product. It serves any head_dim.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::ops::attention::cuda_params::{count, AttentionParams};
use crate::ops::attention::Problem;

/// The rows and columns that a block computes.
const TILE: i64 = 16;
/// The largest second and third extent of a grid.
const MOST: i64 = 65535;

fn tiles(size: i64) -> i64 {
    (size as u64).div_ceil(TILE as u64) as i64
}

/// Queues a call.
pub(super) fn launch(
    context: &ComputeContext,
    cuda: &CudaContext,
    problem: &Problem<'_>,
    params: &AttentionParams,
) -> Result<()> {
    let Problem { num_seqs, num_heads, max_q_len: q_len, max_kv_len: kv_len, .. } = *problem;
    let scores_of = |seqs: i64| {
        let rows = seqs.checked_mul(num_heads)?.checked_mul(q_len)?;
        usize::try_from(rows.checked_mul(kv_len)?.checked_mul(4)?).ok()
    };
    // One launch takes as many sequences as it can.
    let rows = num_heads.checked_mul(q_len).filter(|&rows| rows <= i64::from(i32::MAX));
    let (Some(rows), true) = (rows, num_heads <= MOST && tiles(q_len) <= MOST) else {
        return Err(Error::unsupported(format!(
            "attention: {num_heads} heads and {q_len} queries are too many for the naive backend"
        )));
    };
    let per_launch = num_seqs.min(MOST / num_heads).min(i64::from(i32::MAX) / rows).max(1);
    let bytes = scores_of(per_launch).unwrap_or(usize::MAX);
    let scores = context.allocate(bytes, "the scores of naive attention")?;

    let (head_dim, keys) = (count(problem.head_dim)?, count(kv_len)?);
    let mut first = 0;
    while first < num_seqs {
        let seqs = per_launch.min(num_seqs - first);
        let at = |data: *mut u8, strides: [i64; 3]| {
            data.wrapping_add((first * strides[0]) as usize * problem.dtype.size_bytes())
        };
        let part = AttentionParams {
            q: at(params.q, params.q_strides),
            k: at(params.k, params.k_strides),
            v: at(params.v, params.v_strides),
            out: at(params.out, params.out_strides),
            ..*params
        };
        let heads = (seqs * num_heads) as u32;
        let launch =
            |x, y| Launch { grid: (x as u32, y as u32, heads), block: 256, shared_bytes: 0 };
        let arguments = || Arguments::new().value(&part).pointer(scores.start()).i32(head_dim);
        // SAFETY: the arguments of the three kernels; the strides span the tensors' elements, and
        // the scores have a place for each pair of a query and a key of these sequences.
        unsafe {
            if kv_len > 0 {
                let kernel = kernels::ATTENTION_NAIVE_SCORES.of(problem.dtype);
                let grid = launch(tiles(kv_len), tiles(q_len));
                cuda.launch(kernel, grid, arguments())?;
                let grid = Launch::linear((seqs * rows) as u32, 256);
                let arguments = Arguments::new().pointer(scores.start()).i32(keys);
                cuda.launch(kernels::ATTENTION_NAIVE_SOFTMAX, grid, arguments)?;
            }
            let kernel = kernels::ATTENTION_NAIVE_OUTPUT.of(problem.dtype);
            let grid = launch(tiles(problem.head_dim), tiles(q_len));
            cuda.launch(kernel, grid, arguments())?;
        }
        first += seqs;
    }
    Ok(())
}
