//! Linear layers for up to 128 tokens on Hopper, and the norm before them, as links of a chain of
//! kernels that begin before the preceding ones have ended: `csrc/ops/linear/skinny.cu`,
//! `csrc/ops/rms_norm/rounded.cu`.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, TensorMap,
};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::{cuda_parts, Epilogue};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct SkinnyParams {
        weight: TensorMap,
        x: TensorMap,
        out: *mut u8,
        bias: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        k: i32,
        tile_rows: i32,
        padding: [i32; 4],
    }
}

/// The largest number of tokens.
pub const SKINNY_TOKENS: usize = 128;
/// The number of multiprocessors of the chips for which tiles are chosen (H100, H200).
const MULTIPROCESSORS: i64 = cuda_parts::MULTIPROCESSORS as i64;
/// Matrices with more rows than this have one for each token of a vocabulary.
const VOCABULARY_ROWS: i64 = 192 * 512;
/// in_features is a multiple of this.
const UNIT: i64 = 64;

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// The most rows of W that a block of the kernel computes at a time.
    rows: i64,
    /// The tokens of a block.
    tokens: i64,
    /// The number of blocks that share k.
    splits: i64,
    /// The rows of W that a block computes at a time, at most `rows`.
    tile: i64,
}

/// Weights of fewer bytes are divided among fewer blocks than there are multiprocessors: the others
/// are free for the kernels after. With blocks for all of them a step of 8 sequences of Qwen3-0.6B
/// takes 15 % longer (H200).
const SMALL_BYTES: i64 = 16 << 20;
/// The least elements of k that a block has where two share it, and the least rows of W that one
/// has by itself where two could share them.
const MIN_PART: i64 = 1024;
const MIN_ROWS_ALONE: i64 = 40;
/// Gates and ups of so many rows have tiles that are as even as they can be for up to 16 tokens: a step of
/// Qwen3-4B takes 2 % longer with whole ones, one of Qwen3-1.7B and Llama-3.2-1B 2 % less (H200).
const WIDE_GATES: i64 = 192 * 100;
/// The tokens of a block that cost as much as a row of W; they come from the L2.
const TOKENS_PER_ROW: i64 = 4;
/// The bytes that could be read while the blocks of a cluster add up their sums, on one
/// multiprocessor.
const EXCHANGE_BYTES: i64 = 24 << 10;
/// The most blocks that share k.
const MAX_SPLITS: i64 = 4;
/// The least elements of k that a block has where more than two share it, or a weight is small.
const MIN_SMALL_PART: i64 = 512;

/// What decides how a product is divided that is added to the residual stream, in bytes that the L2 gives
/// to all multiprocessors in the same time: how many multiprocessors take all that it can give; those for
/// each sum that blocks exchange; and those for each part fewer than [`MAX_SPLITS`], whose blocks are longer
/// at work by themselves. Of the divisions that were timed for Qwen3-1.7B, -4B and -8B and 24 to 128 tokens
/// they choose one within 3 % of the fastest (H200).
const SATURATING_MULTIPROCESSORS: i64 = 90;
const BYTES_PER_SUM: i64 = 1500;
const BYTES_PER_MISSING_PART: i64 = 2 << 20;
/// The bytes that the L2 gives while the device's memory gives one.
const L2_BYTES: i64 = 2;

/// The clusters of `splits` blocks that are resident at a time.
fn slots(splits: i64) -> i64 {
    cuda_parts::clusters(splits as usize) as i64
}

/// Returns value / divisor, rounded up.
fn div_ceil(value: i64, divisor: i64) -> i64 {
    (value as u64).div_ceil(divisor as u64) as i64
}

