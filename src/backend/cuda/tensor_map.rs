//! Tensor maps: descriptions of matrices in device memory for the copy engine (TMA) of sm_90 and
//! later, which fetches boxes of them into shared memory.

use super::context::CudaContext;
use super::layout::kernel_struct;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use cudarc::driver::sys;

kernel_struct! {
    /// See the head of the file. A kernel takes it by value. It holds the address of the tensor, whose memory
    /// must be alive whenever a kernel uses the description.
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    pub(crate) struct TensorMap {
        words: [u64; 16],
    }
}

/// The most dimensions of a description.
const MAX_RANK: usize = 5;
/// The bytes of a row of a swizzled box.
const SWIZZLED_BYTES: u32 = 128;

impl TensorMap {
    /// Describes a tensor of 16-bit elements whose boxes, `box_shape` in the order of its
    /// dimensions, are stored in shared memory with the swizzle of 128 bytes: the last dimension of
    /// a box has 64 elements. Elements of a box outside the tensor read as zero. The tensor's rows
    /// begin at multiples of 16 bytes.
    pub(crate) fn new(context: &CudaContext, tensor: &Tensor, box_shape: &[u32]) -> Result<Self> {
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        Self::with_promotion(context, tensor, box_shape, promotion)
    }

    /// As [`TensorMap::new`], for data that is read once: the L2 cache fetches no more than 128
    /// bytes at a time.
    pub(crate) fn streamed(
        context: &CudaContext,
        tensor: &Tensor,
        box_shape: &[u32],
    ) -> Result<Self> {
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
        Self::with_promotion(context, tensor, box_shape, promotion)
    }

    fn with_promotion(
        context: &CudaContext,
        tensor: &Tensor,
        box_shape: &[u32],
        promotion: sys::CUtensorMapL2promotion,
    ) -> Result<Self> {
        use sys::*;
        let data_type = match tensor.element() {
            ElementType::Float(DType::F16) => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            ElementType::Float(DType::BF16) => {
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            }
            other => return Err(Error::internal(format!("a tensor map of {other}"))),
        };
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let rank = shape.len();
        if rank == 0 || rank > MAX_RANK || box_shape.len() != rank || tensor.is_empty() {
            return Err(Error::internal(format!("a tensor map of shape {shape}")));
        }
        let (mut sizes, mut byte_strides, mut extents) =
            ([1u64; MAX_RANK], [0u64; MAX_RANK], [1u32; MAX_RANK]);
        let dimensions = shape.iter().zip(strides.iter()).zip(box_shape).rev().enumerate();
        for (i, ((&size, &stride), &extent)) in dimensions {
            if let (Some(a), Some(b)) = (sizes.get_mut(i), extents.get_mut(i)) {
                (*a, *b) = (size as u64, extent);
            }
            if let Some(slot) = i.checked_sub(1).and_then(|i| byte_strides.get_mut(i)) {
                *slot = stride as u64 * 2;
            }
        }
        let swizzle = CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
        let boxes = Boxes { data_type, rank, sizes, byte_strides, extents, swizzle, promotion };
        boxes.describe(context, tensor.data())
    }

    /// Describes contiguous rows of bytes, `[rows, row_bytes]`, whose boxes of rows and 128 bytes are
    /// stored in shared memory with the swizzle of 128 bytes. Rows have a multiple of 16 bytes, and
    /// begin at one.
    ///
    /// # Safety
    ///
    /// As [`TensorMap::packed`].
    pub(crate) unsafe fn swizzled_bytes(
        context: &CudaContext,
        data: *mut u8,
        [rows, row_bytes]: [usize; 2],
        box_rows: usize,
    ) -> Result<Self> {
        use sys::*;
        let mut boxes = Boxes {
            data_type: CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            rank: 2,
            sizes: [1; MAX_RANK],
            byte_strides: [0; MAX_RANK],
            extents: [1; MAX_RANK],
            swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            promotion: CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        [boxes.sizes[0], boxes.sizes[1]] = [row_bytes as u64, rows as u64];
        boxes.byte_strides[0] = row_bytes as u64;
        [boxes.extents[0], boxes.extents[1]] = [SWIZZLED_BYTES, box_rows as u32];
        boxes.describe(context, data)
    }

    /// Describes contiguous elements of `element_bytes` (1, 2, 4 or 8), `shape` in the order of their
    /// dimensions, whose boxes are stored as they are. Their last dimension has a multiple of 16
    /// bytes, and all begin at one.
    ///
    /// # Safety
    ///
    /// `data` is device memory with that many elements, for as long as copies of them are made.
    pub(crate) unsafe fn packed<const N: usize>(
        context: &CudaContext,
        data: *mut u8,
        element_bytes: usize,
        shape: [usize; N],
        box_shape: [usize; N],
    ) -> Result<Self> {
        use sys::*;
        let data_type = match element_bytes {
            1 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            8 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
            other => return Err(Error::internal(format!("a tensor map of {other} bytes each"))),
        };
        let (mut sizes, mut byte_strides, mut extents) =
            ([1u64; MAX_RANK], [0u64; MAX_RANK], [1u32; MAX_RANK]);
        let mut stride = element_bytes as u64;
        let slots = sizes.iter_mut().zip(&mut byte_strides).zip(&mut extents);
        let dimensions = shape.iter().zip(&box_shape).rev();
        for (((size, byte_stride), extent), (&elements, &of_box)) in slots.zip(dimensions) {
            (*size, *extent) = (elements as u64, of_box as u32);
            stride *= elements as u64;
            *byte_stride = stride;
        }
        let swizzle = CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE;
        let promotion = CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        let rank = N.min(MAX_RANK);
        let boxes = Boxes { data_type, rank, sizes, byte_strides, extents, swizzle, promotion };
        boxes.describe(context, data)
    }
}

/// A tensor as the driver describes it: dimensions from the innermost, strides in bytes without the
/// innermost.
struct Boxes {
    data_type: sys::CUtensorMapDataType,
    rank: usize,
    sizes: [u64; MAX_RANK],
    byte_strides: [u64; MAX_RANK],
    extents: [u32; MAX_RANK],
    swizzle: sys::CUtensorMapSwizzle,
    promotion: sys::CUtensorMapL2promotion,
}

impl Boxes {
    fn describe(&self, context: &CudaContext, data: *mut u8) -> Result<TensorMap> {
        use sys::*;
        let steps = [1u32; MAX_RANK];
        let mut map = CUtensorMap { opaque: [0; 16] };
        context.with_current(|| {
            // SAFETY: the arrays have `rank` entries at least; one description is written. The
            // driver checks extents and alignments.
            let status = unsafe {
                cuTensorMapEncodeTiled(
                    &mut map,
                    self.data_type,
                    self.rank as u32,
                    data.cast(),
                    self.sizes.as_ptr(),
                    self.byte_strides.as_ptr(),
                    self.extents.as_ptr(),
                    steps.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    self.swizzle,
                    self.promotion,
                    CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            };
            context.check(status, "describing a tensor to the copy engine")
        })?;
        Ok(TensorMap { words: map.opaque })
    }
}
