//! Log-probabilities against f64.

use std::sync::Arc;

use crate::support::device::cuda_context;
use crate::support::random::Random;
use xserv::backend::cpu::{CpuBackend, Isa};
use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, ElementType};
use xserv::ops::log_probs::cpu::LogSum;
use xserv::ops::log_probs::cuda::{log_probs, LogProbsList};

/// The bar for log-probabilities.
const TOLERANCE: f64 = 1e-4;

fn reference(logits: &[f32], temperature: f32) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&x| f64::from(x) / f64::from(temperature)).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    scaled.iter().map(|x| x - max - log_sum).collect()
}

/// Rows of several shapes: wide, flat, with one token far above, with banned ones.
fn rows(vocab_size: usize, count: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(vocab_size as u64);
    (0..count)
        .map(|row| {
            let scale = [12.0, 0.01, 3.0, 40.0][row % 4];
            let mut logits: Vec<f32> =
                (0..vocab_size).map(|_| random.signed() as f32 * scale / 2.0).collect();
            match row % 4 {
                2 => logits[vocab_size / 2] = 60.0,
                3 if vocab_size > 1 => logits[vocab_size - 1] = f32::MIN,
                _ => {}
            }
            logits
        })
        .collect()
}

fn assert_close(found: f32, expected: f64, temperature: f32, what: &str) {
    if expected < -1e30 {
        assert_eq!(found, f32::NEG_INFINITY, "{what}");
        return;
    }
    // Far below the largest, the rounding of the logits themselves counts.
    let bar = TOLERANCE + expected.abs() * 2e-7 / f64::from(temperature).min(1.0);
    let is_close = (f64::from(found) - expected).abs() <= bar;
    assert!(is_close, "{what}: {found} instead of {expected}");
}

#[test]
fn the_cpu_gives_the_logarithm_of_the_softmax() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let backend = CpuBackend::with_isa(1, isa).expect("a backend");
        check_log_sums(&backend);
    }
}

fn check_log_sums(backend: &CpuBackend) {
    for vocab_size in [1, 15, 16, 17, 1000, 151_936, 151_937] {
        for logits in rows(vocab_size, 4) {
            for temperature in [1.0, 0.3, 2.5] {
                let sum = LogSum::of(backend, &logits, temperature);
                for (&logit, &expected) in logits.iter().zip(&reference(&logits, temperature)) {
                    let what = format!("vocabulary of {vocab_size}");
                    assert_close(sum.log_prob(logit), expected, temperature, &what);
                }
            }
        }
    }
}

struct Device {
    context: Arc<ComputeContext>,
}

impl Device {
    fn upload(
        &self,
        arena: &mut Arena,
        element: ElementType,
        shape: &[usize],
        bytes: &[u8],
    ) -> DeviceTensor {
        let tensor = arena.tensor(element, shape).expect("room");
        let mut host = PinnedBuffer::new(&self.context, bytes.len(), "a test").expect("room");
        host.bytes().expect("bytes").copy_from_slice(bytes);
        host.upload(0..bytes.len(), &tensor, 0).expect("a copy");
        host.wait().expect("the copy");
        tensor
    }

