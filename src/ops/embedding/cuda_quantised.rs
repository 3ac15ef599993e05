//! The embedding lookup at the start of a step in a table that is quantised:
//! `csrc/ops/embedding/quantised.cu`.

use super::cuda_chosen::check_tokens;
use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct EmbeddingQuantisedParams {
        hidden: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        zeros: *mut u8,
        ids: *mut u8,
        sources: *mut u8,
        chosen: *mut u8,
        fault: *mut u8,
        vocab_size: u32,
        width: i32,
        num_chunks: i32,
        num_groups: i32,
        group_size: i32,
        code: i32,
        scale_type: i32,
        are_pieces: i32,
    }
}

/// The inputs of a thread at a time.
const INPUTS: u32 = 8;

/// Computes what [`embedding_chosen`](super::cuda_chosen::embedding_chosen) does with the numbers of
/// `table`, of which each is rounded to the type of `out`. The table is not gated.
pub fn embedding_quantised(
    context: &ComputeContext,
    table: &QuantisedTiles<'_>,
    ids: &Tensor,
    sources: &Tensor,
    chosen: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, width)) = (float("out", out)?, matrix_size("out", out)?);
    let layout = table.layout();
    check("out", out, out.element(), &[num_tokens.into(), layout.in_features() as i64])?;
    check_tokens(num_tokens, ids, sources, chosen)?;
    if layout.is_gated() {
        return Err(Error::internal("a gate on top of its factor as a table of tokens"));
    }
    if out.is_empty() {
        return Ok(());
    }
    let too_large = || {
        let (rows, columns) = (layout.out_features(), layout.in_features());
        Error::unsupported(format!("a quantised table of {rows} x {columns}"))
    };
    let int = |value: usize| i32::try_from(value).map_err(|_| too_large());
    let cuda = cuda(context)?;
    let regions = table.regions();
    let params = EmbeddingQuantisedParams {
        hidden: out.data(),
        codes: regions.codes,
        scales: regions.scales,
        zeros: regions.zeros,
        ids: ids.data(),
        sources: sources.data(),
        chosen: chosen.data(),
        fault: cuda.faults().cast(),
        vocab_size: int(layout.out_features())? as u32,
        width,
        num_chunks: int(layout.num_chunks())?,
        num_groups: int(layout.num_groups())?,
        group_size: int(layout.group_size())?,
        code: layout.format().code.number(),
        scale_type: scale_number(layout.format().scale),
        are_pieces: layout.has_pieces().into(),
    };
    let block = (width as u32).div_ceil(INPUTS).clamp(1, 512).next_multiple_of(32);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; ids are compared with the table's rows, whose tiles lie in
    // their memory, and the sources are the caller's to keep below the rows of `chosen`.
    unsafe {
        let kernel = kernels::EMBEDDING_QUANTISED.of(dtype);
        cuda.launch_overlapping(kernel, Launch::linear(num_tokens, block), arguments)
    }
}
