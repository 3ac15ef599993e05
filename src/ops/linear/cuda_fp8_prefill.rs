//! Linear layers whose weights and activations are both FP8, for prompts on Hopper:
//! `csrc/ops/linear/fp8_prefill.cu`.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, TensorMap,
};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::float;
use crate::ops::linear::cuda_fp8_many::{
    memory_cost, together, OperandMaps, GROUP_TOKENS, KERNEL_COST,
};
use crate::ops::linear::cuda_parts::MULTIPROCESSORS;
use crate::ops::linear::cuda_quantised_blocks::{
    epilogue_number, fp8_group_stages as group_stages, fp8_stages as num_stages,
};
use crate::ops::linear::Epilogue;
use crate::ops::quantised::activations::INPUT_GROUP;
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::cuda_activations::QuantisedInputs;
use crate::ops::quantised::tiles::{TileLayout, TILE_ROWS};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct Fp8PrefillParams {
        x: TensorMap,
        x_scales: TensorMap,
        codes: TensorMap,
        scales: TensorMap,
        out: *mut u8,
        bias: *mut u8,
        row_scales: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        num_tiles: i32,
        num_stages: i32,
        num_groups: i32,
        group_stages: i32,
        scale_type: i32,
        epilogue: i32,
        row_tiles: i32,
        token_tiles: i32,
        token_group: i32,
        padding: i32,
    }
}

/// The tokens of a group of four warps.
const GROUP_ROWS: usize = 64;

/// The tile of a block, as instantiated at the end of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// The rows of the weight.
    rows: usize,
    /// The groups of four warps, each with 64 tokens.
    groups: usize,
    /// How long a stage takes, and what a tile takes beside its stages, in units of 10 ns: fitted to the
    /// shapes of Qwen3-8B and 192 to 4,096 tokens on an H200.
    stage_cost: usize,
    tile_cost: usize,
}

const SHAPES: [Shape; 4] = {
    const fn shape(rows: usize, groups: usize, stage_cost: usize, tile_cost: usize) -> Shape {
        Shape { rows, groups, stage_cost, tile_cost }
    }
    [shape(128, 2, 53, 190), shape(128, 3, 65, 230), shape(192, 2, 71, 280), shape(256, 2, 94, 420)]
};

impl Shape {
    fn tokens(self) -> usize {
        self.groups * GROUP_ROWS
    }

    fn tiles(self) -> usize {
        self.rows / TILE_ROWS
    }

    /// The bytes of shared memory, as the struct `Fp8Prefill` counts them.
    fn shared_bytes(self) -> usize {
        let operands = (self.tokens() + self.rows) * INPUT_GROUP;
        let scales = self.tiles() * TILE_ROWS * 4 + self.tokens() * 4 + self.rows / 64 * 8 + 4;
        let stage = (operands + scales).next_multiple_of(1024);
        let stages = (226 << 10) / stage;
        stages * (stage + 24)
    }

