//! Checks for operators on tensors of the library's own, which are contiguous and lie on the
//! device: a tensor that does not fit is an internal error, not one of a caller.

use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};

/// Returns the device half of a context.
pub(in crate::ops) fn cuda(context: &ComputeContext) -> Result<&CudaContext> {
    match context.backend() {
        ContextBackend::Cuda(cuda) => Ok(cuda),
        ContextBackend::Cpu { .. } => Err(Error::internal("an operator of a device on the CPU")),
    }
}

/// Checks that a tensor is contiguous and of this type and shape.
pub(in crate::ops) fn check(
    name: &str,
    tensor: &Tensor,
    element: ElementType,
    shape: &[i64],
) -> Result<()> {
    let fits = tensor.element() == element && **tensor.shape() == *shape && tensor.is_contiguous();
    if fits {
        Ok(())
    } else {
        Err(Error::internal(format!(
            "{name} is {} {} with strides {}, not {element} {shape:?}",
            tensor.element(),
            tensor.shape(),
            tensor.strides()
        )))
    }
}

/// Returns the floating-point type of a tensor.
pub(in crate::ops) fn float(name: &str, tensor: &Tensor) -> Result<DType> {
    match tensor.element() {
        ElementType::Float(dtype) => Ok(dtype),
        other => Err(Error::internal(format!("{name} has elements of {other}"))),
    }
}

/// Returns the rows and width of a matrix.
pub(in crate::ops) fn matrix_size(name: &str, tensor: &Tensor) -> Result<(u32, i32)> {
    let (&[rows, width], true) = (&**tensor.shape(), tensor.is_contiguous()) else {
        return Err(Error::internal(format!("{name} has shape {}", tensor.shape())));
    };
    match (u32::try_from(rows), i32::try_from(width)) {
        (Ok(rows), Ok(width)) if rows <= i32::MAX as u32 => Ok((rows, width)),
        _ => Err(Error::unsupported(format!("{name}: shape {} is too large", tensor.shape()))),
    }
}

/// Returns the number of elements in 16 bytes if rows of `width` of all tensors are whole aligned
/// vectors, otherwise 1.
pub(in crate::ops) fn vector_len(dtype: DType, width: i32, tensors: &[&Tensor]) -> i32 {
    let vector = 16 / dtype.size_bytes() as i32;
    let is_aligned = |tensor: &&Tensor| (tensor.data() as usize).is_multiple_of(16);
    if width % vector == 0 && tensors.iter().all(is_aligned) {
        vector
    } else {
        1
    }
}
