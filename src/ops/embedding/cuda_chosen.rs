//! The embedding lookup at the start of a step, for tokens that the host knows or the preceding
//! step has chosen.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

/// Checks what says which tokens these are; see [`embedding_chosen`].
pub(super) fn check_tokens(
    num_tokens: u32,
    ids: &Tensor,
    sources: &Tensor,
    chosen: &Tensor,
) -> Result<()> {
    check("ids", ids, ElementType::I32, &[num_tokens.into()])?;
    check("sources", sources, ElementType::I32, &[num_tokens.into()])?;
    check("chosen", chosen, ElementType::I32, &[chosen.num_elements()])
}

/// Computes `out[t] = table[id(t)]`, where `id(t)` is the token `chosen[sources[t]]` where the
/// source is not `u32::MAX`, and otherwise `ids[t]`. A token that was not chosen counts as 0.
///
/// ids, sources [num_tokens], chosen [max_rows], all of 32 bits; table [vocab_size, width], out
/// [num_tokens, width] of one type. Sources name rows of `chosen`.
pub fn embedding_chosen(
    context: &ComputeContext,
    table: &Tensor,
    ids: &Tensor,
    sources: &Tensor,
    chosen: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, width)) = (float("out", out)?, matrix_size("out", out)?);
    let (vocab_size, _) = matrix_size("table", table)?;
    check("table", table, out.element(), &[vocab_size.into(), width.into()])?;
    check_tokens(num_tokens, ids, sources, chosen)?;
    if out.is_empty() {
        return Ok(());
    }
    let row_bytes = width as usize * dtype.size_bytes();
    let aligned = |tensor: &Tensor| (tensor.data() as usize).is_multiple_of(16);
    let (kernel, unit) = if row_bytes.is_multiple_of(16) && aligned(table) && aligned(out) {
        (kernels::EMBEDDING_CHOSEN_B16, 16)
    } else {
        (kernels::EMBEDDING_CHOSEN_B2, 2)
    };
    let units = i32::try_from(row_bytes / unit)
        .map_err(|_| Error::unsupported(format!("rows of {row_bytes} bytes")))?;
    let cuda = cuda(context)?;
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(table)
        .tensor(ids)
        .tensor(sources)
        .tensor(chosen)
        .pointer(cuda.faults())
        .i32(vocab_size as i32)
        .i32(units);
    let block = (units as u32).clamp(1, 512).next_multiple_of(32);
    // SAFETY: the arguments of the kernel; ids are compared with the table's rows, and the sources
    // are the caller's to keep below the rows of `chosen`.
    unsafe { cuda.launch_overlapping(kernel, Launch::linear(num_tokens, block), arguments) }
}
