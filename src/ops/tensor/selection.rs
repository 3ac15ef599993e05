//! The largest elements along the last dimension. NaN counts as larger than every number, -0 equals +0, and
//! of equals the one with the lowest index comes first, as in PyTorch (which leaves the last open).
//!
//! x [..., width] f32, f16 or bf16. argmax: out [...] i32 or i64. top_k: values [..., k] of the type of x,
//! indices [..., k] i32, from the largest down; k is at most width and [`MAX_K`].

use super::activation::one_stride;
use super::check::{self, InPlace};
use super::staging::{contiguous, host_slice, host_slice_mut, input, output};
use super::{kernel_name, num_blocks, row_layout, with_storage};
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::host;

/// The most elements that [`top_k`] selects.
pub const MAX_K: i64 = 1024;

/// Index of the largest element of each row, see the head of the file.
pub fn argmax(context: &ComputeContext, x: &Tensor, out: &Tensor) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    check::has_rows(x_named)?;
    let dtype = check::float(x_named)?;
    let out_is_i64 = check::indices_are_i64(out_named)?;
    let leading = x.shape().split_last().map_or(&[][..], |(_, leading)| leading);
    check::shape(out_named, leading, "x without its last dimension")?;
    check::reachable(context, &[x_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Refused)?;
    if out.is_empty() {
        return Ok(());
    }
    if x.width() == 0 {
        return Err(Error::invalid_argument(format!(
            "x has shape {}: there is no largest of no elements",
            x.shape()
        )));
    }
    let width = i32::try_from(x.width()).map_err(|_| too_wide(x))?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = &input(context, x, contiguous)?.tensor;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T and of the integer named, on the host, that share nothing.
                unsafe {
                    let (x, width) = (host_slice::<T>(x), width as usize);
                    match out_is_i64 {
                        true => {
                            host::argmax(backend, x, width, host_slice_mut::<i64>(&place.tensor))
                        }
                        false => {
                            host::argmax(backend, x, width, host_slice_mut::<i32>(&place.tensor))
                        }
                    }
                }
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = &input(context, x, one_stride)?.tensor;
            let place = output(context, out, contiguous)?;
            argmax_on_cuda(context, cuda, dtype, out_is_i64, width, x, &place.tensor)?;
            place.finish(context)
        }
    }
}

fn too_wide(x: &Tensor) -> Error {
    Error::unsupported(format!(
        "x has shape {}: its rows are too wide for 32-bit indices",
        x.shape()
    ))
}

/// True if rows begin at multiples of 16 bytes, whatever their width.
fn rows_are_aligned(x: &Tensor) -> Result<bool> {
    let bytes = row_layout(x)?.outer_stride * x.element().size_bytes() as i64;
    Ok((x.data() as usize).is_multiple_of(16) && bytes % 16 == 0)
}

/// How many blocks share a row of `accesses` accesses: enough rows fill the device by themselves; fewer blocks
/// than accesses, and not many more than pay (measured on an H200 with 1 and 32 rows of 151936).
fn argmax_splits(num_rows: i64, accesses: i64, block: u32) -> i64 {
    let useful = (accesses as u64).div_ceil(u64::from(block)) as i64;
    useful.min(512 / num_rows.max(1)).clamp(1, 80)
}

fn argmax_on_cuda(
    context: &ComputeContext,
    cuda: &CudaContext,
    dtype: DType,
    out_is_i64: bool,
    width: i32,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 256;
    let num_rows = out.num_elements();
    let is_vector = rows_are_aligned(x)?;
    let name = match (is_vector, out_is_i64) {
        (true, true) => kernel_name!("argmax_i64", dtype),
        (true, false) => kernel_name!("argmax_i32", dtype),
        (false, true) => kernel_name!("argmax_scalar_i64", dtype),
        (false, false) => kernel_name!("argmax_scalar_i32", dtype),
    };
    let per_access = if is_vector { 16 / dtype.size_bytes() as i64 } else { 1 };
    let splits = argmax_splits(num_rows, i64::from(width) / per_access, BLOCK);
    let rows = num_blocks(num_rows, 1)
        .ok_or_else(|| Error::unsupported(format!("{num_rows} rows are too many")))?;
    let partials = match splits {
        1 => None,
        _ => Some(context.allocate(8 * (num_rows * splits) as usize, "the parts of argmax")?),
    };
    let partials_start = partials.as_ref().map_or(std::ptr::null_mut(), |block| block.start());
    let launch = Launch { grid: (rows, splits as u32, 1), block: BLOCK, shared_bytes: 0 };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .i32(width)
        .i64(row_layout(x)?.outer_stride)
        .pointer(partials_start);
    // SAFETY: the arguments of xserv_argmax_*; the stride leads to the rows, and there is a word for each part.
    unsafe { cuda.launch("argmax", name, launch, arguments) }?;
    if splits > 1 {
        let name = if out_is_i64 { "xserv_argmax_merge_i64" } else { "xserv_argmax_merge_i32" };
        let arguments = Arguments::new().tensor(out).pointer(partials_start).i32(splits as i32);
        // SAFETY: the arguments of xserv_argmax_merge_*; the parts were written by the launch before.
        unsafe { cuda.launch("argmax", name, Launch::linear(rows, 32), arguments) }?;
    }
    Ok(())
}

