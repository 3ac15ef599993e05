//! Typed slices for tests of operators on the CPU: guarded buffers, tolerances by type, runs for
//! all types.

use super::{assert_close, assert_same_bits, backends, Random, Tolerance};
use xserv::backend::cpu::CpuBackend;
use xserv::memory::DType;
use xserv::ops::common::storage::Storage;

/// A typed buffer filled with NaN between two guards that must stay as they are.
pub struct Typed<T> {
    values: Vec<T>,
    len: usize,
}

const GUARD: usize = 32;
const GUARD_VALUE: f32 = -77.0;

impl<T: Storage> Typed<T> {
    pub fn new(len: usize) -> Self {
        let mut values = vec![T::from_f32(GUARD_VALUE); len + 2 * GUARD];
        values[GUARD..GUARD + len].fill(T::from_f32(f32::NAN));
        Typed { values, len }
    }

    pub fn of(content: &[T]) -> Self {
        let mut typed = Self::new(content.len());
        typed.get().copy_from_slice(content);
        typed
    }

    pub fn get(&mut self) -> &mut [T] {
        &mut self.values[GUARD..GUARD + self.len]
    }

    /// Returns the content as f32, once the guards are found untouched.
    pub fn checked(&self, what: &str) -> Vec<f32> {
        let (front, rest) = self.values.split_at(GUARD);
        let (content, back) = rest.split_at(self.len);
        let untouched = |v: &T| v.to_f32() == GUARD_VALUE;
        assert!(front.iter().chain(back).all(untouched), "{what}: wrote outside its output");
        content.iter().map(|v| v.to_f32()).collect()
    }
}

pub fn typed<T: Storage>(x: &[f32]) -> Vec<T> {
    x.iter().map(|&x| T::from_f32(x)).collect()
}

pub fn values<T: Storage>(x: &[T]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

pub fn normals<T: Storage>(random: &mut Random, len: usize) -> Vec<T> {
    typed(&random.normals(len))
}

/// Returns rows of normal numbers with ties, and in every fifth row a NaN.
pub fn tied_rows<T: Storage>(random: &mut Random, rows: usize, width: usize) -> Vec<T> {
    let mut x: Vec<T> = normals(random, rows * width);
    for (number, row) in x.chunks_exact_mut(width).enumerate() {
        let (from, to) = (random.below(width), random.below(width));
        row[to] = row[from];
        if number % 5 == 4 {
            row[random.below(width)] = T::from_f32(f32::NAN);
        }
    }
    x
}

/// One rounding to T of something computed to `f32` relative error.
pub fn tolerance<T: Storage>(f32: f64) -> f64 {
    match T::DTYPE {
        DType::F32 => f32,
        // Half a unit in the last place is 4.9e-4 and 3.9e-3.
        DType::F16 => 5.5e-4,
        DType::BF16 => 4.2e-3,
    }
}

pub fn close<T: Storage>(what: &str, got: &[f32], reference: &[f64], f32: f64) {
    assert_close(what, got, reference, Tolerance::OnePlus(tolerance::<T>(f32)));
}

pub fn close_rms<T: Storage>(what: &str, got: &[f32], reference: &[f64], f32: f64) {
    assert_close(what, got, reference, Tolerance::Rms(tolerance::<T>(f32)));
}

/// The bits that `run` returns do not depend on the number of threads, on every instruction set.
pub fn same_bits_on_any_number_of_threads(run: impl Fn(&CpuBackend) -> Vec<f32>) {
    for one in backends(&[1]) {
        let expected = run(&one);
        for num_threads in [2, 3] {
            let backend = CpuBackend::with_isa(num_threads, one.isa()).unwrap();
            assert_same_bits(backend.name(), &expected, &run(&backend));
        }
    }
}

/// Runs `$test::<T>()` for all storage types.
macro_rules! for_storage {
    ($($name:ident),* $(,)?) => {
        mod f32 {
            $(#[test] fn $name() { super::$name::<f32>() })*
        }
        mod f16 {
            $(#[test] fn $name() { super::$name::<half::f16>() })*
        }
        mod bf16 {
            $(#[test] fn $name() { super::$name::<half::bf16>() })*
        }
    };
}
pub(crate) use for_storage;
