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
    /// A thread has 8 elements of a row in each of so many steps.
    steps: i32,
    /// The most registers of a thread.
    registers: u32,
    /// Whether in_features may be anything up to 8 * steps * threads, rather than just that.
    is_bounded: bool,
}

/// The registers of a multiprocessor, and the most threads of it.
const REGISTERS: u32 = 65536;
const MAX_THREADS: u32 = 2048;
/// The number of multiprocessors of the chips for which kernels are chosen (H100, H200).
const MULTIPROCESSORS: u32 = 132;
/// The most threads of a block of the kernels with bounds: two such blocks are resident.
const BOUNDED_THREADS: i32 = 256;
/// The registers of a thread of them: with more, fewer warps fit a quarter of a multiprocessor.
const BOUNDED_REGISTERS: u32 = 128;
/// The chunks of 8 elements that a thread of them has under way.
const BOUNDED_CHUNKS: i32 = 16;

impl Kernel {
    /// Returns the kernel for a product, if there is one: for one token that without bounds where
    /// it keeps all multiprocessors busy, and otherwise the one with bounds. It follows from the
    /// sizes alone.
    fn choose(num_tokens: usize, outs: i32, k: i32, result: Epilogue) -> Option<Self> {
        let exact = Self::exact(num_tokens, k, result);
        if num_tokens != 1 || exact.is_some_and(|kernel| kernel.is_busy(outs, k)) {
            return exact;
        }
        Self::bounded(k, result)
    }

    /// Whether a multiprocessor has two blocks, which take turns, or a large one, and the tiles
    /// divide almost evenly among the multiprocessors.
    fn is_busy(&self, outs: i32, k: i32) -> bool {
        let tiles = u64::from(outs.unsigned_abs().div_ceil(self.outs.unsigned_abs()));
        let most = tiles.div_ceil(u64::from(MULTIPROCESSORS)) * u64::from(MULTIPROCESSORS);
        (self.resident(k) > 1 || self.threads(k) >= 448) && most * 9 <= tiles * 10
    }

    /// Returns the kernel without bounds for a product, if there is one.
    fn exact(num_tokens: usize, k: i32, result: Epilogue) -> Option<Self> {
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
        let kernel = Kernel { tokens, outs, steps, registers, is_bounded: false };
        let threads = kernel.threads(k);
        let fits = num_tokens <= GEMV_TOKENS
            && k > 0
            && k % (256 * steps) == 0
            && threads * registers <= REGISTERS
            && threads <= 640;
        fits.then_some(kernel)
    }

    /// Returns the kernel for one token and any k, with the fewest steps for which two blocks fit a
    /// multiprocessor. One step takes too many registers with a gate.
    fn bounded(k: i32, result: Epilogue) -> Option<Self> {
        let steps = match result {
            Epilogue::AddResidual => [1, 2, 4, 8, 16].as_slice(),
            Epilogue::Store => [1, 2, 4, 8].as_slice(),
            Epilogue::SwiGlu => [2, 4, 8].as_slice(),
        };
        let &steps = steps.iter().find(|&&steps| k <= 8 * steps * BOUNDED_THREADS)?;
        let rows = BOUNDED_CHUNKS / steps;
        let outs = if result == Epilogue::SwiGlu { rows / 2 } else { rows };
        let registers = BOUNDED_REGISTERS;
        let kernel = Kernel { tokens: 1, outs, steps, registers, is_bounded: true };
        (k > 0 && k % 8 == 0).then_some(kernel)
    }

    fn threads(&self, k: i32) -> u32 {
        (k as u32).div_ceil(256 * self.steps as u32) * 32
    }

    /// Returns the blocks of a multiprocessor.
    fn resident(&self, k: i32) -> u32 {
        let threads = self.threads(k);
        (REGISTERS / (threads * self.registers)).min(MAX_THREADS / threads).max(1)
    }

    /// Returns the fewest outputs of a product.
    fn min_outs(&self) -> i32 {
        if self.is_bounded {
            1
        } else {
            self.outs
        }
    }

