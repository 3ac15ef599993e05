//! The CUDA half.

use super::Binary;
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::{kernel_name, num_blocks};
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
        let name = match (is_add, aligned) {
            (true, true) => kernel_name!("add_vec", dtype),
            (true, false) => kernel_name!("add_scalar", dtype),
            (false, true) => kernel_name!("mul_vec", dtype),
            (false, false) => kernel_name!("mul_scalar", dtype),
        };
        let elements = out.num_elements();
        let per_block = i64::from(BLOCK) * if aligned { vector } else { 1 };
        let grid = num_blocks(elements, per_block)
            .ok_or_else(|| Error::unsupported(format!("{elements} elements are too many")))?;
        let arguments = Arguments::new().tensor(out).tensor(a).tensor(b).i64(elements);
        // SAFETY: the arguments of xserv_add_vec and its like; all are contiguous.
        return unsafe {
            cuda.launch("elementwise/elementwise", name, Launch::linear(grid, BLOCK), arguments)
        };
    }
    let axes = Axes::of(&[out, a, b])?;
    let vectors =
        (aligned && axes.innermost().1 == [1; 3]).then(|| axes.in_vectors(vector)).flatten();
    let name = match (is_add, vectors.is_some()) {
        (true, true) => kernel_name!("add_strided_vec", dtype),
        (true, false) => kernel_name!("add_strided", dtype),
        (false, true) => kernel_name!("mul_strided_vec", dtype),
        (false, false) => kernel_name!("mul_strided", dtype),
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
        unsafe {
            cuda.launch("elementwise/elementwise", name, Launch::linear(grid, BLOCK), arguments)
        }?;
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
    let (name, strided_name) = match (from, to) {
        (DType::F32, DType::F16) => ("xserv_cast_f32_f16", "xserv_cast_strided_f32_f16"),
        (DType::F32, DType::BF16) => ("xserv_cast_f32_bf16", "xserv_cast_strided_f32_bf16"),
        (DType::F16, DType::F32) => ("xserv_cast_f16_f32", "xserv_cast_strided_f16_f32"),
        (DType::F16, DType::BF16) => ("xserv_cast_f16_bf16", "xserv_cast_strided_f16_bf16"),
        (DType::BF16, DType::F32) => ("xserv_cast_bf16_f32", "xserv_cast_strided_bf16_f32"),
        (DType::BF16, DType::F16) => ("xserv_cast_bf16_f16", "xserv_cast_strided_bf16_f16"),
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
        return unsafe {
            cuda.launch("elementwise/cast", name, Launch::linear(grid, BLOCK), arguments)
        };
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
        unsafe {
            cuda.launch("elementwise/cast", strided_name, Launch::linear(grid, BLOCK), arguments)
        }?;
    }
    Ok(())
}
