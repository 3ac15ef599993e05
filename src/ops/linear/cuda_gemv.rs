//! Linear layers for one or two tokens, fused with the norm before them and with what follows, as
//! links of a chain of kernels that begin before the preceding ones have ended:
//! `csrc/ops/linear/gemv.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::Epilogue;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct LinearGemvParams {
        x: *mut u8,
        norm_weight: *mut u8,
        weight: *mut u8,
        bias: *mut u8,
        out: *mut u8,
        ldx: i64,
        ldw: i64,
        ldo: i64,
        num_tokens: i32,
        out_features: i32,
        in_features: i32,
        prefetch_blocks: i32,
        prefetch_rows: i32,
        eps: f32,
    }
}

/// The largest number of tokens.
pub const GEMV_TOKENS: usize = 2;

/// A kernel, as instantiated at the end of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kernel {
    /// The number of tokens, 1 or 2.
    tokens: u32,
    /// Outputs of a tile.
    outs: i32,
    /// in_features is 8 * steps * threads.
    steps: i32,
    /// The most registers of a thread.
    registers: u32,
}

impl Kernel {
    /// Returns the kernel for a product, if there is one.
    fn choose(num_tokens: usize, k: i32, result: Epilogue) -> Option<Self> {
        let tokens = if num_tokens == 1 { 1 } else { 2 };
        let one = tokens == 1;
        let steps = match result {
            Epilogue::AddResidual if (k > 4096 || one) && k % 768 == 0 => 3,
            Epilogue::AddResidual if k > 4096 => 4,
            // Two blocks of a multiprocessor take turns, which saves 0.6 % of a step of Qwen3-8B.
            _ if one && k >= 4096 => 2,
            _ => 1,
        };
        let (rows, registers) = match (steps, one) {
            (2, true) => (8, 128),
            (3, true) => (4, 112),
            (3, false) | (4, _) => (4, 128),
            (_, true) => (16, 128),
            (_, false) => (8, 112),
        };
        let outs = if result == Epilogue::SwiGlu { rows / 2 } else { rows };
        let kernel = Kernel { tokens, outs, steps, registers };
        let threads = kernel.threads(k);
        let fits = num_tokens <= GEMV_TOKENS
            && k > 0
            && k % (256 * steps) == 0
            && threads * registers <= 65536
            && threads <= 640;
        fits.then_some(kernel)
    }

    fn threads(&self, k: i32) -> u32 {
        (k / (8 * self.steps)) as u32
    }

