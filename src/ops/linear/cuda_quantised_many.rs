//! Linear layers with quantised weights for more than 16 tokens on Hopper:
//! `csrc/ops/linear/quantised_many.cu`.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch, TensorMap,
};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{cuda, float};
use crate::ops::linear::cuda_parts::{clusters, fastest_parts, Alone, Part, Parts};
use crate::ops::linear::cuda_quantised_blocks::epilogue_number;
use crate::ops::linear::{quantised_kernels, Epilogue};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::tiles::{TileLayout, CHUNK, TILE_ROWS};
use crate::ops::quantised::Code;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct QuantisedManyParams {
        x: TensorMap,
        codes: TensorMap,
        scales: TensorMap,
        zeros: TensorMap,
        out: *mut u8,
        bias: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        num_stages: i32,
        group_pieces: i32,
        sum_pieces: i32,
        unit_shift: i32,
        token_box: i32,
        scale_type: i32,
        epilogue: i32,
        has_zeros: i32,
        first_tile: i32,
        padding: [i32; 15],
    }
}

/// Whether the chip and the build have these kernels.
pub fn has_quantised_many(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability == (9, 0)
        && cuda.has_kernel(kernels::LINEAR_QUANTISED_MANY_INT4_64_32X4.bf16)?)
}

/// Whether pieces of 32 inputs have scales of their own, which takes longer.
pub(super) fn is_fine(layout: &TileLayout) -> bool {
    layout.num_groups() > 1 && !layout.group_size().is_multiple_of(CHUNK)
}

/// The fewest tokens for which these kernels are faster than those for few.
const MIN_TOKENS: usize = 17;
/// The inputs of a stage.
const STAGE_INPUTS: usize = 2 * CHUNK;
/// The elements of a tile's codes in a stage: words of 4 bits' codes, and pairs of words of 8 bits'.
const STAGE_ELEMENTS: usize = 256;
/// The most pieces that the tensor cores sum: they truncate, which the sums of a row would show.
const MOST_SUM_PIECES: usize = 4;
/// The pieces of a group without end.
const ENDLESS: usize = 1 << 24;

/// The shapes whose pieces can also have 32 inputs.
const FINE: [(usize, usize); 3] = [(32, 4), (64, 3), (128, 2)];

/// The tiles of a block, as instantiated at the end of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    tokens: usize,
    /// The groups of four warps, each with 64 rows.
    groups: usize,
    /// How long a stage takes, in units of 10 ns; measured on an H200 with codes of 4 bits.
    stage_cost: usize,
}

const SHAPES: [Shape; 7] = {
    const fn shape(tokens: usize, groups: usize, stage_cost: usize) -> Shape {
        Shape { tokens, groups, stage_cost }
    }
    [
        shape(32, 4, 84),
        shape(32, 3, 70),
        shape(32, 2, 51),
        shape(64, 3, 93),
        shape(64, 2, 75),
        shape(96, 2, 79),
        shape(128, 2, 92),
    ]
};

/// The blocks that a cluster may have.
const SPLITS: [usize; 7] = [1, 2, 3, 4, 5, 6, 8];
/// What a wave of blocks takes beside its stages, and what the sum over a cluster takes, in the same
/// units.
const BLOCK_COST: usize = 400;
const SUM_COST: usize = 50;

impl Shape {
    fn tiles(self) -> usize {
        4 * self.groups
    }

    /// The bytes of shared memory, as the struct `Many` counts them.
    fn shared_bytes(self, layout: &TileLayout, piece_inputs: usize) -> usize {
        let units = if piece_inputs == CHUNK { 2 } else { 4 };
        let codes = self.tiles() * STAGE_INPUTS * TILE_ROWS * layout.format().code.bits() / 8;
        let zeros = (self.tiles() * 16).next_multiple_of(128);
        let stage = 2 * self.tokens * 128 + codes + units * (self.tiles() * 64 + zeros);
        let stage = stage.next_multiple_of(1024);
        let stages = ((226 << 10) / stage).min(10);
        let sums = self.tiles() * self.tokens * 64;
        (stages * stage).max(sums) + stages * 16
    }