    fn run(
        &self,
        dtype: DType,
        logits: &[Vec<f32>],
        ids: &[Vec<i32>],
        temperatures: Option<&[f32]>,
    ) -> Vec<f32> {
        let mut arena = Arena::new(&self.context, 192 << 20, "a test").expect("memory");
        let bytes: Vec<u8> = logits
            .iter()
            .flatten()
            .flat_map(|&x| match dtype {
                DType::F32 => x.to_ne_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(x).to_ne_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(x).to_ne_bytes().to_vec(),
            })
            .collect();
        let shape = [logits.len(), logits[0].len()];
        let x = self.upload(&mut arena, ElementType::Float(dtype), &shape, &bytes);
        let bytes: Vec<u8> = ids.iter().flatten().flat_map(|id| id.to_ne_bytes()).collect();
        let shape = [ids.len(), ids[0].len()];
        let ids = self.upload(&mut arena, ElementType::I32, &shape, &bytes);
        let f32s = ElementType::Float(DType::F32);
        let temperatures = temperatures.map(|values| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
            self.upload(&mut arena, f32s, &[values.len()], &bytes)
        });
        let out = arena.tensor(f32s, &shape).expect("room");
        let list = LogProbsList { ids: &ids, out: &out };
        let temperatures = temperatures.as_deref();
        log_probs(&self.context, &x, temperatures, list, None).expect("a launch");
        // As the second list it is the same.
        let again = arena.tensor(f32s, &shape).expect("room");
        let other = LogProbsList { ids: &ids, out: &again };
        log_probs(&self.context, &x, temperatures, list, Some(other)).expect("a launch");
        assert_eq!(words(&self.read(&out)), words(&self.read(&again)));
        self.read(&out)
    }

    fn read(&self, out: &DeviceTensor) -> Vec<f32> {
        let mut host = PinnedBuffer::new(&self.context, out.size_bytes(), "a test").expect("room");
        host.download(out, 0).expect("a copy");
        let found = host.bytes().expect("results").chunks_exact(4);
        found.map(|b| f32::from_ne_bytes(b.try_into().expect("four"))).collect()
    }
}

/// NaN is not equal to itself, its bits are.
fn words(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    }
}

#[test]
fn cuda_gives_the_logarithm_of_the_softmax() {
    let Some(context) = cuda_context() else { return };
    let device = Device { context };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for vocab_size in [1, 5, 1000, 151_936, 151_937] {
            // f16 has no number as low as that of banned tokens.
            let count = if dtype == DType::F16 { 3 } else { 4 };
            let logits: Vec<Vec<f32>> = rows(vocab_size, count)
                .iter()
                .map(|row| row.iter().map(|&x| rounded(dtype, x)).collect())
                .collect();
            let last = vocab_size as i32 - 1;
            let ids: Vec<Vec<i32>> =
                logits.iter().map(|_| vec![0, last, last / 2, -1, last + 1]).collect();
            let hot = [0.5, 1.0, 1.7, 0.2];
            for temperatures in [None, Some(&hot[..count])] {
                let found = device.run(dtype, &logits, &ids, temperatures);
                for (row, logits) in logits.iter().enumerate() {
                    let temperature = temperatures.map_or(1.0, |all| all[row]);
                    let expected = reference(logits, temperature);
                    for (place, &id) in ids[row].iter().enumerate() {
                        let found = found[row * 5 + place];
                        match expected.get(id as usize).filter(|_| id >= 0) {
                            None => assert!(found.is_nan(), "id {id} gives {found}"),
                            Some(&expected) => {
                                let what = format!("{dtype:?}, vocabulary of {vocab_size}");
                                assert_close(found, expected, temperature, &what);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A row gives the same bits alone and among others, and NaN says so.
#[test]
fn a_row_on_cuda_does_not_depend_on_the_others() {
    let Some(context) = cuda_context() else { return };
    let device = Device { context };
    let mut logits = rows(151_936, 40);
    let ids: Vec<Vec<i32>> = logits.iter().map(|_| (0..21).map(|i| i * 7000).collect()).collect();
    let together = device.run(DType::F32, &logits, &ids, None);
    for row in [0, 13, 39] {
        let alone = device.run(DType::F32, &logits[row..=row], &ids[row..=row], None);
        assert_eq!(alone, together[row * 21..][..21]);
    }
    // In a batch every second row begins at an address that is no multiple of 16 bytes.
    for dtype in [DType::F32, DType::BF16] {
        let logits: Vec<Vec<f32>> = rows(50_258, 4)
            .iter()
            .map(|row| row.iter().map(|&x| rounded(dtype, x)).collect())
            .collect();
        let together = device.run(dtype, &logits, &ids[..4], None);
        for row in 0..4 {
            let alone = device.run(dtype, &logits[row..=row], &ids[row..=row], None);
            assert_eq!(words(&alone), words(&together[row * 21..][..21]), "{dtype:?}, row {row}");
        }
    }
    logits[1][77] = f32::NAN;
    let found = device.run(DType::F32, &logits[..3], &ids[..3], None);
    assert!(found[21..42].iter().all(|x| x.is_nan()));
    assert_eq!(found[..21], together[..21]);
}
