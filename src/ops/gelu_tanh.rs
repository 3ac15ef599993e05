//! GELU in the tanh form of GPT-2 (Hendrycks and Gimpel, 2016, section 2):
//! `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, computed as `x sigmoid(2 ...)`, which is the same
//! and loses nothing to cancellation.

use crate::backend::cpu::math::exp;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;

/// Replaces each x by gelu(x). No NaN for any finite x: where the cube overflows, the exponential
/// is 0 or infinite and the result x or 0.
pub fn gelu_tanh(backend: &CpuBackend, x: &mut [f32]) -> Result<()> {
    backend.parallel_rows(x, 1, |_, x| backend.run(InPlace { x }))
}

struct InPlace<'a> {
    x: &'a mut [f32],
}

impl Kernel for InPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // 2 sqrt(2/pi), and that times 0.044715.
        const LINEAR: f32 = 1.595_769_2;
        const CUBIC: f32 = 0.071_354_814;
        for x in self.x {
            let inner = *x * S::mul_add(*x * *x, CUBIC, LINEAR);
            *x /= 1.0 + exp::<S>(-inner);
        }
    }
}
