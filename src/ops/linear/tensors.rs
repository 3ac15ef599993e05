//! The linear layer with a quantised weight whose parts are tensors of a caller's. The weight is
//! brought into the order of the kernels in every call.

use super::cpu::{linear, LinearScratch, Store};
use super::cuda_quantised::{has_linear_quantised, linear_quantised};
use super::cuda_quantised_blocks::is_quantised_weight;
use super::Epilogue;
use crate::backend::{ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{try_filled, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::staging::{input, output};
use crate::ops::elementwise::cast;
use crate::ops::gemm::{gemm, gemm_with_bias, GemmOptions};
use crate::ops::quantised::cuda::{dequantise, QuantisedTiles};
use crate::ops::quantised::tensors::{
    floats, host_floats, matrix_sizes, on_host, to_tiles, QuantisedTensors,
};
use crate::ops::quantised::{QuantisedMatrix, QuantisedPanels};

/// Computes `out = x W^T + bias`, summed in f32 and rounded once: x `[num_tokens, in_features]`,
/// bias `[out_features]` or none, `out` `[num_tokens, out_features]`, all of one type. On the CPU,
/// weights of integers are multiplied by activations of 16 bits (see [`cpu`](super::cpu)). On CUDA
/// the call waits until the weight has been read to the host.
pub fn linear_tensors(
    context: &ComputeContext,
    x: &Tensor,
    weight: &QuantisedTensors<'_>,
    bias: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, out_named])?;
    let [num_tokens, k] = matrix_sizes(x_named)?;
    let [_, n] = matrix_sizes(out_named)?;
    check::shape(out_named, &[num_tokens as i64, n as i64], "the rows of x")?;
    weight.check(n, k)?;
    if let Some(bias) = bias {
        check::same_type(&[x_named, ("bias", bias)])?;
        check::shape(("bias", bias), &[n as i64], "the columns of out")?;
    }
    let bias_named = bias.map(|bias| ("bias", bias));
    for named in weight.named().chain(bias_named).chain([x_named]) {
        check::reachable(context, &[named, out_named])?;
        check::result(out_named, &[named], InPlace::Refused)?;
    }
    if out.is_empty() {
        return Ok(());
    }
    let matrix = weight.read(context, n, k)?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = floats(&on_host(context, x)?, dtype)?;
            let bias = bias.map(|bias| floats(&on_host(context, bias)?, dtype)).transpose()?;
            let len = num_tokens.saturating_mul(n);
            let mut sums = try_filled(len, 0.0_f32, "the result of a product")?;
            if k == 0 {
                for (sum, bias) in sums.iter_mut().zip(bias.iter().flatten().cycle()) {
                    *sum = *bias;
                }
            } else {
                let panels = QuantisedPanels::pack(backend, &matrix)?;
                let (bias, scratch) = (bias.as_deref(), &mut LinearScratch::new());
                linear(
                    backend,
                    &x,
                    num_tokens,
                    &panels,
                    bias,
                    &mut sums,
                    Store::Overwrite,
                    scratch,
                )?;
            }
            cast(context, &*host_floats(&[num_tokens as i64, n as i64], &sums)?, out)
        }
        ContextBackend::Cuda(_) => on_cuda(context, dtype, x, &matrix, bias, out),
    }
}

fn on_cuda(
    context: &ComputeContext,
    dtype: DType,
    x: &Tensor,
    matrix: &QuantisedMatrix,
    bias: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    let (n, k) = (matrix.out_features, matrix.in_features);
    if k > 0 && dtype != DType::F32 && has_linear_quantised(context)? {
        let (layout, memory) = to_tiles(context, matrix)?;
        if is_quantised_weight(&layout) {
            let tiles = QuantisedTiles::new(layout, &memory)?;
            let fits = |tensor: &Tensor| {
                tensor.is_contiguous() && (tensor.data() as usize).is_multiple_of(16)
            };
            let x = input(context, x, fits)?;
            let bias = bias.map(|bias| input(context, bias, fits)).transpose()?;
            let place = output(context, out, fits)?;
            let bias = bias.as_ref().map(|bias| &bias.tensor);
            let epilogue = Epilogue::Store;
            linear_quantised(context, &x.tensor, &tiles, bias, epilogue, false, &place.tensor)?;
            return place.finish(context);
        }
    }
    // The numbers as a dense weight.
    let what = "the numbers of a quantised weight";
    let numbers = DeviceTensor::temporary(context, x.element(), &[n, k], what)?;
    if k > 0 {
        let (layout, memory) = to_tiles(context, matrix)?;
        dequantise(context, &QuantisedTiles::new(layout, &memory)?, 0..n, &numbers)?;
    }
    let options = GemmOptions { transpose_b: true, ..GemmOptions::default() };
    match bias {
        Some(bias) => gemm_with_bias(context, &options, x, &numbers, bias, out),
        None => gemm(context, &options, x, &numbers, out),
    }
}
