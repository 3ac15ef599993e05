//! The linear layers around [`super::attention_fused_project()`] for one token of a small model:
//! `csrc/ops/linear/gemv_mma.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Kernel, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct GemvMmaParams {
        x: *mut u8,
        norm_weight: *mut u8,
        weight: *mut u8,
        sums: *mut u8,
        residual: *mut u8,
        hidden: *mut u8,
        out: *mut u8,
        out_features: i32,
        eps: f32,
    }
}

/// What a layer multiplies, and what is done with the product.
#[derive(Clone, Copy, Debug)]
pub enum OneTokenLinear<'a> {
    /// Computes `out = round(W rms_norm(x))`.
    Norm {
        /// The weight of the norm, [in_features].
        norm: &'a Tensor,
        /// The epsilon of the norm.
        eps: f32,
    },
    /// Computes `hidden = round(x + round(the sum of sums))` and
    /// `out = round(round(silu(round(G h))) * round(U h))` with `h = rms_norm(hidden)`, where W is
    /// G on top of U.
    SumsSwiGlu {
        /// The weight of the norm, [in_features].
        norm: &'a Tensor,
        /// The epsilon of the norm.
        eps: f32,
        /// The sums, f32 [8, in_features].
        sums: &'a Tensor,
        /// The result `hidden`, [1, in_features]; not x.
        hidden: &'a Tensor,
    },
    /// Computes `out = round(residual + round(W x))`.
    Residual {
        /// The residual, [1, out_features].
        residual: &'a Tensor,
    },
}

/// The number of sums that are added up.
pub const NUM_SUMS: usize = 8;

impl OneTokenLinear<'_> {
    /// Returns in_features, the number of outputs of a block, and its number of threads.
    fn sizes(&self) -> (i32, i32, u32) {
        match self {
            OneTokenLinear::Norm { .. } => (1024, 32, 256),
            OneTokenLinear::SumsSwiGlu { .. } => (1024, 32, 512),
            OneTokenLinear::Residual { .. } => (3072, 8, 192),
        }
    }

    fn kernel(&self, dtype: DType) -> Option<Kernel> {
        let kernel = match self {
            OneTokenLinear::Norm { .. } => kernels::LINEAR_GEMV_MMA_NORM,
            OneTokenLinear::SumsSwiGlu { .. } => kernels::LINEAR_GEMV_MMA_SUMS_SWIGLU,
            OneTokenLinear::Residual { .. } => kernels::LINEAR_GEMV_MMA_RESIDUAL,
        };
        kernel.of(dtype)
    }
}

/// Whether the chip and the build have the kernels, and they serve layers of these sizes.
pub fn has_linear_gemv_mma(
    context: &ComputeContext,
    hidden_size: usize,
    intermediate_size: usize,
    num_kv_heads: usize,
) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok((hidden_size, intermediate_size, num_kv_heads) == (1024, 3072, NUM_SUMS)
        && cuda.device().info().compute_capability.0 >= 9
        && cuda.has_kernel(kernels::LINEAR_GEMV_MMA_NORM.bf16)?)
}

/// Computes a layer for one token: x [1, in_features], weight [out_features, in_features] (twice
/// the rows with [`OneTokenLinear::SumsSwiGlu`]), out [1, out_features], of f16 or bf16.
/// in_features is 1024, or 3072 with [`OneTokenLinear::Residual`]; out_features is a multiple of
/// 32.
pub fn linear_gemv_mma(
    context: &ComputeContext,
    x: &Tensor,
    layer: OneTokenLinear<'_>,
    weight: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let (k, block_outs, threads) = layer.sizes();
    let element = out.element();
    check("x", x, element, &[1, k.into()])?;
    let halves = if matches!(layer, OneTokenLinear::SumsSwiGlu { .. }) { 2 } else { 1 };
    check("weight", weight, element, &[i64::from(n) * halves, k.into()])?;
    let mut params = GemvMmaParams {
        x: x.data(),
        norm_weight: std::ptr::null_mut(),
        weight: weight.data(),
        sums: std::ptr::null_mut(),
        residual: std::ptr::null_mut(),
        hidden: std::ptr::null_mut(),
        out: out.data(),
        out_features: n,
        eps: 0.0,
    };
    match layer {
        OneTokenLinear::Norm { norm, eps } => {
            check("norm", norm, element, &[k.into()])?;
            (params.norm_weight, params.eps) = (norm.data(), eps);
        }
        OneTokenLinear::SumsSwiGlu { norm, eps, sums, hidden } => {
            check("norm", norm, element, &[k.into()])?;
            check("sums", sums, ElementType::Float(DType::F32), &[NUM_SUMS as i64, k.into()])?;
            check("hidden", hidden, element, &[1, k.into()])?;
            (params.norm_weight, params.eps) = (norm.data(), eps);
            (params.sums, params.hidden) = (sums.data(), hidden.data());
        }
        OneTokenLinear::Residual { residual } => {
            check("residual", residual, element, &[1, n.into()])?;
            params.residual = residual.data();
        }
    }
    let GemvMmaParams { norm_weight, sums, hidden, .. } = params;
    let is_aligned = [params.x, norm_weight, params.weight, sums, hidden]
        .iter()
        .all(|&pointer| (pointer as usize).is_multiple_of(16));
    let kernel = layer.kernel(dtype).filter(|_| num_tokens == 1 && n > 0 && n % block_outs == 0);
    let (Some(kernel), true) = (kernel, is_aligned && hidden != params.x && params.out != params.x)
    else {
        return Err(Error::internal(format!("no product of {num_tokens} x {n} x {k}")));
    };
    let launch = Launch { grid: ((n / block_outs) as u32, 1, 1), block: threads, shared_bytes: 0 };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it covers exactly these shapes.
    unsafe { cuda(context)?.launch_overlapping(kernel, launch, arguments) }
}
