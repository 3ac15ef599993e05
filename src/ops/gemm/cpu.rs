//! Matrix product `C = alpha op(A) op(B) + beta C`, row-major, summed in f32 and rounded once.
//!
//! op(A) is [m, k], op(B) [k, n], C [m, n]. There are four ways, chosen by shape: op(B) in the
//! panels of `linear`; the same of bf16 in tiles, where the processor has them
//! ([`super::cpu_tiles`]); few rows or columns against a matrix in place, bound by its bandwidth
//! ([`super::cpu_gemv`]); and the plain triple loop.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::tiles::TILE_ROWS;
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::{DType, HostBuffer};
use crate::ops::common::cpu_turn::{Turn, Widen};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{
    grow, multiply, Epilogue, MakePanel, ProductScratch, Rows, Weight,
};
use crate::ops::common::storage::Storage;
use crate::ops::gemm::cpu_gemv::{skinny, Skinny, MAX_VECTORS};
use crate::ops::gemm::cpu_scale::Scale;
pub use crate::ops::gemm::cpu_shape::Gemm;
use crate::ops::gemm::cpu_tiles::{product as product_in_tiles, TileScratch};
use std::marker::PhantomData;

/// Buffers that [`gemm`] needs; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub struct GemmScratch {
    /// op(A) in f32, [m, k]; or the vectors of a skinny product.
    rows: HostBuffer,
    product: ProductScratch,
    tiles: TileScratch,
}

impl GemmScratch {
    /// Makes empty buffers.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Computes the product by the plain triple loop, which the others are compared with.
pub fn gemm_naive<T: Storage>(
    backend: &CpuBackend,
    gemm: &Gemm,
    a: &[T],
    b: &[T],
    c: &mut [T],
) -> Result<()> {
    gemm.check(a.len(), b.len(), c.len())?;
    let Gemm { m, n, k, lda, ldb, ldc, .. } = *gemm;
    let scale = Scale { alpha: gemm.alpha, beta: gemm.beta };
    let start = SendPointer(c.as_mut_ptr());
    backend.parallel_tokens(m, n.saturating_mul(k), |rows| {
        for i in rows {
            for j in 0..n {
                let mut sum = 0.0f32;
                for l in 0..k {
                    let a = a[if gemm.transpose_a { l * lda + i } else { i * lda + l }];
                    let b = b[if gemm.transpose_b { j * ldb + l } else { l * ldb + j }];
                    sum += a.to_f32() * b.to_f32();
                }
                // SAFETY: i < m and j < n, so `check` has found this inside c; each row is given
                // out once.
                scale.store(sum, unsafe { &mut *start.get().add(i * ldc + j) });
            }
        }
    })
}

/// Computes the product in the fastest way.
pub fn gemm<T: Storage>(
    backend: &CpuBackend,
    gemm: &Gemm,
    a: &[T],
    b: &[T],
    c: &mut [T],
    scratch: &mut GemmScratch,
) -> Result<()> {
    gemm.check(a.len(), b.len(), c.len())?;
    let Gemm { m, n, k, lda, ldb, ldc, transpose_a, transpose_b, .. } = *gemm;
    let scale = Scale { alpha: gemm.alpha, beta: gemm.beta };
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 || scale.alpha == 0.0 {
        let rows = c.chunks_mut(ldc).take(m);
        rows.flat_map(|row| row.iter_mut().take(n)).for_each(|c| scale.store(0.0, c));
        return Ok(());
    }
    let GemmScratch { rows, product, tiles } = scratch;
    if m.min(n) <= MAX_VECTORS {
        // The few rows of op(A) are multiplied by B, or the few columns of op(B) by A.
        let left = m <= MAX_VECTORS;
        let (count, few, few_stride, few_contiguous) =
            if left { (m, a, lda, !transpose_a) } else { (n, b, ldb, transpose_b) };
        let stride = k.next_multiple_of(16);
        grow::<f32>(rows, count * stride, "vectors of a product")?;
        let vectors = &mut rows.as_mut_slice::<f32>()[..count * stride];
        for (v, vector) in vectors.chunks_exact_mut(stride.max(1)).enumerate() {
            for (l, x) in vector[..k].iter_mut().enumerate() {
                let index = if few_contiguous { v * few_stride + l } else { l * few_stride + v };
                *x = few[index].to_f32();
            }
            vector[k..].fill(0.0);
        }
        let (many, matrix, matrix_stride, contiguous) =
            if left { (n, b, ldb, transpose_b) } else { (m, a, lda, !transpose_a) };
        let (vector_stride, row_stride) = if left { (ldc, 1) } else { (1, ldc) };
        let product = Skinny {
            vectors,
            stride,
            k,
            matrix,
            matrix_stride,
            many,
            contiguous,
            c: SendPointer(c.as_mut_ptr()),
            vector_stride,
            row_stride,
            scale,
        };
        return skinny(backend, &product);
    }
    let start = c.as_mut_ptr();
    let finish = |first_column| Finish { c: SendPointer(start), first_column, ldc, scale };
    // Up to a row of tiles, widening B costs less than arranging it.
    let in_tiles = backend.has_tiles() && m > TILE_ROWS;
    if let (true, Some(a), Some(b)) = (in_tiles, T::as_bf16(a), T::as_bf16(b)) {
        // SAFETY: the backend has tiles, no size is zero, and `check` has found A and B long enough.
        return unsafe { product_in_tiles(backend, gemm, a, b, finish, tiles) };
    }
    let a: &[f32] = match T::as_f32(a) {
        Some(a) if !transpose_a => a,
        _ => {
            grow::<f32>(rows, m.saturating_mul(k), "rows of a product")?;
            let packed = &mut rows.as_mut_slice::<f32>()[..m * k];
            backend.parallel_rows(packed, k, |first, to| {
                backend.run(PackLeft { gemm, a, first, to });
            })?;
            rows.as_slice()
        }
    };
    let a_stride = if transpose_a || T::DTYPE != DType::F32 { k } else { lda };
    let rows = Rows { a: SendPointer(a.as_ptr().cast_mut().cast()), a_stride, num_rows: m };
    let maker = RightPanels { gemm, b };
    let right = Weight::Made { out_features: n, in_features: k, maker: &maker };
    // SAFETY: `a` is op(A) with rows of k values a_stride apart: `check` has found the last inside
    // the caller's A, and the packed copy is [m, k].
    unsafe { multiply(backend, &rows, &right, &finish(0), product) }
}

/// Makes op(B) in panels [k, 64]; what is past column n is zero.
struct RightPanels<'a, T> {
    gemm: &'a Gemm,
    b: &'a [T],
}