    /// Returns the kernel, or `None` where none is instantiated.
    fn name(&self, result: Epilogue, has_norm: bool, dtype: DType) -> Option<kernels::Kernel> {
        use Epilogue::{AddResidual, Store, SwiGlu};
        let kernel = match (self.is_bounded, result, has_norm, self.tokens, self.steps) {
            (true, Store, true, 1, 1) => kernels::LINEAR_GEMV_BOUNDED_NORM_1,
            (true, Store, true, 1, 2) => kernels::LINEAR_GEMV_BOUNDED_NORM_2,
            (true, Store, true, 1, 4) => kernels::LINEAR_GEMV_BOUNDED_NORM_4,
            (true, Store, true, 1, 8) => kernels::LINEAR_GEMV_BOUNDED_NORM_8,
            (true, SwiGlu, true, 1, 2) => kernels::LINEAR_GEMV_BOUNDED_SWIGLU_2,
            (true, SwiGlu, true, 1, 4) => kernels::LINEAR_GEMV_BOUNDED_SWIGLU_4,
            (true, SwiGlu, true, 1, 8) => kernels::LINEAR_GEMV_BOUNDED_SWIGLU_8,
            (true, AddResidual, false, 1, 1) => kernels::LINEAR_GEMV_BOUNDED_RESIDUAL_1,
            (true, AddResidual, false, 1, 2) => kernels::LINEAR_GEMV_BOUNDED_RESIDUAL_2,
            (true, AddResidual, false, 1, 4) => kernels::LINEAR_GEMV_BOUNDED_RESIDUAL_4,
            (true, AddResidual, false, 1, 8) => kernels::LINEAR_GEMV_BOUNDED_RESIDUAL_8,
            (true, AddResidual, false, 1, 16) => kernels::LINEAR_GEMV_BOUNDED_RESIDUAL_16,
            (false, Store, true, 1, 1) => kernels::LINEAR_GEMV_NORM_1_1,
            (false, Store, true, 1, 2) => kernels::LINEAR_GEMV_NORM_1_2,
            (false, Store, true, 2, 1) => kernels::LINEAR_GEMV_NORM_2_1,
            (false, SwiGlu, true, 1, 1) => kernels::LINEAR_GEMV_SWIGLU_1_1,
            (false, SwiGlu, true, 1, 2) => kernels::LINEAR_GEMV_SWIGLU_1_2,
            (false, SwiGlu, true, 2, 1) => kernels::LINEAR_GEMV_SWIGLU_2_1,
            (false, AddResidual, false, 1, 1) => kernels::LINEAR_GEMV_RESIDUAL_1_1,
            (false, AddResidual, false, 1, 2) => kernels::LINEAR_GEMV_RESIDUAL_1_2,
            (false, AddResidual, false, 1, 3) => kernels::LINEAR_GEMV_RESIDUAL_1_3,
            (false, AddResidual, false, 1, 4) => kernels::LINEAR_GEMV_RESIDUAL_1_4,
            (false, AddResidual, false, 2, 1) => kernels::LINEAR_GEMV_RESIDUAL_2_1,
            (false, AddResidual, false, 2, 3) => kernels::LINEAR_GEMV_RESIDUAL_2_3,
            (false, AddResidual, false, 2, 4) => kernels::LINEAR_GEMV_RESIDUAL_2_4,
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

/// Returns the most tokens, up to [`GEMV_TOKENS`], that the kernels of this file can multiply by a
/// weight of `[out_features, in_features]`; 0 if they cannot.
pub fn max_gemv_tokens(weight: &Tensor, result: Epilogue) -> usize {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let k = i32::try_from(k).unwrap_or(0);
    let halves = if result == Epilogue::SwiGlu { 2 } else { 1 };
    let outs = i32::try_from(rows / halves).unwrap_or(0);
    let has_kernel = |&num_tokens: &usize| {
        Kernel::choose(num_tokens, outs, k, result).is_some_and(|kernel| outs >= kernel.min_outs())
    };
    if !weight.is_contiguous() || !(weight.data() as usize).is_multiple_of(16) {
        return 0;
    }
    (1..=GEMV_TOKENS).take_while(has_kernel).count()
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
    let kernel =
        Kernel::choose(num_tokens as usize, n, k, result).filter(|kernel| n >= kernel.min_outs());
    let name = kernel.and_then(|kernel| kernel.name(result, norm.is_some(), dtype));
    let (Some(kernel), Some(name)) = (kernel, name) else {
        return Err(Error::internal(format!("no gemv of {num_tokens} x {rows} x {k}")));
    };
    let cuda = cuda(context)?;
    let threads = kernel.threads(k);
    // One wave of blocks that take their tiles in turn; with bounds each has its share of the rows.
    let tiles = (n as u32).div_ceil(kernel.min_outs() as u32);
    let blocks = tiles.min(kernel.resident(k) * cuda.device().info().num_multiprocessors as u32);
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
    let shared_bytes = rows * threads * kernel.steps as u32 * 16;
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
                let kernel = Kernel::choose(num_tokens, 132 * 16, k, result).expect("a kernel");
                assert!(!kernel.is_bounded, "{kernel:?}");
                assert_eq!(kernel.threads(k) as i32 * 8 * kernel.steps, k, "{kernel:?}");
                assert!(kernel.threads(k) * kernel.registers <= REGISTERS);
                let has_norm = result != Epilogue::AddResidual;
                assert!(kernel.name(result, has_norm, DType::BF16).is_some());
            }
        }
        assert_eq!(Kernel::choose(2, 4096, 5120, Epilogue::Store), None);
        assert_eq!(Kernel::choose(1, 4096, 1004, Epilogue::Store), None);
        assert_eq!(Kernel::choose(3, 4096, 4096, Epilogue::Store), None);
        // Tiles of 8 rows would give some multiprocessors half as much again as others.
        let uneven = Kernel::choose(1, 2560, 4096, Epilogue::AddResidual);
        assert!(uneven.is_some_and(|kernel| kernel.is_bounded));
    }

    #[test]
    fn one_token_has_a_kernel_for_any_size() {
        for k in (1..=4096).map(|i| i * 8) {
            for result in [Epilogue::Store, Epilogue::SwiGlu, Epilogue::AddResidual] {
                let has_norm = result != Epilogue::AddResidual;
                let Some(kernel) = Kernel::choose(1, 1000, k, result) else {
                    assert!(has_norm && k > 16384, "{k} {result:?}");
                    continue;
                };
                let capacity = kernel.threads(k) as i32 * 8 * kernel.steps;
                assert!(capacity >= k && capacity - k < 256 * kernel.steps, "{k} {kernel:?}");
                assert!(kernel.threads(k) >= kernel.outs as u32);
                let is_large = kernel.threads(k) >= 448;
                assert!(kernel.resident(k) > 1 || is_large, "{k} {kernel:?}");
                assert!(kernel.name(result, has_norm, DType::F16).is_some(), "{k} {kernel:?}");
            }
        }
    }
}
