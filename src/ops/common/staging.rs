//! Copies for kernels that need another layout than a tensor has.

use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{Block, Tensor};
use crate::ops::common::copy::copy_unchecked;

/// An input in a layout that the kernel takes: the tensor itself or a contiguous copy.
///
/// The copy's memory goes back to the context when this is dropped, although a queued kernel may
/// still read it: work of the memory's next user is queued after that kernel.
pub(in crate::ops) struct Input {
    pub tensor: Tensor,
    _copy: Option<Block>,
}

/// A place for a result in a layout that the kernel takes: the tensor itself, or memory from which
/// [`Output::finish`] copies.
pub(in crate::ops) struct Output {
    pub tensor: Tensor,
    target: Option<Tensor>,
    _place: Option<Block>,
}

/// Returns `tensor` if `fits` says so, otherwise a contiguous copy of it.
pub(in crate::ops) fn input(
    context: &ComputeContext,
    tensor: &Tensor,
    fits: impl Fn(&Tensor) -> bool,
) -> Result<Input> {
    if tensor.is_empty() || fits(tensor) {
        return Ok(Input { tensor: *tensor, _copy: None });
    }
    let (place, block) = contiguous_like(context, tensor)?;
    // SAFETY: both are valid for their layouts; the new block overlaps nothing.
    unsafe { copy_unchecked(context, tensor, &place) }?;
    Ok(Input { tensor: place, _copy: Some(block) })
}

/// Does the same for host kernels, which cannot work in place: it also copies where the tensor
/// shares memory with the result.
pub(in crate::ops) fn input_beside(
    context: &ComputeContext,
    tensor: &Tensor,
    result: &Tensor,
    fits: impl Fn(&Tensor) -> bool,
) -> Result<Input> {
    input(context, tensor, |tensor| fits(tensor) && !tensor.overlaps(result))
}

/// Returns `tensor` if `fits` says so, otherwise a contiguous place of the same shape.
pub(in crate::ops) fn output(
    context: &ComputeContext,
    tensor: &Tensor,
    fits: impl Fn(&Tensor) -> bool,
) -> Result<Output> {
    if tensor.is_empty() || fits(tensor) {
        return Ok(Output { tensor: *tensor, target: None, _place: None });
    }
    let (place, block) = contiguous_like(context, tensor)?;
    Ok(Output { tensor: place, target: Some(*tensor), _place: Some(block) })
}

impl Output {
    /// Copies the result to its tensor if it was computed elsewhere.
    pub(in crate::ops) fn finish(self, context: &ComputeContext) -> Result<()> {
        match &self.target {
            // SAFETY: as in `input`.
            Some(target) => unsafe { copy_unchecked(context, &self.tensor, target) },
            None => Ok(()),
        }
    }
}

/// Makes an uninitialised contiguous tensor of the shape and type of another.
pub(in crate::ops) fn contiguous_like(
    context: &ComputeContext,
    tensor: &Tensor,
) -> Result<(Tensor, Block)> {
    let block = context.allocate(tensor.size_bytes(), "a copy in another layout")?;
    // SAFETY: the block is memory of the context's device of the size that the shape needs.
    let place = unsafe {
        Tensor::from_raw(
            block.start(),
            tensor.element(),
            context.device(),
            tensor.shape(),
            None,
            "a copy",
        )
    }?;
    Ok((place, block))
}

/// Whether the elements of a tensor lie one after another.
pub(in crate::ops) fn contiguous(tensor: &Tensor) -> bool {
    tensor.is_contiguous()
}

/// Returns the elements of a contiguous tensor on the host.
///
/// # Safety
/// The tensor is contiguous, on the CPU, its element type is `T`, and nobody writes it meanwhile.
pub(in crate::ops) unsafe fn host_slice<'a, T>(tensor: &Tensor) -> &'a [T] {
    debug_assert!(tensor.is_contiguous() && tensor.element().size_bytes() == size_of::<T>());
    if tensor.is_empty() {
        return &[];
    }
    // SAFETY: `Tensor::from_raw` has checked address, alignment and size; the caller vouches for
    // the rest.
    unsafe { std::slice::from_raw_parts(tensor.data().cast(), tensor.num_elements() as usize) }
}

/// Returns the elements of a contiguous tensor on the host for writing.
///
/// # Safety
/// The requirements are those of [`host_slice`], and nobody else refers to any of the elements.
pub(in crate::ops) unsafe fn host_slice_mut<'a, T>(tensor: &Tensor) -> &'a mut [T] {
    debug_assert!(tensor.is_contiguous() && tensor.element().size_bytes() == size_of::<T>());
    if tensor.is_empty() {
        return &mut [];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(tensor.data().cast(), tensor.num_elements() as usize) }
}
