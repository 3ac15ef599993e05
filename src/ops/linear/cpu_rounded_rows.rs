//! Rows of activations rounded to bf16, in the form in which an instruction set without tiles multiplies
//! them: the left operand of products with panels of bf16.

use crate::backend::cpu::simd::{Bf16Kernel, Bf16Simd, Element};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::{DType, HostBuffer};
use crate::ops::common::packed_matrix::k_step;
use crate::ops::common::panel_product::{grow, Rows};

/// Returns the activations from row to row: an odd last one is followed by a zero.
pub(super) fn rounded_stride(in_features: usize) -> usize {
    in_features.saturating_add(in_features % k_step(DType::BF16))
}

/// Returns the bytes of `num_rows` rows, whatever the instruction set.
pub(super) fn rounded_bytes(num_rows: usize, in_features: usize) -> usize {
    num_rows.saturating_mul(rounded_stride(in_features)).saturating_mul(size_of::<f32>())
}

/// Rounds x [num_rows, in_features] to bf16; `order` names the value that comes to each place, or is empty.
pub(super) fn round_rows(
    backend: &CpuBackend,
    x: &[f32],
    in_features: usize,
    order: &[u32],
    buffer: &mut HostBuffer,
) -> Result<Rows> {
    let num_rows = x.len().checked_div(in_features).unwrap_or(0);
    let a_stride = rounded_stride(in_features);
    grow::<f32>(buffer, rounded_bytes(num_rows, in_features) / size_of::<f32>(), "activations")?;
    let target = SendPointer(buffer.as_mut_slice::<f32>().as_mut_ptr());
    backend.parallel_tokens(num_rows, in_features, |rows| {
        let x = &x[rows.start * in_features..rows.end * in_features];
        let (first, target) = (rows.start, target.get());
        backend.run_bf16(RoundRows { x, in_features, order, first, target, a_stride });
    })?;
    let a = SendPointer(buffer.as_bytes_mut().as_mut_ptr());
    Ok(Rows { a, a_stride, num_rows })
}

/// Some rows on their way into the buffer.
struct RoundRows<'a> {
    x: &'a [f32],
    in_features: usize,
    order: &'a [u32],
    /// The number of the first row.
    first: usize,
    target: *mut f32,
    a_stride: usize,
}

impl Bf16Kernel for RoundRows<'_> {
    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        type Activation<S> = <<S as Bf16Simd>::Bf16 as Element>::Activation;
        if self.in_features == 0 {
            return;
        }
        let target = self.target.cast::<Activation<S>>();
        for (row, x) in self.x.chunks_exact(self.in_features).enumerate() {
            // SAFETY: the buffer has a_stride elements of up to four bytes for each row, and those of
            // different tasks do not overlap.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    target.add((self.first + row) * self.a_stride),
                    self.a_stride,
                )
            };
            if self.order.is_empty() {
                for (o, &v) in out.iter_mut().zip(x) {
                    *o = S::Bf16::activation(v);
                }
            } else {
                for (o, &input) in out.iter_mut().zip(self.order) {
                    *o = S::Bf16::activation(x.get(input as usize).copied().unwrap_or(0.0));
                }
            }
            if let Some(last) = out.get_mut(self.in_features) {
                *last = S::Bf16::activation(0.0);
            }
        }
    }
}
