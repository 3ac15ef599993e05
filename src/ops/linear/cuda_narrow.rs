//! Linear layers for up to 8 tokens of a narrow model, fused with the norm before them and with what
//! follows, as links of a chain of kernels that begin before the preceding ones have ended:
//! `csrc/ops/linear/narrow.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::Epilogue;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct LinearNarrowParams {
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
        steps: i32,
        num_passes: i32,
        eps: f32,
    }
}

/// The largest number of tokens.
pub const NARROW_TOKENS: usize = 8;

/// The registers of a thread and of a multiprocessor.
const THREAD_REGISTERS: u32 = 128;
const REGISTERS: u32 = 65536;
/// The most warps of a block.
const MAX_WARPS: i32 = 16;
/// The number of multiprocessors of the chips for which kernels are chosen (H100, H200).
const MULTIPROCESSORS: i32 = 132;

/// How a kernel for narrow models divides in_features, whatever its weights are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Rows of the weight in a tile, 8 or 16.
    pub rows: i32,
    /// The warps of a block.
    pub warps: i32,
    /// The steps of a warp in a pass.
    pub steps: i32,
    /// Passes over in_features.
    pub passes: i32,
}

impl Division {
    /// Divides `all` steps among warps that have up to `most` of them in a pass: one pass where there is
    /// a norm, and `None` if that is too little.
    pub fn new(rows: i32, all: i32, most: i32, has_norm: bool) -> Option<Self> {
        let passes = (all + most * MAX_WARPS - 1) / (most * MAX_WARPS);
        if all <= 0 || (has_norm && passes > 1) {
            return None;
        }
        let warps = (all + most * passes - 1) / (most * passes);
        let steps = (all + warps * passes - 1) / (warps * passes);
        Some(Division { rows, warps, steps, passes })
    }

    /// Returns the division of the kernel for dense weights for a product, if there is one. It follows
    /// from the sizes alone.
    fn of_dense(num_tokens: usize, n: i32, k: i32, result: Epilogue) -> Option<Self> {
        let has_norm = result != Epilogue::AddResidual;
        let has_few = result != Epilogue::SwiGlu && (n + 15) / 16 < MULTIPROCESSORS && k % 64 == 0;
        // The most steps of a warp, as instantiated, and their elements.
        let (rows, most, step) = if has_few { (8, 4, 64) } else { (16, 8, 32) };
        if num_tokens == 0 || num_tokens > NARROW_TOKENS || n <= 0 || k <= 0 || k % step != 0 {
            return None;
        }
        Division::new(rows, k / step, most, has_norm)
    }

    /// Returns the threads of a block.
    fn threads(&self) -> u32 {
        self.warps as u32 * 32
    }

    /// Returns the outputs of a tile.
    fn outs(&self, result: Epilogue) -> i32 {
        if result == Epilogue::SwiGlu {
            self.rows / 2
        } else {
            self.rows
        }
    }

    /// Returns the blocks of a multiprocessor.
    fn resident(&self) -> u32 {
        (REGISTERS / (self.threads() * THREAD_REGISTERS)).max(1)
    }

    /// Returns the bytes of shared memory: sums of two tiles, squares, and the weight of the norm.
    pub fn shared_bytes(&self, k: i32, has_norm: bool) -> u32 {
        let sums = 2 * self.warps * NARROW_TOKENS as i32 * (self.rows + 4) * 4;
        let norm = if has_norm { self.warps * NARROW_TOKENS as i32 * 4 + k * 2 } else { 0 };
        (sums + norm) as u32
    }

    /// Returns the launch for a product: one wave of blocks, which take their tiles in turn.
    pub fn launch(
        &self,
        cuda: &CudaContext,
        n: i32,
        k: i32,
        result: Epilogue,
        has_norm: bool,
    ) -> Launch {
        let tiles = (n as u32).div_ceil(self.outs(result) as u32);
        let blocks = self.resident() * cuda.device().info().num_multiprocessors as u32;
        Launch {
            grid: (tiles.min(blocks), 1, 1),
            block: self.threads(),
            shared_bytes: self.shared_bytes(k, has_norm),
        }
    }

