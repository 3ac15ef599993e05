//! `out = a + b`, `out = a * b` and `target = source` in another type: element by element, computed
//! in f32 and rounded once to nearest even.
//!
//! All tensors have one shape and any strides; a stride of 0 repeats an operand along an axis.

mod binary;
pub mod cpu;
mod cuda;

use self::binary::Binary;
use self::cuda::binary_on_cuda;
use self::cuda::cast_on_cuda;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::launch::with_storage;
use crate::ops::common::storage::Storage;
use crate::ops::common::strided::Axes;
use std::marker::PhantomData;

/// Computes `out = a + b`. `out` may be the same view as `a` or `b`.
pub fn add(context: &ComputeContext, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    binary(context, Binary::Add, a, b, out)
}

/// Computes `out = a * b`. `out` may be the same view as `a` or `b`.
pub fn mul(context: &ComputeContext, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    binary(context, Binary::Mul, a, b, out)
}

fn binary(
    context: &ComputeContext,
    function: Binary,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (a_named, b_named, out_named) = (("a", a), ("b", b), ("out", out));
    let dtype = check::float(a_named)?;
    check::same_type(&[a_named, b_named, out_named])?;
    check::same_shape(&[a_named, b_named, out_named])?;
    check::reachable(context, &[a_named, b_named, out_named])?;
    check::result(out_named, &[a_named, b_named], InPlace::Allowed)?;
    if out.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => with_storage!(dtype, T => {
            // SAFETY: tensors of T on the host, of one shape, as checked above.
            unsafe {
                match function {
                    Binary::Add => map_on_host::<T, T, _>(backend, [out, a, b], |a, b| a + b),
                    Binary::Mul => map_on_host::<T, T, _>(backend, [out, a, b], |a, b| a * b),
                }
            }
        }),
        ContextBackend::Cuda(cuda) => binary_on_cuda(cuda, dtype, function, a, b, out),
    }
}

/// Computes `target = source`, rounded to nearest even; too large for f16 becomes infinite, NaN
/// stays NaN.
pub fn cast(context: &ComputeContext, source: &Tensor, target: &Tensor) -> Result<()> {
    let (source_named, target_named) = (("source", source), ("target", target));
    let from = check::float(source_named)?;
    let to = check::float(target_named)?;
    check::same_shape(&[source_named, target_named])?;
    check::reachable(context, &[source_named, target_named])?;
    let in_place = if from == to { InPlace::Allowed } else { InPlace::Refused };
    check::result(target_named, &[source_named], in_place)?;
    if source.is_empty() || source.is_same_view(target) {
        return Ok(());
    }
    if from == to {
        // SAFETY: memory of the context, of one shape and type, that does not overlap.
        return unsafe { copy_unchecked(context, source, target) };
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => with_storage!(from, T => with_storage!(to, U => {
            // SAFETY: tensors of T and U on the host, of one shape.
            unsafe { map_on_host::<T, U, _>(backend, [target, source, source], |x, _| x) }
        })),
        ContextBackend::Cuda(cuda) => cast_on_cuda(cuda, from, to, source, target),
    }
}

/// The number of elements that the host computes at a time: they stay in the first-level cache, as
/// f32.
const CHUNK: usize = 256;
/// The number of elements of a run that one thread gets.
const RUN: i64 = 16 * CHUNK as i64;

/// Computes `out = f(a, b)` for the three tensors, with any strides, on the host. Every element is
/// read before the result is written in its place.
///
/// # Safety
/// The tensors have one shape and lie on the host; the first has elements of U and no two of them
/// share a place, the others have elements of T, and are the same view as the first or share no
/// memory with it.
unsafe fn map_on_host<T: Storage, U: Storage, F: Fn(f32, f32) -> f32 + Copy + Sync>(
    backend: &CpuBackend,
    [out, a, b]: [&Tensor; 3],
    function: F,
) -> Result<()> {
    let axes = Axes::of(&[out, a, b])?;
    let num_runs = axes.num_runs(RUN) as usize;
    let run_len = axes.innermost().0.min(RUN) as usize;
    let steps = axes.innermost().1;
    let starts = (
        SendPointer(out.data().cast::<U>()),
        SendPointer(a.data().cast::<T>()),
        SendPointer(b.data().cast::<T>()),
    );
    backend.parallel_tokens(num_runs, run_len, |runs| {
        for run in runs {
            let ([out_first, a_first, b_first], len) = axes.run(run as i64, RUN);
            backend.run(MapRun::<T, U, F> {
                out: starts.0.get().wrapping_add(out_first as usize),
                a: starts.1.get().wrapping_add(a_first as usize),
                b: starts.2.get().wrapping_add(b_first as usize),
                steps: steps.map(|step| step as usize),
                len: len as usize,
                function,
                _elements: PhantomData,
            });
        }
    })
}

/// A run of [`map_on_host`], which vouches for the pointers.
struct MapRun<T, U, F> {
    out: *mut U,
    a: *const T,
    b: *const T,
    steps: [usize; 3],
    len: usize,
    function: F,
    _elements: PhantomData<(T, U)>,
}

impl<T: Storage, U: Storage, F: Fn(f32, f32) -> f32> Kernel for MapRun<T, U, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let [out_step, a_step, b_step] = self.steps;
        let (mut wide_a, mut wide_b) = ([0.0; CHUNK], [0.0; CHUNK]);
        let mut first = 0;
        while first < self.len {
            let len = CHUNK.min(self.len - first);
            let (wide_a, wide_b) = (&mut wide_a[..len], &mut wide_b[..len]);
            // SAFETY: elements [first, first + len) of the run, by the contract of `map_on_host`;
            // the slices of the inputs are gone when the result is written.
            unsafe {
                read::<S, T>(self.a.add(first * a_step), a_step, wide_a);
                read::<S, T>(self.b.add(first * b_step), b_step, wide_b);
                wide_a.iter_mut().zip(wide_b).for_each(|(a, b)| *a = (self.function)(*a, *b));
                let out = self.out.add(first * out_step);
                if out_step == 1 {
                    U::narrow::<S>(wide_a, std::slice::from_raw_parts_mut(out, len));
                } else {
                    for (i, &value) in wide_a.iter().enumerate() {
                        out.add(i * out_step).write(U::from_f32(value));
                    }
                }
            }
            first += len;
        }
    }
}

/// Computes `to[i] = from[i * step]`.
///
/// # Safety
/// The elements are readable, and nobody writes them meanwhile.
#[inline(always)]
unsafe fn read<S: Simd, T: Storage>(from: *const T, step: usize, to: &mut [f32]) {
    // SAFETY: by contract.
    unsafe {
        match step {
            0 => to.fill(from.read().to_f32()),
            1 => T::widen::<S>(std::slice::from_raw_parts(from, to.len()), to),
            _ => to
                .iter_mut()
                .enumerate()
                .for_each(|(i, to)| *to = from.add(i * step).read().to_f32()),
        }
    }
}
