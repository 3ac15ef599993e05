//! Sums, products and conversions, element by element; computed in f32 and rounded once.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::storage::{map2, Storage, CHUNK};

/// Computes `out = a + b`.
pub fn add<T: Storage>(backend: &CpuBackend, a: &[T], b: &[T], out: &mut [T]) -> Result<()> {
    binary(backend, false, a, b, out)
}

/// Computes `out = a * b`.
pub fn mul<T: Storage>(backend: &CpuBackend, a: &[T], b: &[T], out: &mut [T]) -> Result<()> {
    binary(backend, true, a, b, out)
}

fn binary<T: Storage>(
    backend: &CpuBackend,
    multiply: bool,
    a: &[T],
    b: &[T],
    out: &mut [T],
) -> Result<()> {
    if a.len() != out.len() || b.len() != out.len() {
        let op = if multiply { "mul" } else { "add" };
        return Err(Error::internal(format!(
            "{op}: {} and {} inputs, {} outputs",
            a.len(),
            b.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, 1, |first, out| {
        let (a, b) = (&a[first..][..out.len()], &b[first..][..out.len()]);
        backend.run(Binary { multiply, a, b, out });
    })
}

/// Computes `out = x` in another type, to nearest even; NaN stays NaN and numbers that are too
/// large become infinite.
pub fn cast<T: Storage, U: Storage>(backend: &CpuBackend, x: &[T], out: &mut [U]) -> Result<()> {
    if x.len() != out.len() {
        return Err(Error::internal(format!("cast: {} inputs, {} outputs", x.len(), out.len())));
    }
    backend.parallel_rows(out, 1, |first, out| {
        backend.run(Cast { x: &x[first..][..out.len()], out });
    })
}

struct Binary<'a, T> {
    multiply: bool,
    a: &'a [T],
    b: &'a [T],
    out: &'a mut [T],
}

impl<T: Storage> Kernel for Binary<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if self.multiply {
            map2::<S, T>(self.a, self.b, self.out, |a, b| a * b);
        } else {
            map2::<S, T>(self.a, self.b, self.out, |a, b| a + b);
        }
    }
}

struct Cast<'a, T, U> {
    x: &'a [T],
    out: &'a mut [U],
}

impl<T: Storage, U: Storage> Kernel for Cast<'_, T, U> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if let Some(x) = T::as_f32(self.x) {
            return U::narrow::<S>(x, self.out);
        }
        if let Some(out) = U::as_f32_mut(self.out) {
            return T::widen::<S>(self.x, out);
        }
        let mut wide = [0.0; CHUNK];
        for (x, out) in self.x.chunks(CHUNK).zip(self.out.chunks_mut(CHUNK)) {
            let wide = &mut wide[..x.len()];
            T::widen::<S>(x, wide);
            U::narrow::<S>(wide, out);
        }
    }
}