    /// Returns the kernel for dense weights, or `None` where none is instantiated.
    fn kernel(&self, result: Epilogue, has_norm: bool, dtype: DType) -> Option<Kernel> {
        use Epilogue::{AddResidual, Store, SwiGlu};
        let kernel = match (result, has_norm, self.rows) {
            (Store, true, 8) => kernels::LINEAR_NARROW_NORM_8,
            (Store, true, 16) => kernels::LINEAR_NARROW_NORM_16,
            (SwiGlu, true, 16) => kernels::LINEAR_NARROW_SWIGLU_16,
            (AddResidual, false, 8) => kernels::LINEAR_NARROW_RESIDUAL_8,
            (AddResidual, false, 16) => kernels::LINEAR_NARROW_RESIDUAL_16,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_narrow(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability.0 >= 9
        && cuda.has_kernel(kernels::LINEAR_NARROW_NORM_16.bf16)?)
}

/// Returns the most tokens, up to [`NARROW_TOKENS`], that the kernels of this file can multiply by a
/// weight of `[out_features, in_features]`; 0 if they cannot.
pub fn max_narrow_tokens(weight: &Tensor, result: Epilogue) -> usize {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let halves = if result == Epilogue::SwiGlu { 2 } else { 1 };
    let (Ok(n), Ok(k)) = (i32::try_from(rows / halves), i32::try_from(k)) else { return 0 };
    if !weight.is_contiguous() || !(weight.data() as usize).is_multiple_of(16) {
        return 0;
    }
    (1..=NARROW_TOKENS)
        .take_while(|&tokens| Division::of_dense(tokens, n, k, result).is_some())
        .count()
}

/// Computes `out = round(W round(norm * round(x / rms(x))))` with `norm`, a weight [in_features]
/// and its eps, and with `bias` [out_features] added before the rounding where there is one; or with
/// [`Epilogue::SwiGlu`] the gated product of both halves of W. Without `norm`, and with
/// [`Epilogue::AddResidual`], it computes `out = round(out + round(W x))`.
///
/// x [num_tokens, in_features], weight [out_features, in_features] (twice the rows of out with
/// SwiGlu), out [num_tokens, out_features], of f16 or bf16; at most [`NARROW_TOKENS`] tokens.
pub fn linear_narrow(
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
            return Err(Error::internal("a bias of a narrow product that does not store"));
        }
    }
    if out.is_empty() {
        return Ok(());
    }
    let division = Division::of_dense(num_tokens as usize, n, k, result);
    let kernel = division.and_then(|division| division.kernel(result, norm.is_some(), dtype));
    let (Some(division), Some(kernel)) = (division, kernel) else {
        return Err(Error::internal(format!("no narrow product of {num_tokens} x {rows} x {k}")));
    };
    let cuda = cuda(context)?;
    let params = LinearNarrowParams {
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
        steps: division.steps,
        num_passes: division.passes,
        eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    let launch = division.launch(cuda, n, k, result, norm.is_some());
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it covers exactly these shapes.
    unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_divided_among_warps_and_passes_whole() {
        for tokens in 1..=NARROW_TOKENS {
            for k in (1..=1024).map(|i| i * 32) {
                for n in [16, 1024, 2112, 2113, 9000] {
                    for result in [Epilogue::Store, Epilogue::SwiGlu, Epilogue::AddResidual] {
                        let has_norm = result != Epilogue::AddResidual;
                        let Some(division) = Division::of_dense(tokens, n, k, result) else {
                            assert!(has_norm && k > 4096);
                            continue;
                        };
                        let step = if division.rows == 16 { 32 } else { 64 };
                        let all = division.warps * division.steps * division.passes * step;
                        assert!(all >= k && division.warps <= MAX_WARPS, "{k} {division:?}");
                        assert!(division.shared_bytes(k, has_norm) <= 48 << 10, "{k} {division:?}");
                        assert!(division.kernel(result, has_norm, DType::F16).is_some());
                    }
                }
            }
        }
        assert_eq!(Division::of_dense(9, 1024, 1024, Epilogue::Store), None);
        assert_eq!(Division::of_dense(1, 1024, 1000, Epilogue::Store), None);
    }
}
