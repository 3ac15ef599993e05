//! The element types that tensors are stored in. Kernels compute in f32, whatever the storage.

use crate::backend::cpu::math::{bf16_bits, bf16_to_f32, f16_bits, f16_to_f32, LANES};
use crate::backend::cpu::simd::{Simd, Vector16};
use crate::backend::cpu::tile::{Bf16Rows, Element, F16, F32};
use crate::memory::DType;
use half::{bf16, f16};

/// The number of elements that kernels widen to f32 at a time: a multiple of [`LANES`] that stays
/// in the first-level cache.
pub(crate) const CHUNK: usize = 256;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of tensors: f32, f16 or bf16.
pub trait Storage: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: DType;
    /// The kind of element with which kernels multiply its rows in place.
    #[doc(hidden)]
    #[allow(private_bounds)]
    type Weights<V: Vector16>: Element<Activation = f32, Vector = V>;

    /// Returns the value, which is exact.
    fn to_f32(self) -> f32;
    /// Returns the nearest value, to even in a tie; NaN stays NaN.
    fn from_f32(x: f32) -> Self;
    /// Computes `to[i] = from[i]`.
    #[doc(hidden)]
    fn widen<S: Simd>(from: &[Self], to: &mut [f32]);
    /// Computes `to[i] = from[i]`, rounded.
    #[doc(hidden)]
    fn narrow<S: Simd>(from: &[f32], to: &mut [Self]);
    /// Returns the slice itself when it is f32 already.
    #[doc(hidden)]
    #[inline(always)]
    fn as_f32(_slice: &[Self]) -> Option<&[f32]> {
        None
    }
    /// Returns the slice itself when it is bf16.
    #[doc(hidden)]
    #[inline(always)]
    fn as_bf16(_slice: &[Self]) -> Option<&[half::bf16]> {
        None
    }
    /// Returns the slice itself for writing when it is f32 already.
    #[doc(hidden)]
    #[inline(always)]
    fn as_f32_mut(_slice: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
    /// Reads 16 values as f32.
    /// # Safety
    /// There are 16 readable elements, and V's instruction set.
    #[doc(hidden)]
    unsafe fn load<V: Vector16>(source: *const Self) -> V;
    /// Reads the bits of 16 elements into the upper part of lanes, without converting.
    /// # Safety
    /// There are 16 readable elements, and V's instruction set.
    #[doc(hidden)]
    unsafe fn load_bits<V: Vector16>(source: *const Self) -> V;
    /// Writes the bits that `load_bits` has read.
    /// # Safety
    /// There are 16 writable elements, and V's instruction set.
    #[doc(hidden)]
    unsafe fn store_bits<V: Vector16>(bits: V, target: *mut Self);
}

