//! Linear layers whose weights and activations are both FP8, for more than a few tokens on Hopper:
//! `csrc/ops/linear/fp8_many.cu`; [`cuda_fp8_prefill`](super::cuda_fp8_prefill) is for prompts.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, TensorMap,
};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{cuda, float};
use crate::ops::linear::cuda_parts::{clusters, MULTIPROCESSORS};
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
    pub(in crate::ops) struct Fp8ManyParams {
        x: TensorMap,
        x_scales: TensorMap,
        codes: TensorMap,
        scales: TensorMap,
        out: *mut u8,
        bias: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        num_stages: i32,
        group_stages: i32,
        token_box: i32,
        scale_type: i32,
        epilogue: i32,
        row_tiles: i32,
        token_tiles: i32,
        token_group: i32,
    }
}

/// Whether the chip and the build have these kernels.
pub(super) fn has_fp8_many(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability == (9, 0)
        && cuda.has_kernel(kernels::LINEAR_FP8_MANY_32X2.bf16)?)
}

/// The elements of a tile's codes in a stage: pairs of words.
const STAGE_ELEMENTS: usize = 256;
/// So many tokens are computed before the next rows: their x stays in the L2.
pub(super) const GROUP_TOKENS: usize = 2048;

/// The tiles of a block, as instantiated at the end of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    tokens: usize,
    /// The groups of four warps, each with 64 rows.
    groups: usize,
    /// How long a stage takes, in units of 10 ns; measured on an H200.
    stage_cost: usize,
}

const SHAPES: [Shape; 8] = {
    const fn shape(tokens: usize, groups: usize, stage_cost: usize) -> Shape {
        Shape { tokens, groups, stage_cost }
    }
    [
        shape(32, 2, 26),
        shape(32, 3, 33),
        shape(64, 2, 38),
        shape(64, 3, 50),
        shape(96, 2, 48),
        shape(96, 3, 66),
        shape(128, 2, 58),
        shape(128, 3, 82),
    ]
};

/// The most blocks that a cluster may have.
const MAX_SPLITS: usize = 6;
/// What a kernel takes beside its tiles, and what a tile takes beside its stages, in the same units.
pub(super) const KERNEL_COST: usize = 180;
pub(super) const TILE_COST: usize = 220;
/// What a stage takes longer where the same weights are read for other tokens too.
const REREAD_COST: usize = 8;
/// What a cluster takes to follow another one, which blocks by themselves do not.
const AGAIN_COST: usize = 510;
/// The bytes of a weight that the memory gives in a unit of time, and what it takes until it does.
const MEMORY_BYTES: usize = 42_000;
const MEMORY_COST: usize = 70;

/// The most blocks of a cluster, unless they leave most of the chip idle.
const USUAL_SPLITS: usize = 3;

/// How long two things take that a chip does at the same time: hardly more than the longer one.
pub(super) fn together(work: usize, memory: usize) -> usize {
    work.max(memory) + work.min(memory) / 16
}

/// The least time of a product, in the same units: that of reading its weight.
pub(super) fn memory_cost(layout: &TileLayout) -> usize {
    layout.len_bytes() / MEMORY_BYTES + MEMORY_COST
}

impl Shape {
    fn tiles(self) -> usize {
        4 * self.groups
    }

    /// The bytes of shared memory, as the struct `Fp8Many` counts them.
    fn shared_bytes(self) -> usize {
        let stage = self.tokens * (INPUT_GROUP + 4) + self.tiles() * (TILE_ROWS * INPUT_GROUP + 64);
        let stage = stage.next_multiple_of(1024);
        let stages = ((226 << 10) / stage).min(10);
        let sums = self.tiles() * self.tokens * 64;
        (stages * stage).max(sums) + stages * 16
    }

