//! GELU in the tanh form (Hendrycks and Gimpel, 2016), rounded after each step as in Transformers'
//! `gelu_new`: `csrc/ops/activation/gelu_tanh_rounded.cu` lists the steps.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda, float};

/// Computes `x = gelu_tanh(x)`. x: any shape, contiguous.
pub fn gelu_tanh(context: &ComputeContext, x: &Tensor) -> Result<()> {
    const BLOCK: u32 = 128;
    let dtype = float("x", x)?;
    check("x", x, x.element(), x.shape())?;
    if x.is_empty() {
        return Ok(());
    }
    let is_aligned = (x.data() as usize).is_multiple_of(16);
    let kernel =
        if is_aligned { kernels::GELU_TANH_ROUNDED_VEC } else { kernels::GELU_TANH_ROUNDED_SCALAR };
    let kernel = kernel.of(dtype);
    let elements = x.num_elements();
    let per_thread = if is_aligned { 16 / dtype.size_bytes() as u64 } else { 1 };
    let blocks = (elements as u64).div_ceil(u64::from(BLOCK) * per_thread);
    let blocks = i32::try_from(blocks)
        .map_err(|_| Error::unsupported(format!("{elements} elements are too many")))?;
    let arguments = Arguments::new().tensor(x).tensor(x).i64(elements);
    let launch = Launch::linear(blocks as u32, BLOCK);
    // SAFETY: the arguments of the kernel; the elements are contiguous.
    unsafe { cuda(context)?.launch(kernel, launch, arguments) }
}
