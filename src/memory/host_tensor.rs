//! Tensors that own their memory on the host.

use super::{Device, ElementType, HostBuffer, Pages, Tensor};
use crate::error::{Error, Result};
use std::ops::Deref;

/// A contiguous tensor in host memory of its own, whose bytes can be read and written.
pub struct HostTensor {
    tensor: Tensor,
    buffer: HostBuffer,
}

impl Deref for HostTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl HostTensor {
    /// Makes a tensor of zeros.
    pub fn zeroed(element: ElementType, shape: &[i64]) -> Result<Self> {
        let bytes = shape
            .iter()
            .try_fold(element.size_bytes(), |bytes, &size| {
                bytes.checked_mul(usize::try_from(size).ok()?)
            })
            .ok_or_else(|| Error::out_of_memory("a tensor", usize::MAX))?;
        let mut buffer = HostBuffer::zeroed(bytes, Pages::Default)?;
        let start = buffer.as_bytes_mut().as_mut_ptr();
        // SAFETY: the buffer holds all elements of the contiguous tensor, and lives as long as it;
        // whoever computes on the tensor borrows it from here.
        let tensor =
            unsafe { Tensor::from_raw(start, element, Device::Cpu, shape, None, "a tensor") }?;
        Ok(HostTensor { tensor, buffer })
    }

    /// Returns the bytes of the elements.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_bytes()
    }

    /// Returns the bytes of the elements, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_bytes_mut()
    }
}
