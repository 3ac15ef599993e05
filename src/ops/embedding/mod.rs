//! Embedding lookup: `out[i] = table[ids[i]]`, bit for bit.
//!
//! table [vocab_size, width] f32, f16 or bf16, ids [...] i32 or i64, out [..., width] of the
//! table's type.

pub mod cpu;
pub mod cpu_packed;
mod cuda;
pub mod cuda_chosen;
pub mod cuda_quantised;

use self::cuda::on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::one_stride;
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{contiguous, host_slice, host_slice_mut, input, output};

/// Looks up the rows; see the head of the file. An id outside the table is an error on the CPU; on
/// CUDA it gives a row of zeros and is reported when the context is waited for.
pub fn embedding(
    context: &ComputeContext,
    table: &Tensor,
    ids: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (table_named, ids_named, out_named) = (("table", table), ("ids", ids), ("out", out));
    let dtype = check::float(table_named)?;
    let ids_are_i64 = check::indices_are_i64(ids_named)?;
    check::same_type(&[table_named, out_named])?;
    check::rank(table_named, 2, "[vocab_size, width]")?;
    let mut expected = [0; crate::memory::MAX_RANK + 1];
    let rank = ids.shape().len();
    for (slot, size) in expected.iter_mut().zip(ids.shape().iter().chain([&table.width()])) {
        *slot = *size;
    }
    let expected = expected.get(..=rank).unwrap_or_default();
    check::shape(out_named, expected, "the shape of ids and the width of table")?;
    check::reachable(context, &[table_named, ids_named, out_named])?;
    check::result(out_named, &[table_named, ids_named], InPlace::Refused)?;
    if out.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let table = &input(context, table, contiguous)?.tensor;
            let ids = &input(context, ids, contiguous)?.tensor;
            let place = output(context, out, contiguous)?;
            let (vocab_size, width) =
                (table.shape().first().map_or(0, |&size| size as usize), table.width() as usize);
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T, and of the integers named, on the host; the
                // result overlaps no input.
                unsafe {
                    let (table, out) = (host_slice::<T>(table), host_slice_mut::<T>(&place.tensor));
                    if ids_are_i64 {
                        let ids = host_slice::<i64>(ids);
                        cpu::embedding(backend, table, vocab_size, width, ids, out)
                    } else {
                        let ids = host_slice::<i32>(ids);
                        cpu::embedding(backend, table, vocab_size, width, ids, out)
                    }
                }
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let table = &input(context, table, one_stride)?.tensor;
            let ids = &input(context, ids, contiguous)?.tensor;
            let place = output(context, out, one_stride)?;
            on_cuda(cuda, table, ids, ids_are_i64, &place.tensor)?;
            place.finish(context)
        }
    }
}