    fn kernel(self, code: Code, piece_inputs: usize, dtype: DType) -> Option<Kernel> {
        quantised_kernels::many(code, piece_inputs, self.tokens, self.groups)?.of(dtype)
    }
}

/// The blocks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    shape: Shape,
    /// The blocks of a cluster, which share k.
    splits: usize,
}

impl Blocks {
    fn clusters(&self, num_tiles: usize) -> usize {
        num_tiles.div_ceil(self.shape.tiles())
    }

    fn token_groups(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.shape.tokens)
    }

    /// About how long so many tiles of a weight take, in units of 10 ns.
    fn cost(&self, num_tokens: usize, num_tiles: usize, num_stages: usize) -> usize {
        let all = self.clusters(num_tiles).saturating_mul(self.token_groups(num_tokens));
        let stages = num_stages.div_ceil(self.splits);
        let sum = if self.splits > 1 { SUM_COST } else { 0 };
        all.div_ceil(clusters(self.splits)) * (BLOCK_COST + sum + stages * self.shape.stage_cost)
    }
}

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ManyDivision {
    parts: Parts<Blocks>,
    /// The inputs that have one scale in a product: 64, or 32.
    piece_inputs: usize,
}

fn num_stages(layout: &TileLayout) -> usize {
    (layout.num_chunks() * CHUNK).div_ceil(STAGE_INPUTS)
}

/// Returns into how many pieces at a time the pieces of a group are divided.
fn sum_pieces(group_pieces: usize) -> usize {
    (1..=MOST_SUM_PIECES).rev().find(|&pieces| group_pieces.is_multiple_of(pieces)).unwrap_or(1)
}

impl ManyDivision {
    /// Returns the division of a product by its sizes that takes the least time, or none where these
    /// kernels are not for so few tokens. No measurement is made, so it is the same on every load.
    pub(super) fn choose(num_tokens: usize, layout: &TileLayout) -> Option<Self> {
        if num_tokens < MIN_TOKENS {
            return None;
        }
        let is_fine = is_fine(layout);
        let piece_inputs = if is_fine { CHUNK / 2 } else { CHUNK };
        let num_stages = num_stages(layout);
        let is_served = |shape: &Shape| !is_fine || FINE.contains(&(shape.tokens, shape.groups));
        let blocks = |splits: usize| {
            SHAPES.into_iter().filter(is_served).map(move |shape| Blocks { shape, splits })
        };
        let cost = |blocks: Blocks, tiles: usize| blocks.cost(num_tokens, tiles, num_stages);
        let fastest = |tiles: usize| {
            let all = SPLITS.into_iter().filter(|&splits| splits <= num_stages).flat_map(blocks);
            let all = all.map(|blocks| (cost(blocks, tiles), blocks));
            // Of those that take as long, the fewest blocks.
            all.min_by_key(|(cost, blocks)| (*cost, blocks.clusters(tiles) * blocks.splits))
        };
        let alone = blocks(1).map(|blocks| {
            let token_groups = blocks.token_groups(num_tokens);
            Alone { blocks, tiles: blocks.shape.tiles(), token_groups }
        });
        let (_, parts) = fastest_parts(layout.num_tiles(), alone, cost, fastest)?;
        Some(ManyDivision { parts, piece_inputs })
    }

    /// The pieces of a group, and log2 of the groups, or parts of them, that a stage has.
    fn groups(&self, layout: &TileLayout) -> (usize, u32) {
        if layout.num_groups() == 1 {
            return (ENDLESS, 0);
        }
        let group_size = layout.group_size();
        let unit_shift = match self.piece_inputs {
            CHUNK if group_size.is_multiple_of(STAGE_INPUTS) => 0,
            CHUNK => 1,
            _ => 2,
        };
        (group_size / self.piece_inputs, unit_shift)
    }