    /// Returns the kernel, or `None` where none is instantiated.
    fn name(&self, result: Epilogue, has_norm: bool, dtype: DType) -> Option<kernels::Kernel> {
        use Epilogue::{AddResidual, Store, SwiGlu};
        let kernel = match (result, has_norm, self.tokens, self.steps) {
            (Store, true, 1, 1) => kernels::LINEAR_GEMV_NORM_1_1,
            (Store, true, 1, 2) => kernels::LINEAR_GEMV_NORM_1_2,
            (Store, true, 2, 1) => kernels::LINEAR_GEMV_NORM_2_1,
            (SwiGlu, true, 1, 1) => kernels::LINEAR_GEMV_SWIGLU_1_1,
            (SwiGlu, true, 1, 2) => kernels::LINEAR_GEMV_SWIGLU_1_2,
            (SwiGlu, true, 2, 1) => kernels::LINEAR_GEMV_SWIGLU_2_1,
            (AddResidual, false, 1, 1) => kernels::LINEAR_GEMV_RESIDUAL_1_1,
            (AddResidual, false, 1, 2) => kernels::LINEAR_GEMV_RESIDUAL_1_2,
            (AddResidual, false, 1, 3) => kernels::LINEAR_GEMV_RESIDUAL_1_3,
            (AddResidual, false, 1, 4) => kernels::LINEAR_GEMV_RESIDUAL_1_4,
            (AddResidual, false, 2, 1) => kernels::LINEAR_GEMV_RESIDUAL_2_1,
            (AddResidual, false, 2, 3) => kernels::LINEAR_GEMV_RESIDUAL_2_3,
            (AddResidual, false, 2, 4) => kernels::LINEAR_GEMV_RESIDUAL_2_4,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_gemv(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability.0 >= 9
        && cuda.has_kernel(kernels::LINEAR_GEMV_NORM_1_1.bf16)?)
}

/// Whether the kernels of this file can multiply by a weight of `[out_features, in_features]`.
pub fn is_gemv_weight(weight: &Tensor, result: Epilogue) -> bool {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let k = i32::try_from(k).unwrap_or(0);
    let has_kernel = |num_tokens| {
        Kernel::choose(num_tokens, k, result)
            .is_some_and(|kernel| rows >= 2 * i64::from(kernel.outs))
    };
    weight.is_contiguous()
        && (weight.data() as usize).is_multiple_of(16)
        && has_kernel(1)
        && has_kernel(2)
}

/// Computes `out = round(W round(norm * round(x / rms(x))))` with `norm`, a weight [in_features]
/// and its eps, and with `bias` [out_features] added before the rounding where there is one; or with [`Epilogue::SwiGlu`] the gated product of both halves of W. Without `norm`,
/// and with [`Epilogue::AddResidual`], it computes `out = round(out + round(W x))`.
///
/// x [num_tokens, in_features], weight [out_features, in_features] (twice the rows of out with
/// SwiGlu), out [num_tokens, out_features], of f16 or bf16; at most [`GEMV_TOKENS`] tokens.
pub fn linear_gemv(
    context: &ComputeContext,
    x: &Tensor,
    norm: Option<(&Tensor, f32)>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    result: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let (rows, k) = matrix_size("weight", weight)?;
    check("x", x, out.element(), &[num_tokens.into(), k.into()])?;
    let halves = if result == Epilogue::SwiGlu { 2 } else { 1 };
    check("weight", weight, out.element(), &[i64::from(n) * halves, k.into()])?;
    if let Some((norm_weight, _)) = norm {
        check("norm_weight", norm_weight, out.element(), &[k.into()])?;
    }
    if let Some(bias) = bias {
        check("bias", bias, out.element(), &[n.into()])?;
        if result != Epilogue::Store {
            return Err(Error::internal("a bias of a gemv that does not store"));
        }
    }
    if out.is_empty() {
        return Ok(());
    }
    let kernel = Kernel::choose(num_tokens as usize, k, result).filter(|kernel| n >= kernel.outs);
    let name = kernel.and_then(|kernel| kernel.name(result, norm.is_some(), dtype));
    let (Some(kernel), Some(name)) = (kernel, name) else {
        return Err(Error::internal(format!("no gemv of {num_tokens} x {rows} x {k}")));
    };
    let cuda = cuda(context)?;
    let threads = kernel.threads(k);
    // One wave of blocks that take their tiles in turn.
    let resident = (65536 / (threads * kernel.registers)).min(2048 / threads).max(1);
    let tiles = (n as u32).div_ceil(kernel.outs as u32);
    let blocks = tiles.min(resident * cuda.device().info().num_multiprocessors as u32);
    // The beginning of each block's second tile is prefetched where rows are long, which saves half
    // a per cent of a step of Qwen3-8B.
    let prefetch_rows = match result {
        _ if k < 4096 => 0,
        Epilogue::SwiGlu => 2,
        _ => 1,
    };
    let params = LinearGemvParams {
        x: x.data(),
        norm_weight: norm.map_or(std::ptr::null_mut(), |(weight, _)| weight.data()),
        weight: weight.data(),
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        out: out.data(),
        ldx: k.into(),
        ldw: k.into(),
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        out_features: n,
        in_features: k,
        prefetch_blocks: blocks as i32,
        prefetch_rows,
        eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    // The norm's weight is held in shared memory, and x where it takes too many registers.
    let rows = u32::from(norm.is_some())
        + if kernel.tokens * kernel.steps as u32 >= 8 { kernel.tokens } else { 0 };
    let shared_bytes = rows * k as u32 * 2;
    let launch = Launch { grid: (blocks, 1, 1), block: threads, shared_bytes };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it covers exactly these shapes.
    unsafe { cuda.launch_overlapping(name, launch, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_of_published_models_have_kernels_that_can_be_launched() {
        for num_tokens in [1, 2] {
            for (k, result) in [
                (1024, Epilogue::Store),
                (1024, Epilogue::SwiGlu),
                (2048, Epilogue::AddResidual),
                (3072, Epilogue::AddResidual),
                (4096, Epilogue::Store),
                (4096, Epilogue::AddResidual),
                (8192, Epilogue::AddResidual),
                (14336, Epilogue::AddResidual),
                (12288, Epilogue::AddResidual),
            ] {
                let kernel = Kernel::choose(num_tokens, k, result).expect("a kernel");
                assert_eq!(kernel.threads(k) as i32 * 8 * kernel.steps, k, "{kernel:?}");
                assert!(kernel.threads(k) * kernel.registers <= 65536);
                let has_norm = result != Epilogue::AddResidual;
                assert!(kernel.name(result, has_norm, DType::BF16).is_some());
            }
        }
        assert_eq!(Kernel::choose(2, 5120, Epilogue::Store), None);
        assert_eq!(Kernel::choose(1, 1000, Epilogue::Store), None);
        assert_eq!(Kernel::choose(3, 4096, Epilogue::Store), None);
    }
}
