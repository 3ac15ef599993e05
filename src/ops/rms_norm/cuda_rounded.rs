//! Residual addition and RMSNorm (Zhang and Sennrich, 2019, equation 4), rounded after each step:
//! `residual = round(residual + x)`, `out = round(weight * round(residual / sqrt(mean(residual^2) + eps)))`.

use crate::backend::cuda::{Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::Error;
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size, vector_len};

/// See the head of the file; without `x` nothing is added.
///
/// x, residual, out [num_rows, width], weight [width], of one type; `out` shares no memory with the others.
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
    let name = match (dtype, vector) {
        (DType::F32, 1) => "xserv_add_rms_norm_rounded_scalar_f32",
        (DType::F16, 1) => "xserv_add_rms_norm_rounded_scalar_f16",
        (DType::BF16, 1) => "xserv_add_rms_norm_rounded_scalar_bf16",
        (DType::F32, _) => "xserv_add_rms_norm_rounded_vec_f32",
        (DType::F16, _) => "xserv_add_rms_norm_rounded_vec_f16",
        (DType::BF16, _) => "xserv_add_rms_norm_rounded_vec_bf16",
    };
    let block = ((width / vector).clamp(1, 1024) as u32).next_multiple_of(32);
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(residual)
        .optional(x)
        .tensor(weight)
        .i32(width)
        .f32(eps);
    // SAFETY: the arguments of the kernel; all are contiguous and have the rows and width that it goes over.
    unsafe {
        let launch = Launch::linear(rows, block);
        cuda(context)?.launch_overlapping("rms_norm/add_rounded", name, launch, arguments)
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RmsNormStepParams {
    x: *mut u8,
    weight: *mut u8,
    out: *mut u8,
    width: i32,
    eps: f32,
}
const _: () = assert!(size_of::<RmsNormStepParams>() == 32);

/// `out = round(weight * round(x / sqrt(mean(x^2) + eps)))`, row by row. x, out [num_rows, width], of f16 or
/// bf16; width a multiple of 8, at most 16384.
pub fn rms_norm_step(
    context: &ComputeContext,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (rows, width)) = (float("out", out)?, matrix_size("out", out)?);
    check("x", x, out.element(), &[rows.into(), width.into()])?;
    check("weight", weight, out.element(), &[width.into()])?;
    let name = match dtype {
        DType::F16 => "xserv_rms_norm_rounded_f16",
        DType::BF16 => "xserv_rms_norm_rounded_bf16",
        DType::F32 => return Err(Error::internal("rms_norm_step of f32")),
    };
    if width % 8 != 0 || width > 16384 {
        return Err(Error::internal(format!("rms_norm_step of rows of {width}")));
    }
    if out.is_empty() {
        return Ok(());
    }
    let params =
        RmsNormStepParams { x: x.data(), weight: weight.data(), out: out.data(), width, eps };
    // A vector of eight to a thread, two in the widest rows.
    let block = (width as u32 / 8).clamp(32, 1024).next_multiple_of(32);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; all rows have `width` elements.
    unsafe {
        cuda(context)?.launch_overlapping(
            "rms_norm/rounded",
            name,
            Launch::linear(rows, block),
            arguments,
        )
    }
}
