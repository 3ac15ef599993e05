//! The CUDA half.

use super::binary::Binary;
use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::num_blocks;
use crate::ops::common::strided::Axes;

pub(in crate::ops) fn binary_on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    function: Binary,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 256;
    let is_add = function == Binary::Add;
    let vector = 16 / dtype.size_bytes() as i64;
    let aligned = [out, a, b].iter().all(|t| (t.data() as usize).is_multiple_of(16));
    if [out, a, b].iter().all(|tensor| tensor.is_contiguous()) {
        let kernel = match (is_add, aligned) {
            (true, true) => kernels::ADD_VEC.of(dtype),
            (true, false) => kernels::ADD_SCALAR.of(dtype),
            (false, true) => kernels::MUL_VEC.of(dtype),
            (false, false) => kernels::MUL_SCALAR.of(dtype),
        };
        let elements = out.num_elements();
        let per_block = i64::from(BLOCK) * if aligned { vector } else { 1 };
        let grid = num_blocks(elements, per_block)
            .ok_or_else(|| Error::unsupported(format!("{elements} elements are too many")))?;
        let arguments = Arguments::new().tensor(out).tensor(a).tensor(b).i64(elements);
        // SAFETY: the arguments of xserv_add_vec and its like; all are contiguous.
        return unsafe { cuda.launch(kernel, Launch::linear(grid, BLOCK), arguments) };
    }
    let axes = Axes::of(&[out, a, b])?;
    let vectors =
        (aligned && axes.innermost().1 == [1; 3]).then(|| axes.in_vectors(vector)).flatten();
    let kernel = match (is_add, vectors.is_some()) {
        (true, true) => kernels::ADD_STRIDED_VEC.of(dtype),
        (true, false) => kernels::ADD_STRIDED.of(dtype),
        (false, true) => kernels::MUL_STRIDED_VEC.of(dtype),
        (false, false) => kernels::MUL_STRIDED.of(dtype),
    };
    let unit = dtype.size_bytes() as i64 * if vectors.is_some() { vector } else { 1 };
    for (layout, [out_first, a_first, b_first]) in vectors.unwrap_or(axes).launches()? {
        let at = |tensor: &Tensor, first: i64| tensor.data().wrapping_add((first * unit) as usize);
        let arguments = Arguments::new()
            .pointer(at(out, out_first))
            .pointer(at(a, a_first))
            .pointer(at(b, b_first))
            .value(&layout);
        let grid = (layout.num_units as u32).div_ceil(BLOCK);
        // SAFETY: the layout spans the elements of all three, in the units of the kernel.
        unsafe { cuda.launch(kernel, Launch::linear(grid, BLOCK), arguments) }?;
    }
    Ok(())
}

pub(in crate::ops) fn cast_on_cuda(
    cuda: &CudaContext,
    from: DType,
    to: DType,
    source: &Tensor,
    target: &Tensor,
) -> Result<()> {
    let (kernel, strided) = match (from, to) {
        (DType::F32, DType::F16) => (kernels::CAST_F32_F16, kernels::CAST_STRIDED_F32_F16),
        (DType::F32, DType::BF16) => (kernels::CAST_F32_BF16, kernels::CAST_STRIDED_F32_BF16),
        (DType::F16, DType::F32) => (kernels::CAST_F16_F32, kernels::CAST_STRIDED_F16_F32),
        (DType::F16, DType::BF16) => (kernels::CAST_F16_BF16, kernels::CAST_STRIDED_F16_BF16),
        (DType::BF16, DType::F32) => (kernels::CAST_BF16_F32, kernels::CAST_STRIDED_BF16_F32),
        (DType::BF16, DType::F16) => (kernels::CAST_BF16_F16, kernels::CAST_STRIDED_BF16_F16),
        _ => return Err(Error::internal("a cast that changes nothing")),
    };
    const BLOCK: u32 = 256;
    let is_aligned = |tensor: &Tensor| {
        (tensor.data() as usize).is_multiple_of(4 * tensor.element().size_bytes())
    };
    if [source, target].iter().all(|tensor| tensor.is_contiguous() && is_aligned(tensor)) {
        let elements = source.num_elements();
        let grid = num_blocks(elements, i64::from(BLOCK) * 16)
            .ok_or_else(|| Error::unsupported(format!("{elements} elements are too many")))?;
        let arguments = Arguments::new().tensor(target).tensor(source).i64(elements);
        // SAFETY: the arguments of xserv_cast_*; both are contiguous, at multiples of 4 elements.
        return unsafe { cuda.launch(kernel, Launch::linear(grid, BLOCK), arguments) };
    }
    for (layout, [to_first, from_first, _]) in Axes::of(&[target, source])?.launches()? {
        let at = |tensor: &Tensor, first: i64| {
            tensor.data().wrapping_add(first as usize * tensor.element().size_bytes())
        };
        let arguments = Arguments::new()
            .pointer(at(target, to_first))
            .pointer(at(source, from_first))
            .value(&layout);
        let grid = (layout.num_units as u32).div_ceil(BLOCK);
        // SAFETY: the layout spans the elements of both.
        unsafe { cuda.launch(strided, Launch::linear(grid, BLOCK), arguments) }?;
    }
    Ok(())
}
