//! How a product of up to 16 tokens with quantised weights is divided on a GPU:
//! `csrc/ops/linear/quantised_few.cu`.

use crate::backend::cuda::{CudaContext, Kernel};
use crate::memory::DType;
use crate::ops::linear::cuda_quantised_blocks::{
    launch, units, Chosen, GROUP_BYTES, MULTIPROCESSORS, TILES, WARPS, WARPS_SHIFT,
};
use crate::ops::linear::quantised_kernels;
use crate::ops::quantised::tiles::{TileLayout, CHUNK};
use crate::ops::quantised::Code;

/// The stages of a warp's ring, and the bytes of codes that a stage has of a tile.
const STAGES: u64 = 3;
const STAGE_BYTES: usize = 1024;
const TILE_ROWS: usize = 16;
/// The most tokens of a block.
const MAX_TOKENS: u64 = 16;

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewDivision {
    num_tokens: u64,
    /// log2 of the warps of a block that have different rows; the others share k.
    row_shift: u32,
    /// The blocks of a cluster, which share k.
    splits: u64,
}

/// What a division depends on of a chip.
#[derive(Clone, Copy, Debug)]
pub struct Chip {
    /// Whether blocks can form clusters.
    pub has_clusters: bool,
    /// The most shared memory of a block.
    pub shared_memory_bytes: usize,
}

impl Chip {
    /// The chip of a device.
    pub fn of(cuda: &CudaContext) -> Self {
        let info = cuda.device().info();
        Chip {
            has_clusters: info.compute_capability.0 >= 9,
            shared_memory_bytes: info.shared_memory_bytes,
        }
    }
}

/// The inputs of a stage.
fn stage_inputs(code: Code) -> usize {
    STAGE_BYTES * 8 / code.bits() / TILE_ROWS
}

/// The stages of a tile.
fn num_stages(layout: &TileLayout) -> u64 {
    (layout.num_chunks() * CHUNK).div_ceil(stage_inputs(layout.format().code)) as u64
}

impl FewDivision {
    /// Returns the division of a product by its sizes that takes the least time, or none where the kernel is
    /// not for so many tokens or the chip has too little shared memory. No measurement is made, so it is the
    /// same on every load.
    pub fn choose(num_tokens: u64, layout: &TileLayout, chip: Chip) -> Option<Self> {
        if num_tokens > MAX_TOKENS {
            return None;
        }
        // Clusters of four do not fill the chip, and their sums take longer than they save.
        let splits: &[u64] = if chip.has_clusters { &[1, 2] } else { &[1] };
        let all = (0..=WARPS_SHIFT).flat_map(|row_shift| {
            splits.iter().map(move |&splits| FewDivision { num_tokens, row_shift, splits })
        });
        let best = all.min_by_key(|division| division.cost(layout))?;
        (best.shared_bytes(layout) <= chip.shared_memory_bytes as u64).then_some(best)
    }

    /// The tokens of a block, as instantiated at the end of the source.
    fn tokens(&self) -> u64 {
        if self.num_tokens <= 8 {
            8
        } else {
            MAX_TOKENS
        }
    }

    fn blocks(&self, layout: &TileLayout) -> u64 {
        (layout.num_tiles() as u64).div_ceil(TILES << self.row_shift) * self.splits
    }

    /// About how long the product takes, in hundredths of the time of a stage of a multiprocessor with one
    /// block. The numbers are fitted to the shapes of Qwen3-8B and 0.6B on an H200, and chose what was the
    /// fastest or within 6 % of it.
    fn cost(&self, layout: &TileLayout) -> u64 {
        let (begin, exchange, slot) = (340, 270, 100);
        // Registers leave room for one block with 16 tokens and 4 bits, and else for two.
        let is_alone = self.tokens() > 8 && layout.format().code == Code::Int4;
        let slots = MULTIPROCESSORS * if is_alone { 1 } else { 2 };
        let blocks = self.blocks(layout);
        let stages = num_stages(layout).div_ceil((WARPS >> self.row_shift) * self.splits);
        // Two blocks of a multiprocessor slow each other down.
        let stage = if blocks > MULTIPROCESSORS { slot * 13 / 10 } else { slot };
        let exchange = if self.splits > 1 { exchange } else { 0 };
        blocks.div_ceil(slots) * (begin + stages * stage) + exchange
    }

