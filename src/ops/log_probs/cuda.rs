//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

/// Writes the log-probabilities of the tokens `ids` to `out`; NaN for ids beyond the vocabulary, and
/// for rows with a logit that is not a number.
///
/// logits [num_rows, vocab_size] of f32, f16 or bf16; ids i32 and out f32, both [num_rows, count];
/// temperatures f32 [num_rows], above 0; without them it is 1.
pub fn log_probs(
    context: &ComputeContext,
    logits: &Tensor,
    ids: &Tensor,
    temperatures: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 1024;
    let (dtype, (num_rows, vocab_size)) =
        (float("logits", logits)?, matrix_size("logits", logits)?);
    let (rows, count) = matrix_size("ids", ids)?;
    let shape = [num_rows.into(), count.into()];
    check("ids", ids, ElementType::I32, &shape)?;
    check("out", out, ElementType::Float(DType::F32), &shape)?;
    if let Some(temperatures) = temperatures {
        let float = ElementType::Float(DType::F32);
        check("temperatures", temperatures, float, &[num_rows.into()])?;
    }
    if rows != num_rows || vocab_size == 0 {
        return Err(Error::internal("log-probabilities of other rows than there are"));
    }
    if out.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(logits)
        .tensor(ids)
        .pointer(temperatures.map_or(std::ptr::null_mut(), |tensor| tensor.data()))
        .i32(vocab_size as i32)
        .i32(count as i32);
    let launch = Launch::linear(num_rows, BLOCK);
    // SAFETY: the arguments of the kernel, checked above; it compares ids with the vocabulary.
    unsafe { cuda(context)?.launch(kernels::LOG_PROBS.of(dtype), launch, arguments) }
}
