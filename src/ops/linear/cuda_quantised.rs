//! Linear layers with quantised weights on a GPU, for any number of tokens:
//! `csrc/ops/linear/quantised.cu`, for up to 16 tokens `quantised_few.cu`, and for more on Hopper
//! `quantised_many.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Kernel, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{cuda, float, matrix_size};
use crate::ops::linear::cuda_quantised_blocks::{
    check_product, epilogue_number, is_quantised_weight, launch, units, Chosen, GROUP_BYTES,
    MULTIPROCESSORS, TILES, WARPS, WARPS_SHIFT,
};
use crate::ops::linear::cuda_quantised_few::{Chip, FewDivision};
use crate::ops::linear::cuda_quantised_many::{has_quantised_many, is_fine, ManyDivision};
use crate::ops::linear::{quantised_kernels, Epilogue};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::tiles::{TileLayout, CHUNK};
use crate::ops::quantised::Code;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct QuantisedParams {
        x: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        zeros: *mut u8,
        out: *mut u8,
        bias: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        k: i32,
        num_tiles: i32,
        num_chunks: i32,
        num_groups: i32,
        group_factor: u32,
        scale_type: i32,
        epilogue: i32,
        row_shift: i32,
    }
}

/// What a launch says of a product besides its operands.
pub(in crate::ops) struct QuantisedLaunch {
    pub epilogue: Epilogue,
    /// log2 of the warps of a block that have different rows.
    pub row_shift: u32,
    /// What [`units`] gives.
    pub group_factor: u32,
}

impl QuantisedParams {
    /// Returns the argument for x `[num_tokens, k]` and out `[num_tokens, n]`, without a bias.
    pub(in crate::ops) fn new(
        weight: &QuantisedTiles<'_>,
        x: &Tensor,
        out: &Tensor,
        (num_tokens, n): (u32, i32),
        how: &QuantisedLaunch,
    ) -> Self {
        let (layout, regions) = (weight.layout(), weight.regions());
        QuantisedParams {
            x: x.data(),
            codes: regions.codes,
            scales: regions.scales,
            zeros: regions.zeros,
            out: out.data(),
            bias: std::ptr::null_mut(),
            ldo: n.into(),
            num_tokens: num_tokens as i32,
            n,
            k: layout.in_features() as i32,
            num_tiles: layout.num_tiles() as i32,
            num_chunks: layout.num_chunks() as i32,
            num_groups: layout.num_groups() as i32,
            group_factor: how.group_factor,
            scale_type: scale_number(layout.format().scale),
            epilogue: epilogue_number(how.epilogue),
            row_shift: how.row_shift as i32,
        }
    }
}

/// The bytes that a multiprocessor must have under way for the memory's full rate.
const BYTES_UNDER_WAY: u64 = 32 << 10;
/// The bytes that could be read while a block begins and ends, and while the blocks of a cluster add
/// up their sums.
const BLOCK_BYTES: u64 = 6 << 10;
const EXCHANGE_BYTES: u64 = 10 << 10;
/// Bytes of activations, which come from the L2, cost this fraction of bytes of weights.
const ACTIVATIONS_COST: u64 = 3;

/// Returns the bytes of shared memory of a block with `ahead` chunks under way: the rings of all warps, which
/// take the sums at the end.
pub(in crate::ops) fn shared_bytes(ahead: u64, tokens: u64, chunk_bytes: u64, scales: u64) -> u64 {
    let ring = ahead * TILES * (chunk_bytes + scales * GROUP_BYTES);
    WARPS * ring.max(TILES * (tokens / 8) * 512)
}

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// The tokens of a block.
    tokens: u64,
    /// log2 of the warps of a block that have different rows; the others share k.
    row_shift: u32,
    /// The blocks of a cluster, which share k.
    splits: u64,
}

/// The sizes of a product by which it is divided.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    num_tiles: u64,
    num_chunks: u64,
    chunk_bytes: u64,
}

impl Sizes {
    fn of(layout: &TileLayout) -> Self {
        Sizes {
            num_tiles: layout.num_tiles() as u64,
            num_chunks: layout.num_chunks() as u64,
            chunk_bytes: 128 * layout.format().code.bits() as u64,
        }
    }
}

impl Division {
    /// Returns the division of a product by its sizes: the one in which the busiest multiprocessor
    /// has the least to do. No measurement is made, so it is the same on every load.
    ///
    /// With `is_fixed` neither the parts of k nor, then, a token's results depend on the number of
    /// tokens; the other numbers never change them.
    fn choose(num_tokens: u64, sizes: Sizes, has_clusters: bool, is_fixed: bool) -> Self {
        let tokens = match num_tokens {
            ..=8 => 8,
            9..=16 => 16,
            17..=32 => 32,
            _ => 64,
        };
        let splits: &[u64] = if has_clusters { &[1, 2, 4] } else { &[1] };
        // What is fixed is best for few tokens, and not bad for many.
        let (row_shifts, counted) =
            if is_fixed { (1..=1, 1) } else { (0..=WARPS_SHIFT, num_tokens.min(tokens)) };
        let division = |row_shift, splits| Division { tokens, row_shift, splits };
        let mut best = (u64::MAX, division(1, 1));
        for row_shift in row_shifts {
            for &splits in splits {
                let candidate = division(row_shift, splits);
                let model = if is_fixed { Division { tokens: 8, ..candidate } } else { candidate };
                let cost = model.cost(counted, sizes);
                if cost < best.0 {
                    best = (cost, candidate);
                }
            }
        }
        best.1
    }

