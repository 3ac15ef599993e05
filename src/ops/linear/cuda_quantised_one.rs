//! Products of one token, normalised by the product or not, with weights of 4 or 8 bits on Hopper:
//! `csrc/ops/linear/quantised_one.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::cuda_quantised_blocks::{
    check_product, epilogue_number, is_quantised_weight, launch, units, MULTIPROCESSORS, WARPS,
};
use crate::ops::linear::cuda_quantised_few::Chip;
use crate::ops::linear::{quantised_kernels, Epilogue};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::tiles::{TileLayout, CHUNK, TILE_ROWS};
use crate::ops::quantised::Code;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct QuantisedOneParams {
        x: *mut u8,
        norm_weight: *mut u8,
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
        num_slots: i32,
        slot_stages: i32,
        is_group_a_unit: i32,
        eps: f32,
    }
}

/// The inputs of a stage.
const STAGE_INPUTS: usize = 2 * CHUNK;
/// The most bytes of codes of a slot of a warp's ring.
const SLOT_BYTES: usize = 4 << 10;
/// The bytes of codes of all rings of a block that has a multiprocessor for itself, and of one of two.
const RING_BYTES: [usize; 2] = [64 << 10, 32 << 10];
/// The shared memory that the chip takes of a block, and that the kernel has beside what it is launched
/// with: the sums of the tiles under way, and of the squares.
const RESERVED_BYTES: usize = (1 << 10) + WARPS as usize * (WARPS as usize * 256 + 4);

/// How a product is divided, and what its blocks have in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    blocks: u64,
    /// The blocks of a cluster, which share the inputs.
    splits: u64,
    num_slots: usize,
    slot_stages: usize,
}

/// The scales of a stage of a row, and by what the units of the kernel are multiplied to find their groups.
fn stage_units(layout: &TileLayout) -> (usize, u32) {
    units(layout, STAGE_INPUTS)
}

fn stage_bytes(code: Code) -> usize {
    STAGE_INPUTS * TILE_ROWS * code.bits() / 8
}

/// The stages of a tile.
fn num_stages(layout: &TileLayout) -> usize {
    (layout.num_chunks() * CHUNK).div_ceil(STAGE_INPUTS)
}

impl Division {
    /// Returns the division of a product by its sizes that takes the least time, or none where the chip
    /// has too little shared memory. No measurement is made, so it is the same on every load.
    fn choose(layout: &TileLayout, chip: Chip) -> Option<Self> {
        let tiles = layout.num_tiles() as u64;
        // Two blocks of a cluster share the inputs where half of the chip would have nothing to do.
        let splits = if 2 * tiles <= MULTIPROCESSORS { 2 } else { 1 };
        let stages = (num_stages(layout) as u64).div_ceil(WARPS * splits);
        let slot_stages = (SLOT_BYTES / stage_bytes(layout.format().code)).min(stages as usize);
        // About how long the product takes with one block on a multiprocessor and with two, in units of
        // 10 ns, fitted to the shapes of Qwen3-4B, -8B and -14B in 4 bits on an H200.
        let cost = |resident: u64| {
            let (begin, stage) = if resident == 1 { (40, 43) } else { (247, 55) };
            begin + tiles.div_ceil(MULTIPROCESSORS * resident) * stages * stage
        };
        let order = if splits == 1 && cost(2) < cost(1) { [2, 1] } else { [1, 2] };
        order.into_iter().find_map(|resident| {
            let ring = WARPS as usize * slot_stages * stage_bytes(layout.format().code);
            let division = Division {
                blocks: tiles.min(MULTIPROCESSORS * resident as u64 / splits) * splits,
                splits,
                num_slots: (RING_BYTES[resident - 1] / ring).max(2),
                slot_stages,
            };
            let room = (chip.shared_memory_bytes / resident).saturating_sub(RESERVED_BYTES);
            (division.shared_bytes(layout) <= room).then_some(division)
        })
    }

    /// The bytes of shared memory that a block is launched with.
    fn shared_bytes(&self, layout: &TileLayout) -> usize {
        let (format, (scales, _)) = (layout.format(), stage_units(layout));
        let group = TILE_ROWS * (format.scale.size_bytes() + usize::from(format.has_zeros));
        let slot = self.slot_stages * (stage_bytes(format.code) + scales * group);
        let barriers = (WARPS as usize * self.num_slots * 8).next_multiple_of(16);
        let inputs = num_stages(layout) * (STAGE_INPUTS * 2 + scales * 8);
        barriers + WARPS as usize * self.num_slots * slot + inputs
    }

    fn launch(&self, layout: &TileLayout) -> Option<Launch> {
        launch(self.blocks, 1, self.shared_bytes(layout) as u64)
    }
}

fn kernel(layout: &TileLayout, dtype: DType) -> Option<Kernel> {
    let (format, (scales, _)) = (layout.format(), stage_units(layout));
    // Where activations become FP8, another kernel is faster, and codes are in another order.
    if format.has_fp8_inputs() {
        return None;
    }
    quantised_kernels::one(format.code, scales)?.of(dtype)
}

/// Whether the kernel serves products of one token with a weight.
pub fn has_quantised_one(context: &ComputeContext, layout: &TileLayout) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(is_quantised_weight(layout)
        && kernel(layout, DType::BF16).is_some()
        && Division::choose(layout, Chip::of(cuda)).is_some()
        && cuda.has_kernel(kernels::LINEAR_QUANTISED_ONE_INT4_1.bf16)?)
}

