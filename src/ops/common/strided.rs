//! Tensors of any strides as the elementwise CUDA kernels take them, and as loops on the host.

use crate::backend::cuda::kernel_struct;
use crate::error::{Error, Result};
use crate::memory::{Tensor, MAX_RANK};

kernel_struct! {
    /// `csrc/common/strided.cuh` has the same struct and documents its fields.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::ops) struct StridedLayout {
        pub rank: i32,
        pub num_units: i32,
        pub sizes: [u32; MAX_RANK],
        multipliers: [u32; MAX_RANK],
        shifts: [u32; MAX_RANK],
        /// The strides of the result, the first and the second operand.
        pub strides: [[i64; MAX_RANK]; 3],
    }
}

/// The axes of one or more tensors of the same shape, merged where all of them allow it.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Axes {
    /// A size and the stride of each tensor, outermost axis first.
    axes: [(i64, [i64; 3]); MAX_RANK],
    rank: usize,
}

impl Axes {
    /// Returns the axes of up to three tensors of the same shape.
    pub(in crate::ops) fn of(tensors: &[&Tensor]) -> Result<Self> {
        let mut found = Axes { axes: [(1, [0; 3]); MAX_RANK], rank: 0 };
        let shape = tensors.first().map(|t| *t.shape()).unwrap_or_default();
        for (dimension, &size) in shape.iter().enumerate() {
            if size == 1 {
                continue;
            }
            let mut strides = [0; 3];
            for (stride, tensor) in strides.iter_mut().zip(tensors) {
                *stride = tensor.strides().get(dimension).copied().unwrap_or(0);
            }
            found.push(size, strides)?;
        }
        Ok(found)
    }

    fn push(&mut self, size: i64, strides: [i64; 3]) -> Result<()> {
        if let Some(last) = self.rank.checked_sub(1).and_then(|last| self.axes.get_mut(last)) {
            // The preceding axis steps over this one exactly, in every tensor.
            if last.1.iter().zip(&strides).all(|(&outer, &inner)| outer == inner * size) {
                *last = (last.0 * size, strides);
                return Ok(());
            }
        }
        let slot = self.axes.get_mut(self.rank).ok_or_else(|| Error::internal("too many axes"))?;
        *slot = (size, strides);
        self.rank += 1;
        Ok(())
    }

    /// Iterates over the axes, outermost first.
    pub(in crate::ops) fn iter(&self) -> impl DoubleEndedIterator<Item = &(i64, [i64; 3])> {
        self.axes.iter().take(self.rank)
    }

    /// Returns the innermost axis: its size, and the stride of each tensor.
    pub(in crate::ops) fn innermost(&self) -> (i64, [i64; 3]) {
        self.iter().next_back().copied().unwrap_or((1, [1; 3]))
    }

    /// Returns the number of runs for [`Axes::run`]: the innermost axis in parts of at most `most`
    /// elements, for each index of the others.
    pub(in crate::ops) fn num_runs(&self, most: i64) -> i64 {
        let parts = (self.innermost().0 as u64).div_ceil(most as u64) as i64;
        self.iter().rev().skip(1).map(|(size, _)| size).product::<i64>() * parts
    }

