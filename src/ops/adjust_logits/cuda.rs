//! The CUDA half.

use super::{ADJUSTED_ROW_WORDS, ADJUSTMENT_WORDS};
use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

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
    let f32 = ElementType::Float(DType::F32);
    check("logits", logits, f32, &[num_rows.into(), vocab_size.into()])?;
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

/// Whether logits of a dtype can stay where they are when masks ban tokens. The lowest number of
/// f16 is none that no temperature makes likely.
pub fn masks_in_place(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// Copies rows of logits as f32 and bans in each row the tokens that its mask forbids, as
/// [`super::cpu::mask_logits`] does. Logits of bf16 may stay where they are: a banned token then gets the
/// lowest number of bf16.
///
/// source [num_rows, vocab_size]; target the same of f32, or `source` itself ([`masks_in_place`]); indices
/// [num_rows] the mask of each row, negative if it has none, and masks [num_masks, words] with a bit
/// for each token of the vocabulary, both of i32. The indices lie within `masks`: that is the
/// caller's to see to.
pub fn mask_logits(
    context: &ComputeContext,
    source: &Tensor,
    target: &Tensor,
    indices: &Tensor,
    masks: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 512;
    /// Tokens of a thread.
    const PER_THREAD: u32 = 16;
    const MAX_ROWS: u32 = 65_535;
    let (num_rows, vocab_size) = matrix_size("logits", source)?;
    let shape = [num_rows.into(), vocab_size.into()];
    let dtype = float("logits", source)?;
    let is_in_place = source.data() == target.data() && masks_in_place(dtype);
    let of_target = if is_in_place { dtype } else { DType::F32 };
    check("masked logits", target, ElementType::Float(of_target), &shape)?;
    check("indices", indices, ElementType::I32, &[num_rows.into()])?;
    let (num_masks, words) = matrix_size("masks", masks)?;
    check("masks", masks, ElementType::I32, &[num_masks.into(), words.into()])?;
    if vocab_size.div_euclid(32) + i32::from(vocab_size % 32 > 0) > words || num_rows > MAX_ROWS {
        return Err(Error::internal(format!(
            "masks of {words} words for {num_rows} rows of {vocab_size} logits"
        )));
    }
    if source.is_empty() {
        return Ok(());
    }
    let (kernel, arguments) = match (is_in_place, dtype) {
        (true, DType::BF16) => (kernels::MASK_IN_PLACE_BF16, Arguments::new().tensor(target)),
        _ => (kernels::MASK_LOGITS.of(dtype), Arguments::new().tensor(source).tensor(target)),
    };
    let arguments = arguments.tensor(indices).tensor(masks).i32(vocab_size).i32(words);
    let blocks = vocab_size.unsigned_abs().div_ceil(BLOCK * PER_THREAD);
    let launch = Launch { grid: (blocks, num_rows, 1), block: BLOCK, shared_bytes: 0 };
    // SAFETY: the arguments of the kernel, checked above; each thread reads what it writes before.
    unsafe { cuda(context)?.launch(kernel, launch, arguments) }
}
