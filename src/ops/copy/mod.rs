//! `target = source`, bit for bit, between layouts and between the host and a device.

use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::{Device, Tensor};
use crate::ops::common::check::{reachable, result, same_shape, same_type, InPlace};
use crate::ops::common::copy::copy_on_cuda;
use crate::ops::common::copy::copy_on_host;
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::staging::contiguous_like;

/// Copies a tensor to another of the same shape and element type, with any strides. On a CUDA
/// context either side may lie on the host; the call then returns when the copy is done.
pub fn copy(context: &ComputeContext, source: &Tensor, target: &Tensor) -> Result<()> {
    let (source_named, target_named) = (("source", source), ("target", target));
    same_type(&[source_named, target_named])?;
    same_shape(&[source_named, target_named])?;
    result(target_named, &[source_named], InPlace::Allowed)?;
    let own = context.device();
    for named in [source_named, target_named] {
        if named.1.device() != Device::Cpu || own == Device::Cpu {
            reachable(context, &[named])?;
        }
    }
    if source.is_empty() || source.is_same_view(target) {
        return Ok(());
    }
    let is_host = |tensor: &Tensor| own != Device::Cpu && tensor.device() == Device::Cpu;
    // SAFETY: both are valid for their layouts by the contract of `Tensor`, and were checked above.
    unsafe {
        match (&context.backend(), is_host(source), is_host(target)) {
            (_, false, false) => copy_unchecked(context, source, target),
            (ContextBackend::Cuda(cuda), _, true) if !is_host(source) => {
                download(context, cuda, source, target)
            }
            (ContextBackend::Cuda(cuda), true, false) => upload(context, cuda, source, target),
            _ => copy_on_host(source, target),
        }
    }
}

/// Copies from the host to the device.
///
/// # Safety
/// The requirements are those of [`copy`].
unsafe fn upload(
    context: &ComputeContext,
    cuda: &CudaContext,
    source: &Tensor,
    target: &Tensor,
) -> Result<()> {
    let bytes = source.size_bytes();
    let packed;
    let from = if source.is_contiguous() {
        source.data()
    } else {
        packed = context.allocate_pinned(bytes, "a copy on its way to the device")?;
        // SAFETY: the block has the size of the elements.
        unsafe { copy_on_host(source, &host_place(packed.start(), source)?) }?;
        packed.start()
    };
    // SAFETY: both places are valid for `bytes`; the wait keeps them so until the copy is done.
    unsafe {
        if target.is_contiguous() {
            cuda.copy(target.data(), from, bytes)?;
        } else {
            let (place, _block) = contiguous_like(context, target)?;
            cuda.copy(place.data(), from, bytes)?;
            copy_on_cuda(cuda, &place, target)?;
        }
    }
    cuda.synchronize()
}

/// Copies from the device to the host.
///
/// # Safety
/// The requirements are those of [`copy`].
unsafe fn download(
    context: &ComputeContext,
    cuda: &CudaContext,
    source: &Tensor,
    target: &Tensor,
) -> Result<()> {
    let bytes = source.size_bytes();
    // SAFETY: both places are valid for `bytes` until the copy is done.
    unsafe {
        let staged;
        let from = if source.is_contiguous() {
            source.data()
        } else {
            staged = contiguous_like(context, source)?;
            copy_on_cuda(cuda, source, &staged.0)?;
            staged.0.data()
        };
        if target.is_contiguous() {
            cuda.copy(target.data(), from, bytes)?;
            return cuda.synchronize();
        }
        let packed = context.allocate_pinned(bytes, "a copy on its way from the device")?;
        cuda.copy(packed.start(), from, bytes)?;
        cuda.synchronize()?;
        copy_on_host(&host_place(packed.start(), target)?, target)
    }
}

/// Makes a contiguous tensor on the host, of the shape and type of another.
///
/// # Safety
/// `start` is host memory for its elements.
unsafe fn host_place(start: *mut u8, like: &Tensor) -> Result<Tensor> {
    // SAFETY: passed on to the caller.
    unsafe { Tensor::from_raw(start, like.element(), Device::Cpu, like.shape(), None, "a copy") }
}
