//! The tables of cosines and sines of a model on a device, rounded as Transformers rounds them.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float};

/// Fills cos and sin [max_position, head_dim / 2]: the angle `position * inv_freq[i]` and the
/// product with `attention_scaling` in f32, as Transformers has them. inv_freq f32 [head_dim / 2].
pub fn rope_tables(
    context: &ComputeContext,
    inv_freq: &Tensor,
    attention_scaling: f32,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<()> {
    let (dtype, (max_position, half)) =
        (float("cos", cos)?, crate::ops::common::contiguous::matrix_size("cos", cos)?);
    check("sin", sin, cos.element(), cos.shape())?;
    check("inv_freq", inv_freq, ElementType::Float(DType::F32), &[half.into()])?;
    if cos.is_empty() {
        return Ok(());
    }
    let kernel = kernels::QK_ROPE_TABLE.of(dtype);
    let blocks = u32::try_from((cos.num_elements() as u64).div_ceil(256)).ok();
    let blocks = blocks.filter(|&blocks| blocks <= i32::MAX as u32);
    let blocks = blocks.ok_or_else(|| Error::unsupported("a rope table of that size"))?;
    let arguments = Arguments::new()
        .tensor(cos)
        .tensor(sin)
        .tensor(inv_freq)
        .f32(attention_scaling)
        .i32(max_position as i32)
        .i32(half);
    // SAFETY: the arguments of the kernel; the tables have max_position rows of half elements.
    unsafe { cuda(context)?.launch(kernel, Launch::linear(blocks, 256), arguments) }
}