/// The k largest elements of each row and where they are, see the head of the file.
pub fn top_k(
    context: &ComputeContext,
    x: &Tensor,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    let (x_named, values_named, indices_named) =
        (("x", x), ("values", values), ("indices", indices));
    check::has_rows(x_named)?;
    check::has_rows(values_named)?;
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, values_named])?;
    if indices.element() != ElementType::I32 {
        return Err(Error::invalid_argument(format!(
            "indices has elements of {}, but i32 is needed",
            indices.element()
        )));
    }
    let k = values.width();
    let mut expected = [0; crate::memory::MAX_RANK];
    let rank = x.shape().len();
    for (slot, size) in expected.iter_mut().zip(x.shape().iter()) {
        *slot = *size;
    }
    if let Some(last) = expected.get_mut(rank.saturating_sub(1)) {
        *last = k;
    }
    let expected = expected.get(..rank).unwrap_or_default();
    check::shape(values_named, expected, "x but for its last dimension")?;
    check::same_shape(&[values_named, indices_named])?;
    if k > MAX_K || k > x.width() {
        return Err(Error::invalid_argument(format!(
            "values has shape {}: its last dimension, k, is {k}, but at most {} are supported for rows of {}",
            values.shape(),
            MAX_K.min(x.width()),
            x.width()
        )));
    }
    check::reachable(context, &[x_named, values_named, indices_named])?;
    check::result(values_named, &[x_named], InPlace::Refused)?;
    check::result(indices_named, &[x_named, values_named], InPlace::Refused)?;
    if values.is_empty() {
        return Ok(());
    }
    let width = i32::try_from(x.width()).map_err(|_| too_wide(x))?;
    let values_place = output(context, values, contiguous)?;
    let indices_place = output(context, indices, contiguous)?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = &input(context, x, contiguous)?.tensor;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T and i32 on the host that share nothing.
                let (x, values, indices) = unsafe {
                    (
                        host_slice::<T>(x),
                        host_slice_mut::<T>(&values_place.tensor),
                        host_slice_mut::<i32>(&indices_place.tensor),
                    )
                };
                host::top_k(backend, x, width as usize, k as usize, values, indices)
            })?;
        }
        ContextBackend::Cuda(cuda) => {
            let x = &input(context, x, one_stride)?.tensor;
            let (values, indices) = (&values_place.tensor, &indices_place.tensor);
            top_k_on_cuda(context, cuda, dtype, x, width, values, indices)?;
        }
    }
    values_place.finish(context)?;
    indices_place.finish(context)
}

/// Elements or candidates that one block selects from.
const HELD: i64 = 16384;

/// How a row is cut for the first launch: into how many parts, of how many elements (a multiple of 8).
fn top_k_parts(width: i64) -> (i64, i64) {
    let parts = (width as u64).div_ceil(HELD as u64);
    let chunk = (width as u64).div_ceil(parts).next_multiple_of(8);
    ((width as u64).div_ceil(chunk) as i64, chunk as i64)
}

