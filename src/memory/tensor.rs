//! Descriptors of tensors: the address, type and layout of the elements. They own nothing;
//! [`super::Block`] owns memory.

use super::{DType, Device};
use crate::error::{Error, Result};
use std::fmt;
use std::ops::Deref;

/// The most dimensions that a tensor may have.
pub const MAX_RANK: usize = 8;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Floating-point numbers, with which operators compute.
    Float(DType),
    /// Floats of 8 bits, e4m3fn of the OCP standard: keys and values in a cache.
    Fp8,
    /// 32-bit signed integers: token ids, positions, indices.
    I32,
    /// 64-bit signed integers: token ids, positions, indices.
    I64,
}

impl ElementType {
    /// Returns the bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            ElementType::Float(dtype) => dtype.size_bytes(),
            ElementType::Fp8 => 1,
            ElementType::I32 => 4,
            ElementType::I64 => 8,
        }
    }

    /// Returns the usual short name.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::Float(dtype) => dtype.name(),
            ElementType::Fp8 => "fp8 (e4m3)",
            ElementType::I32 => "i32",
            ElementType::I64 => "i64",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Up to [`MAX_RANK`] sizes or strides.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Dims {
    len: usize,
    values: [i64; MAX_RANK],
}

impl Dims {
    /// Stores the given values; `None` if there are too many.
    pub fn new(values: &[i64]) -> Option<Self> {
        let mut dims = Dims { len: values.len(), ..Dims::default() };
        dims.values.get_mut(..values.len())?.copy_from_slice(values);
        Some(dims)
    }

    /// Returns the strides of a contiguous row-major tensor of this shape, in elements. Wraps
    /// around for shapes whose size overflows, which [`Tensor::from_raw`] refuses.
    pub fn row_major_strides(&self) -> Dims {
        let mut strides = *self;
        let mut step = 1i64;
        for (stride, size) in strides.values.iter_mut().zip(self.values).take(self.len).rev() {
            *stride = step;
            step = step.wrapping_mul(size.max(1));
        }
        strides
    }
}

impl Deref for Dims {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        self.values.get(..self.len).unwrap_or_default()
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A view of elements in memory of a device. Copying it copies no elements.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    data: *mut u8,
    element: ElementType,
    device: Device,
    shape: Dims,
    strides: Dims,
}

// SAFETY: a descriptor is numbers; code that reads or writes through it says why that is sound.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

/// Rows of contiguous elements at two levels: row r begins `(r / inner) * outer_stride + (r %
/// inner) * inner_stride` elements after the first. Most kernels take this layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// The number of rows.
    pub num_rows: i64,
    /// Elements of a row.
    pub width: i64,
    /// Rows of one outer step.
    pub inner: i64,
    /// Elements from one outer step to the next.
    pub outer_stride: i64,
    /// Elements from one row to the next inside an outer step.
    pub inner_stride: i64,
}

