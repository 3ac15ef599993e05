//! The spacing of attention heads on a device. The fused attention kernels are compiled for a few
//! lengths of heads; shorter ones are followed by zeros, which change neither scores nor results.

use crate::error::{Error, Result};
use crate::ops::attention::KERNEL_HEAD_DIMS;

/// The number of elements of a head, and the distance from one head to the next in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct HeadSpacing {
    pub head_dim: usize,
    pub stride: usize,
}

impl HeadSpacing {
    /// Returns the spacing of heads of `head_dim` elements.
    pub fn new(head_dim: usize) -> Result<Self> {
        let stride =
            KERNEL_HEAD_DIMS.into_iter().map(|dim| dim as usize).find(|&dim| dim >= head_dim);
        match stride {
            Some(stride) if head_dim > 0 && head_dim.is_multiple_of(2) => {
                Ok(HeadSpacing { head_dim, stride })
            }
            _ => Err(Error::unsupported(format!(
                "head_dim {head_dim} on CUDA: an even number up to 256 is needed"
            ))),
        }
    }

    /// Whether there are zeros between the heads.
    pub fn is_spaced(&self) -> bool {
        self.head_dim != self.stride
    }

    /// Returns the spaced length of whole heads that take `len` elements without zeros.
    pub fn spaced(&self, len: usize) -> usize {
        len / self.head_dim * self.stride
    }

    /// Returns the spaced index of element `index`.
    pub fn spaced_index(&self, index: usize) -> usize {
        index / self.head_dim * self.stride + index % self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_get_the_next_length_that_has_a_kernel() {
        for (head_dim, stride) in [(10, 64), (48, 64), (64, 64), (80, 80), (100, 128), (256, 256)] {
            assert_eq!(HeadSpacing::new(head_dim).unwrap(), HeadSpacing { head_dim, stride });
        }
        assert!(HeadSpacing::new(31).is_err());
        assert!(HeadSpacing::new(260).is_err());
        let spacing = HeadSpacing::new(48).unwrap();
        assert_eq!((spacing.spaced(144), spacing.spaced_index(50)), (192, 66));
    }
}
