//! Linear layers with quantised weights whose numbers are made for the time of a product: for many
//! tokens, for f32, and for weights that the other kernels do not serve.

use super::cuda_prefill_int8::prefill_int8_bytes;
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, matrix_size};
use crate::ops::gemm::{
    gemm, gemm_scratch_bytes, gemm_with_bias, GemmOptions, SumOrder, WeightShape,
};
use crate::ops::quantised::cuda::{dequantise, QuantisedTiles};
use crate::ops::quantised::cuda_activations::{quantised_inputs_bytes, round_inputs};
use crate::ops::quantised::tiles::TileLayout;
use crate::ops::quantised::QuantFormat;

/// A weight with more rows than this is tall, as hardly any but output matrices are. Few tokens are
/// multiplied by them, for which the numbers would take longer to make than the codes to read.
const TALL: usize = 1 << 16;
/// The rows of a tall weight whose numbers are made at a time.
const PIECE_ROWS: usize = 1 << 13;

/// Whether the numbers of a weight are too many to be made at once.
pub(super) fn is_tall(layout: &TileLayout) -> bool {
    layout.out_features() > TALL
}

/// Returns how many rows of a quantised weight are dense at a time.
fn piece_rows(out_features: usize) -> usize {
    if out_features > TALL {
        PIECE_ROWS
    } else {
        out_features
    }
}

/// Returns the most device memory that a layer takes while it is queued, on any chip and with any
/// plan, for up to `num_rows` rows.
pub fn scratch_bytes(
    dtype: DType,
    num_rows: usize,
    weight: &WeightShape,
    format: Option<&QuantFormat>,
    is_deterministic: bool,
) -> usize {
    let mut weight = *weight;
    let mut numbers = 0;
    if format.is_some() {
        weight.out_features = piece_rows(weight.out_features);
        numbers = dense_bytes(dtype, weight.out_features, weight.in_features);
    }
    let product = gemm_scratch_bytes(dtype, num_rows, &weight, is_deterministic);
    let by_gemm = numbers.saturating_add(product);
    let Some(format) = format.filter(|format| format.quantises_inputs) else { return by_gemm };
    if !format.has_fp8_inputs() {
        let integers = prefill_int8_bytes(num_rows, weight.out_features, weight.in_features);
        return by_gemm.max(integers);
    }
    let rounded = dense_bytes(dtype, num_rows, weight.in_features);
    let quantised = quantised_inputs_bytes(num_rows, weight.in_features).saturating_add(512);
    by_gemm.saturating_add(rounded).max(quantised)
}

/// Returns the device memory of a dense matrix for the time of a product.
fn dense_bytes(dtype: DType, rows: usize, columns: usize) -> usize {
    // The allocator rounds up to multiples of 512 bytes.
    rows.saturating_mul(columns).saturating_mul(dtype.size_bytes()).saturating_add(512)
}

/// Computes `out = x W^T` as [`gemm`] does with `options`, where W is quantised: x
/// `[num_tokens, in_features]` and `out` `[num_tokens, out_features]` of one type. `order` says in
/// which order the products with a dense weight are added up. Where the format of the weight says that
/// activations are FP8, x is replaced by what it is in e4m3, rounded to its type.
pub fn linear_numbers(
    context: &ComputeContext,
    x: &Tensor,
    weight: &QuantisedTiles<'_>,
    mut options: GemmOptions,
    order: &dyn Fn(&Tensor) -> SumOrder,
    bias: Option<&DeviceTensor>,
    out: &DeviceTensor,
) -> Result<()> {
    let (n, k) = (weight.layout().out_features(), weight.layout().in_features());
    let (num_tokens, _) = matrix_size("out", out)?;
    check("out", out, x.element(), &[num_tokens.into(), n as i64])?;
    let rounded;
    let mut x = x;
    if weight.layout().format().has_fp8_inputs() {
        let shape = [num_tokens as usize, k];
        rounded = DeviceTensor::temporary(context, x.element(), &shape, "activations in 8 bits")?;
        round_inputs(context, x, &rounded)?;
        x = &rounded;
    }
    let piece = piece_rows(n).min(n);
    let what = "the numbers of a quantised weight";
    let numbers = DeviceTensor::temporary(context, x.element(), &[piece, k], what)?;
    for first in (0..n).step_by(piece.max(1)) {
        let rows = piece.min(n - first);
        let dense = numbers.view(0, &[rows, k], None)?;
        dequantise(context, weight, first..first + rows, &dense)?;
        options.order = order(&dense);
        let columns = out.view(first, &[num_tokens as usize, rows], Some(&[n, 1]))?;
        match bias {
            Some(bias) => {
                let bias = bias.view(first, &[rows], None)?;
                gemm_with_bias(context, &options, x, &dense, &bias, &columns)?;
            }
            None => gemm(context, &options, x, &dense, &columns)?,
        }
    }
    Ok(())
}