    fn kernel(self, dtype: DType) -> Option<Kernel> {
        let kernel = match (self.rows, self.groups) {
            (128, 2) => kernels::LINEAR_FP8_PREFILL_128X2,
            (128, 3) => kernels::LINEAR_FP8_PREFILL_128X3,
            (192, 2) => kernels::LINEAR_FP8_PREFILL_192X2,
            (256, 2) => kernels::LINEAR_FP8_PREFILL_256X2,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// What it takes beside that to add up the sums of a cluster.
const SPLIT_COST: usize = 250;

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fp8PrefillDivision {
    shape: Shape,
    /// The blocks of a cluster, which divide the inputs of one tile: 1 or 2.
    splits: usize,
}

impl Fp8PrefillDivision {
    /// Returns the division of a product by its sizes that takes the least time. No measurement is
    /// made, so it is the same on every load.
    pub(super) fn choose(num_tokens: usize, layout: &TileLayout) -> Option<Self> {
        // A cluster has one tile, and a block of it finishes the sums of one of two groups.
        let can_split = |shape: Shape, units: usize| {
            shape.groups == 2 && 2 * units <= MULTIPROCESSORS && num_stages(layout) > 1
        };
        let all = SHAPES
            .into_iter()
            .flat_map(|shape| [1, 2].map(|splits| Fp8PrefillDivision { shape, splits }));
        all.filter(|division| {
            division.splits == 1 || can_split(division.shape, division.units(num_tokens, layout))
        })
        .min_by_key(|division| division.cost(num_tokens, layout))
    }

    fn units(self, num_tokens: usize, layout: &TileLayout) -> usize {
        let (tiles, tokens) = (self.shape.tiles(), self.shape.tokens());
        layout.num_tiles().div_ceil(tiles).saturating_mul(num_tokens.div_ceil(tokens))
    }

    /// About how long the product takes, in units of 10 ns.
    pub(super) fn cost(self, num_tokens: usize, layout: &TileLayout) -> usize {
        let Shape { stage_cost, tile_cost, .. } = self.shape;
        let waves = self.units(num_tokens, layout).div_ceil(MULTIPROCESSORS);
        let stages = num_stages(layout).div_ceil(self.splits);
        let sum = if self.splits > 1 { SPLIT_COST } else { 0 };
        let work = waves.saturating_mul(tile_cost + sum + stages * stage_cost);
        KERNEL_COST + together(work, memory_cost(layout))
    }

    /// Launches the product; the operator ([`cuda_fp8`](super::cuda_fp8)) has checked the operands.
    pub(super) fn launch(
        self,
        cuda: &CudaContext,
        x: &QuantisedInputs,
        weight: &QuantisedTiles<'_>,
        bias: Option<&Tensor>,
        epilogue: Epilogue,
        out: &Tensor,
    ) -> Result<()> {
        let dtype = float("out", out)?;
        let layout = weight.layout();
        let [num_tokens, n] = [0, 1].map(|i| out.shape().get(i).copied().unwrap_or(0));
        let (shape, splits) = (self.shape, self.splits);
        let (tokens, tiles) = (shape.tokens(), shape.tiles());
        let units = self.units(num_tokens as usize, layout);
        let (Some(kernel), Ok(_)) = (shape.kernel(dtype), i32::try_from(units)) else {
            return Err(Error::internal(format!(
                "no FP8 product of {num_tokens} tokens with {layout:?} in {dtype}"
            )));
        };
        let launch = Launch {
            grid: ((units * splits).min(MULTIPROCESSORS) as u32, 1, 1),
            block: (shape.groups as u32 + 1) * 128,
            shared_bytes: shape.shared_bytes() as u32,
        };
        let maps = OperandMaps::new(cuda, x, weight, (GROUP_ROWS, tokens), tiles)?;
        let params = Fp8PrefillParams {
            x: maps.x,
            x_scales: maps.x_scales,
            codes: maps.codes,
            scales: maps.scales,
            out: out.data(),
            bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
            row_scales: weight.regions().scales,
            ldo: n,
            num_tokens: num_tokens as i32,
            n: n as i32,
            num_tiles: layout.num_tiles() as i32,
            num_stages: num_stages(layout) as i32,
            num_groups: layout.num_groups() as i32,
            group_stages: group_stages(layout) as i32,
            scale_type: scale_number(layout.format().scale),
            epilogue: epilogue_number(epilogue),
            row_tiles: layout.num_tiles().div_ceil(tiles) as i32,
            token_tiles: (num_tokens as usize).div_ceil(tokens) as i32,
            token_group: GROUP_TOKENS.div_ceil(tokens) as i32,
            padding: 0,
        };
        let arguments = Arguments::new().value(&params);
        // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
        // maps, the scales of rows are those of the tiles, and the stores are bounded by num_tokens and n.
        unsafe { cuda.launch_clusters(kernel, launch, splits as u32, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::{Code, QuantFormat};

    /// The fastest when all divisions were measured, or one within 3 % of it.
    #[test]
    fn the_division_is_one_that_was_fast() {
        let format = QuantFormat {
            code: Code::Fp8,
            group_size: 128,
            has_zeros: false,
            scale: DType::BF16,
            quantises_inputs: true,
        };
        for (num_tokens, rows, k, chosen) in [
            (256, 6144, 4096, (192, 2, 2)),
            (256, 4096, 12_288, (128, 2, 2)),
            (256, 24_576, 4096, (192, 2, 1)),
            (384, 4096, 12_288, (192, 2, 2)),
            (512, 6144, 4096, (192, 2, 1)),
            (512, 4096, 4096, (128, 2, 1)),
            (512, 24_576, 4096, (192, 2, 1)),
            (512, 4096, 12_288, (256, 2, 2)),
            (768, 4096, 12_288, (128, 3, 1)),
            (1024, 4096, 12_288, (256, 2, 1)),
            (2048, 6144, 4096, (128, 3, 1)),
            (2048, 4096, 4096, (256, 2, 1)),
            (2048, 24_576, 4096, (128, 3, 1)),
            (2048, 4096, 12_288, (256, 2, 1)),
        ] {
            let layout = TileLayout::new(rows, k, format, false).unwrap();
            let Fp8PrefillDivision { shape, splits } =
                Fp8PrefillDivision::choose(num_tokens, &layout).unwrap();
            assert_eq!((shape.rows, shape.groups, splits), chosen, "{num_tokens} {rows} {k}");
            assert!(shape.shared_bytes() <= 227 << 10);
            for dtype in [DType::F16, DType::BF16] {
                assert!(shape.kernel(dtype).is_some());
            }
        }
    }
}