/// Computes the product of x `[1, in_features]` and a quantised weight into out `[1, out_features]`, of
/// f16 or bf16, for what [`has_quantised_one`] says. With [`Epilogue::SwiGlu`] the weight is gated and
/// has twice the rows; with the others it is not. `bias` `[out_features]` is added before the rounding;
/// only with [`Epilogue::Store`].
///
/// With `norm`, which is the weight `[in_features]` of an RMSNorm and what is added to the mean of the
/// squares, x is first normalised, as
/// [`rms_norm_rounded`](crate::ops::rms_norm::cuda_rounded::rms_norm_rounded) does.
///
/// For weights of integers x is rounded to integers of 15 bits with a power of two for 128 inputs, so by at
/// most 2^-14 of the largest of these; for weights of floats to numbers of f16 with such a power, which keep
/// all bits of bf16 down to 2^-30 of the largest. Nothing else but the result is rounded.
pub fn linear_quantised_one(
    context: &ComputeContext,
    x: &Tensor,
    norm: Option<(&Tensor, f32)>,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    check_product(x, weight.layout(), bias, epilogue, out)?;
    let (layout, k) = (weight.layout(), weight.layout().in_features());
    if let Some((weight, _)) = norm {
        check("norm_weight", weight, out.element(), &[k as i64])?;
    }
    let norm_weight = norm.map_or(std::ptr::null_mut(), |(weight, _)| weight.data());
    let is_aligned = (x.data() as usize | norm_weight as usize).is_multiple_of(16)
        && (out.data() as usize).is_multiple_of(4);
    if num_tokens != 1 || !is_aligned {
        return Err(Error::internal(format!(
            "a quantised product of one token for {num_tokens}, aligned: {is_aligned}"
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let cuda: &CudaContext = cuda(context)?;
    let (scales, group_factor) = stage_units(layout);
    let chosen = Division::choose(layout, Chip::of(cuda)).and_then(|division| {
        let kernel = kernel(layout, dtype)?;
        Some((division, kernel, division.launch(layout)?))
    });
    let Some((division, kernel, launch)) = chosen else {
        return Err(Error::internal(format!("no product of one token with {layout:?} in {dtype}")));
    };
    let regions = weight.regions();
    let params = QuantisedOneParams {
        x: x.data(),
        norm_weight,
        codes: regions.codes,
        scales: regions.scales,
        zeros: regions.zeros,
        out: out.data(),
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        n,
        k: k as i32,
        num_tiles: layout.num_tiles() as i32,
        num_chunks: layout.num_chunks() as i32,
        num_groups: layout.num_groups() as i32,
        group_factor,
        scale_type: scale_number(layout.format().scale),
        epilogue: epilogue_number(epilogue),
        num_slots: division.num_slots as i32,
        slot_stages: division.slot_stages as i32,
        is_group_a_unit: i32::from(layout.group_size() * scales == STAGE_INPUTS),
        eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it reads the regions of the tiles, x and the weight of the norm,
    // and its stores are bounded by n.
    unsafe { cuda.launch_clusters(kernel, launch, division.splits as u32, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::QuantFormat;

    #[test]
    fn every_product_of_one_token_has_a_kernel() {
        let chip = Chip { has_clusters: true, shared_memory_bytes: 227 << 10 };
        for (rows, k) in [
            (6144, 4096),
            (24_576, 4096),
            (4096, 12_288),
            (5120, 25_600),
            (8192, 49_152),
            (151_936, 4096),
            (1024, 3072),
            (8, 64),
            (40, 72),
        ] {
            for code in [Code::Int4, Code::Int8] {
                for (group_size, scale) in [(32, DType::F32), (64, DType::F16), (128, DType::BF16)]
                {
                    let format = QuantFormat {
                        code,
                        group_size,
                        has_zeros: true,
                        scale,
                        quantises_inputs: false,
                    };
                    let layout = TileLayout::new(rows, k, format, false).unwrap();
                    let division = Division::choose(&layout, chip).unwrap();
                    let launch = division.launch(&layout).unwrap();
                    assert!(launch.shared_bytes as usize + RESERVED_BYTES <= 227 << 10);
                    assert!(division.blocks.is_multiple_of(division.splits));
                    assert!(division.blocks / division.splits <= layout.num_tiles() as u64);
                    assert!(kernel(&layout, DType::BF16).is_some());
                    assert!(kernel(&layout, DType::F16).is_some());
                }
            }
        }
    }

    #[test]
    fn floats_have_a_kernel_unless_their_activations_become_floats_too() {
        for (group_size, quantises_inputs, is_served) in [
            (128, false, true),
            (256, false, true),
            (usize::MAX, false, true),
            (64, false, false),
            (128, true, false),
        ] {
            let format = QuantFormat {
                code: Code::Fp8,
                group_size,
                has_zeros: false,
                scale: DType::F32,
                quantises_inputs,
            };
            let layout = TileLayout::new(1003, 1544, format, false).unwrap();
            assert_eq!(kernel(&layout, DType::BF16).is_some(), is_served, "{format:?}");
        }
    }

    /// The faster of one and two blocks on a multiprocessor, when both were measured.
    #[test]
    fn divisions_are_those_that_were_measured() {
        let chip = Chip { has_clusters: true, shared_memory_bytes: 227 << 10 };
        for (shape, blocks) in [
            ((6144, 4096), 132),
            ((4096, 4096), 132),
            ((24_576, 4096), 264),
            ((4096, 12_288), 256),
            ((7168, 5120), 264),
            ((34_816, 5120), 264),
            ((19_456, 2560), 264),
            ((4096, 1024), 132),
            ((6144, 1024), 132),
        ] {
            let format = QuantFormat {
                code: Code::Int4,
                group_size: 128,
                has_zeros: false,
                scale: DType::F16,
                quantises_inputs: false,
            };
            let layout = TileLayout::new(shape.0, shape.1, format, false).unwrap();
            assert_eq!(Division::choose(&layout, chip).unwrap().blocks, blocks, "{shape:?}");
        }
    }
}