    fn kernel(self, dtype: DType) -> Option<Kernel> {
        let kernel = match (self.tokens, self.groups) {
            (32, 2) => kernels::LINEAR_FP8_MANY_32X2,
            (32, 3) => kernels::LINEAR_FP8_MANY_32X3,
            (64, 2) => kernels::LINEAR_FP8_MANY_64X2,
            (64, 3) => kernels::LINEAR_FP8_MANY_64X3,
            (96, 2) => kernels::LINEAR_FP8_MANY_96X2,
            (96, 3) => kernels::LINEAR_FP8_MANY_96X3,
            (128, 2) => kernels::LINEAR_FP8_MANY_128X2,
            (128, 3) => kernels::LINEAR_FP8_MANY_128X3,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fp8ManyDivision {
    shape: Shape,
    /// The blocks of a cluster, which share the inputs.
    splits: usize,
}

impl Fp8ManyDivision {
    /// Returns the division of a product by its sizes that takes the least time. No measurement is
    /// made, so it is the same on every load.
    pub(super) fn choose(num_tokens: usize, layout: &TileLayout) -> Option<Self> {
        let most = MAX_SPLITS.min(num_stages(layout));
        let all = (1..=most)
            .flat_map(|splits| SHAPES.map(move |shape| Fp8ManyDivision { shape, splits }));
        // More than three blocks of a cluster are for products with few rows.
        let is_few = |division: &Fp8ManyDivision| {
            division.units(num_tokens, layout) * USUAL_SPLITS < MULTIPROCESSORS / 2
        };
        all.filter(|division| division.splits <= USUAL_SPLITS || is_few(division))
            .min_by_key(|division| (division.cost(num_tokens, layout), division.splits))
    }

    fn units(&self, num_tokens: usize, layout: &TileLayout) -> usize {
        layout.num_tiles().div_ceil(self.shape.tiles()) * num_tokens.div_ceil(self.shape.tokens)
    }

    /// About how long the product takes, in units of 10 ns.
    pub(super) fn cost(&self, num_tokens: usize, layout: &TileLayout) -> usize {
        let Shape { tokens, stage_cost, .. } = self.shape;
        let waves = self.units(num_tokens, layout).div_ceil(clusters(self.splits));
        let stages = num_stages(layout).div_ceil(self.splits);
        // The sums of a cluster pass through shared memory, and blocks by themselves stay for several tiles,
        // where clusters begin anew.
        let (sum, again) = if self.splits > 1 { (50 + 2 * tokens, AGAIN_COST) } else { (0, 0) };
        let stage = stage_cost + if num_tokens > tokens { REREAD_COST } else { 0 };
        let work = waves.saturating_mul(TILE_COST + sum + stages * stage);
        KERNEL_COST + together(work + waves.saturating_sub(1) * again, memory_cost(layout))
    }

    /// Launches the product; the operator ([`cuda_fp8`](super::cuda_fp8)) has checked the operands.
    pub(super) fn launch(
        &self,
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
        let Shape { tokens, groups, .. } = self.shape;
        let units = self.units(num_tokens as usize, layout);
        let blocks = match self.splits {
            1 => units.min(MULTIPROCESSORS),
            splits => units.saturating_mul(splits),
        };
        let (Some(kernel), Ok(_), Ok(blocks)) =
            (self.shape.kernel(dtype), i32::try_from(units), i32::try_from(blocks))
        else {
            return Err(Error::internal(format!(
                "no FP8 product of {num_tokens} tokens with {layout:?} in {dtype}"
            )));
        };
        let launch = Launch {
            grid: (blocks as u32, 1, 1),
            block: (groups as u32 + 1) * 128,
            shared_bytes: self.shape.shared_bytes() as u32,
        };
        // Elements outside of x are copied more slowly than others.
        let token_box = tokens.min((num_tokens as usize).next_multiple_of(8));
        let (tiles, of_block) = (layout.num_tiles(), self.shape.tiles());
        let maps = OperandMaps::new(cuda, x, weight, (token_box, token_box), of_block)?;
        let params = Fp8ManyParams {
            x: maps.x,
            x_scales: maps.x_scales,
            codes: maps.codes,
            scales: maps.scales,
            out: out.data(),
            bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
            ldo: n,
            num_tokens: num_tokens as i32,
            n: n as i32,
            num_stages: num_stages(layout) as i32,
            group_stages: group_stages(layout) as i32,
            token_box: token_box as i32,
            scale_type: scale_number(layout.format().scale),
            epilogue: epilogue_number(epilogue),
            row_tiles: tiles.div_ceil(of_block) as i32,
            token_tiles: (num_tokens as usize).div_ceil(tokens) as i32,
            token_group: GROUP_TOKENS.div_ceil(tokens) as i32,
        };
        let arguments = Arguments::new().value(&params);
        // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
        // maps, and the stores are bounded by num_tokens and n.
        unsafe { cuda.launch_clusters(kernel, launch, self.splits as u32, arguments) }
    }
}

/// How the copy engine finds the operands of a product.
pub(super) struct OperandMaps {
    pub x: TensorMap,
    pub x_scales: TensorMap,
    pub codes: TensorMap,
    pub scales: TensorMap,
}

impl OperandMaps {
    /// The maps whose boxes have so many tokens of x and of its scales, and tiles of W, each of a stage.
    /// Those who launch what reads them keep both operands until the stream has done it.
    pub fn new(
        cuda: &CudaContext,
        x: &QuantisedInputs,
        weight: &QuantisedTiles<'_>,
        (x_box, scale_box): (usize, usize),
        tiles: usize,
    ) -> Result<Self> {
        let (layout, regions) = (weight.layout(), weight.regions());
        let scale_bytes = if layout.format().scale == DType::F32 { 4 } else { 2 };
        let x_shape = [x.num_rows(), x.num_groups() * INPUT_GROUP];
        let x_scale_shape = [x.num_groups(), x.pitch()];
        let code_shape = [layout.num_tiles(), layout.num_chunks() * STAGE_ELEMENTS / 2];
        let scale_shape = [layout.num_tiles(), layout.num_groups(), TILE_ROWS];
        let scale_boxes = [tiles, 1, TILE_ROWS];
        // SAFETY: the regions of the tiles have these sizes, as their layout says, and so have the codes and
        // the scales of x; the caller of the operator keeps both until the stream has done this.
        unsafe {
            Ok(OperandMaps {
                x: TensorMap::swizzled_bytes(cuda, x.codes(), x_shape, x_box)?,
                x_scales: TensorMap::packed(cuda, x.scales(), 4, x_scale_shape, [1, scale_box])?,
                codes: TensorMap::packed(
                    cuda,
                    regions.codes,
                    8,
                    code_shape,
                    [tiles, STAGE_ELEMENTS],
                )?,
                scales: TensorMap::packed(
                    cuda,
                    regions.scales,
                    scale_bytes,
                    scale_shape,
                    scale_boxes,
                )?,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::{Code, QuantFormat};

    fn layout(rows: usize, k: usize) -> TileLayout {
        let format = QuantFormat {
            code: Code::Fp8,
            group_size: 128,
            has_zeros: false,
            scale: DType::BF16,
            quantises_inputs: true,
        };
        TileLayout::new(rows, k, format, false).unwrap()
    }

    #[test]
    fn every_product_of_many_tokens_has_a_kernel() {
        for (rows, k) in
            [(6144, 4096), (24_576, 4096), (4096, 12_288), (1024, 3072), (8, 64), (40, 72)]
        {
            let layout = layout(rows, k);
            for num_tokens in (1..300).chain([2048, 8192]) {
                let division = Fp8ManyDivision::choose(num_tokens, &layout).unwrap();
                assert!(division.splits <= num_stages(&layout));
                assert!(division.shape.shared_bytes() <= 227 << 10);
                for dtype in [DType::F16, DType::BF16] {
                    assert!(division.shape.kernel(dtype).is_some());
                }
            }
        }
    }

    /// The fastest when all divisions were measured, or one within 6 % of it.
    #[test]
    fn the_division_is_one_that_was_fast() {
        for (num_tokens, rows, k, chosen) in [
            (32, 6144, 4096, (32, 3, 3)),
            (32, 4096, 4096, (32, 2, 3)),
            (32, 24_576, 4096, (32, 3, 1)),
            (32, 4096, 12_288, (32, 2, 3)),
            (64, 24_576, 4096, (64, 3, 1)),
            (64, 4096, 12_288, (64, 2, 3)),
            (96, 24_576, 4096, (96, 3, 1)),
            (96, 4096, 12_288, (96, 2, 3)),
            (128, 4096, 4096, (64, 2, 2)),
            (128, 6144, 4096, (64, 3, 2)),
            (128, 4096, 12_288, (128, 2, 3)),
            (256, 4096, 12_288, (128, 2, 2)),
        ] {
            let layout = layout(rows, k);
            let Fp8ManyDivision { shape, splits } =
                Fp8ManyDivision::choose(num_tokens, &layout).unwrap();
            assert_eq!((shape.tokens, shape.groups, splits), chosen, "{num_tokens} {rows} {k}");
        }
    }
}
