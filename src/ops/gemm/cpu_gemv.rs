//! Products of a few vectors with a large matrix, which is read once, in place.

use crate::backend::cpu::math::{sum_lanes, LANES};
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::streaming::Ahead;
use crate::backend::cpu::tile::{prefetch, tile_rows, Element, Operands, MAX_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::ops::common::storage::Storage;
use crate::ops::gemm::cpu_scale::Scale;
use std::ops::Range;

/// The most vectors for which this is worth it; with more the matrix is packed.
pub(crate) const MAX_VECTORS: usize = 8;
/// The number of matrix rows whose dot products run side by side.
const ROWS: usize = 4;
/// The number of columns of a matrix [k, many] whose sums stay in the first-level cache.
const COLUMNS: usize = 512;
/// The number of rows of that matrix that are read side by side: as many streams as the prefetchers
/// follow.
const STEPS: usize = 16;

/// The product `c[v, r] = scale(sum over k of vectors[v, k] * matrix[r, k])`.
pub(crate) struct Skinny<'a, T> {
    /// The vectors, [num_vectors <= MAX_VECTORS, stride], zero from k on.
    pub vectors: &'a [f32],
    /// The distance between vectors, a multiple of 16.
    pub stride: usize,
    pub k: usize,
    /// The matrix: [many, k] if `contiguous`, otherwise [k, many], rows `matrix_stride` apart.
    pub matrix: &'a [T],
    pub matrix_stride: usize,
    pub many: usize,
    pub contiguous: bool,
    /// The result, with element (v, r) at `v * vector_stride + r * row_stride`.
    pub c: SendPointer<T>,
    pub vector_stride: usize,
    pub row_stride: usize,
    pub scale: Scale,
}

/// Computes the product. `matrix` and `c` are as large as the fields say: `gemm` has checked it.
pub(crate) fn skinny<T: Storage>(backend: &CpuBackend, product: &Skinny<'_, T>) -> Result<()> {
    // The cuts are at whole groups: a row's sum does not depend on them, but its speed does.
    let group = if product.contiguous { ROWS } else { 4 * LANES };
    let groups = product.many.div_ceil(group);
    backend.parallel_tokens(groups, group * product.k.max(1), |range| {
        let rows = range.start * group..product.many.min(range.end * group);
        backend.run(Part { product, rows });
    })
}

struct Part<'a, T> {
    product: &'a Skinny<'a, T>,
    rows: Range<usize>,
}

impl<T: Storage> Kernel for Part<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Part { product, rows } = self;
        if product.contiguous {
            for first in rows.clone().step_by(ROWS) {
                if first + ROWS <= rows.end {
                    product.dots::<S, ROWS>(first);
                } else {
                    (first..rows.end).for_each(|row| product.dots::<S, 1>(row));
                }
            }
        } else {
            for first in rows.clone().step_by(COLUMNS) {
                product.columns::<S>(first..rows.end.min(first + COLUMNS));
            }
        }
    }
}

