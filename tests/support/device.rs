//! Shared by tests of the device operators that C does not see: tensors on a GPU, their values in
//! f64, roundings.

use std::sync::Arc;

use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, ElementType};

pub use super::cuda_context::cuda_context;
use super::{fp8, Random};

pub const HALVES: [DType; 2] = [DType::BF16, DType::F16];

pub fn upload(context: &Arc<ComputeContext>, tensor: &DeviceTensor, bytes: &[u8]) {
    let mut host = PinnedBuffer::new(context, bytes.len(), "a test").expect("memory");
    host.bytes().expect("bytes").copy_from_slice(bytes);
    host.upload(0..bytes.len(), tensor, 0).expect("a copy");
    host.wait().expect("the copy");
}

pub fn download(context: &Arc<ComputeContext>, tensor: &DeviceTensor) -> Vec<u8> {
    let mut host = PinnedBuffer::new(context, tensor.size_bytes(), "a test").expect("memory");
    host.download(tensor, 0).expect("a copy");
    host.bytes().expect("bytes").to_vec()
}

/// `x` as a device stores it that computes in f32.
pub fn round(dtype: DType, x: f64) -> f64 {
    let x = x as f32;
    f64::from(match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    })
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match dtype {
        DType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_ne_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        DType::F16 => pairs().map(|bits| half::f16::from_bits(bits).to_f64()).collect(),
        DType::BF16 => pairs().map(|bits| half::bf16::from_bits(bits).to_f64()).collect(),
    }
}

/// Returns the bytes of these values in the type.
pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
        DType::F16 => {
            let bits = |&x: &f64| half::f16::from_f32(x as f32).to_bits();
            values.iter().flat_map(|x| bits(x).to_ne_bytes()).collect()
        }
        DType::BF16 => {
            let bits = |&x: &f64| half::bf16::from_f32(x as f32).to_bits();
            values.iter().flat_map(|x| bits(x).to_ne_bytes()).collect()
        }
    }
}

/// Returns the step between numbers of a 16-bit type below 1, the most by which rounding once
/// changes a number.
pub fn unit(dtype: DType) -> f64 {
    if dtype == DType::BF16 {
        1.0 / 256.0
    } else {
        1.0 / 2048.0
    }
}

/// Returns the last place of a number of a type, relative to the number: what a rounding that falls
/// the other way changes. For f32, in which the operators compute, it is a few units.
pub fn last_place(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-21),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
    }
}

/// Memory of a test, and random numbers for it.
pub struct Bench {
    pub context: Arc<ComputeContext>,
    arena: Arena,
    pub random: Random,
    pub dtype: DType,
}

impl Bench {
    pub fn new(context: &Arc<ComputeContext>, dtype: DType, seed: u64) -> Self {
        Self::with_room(context, dtype, seed, 64 << 20)
    }

    /// The same with this many bytes.
    pub fn with_room(
        context: &Arc<ComputeContext>,
        dtype: DType,
        seed: u64,
        num_bytes: usize,
    ) -> Self {
        let arena = Arena::new(context, num_bytes, "a test").expect("memory");
        Bench { context: context.clone(), arena, random: Random::new(seed), dtype }
    }

    /// Numbers of the type about `offset`, as the device has them too.
    pub fn filled(&mut self, shape: &[usize], scale: f64, offset: f64) -> (DeviceTensor, Vec<f64>) {
        let len: usize = shape.iter().product();
        let values: Vec<f64> =
            (0..len).map(|_| round(self.dtype, offset + scale * self.random.signed())).collect();
        (self.of(shape, &values), values)
    }

    pub fn of(&mut self, shape: &[usize], values: &[f64]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::Float(self.dtype), shape).expect("room");
        upload(&self.context, &tensor, &encode(self.dtype, values));
        tensor
    }

    /// Numbers of 8 bits.
    pub fn fp8s(&mut self, shape: &[usize], values: &[f64]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::Fp8, shape).expect("room");
        let codes: Vec<u8> = values.iter().map(|&x| fp8::code(x)).collect();
        upload(&self.context, &tensor, &codes);
        tensor
    }

    pub fn f32s(&mut self, shape: &[usize], values: &[f64]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::Float(DType::F32), shape).expect("room");
        let bytes: Vec<u8> = values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect();
        upload(&self.context, &tensor, &bytes);
        tensor
    }

    pub fn ints(&mut self, shape: &[usize], values: &[i32]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::I32, shape).expect("room");
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        upload(&self.context, &tensor, &bytes);
        tensor
    }

    /// Numbers of tokens, rows or places.
    pub fn ids(&mut self, values: &[i32]) -> DeviceTensor {
        self.ints(&[values.len()], values)
    }

    /// Returns the values of a tensor of the type.
    pub fn read(&self, tensor: &DeviceTensor) -> Vec<f64> {
        let bytes = download(&self.context, tensor);
        match tensor.element() {
            ElementType::Fp8 => bytes.into_iter().map(fp8::number).collect(),
            _ => decode(self.dtype, &bytes),
        }
    }

    /// NaNs, for results.
    pub fn poisoned(&mut self, shape: &[usize]) -> DeviceTensor {
        let len: usize = shape.iter().product();
        self.of(shape, &vec![f64::NAN; len])
    }
}

/// Returns the product of a row of a weight with x.
pub fn product(weight: &[f64], row: usize, x: &[f64]) -> f64 {
    let row = &weight[row * x.len()..(row + 1) * x.len()];
    row.iter().zip(x).map(|(w, x)| w * x).sum()
}

/// Each difference is at most this share of the value or of the typical value, whichever is larger.
pub fn assert_near(what: &str, got: &[f64], want: &[f64], bar: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let typical = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let mut worst = 0.0f64;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).abs() / want.abs().max(typical);
        assert!(off <= bar, "{what} [{i}]: {got} instead of {want}");
        worst = worst.max(off);
    }
    println!("{what}: worst {worst:.2e} of {bar:.2e}");
}

/// Every result is off its reference by at most what the reference says; of 16-bit results at most
/// a share of `most_flipped` is off at all, since few sums are so close to the middle of two
/// numbers that f32 takes the other.
pub fn assert_rounded(
    what: &str,
    dtype: DType,
    got: &[f64],
    want: &[(f64, f64)],
    most_flipped: f64,
) {
    assert_eq!(got.len(), want.len(), "{what}");
    let mut num_flipped = 0;
    for (i, (got, (want, most))) in got.iter().zip(want).enumerate() {
        num_flipped += usize::from(got != want);
        assert!((got - want).abs() <= *most, "{what} [{i}]: {got:e}, not {want:e}");
    }
    let share = num_flipped as f64 / got.len().max(1) as f64;
    println!("{what}: {:.3} % of the roundings flipped", share * 100.0);
    let is_fine = dtype == DType::F32 || share <= most_flipped;
    assert!(is_fine, "{what}: {share} of the elements are not those of the reference");
}
