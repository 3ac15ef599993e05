//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::activation::cpu::Activation;
use crate::ops::common::launch::num_blocks;

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    function: Activation,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let elements = x.num_elements();
    let aligned = [x, out].iter().all(|tensor| (tensor.data() as usize).is_multiple_of(16));
    let kernel = match (function, aligned) {
        (Activation::GeluTanh, true) => kernels::GELU_TANH_VEC.of(dtype),
        (Activation::GeluTanh, false) => kernels::GELU_TANH_SCALAR.of(dtype),
        (Activation::GeluErf, true) => kernels::GELU_ERF_VEC.of(dtype),
        (Activation::GeluErf, false) => kernels::GELU_ERF_SCALAR.of(dtype),
        (Activation::Silu, true) => kernels::SILU_VEC.of(dtype),
        (Activation::Silu, false) => kernels::SILU_SCALAR.of(dtype),
    };
    let vector = 16 / dtype.size_bytes() as i64;
    let (block, per_thread) = match (aligned, function) {
        (false, _) => (256, 1),
        (true, Activation::GeluErf) => (128, 2 * vector),
        (true, _) => (128, vector),
    };
    let grid = num_blocks(elements, i64::from(block) * per_thread)
        .ok_or_else(|| Error::unsupported(format!("{elements} elements are too many")))?;
    let arguments = Arguments::new().tensor(out).tensor(x).i64(elements);
    // SAFETY: the arguments of xserv_<function>_vec and _scalar; both are contiguous.
    unsafe { cuda.launch(kernel, Launch::linear(grid, block), arguments) }
}