    /// The tiles of a warp, its chunks under way of each, and the blocks of a multiprocessor, as
    /// instantiated at the end of the source.
    fn variant(&self, chunk_bytes: u64) -> (u64, u64, u64) {
        let is_int4 = chunk_bytes == 512;
        (TILES, if is_int4 { 6 } else { 4 }, if self.tokens <= 16 { 2 } else { 1 })
    }

    /// See [`shared_bytes`].
    fn shared_bytes(&self, chunk_bytes: u64, scales: u64) -> u64 {
        let (_, ahead, _) = self.variant(chunk_bytes);
        shared_bytes(ahead, self.tokens, chunk_bytes, scales)
    }

    /// The tiles of a block.
    fn tiles(&self) -> u64 {
        TILES << self.row_shift
    }

    /// What the busiest multiprocessor has to do for one group of tokens, in bytes that it could
    /// read from memory meanwhile.
    fn cost(&self, num_tokens: u64, sizes: Sizes) -> u64 {
        let (tiles, ahead, most_resident) = self.variant(sizes.chunk_bytes);
        let input_warps = WARPS >> self.row_shift;
        let warp_chunks = sizes.num_chunks.div_ceil(input_warps * self.splits);
        let weights = self.tiles() * input_warps * warp_chunks * sizes.chunk_bytes;
        let activations =
            num_tokens * (sizes.num_chunks * CHUNK as u64 * 2) / self.splits / ACTIVATIONS_COST;
        let blocks = sizes.num_tiles.div_ceil(self.tiles()) * self.splits;
        // Clusters of four do not fill the chip.
        let slots = if self.splits == 4 { MULTIPROCESSORS - 12 } else { MULTIPROCESSORS };
        let busiest = blocks.div_ceil(slots);
        let resident = busiest.min(most_resident);
        let under_way = resident * WARPS * tiles * ahead.min(warp_chunks) * sizes.chunk_bytes;
        let streamed = weights * BYTES_UNDER_WAY / under_way.clamp(1, BYTES_UNDER_WAY);
        let exchange = if self.splits > 1 { EXCHANGE_BYTES } else { 0 };
        busiest * (streamed.max(activations) + BLOCK_BYTES + exchange)
    }

    fn kernel(&self, code: Code, scales: usize, dtype: DType) -> Option<Kernel> {
        quantised_kernels::product(code, scales, self.tokens)?.of(dtype)
    }

    fn launch(&self, num_tokens: u64, sizes: Sizes, scales: usize) -> Option<Launch> {
        let blocks = sizes.num_tiles.div_ceil(self.tiles()).checked_mul(self.splits)?;
        let shared_bytes = self.shared_bytes(sizes.chunk_bytes, scales as u64);
        launch(blocks, num_tokens.div_ceil(self.tokens), shared_bytes)
    }

    fn chosen(&self, num_tokens: u64, layout: &TileLayout, dtype: DType) -> Option<Chosen> {
        let (scales, group_factor) = units(layout, CHUNK);
        Some(Chosen {
            kernel: self.kernel(layout.format().code, scales, dtype)?,
            launch: self.launch(num_tokens, Sizes::of(layout), scales)?,
            splits: self.splits,
            row_shift: self.row_shift,
            group_factor,
        })
    }
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_quantised(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability.0 >= 8
        && cuda.has_kernel(kernels::LINEAR_QUANTISED_INT4_1_8.bf16)?)
}

/// Returns the most tokens for which a product by the codes of a weight is faster than one by its
/// numbers, which are made for the time of the product. `has_many`: what [`has_quantised_many`] says.
/// Measured on an H200 with the layers of Qwen3-8B.
pub fn max_quantised_tokens(has_many: bool, layout: &TileLayout) -> usize {
    match layout.format().code.bits() {
        _ if !has_many => 128,
        _ if is_fine(layout) => 256,
        4 => 512,
        _ => 384,
    }
}