impl Storage for f32 {
    const DTYPE: DType = DType::F32;
    type Weights<V: Vector16> = F32<V>;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn as_f32(slice: &[Self]) -> Option<&[f32]> {
        Some(slice)
    }
    #[inline(always)]
    fn as_f32_mut(slice: &mut [Self]) -> Option<&mut [f32]> {
        Some(slice)
    }
    #[inline(always)]
    unsafe fn load<V: Vector16>(source: *const Self) -> V {
        // SAFETY: passed on to the caller.
        unsafe { V::load(source) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector16>(source: *const Self) -> V {
        // SAFETY: passed on to the caller.
        unsafe { V::load(source) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector16>(bits: V, target: *mut Self) {
        // SAFETY: passed on to the caller.
        unsafe { bits.store(target) }
    }
}

impl Storage for bf16 {
    const DTYPE: DType = DType::BF16;
    type Weights<V: Vector16> = Bf16Rows<V>;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_bits(bf16_bits(x))
    }
    #[inline(always)]
    fn as_bf16(slice: &[Self]) -> Option<&[half::bf16]> {
        Some(slice)
    }
    #[inline(always)]
    fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        // The conversions are shifts, which the compiler vectorises.
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = from.to_f32());
    }
    #[inline(always)]
    fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = Self::from_f32(from));
    }
    #[inline(always)]
    unsafe fn load<V: Vector16>(source: *const Self) -> V {
        // SAFETY: passed on to the caller; bf16 is a u16 inside.
        unsafe { V::load_bf16(source.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector16>(source: *const Self) -> V {
        // SAFETY: as above.
        unsafe { V::load_bf16(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector16>(bits: V, target: *mut Self) {
        // SAFETY: as above.
        unsafe { bits.store_high_halves(target.cast()) }
    }
}

impl Storage for f16 {
    const DTYPE: DType = DType::F16;
    type Weights<V: Vector16> = F16<V>;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_bits(f16_bits(x))
    }
    #[inline(always)]
    fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        let (from, rest) = from.as_chunks::<LANES>();
        let (to, to_rest) = to.as_chunks_mut::<LANES>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: kernels run where S is there; f16 is a u16 inside; both are of 16 elements.
            unsafe { S::Vector::load_f16(from.as_ptr().cast()).store(to.as_mut_ptr()) };
        }
        to_rest.iter_mut().zip(rest).for_each(|(to, &from)| *to = from.to_f32());
    }
    #[inline(always)]
    fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        let (from, rest) = from.as_chunks::<LANES>();
        let (to, to_rest) = to.as_chunks_mut::<LANES>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: as in `widen`.
            unsafe { S::Vector::load(from.as_ptr()).store_f16(to.as_mut_ptr().cast()) };
        }
        to_rest.iter_mut().zip(rest).for_each(|(to, &from)| *to = Self::from_f32(from));
    }
    #[inline(always)]
    unsafe fn load<V: Vector16>(source: *const Self) -> V {
        // SAFETY: passed on to the caller; f16 is a u16 inside.
        unsafe { V::load_f16(source.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector16>(source: *const Self) -> V {
        // SAFETY: as above.
        unsafe { V::load_bf16(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector16>(bits: V, target: *mut Self) {
        // SAFETY: as above.
        unsafe { bits.store_high_halves(target.cast()) }
    }
}

/// Computes `out[i] = f(x[i])`.
#[inline(always)]
pub(crate) fn map<S: Simd, T: Storage>(x: &[T], out: &mut [T], f: impl Fn(f32) -> f32 + Copy) {
    if let (Some(x), Some(out)) = (T::as_f32(x), T::as_f32_mut(out)) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x));
        return;
    }
    let mut wide = [0.0; CHUNK];
    for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let wide = &mut wide[..x.len()];
        T::widen::<S>(x, wide);
        wide.iter_mut().for_each(|x| *x = f(*x));
        T::narrow::<S>(wide, out);
    }
}

/// Computes `x[i] = f(x[i])`.
#[inline(always)]
pub(crate) fn map_in_place<S: Simd, T: Storage>(x: &mut [T], f: impl Fn(f32) -> f32 + Copy) {
    if let Some(x) = T::as_f32_mut(x) {
        x.iter_mut().for_each(|x| *x = f(*x));
        return;
    }
    let mut wide = [0.0; CHUNK];
    for x in x.chunks_mut(CHUNK) {
        let wide = &mut wide[..x.len()];
        T::widen::<S>(x, wide);
        wide.iter_mut().for_each(|x| *x = f(*x));
        T::narrow::<S>(wide, x);
    }
}

/// Computes `out[i] = f(a[i], b[i])`.
#[inline(always)]
pub(crate) fn map2<S: Simd, T: Storage>(
    a: &[T],
    b: &[T],
    out: &mut [T],
    f: impl Fn(f32, f32) -> f32 + Copy,
) {
    if let (Some(a), Some(b), Some(out)) = (T::as_f32(a), T::as_f32(b), T::as_f32_mut(out)) {
        out.iter_mut().zip(a).zip(b).for_each(|((o, &a), &b)| *o = f(a, b));
        return;
    }
    let (mut wide_a, mut wide_b) = ([0.0; CHUNK], [0.0; CHUNK]);
    let inputs = a.chunks(CHUNK).zip(b.chunks(CHUNK));
    for ((a, b), out) in inputs.zip(out.chunks_mut(CHUNK)) {
        let (wide_a, wide_b) = (&mut wide_a[..a.len()], &mut wide_b[..a.len()]);
        T::widen::<S>(a, wide_a);
        T::widen::<S>(b, wide_b);
        wide_a.iter_mut().zip(wide_b).for_each(|(a, b)| *a = f(*a, *b));
        T::narrow::<S>(wide_a, out);
    }
}

/// Computes `out[i] = x[i] * factor`, rounded.
#[inline(always)]
pub(crate) fn scaled<S: Simd, T: Storage>(x: &[f32], factor: f32, out: &mut [T]) {
    let mut values = [0.0; CHUNK];
    for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let values = &mut values[..x.len()];
        values.iter_mut().zip(x).for_each(|(value, &x)| *value = x * factor);
        T::narrow::<S>(values, out);
    }
}
