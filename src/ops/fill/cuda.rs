//! The CUDA half.

use super::cpu::Terms;
use super::Noise;
use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::{num_blocks, row_layout};

/// `out` is contiguous, or its rows all have the same distance.
pub(super) fn on_cuda(cuda: &CudaContext, dtype: DType, noise: &Noise, out: &Tensor) -> Result<()> {
    const BLOCK: u32 = 256;
    let count = out.num_elements();
    let (width, stride) = if out.is_contiguous() {
        (count, count)
    } else {
        (out.width(), row_layout(out)?.outer_stride)
    };
    let grid = num_blocks(count, i64::from(BLOCK))
        .ok_or_else(|| Error::unsupported(format!("{count} elements are too many")))?;
    let Terms { seed, mean, factor } = Terms::of(noise);
    let arguments = Arguments::new()
        .tensor(out)
        .i64(count)
        .i64(width)
        .i64(stride)
        .i64(seed as i64)
        .f32(mean)
        .f32(factor);
    let (kernel, launch) = (kernels::FILL.of(dtype), Launch::linear(grid, BLOCK));
    // SAFETY: the arguments of xserv_fill_*; rows of `width` elements that lie `stride` apart.
    unsafe { cuda.launch(kernel, launch, arguments) }
}
