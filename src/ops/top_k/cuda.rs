//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::rows_are_aligned;
use crate::ops::common::launch::{num_blocks, row_layout};

/// The number of elements or candidates that one block selects from.
const HELD: i64 = 16384;

/// Returns how a row is cut for the first launch: into how many parts, of how many elements (a
/// multiple of 8).
fn top_k_parts(width: i64) -> (i64, i64) {
    let parts = (width as u64).div_ceil(HELD as u64);
    let chunk = (width as u64).div_ceil(parts).next_multiple_of(8);
    ((width as u64).div_ceil(chunk) as i64, chunk as i64)
}

/// The bytes of candidates that one round of launches may use.
const WORKSPACE: i64 = 64 << 20;

/// Returns the number of parts that one block selects from the candidates of `parts`.
fn groups(parts: i64, k: i64) -> i64 {
    ((parts * k) as u64).div_ceil(HELD as u64) as i64
}

/// Returns the largest number of bytes that selecting the `k` largest of rows of `width` takes
/// temporarily, for `num_rows` of them.
pub fn scratch_bytes(num_rows: usize, width: usize, k: usize) -> usize {
    if width as i64 <= HELD || num_rows == 0 || k == 0 {
        return 0;
    }
    let ((parts, _), k) = (top_k_parts(width as i64), k as i64);
    let rows = (WORKSPACE / (8 * parts * k)).clamp(1, num_rows as i64);
    let reduced = if groups(parts, k) > 1 { groups(parts, k) } else { 0 };
    // Each block of memory begins at a multiple of 512 bytes.
    (8 * rows * (parts + reduced) * k + 1024) as usize
}

pub(in crate::ops) fn top_k_on_cuda(
    context: &ComputeContext,
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    width: i32,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    const BLOCK: u32 = 1024;
    let k = values.width();
    let num_rows = values.num_elements() / k;
    let stride = row_layout(x)?.outer_stride;
    let size = x.element().size_bytes() as i64;
    let is_vector = rows_are_aligned(x)?;
    let k_argument = k as i32;
    if i64::from(width) <= HELD {
        let kernel = if is_vector {
            kernels::TOP_K_SINGLE.of(dtype)
        } else {
            kernels::TOP_K_SINGLE_SCALAR.of(dtype)
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
        return unsafe { cuda.launch(kernel, Launch::linear(rows, BLOCK), arguments) };
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
    let groups_of = |parts: i64| groups(parts, k);
    let candidates = allocate(parts)?;
    let reduced = if groups_of(parts) > 1 { Some(allocate(groups_of(parts))?) } else { None };
    let parts_kernel =
        if is_vector { kernels::TOP_K_PARTS } else { kernels::TOP_K_PARTS_SCALAR }.of(dtype);
    let launch = |kernel, grid: (i64, i64), arguments| {
        let grid = (grid.0 as u32, grid.1 as u32, 1);
        let launch = Launch { grid, block: BLOCK, shared_bytes: 0 };
        // SAFETY: the arguments of xserv_top_k_parts*, _reduce and _merge as given below; there is
        // room for k candidates of every part.
        unsafe { cuda.launch(kernel, launch, arguments) }
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
        launch(parts_kernel, (rows, parts), arguments)?;
        // While a row has more candidates than one block holds, blocks select among them, back and
        // forth.
        let (mut source, mut target) = (Some(&candidates), reduced.as_ref());
        let mut present = parts;
        while let (groups @ 2.., Some(from), Some(to)) = (groups_of(present), source, target) {
            let arguments = Arguments::new()
                .pointer(to.start())
                .pointer(from.start())
                .i32((present * k) as i32)
                .i32(k_argument);
            launch(kernels::TOP_K_REDUCE, (rows, groups), arguments)?;
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
        launch(kernels::TOP_K_MERGE.of(dtype), (rows, 1), arguments)?;
        first += rows;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::top_k::MAX_K;

    #[test]
    fn rows_are_cut_into_parts_that_a_block_holds() {
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
