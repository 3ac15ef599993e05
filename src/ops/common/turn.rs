//! Copies that are transpositions of matrices: `csrc/ops/transpose/transpose.cu`.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::ops::common::strided::Axes;

/// A copy that is a transposition of matrices whose rows are contiguous on both sides, in elements.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::ops) struct Turn {
    batch: i64,
    rows: i64,
    columns: i64,
    /// The distances from matrix to matrix and from row to row: of the target, and of the source.
    batch_strides: [i64; 2],
    row_strides: [i64; 2],
}

/// Returns the axes of a target and a source as a transposition for the tiled kernel; `None` if
/// they are another kind of copy, or one that the kernel does not take, or one whose tiles would be
/// mostly empty.
pub(in crate::ops) fn as_turn(axes: &Axes, element_size: i64) -> Option<Turn> {
    const TILE: i64 = 64;
    let (rows, [1, source_row_stride, _]) = axes.innermost() else { return None };
    let mut columns = None;
    let mut batch = None;
    for &(size, [target, source, _]) in axes.iter().rev().skip(1) {
        let slot = if source == 1 && columns.is_none() { &mut columns } else { &mut batch };
        if slot.replace((size, target, source)).is_some() {
            return None;
        }
    }
    let (columns, target_row_stride, _) = columns?;
    let (batch, target_batch, source_batch) = batch.unwrap_or((1, 0, 0));
    let fits = matches!(element_size, 2 | 4)
        && source_row_stride > 1
        && (TILE / 4..=TILE * 65535).contains(&rows)
        && (TILE / 4..=1 << 30).contains(&columns);
    fits.then_some(Turn {
        batch,
        rows,
        columns,
        batch_strides: [target_batch, source_batch],
        row_strides: [target_row_stride, source_row_stride],
    })
}

/// Queues a transposition.
///
/// # Safety
/// The elements of [`as_turn`]'s axes are memory of the device from `target` and `source` on, and
/// do not overlap.
pub(in crate::ops) unsafe fn turn_on_cuda(
    cuda: &CudaContext,
    turn: &Turn,
    element_size: i64,
    source: *mut u8,
    target: *mut u8,
) -> Result<()> {
    const TILE: i64 = 64;
    const MAX_MATRICES: i64 = 65535;
    let Turn { batch, rows, columns, batch_strides, row_strides } = *turn;
    // Two 16-bit elements are moved at once where everything is even.
    let even = [rows, columns].iter().chain(&batch_strides).chain(&row_strides).all(|n| n % 2 == 0)
        && [source, target].iter().all(|pointer| (*pointer as usize).is_multiple_of(4));
    let kernel = match (element_size, even) {
        (4, _) => kernels::TRANSPOSE_B4,
        (2, true) => kernels::TRANSPOSE_B2,
        (2, false) => kernels::TRANSPOSE_B2_SCALAR,
        _ => return Err(Error::internal(format!("elements of {element_size} bytes"))),
    };
    let mut first = 0;
    while first < batch {
        let matrices = MAX_MATRICES.min(batch - first);
        let grid = (
            (columns as u64).div_ceil(TILE as u64) as u32,
            (rows as u64).div_ceil(TILE as u64) as u32,
            matrices as u32,
        );
        let [target_first, source_first] =
            batch_strides.map(|stride| (first * stride * element_size) as usize);
        let arguments = Arguments::new()
            .pointer(target.wrapping_add(target_first))
            .pointer(source.wrapping_add(source_first))
            .i32(rows as i32)
            .i32(columns as i32)
            .i64(batch_strides[0])
            .i64(batch_strides[1])
            .i64(row_strides[0])
            .i64(row_strides[1]);
        let launch = Launch { grid, block: 256, shared_bytes: 0 };
        // SAFETY: the arguments of xserv_transpose_*; sizes fit its 32 bits by `as_turn`, the rest
        // by contract.
        unsafe { cuda.launch(kernel, launch, arguments) }?;
        first += matrices;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{DType, Device, ElementType, Tensor};

    fn turn_of(shape: &[i64], target: &[i64], source: &[i64]) -> Option<Turn> {
        let view = |strides| {
            let data = std::ptr::without_provenance_mut(4096);
            let element = ElementType::Float(DType::BF16);
            // SAFETY: never read or written.
            unsafe { Tensor::from_raw(data, element, Device::Cpu, shape, Some(strides), "x") }
                .unwrap()
        };
        as_turn(&Axes::of(&[&view(target), &view(source)]).unwrap(), 2)
    }

    #[test]
    fn transpositions_are_recognised() {
        let turn = |batch, rows, columns, batch_strides, row_strides| {
            Some(Turn { batch, rows, columns, batch_strides, row_strides })
        };
        assert_eq!(turn_of(&[40, 70], &[70, 1], &[1, 40]), turn(1, 70, 40, [0, 0], [70, 40]));
        // These are a batch of slices, and a permutation that brings the first dimension to the
        // end.
        assert_eq!(
            turn_of(&[3, 40, 70], &[2800, 70, 1], &[9000, 1, 64]),
            turn(3, 70, 40, [2800, 9000], [70, 64])
        );
        assert_eq!(
            turn_of(&[40, 5, 70], &[350, 70, 1], &[1, 40, 200]),
            turn(5, 70, 40, [70, 40], [350, 200])
        );
        // These are plain and gathering copies, repeated rows, and small matrices.
        assert_eq!(turn_of(&[40, 70], &[80, 1], &[70, 1]), None);
        assert_eq!(turn_of(&[40, 70], &[70, 1], &[2, 80]), None);
        assert_eq!(turn_of(&[40, 70], &[70, 1], &[1, 0]), None);
        assert_eq!(turn_of(&[2, 70], &[70, 1], &[1, 2]), None);
        assert_eq!(turn_of(&[2, 3, 40, 70], &[20000, 5600, 70, 1], &[30000, 7000, 1, 40]), None);
    }
}