impl<T: Storage> Skinny<'_, T> {
    #[inline(always)]
    fn num_vectors(&self) -> usize {
        self.vectors.len().checked_div(self.stride).unwrap_or(0)
    }

    #[inline(always)]
    fn store(&self, vector: usize, row: usize, sum: f32) {
        let index = vector * self.vector_stride + row * self.row_stride;
        // SAFETY: vector and row are inside C, whose extent `gemm` has checked; each is stored
        // once.
        self.scale.store(sum, unsafe { &mut *self.c.get().add(index) });
    }

    /// Multiplies R rows of a matrix [many, k] by all vectors.
    #[inline(always)]
    fn dots<S: Simd, const R: usize>(&self, first: usize) {
        let rows: [&[T]; R] =
            std::array::from_fn(|r| &self.matrix[(first + r) * self.matrix_stride..][..self.k]);
        let mut vector = 0;
        while vector < self.num_vectors() {
            match self.num_vectors() - vector {
                4.. if S::Vector::MAX_SUMS >= 16 => {
                    vector += self.dot::<S, R, 4>(rows, first, vector)
                }
                2.. => vector += self.dot::<S, R, 2>(rows, first, vector),
                _ => vector += self.dot::<S, R, 1>(rows, first, vector),
            }
        }
    }

    /// Multiplies R rows by V vectors from `vector` on; returns V. Each sum has sixteen lanes.
    #[inline(always)]
    // Indices of constant extent, which the compiler unrolls into registers.
    #[allow(clippy::needless_range_loop)]
    fn dot<S: Simd, const R: usize, const V: usize>(
        &self,
        rows: [&[T]; R],
        first: usize,
        vector: usize,
    ) -> usize {
        let vectors: [&[f32]; V] = std::array::from_fn(|v| {
            &self.vectors[(vector + v) * self.stride..(vector + v + 1) * self.stride]
        });
        let whole = self.k - self.k % LANES;
        // SAFETY: kernels run where S is there; 16 values from k < whole on lie in every row and
        // vector; the padded copies have 16.
        unsafe {
            let mut sums = [[S::Vector::zero(); V]; R];
            for k in (0..whole).step_by(LANES) {
                let mut x = [S::Vector::zero(); V];
                for v in 0..V {
                    x[v] = S::Vector::load(vectors[v].as_ptr().add(k));
                }
                for r in 0..R {
                    let source = rows[r].as_ptr().add(k);
                    // These are the next rows: four streams at once are too many for the
                    // prefetchers.
                    prefetch(source.wrapping_add(R * self.matrix_stride).cast());
                    let row = T::load::<S::Vector>(source);
                    for v in 0..V {
                        sums[r][v] = row.mul_add(x[v], sums[r][v]);
                    }
                }
            }
            if whole < self.k {
                for r in 0..R {
                    let mut padded = [T::default(); LANES];
                    padded[..self.k - whole].copy_from_slice(&rows[r][whole..]);
                    let row = T::load::<S::Vector>(padded.as_ptr());
                    for v in 0..V {
                        let x = S::Vector::load(vectors[v].as_ptr().add(whole));
                        sums[r][v] = row.mul_add(x, sums[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    let mut lanes = [0.0; LANES];
                    sums[r][v].store(lanes.as_mut_ptr());
                    self.store(vector + v, first + r, sum_lanes(lanes));
                }
            }
        }
        V
    }

    /// Multiplies columns of a matrix [k, many] by all vectors: a few rows of the matrix at a time,
    /// so that they are read as streams. Each sum is taken in the order of k.
    #[inline(always)]
    fn columns<S: Simd>(&self, columns: Range<usize>) {
        let mut sums = [[0.0f32; COLUMNS]; MAX_VECTORS];
        let whole = columns.len() - columns.len() % LANES;
        for first in (0..self.k).step_by(STEPS) {
            let steps = first..self.k.min(first + STEPS);
            let mut column = 0;
            while column < whole {
                let groups = if whole - column >= 4 * LANES { 4 } else { 1 };
                for vector in (0..self.num_vectors()).step_by(MAX_ROWS) {
                    let count = (self.num_vectors() - vector).min(MAX_ROWS);
                    let at = first * self.matrix_stride + columns.start + column;
                    let operands = Operands::<T::Weights<S::Vector>> {
                        a: self.vectors[vector * self.stride + first..].as_ptr(),
                        a_stride: self.stride,
                        num_steps: steps.len(),
                        b: self.matrix[at..].as_ptr().cast::<Weight<S, T>>(),
                        b_stride: self.matrix_stride,
                        in_tiles: false,
                        ahead: Ahead::NONE,
                        out: sums[vector][column..].as_mut_ptr(),
                        out_stride: COLUMNS,
                        accumulate: first > 0,
                    };
                    // SAFETY: `count` vectors have k values; 16 * groups columns from `column` on
                    // lie in every row of the matrix and in the sums. Weights of all storage types
                    // are one k a step, as they lie in a row.
                    unsafe {
                        match groups {
                            4 => tile_rows::<_, 4>(count, &operands),
                            _ => tile_rows::<_, 1>(count, &operands),
                        }
                    }
                }
                column += groups * LANES;
            }
            for column in whole..columns.len() {
                for (vector, sums) in sums.iter_mut().enumerate().take(self.num_vectors()) {
                    for k in steps.clone() {
                        let x = self.matrix[k * self.matrix_stride + columns.start + column];
                        let factor = self.vectors[vector * self.stride + k];
                        sums[column] = S::mul_add(factor, x.to_f32(), sums[column]);
                    }
                }
            }
        }
        for (vector, sums) in sums.iter().enumerate().take(self.num_vectors()) {
            for (&sum, column) in sums.iter().zip(columns.clone()) {
                self.store(vector, column, sum);
            }
        }
    }
}

type Weight<S, T> = <<T as Storage>::Weights<<S as Simd>::Vector> as Element>::Weight;
