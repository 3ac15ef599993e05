//! Linear layers for up to 8 tokens of a narrow model whose weights have 4 or 8 bits, fused as those of
//! [`cuda_narrow`](super::cuda_narrow): `csrc/ops/linear/narrow_quantised.cu`.

use super::cuda_fp8::is_fp8_weight;
use super::cuda_narrow::{Division, NARROW_TOKENS};
use super::cuda_quantised_blocks::{check_product, is_quantised_weight, units};
use super::{quantised_kernels, Epilogue};
use crate::backend::cuda::{kernel_struct, Arguments, KernelByHalf};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::tiles::{TileLayout, CHUNK, TILE_ROWS};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct LinearNarrowQuantisedParams {
        x: *mut u8,
        norm_weight: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        zeros: *mut u8,
        bias: *mut u8,
        out: *mut u8,
        ldx: i64,
        ldo: i64,
        num_tokens: i32,
        out_features: i32,
        in_features: i32,
        steps: i32,
        num_passes: i32,
        num_groups: i32,
        group_factor: u32,
        scale_type: i32,
        eps: f32,
    }
}

/// The inputs of a step of a warp, and the most steps of a pass.
const STEP: usize = 2 * CHUNK;
const MAX_STEPS: i32 = 2;

fn divide(num_tokens: usize, layout: &TileLayout, result: Epilogue) -> Option<Division> {
    let is_served = (1..=NARROW_TOKENS).contains(&num_tokens)
        && is_quantised_weight(layout)
        && (!layout.format().has_fp8_inputs() || is_fp8_weight(layout))
        && layout.is_gated() == (result == Epilogue::SwiGlu);
    let all = layout.in_features().div_ceil(STEP);
    let all = i32::try_from(all).ok().filter(|_| is_served)?;
    Division::new(TILE_ROWS as i32, all, MAX_STEPS, result != Epilogue::AddResidual)
}

fn kernel(layout: &TileLayout, result: Epilogue, has_norm: bool) -> Option<KernelByHalf> {
    let format = layout.format();
    if format.has_fp8_inputs() {
        return quantised_kernels::narrow_fp8(result, has_norm);
    }
    let (scales, _) = units(layout, STEP);
    quantised_kernels::narrow(format.code, scales, result, has_norm)
}

/// Returns the most tokens, up to [`NARROW_TOKENS`], that the kernels of this file can multiply by a
/// weight; 0 if they cannot.
pub fn max_narrow_quantised_tokens(layout: &TileLayout, result: Epilogue) -> usize {
    if divide(NARROW_TOKENS, layout, result).is_some() {
        NARROW_TOKENS
    } else {
        0
    }
}

/// Does with a quantised weight what [`linear_narrow`](super::cuda_narrow::linear_narrow) does.
/// Nothing but the results is rounded: activations stay as they are also where the format has them in FP8, which
/// takes these kernels longer than it saves.
pub fn linear_narrow_quantised(
    context: &ComputeContext,
    x: &Tensor,
    norm: Option<(&Tensor, f32)>,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    result: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let layout = weight.layout();
    check_product(x, layout, bias, result, out)?;
    let k = layout.in_features();
    if let Some((weight, _)) = norm {
        check("norm_weight", weight, out.element(), &[k as i64])?;
    }
    if out.is_empty() {
        return Ok(());
    }
    let norm_weight = norm.map_or(std::ptr::null_mut(), |(weight, _)| weight.data());
    let is_aligned = (x.data() as usize | norm_weight as usize).is_multiple_of(16);
    let division = divide(num_tokens as usize, layout, result).filter(|_| is_aligned);
    let (_, group_factor) = units(layout, STEP);
    let kernel = kernel(layout, result, norm.is_some()).and_then(|kernel| kernel.of(dtype));
    let (Some(division), Some(kernel)) = (division, kernel) else {
        return Err(Error::internal(format!(
            "no narrow product of {num_tokens} tokens, {layout:?}"
        )));
    };
    let cuda = cuda(context)?;
    let regions = weight.regions();
    let params = LinearNarrowQuantisedParams {
        x: x.data(),
        norm_weight,
        codes: regions.codes,
        scales: regions.scales,
        zeros: regions.zeros,
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        out: out.data(),
        ldx: k as i64,
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        out_features: n,
        in_features: k as i32,
        steps: division.steps,
        num_passes: division.passes,
        num_groups: layout.num_groups() as i32,
        group_factor,
        scale_type: scale_number(layout.format().scale),
        eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    let launch = division.launch(cuda, n, k as i32, result, norm.is_some());
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; it reads the regions of the tiles, x and the weight of
    // the norm, which were checked to have these shapes, and its stores are bounded by num_tokens
    // and n.
    unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::DType;
    use crate::ops::quantised::{Code, QuantFormat};

    #[test]
    fn inputs_are_divided_among_warps_and_passes_whole() {
        let formats =
            Code::ALL.iter().flat_map(|&code| [128, 64, 96].map(|size| (code, size, false)));
        for (code, group_size, quantises_inputs) in formats.chain([(Code::Fp8, 256, true)]) {
            let (has_zeros, scale) = (false, DType::F32);
            let format = QuantFormat { code, group_size, has_zeros, scale, quantises_inputs };
            for k in (1..=2048).map(|i| i * 8) {
                for result in [Epilogue::Store, Epilogue::SwiGlu, Epilogue::AddResidual] {
                    let has_norm = result != Epilogue::AddResidual;
                    let layout =
                        TileLayout::new(48, k, format, result == Epilogue::SwiGlu).unwrap();
                    let Some(division) = divide(8, &layout, result) else {
                        assert!(has_norm && k > 4096);
                        continue;
                    };
                    let all = (division.warps * division.steps * division.passes) as usize;
                    assert!(all * STEP >= k, "{k} {division:?}");
                    assert!(division.steps <= MAX_STEPS && division.warps <= 16);
                    assert!(division.shared_bytes(k as i32, has_norm) <= 48 << 10);
                    assert!(kernel(&layout, result, has_norm).is_some());
                }
            }
            let layout = TileLayout::new(48, 64, format, false).unwrap();
            assert_eq!(max_narrow_quantised_tokens(&layout, Epilogue::Store), NARROW_TOKENS);
            assert_eq!(max_narrow_quantised_tokens(&layout, Epilogue::SwiGlu), 0);
            assert_eq!(divide(NARROW_TOKENS + 1, &layout, Epilogue::Store), None);
        }
    }
}