impl Tensor {
    /// Makes a view of memory that begins at `data`; `strides` in elements, row-major contiguous if
    /// `None`. Refuses layouts that no memory can have: negative sizes or strides, sizes that
    /// overflow, a NULL or misaligned address. `name` is for the messages.
    ///
    /// # Safety
    /// The elements that shape and strides span are memory of `device`, valid for as long as the
    /// descriptor is used, for writing too if an operator is told to write to it.
    pub unsafe fn from_raw(
        data: *mut u8,
        element: ElementType,
        device: Device,
        shape: &[i64],
        strides: Option<&[i64]>,
        name: &str,
    ) -> Result<Self> {
        let wrong = |what: String| Err(Error::invalid_argument(format!("{name}: {what}")));
        let Some(shape) = Dims::new(shape) else {
            return wrong(format!("{} dimensions, at most {MAX_RANK} are supported", shape.len()));
        };
        if let Some(size) = shape.iter().find(|&&size| size < 0) {
            return wrong(format!("shape {shape} has a negative size {size}"));
        }
        let strides = match strides.map(Dims::new) {
            None => shape.row_major_strides(),
            Some(Some(strides)) if strides.len() == shape.len() => strides,
            Some(_) => return wrong("as many strides as sizes are needed".to_string()),
        };
        let tensor = Tensor { data, element, device, shape, strides };
        if shape.contains(&0) {
            // Nothing is ever read or written.
            return Ok(Tensor { strides: shape.row_major_strides(), ..tensor });
        }
        if let Some(stride) = strides.iter().find(|&&stride| stride < 0) {
            return wrong(format!(
                "strides {strides}: negative strides such as {stride} are not supported"
            ));
        }
        let elements = shape.iter().try_fold(1i64, |product, &size| product.checked_mul(size));
        let last = shape.iter().zip(strides.iter()).try_fold(0i64, |sum, (&size, &stride)| {
            sum.checked_add((size - 1).checked_mul(stride)?)
        });
        let bytes = |count: i64| count.checked_mul(element.size_bytes() as i64);
        let span = last.and_then(|last| bytes(last.checked_add(1)?));
        let (Some(_), Some(span)) = (elements.and_then(bytes), span) else {
            return wrong(format!("shape {shape} with strides {strides} overflows 63 bits"));
        };
        if data.is_null() {
            return wrong(format!("data is NULL, but shape {shape} needs {span} bytes"));
        }
        if !(data as usize).is_multiple_of(element.size_bytes()) {
            return wrong(format!(
                "data is not aligned to the {} bytes of {element}",
                element.size_bytes()
            ));
        }
        if (data as usize).checked_add(span as usize).is_none() {
            return wrong(format!(
                "{span} bytes from {data:p} on do not fit into the address space"
            ));
        }
        Ok(tensor)
    }

    /// Returns the address of the first element.
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    /// Returns the type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Returns the device that the elements are on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the sizes, outermost first.
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Returns the strides in elements, one for each size.
    pub fn strides(&self) -> &Dims {
        &self.strides
    }