    /// Returns run number `index`: where it begins in each tensor, in elements, and how long it is.
    pub(in crate::ops) fn run(&self, index: i64, most: i64) -> ([i64; 3], i64) {
        let (inner, inner_strides) = self.innermost();
        let parts = (inner as u64).div_ceil(most as u64) as i64;
        let (mut rest, part) = (index / parts, index % parts);
        let mut offsets = inner_strides.map(|stride| stride * part * most);
        for (size, strides) in self.iter().rev().skip(1) {
            let position = rest % size;
            rest /= size;
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += position * stride;
            }
        }
        (offsets, most.min(inner - part * most))
    }

    /// Returns the axes with the innermost one counted in vectors of `len` elements: strides of
    /// other axes are divided by it too.
    pub(in crate::ops) fn in_vectors(&self, len: i64) -> Option<Self> {
        let mut vectors = self.clone();
        let last = vectors.rank.checked_sub(1)?;
        for (index, (size, strides)) in vectors.axes.iter_mut().take(self.rank).enumerate() {
            if index == last {
                if *size % len != 0 {
                    return None;
                }
                *size /= len;
            } else {
                for stride in strides.iter_mut() {
                    if *stride % len != 0 {
                        return None;
                    }
                    *stride /= len;
                }
            }
        }
        Some(vectors)
    }

    /// Returns the axes as the kernels take them; the outermost axis is cut into parts so that each
    /// has fewer than 2^31 units. Each part comes with the offset of its first unit in each tensor.
    pub(in crate::ops) fn launches(&self) -> Result<Vec<(StridedLayout, [i64; 3])>> {
        const MOST: i64 = 1 << 30;
        let inner: i64 = self.iter().skip(1).map(|(size, _)| size).product();
        let (outer, outer_strides) = self.iter().next().copied().unwrap_or((1, [0; 3]));
        let per_launch = (MOST / inner.max(1)).min(outer);
        if per_launch == 0 {
            return Err(Error::unsupported(format!(
                "a strided tensor with {inner} elements in all but its outermost dimension is too large"
            )));
        }
        let mut launches = Vec::new();
        let parts = (outer as u64).div_ceil(per_launch as u64) as i64;
        launches
            .try_reserve_exact(parts as usize)
            .map_err(|_| Error::out_of_memory("the parts of a launch", parts as usize))?;
        for part in 0..parts {
            let first = part * per_launch;
            let count = per_launch.min(outer - first);
            launches.push((self.layout(count, inner)?, outer_strides.map(|stride| stride * first)));
        }
        Ok(launches)
    }

    fn layout(&self, outer: i64, inner: i64) -> Result<StridedLayout> {
        let mut layout = StridedLayout {
            rank: self.rank.max(1) as i32,
            num_units: (outer * inner) as i32,
            sizes: [1; MAX_RANK],
            multipliers: [1; MAX_RANK],
            shifts: [0; MAX_RANK],
            strides: [[0; MAX_RANK]; 3],
        };
        let fields = layout.sizes.iter_mut().zip(&mut layout.multipliers).zip(&mut layout.shifts);
        for (index, ((size, multiplier), shift)) in fields.enumerate().take(self.rank) {
            let (found, strides) = self.axes.get(index).copied().unwrap_or((1, [0; 3]));
            let found = if index == 0 { outer } else { found };
            *size = u32::try_from(found).map_err(|_| Error::internal("an axis beyond 32 bits"))?;
            (*multiplier, *shift) = divider(*size);
            for (row, stride) in layout.strides.iter_mut().zip(strides) {
                if let Some(slot) = row.get_mut(index) {
                    *slot = stride;
                }
            }
        }
        Ok(layout)
    }
}

/// Returns the multiplier and shift by which the kernels divide by `size`; see the header.
fn divider(size: u32) -> (u32, u32) {
    let size = u64::from(size.max(1));
    let shift = u64::BITS - (size - 1).leading_zeros();
    let multiplier = ((1u64 << 32) * ((1u64 << shift) - size)) / size + 1;
    (multiplier as u32, shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_every_element_once() {
        let data = std::ptr::without_provenance_mut(4096);
        for (shape, strides) in [
            (&[2i64, 3, 7][..], &[40i64, 10, 1][..]),
            (&[5, 9], &[1, 5]),
            (&[33], &[1]),
            (&[4, 4], &[0, 1]),
            (&[], &[]),
        ] {
            // SAFETY: never read or written.
            let tensor = unsafe {
                let (element, device) =
                    (crate::memory::ElementType::I32, crate::memory::Device::Cpu);
                Tensor::from_raw(data, element, device, shape, Some(strides), "x")
            }
            .unwrap();
            let axes = Axes::of(&[&tensor]).unwrap();
            let step = axes.innermost().1[0];
            for most in [1, 4, 100] {
                let mut found = Vec::new();
                for index in 0..axes.num_runs(most) {
                    let ([first, ..], len) = axes.run(index, most);
                    assert!(len <= most);
                    found.extend((0..len).map(|i| first + i * step));
                }
                let mut want = vec![0];
                for (&size, &stride) in shape.iter().zip(strides) {
                    want =
                        want.iter().flat_map(|w| (0..size).map(move |i| w + i * stride)).collect();
                }
                assert_eq!(found, want, "{shape:?} {strides:?} in {most}");
            }
        }
    }

    #[test]
    fn dividers_divide() {
        for size in [1u32, 2, 3, 5, 7, 31, 32, 33, 1000, 4096, 151_936, (1 << 30) - 1, 1 << 30] {
            let (multiplier, shift) = divider(size);
            for n in [0u32, 1, 2, size - 1, size, size.wrapping_add(1), 12_345_678, (1 << 31) - 1] {
                let n = n & 0x7fff_ffff;
                let high = (u64::from(n) * u64::from(multiplier)) >> 32;
                assert_eq!(((high + u64::from(n)) >> shift) as u32, n / size, "{n} / {size}");
            }
        }
    }
}