/// Computes the product of x `[num_tokens, in_features]` and a quantised weight into out
/// `[num_tokens, out_features]`, of f16 or bf16, for any number of tokens. With
/// [`Epilogue::SwiGlu`] the weight is gated and has twice the rows; with the others it is not.
/// `bias` `[out_features]` is added before the rounding; only with [`Epilogue::Store`]. Nothing but
/// the result is rounded to the type of x. With `is_fixed` a token's bits depend only on the token and
/// the weight.
///
/// The inputs of x are in the order of the places of the weight. The two codes of [`Code::Fp8`] that
/// are no numbers count as 480 and -480.
pub fn linear_quantised(
    context: &ComputeContext,
    x: &Tensor,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    is_fixed: bool,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let layout = weight.layout();
    check_product(x, layout, bias, epilogue, out)?;
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let sizes = Sizes::of(layout);
    let capability = cuda.device().info().compute_capability.0;
    let is_aligned = (x.data() as usize).is_multiple_of(16)
        && (out.data() as usize).is_multiple_of(4)
        && is_quantised_weight(layout)
        && capability >= 8;
    // The sums of the kernels for few and many tokens are in other orders.
    if !is_fixed && is_aligned && has_quantised_many(context)? {
        if let Some(many) = ManyDivision::choose(num_tokens as usize, layout) {
            return many.launch(cuda, x, weight, bias, epilogue, out);
        }
    }
    let few = match is_fixed {
        false => FewDivision::choose(num_tokens.into(), layout, Chip::of(cuda)),
        true => None,
    };
    let chosen = few.map(|few| few.chosen(layout, dtype)).unwrap_or_else(|| {
        let division = Division::choose(num_tokens.into(), sizes, capability >= 9, is_fixed);
        division.chosen(num_tokens.into(), layout, dtype)
    });
    let (Some(Chosen { kernel, launch, splits, row_shift, group_factor }), true) =
        (chosen, is_aligned)
    else {
        return Err(Error::internal(format!(
            "no quantised product of {num_tokens} tokens with {layout:?} in {dtype}"
        )));
    };
    let how = QuantisedLaunch { epilogue, row_shift, group_factor };
    let params = QuantisedParams {
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        ..QuantisedParams::new(weight, x, out, (num_tokens, n), &how)
    };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it reads the regions of the tiles and rows of x, and its stores
    // are bounded by num_tokens and n.
    unsafe { cuda.launch_clusters(kernel, launch, splits as u32, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear::cuda_quantised_blocks::MAX_INPUTS;
    use crate::ops::quantised::QuantFormat;

    fn layout(rows: usize, k: usize, code: Code, group_size: usize) -> TileLayout {
        let format = QuantFormat {
            code,
            group_size,
            has_zeros: false,
            scale: DType::F32,
            quantises_inputs: false,
        };
        TileLayout::new(rows, k, format, false).unwrap()
    }

    #[test]
    fn units_find_their_groups() {
        for k in [64, 200, 4104, 65_536, MAX_INPUTS] {
            for group_size in [32, 64, 96, 128, 160, 1024, 4096 + 32, 1 << 19, 1 << 20] {
                let layout = layout(16, k, Code::Int4, group_size);
                for inputs in [CHUNK, 2 * CHUNK] {
                    let (scales, factor) = units(&layout, inputs);
                    let unit_inputs = inputs / scales;
                    assert!(
                        layout.num_groups() == 1 || layout.group_size().is_multiple_of(unit_inputs)
                    );
                    for unit in 0..(layout.num_chunks() * CHUNK).div_ceil(inputs) * scales {
                        let group = (2 * unit as u64 * u64::from(factor)) >> 32;
                        assert_eq!(group as usize, unit * unit_inputs / layout.group_size());
                    }
                }
            }
        }
    }

    #[test]
    fn every_division_has_a_kernel_and_fills_the_chip() {
        for (rows, k) in [
            (6144, 4096),
            (4096, 4096),
            (24_576, 4096),
            (4096, 12_288),
            (151_936, 4096),
            (4096, 1024),
            (1024, 2048),
            (6144, 1024),
            (1024, 3072),
            (51_200, 5120),
            (5120, 25_600),
            (8, 64),
        ] {
            for code in Code::ALL {
                let layout = layout(rows, k, code, 128);
                let sizes = Sizes::of(&layout);
                assert!(is_quantised_weight(&layout));
                for num_tokens in 1..=130u64 {
                    let fixed = Division::choose(num_tokens, sizes, true, true);
                    let alone = Division::choose(1, sizes, true, true);
                    let parts = |division: Division| (division.row_shift, division.splits);
                    assert_eq!(parts(fixed), parts(alone));
                    for division in [fixed, Division::choose(num_tokens, sizes, true, false)] {
                        assert!(division.tokens >= num_tokens.min(64));
                        assert!(division.kernel(code, 1, DType::BF16).is_some());
                        assert!(division.kernel(code, 2, DType::F16).is_some());
                        let launch = division.launch(num_tokens, sizes, 2).unwrap();
                        assert!(launch.shared_bytes <= 80 << 10);
                        assert!(u64::from(launch.grid.0).is_multiple_of(division.splits));
                    }
                    let division = Division::choose(num_tokens, sizes, false, false);
                    assert_eq!(division.splits, 1);
                }
                // What the busiest multiprocessor reads is little more than its share.
                let division = Division::choose(1, sizes, true, false);
                let bytes = (rows * k * code.bits() / 8) as u64;
                let cost = division.cost(1, sizes);
                let is_large = bytes > 8 << 20;
                let share = bytes / MULTIPROCESSORS;
                assert!(
                    !is_large || cost < share * 2,
                    "{rows} x {k} {code:?}: {division:?} {cost}"
                );
            }
        }
    }
}