    /// Returns the size of the last dimension; 1 for a scalar.
    pub fn width(&self) -> i64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the product of the sizes.
    pub fn num_elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.num_elements() == 0
    }

    /// Returns the bytes of the elements, without gaps.
    pub fn size_bytes(&self) -> usize {
        self.num_elements() as usize * self.element.size_bytes()
    }

    /// Returns the bytes from the first to the last element, gaps included.
    pub fn span_bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last: i64 = self.shape.iter().zip(self.strides.iter()).map(|(n, s)| (n - 1) * s).sum();
        (last as usize + 1) * self.element.size_bytes()
    }

    /// Whether the elements are adjacent in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1i64;
        for (&size, &stride) in self.shape.iter().zip(self.strides.iter()).rev() {
            if size != 1 && stride != expected {
                return self.is_empty();
            }
            expected *= size;
        }
        true
    }

    /// Whether two different indices lead to the same element, as in a broadcast view, which must
    /// not be written to.
    pub fn overlaps_itself(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        // Uses an array instead of an allocated list, because operators ask in every call.
        let mut dims = [(0, 1); MAX_RANK];
        let all = self.strides.iter().copied().zip(self.shape.iter().copied());
        for (slot, dim) in dims.iter_mut().zip(all.filter(|&(_, size)| size > 1)) {
            *slot = dim;
        }
        dims.sort_unstable();
        // The condition is sufficient and, except for exotic interleavings, necessary: each stride
        // steps over all below it.
        let mut covered = 0i64;
        for (stride, size) in dims.into_iter().filter(|&(_, size)| size > 1) {
            if stride <= covered {
                return true;
            }
            covered += (size - 1) * stride;
        }
        false
    }

    /// Whether both span some of the same bytes of the same device, gaps between elements included.
    pub fn spans_meet(&self, other: &Tensor) -> bool {
        let range = |t: &Tensor| (t.data as usize, t.data as usize + t.span_bytes());
        let ((a, a_end), (b, b_end)) = (range(self), range(other));
        // Nothing meets an empty range, not even a range around it.
        self.device == other.device && a.max(b) < a_end.min(b_end)
    }

    /// Whether some element of one may share bytes with one of the other. Exact for views that do
    /// not interleave and for slices of a common buffer with rows (the q and the k heads of a fused
    /// projection); true for interleavings of other kinds.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        self.spans_meet(other) && !self.takes_turns_with(other)
    }

    /// Whether, within every period of some stride of the two, the elements of one occupy other
    /// bytes than those of the other.
    fn takes_turns_with(&self, other: &Tensor) -> bool {
        let periods = self.strides_in_bytes().chain(other.strides_in_bytes());
        periods.map(|(_, stride)| stride).filter(|&stride| stride > 0).any(|period| {
            let (Some(own), Some(others)) = (self.reach_in(period), other.reach_in(period)) else {
                return false;
            };
            // The offset at which the other begins in the period in which this one begins; both may
            // extend to its end.
            let distance = (other.data as i64).wrapping_sub(self.data as i64).rem_euclid(period);
            own <= distance && others <= period - distance
        })
    }

    /// Returns the sizes above 1, and their strides in bytes.
    fn strides_in_bytes(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        let bytes = self.element.size_bytes() as i64;
        let dims = self.shape.iter().copied().zip(self.strides.iter().map(move |s| s * bytes));
        dims.filter(|&(size, _)| size > 1)
    }

    /// Returns the length of the stretch, from the first byte on, in which all bytes of the tensor
    /// lie modulo `period`; `None` if there is no such stretch.
    fn reach_in(&self, period: i64) -> Option<i64> {
        let mut reach = self.element.size_bytes() as i64;
        for (size, stride) in self.strides_in_bytes() {
            if stride < period {
                reach = reach.checked_add((size - 1).checked_mul(stride)?)?;
            } else if stride % period != 0 {
                return None;
            }
        }
        Some(reach)
    }

    /// Whether both are the same view, so that an operator may work in place.
    pub fn is_same_view(&self, other: &Tensor) -> bool {
        self.data == other.data
            && self.device == other.device
            && self.element == other.element
            && self.shape == other.shape
            && (self.strides == other.strides || (self.is_contiguous() && other.is_contiguous()))
    }

    /// Returns the view as rows along its last dimension, if it has that form.
    pub fn rows(&self) -> Option<RowLayout> {
        let width = self.width();
        let num_rows = if width == 0 { 0 } else { self.num_elements() / width };
        if self.strides.last().is_some_and(|&stride| stride != 1) && width > 1 {
            return None;
        }
        // (size, stride) of the leading dimensions, merged where one steps over the next exactly.
        let mut levels: [(i64, i64); 2] = [(1, 0); 2];
        let mut used = 0;
        let leading = self.shape.len().saturating_sub(1);
        for (&size, &stride) in self.shape.iter().zip(self.strides.iter()).take(leading).rev() {
            if size == 1 {
                continue;
            }
            let merged = used > 0 && levels.get(used - 1).is_some_and(|&(n, s)| stride == n * s);
            if merged {
                levels.get_mut(used - 1)?.0 *= size;
            } else {
                *levels.get_mut(used)? = (size, stride);
                used += 1;
            }
        }
        let [(inner, inner_stride), (_, outer_stride)] = levels;
        let outer_stride = if used < 2 { inner * inner_stride } else { outer_stride };
        Some(RowLayout { num_rows, width, inner, outer_stride, inner_stride })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[i64], strides: Option<&[i64]>) -> Result<Tensor> {
        let data = std::ptr::without_provenance_mut(4096);
        // SAFETY: never read or written.
        unsafe { Tensor::from_raw(data, ElementType::I32, Device::Cpu, shape, strides, "x") }
    }

    #[test]
    fn rows_of_contiguous_and_sliced_views() {
        let layout = view(&[2, 3, 4], None).unwrap().rows().unwrap();
        assert_eq!(
            (layout.num_rows, layout.width, layout.inner, layout.inner_stride),
            (6, 4, 6, 4)
        );
        // The q part [tokens, heads, head_dim] of a fused projection.
        let layout = view(&[5, 2, 4], Some(&[16, 4, 1])).unwrap().rows().unwrap();
        assert_eq!(
            layout,
            RowLayout { num_rows: 10, width: 4, inner: 2, outer_stride: 16, inner_stride: 4 }
        );
        assert_eq!(view(&[4, 5], Some(&[1, 4])).unwrap().rows(), None);
        assert_eq!(view(&[2, 2, 2, 4], Some(&[64, 30, 7, 1])).unwrap().rows(), None);
    }

    #[test]
    fn impossible_views_are_refused() {
        for (shape, strides) in [
            (&[-1][..], None),
            (&[i64::MAX, 3], None),
            (&[2, 2], Some(&[i64::MAX, 1][..])),
            (&[2], Some(&[-1])),
            (&[2, 2], Some(&[1])),
            (&[1; 9], None),
            (&[1 << 62], None),
        ] {
            let error = view(shape, strides).unwrap_err();
            assert!(error.message().starts_with("x: "), "{error}");
        }
        assert!(view(&[0, i64::MAX, i64::MAX], None).unwrap().is_empty());
    }

    #[test]
    fn overlaps_are_seen() {
        assert!(view(&[3, 4], Some(&[0, 1])).unwrap().overlaps_itself());
        assert!(view(&[3, 4], Some(&[2, 1])).unwrap().overlaps_itself());
        assert!(!view(&[3, 4], Some(&[1, 3])).unwrap().overlaps_itself());
        assert!(view(&[3], None).unwrap().overlaps(&view(&[1], None).unwrap()));
    }

    #[test]
    fn slices_of_a_fused_buffer_do_not_overlap() {
        let slice = |first: usize, shape: &[i64], strides: &[i64], element: ElementType| {
            let data = std::ptr::without_provenance_mut(4096 + first * 4);
            // SAFETY: never read or written.
            unsafe { Tensor::from_raw(data, element, Device::Cpu, shape, Some(strides), "x") }
                .unwrap()
        };
        let i32s =
            |first, shape: &[i64], strides: &[i64]| slice(first, shape, strides, ElementType::I32);
        // [tokens, 6 + 2 + 2 heads of 4], one token every 40 elements.
        let q = i32s(0, &[5, 6, 4], &[40, 4, 1]);
        let k = i32s(24, &[5, 2, 4], &[40, 4, 1]);
        let v = i32s(32, &[5, 8], &[40, 1]);
        // The same tokens as two dimensions that step over each other exactly.
        let v_batched = i32s(32, &[1, 5, 8], &[200, 40, 1]);
        let batched = i32s(24, &[2, 2, 4], &[80, 40, 1]);
        for (a, b) in [(q, k), (q, v), (k, v), (q, v_batched), (batched, v), (q, batched)] {
            assert!(a.spans_meet(&b) && !a.overlaps(&b) && !b.overlaps(&a), "{a:?} {b:?}");
        }
        // One element more, or one element earlier, and they do.
        assert!(i32s(0, &[5, 25], &[40, 1]).overlaps(&k));
        assert!(q.overlaps(&i32s(23, &[5, 2], &[40, 1])));
        // A row that ends where the next begins, and one that goes beyond.
        assert!(!q.overlaps(&i32s(24, &[4, 16], &[40, 1])));
        assert!(q.overlaps(&i32s(24, &[4, 17], &[40, 1])));
        assert!(i32s(24, &[4, 17], &[40, 1]).overlaps(&q));
        // Even and odd columns; the same columns; other periods are not examined.
        let even = i32s(0, &[3, 4], &[8, 2]);
        assert!(!even.overlaps(&i32s(1, &[3, 4], &[8, 2])));
        assert!(even.overlaps(&i32s(2, &[3, 3], &[8, 2])));
        assert!(even.overlaps(&i32s(0, &[5], &[3])));
        // Elements of other sizes, a view that repeats its rows, a scalar in a gap.
        assert!(!q.overlaps(&slice(24, &[4, 2], &[20, 1], ElementType::I64)));
        assert!(q.overlaps(&slice(22, &[4, 2], &[20, 1], ElementType::I64)));
        assert!(i32s(0, &[3, 40], &[0, 1]).overlaps(&k));
        assert!(!q.overlaps(&i32s(24, &[], &[])));
        assert!(q.overlaps(&i32s(41, &[], &[])));
        assert!(!q.overlaps(&i32s(3, &[0, 4], &[4, 1])));
    }
}
