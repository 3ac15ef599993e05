//! Activations, computed in f32 and rounded once. `silu(x) = x / (1 + e^-x)`.
//!
//! `gelu_tanh` is GPT-2's form (Hendrycks and Gimpel, 2016, section 2):
//! `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, computed as `x sigmoid(2 ...)`, which is equal
//! and loses nothing to cancellation. `gelu_erf` is the exact form, `x/2 erfc(-x / sqrt 2)`.

use crate::backend::cpu::exponential::exp;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::storage::{map, map_in_place, Storage};

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GPT-2's form of GELU.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// The sigmoid-weighted linear unit.
    Silu,
}

/// Computes `out = f(x)`. No finite x gives a NaN.
pub fn activation<T: Storage>(
    backend: &CpuBackend,
    function: Activation,
    x: &[T],
    out: &mut [T],
) -> Result<()> {
    if x.len() != out.len() {
        return Err(Error::internal(format!(
            "{function:?}: {} inputs, {} outputs",
            x.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, 1, |first, out| {
        let x = &x[first..][..out.len()];
        backend.run(Apply { function, x: Some(x), out });
    })
}

/// Computes `x = f(x)`.
pub fn activation_in_place<T: Storage>(
    backend: &CpuBackend,
    function: Activation,
    x: &mut [T],
) -> Result<()> {
    backend.parallel_rows(x, 1, |_, out| backend.run(Apply { function, x: None, out }))
}

/// Computes `out[i] = gelu(x[i])` in the tanh form. For tests.
#[doc(hidden)]
pub fn gelu_tanh<T: Storage>(backend: &CpuBackend, x: &[T], out: &mut [T]) -> Result<()> {
    activation(backend, Activation::GeluTanh, x, out)
}

/// Computes `out[i] = gelu(x[i])`. For tests.
#[doc(hidden)]
pub fn gelu_erf<T: Storage>(backend: &CpuBackend, x: &[T], out: &mut [T]) -> Result<()> {
    activation(backend, Activation::GeluErf, x, out)
}

/// Computes `out[i] = silu(x[i])`.
pub fn silu<T: Storage>(backend: &CpuBackend, x: &[T], out: &mut [T]) -> Result<()> {
    activation(backend, Activation::Silu, x, out)
}

#[inline(always)]
pub(in crate::ops) fn silu_value<S: Simd>(x: f32) -> f32 {
    x / (1.0 + exp::<S>(-x))
}

#[inline(always)]
fn gelu_tanh_value<S: Simd>(x: f32) -> f32 {
    // The constants are 2 sqrt(2/pi), and that times 0.044715.
    const LINEAR: f32 = 1.595_769_2;
    const CUBIC: f32 = 0.071_354_814;
    let inner = x * S::mul_add(x * x, CUBIC, LINEAR);
    x / (1.0 + exp::<S>(-inner))
}

/// The coefficients of erfc to 1.2e-7 relative: the Chebyshev fit of Press et al., Numerical
/// Recipes, 2nd edition, section 6.2, `erfcc`. The highest power comes first.
const ERFC_TERMS: [f32; 10] = [
    0.170_872_77,
    -0.822_152_23,
    1.488_515_9,
    -1.135_204,
    0.278_868_07,
    -0.186_288_06,
    0.096_784_18,
    0.374_091_96,
    1.000_023_7,
    -1.265_512_2,
];

#[inline(always)]
fn gelu_erf_value<S: Simd>(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / S::mul_add(z, 0.5, 1.0);
    let mut p = ERFC_TERMS[0];
    for term in &ERFC_TERMS[1..] {
        p = S::mul_add(p, t, *term);
    }
    let tail = 0.5 * t * exp::<S>(S::mul_add(-z, z, p));
    x * if x > 0.0 { 1.0 - tail } else { tail }
}

struct Apply<'a, T> {
    function: Activation,
    /// The input; with `None` it is `out` itself.
    x: Option<&'a [T]>,
    out: &'a mut [T],
}

impl<T: Storage> Apply<'_, T> {
    #[inline(always)]
    fn with<S: Simd>(self, f: impl Fn(f32) -> f32 + Copy) {
        match self.x {
            Some(x) => map::<S, T>(x, self.out, f),
            None => map_in_place::<S, T>(self.out, f),
        }
    }
}

impl<T: Storage> Kernel for Apply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        match self.function {
            Activation::GeluTanh => self.with::<S>(gelu_tanh_value::<S>),
            Activation::GeluErf => self.with::<S>(gelu_erf_value::<S>),
            Activation::Silu => self.with::<S>(silu_value::<S>),
        }
    }
}
