//! What the kernels for quantised weights have in common on the host: their blocks, how they find
//! groups, what becomes of their sums, and which operands they take.

use crate::backend::cuda::{Kernel, Launch};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, matrix_size};
use crate::ops::linear::{cuda_parts, Epilogue};
use crate::ops::quantised::activations::INPUT_GROUP;
use crate::ops::quantised::tiles::{TileLayout, CHUNK};

/// The multiprocessors of the chips for which products are divided.
pub(super) const MULTIPROCESSORS: u64 = cuda_parts::MULTIPROCESSORS as u64;
/// The warps of a block, and log2 of them.
pub(super) const WARPS: u64 = 8;
pub(super) const WARPS_SHIFT: u32 = 3;
/// The tiles of a warp.
pub(in crate::ops) const TILES: u64 = 2;
/// The bytes of the scales and zeros of a group of a tile in shared memory.
pub(super) const GROUP_BYTES: u64 = 80;

/// The largest in_features that the kernels' 32-bit numbers have room for.
pub(super) const MAX_INPUTS: usize = 1 << 20;
/// The most groups of all tiles: their scales have at most 2 GB.
const MAX_GROUPS: usize = 1 << 25;

/// A launch of blocks of [`WARPS`] for groups of tokens.
pub(super) fn launch(blocks: u64, token_groups: u64, shared_bytes: u64) -> Option<Launch> {
    Some(Launch {
        grid: (
            u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32)?,
            u32::from(u16::try_from(token_groups).ok()?),
            1,
        ),
        block: 32 * WARPS as u32,
        shared_bytes: shared_bytes as u32,
    })
}

/// A kernel, and what it is told of the way in which a product is divided.
pub(super) struct Chosen {
    pub kernel: Kernel,
    pub launch: Launch,
    /// The blocks of a cluster.
    pub splits: u64,
    /// log2 of the warps of a block that have different rows.
    pub row_shift: u32,
    /// What [`units`] gives.
    pub group_factor: u32,
}

/// Returns the scales that `inputs` have in a row, a power of 2, and by what a unit of as many
/// inputs as one of them has is multiplied to find its group: `group = (2 * unit * factor) >> 32`.
pub(super) fn units(layout: &TileLayout, inputs: usize) -> (usize, u32) {
    if layout.num_groups() == 1 {
        return (1, 0);
    }
    let mut scales = 1;
    while !layout.group_size().is_multiple_of(inputs / scales) && inputs / scales > CHUNK / 2 {
        scales *= 2;
    }
    (scales, factor_of_units(layout, inputs / scales))
}

/// Returns by what the number of a unit of `inputs` inputs is multiplied to find its group.
pub(in crate::ops) fn factor_of_units(layout: &TileLayout, inputs: usize) -> u32 {
    if layout.num_groups() == 1 {
        return 0;
    }
    let group_units = layout.group_size() / inputs;
    (1u64 << 31).div_ceil(group_units.max(1) as u64) as u32
}

/// The number by which kernels know what becomes of sums.
pub(super) fn epilogue_number(epilogue: Epilogue) -> i32 {
    match epilogue {
        Epilogue::Store => 0,
        Epilogue::AddResidual => 1,
        Epilogue::SwiGlu => 2,
    }
}

/// The stages of a group without end.
const ENDLESS: usize = 1 << 24;

/// The stages of a tile of FP8 whose activations are FP8 too, each of 128 inputs.
pub(super) fn fp8_stages(layout: &TileLayout) -> usize {
    layout.in_features().div_ceil(INPUT_GROUP)
}

/// The stages of a group of inputs that share a scale of the weight.
pub(super) fn fp8_group_stages(layout: &TileLayout) -> usize {
    if layout.num_groups() == 1 {
        ENDLESS
    } else {
        layout.group_size() / INPUT_GROUP
    }
}

/// Whether the kernels for quantised weights can multiply by a weight: in_features is a multiple of 8, and
/// groups are multiples of 32 inputs or whole rows.
pub fn is_quantised_weight(layout: &TileLayout) -> bool {
    let (rows, k) = (layout.out_features(), layout.in_features());
    let num_groups = layout.num_tiles().checked_mul(layout.num_groups());
    rows > 0
        && i32::try_from(rows).is_ok()
        && (8..=MAX_INPUTS).contains(&k)
        && k.is_multiple_of(8)
        && (layout.num_groups() == 1 || layout.group_size().is_multiple_of(CHUNK / 2))
        && num_groups.is_some_and(|groups| groups <= MAX_GROUPS)
}

/// Checks the operands of a product with a quantised weight against each other: x `[num_tokens,
/// in_features]`, a bias `[out_features]` and out `[num_tokens, out_features]`.
pub(super) fn check_product(
    x: &Tensor,
    layout: &TileLayout,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (num_tokens, n) = matrix_size("out", out)?;
    let (rows, k) = (layout.out_features(), layout.in_features());
    check("x", x, out.element(), &[num_tokens.into(), k as i64])?;
    let is_gated = epilogue == Epilogue::SwiGlu;
    let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
    if layout.is_gated() != is_gated || rows as i64 != expected {
        return Err(Error::internal(format!(
            "a quantised weight of {rows} x {k}, gated: {}, for {n} columns and {epilogue:?}",
            layout.is_gated()
        )));
    }
    if let Some(bias) = bias {
        check("bias", bias, out.element(), &[n.into()])?;
        if epilogue != Epilogue::Store {
            return Err(Error::internal("a bias of a quantised product that does not store"));
        }
    }
    Ok(())
}