impl<T: Storage> MakePanel for RightPanels<'_, T> {
    #[inline(always)]
    fn make<S: Simd>(&self, panel: usize, to: &mut [f32]) {
        let RightPanels { gemm, b } = *self;
        let first_column = panel * PANEL_COLUMNS;
        let columns = (gemm.n - first_column).min(PANEL_COLUMNS);
        if gemm.transpose_b {
            Turn::<T, f32, Widen<T>> {
                from: &b[first_column * gemm.ldb..],
                from_stride: gemm.ldb,
                rows: columns,
                columns: gemm.k,
                to: &mut *to,
                to_stride: PANEL_COLUMNS,
                _element: PhantomData,
            }
            .run::<S>();
        } else {
            for (l, to) in to.chunks_exact_mut(PANEL_COLUMNS).enumerate() {
                let from = &b[l * gemm.ldb + first_column..][..columns];
                T::widen::<S>(from, &mut to[..columns]);
            }
        }
        if columns < PANEL_COLUMNS {
            to.chunks_exact_mut(PANEL_COLUMNS).for_each(|to| to[columns..].fill(0.0));
        }
    }
}

/// Returns the rows of op(A) from `first` on: [rows, k].
struct PackLeft<'a, T> {
    gemm: &'a Gemm,
    a: &'a [T],
    first: usize,
    to: &'a mut [f32],
}

impl<T: Storage> Kernel for PackLeft<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let PackLeft { gemm: Gemm { k, lda, transpose_a, .. }, a, first, to } = self;
        let (k, lda) = (*k, *lda);
        if *transpose_a {
            let columns = to.len() / k;
            Turn::<T, f32, Widen<T>> {
                from: &a[first..],
                from_stride: lda,
                rows: k,
                columns,
                to,
                to_stride: k,
                _element: PhantomData,
            }
            .run::<S>();
        } else {
            for (row, to) in to.chunks_exact_mut(k).enumerate() {
                T::widen::<S>(&a[(first + row) * lda..][..k], to);
            }
        }
    }
}

/// Writes finished sums to C, from a column on.
struct Finish<T> {
    c: SendPointer<T>,
    first_column: usize,
    ldc: usize,
    scale: Scale,
}

impl<T: Storage> Epilogue for Finish<T> {
    #[inline(always)]
    fn store<S: Simd>(
        &self,
        sums: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: std::ops::Range<usize>,
    ) {
        let Scale { alpha, beta } = self.scale;
        let (len, first_column) = (columns.len(), self.first_column + columns.start);
        let mut old = [0.0; PANEL_COLUMNS];
        for (row, sums) in sums.chunks_exact(PANEL_COLUMNS).take(num_rows).enumerate() {
            // SAFETY: row first_row + row < m and the columns are below n, so `check` has found
            // this inside c; each row and column is given out once.
            let c = unsafe {
                std::slice::from_raw_parts_mut(
                    self.c.get().add((first_row + row) * self.ldc + first_column),
                    len,
                )
            };
            if alpha == 1.0 && beta == 0.0 {
                T::narrow::<S>(&sums[..len], c);
                continue;
            }
            if beta != 0.0 {
                T::widen::<S>(c, &mut old[..len]);
            }
            for (old, &sum) in old[..len].iter_mut().zip(sums) {
                let before = if beta == 0.0 { 0.0 } else { beta * *old };
                *old = alpha * sum + before;
            }
            T::narrow::<S>(&old[..len], c);
        }
    }
}
