//! Residual addition and RMSNorm (Zhang and Sennrich, 2019, equation 4), rounded after each step:
//! `residual = round(residual + x)`, `out = round(weight * round(residual / sqrt(mean(residual^2) + eps)))`.

use super::{check, cuda, float, matrix_size, vector_len};
use crate::backend::cuda::{Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{DType, Tensor};

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
        (DType::F32, 1) => "xserv_add_rms_norm_stepwise_scalar_f32",
        (DType::F16, 1) => "xserv_add_rms_norm_stepwise_scalar_f16",
        (DType::BF16, 1) => "xserv_add_rms_norm_stepwise_scalar_bf16",
        (DType::F32, _) => "xserv_add_rms_norm_stepwise_vec_f32",
        (DType::F16, _) => "xserv_add_rms_norm_stepwise_vec_f16",
        (DType::BF16, _) => "xserv_add_rms_norm_stepwise_vec_bf16",
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
        cuda(context)?.launch_overlapping("add_rms_norm_stepwise", name, launch, arguments)
    }
}
