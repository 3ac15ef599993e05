//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

/// Tokens of each row, and where their log-probabilities go.
#[derive(Clone, Copy, Debug)]
pub struct LogProbsList<'a> {
    /// i32 [num_rows, count]
    pub ids: &'a Tensor,
    /// f32 [num_rows, count]
    pub out: &'a Tensor,
}

/// Writes the log-probabilities of the tokens of one list, or of two; NaN for ids beyond the
/// vocabulary, and for rows with a logit that is not a number.
///
/// logits [num_rows, vocab_size] of f32, f16 or bf16; temperatures f32 [num_rows], above 0; without
/// them it is 1.
pub fn log_probs(
    context: &ComputeContext,
    logits: &Tensor,
    temperatures: Option<&Tensor>,
    list: LogProbsList<'_>,
    other: Option<LogProbsList<'_>>,
) -> Result<()> {
    const BLOCK: u32 = 1024;
    let (dtype, (num_rows, vocab_size)) =
        (float("logits", logits)?, matrix_size("logits", logits)?);
    let f32s = ElementType::Float(DType::F32);
    if let Some(temperatures) = temperatures {
        check("temperatures", temperatures, f32s, &[num_rows.into()])?;
    }
    let temperatures = temperatures.map_or(std::ptr::null_mut(), |tensor| tensor.data());
    let mut arguments = Arguments::new().tensor(logits).pointer(temperatures).i32(vocab_size);
    for list in [Some(list), other] {
        let Some(LogProbsList { ids, out }) = list else {
            arguments =
                arguments.pointer(std::ptr::null_mut()).pointer(std::ptr::null_mut()).i32(0);
            continue;
        };
        let (_, count) = matrix_size("ids", ids)?;
        let shape = [num_rows.into(), count.into()];
        check("ids", ids, ElementType::I32, &shape)?;
        check("out", out, f32s, &shape)?;
        arguments = arguments.tensor(out).tensor(ids).i32(count);
    }
    if logits.is_empty() {
        return Ok(());
    }
    let launch = Launch::linear(num_rows, BLOCK);
    // SAFETY: the arguments of the kernel, checked above; it compares ids with the vocabulary.
    unsafe { cuda(context)?.launch(kernels::LOG_PROBS.of(dtype), launch, arguments) }
}
