//! The checks that operators make of their tensors. Each says which argument is wrong, what was
//! found and what is needed.

use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};

/// An argument and its name in the C function.
pub(in crate::ops) type Named<'a> = (&'static str, &'a Tensor);

/// Whether a result may be the very view that an input is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum InPlace {
    Allowed,
    Refused,
}

fn wrong<T>(what: String) -> Result<T> {
    Err(Error::invalid_argument(what))
}

/// Returns the floating-point type of a tensor.
pub(in crate::ops) fn float((name, tensor): Named<'_>) -> Result<DType> {
    match tensor.element() {
        ElementType::Float(dtype) => Ok(dtype),
        other => wrong(format!("{name} has elements of {other}, but f32, f16 or bf16 are needed")),
    }
}

/// Returns true for 64-bit indices, false for 32-bit ones.
pub(in crate::ops) fn indices_are_i64((name, tensor): Named<'_>) -> Result<bool> {
    match tensor.element() {
        ElementType::I32 => Ok(false),
        ElementType::I64 => Ok(true),
        other => wrong(format!("{name} has elements of {other}, but i32 or i64 are needed")),
    }
}

/// Checks that all tensors have the element type of the first.
pub(in crate::ops) fn same_type(tensors: &[Named<'_>]) -> Result<()> {
    let Some(((first_name, first), rest)) = tensors.split_first() else { return Ok(()) };
    for (name, tensor) in rest {
        if tensor.element() != first.element() {
            return wrong(format!(
                "{name} has elements of {}, but {first_name} of {}",
                tensor.element(),
                first.element()
            ));
        }
    }
    Ok(())
}

/// Checks that all tensors have the shape of the first.
pub(in crate::ops) fn same_shape(tensors: &[Named<'_>]) -> Result<()> {
    let Some(((first_name, first), rest)) = tensors.split_first() else { return Ok(()) };
    for (name, tensor) in rest {
        if tensor.shape() != first.shape() {
            return wrong(format!(
                "{name} has shape {}, but {first_name} has {}",
                tensor.shape(),
                first.shape()
            ));
        }
    }
    Ok(())
}

/// Checks that a tensor has exactly this shape; `what` says where the numbers come from.
pub(in crate::ops) fn shape((name, tensor): Named<'_>, expected: &[i64], what: &str) -> Result<()> {
    if tensor.shape().iter().eq(expected) {
        Ok(())
    } else {
        wrong(format!("{name} has shape {}, but {what} needs {expected:?}", tensor.shape()))
    }
}

/// Checks that a tensor has `expected` dimensions.
pub(in crate::ops) fn rank((name, tensor): Named<'_>, expected: usize, form: &str) -> Result<()> {
    match tensor.shape().len() {
        found if found == expected => Ok(()),
        found => wrong(format!(
            "{name} has {found} dimensions, shape {}, but {form} is needed",
            tensor.shape()
        )),
    }
}

/// Checks that a tensor has at least one dimension.
pub(in crate::ops) fn has_rows((name, tensor): Named<'_>) -> Result<()> {
    if tensor.shape().is_empty() {
        wrong(format!("{name} has no dimensions, at least one is needed"))
    } else {
        Ok(())
    }
}

/// Checks that a number is finite, and not negative.
pub(in crate::ops) fn epsilon(eps: f32) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        Ok(())
    } else {
        wrong(format!("eps is {eps}, not a finite number of at least 0"))
    }
}

/// Checks that all tensors lie where the context works.
pub(in crate::ops) fn reachable(context: &ComputeContext, tensors: &[Named<'_>]) -> Result<()> {
    tensors.iter().try_for_each(|(name, tensor)| context.check_reachable(tensor, name))
}

/// Checks that a result has one place for each element, and shares none with an input, or all of
/// them.
pub(in crate::ops) fn result(
    (name, out): Named<'_>,
    inputs: &[Named<'_>],
    in_place: InPlace,
) -> Result<()> {
    if out.overlaps_itself() {
        return wrong(format!(
            "{name} has strides {} for shape {}: several elements share one place",
            out.strides(),
            out.shape()
        ));
    }
    for (input_name, input) in inputs {
        let shared = in_place == InPlace::Allowed && out.is_same_view(input);
        if !shared && out.overlaps(input) {
            let how = match in_place {
                InPlace::Allowed => "must be the same view or share no memory",
                InPlace::Refused => "must share no memory",
            };
            return wrong(format!("{name} overlaps {input_name}: the two {how}"));
        }
    }
    Ok(())
}

/// Checks a strided tensor [num_tokens, num_heads, head_dim] with token rows `row_stride` apart.
pub(in crate::ops) fn check_strided(
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
