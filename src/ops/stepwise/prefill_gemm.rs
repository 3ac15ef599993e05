//! Linear layers for more tokens than [`super::skinny_gemm()`] takes, on Hopper: `csrc/ops/prefill_gemm.cu`.

use super::skinny_gemm::{is_skinny_weight, weight_map, LinearResult};
use super::{check, cuda, float, matrix_size};
use crate::backend::cuda::{is_cublas_present, Arguments, Launch, TensorMap};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};

/// The kernel has the same struct.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct PrefillGemmParams {
    weight: TensorMap,
    x: TensorMap,
    out: *mut u8,
    ldo: i64,
    num_tokens: i32,
    n: i32,
    k: i32,
    padding: [i32; 7],
}
/// Of the kernel's struct, whose end is not aligned.
const PREFILL_GEMM_BYTES: usize = 2 * 128 + 16 + 10 * 4;
const _: () = assert!(PREFILL_GEMM_BYTES <= size_of::<PrefillGemmParams>());

/// Tokens of two blocks that share rows of the weight.
const PAIR_TOKENS: i64 = 256;
/// Threads of a block.
const THREADS: u32 = 384;

/// Rows of the weight that a block has at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    Rows256,
    Rows192,
    Rows128,
}

impl Tile {
    fn rows(self) -> i64 {
        match self {
            Tile::Rows256 => 256,
            Tile::Rows192 => 192,
            Tile::Rows128 => 128,
        }
    }

    /// How long a tile takes, in parts of that of the largest; measured on an H200.
    fn cost(self) -> i64 {
        match self {
            Tile::Rows256 => 200,
            Tile::Rows192 => 157,
            Tile::Rows128 => 119,
        }
    }

    /// The one with which the last block is done first.
    fn choose(num_tokens: i64, rows: i64, num_multiprocessors: i64) -> Self {
        let pairs = (num_multiprocessors / 2).max(1) as u64;
        let cost = |tile: &Tile| {
            let tiles = tile.count(num_tokens, rows) as u64;
            tiles.div_ceil(pairs) as i64 * tile.cost()
        };
        let tiles = [Tile::Rows256, Tile::Rows192, Tile::Rows128];
        tiles.into_iter().min_by_key(cost).unwrap_or(Tile::Rows128)
    }

    /// How many there are, for two blocks each.
    fn count(self, num_tokens: i64, rows: i64) -> i64 {
        let of_tokens = (num_tokens as u64).div_ceil(PAIR_TOKENS as u64);
        (of_tokens * (rows as u64).div_ceil(self.rows() as u64)) as i64
    }

    /// Stages of 64 of k, what passes through on its way out, and barriers.
    fn shared_bytes(self) -> u32 {
        let stages = match self {
            Tile::Rows256 => 4,
            Tile::Rows192 => 5,
            Tile::Rows128 => 6,
        };
        let bytes = stages * (128 + self.rows()) * 64 * 2 + 8 * 16 * 128 + stages * 16;
        bytes as u32
    }

    fn kernel(self, dtype: DType, is_gated: bool) -> Option<&'static str> {
        macro_rules! name {
            ($epilogue:literal, $dtype:literal) => {
                match self {
                    Tile::Rows256 => concat!("xserv_prefill_gemm_", $epilogue, "_256_", $dtype),
                    Tile::Rows192 => concat!("xserv_prefill_gemm_", $epilogue, "_192_", $dtype),
                    Tile::Rows128 => concat!("xserv_prefill_gemm_", $epilogue, "_128_", $dtype),
                }
            };
        }
        match (is_gated, dtype) {
            (false, DType::F16) => Some(name!("plain", "f16")),
            (false, DType::BF16) => Some(name!("plain", "bf16")),
            (true, DType::F16) => Some(name!("swiglu", "f16")),
            (true, DType::BF16) => Some(name!("swiglu", "bf16")),
            (_, DType::F32) => None,
        }
    }
}

/// Whether [`prefill_gemm`] is faster than cuBLAS (which has the gate computed by a kernel of its own), or cuBLAS is
/// not there. Measured on an H200 with the layers of Qwen3-0.6B and 8B.
pub fn is_prefill_faster(num_tokens: usize, weight: &Tensor, result: LinearResult) -> bool {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    if !is_cublas_present() {
        return true;
    }
    match result {
        LinearResult::Plain => rows >= 4096 && rows > k && (k <= 2048 || num_tokens >= 384),
        LinearResult::SwiGlu => k <= 2048 || (384..=1024).contains(&num_tokens),
        LinearResult::Residual => false,
    }
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_prefill_gemm(context: &ComputeContext) -> bool {
    let name = "xserv_prefill_gemm_plain_128_bf16";
    cuda(context).is_ok_and(|cuda| {
        cuda.device().info().compute_capability == (9, 0) && cuda.has_kernel("prefill_gemm", name)
    })
}

/// The product of x [num_tokens, in_features] with `weight` [out_features, in_features] (twice the rows of `out` with
/// [`LinearResult::SwiGlu`]; not with [`LinearResult::Residual`]) to out [num_tokens, out_features]. Of f16 or bf16;
/// the weight is one that [`is_skinny_weight`] knows. A token's bits depend on nothing but the token and the weight.
pub fn prefill_gemm(
    context: &ComputeContext,
    x: &Tensor,
    weight: &DeviceTensor,
    result: LinearResult,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let (rows, k) = matrix_size("weight", weight)?;
    check("x", x, out.element(), &[num_tokens.into(), k.into()])?;
    let is_gated = result == LinearResult::SwiGlu;
    let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
    check("weight", weight, out.element(), &[expected, k.into()])?;
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let tile = Tile::choose(num_tokens.into(), rows.into(), processors);
    let name = tile.kernel(dtype, is_gated);
    let is_served = is_skinny_weight(weight, result) && result != LinearResult::Residual;
    let Some(name) = name.filter(|_| is_served) else {
        return Err(Error::internal(format!("no prefill kernel for {num_tokens} x {rows} x {k}")));
    };
    let params = PrefillGemmParams {
        weight: weight_map(cuda, weight, n as usize, k as usize, is_gated)?,
        x: TensorMap::new(cuda, x, &[64, 64])?,
        out: out.data(),
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        n,
        k,
        padding: [0; 7],
    };
    // Blocks take several tiles in turn, and the ring of copies runs on.
    let pairs = tile.count(num_tokens.into(), rows.into()).min((processors / 2).max(1));
    let launch = Launch {
        grid: (2 * pairs as u32, 1, 1),
        block: THREADS,
        shared_bytes: tile.shared_bytes(),
    };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its maps, and the
    // stores are bounded by num_tokens and n.
    unsafe { cuda.launch_clusters("prefill_gemm", name, launch, 2, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tile_is_the_one_that_was_fastest() {
        for (num_tokens, rows, tile) in [
            (512, 6144, Tile::Rows192),
            (512, 24576, Tile::Rows256),
            (512, 4096, Tile::Rows128),
            (1024, 6144, Tile::Rows192),
            (2048, 6144, Tile::Rows256),
            (2048, 4096, Tile::Rows256),
        ] {
            assert_eq!(Tile::choose(num_tokens, rows, 132), tile, "{num_tokens} x {rows}");
        }
        assert_eq!(Tile::Rows256.count(513, 300), 6);
        for tile in [Tile::Rows256, Tile::Rows192, Tile::Rows128] {
            assert!(tile.shared_bytes() <= 227 << 10, "{tile:?}");
            assert!(tile.kernel(DType::BF16, true).is_some());
        }
    }
}
