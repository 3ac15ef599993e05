//! Residual addition and RMSNorm (Zhang and Sennrich, 2019, equation 4), rounded after each step:
//! `residual = round(residual + x)`,
//! `out = round(weight * round(residual / sqrt(mean(residual^2) + eps)))`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::Error;
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda, float, matrix_size, vector_len};

/// Adds `x` to the residual and computes the norm; see the head of the file. Without `x` nothing is
/// added.
///
/// x, residual, out [num_rows, width], weight [width], of one type; `out` shares no memory with the
/// others.
pub fn add_rms_norm(
    context: &ComputeContext,
    x: Option<&Tensor>,
    residual: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (rows, width)) = (float("residual", residual)?, matrix_size("residual", residual)?);
    let (element, shape) = (residual.element(), residual.shape());
    check("out", out, element, shape)?;
    check("weight", weight, element, &[width.into()])?;
    if let Some(x) = x {
        check("x", x, element, shape)?;
    }
    if residual.is_empty() {
        return Ok(());
    }
    let vector = vector_len(dtype, width, &[x.unwrap_or(residual), residual, weight, out]);
    let kernel = match vector {
        1 => kernels::ADD_RMS_NORM_ROUNDED_SCALAR.of(dtype),
        _ => kernels::ADD_RMS_NORM_ROUNDED_VEC.of(dtype),
    };
    let block = ((width / vector).clamp(1, 1024) as u32).next_multiple_of(32);
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(residual)
        .optional(x)
        .tensor(weight)
        .i32(width)
        .f32(eps);
    // SAFETY: the arguments of the kernel; all are contiguous and have the rows and width that it
    // covers.
    unsafe {
        let launch = Launch::linear(rows, block);
        cuda(context)?.launch_overlapping(kernel, launch, arguments)
    }
}

kernel_struct! {
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct RmsNormRoundedParams {
        x: *mut u8,
        weight: *mut u8,
        out: *mut u8,
        width: i32,
        eps: f32,
    }
}

/// Computes `out = round(weight * round(x / sqrt(mean(x^2) + eps)))`, row by row. x, out [num_rows,
/// width], of f16 or bf16; width a multiple of 8, at most 16384.
pub fn rms_norm_rounded(
    context: &ComputeContext,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (rows, width)) = (float("out", out)?, matrix_size("out", out)?);
    check("x", x, out.element(), &[rows.into(), width.into()])?;
    check("weight", weight, out.element(), &[width.into()])?;
    let kernel = kernels::RMS_NORM_ROUNDED.of_half(dtype)?;
    if width % 8 != 0 || width > 16384 {
        return Err(Error::internal(format!("rms_norm_rounded of rows of {width}")));
    }
    if out.is_empty() {
        return Ok(());
    }
    let params =
        RmsNormRoundedParams { x: x.data(), weight: weight.data(), out: out.data(), width, eps };
    // A thread takes a vector of eight elements, two in the widest rows.
    let block = (width as u32 / 8).clamp(32, 1024).next_multiple_of(32);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; all rows have `width` elements.
    unsafe { cuda(context)?.launch_overlapping(kernel, Launch::linear(rows, block), arguments) }
}
