//! The CUDA half.

use super::{ADJUSTED_ROW_WORDS, ADJUSTMENT_WORDS};
use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, matrix_size};

/// Changes rows of `logits` in place.
///
/// logits f32 [num_rows, vocab_size]; rows [num_rows, ADJUSTED_ROW_WORDS] of
/// [`AdjustedRow`](super::AdjustedRow), adjustments [n, ADJUSTMENT_WORDS] of
/// [`Adjustment`](super::Adjustment), chosen [max_rows], all of i32. The ranges of the rows lie within
/// `adjustments`, and pending rows within `chosen`: that is the caller's to see to.
pub fn adjust_logits(
    context: &ComputeContext,
    logits: &Tensor,
    rows: &Tensor,
    adjustments: &Tensor,
    chosen: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 512;
    let (num_rows, vocab_size) = matrix_size("logits", logits)?;
    let float = ElementType::Float(DType::F32);
    check("logits", logits, float, &[num_rows.into(), vocab_size.into()])?;
    check("rows", rows, ElementType::I32, &[num_rows.into(), ADJUSTED_ROW_WORDS as i64])?;
    let (num_adjustments, _) = matrix_size("adjustments", adjustments)?;
    let shape = [num_adjustments.into(), ADJUSTMENT_WORDS as i64];
    check("adjustments", adjustments, ElementType::I32, &shape)?;
    check("chosen", chosen, ElementType::I32, &[chosen.num_elements()])?;
    if !(adjustments.data() as usize).is_multiple_of(16)
        || !(rows.data() as usize).is_multiple_of(16)
    {
        return Err(Error::internal("adjustments of logits that are not aligned"));
    }
    if logits.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new()
        .tensor(logits)
        .tensor(rows)
        .tensor(adjustments)
        .tensor(chosen)
        .i32(vocab_size);
    let launch = Launch::linear(num_rows, BLOCK);
    // SAFETY: the arguments of the kernel, checked above; it compares tokens with the vocabulary.
    unsafe { cuda(context)?.launch(kernels::ADJUST_LOGITS, launch, arguments) }
}
