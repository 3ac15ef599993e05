//! Transposition of matrices on the CPU, in squares of sixteen.

use crate::backend::cpu::math::LANES;
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::ops::common::storage::Storage;
use std::marker::PhantomData;

/// The number of columns of the result that are written one after another, so that the lines read
/// stay in the first-level cache.
const BLOCK: usize = 4 * LANES;

/// Moves one element from one matrix to the other.
pub(crate) trait Move {
    type From: Copy;
    type To: Copy;
    /// # Safety
    /// There are 16 readable elements, and V's instruction set.
    unsafe fn load<V: Vector16>(source: *const Self::From) -> V;
    /// # Safety
    /// There are 16 writable elements, and V's instruction set.
    unsafe fn store<V: Vector16>(values: V, target: *mut Self::To);
    fn one(value: Self::From) -> Self::To;
}

/// Moves the bits unchanged.
pub(crate) struct Exact<T>(PhantomData<T>);
/// Widens elements to f32.
pub(crate) struct Widen<T>(PhantomData<T>);

impl<T: Storage> Move for Widen<T> {
    type From = T;
    type To = f32;
    #[inline(always)]
    unsafe fn load<V: Vector16>(source: *const T) -> V {
        // SAFETY: passed on to the caller.
        unsafe { T::load(source) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector16>(values: V, target: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { values.store(target) }
    }
    #[inline(always)]
    fn one(value: T) -> f32 {
        value.to_f32()
    }
}

/// Computes `to[c * to_stride + r] = from[r * from_stride + c]` for r < rows and c < columns.
pub(crate) struct Turn<'a, T, U, M> {
    pub from: &'a [T],
    pub from_stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub to: &'a mut [U],
    pub to_stride: usize,
    pub _element: PhantomData<M>,
}

impl<T: Storage> Move for Exact<T> {
    type From = T;
    type To = T;
    #[inline(always)]
    unsafe fn load<V: Vector16>(source: *const T) -> V {
        // SAFETY: passed on to the caller.
        unsafe { T::load_bits(source) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector16>(values: V, target: *mut T) {
        // SAFETY: passed on to the caller.
        unsafe { T::store_bits(values, target) }
    }
    #[inline(always)]
    fn one(value: T) -> T {
        value
    }
}

impl<T: Copy, U: Copy, M: Move<From = T, To = U>> Kernel for Turn<'_, T, U, M> {
    type Output = ();

    #[inline(always)]
    // Indices of constant extent, which the compiler unrolls into registers.
    #[allow(clippy::needless_range_loop)]
    fn run<S: Simd>(self) {
        let Turn { from, from_stride, rows, columns, to, to_stride, .. } = self;
        if rows == 0 || columns == 0 {
            return;
        }
        // Every access below lies inside these.
        assert!((rows - 1) * from_stride + columns <= from.len());
        assert!((columns - 1) * to_stride + rows <= to.len());
        let (whole_rows, whole_columns) = (rows - rows % LANES, columns - columns % LANES);
        for block in (0..whole_columns).step_by(BLOCK) {
            for row in (0..whole_rows).step_by(LANES) {
                for column in (block..whole_columns.min(block + BLOCK)).step_by(LANES) {
                    // SAFETY: the square lies inside both matrices; kernels run where S is there.
                    unsafe {
                        let source = from.as_ptr().add(row * from_stride + column);
                        let mut square = [S::Vector::zero(); LANES];
                        for i in 0..LANES {
                            square[i] = M::load(source.add(i * from_stride));
                        }
                        let square = S::Vector::transpose(square);
                        let target = to.as_mut_ptr().add(column * to_stride + row);
                        for i in 0..LANES {
                            M::store(square[i], target.add(i * to_stride));
                        }
                    }
                }
            }
        }
        for column in 0..columns {
            let first = if column < whole_columns { whole_rows } else { 0 };
            for row in first..rows {
                to[column * to_stride + row] = M::one(from[row * from_stride + column]);
            }
        }
    }
}