fn top_k_on_cuda(
    context: &ComputeContext,
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    width: i32,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    /// Bytes of candidates that one round of launches may use.
    const WORKSPACE: i64 = 64 << 20;
    const BLOCK: u32 = 1024;
    let k = values.width();
    let num_rows = values.num_elements() / k;
    let stride = row_layout(x)?.outer_stride;
    let size = x.element().size_bytes() as i64;
    let is_vector = rows_are_aligned(x)?;
    let k_argument = k as i32;
    if i64::from(width) <= HELD {
        let name = match is_vector {
            true => kernel_name!("top_k_single", dtype),
            false => kernel_name!("top_k_single_scalar", dtype),
        };
        let rows = num_blocks(num_rows, 1)
            .ok_or_else(|| Error::unsupported(format!("{num_rows} rows are too many")))?;
        let arguments = Arguments::new()
            .tensor(values)
            .tensor(indices)
            .tensor(x)
            .i32(width)
            .i32(k_argument)
            .i64(stride);
        // SAFETY: the arguments of xserv_top_k_single*; the stride leads to the rows.
        return unsafe { cuda.launch("top_k", name, Launch::linear(rows, BLOCK), arguments) };
    }
    let (parts, chunk) = top_k_parts(width.into());
    if parts > 65535 {
        return Err(Error::unsupported(format!("top_k: rows of {width} are too wide")));
    }
    let row_bytes = 8 * parts * k;
    let rows_at_a_time = (WORKSPACE / row_bytes).clamp(1, num_rows);
    let allocate = |parts: i64| {
        context.allocate((8 * rows_at_a_time * parts * k) as usize, "the candidates of top_k")
    };
    let groups_of = |parts: i64| ((parts * k) as u64).div_ceil(HELD as u64) as i64;
    let candidates = allocate(parts)?;
    let reduced = if groups_of(parts) > 1 { Some(allocate(groups_of(parts))?) } else { None };
    let names = (
        match is_vector {
            true => kernel_name!("top_k_parts", dtype),
            false => kernel_name!("top_k_parts_scalar", dtype),
        },
        kernel_name!("top_k_merge", dtype),
    );
    let launch = |name, grid: (i64, i64), arguments| {
        let grid = (grid.0 as u32, grid.1 as u32, 1);
        let launch = Launch { grid, block: BLOCK, shared_bytes: 0 };
        // SAFETY: the arguments of xserv_top_k_parts*, _reduce and _merge as given below; there is room for k
        // candidates of every part.
        unsafe { cuda.launch("top_k", name, launch, arguments) }
    };
    let mut first = 0;
    while first < num_rows {
        let rows = rows_at_a_time.min(num_rows - first);
        let x_start = x.data().wrapping_add((first * stride * size) as usize);
        let arguments = Arguments::new()
            .pointer(candidates.start())
            .pointer(x_start)
            .i32(width)
            .i32(k_argument)
            .i32(chunk as i32)
            .i64(stride);
        launch(names.0, (rows, parts), arguments)?;
        // While a row has more candidates than one block holds, blocks select among them, to and fro.
        let (mut source, mut target) = (Some(&candidates), reduced.as_ref());
        let mut present = parts;
        while let (groups @ 2.., Some(from), Some(to)) = (groups_of(present), source, target) {
            let arguments = Arguments::new()
                .pointer(to.start())
                .pointer(from.start())
                .i32((present * k) as i32)
                .i32(k_argument);
            launch("xserv_top_k_reduce", (rows, groups), arguments)?;
            present = groups;
            std::mem::swap(&mut source, &mut target);
        }
        let arguments = Arguments::new()
            .pointer(values.data().wrapping_add((first * k * size) as usize))
            .pointer(indices.data().wrapping_add((first * k * 4) as usize))
            .pointer(x_start)
            .pointer(source.map_or(std::ptr::null_mut(), |block| block.start()))
            .i32((present * k) as i32)
            .i32(k_argument)
            .i64(stride);
        launch(names.1, (rows, 1), arguments)?;
        first += rows;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shared_by_blocks() {
        // Measured best: about 74 for one row of logits, 8 to 16 for 32.
        assert_eq!(argmax_splits(1, 151_936 / 8, 256), 75);
        assert_eq!(argmax_splits(1, 151_936 / 4, 256), 80);
        assert_eq!(argmax_splits(32, 151_936 / 8, 256), 16);
        assert_eq!(argmax_splits(1000, 151_936 / 8, 256), 1);
        assert_eq!(argmax_splits(1, 0, 256), 1);
        for width in [16_385, 16_392, 151_936, 262_144, 262_145, i64::from(i32::MAX)] {
            let (parts, chunk) = top_k_parts(width);
            assert!(
                chunk % 8 == 0
                    && chunk <= HELD
                    && (parts - 1) * chunk < width
                    && parts * chunk >= width
            );
            // The most candidates fit 32 bits, and the grid its limit.
            assert!(parts * MAX_K < 1 << 31 && parts <= 131_072);
        }
    }
}
