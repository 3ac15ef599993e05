//! The `k` largest elements along the last dimension. NaN counts as larger than every number, -0
//! equals +0, and among equal elements the one with the lowest index comes first, as in PyTorch
//! (which does not specify the last).
//!
//! x [..., width] f32, f16 or bf16; values [..., k] of the type of x, indices [..., k] i32, from
//! the largest down; k is at most width and [`MAX_K`].

pub mod cpu;
mod cuda;

pub use self::cuda::scratch_bytes;
use self::cuda::top_k_on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::one_stride;
use crate::ops::common::launch::too_wide;
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{contiguous, host_slice, host_slice_mut, input, output};

/// The most elements that [`top_k`] selects.
pub const MAX_K: i64 = 1024;

/// Selects the k largest elements of each row and their indices, see the head of the file.
pub fn top_k(
    context: &ComputeContext,
    x: &Tensor,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    let (x_named, values_named, indices_named) =
        (("x", x), ("values", values), ("indices", indices));
    check::has_rows(x_named)?;
    check::has_rows(values_named)?;
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, values_named])?;
    if indices.element() != ElementType::I32 {
        return Err(Error::invalid_argument(format!(
            "indices has elements of {}, but i32 is needed",
            indices.element()
        )));
    }
    let k = values.width();
    let mut expected = [0; crate::memory::MAX_RANK];
    let rank = x.shape().len();
    for (slot, size) in expected.iter_mut().zip(x.shape().iter()) {
        *slot = *size;
    }
    if let Some(last) = expected.get_mut(rank.saturating_sub(1)) {
        *last = k;
    }
    let expected = expected.get(..rank).unwrap_or_default();
    check::shape(values_named, expected, "x but for its last dimension")?;
    check::same_shape(&[values_named, indices_named])?;
    if k > MAX_K || k > x.width() {
        return Err(Error::invalid_argument(format!(
            "values has shape {}: its last dimension, k, is {k}, but at most {} are supported for rows of {}",
            values.shape(),
            MAX_K.min(x.width()),
            x.width()
        )));
    }
    check::reachable(context, &[x_named, values_named, indices_named])?;
    check::result(values_named, &[x_named], InPlace::Refused)?;
    check::result(indices_named, &[x_named, values_named], InPlace::Refused)?;
    if values.is_empty() {
        return Ok(());
    }
    let width = i32::try_from(x.width()).map_err(|_| too_wide(x))?;
    let values_place = output(context, values, contiguous)?;
    let indices_place = output(context, indices, contiguous)?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = &input(context, x, contiguous)?.tensor;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T and i32 on the host that share nothing.
                let (x, values, indices) = unsafe {
                    (
                        host_slice::<T>(x),
                        host_slice_mut::<T>(&values_place.tensor),
                        host_slice_mut::<i32>(&indices_place.tensor),
                    )
                };
                cpu::top_k(backend, x, width as usize, k as usize, values, indices)
            })?;
        }
        ContextBackend::Cuda(cuda) => {
            let x = &input(context, x, one_stride)?.tensor;
            let (values, indices) = (&values_place.tensor, &indices_place.tensor);
            top_k_on_cuda(context, cuda, dtype, x, width, values, indices)?;
        }
    }
    values_place.finish(context)?;
    indices_place.finish(context)
}