impl Division {
    /// Returns the division of a product, by its sizes: for most weights the one in which the
    /// busiest multiprocessor reads the fewest bytes. No measurement is made, so it is the same on
    /// every load.
    ///
    /// With `is_fixed`, `splits` does not depend on the number of tokens, nor then do a token's
    /// results; the other numbers never change them.
    fn choose(num_tokens: i64, rows: i64, k: i64, result: Epilogue, is_fixed: bool) -> Self {
        let tokens = match num_tokens {
            ..=16 => 16,
            17..=32 => 32,
            33..=64 => 64,
            65..=96 => 96,
            _ => 128,
        };
        if rows * k * 2 < SMALL_BYTES {
            return Self::of_small_weight(tokens, rows, k, result, is_fixed);
        }
        // Fewer blocks leave room for those of the next product, which fetch their weights ahead.
        if result == Epilogue::SwiGlu && (tokens > 16 || rows < WIDE_GATES) {
            return Self::of_whole_tiles(tokens, rows, result);
        }
        if result == Epilogue::AddResidual && !is_fixed {
            if let Some(division) = Self::of_residual(tokens, rows, k) {
                return division;
            }
        }
        let even = Self::even(tokens, rows, Self::splits(rows, k, result), result);
        // More tokens leave less room for weights under way: where tiles are many, those that the
        // kernels are made for are better than even ones.
        if tokens > 16 && even.waves(rows) > 1 {
            return Self::of_whole_tiles(tokens, rows, result);
        }
        even
    }

    /// Returns the division of a weight that is read in a few microseconds.
    fn of_small_weight(tokens: i64, rows: i64, k: i64, result: Epilogue, is_fixed: bool) -> Self {
        let tiles = div_ceil(rows, 64);
        // Many tokens are worth more multiprocessors, of which a third stays free.
        let most_blocks = if tokens >= 96 && !is_fixed { 96 } else { 64 };
        let suits = |splits: i64| {
            result != Epilogue::SwiGlu
                && tiles <= slots(splits)
                && k / splits >= MIN_SMALL_PART
                && (tiles * splits <= most_blocks || k >= 2048)
        };
        let choices: &[i64] = if is_fixed { &[4, 2] } else { &[4, 3, 2] };
        let splits = choices.iter().copied().find(|&splits| suits(splits)).unwrap_or(1);
        Division { rows: 64, tokens, splits, tile: 64 }
    }

    /// Returns the division of a product that is added to the residual stream, whose weight has few rows
    /// for a chip: the fastest one by the bytes that multiprocessors take from the L2, for which many
    /// tokens count as much as the weight does. (Tokens that a pair of blocks fetches once for both, by
    /// multicast, save no time; H200.) `None` if no division has room on the chip.
    fn of_residual(tokens: i64, rows: i64, k: i64) -> Option<Self> {
        let mut best: Option<(i64, Self)> = None;
        let least_splits = Self::splits(rows, k, Epilogue::AddResidual);
        let kernels = if tokens <= 32 { &[64] } else { Self::kernels(tokens) };
        for splits in (least_splits..=MAX_SPLITS).filter(|&splits| k / splits >= MIN_SMALL_PART) {
            let even = div_ceil(div_ceil(rows, slots(splits)), 8) * 8;
            for &most in kernels {
                for tile in [even, most] {
                    if tile > most || div_ceil(rows, tile) > slots(splits) {
                        continue;
                    }
                    let division = Division { rows: most, tokens, splits, tile };
                    let cost = division.cost(rows, k);
                    if best.is_none_or(|(least, _)| cost < least) {
                        best = Some((cost, division));
                    }
                }
            }
        }
        best.map(|(_, division)| division)
    }

    /// Returns the time of a product whose blocks run all at once, in the bytes that the L2 gives
    /// meanwhile.
    fn cost(&self, rows: i64, k: i64) -> i64 {
        let block = (self.tile + self.tokens) * (k / self.splits) * 2;
        let all = div_ceil(rows, self.tile) * self.splits * block;
        let is_split = i64::from(self.splits > 1);
        all.max(block * SATURATING_MULTIPROCESSORS).max(rows * k * 2 * L2_BYTES)
            + is_split * self.rows * self.tokens * BYTES_PER_SUM
            + (MAX_SPLITS - self.splits) * BYTES_PER_MISSING_PART
    }

