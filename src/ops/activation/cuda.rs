//! The CUDA half.

use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::activation::cpu::Activation;
use crate::ops::common::launch::{kernel_name, num_blocks};

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    function: Activation,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let elements = x.num_elements();
    let aligned = [x, out].iter().all(|tensor| (tensor.data() as usize).is_multiple_of(16));
    let name = match (function, aligned) {
        (Activation::GeluTanh, true) => kernel_name!("gelu_tanh_vec", dtype),
        (Activation::GeluTanh, false) => kernel_name!("gelu_tanh_scalar", dtype),
        (Activation::GeluErf, true) => kernel_name!("gelu_erf_vec", dtype),
        (Activation::GeluErf, false) => kernel_name!("gelu_erf_scalar", dtype),
        (Activation::Silu, true) => kernel_name!("silu_vec", dtype),
        (Activation::Silu, false) => kernel_name!("silu_scalar", dtype),
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
    unsafe { cuda.launch("activation/activation", name, Launch::linear(grid, block), arguments) }
}
