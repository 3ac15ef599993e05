//! Tensors filled with reproducible numbers that look normally distributed, or with one number.
//!
//! A [`Noise`] is a sequence of numbers: number i depends on nothing but the noise and i, and has
//! the same bits on the CPU and on CUDA. Its source is SplitMix64 (Steele, Lea and Flood, 2014):
//! four numbers of 16 bits are added up (Irwin-Hall), so no number is further than 3.47 standard
//! deviations from the mean.

pub mod cpu;
mod cuda;

use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::{one_stride, with_storage};
use crate::ops::common::staging::{contiguous, host_slice_mut, output};

/// A sequence of random numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Two seeds give unrelated sequences.
    pub seed: u64,
    /// The mean of the numbers.
    pub mean: f32,
    /// Their standard deviation; 0 makes every number the mean.
    pub std: f32,
}

/// Fills `out`, of any shape and any strides: element i, counted in row-major order, becomes number
/// i of `noise`, rounded once to nearest even.
pub fn fill(context: &ComputeContext, noise: &Noise, out: &Tensor) -> Result<()> {
    let dtype = check::float(("out", out))?;
    check::reachable(context, &[("out", out)])?;
    check::result(("out", out), &[], InPlace::Refused)?;
    if out.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: a contiguous tensor of T on the host.
                let out = unsafe { host_slice_mut::<T>(&place.tensor) };
                cpu::fill(backend, noise, out)
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let place = output(context, out, |out| out.is_contiguous() || one_stride(out))?;
            cuda::on_cuda(cuda, dtype, noise, &place.tensor)?;
            place.finish(context)
        }
    }
}
