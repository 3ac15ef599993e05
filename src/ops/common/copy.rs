//! Copies between layouts inside a device, of tensors that have been checked.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::strided::Axes;
use crate::ops::common::turn::{as_turn, turn_on_cuda};

/// Copies inside the context's device.
///
/// # Safety
/// Both tensors are valid memory of the context's device, of the same shape and element type, and
/// do not overlap.
pub(in crate::ops) unsafe fn copy_unchecked(
    context: &ComputeContext,
    source: &Tensor,
    target: &Tensor,
) -> Result<()> {
    match context.backend() {
        // SAFETY: passed on to the caller.
        ContextBackend::Cpu { .. } => unsafe { copy_on_host(source, target) },
        // SAFETY: passed on to the caller.
        ContextBackend::Cuda(cuda) => unsafe { copy_on_cuda(cuda, source, target) },
    }
}

/// # Safety
/// The requirements are those of [`copy_unchecked`], with both tensors on the host.
pub(in crate::ops) unsafe fn copy_on_host(source: &Tensor, target: &Tensor) -> Result<()> {
    let size = source.element().size_bytes();
    let axes = Axes::of(&[target, source])?;
    let (run, [target_step, source_step, _]) = axes.innermost();
    let rank = axes.iter().count();
    let mut index = [0i64; crate::memory::MAX_RANK];
    loop {
        let (mut to, mut from) = (0i64, 0i64);
        for (&position, (_, [target_stride, source_stride, _])) in index.iter().zip(axes.iter()) {
            to += position * target_stride;
            from += position * source_stride;
        }
        // SAFETY: the indices are inside the shape, so that the elements lie in what the tensors
        // span.
        unsafe {
            let to = target.data().add(to as usize * size);
            let from = source.data().add(from as usize * size).cast_const();
            if target_step == 1 && source_step == 1 {
                to.copy_from_nonoverlapping(from, run as usize * size);
            } else {
                for i in 0..run {
                    let to = to.add((i * target_step) as usize * size);
                    to.copy_from_nonoverlapping(from.add((i * source_step) as usize * size), size);
                }
            }
        }
        // Advances to the next index of all axes but the innermost.
        let mut axis = rank.saturating_sub(1);
        loop {
            let Some(outer) = axis.checked_sub(1) else { return Ok(()) };
            axis = outer;
            let limit = axes.iter().nth(axis).map_or(0, |(size, _)| *size);
            let Some(position) = index.get_mut(axis) else { return Ok(()) };
            *position += 1;
            if *position < limit {
                break;
            }
            *position = 0;
        }
    }
}

/// # Safety
/// The requirements are those of [`copy_unchecked`], with both on the device of `cuda`.
pub(in crate::ops) unsafe fn copy_on_cuda(
    cuda: &CudaContext,
    source: &Tensor,
    target: &Tensor,
) -> Result<()> {
    if source.is_contiguous() && target.is_contiguous() {
        // SAFETY: passed on to the caller.
        return unsafe { cuda.copy(target.data(), source.data(), source.size_bytes()) };
    }
    let size = source.element().size_bytes() as i64;
    if size == 1 {
        return Err(Error::unsupported(format!(
            "elements of {} are copied between contiguous tensors only on a GPU",
            source.element()
        )));
    }
    let axes = Axes::of(&[target, source])?;
    if let Some(turn) = as_turn(&axes, size) {
        // SAFETY: passed on to the caller; these are the axes of the two.
        return unsafe { turn_on_cuda(cuda, &turn, size, source.data(), target.data()) };
    }
    // Vectors of 16 bytes are copied where the innermost axis and all addresses allow it.
    let (_, [target_step, source_step, _]) = axes.innermost();
    let is_aligned = |tensor: &Tensor| (tensor.data() as usize).is_multiple_of(16);
    let vectors =
        (target_step == 1 && source_step == 1 && is_aligned(source) && is_aligned(target))
            .then(|| axes.in_vectors(16 / size))
            .flatten();
    let (axes, unit) = vectors.map_or((axes, size), |vectors| (vectors, 16));
    let kernel = match unit {
        2 => kernels::COPY_STRIDED_B2,
        4 => kernels::COPY_STRIDED_B4,
        8 => kernels::COPY_STRIDED_B8,
        16 => kernels::COPY_STRIDED_B16,
        _ => return Err(Error::internal(format!("elements of {size} bytes"))),
    };
    const BLOCK: u32 = 256;
    for (layout, [to, from, _]) in axes.launches()? {
        let grid = (layout.num_units as u32).div_ceil(BLOCK);
        let arguments = Arguments::new()
            .pointer(target.data().wrapping_add((to * unit) as usize))
            .pointer(source.data().wrapping_add((from * unit) as usize))
            .value(&layout);
        // SAFETY: the layout spans the elements of both, which the caller vouches for.
        unsafe { cuda.launch(kernel, Launch::linear(grid, BLOCK), arguments) }?;
    }
    Ok(())
}