    /// The bytes of shared memory: the rings of all warps, which take the sums at the end.
    fn shared_bytes(&self, layout: &TileLayout) -> u64 {
        let inputs = stage_inputs(layout.format().code);
        let (scales, _) = units(layout, inputs);
        let tile = STAGE_BYTES as u64 + scales as u64 * GROUP_BYTES;
        let ring = STAGES * (TILES * tile + self.num_tokens * inputs as u64 * 2);
        let sums = TILES * (self.tokens() / 8) * 512;
        WARPS * ring.max(sums)
    }

    fn kernel(&self, code: Code, scales: usize, dtype: DType) -> Option<Kernel> {
        quantised_kernels::few(code, scales, self.tokens())?.of(dtype)
    }

    /// The kernel, its launch, and what it is told.
    pub fn chosen(&self, layout: &TileLayout, dtype: DType) -> Option<Chosen> {
        let code = layout.format().code;
        let (scales, group_factor) = units(layout, stage_inputs(code));
        Some(Chosen {
            kernel: self.kernel(code, scales, dtype)?,
            launch: launch(self.blocks(layout), 1, self.shared_bytes(layout))?,
            splits: self.splits,
            row_shift: self.row_shift,
            group_factor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::QuantFormat;

    fn division(
        code: Code,
        num_tokens: u64,
        (rows, k): (usize, usize),
        chip: Chip,
    ) -> (TileLayout, Option<FewDivision>) {
        let format = QuantFormat {
            code,
            group_size: 128,
            has_zeros: true,
            scale: DType::F16,
            quantises_inputs: false,
        };
        let layout = TileLayout::new(rows, k, format, false).unwrap();
        let division = FewDivision::choose(num_tokens, &layout, chip);
        (layout, division)
    }

    const H200: Chip = Chip { has_clusters: true, shared_memory_bytes: 227 << 10 };
    const CONSUMER: Chip = Chip { has_clusters: false, shared_memory_bytes: 99 << 10 };

    #[test]
    fn every_product_of_few_tokens_has_a_kernel() {
        for shape in [(6144, 4096), (24_576, 4096), (4096, 12_288), (1024, 3072), (8, 64), (40, 72)]
        {
            for code in Code::ALL {
                for num_tokens in 1..=16 {
                    for chip in [H200, CONSUMER] {
                        let (layout, division) = division(code, num_tokens, shape, chip);
                        let Some(division) = division else {
                            assert!(!chip.has_clusters && num_tokens >= 8);
                            continue;
                        };
                        assert!(chip.has_clusters || division.splits == 1);
                        let chosen = division.chosen(&layout, DType::BF16).unwrap();
                        assert!(chosen.launch.shared_bytes as usize <= chip.shared_memory_bytes);
                        assert!(u64::from(chosen.launch.grid.0).is_multiple_of(chosen.splits));
                    }
                }
                assert!(division(code, 17, shape, H200).1.is_none());
            }
        }
    }

    /// The fastest when all divisions were measured, or one within 6 % of it.
    #[test]
    fn divisions_are_those_that_were_measured() {
        for (code, num_tokens, shape, best) in [
            (Code::Int4, 1, (4096, 4096), (0, 1)),
            (Code::Int4, 1, (6144, 4096), (0, 1)),
            (Code::Int4, 8, (4096, 12_288), (0, 2)),
            (Code::Int4, 16, (4096, 12_288), (0, 1)),
            (Code::Int4, 16, (6144, 4096), (1, 1)),
            (Code::Int4, 16, (24_576, 4096), (3, 1)),
            (Code::Fp8, 1, (24_576, 4096), (0, 1)),
            (Code::Fp8, 8, (4096, 12_288), (0, 2)),
            (Code::Fp8, 16, (4096, 12_288), (0, 2)),
            (Code::Fp8, 16, (4096, 4096), (0, 2)),
            (Code::Fp8, 16, (6144, 4096), (0, 1)),
            (Code::Int4, 1, (6144, 1024), (0, 1)),
            (Code::Int4, 1, (1024, 3072), (0, 1)),
        ] {
            let (_, division) = division(code, num_tokens, shape, H200);
            let division = division.unwrap();
            let found = (division.row_shift, division.splits);
            assert_eq!(found, best, "{code:?}, {num_tokens} tokens, {shape:?}");
        }
    }
}
