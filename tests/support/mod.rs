//! Shared by all tests: seeds, references in f64, tolerances, guarded buffers, golden vectors.
#![allow(dead_code)]

pub mod chi_square;
pub mod cuda_context;
pub mod device;
pub mod fp8;
pub mod golden;
pub mod layouts;
pub mod random;
pub use xserv::self_test::reference;
pub mod rounded;
pub mod tensors;
pub mod typed;

pub use random::Random;
use xserv::backend::cpu::{CpuBackend, Isa};
use xserv::memory::DType;

/// One backend for each instruction set of this machine and each number of threads given.
pub fn backends(num_threads: &[usize]) -> Vec<CpuBackend> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_supported())
        .flat_map(|isa| num_threads.iter().map(move |&n| CpuBackend::with_isa(n, isa).unwrap()))
        .collect()
}

pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Returns the nearest value that the type can hold.
pub fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    }
}

pub fn rounded_all(x: &[f32], dtype: DType) -> Vec<f32> {
    x.iter().map(|&x| rounded(x, dtype)).collect()
}

/// Returns the little-endian bytes of the values in the given type.
pub fn to_bytes(x: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => x.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => x.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// A buffer filled with NaN between two guards that must stay as they are.
pub struct Guarded {
    values: Vec<f32>,
    len: usize,
}

const GUARD: usize = 32;
const GUARD_BITS: u32 = 0x7fc0_dead;

impl Guarded {
    pub fn new(len: usize) -> Self {
        let mut values = vec![f32::NAN; len + 2 * GUARD];
        for i in (0..GUARD).chain(GUARD + len..2 * GUARD + len) {
            values[i] = f32::from_bits(GUARD_BITS);
        }
        Guarded { values, len }
    }

    pub fn of(content: &[f32]) -> Self {
        let mut guarded = Self::new(content.len());
        guarded.get().copy_from_slice(content);
        guarded
    }

    pub fn get(&mut self) -> &mut [f32] {
        &mut self.values[GUARD..GUARD + self.len]
    }

    /// Returns the content, once the guards are found untouched.
    pub fn checked(&self, what: &str) -> &[f32] {
        let (front, rest) = self.values.split_at(GUARD);
        let (content, back) = rest.split_at(self.len);
        assert!(
            front.iter().chain(back).all(|v| v.to_bits() == GUARD_BITS),
            "{what}: wrote outside its output"
        );
        content
    }
}

/// The distance that a result may have from its reference.
#[derive(Clone, Copy, Debug)]
pub enum Tolerance {
    /// `|got - ref| <= t (1 + |ref|)`: the golden vectors' rule.
    OnePlus(f64),
    /// `|got - ref| <= t (rms(ref) + |ref|)`: for sums of any size.
    Rms(f64),
    /// The same number.
    Exact,
}

/// Panics with the worst element unless all are within the tolerance. NaN is an error wherever the
/// reference has none.
pub fn assert_close(what: &str, got: &[f32], reference: &[f64], tolerance: Tolerance) {
    let worst = worst_error(what, got, reference, tolerance);
    if let Some((i, error)) = worst {
        assert!(
            error <= 1.0,
            "{what}: element {i} of {}: got {:e}, reference {:e}, {error:.2} times {tolerance:?}",
            got.len(),
            got[i],
            reference[i]
        );
    }
}

/// Index and size (in units of the tolerance) of the largest error.
pub fn worst_error(
    what: &str,
    got: &[f32],
    reference: &[f64],
    tolerance: Tolerance,
) -> Option<(usize, f64)> {
    assert_eq!(got.len(), reference.len(), "{what}: length");
    let finite: Vec<f64> = reference.iter().copied().filter(|r| r.is_finite()).collect();
    let rms = (finite.iter().map(|r| r * r).sum::<f64>() / finite.len().max(1) as f64).sqrt();
    let mut worst = None;
    for (i, (&g, &r)) in got.iter().zip(reference).enumerate() {
        let g = f64::from(g);
        if r.is_nan() && g.is_nan() || g == r {
            continue;
        }
        let bound = match tolerance {
            Tolerance::OnePlus(t) => t * (1.0 + r.abs()),
            Tolerance::Rms(t) => t * (rms + r.abs()),
            Tolerance::Exact => 0.0,
        };
        let error = (g - r).abs() / bound;
        let error = if error.is_nan() { f64::INFINITY } else { error };
        if worst.is_none_or(|(_, w)| error > w) {
            worst = Some((i, error));
        }
    }
    worst
}

/// Panics unless both have the same bits.
pub fn assert_same_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}: length");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i}: {a:e} and {b:e}");
    }
}
