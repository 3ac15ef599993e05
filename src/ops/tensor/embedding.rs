//! Embedding lookup: `out[i] = table[ids[i]]`, bit for bit.
//!
//! table [vocab_size, width] f32, f16 or bf16, ids [...] i32 or i64, out [..., width] of the table's type.

use super::activation::one_stride;
use super::check::{self, InPlace};
use super::staging::{contiguous, host_slice, host_slice_mut, input, output};
use super::{num_blocks, row_layout, with_storage};
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::host;

/// See the head of the file. An id outside the table is an error on the CPU; on CUDA it gives a row of zeros
/// and is reported when the context is waited for.
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
                // SAFETY: contiguous tensors of T, and of the integers named, on the host; the result overlaps no
                // input.
                unsafe {
                    let (table, out) = (host_slice::<T>(table), host_slice_mut::<T>(&place.tensor));
                    match ids_are_i64 {
                        true => {
                            let ids = host_slice::<i64>(ids);
                            host::embedding(backend, table, vocab_size, width, ids, out)
                        }
                        false => {
                            let ids = host_slice::<i32>(ids);
                            host::embedding(backend, table, vocab_size, width, ids, out)
                        }
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

/// The most bytes that the kernel may move at once: rows begin at multiples of it and consist of such units.
fn unit_bytes(table: &Tensor, out: &Tensor) -> Result<i64> {
    let size = table.element().size_bytes() as i64;
    let mut numbers = vec![table.data() as i64, out.data() as i64, table.width() * size];
    for tensor in [table, out] {
        numbers.push(row_layout(tensor)?.outer_stride * size);
    }
    let fits = |unit: &i64| numbers.iter().all(|number| number % unit == 0);
    Ok([16, 4].into_iter().find(fits).unwrap_or(2))
}

fn on_cuda(
    cuda: &CudaContext,
    table: &Tensor,
    ids: &Tensor,
    ids_are_i64: bool,
    out: &Tensor,
) -> Result<()> {
    /// Of the kernel: units of a block.
    const BLOCK: u32 = 128;
    const UNITS: i64 = 2 * BLOCK as i64;
    let too_many = || Error::unsupported(format!("out: shape {} is too large", out.shape()));
    let unit = unit_bytes(table, out)?;
    let size = table.element().size_bytes() as i64;
    let name = match (ids_are_i64, unit) {
        (false, 16) => "xserv_embedding_i32_b16",
        (false, 4) => "xserv_embedding_i32_b4",
        (false, _) => "xserv_embedding_i32_b2",
        (true, 16) => "xserv_embedding_i64_b16",
        (true, 4) => "xserv_embedding_i64_b4",
        (true, _) => "xserv_embedding_i64_b2",
    };
    let units = out.width() * size / unit;
    let tokens = num_blocks(ids.num_elements(), 1).ok_or_else(too_many)?;
    let parts = num_blocks(units, UNITS).filter(|&parts| parts <= 65535).ok_or_else(too_many)?;
    let launch = Launch { grid: (tokens, parts, 1), block: BLOCK, shared_bytes: 0 };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(table)
        .tensor(ids)
        .i64(table.shape().first().copied().unwrap_or(0))
        .i32(units as i32)
        .i64(row_layout(out)?.outer_stride * size / unit)
        .i64(row_layout(table)?.outer_stride * size / unit)
        .pointer(cuda.faults());
    // SAFETY: the arguments of xserv_embedding_*; width and strides are whole units, and the kernel reads no
    // row outside the table.
    unsafe { cuda.launch("embedding", name, launch, arguments) }
}
