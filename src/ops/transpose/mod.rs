//! Swaps the last two dimensions: `out[..., c, r] = x[..., r, c]`, bit for bit.
//!
//! x [..., rows, columns], out [..., columns, rows], any element type and strides; they share no
//! element.

pub mod cpu;

use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{Dims, ElementType, Tensor};
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{host_slice, host_slice_mut};

/// Transposes the matrices of a tensor; see the head of the file.
pub fn transpose(context: &ComputeContext, x: &Tensor, out: &Tensor) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    check::same_type(&[x_named, out_named])?;
    let Some(turned) = swapped(x)? else {
        return Err(Error::invalid_argument(format!(
            "x has {} dimensions, shape {}, but at least two are needed",
            x.shape().len(),
            x.shape()
        )));
    };
    check::shape(out_named, turned.shape(), "x with its last two dimensions swapped")?;
    check::reachable(context, &[x_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Refused)?;
    if x.is_empty() {
        return Ok(());
    }
    if let (ContextBackend::Cpu { backend, .. }, ElementType::Float(dtype)) =
        (context.backend(), x.element())
    {
        if x.is_contiguous() && out.is_contiguous() {
            let columns = x.width() as usize;
            let rows = out.width() as usize;
            return with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host that share no memory.
                let (x, out) = unsafe { (host_slice::<T>(x), host_slice_mut::<T>(out)) };
                let matrices = x.chunks_exact(rows * columns);
                matrices.zip(out.chunks_exact_mut(rows * columns)).try_for_each(|(x, out)| {
                    cpu::transpose(backend, x, rows, columns, out)
                })
            });
        }
    }
    // SAFETY: memory of the context, of one shape and type, that does not overlap.
    unsafe { copy_unchecked(context, &turned, out) }
}

/// Returns the same elements with the last two dimensions swapped, if there are two.
fn swapped(x: &Tensor) -> Result<Option<Tensor>> {
    let (mut shape, mut strides) = ([0; crate::memory::MAX_RANK], [0; crate::memory::MAX_RANK]);
    let rank = x.shape().len();
    let (Some(sizes), Some(steps)) = (shape.get_mut(..rank), strides.get_mut(..rank)) else {
        return Err(Error::internal("too many dimensions"));
    };
    sizes.copy_from_slice(x.shape());
    steps.copy_from_slice(x.strides());
    let ([.., rows, columns], [.., row_step, column_step]) = (&mut *sizes, &mut *steps) else {
        return Ok(None);
    };
    std::mem::swap(rows, columns);
    std::mem::swap(row_step, column_step);
    let sizes = Dims::new(sizes).ok_or_else(|| Error::internal("too many dimensions"))?;
    // SAFETY: the same elements as those of x.
    unsafe { Tensor::from_raw(x.data(), x.element(), x.device(), &sizes, Some(steps), "x") }
        .map(Some)
}
