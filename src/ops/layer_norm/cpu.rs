//! Layer normalisation (Ba, Kiros and Hinton, 2016): `out = (x - mean) / sqrt(var + eps) * weight +
//! bias`, with the population variance, in two passes so that a large mean costs no accuracy;
//! computed in f32 and rounded once.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::row_sums::inverse_root;
use crate::ops::common::row_sums::{sum_rows, Difference, SquaredDifference, GROUP};
use crate::ops::common::storage::{Storage, CHUNK};

/// Normalises each row of x [num_rows, width] into `out` of the same shape; `weight` and `bias`
/// (`None` stands for zeros) are [width].
pub fn layer_norm<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    eps: f32,
    out: &mut [T],
) -> Result<()> {
    let width = weight.len();
    if x.len() != out.len()
        || bias.is_some_and(|bias| bias.len() != width)
        || (width == 0 && !x.is_empty())
        || (width > 0 && !x.len().is_multiple_of(width))
    {
        return Err(Error::internal(format!(
            "layer_norm: {} inputs, {} outputs, weight of {width}, bias of {:?}",
            x.len(),
            out.len(),
            bias.map(<[T]>::len)
        )));
    }
    backend.parallel_rows(out, width, |first, out| {
        let x = &x[first * width..][..out.len()];
        backend.run(Rows { x, weight, bias, eps, out });
    })
}

struct Rows<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    eps: f32,
    out: &'a mut [T],
}

impl<T: Storage> Kernel for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let width = self.weight.len();
        let num_rows = self.x.len() / width;
        let mut row = 0;
        while row + GROUP <= num_rows {
            self.group::<S, GROUP>(row);
            row += GROUP;
        }
        while row < num_rows {
            self.group::<S, 1>(row);
            row += 1;
        }
    }
}

impl<T: Storage> Rows<'_, T> {
    /// Normalises R rows from `first` on.
    #[inline(always)]
    fn group<S: Simd, const R: usize>(&mut self, first: usize) {
        let width = self.weight.len();
        let rows: [&[T]; R] =
            std::array::from_fn(|r| &self.x[(first + r) * width..(first + r + 1) * width]);
        let rough = sum_rows::<S, T, _, R>(Difference, rows, [0.0; R]).map(|s| s / width as f32);
        // The mean of the remainders corrects the rounding of the first sum.
        let left = sum_rows::<S, T, _, R>(Difference, rows, rough);
        let means: [f32; R] = std::array::from_fn(|r| rough[r] + left[r] / width as f32);
        let squares = sum_rows::<S, T, _, R>(SquaredDifference, rows, means);
        let scales = squares.map(|sum| inverse_root(sum, width, self.eps));
        let (mut weight, mut bias, mut values) = ([0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK]);
        for start in (0..width).step_by(CHUNK) {
            let columns = start..(start + CHUNK).min(width);
            let len = columns.len();
            T::widen::<S>(&self.weight[columns.clone()], &mut weight[..len]);
            if let Some(from) = self.bias {
                T::widen::<S>(&from[columns.clone()], &mut bias[..len]);
            }
            for r in 0..R {
                let (mean, scale) = (means[r], scales[r]);
                let normed = |x: f32, w: f32, b: f32| S::mul_add((x - mean) * scale, w, b);
                let x = &rows[r][columns.clone()];
                let out = &mut self.out[(first + r) * width..][columns.clone()];
                let affine = weight[..len].iter().zip(&bias[..len]);
                if let (Some(x), Some(out)) = (T::as_f32(x), T::as_f32_mut(out)) {
                    for ((o, &x), (&w, &b)) in out.iter_mut().zip(x).zip(affine) {
                        *o = normed(x, w, b);
                    }
                } else {
                    let values = &mut values[..len];
                    T::widen::<S>(x, values);
                    for (x, (&w, &b)) in values.iter_mut().zip(affine) {
                        *x = normed(*x, w, b);
                    }
                    T::narrow::<S>(values, out);
                }
            }
        }
    }
}
