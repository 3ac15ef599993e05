//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::rows_are_aligned;
use crate::ops::common::launch::{num_blocks, row_layout};

/// Returns how many blocks share a row of `accesses` accesses: enough rows fill the device by
/// themselves; there are fewer blocks than accesses, and not many more than pay (measured on an
/// H200 with 1 and 32 rows of 151936).
fn argmax_splits(num_rows: i64, accesses: i64, block: u32) -> i64 {
    let useful = (accesses as u64).div_ceil(u64::from(block)) as i64;
    useful.min(512 / num_rows.max(1)).clamp(1, 80)
}

pub(in crate::ops) fn argmax_on_cuda(
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
    let kernel = match (is_vector, out_is_i64) {
        (true, true) => kernels::ARGMAX_I64.of(dtype),
        (true, false) => kernels::ARGMAX_I32.of(dtype),
        (false, true) => kernels::ARGMAX_SCALAR_I64.of(dtype),
        (false, false) => kernels::ARGMAX_SCALAR_I32.of(dtype),
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
    // SAFETY: the arguments of xserv_argmax_*; the stride leads to the rows, and there is a word
    // for each part.
    unsafe { cuda.launch(kernel, launch, arguments) }?;
    if splits > 1 {
        let kernel = if out_is_i64 { kernels::ARGMAX_MERGE_I64 } else { kernels::ARGMAX_MERGE_I32 };
        let arguments = Arguments::new().tensor(out).pointer(partials_start).i32(splits as i32);
        // SAFETY: the arguments of xserv_argmax_merge_*; the parts were written by the launch
        // before.
        unsafe { cuda.launch(kernel, Launch::linear(rows, 32), arguments) }?;
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
    }
}
