//! The CPU half: plain integer arithmetic, the same as in `csrc/ops/fill/fill.cu`.

use super::Noise;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::memory::DType;
use crate::ops::common::storage::Storage;

/// The mean of the sum of four numbers of 16 bits.
const SUM_MEAN: i32 = 2 * 0xffff;
/// Its standard deviation: the square root of `4 * (65536^2 - 1) / 12`.
const SUM_STD: f64 = 37_837.227_237;

/// A [`Noise`] as kernels compute it: `mean + factor * sum(seed, i)`.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub seed: u64,
    pub mean: f32,
    pub factor: f32,
}

impl Terms {
    pub fn of(noise: &Noise) -> Self {
        let factor = (f64::from(noise.std) / SUM_STD) as f32;
        Terms { seed: noise.seed, mean: noise.mean, factor }
    }

    #[inline(always)]
    fn number(&self, index: u64) -> f32 {
        let bits = mix(self.seed, index);
        let sum = [0, 16, 32, 48].map(|shift| (bits >> shift) as i32 & 0xffff).iter().sum::<i32>();
        self.mean + self.factor * (sum - SUM_MEAN) as f32
    }
}

/// Returns step `index` of SplitMix64.
#[inline(always)]
pub fn mix(seed: u64, index: u64) -> u64 {
    let step = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = seed.wrapping_add(step);
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Sets `out[i]` to number i of `noise`, on all threads.
pub fn fill<T: Storage>(backend: &CpuBackend, noise: &Noise, out: &mut [T]) -> Result<()> {
    let terms = Terms::of(noise);
    backend.parallel_rows(out, 1, |first, out| {
        for (index, out) in (first as u64..).zip(out) {
            *out = T::from_f32(terms.number(index));
        }
    })
}

/// Fills `out`, elements of type `dtype` as files have them (little-endian), with the numbers of
/// `noise` from number `first` on. Bytes that are no whole element stay as they are.
pub fn fill_bytes(noise: &Noise, first: u64, dtype: DType, out: &mut [u8]) {
    let terms = Terms::of(noise);
    let numbers = (first..).map(|index| terms.number(index));
    match dtype {
        DType::F32 => store(out, numbers.map(f32::to_le_bytes)),
        DType::F16 => store(out, numbers.map(|x| half::f16::from_f32(x).to_le_bytes())),
        DType::BF16 => store(out, numbers.map(|x| half::bf16::from_f32(x).to_le_bytes())),
    }
}

fn store<const N: usize>(out: &mut [u8], numbers: impl Iterator<Item = [u8; N]>) {
    let (out, _) = out.as_chunks_mut::<N>();
    out.iter_mut().zip(numbers).for_each(|(out, number)| *out = number);
}