    /// Returns the rows of the kernels for a number of tokens.
    fn kernels(tokens: i64) -> &'static [i64] {
        if tokens <= 32 {
            &[64, 192]
        } else {
            &[64, 128, 192]
        }
    }

    /// Returns the division of a weight with many rows into the tiles that kernels are made for, of which
    /// a gate and up of Qwen3-1.7B take 14 us for 64 tokens and 17 for 128, and even ones 18 and 27 (H200).
    fn of_whole_tiles(tokens: i64, rows: i64, result: Epilogue) -> Self {
        let is_wide = rows >= VOCABULARY_ROWS || result == Epilogue::SwiGlu;
        let tile = if is_wide { Self::rows_of_tiles(rows, tokens) } else { 64 };
        Division { rows: tile, tokens, splits: 1, tile }
    }

    /// Returns the rows of a tile with which the busiest multiprocessor has the fewest rows of a
    /// weight with many. A last wave of few large tiles leaves most of the chip idle: the 28672 rows
    /// of Llama-3.1-8B's gate and up take 150 tiles of 192, of which a second wave has 18 (a step of
    /// 32 sequences took 5.12 ms, and 4.59 with tiles of 64; H200). Each tile reads the tokens again,
    /// so tiles are not as small where these are many.
    fn rows_of_tiles(rows: i64, tokens: i64) -> i64 {
        let (large, small) = match tokens {
            ..=32 => (192, 64),
            128 if rows >= VOCABULARY_ROWS => return 128,
            _ => (192, 128),
        };
        let most_rows = |tile: i64| div_ceil(div_ceil(rows, tile), MULTIPROCESSORS) * tile;
        // The large ones are better where it makes little difference.
        if most_rows(small) * 20 < most_rows(large) * 19 {
            small
        } else {
            large
        }
    }

    /// Returns the number of blocks that share k, by the sizes of a weight: two where one would
    /// have too few rows to keep memory busy, or where the rows divide better among pairs.
    fn splits(rows: i64, k: i64, result: Epilogue) -> i64 {
        let [alone, pairs] = [1, 2].map(|splits| Self::even(16, rows, splits, result));
        let is_possible = result != Epilogue::SwiGlu && k >= 2 * MIN_PART && pairs.waves(rows) == 1;
        let alone_bytes = alone.busiest(rows) * k * 2;
        let pairs_bytes = pairs.busiest(rows) * k + EXCHANGE_BYTES;
        let is_faster = alone.tile < MIN_ROWS_ALONE || pairs_bytes * 100 < alone_bytes * 97;
        if is_possible && is_faster {
            2
        } else {
            1
        }
    }

    /// Returns the number of tiles of the busiest multiprocessor.
    fn waves(&self, rows: i64) -> i64 {
        div_ceil(div_ceil(rows, self.tile), slots(self.splits))
    }

    /// Returns the rows that the busiest multiprocessor reads, the tokens counted in.
    fn busiest(&self, rows: i64) -> i64 {
        self.waves(rows) * (self.tile + self.tokens / TOKENS_PER_ROW)
    }

    /// Returns the division with `splits` in which the busiest multiprocessor has the fewest rows:
    /// tiles as even as they can be with the fewest waves, or with one more.
    fn even(tokens: i64, rows: i64, splits: i64, result: Epilogue) -> Self {
        let unit = if result == Epilogue::SwiGlu { 16 } else { 8 };
        let mut best = Division { rows: 64, tokens, splits, tile: 64 };
        for &most in Self::kernels(tokens) {
            let least = div_ceil(rows, slots(splits) * most);
            for waves in [least, least + 1] {
                let share = div_ceil(rows, slots(splits) * waves);
                let tile = (div_ceil(share, unit) * unit).min(most);
                let division = Division { rows: most, tokens, splits, tile };
                if division.busiest(rows) < best.busiest(rows) {
                    best = division;
                }
            }
        }
        best
    }

    /// Returns the bytes of shared memory: boxes of 64 of k for `stages` of weights and of tokens,
    /// and barriers.
    fn shared_bytes(&self) -> u32 {
        // These are as instantiated at the end of the source: boxes, stages of weights, stages of
        // tokens.
        let (boxes, weights, tokens) = match (self.rows, self.tokens) {
            (64, 16) => (4, 5, 5),
            (64, 32) => (4, 4, 4),
            (64, 64) => (2, 7, 6),
            (64, 96) => (2, 5, 5),
            (64, _) => (2, 4, 4),
            (128, 64) => (2, 4, 4),
            (128, 96) => (1, 8, 8),
            (128, _) => (1, 7, 7),
            (_, 16) => (2, 4, 4),
            (_, 32) => (2, 3, 3),
            (_, 64) => (2, 3, 3),
            (_, 96) => (1, 6, 5),
            _ => (1, 5, 5),
        };
        let bytes = (weights * self.rows + tokens * self.tokens) * boxes * 64 * 2 + weights * 16;
        bytes as u32
    }

    fn kernel(&self, dtype: DType, result: Epilogue) -> Option<Kernel> {
        use Epilogue::{AddResidual, Store, SwiGlu};
        let kernel = match (result, self.rows, self.tokens) {
            (Store, 64, 16) => kernels::LINEAR_SKINNY_PLAIN_64X16,
            (Store, 64, 32) => kernels::LINEAR_SKINNY_PLAIN_64X32,
            (Store, 64, 64) => kernels::LINEAR_SKINNY_PLAIN_64X64,
            (Store, 64, 96) => kernels::LINEAR_SKINNY_PLAIN_64X96,
            (Store, 64, 128) => kernels::LINEAR_SKINNY_PLAIN_64X128,
            (Store, 128, 64) => kernels::LINEAR_SKINNY_PLAIN_128X64,
            (Store, 128, 96) => kernels::LINEAR_SKINNY_PLAIN_128X96,
            (Store, 128, 128) => kernels::LINEAR_SKINNY_PLAIN_128X128,
            (Store, 192, 16) => kernels::LINEAR_SKINNY_PLAIN_192X16,
            (Store, 192, 32) => kernels::LINEAR_SKINNY_PLAIN_192X32,
            (Store, 192, 64) => kernels::LINEAR_SKINNY_PLAIN_192X64,
            (Store, 192, 96) => kernels::LINEAR_SKINNY_PLAIN_192X96,
            (Store, 192, 128) => kernels::LINEAR_SKINNY_PLAIN_192X128,
            (AddResidual, 64, 16) => kernels::LINEAR_SKINNY_RESIDUAL_64X16,
            (AddResidual, 64, 32) => kernels::LINEAR_SKINNY_RESIDUAL_64X32,
            (AddResidual, 64, 64) => kernels::LINEAR_SKINNY_RESIDUAL_64X64,
            (AddResidual, 64, 96) => kernels::LINEAR_SKINNY_RESIDUAL_64X96,
            (AddResidual, 64, 128) => kernels::LINEAR_SKINNY_RESIDUAL_64X128,
            (AddResidual, 128, 64) => kernels::LINEAR_SKINNY_RESIDUAL_128X64,
            (AddResidual, 128, 96) => kernels::LINEAR_SKINNY_RESIDUAL_128X96,
            (AddResidual, 128, 128) => kernels::LINEAR_SKINNY_RESIDUAL_128X128,
            (AddResidual, 192, 16) => kernels::LINEAR_SKINNY_RESIDUAL_192X16,
            (AddResidual, 192, 32) => kernels::LINEAR_SKINNY_RESIDUAL_192X32,
            (AddResidual, 192, 64) => kernels::LINEAR_SKINNY_RESIDUAL_192X64,
            (AddResidual, 192, 96) => kernels::LINEAR_SKINNY_RESIDUAL_192X96,
            (AddResidual, 192, 128) => kernels::LINEAR_SKINNY_RESIDUAL_192X128,
            (SwiGlu, 64, 16) => kernels::LINEAR_SKINNY_SWIGLU_64X16,
            (SwiGlu, 64, 32) => kernels::LINEAR_SKINNY_SWIGLU_64X32,
            (SwiGlu, 64, 64) => kernels::LINEAR_SKINNY_SWIGLU_64X64,
            (SwiGlu, 64, 96) => kernels::LINEAR_SKINNY_SWIGLU_64X96,
            (SwiGlu, 64, 128) => kernels::LINEAR_SKINNY_SWIGLU_64X128,
            (SwiGlu, 128, 64) => kernels::LINEAR_SKINNY_SWIGLU_128X64,
            (SwiGlu, 128, 96) => kernels::LINEAR_SKINNY_SWIGLU_128X96,
            (SwiGlu, 128, 128) => kernels::LINEAR_SKINNY_SWIGLU_128X128,
            (SwiGlu, 192, 16) => kernels::LINEAR_SKINNY_SWIGLU_192X16,
            (SwiGlu, 192, 32) => kernels::LINEAR_SKINNY_SWIGLU_192X32,
            (SwiGlu, 192, 64) => kernels::LINEAR_SKINNY_SWIGLU_192X64,
            (SwiGlu, 192, 96) => kernels::LINEAR_SKINNY_SWIGLU_192X96,
            (SwiGlu, 192, 128) => kernels::LINEAR_SKINNY_SWIGLU_192X128,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// The rows and tokens of a block of each kernel.
#[cfg(test)]
const VARIANTS: [(i64, i64); 13] = [
    (64, 16),
    (64, 32),
    (64, 64),
    (64, 96),
    (64, 128),
    (128, 64),
    (128, 96),
    (128, 128),
    (192, 16),
    (192, 32),
    (192, 64),
    (192, 96),
    (192, 128),
];

/// The dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    VARIANTS
        .map(|(rows, tokens)| {
            let bytes = Division { rows, tokens, splits: 1, tile: rows }.shared_bytes();
            (format!("linear_skinny_{rows}x{tokens}"), bytes)
        })
        .into()
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_skinny(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability == (9, 0)
        && cuda.has_kernel(kernels::LINEAR_SKINNY_PLAIN_64X16.bf16)?)
}

/// Whether the kernels of this file can multiply by a weight of `[out_features, in_features]`.
pub fn is_skinny_weight(weight: &Tensor, result: Epilogue) -> bool {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let least = if result == Epilogue::SwiGlu { 16 } else { 8 };
    weight.is_contiguous()
        && rows > 0
        && k > 0
        && k % UNIT == 0
        && rows % least == 0
        && (weight.data() as usize).is_multiple_of(16)
}

/// Returns the number of parts of k whose sums [`linear_skinny`] adds up where its order is fixed; it
/// depends on the shape of a weight alone.
pub fn num_fixed_parts(weight: &Tensor, result: Epilogue) -> u32 {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    Division::choose(1, rows, k, result, true).splits as u32
}

/// Computes the product of x [num_tokens, in_features] and `weight` [out_features, in_features]
/// (twice the rows of `out` with [`Epilogue::SwiGlu`]) into out [num_tokens, out_features], of f16
/// or bf16, for up to [`SKINNY_TOKENS`] tokens. `bias` [out_features] is added before the rounding; only
/// with [`Epilogue::Store`]. With `is_fixed` a token's bits depend only on the
/// token and the weight.
pub fn linear_skinny(
    context: &ComputeContext,
    x: &Tensor,
    weight: &DeviceTensor,
    bias: Option<&Tensor>,
    result: Epilogue,
    is_fixed: bool,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let (rows, k) = matrix_size("weight", weight)?;
    check("x", x, out.element(), &[num_tokens.into(), k.into()])?;
    let is_gated = result == Epilogue::SwiGlu;
    let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
    check("weight", weight, out.element(), &[expected, k.into()])?;
    if let Some(bias) = bias {
        check("bias", bias, out.element(), &[n.into()])?;
        if result != Epilogue::Store {
            return Err(Error::internal("a bias of a skinny product that does not store"));
        }
    }
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let division = Division::choose(num_tokens.into(), rows.into(), k.into(), result, is_fixed);
    let kernel = division.kernel(dtype, result);
    let kernel =
        kernel.filter(|_| is_skinny_weight(weight, result) && num_tokens as usize <= SKINNY_TOKENS);
    let Some(kernel) = kernel else {
        return Err(Error::internal(format!("no skinny kernel for {num_tokens} x {rows} x {k}")));
    };
    let tile = division.tile as u32;
    let params = SkinnyParams {
        weight: weight_map_of(cuda, weight, (n as usize, k as usize), is_gated, tile)?,
        x: TensorMap::new(cuda, x, &[division.tokens as u32, 64])?,
        out: out.data(),
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        n,
        k,
        tile_rows: division.tile as i32,
        padding: [0; 4],
    };
    let tiles = div_ceil(rows.into(), division.tile);
    // Without a split the blocks take several tiles in turn, and the ring of copies runs on.
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let clusters = if division.splits == 1 { tiles.min(processors) } else { tiles };
    let launch = Launch {
        grid: ((clusters * division.splits) as u32, 1, 1),
        block: (division.rows * 2 + 32) as u32,
        shared_bytes: division.shared_bytes(),
    };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
    // maps, and the stores are bounded by num_tokens and n.
    unsafe { cuda.launch_clusters(kernel, launch, division.splits as u32, arguments) }
}

/// Returns the map of boxes of 64 rows; with a gate, of 32 rows of each half, eight at a time in
/// turn.
pub(super) fn weight_map(
    cuda: &CudaContext,
    weight: &DeviceTensor,
    n: usize,
    k: usize,
    is_gated: bool,
) -> Result<TensorMap> {
    weight_map_of(cuda, weight, (n, k), is_gated, 64)
}

/// Returns the same map with boxes of `box_rows` rows.
fn weight_map_of(
    cuda: &CudaContext,
    weight: &DeviceTensor,
    (n, k): (usize, usize),
    is_gated: bool,
    box_rows: u32,
) -> Result<TensorMap> {
    if !is_gated {
        return TensorMap::streamed(cuda, weight, &[box_rows, 64]);
    }
    let halves = weight.view(0, &[n / 8, 2, 8, k], Some(&[8 * k, n * k, k, 1]))?;
    TensorMap::streamed(cuda, &halves, &[box_rows / 16, 2, 8, 64])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_multiprocessor_has_little_more_than_its_share() {
        for (rows, k, result, parts) in [
            // Q, k and v, output projection, gate and up, and down of Qwen3-4B, -8B, -14B and
            // Qwen2.5-7B.
            (6144, 2560, Epilogue::Store, 1),
            (2560, 4096, Epilogue::AddResidual, 2),
            (19_456, 2560, Epilogue::SwiGlu, 1),
            (2560, 9728, Epilogue::AddResidual, 2),
            (6144, 4096, Epilogue::Store, 1),
            (4096, 4096, Epilogue::AddResidual, 2),
            (24_576, 4096, Epilogue::SwiGlu, 1),
            (4096, 12_288, Epilogue::AddResidual, 2),
            (7168, 5120, Epilogue::Store, 1),
            (5120, 5120, Epilogue::AddResidual, 1),
            (34_816, 5120, Epilogue::SwiGlu, 1),
            (5120, 17_408, Epilogue::AddResidual, 1),
            (4608, 3584, Epilogue::Store, 2),
            (3584, 18_944, Epilogue::AddResidual, 2),
            (37_888, 3584, Epilogue::SwiGlu, 1),
            // Vocabularies.
            (151_936, 4096, Epilogue::Store, 1),
            (128_256, 4096, Epilogue::Store, 1),
            // What nobody published.
            (7040, 1920, Epilogue::Store, 1),
        ] {
            for tokens in [1, 16] {
                let division = Division::choose(tokens, rows, k, result, true);
                assert_eq!(division.splits, parts, "{rows} x {k}: {division:?}");
                let most = division.waves(rows) * division.tile * slots(parts);
                assert!(most * 100 < rows * 113, "{rows} x {k}, {tokens}: {division:?}");
            }
        }
    }

    #[test]
    fn many_large_tiles_fill_the_chip() {
        for (rows, tokens, tile) in [
            // The gate and up of Qwen3-8B fill one wave, those of Llama-3.1-8B and Qwen3-14B and -32B do
            // not.
            (24_576, 16, 192),
            (24_576, 128, 192),
            // Whole tiles are faster where the gate and up are not wide, as those of Qwen3-1.7B, of one
            // that nobody published and of Llama-3.2-1B; those of Qwen3-4B are.
            (12_288, 16, 64),
            (14_080, 16, 64),
            (16_384, 16, 64),
            (19_456, 16, 160),
            (12_288, 64, 128),
            (14_080, 64, 128),
            (16_384, 64, 128),
            (19_456, 64, 192),
            (28_672, 32, 64),
            (28_672, 64, 128),
            (28_672, 128, 128),
            (34_816, 32, 64),
            (51_200, 32, 64),
            // Vocabularies.
            (151_936, 32, 192),
            (128_256, 32, 64),
        ] {
            let division = Division::choose(tokens, rows, 4096, Epilogue::SwiGlu, false);
            assert_eq!(division.tile, tile, "{rows} rows, {tokens} tokens");
        }
    }

    #[test]
    fn small_weights_leave_multiprocessors_free() {
        for (rows, k, splits, fixed_splits) in [
            (4096, 1024, 1, 1),
            (1024, 2048, 4, 4),
            (1024, 3072, 4, 4),
            // 32 tiles: clusters of four would take two turns.
            (2048, 2048, 3, 2),
        ] {
            for (is_fixed, splits) in [(false, splits), (true, fixed_splits)] {
                let division = Division::choose(8, rows, k, Epilogue::Store, is_fixed);
                assert_eq!(division, Division { rows: 64, tokens: 16, splits, tile: 64 });
            }
        }
    }

    #[test]
    fn products_that_are_added_take_few_bytes_from_the_cache() {
        // Down of Qwen3-1.7B, output projection and down of -4B and of -8B.
        for (rows, k, tokens, division) in [
            (2048, 6144, 24, (64, 3, 64)),
            (2048, 6144, 64, (64, 3, 64)),
            (2560, 4096, 24, (64, 2, 40)),
            (2560, 4096, 128, (128, 4, 128)),
            (2560, 9728, 64, (128, 4, 88)),
            (4096, 4096, 64, (64, 2, 64)),
            (4096, 4096, 128, (128, 3, 128)),
            (4096, 12_288, 48, (64, 2, 64)),
            (4096, 12_288, 96, (128, 3, 120)),
        ] {
            let got = Division::choose(tokens, rows, k, Epilogue::AddResidual, false);
            assert_eq!((got.rows, got.splits, got.tile), division, "{rows} x {k}, {tokens} tokens");
        }
    }

    #[test]
    fn every_division_has_a_kernel_that_fits() {
        for result in [Epilogue::Store, Epilogue::AddResidual, Epilogue::SwiGlu] {
            for (rows, k) in [
                (6144, 4096),
                (4096, 4096),
                (24576, 4096),
                (28672, 4096),
                (128_256, 4096),
                (4096, 12288),
                (151_936, 4096),
                (4096, 1024),
                (1024, 2048),
                (6144, 1024),
                (1024, 3072),
                (2048, 2048),
                (2048, 6144),
                (2560, 9728),
                (16, 128),
            ] {
                for (num_tokens, is_fixed) in (1..=128).flat_map(|n| [(n, false), (n, true)]) {
                    let division = Division::choose(num_tokens, rows, k, result, is_fixed);
                    assert!(division.tokens >= num_tokens);
                    assert!(division.kernel(DType::BF16, result).is_some(), "{division:?}");
                    assert!(division.shared_bytes() <= 227 * 1024, "{division:?}");
                    assert!(division.splits <= MAX_SPLITS && k / division.splits >= 128);
                    // Clusters that share k run all at once.
                    let clusters = div_ceil(rows, division.tile);
                    assert!(division.splits == 1 || clusters <= slots(division.splits));
                    assert!(division.tile <= division.rows);
                    assert!(result != Epilogue::SwiGlu || division.tile % 16 == 0);
                    let of_one = Division::choose(1, rows, k, result, true);
                    assert!(!is_fixed || division.splits == of_one.splits);
                }
            }
        }
    }
}