    /// Launches the product; [`super::linear_quantised`] has checked the operands.
    pub(super) fn launch(
        &self,
        cuda: &CudaContext,
        x: &Tensor,
        weight: &QuantisedTiles<'_>,
        bias: Option<&Tensor>,
        epilogue: Epilogue,
        out: &Tensor,
    ) -> Result<()> {
        for part in self.parts.iter().flatten() {
            self.launch_part(part, cuda, x, weight, bias, epilogue, out)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // those of `launch`, and the part
    fn launch_part(
        &self,
        part: &Part<Blocks>,
        cuda: &CudaContext,
        x: &Tensor,
        weight: &QuantisedTiles<'_>,
        bias: Option<&Tensor>,
        epilogue: Epilogue,
        out: &Tensor,
    ) -> Result<()> {
        let dtype = float("out", out)?;
        let Blocks { shape, splits } = part.blocks;
        let (layout, regions) = (weight.layout(), weight.regions());
        let [num_tokens, n] = [0, 1].map(|i| out.shape().get(i).copied().unwrap_or(0));
        let token_groups = part.blocks.token_groups(num_tokens as usize);
        let blocks = part.blocks.clusters(part.num_tiles) * splits;
        let launch = Launch {
            grid: (blocks as u32, token_groups as u32, 1),
            block: (shape.groups as u32 + 1) * 128,
            shared_bytes: shape.shared_bytes(layout, self.piece_inputs) as u32,
        };
        let code = layout.format().code;
        let kernel = shape.kernel(code, self.piece_inputs, dtype);
        let (Some(kernel), true) = (kernel, token_groups <= usize::from(u16::MAX)) else {
            return Err(Error::internal(format!(
                "no quantised product of {num_tokens} tokens with {layout:?} in {dtype}"
            )));
        };
        let (group_pieces, unit_shift) = self.groups(layout);
        // Elements outside of x are copied more slowly than others.
        let token_box = shape.tokens.min((num_tokens as usize).next_multiple_of(8));
        let (tiles, of_block) = (layout.num_tiles(), shape.tiles());
        let code_bytes = code.bits();
        let code_elements = layout.num_chunks() * STAGE_ELEMENTS / 2;
        let scale_bytes = if layout.format().scale == DType::F32 { 4 } else { 2 };
        let groups = [tiles, layout.num_groups(), TILE_ROWS];
        let group_box = [of_block, 1, TILE_ROWS];
        // SAFETY: the regions of the tiles have these sizes, as their layout says, and the caller of the
        // operator keeps them until the stream has done this.
        let (codes, scales, zeros) = unsafe {
            let code_shape = [tiles, code_elements];
            let code_box = [of_block, STAGE_ELEMENTS];
            let scales = TensorMap::packed(cuda, regions.scales, scale_bytes, groups, group_box)?;
            (
                TensorMap::packed(cuda, regions.codes, code_bytes, code_shape, code_box)?,
                scales,
                match layout.format().has_zeros {
                    true => TensorMap::packed(cuda, regions.zeros, 1, groups, group_box)?,
                    false => scales,
                },
            )
        };
        let params = QuantisedManyParams {
            x: TensorMap::new(cuda, x, &[token_box as u32, CHUNK as u32])?,
            codes,
            scales,
            zeros,
            out: out.data(),
            bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
            ldo: n,
            num_tokens: num_tokens as i32,
            n: n as i32,
            num_stages: num_stages(layout) as i32,
            group_pieces: group_pieces as i32,
            sum_pieces: sum_pieces(group_pieces) as i32,
            unit_shift: unit_shift as i32,
            token_box: token_box as i32,
            scale_type: scale_number(layout.format().scale),
            epilogue: epilogue_number(epilogue),
            has_zeros: layout.format().has_zeros.into(),
            first_tile: part.first_tile as i32,
            padding: [0; 15],
        };
        let arguments = Arguments::new().value(&params);
        // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
        // maps, and the stores are bounded by num_tokens and n.
        unsafe { cuda.launch_clusters(kernel, launch, splits as u32, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::QuantFormat;

    fn layout(rows: usize, k: usize, code: Code, group_size: usize) -> TileLayout {
        let format = QuantFormat {
            code,
            group_size,
            has_zeros: true,
            scale: DType::F16,
            quantises_inputs: false,
        };
        TileLayout::new(rows, k, format, false).unwrap()
    }

    #[test]
    fn every_product_of_many_tokens_has_a_kernel() {
        for shape in [(6144, 4096), (24_576, 4096), (4096, 12_288), (1024, 3072), (8, 64), (40, 72)]
        {
            for code in Code::ALL {
                for group_size in [32, 64, 96, 128, 1 << 20] {
                    let layout = layout(shape.0, shape.1, code, group_size);
                    assert_eq!(ManyDivision::choose(MIN_TOKENS - 1, &layout), None);
                    for num_tokens in MIN_TOKENS..300 {
                        let division = ManyDivision::choose(num_tokens, &layout).unwrap();
                        let piece = division.piece_inputs;
                        let mut end = 0;
                        for Part { blocks, first_tile, num_tiles } in
                            division.parts.iter().flatten()
                        {
                            assert!(blocks.splits <= num_stages(&layout));
                            assert!(blocks.shape.shared_bytes(&layout, piece) <= 227 << 10);
                            for dtype in [DType::F16, DType::BF16] {
                                assert!(blocks.shape.kernel(code, piece, dtype).is_some());
                            }
                            assert_eq!(*first_tile, end);
                            end += num_tiles;
                        }
                        assert_eq!(end, layout.num_tiles());
                        let (group_pieces, _) = division.groups(&layout);
                        assert!(group_pieces.is_multiple_of(sum_pieces(group_pieces)));
                        assert!(
                            layout.num_groups() == 1 || group_pieces * piece == layout.group_size()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_whole_waves_leave_over_is_a_part_of_its_own() {
        for (num_tokens, rows, k, first, rest) in [
            // Gate and up of Qwen3-8B, -4B and -14B.
            (128, 24_576, 4096, (128, 2, 1), (128, 2, 2)),
            (128, 19_456, 2560, (128, 2, 1), (128, 2, 5)),
            (32, 34_816, 5120, (32, 4, 1), (32, 2, 8)),
            // Those of the tests of the products.
            (101, 17_500, 512, (128, 2, 1), (32, 2, 4)),
            (200, 8501, 512, (128, 2, 1), (32, 2, 4)),
            (20, 34_100, 512, (32, 4, 1), (32, 2, 4)),
        ] {
            let layout = layout(rows, k, Code::Int4, 128);
            let division = ManyDivision::choose(num_tokens, &layout).unwrap();
            let shapes = division.parts.map(|part| {
                part.map(|Part { blocks: Blocks { shape, splits }, .. }| {
                    (shape.tokens, shape.groups, splits)
                })
            });
            assert_eq!(shapes, [Some(first), Some(rest)], "{num_tokens} {rows} {k}");
        }
    }

    #[test]
    fn the_division_is_the_one_that_was_fastest() {
        for (num_tokens, rows, k, chosen) in [
            (32, 6144, 4096, (32, 4, 4)),
            (32, 4096, 4096, (32, 3, 5)),
            (32, 24_576, 4096, (32, 3, 1)),
            (64, 4096, 12_288, (64, 3, 5)),
            (96, 4096, 12_288, (96, 2, 3)),
            (256, 6144, 4096, (128, 2, 1)),
            (256, 4096, 12_288, (128, 2, 2)),
            (512, 24_576, 4096, (128, 2, 1)),
        ] {
            let layout = layout(rows, k, Code::Int4, 128);
            let [Some(part), None] = ManyDivision::choose(num_tokens, &layout).unwrap().parts
            else {
                panic!("{num_tokens} {rows} {k}: two parts");
            };
            let Blocks { shape, splits } = part.blocks;
            assert_eq!((shape.tokens, shape.groups, splits), chosen, "{num_tokens} {rows} {k}");
        }
    }
}
