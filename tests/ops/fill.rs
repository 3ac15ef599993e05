//! `fill`: its statistics, its bits against an independent computation, CUDA against the CPU, and
//! what it leaves alone.

use std::sync::Arc;

use xserv::backend::cpu::CpuBackend;
use xserv::backend::{cuda, Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, ElementType};
use xserv::ops::fill::{cpu, fill, Noise};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const NOISE: Noise = Noise { seed: 0x0123_4567_89ab_cdef, mean: 0.25, std: 0.02 };

/// Elements of type `dtype` as numbers.
fn decoded(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        DType::F16 => {
            let value = |&b: &[u8; 2]| half::f16::from_le_bytes(b).to_f32();
            bytes.as_chunks::<2>().0.iter().map(value).collect()
        }
        DType::BF16 => {
            let value = |&b: &[u8; 2]| half::bf16::from_le_bytes(b).to_f32();
            bytes.as_chunks::<2>().0.iter().map(value).collect()
        }
    }
}

/// Returns the numbers of `noise` from number `first` on, rounded to `dtype`.
fn numbers(noise: &Noise, first: u64, count: usize, dtype: DType) -> Vec<f32> {
    let mut bytes = vec![0xff; count * dtype.size_bytes()];
    cpu::fill_bytes(noise, first, dtype, &mut bytes);
    decoded(&bytes, dtype)
}

fn mean_and_std(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let square = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}

#[test]
fn numbers_have_the_mean_the_deviation_and_the_shape_that_were_asked_for() {
    const COUNT: usize = 1 << 20;
    let values = numbers(&NOISE, 0, COUNT, DType::F32);
    let (mean, std) = mean_and_std(&values);
    // Five standard errors of each.
    assert!((mean - 0.25).abs() < 5.0 * 0.02 / 1024.0, "mean {mean}");
    assert!((std / 0.02 - 1.0).abs() < 5.0 / 1024.0, "standard deviation {std}");
    let share = |limit: f32| {
        let near = values.iter().filter(|&&x| (x - NOISE.mean).abs() < limit * NOISE.std).count();
        near as f64 / COUNT as f64
    };
    // A normal distribution has 68.3 %, 95.4 % and 99.7 %; sums of four uniform numbers have a
    // little less in the middle and nothing far out.
    assert!((share(1.0) - 0.673).abs() < 0.004, "{}", share(1.0));
    assert!((share(2.0) - 0.957).abs() < 0.004, "{}", share(2.0));
    assert!(share(3.0) > 0.997 && share(3.0) < 1.0, "{}", share(3.0));
    assert_eq!(share(3.47), 1.0);
    // Neighbours know nothing of each other, and neither do sequences of neighbouring seeds.
    let other = numbers(&Noise { seed: NOISE.seed + 1, ..NOISE }, 0, COUNT, DType::F32);
    let correlation = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a - 0.25) * f64::from(b - 0.25));
        products.sum::<f64>() / COUNT as f64 / (std * std)
    };
    for (what, found) in [
        ("the next number", correlation(&values[1..], &values)),
        ("the number 4096 on", correlation(&values[4096..], &values)),
        ("the next seed", correlation(&values, &other)),
    ] {
        assert!(found.abs() < 5.0 / 1024.0, "correlation with {what}: {found}");
    }
}

/// The published generator, which adds up its state, and sums of its words in f64.
#[test]
fn numbers_are_those_of_splitmix64() {
    let mut state = NOISE.seed;
    let values = numbers(&NOISE, 0, 1000, DType::F32);
    for value in values {
        state = state.wrapping_add(0x9e3779b97f4a7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^= z >> 31;
        let sum: u64 = z.to_le_bytes().as_chunks::<2>().0.iter().map(|&b| word(b)).sum();
        let std = (4.0 * (65536.0_f64.powi(2) - 1.0) / 12.0).sqrt();
        let expected = 0.25 + 0.02 * (sum as f64 - 2.0 * 65535.0) / std;
        assert!((f64::from(value) - expected).abs() < 3e-8, "{value} is not {expected}");
    }
}

fn word(bytes: [u8; 2]) -> u64 {
    u16::from_le_bytes(bytes).into()
}

#[test]
fn a_number_depends_on_its_place_alone() {
    let whole = numbers(&NOISE, 0, 5000, DType::F32);
    for first in [1, 2, 63, 4096, 4999] {
        let part = numbers(&NOISE, first as u64, 5000 - first, DType::F32);
        assert_eq!(part, whole[first..]);
    }
    for num_threads in [1, 3] {
        let backend = CpuBackend::new(num_threads).expect("threads");
        let mut filled = vec![f32::NAN; 300_000];
        cpu::fill(&backend, &NOISE, &mut filled).expect("numbers");
        assert_eq!(filled, numbers(&NOISE, 0, 300_000, DType::F32));
    }
    // Other types are the same numbers rounded.
    let f16: Vec<f32> = whole.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect();
    assert_eq!(numbers(&NOISE, 0, 5000, DType::F16), f16);
    let bf16: Vec<f32> = whole.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
    assert_eq!(numbers(&NOISE, 0, 5000, DType::BF16), bf16);
    // A last byte that is no whole element stays.
    let mut bytes = [7; 5];
    cpu::fill_bytes(&NOISE, 0, DType::BF16, &mut bytes);
    assert_eq!(bytes[4], 7);
}

#[test]
fn without_a_deviation_every_number_is_the_mean() {
    for mean in [0.0_f32, 1.0, -0.5] {
        for dtype in DTYPES {
            let values = numbers(&Noise { seed: 3, mean, std: 0.0 }, 5, 1000, dtype);
            assert!(values.iter().all(|x| x.to_bits() == mean.to_bits()), "{mean}, {dtype}");
        }
    }
}

/// Contiguous tensors, rows with gaps, and views that no kernel takes as they are.
const LAYOUTS: [(&[usize], Option<&[usize]>); 7] = [
    (&[1], None),
    (&[1000], None),
    (&[3, 5, 70_001], None),
    (&[1, 33], Some(&[100, 1])),
    (&[129, 48], Some(&[64, 1])),
    (&[4, 3, 10], Some(&[64, 16, 1])),
    (&[31, 7], Some(&[1, 40])),
];

/// Replaces the contents of a contiguous tensor by what `change` makes of them.
fn change_bytes(
    context: &Arc<ComputeContext>,
    tensor: &DeviceTensor,
    change: impl FnOnce(&mut [u8]),
) {
    let len = tensor.size_bytes();
    match context.backend() {
        ContextBackend::Cpu { .. } => {
            // SAFETY: memory of that length, which the system gave zeroed; the tensor keeps it, and
            // nobody else uses it.
            change(unsafe { std::slice::from_raw_parts_mut(tensor.data(), len) });
        }
        ContextBackend::Cuda(_) => {
            let mut staging = PinnedBuffer::new(context, len, "a test").expect("memory");
            staging.download(tensor, 0).expect("a download");
            change(staging.bytes().expect("the bytes"));
            staging.upload(0..len, tensor, 0).expect("an upload");
            staging.wait().expect("the end of the upload");
        }
    }
}

/// Fills views of an arena, and compares every element with the sequence and every gap with what was there.
fn fills_views_of(context: &Arc<ComputeContext>) {
    for dtype in DTYPES {
        let element = ElementType::Float(dtype);
        for (shape, strides) in LAYOUTS {
            let what = format!("{dtype} {shape:?} with strides {strides:?}");
            let count: usize = shape.iter().product();
            let contiguous: Vec<usize> =
                (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
            let strides_or_rows = strides.unwrap_or(&contiguous);
            // Element `index` of the shape, from the start of the view on.
            let place = |mut index: usize| {
                let axes = shape.iter().zip(strides_or_rows).rev();
                axes.fold(0, |place, (size, stride)| {
                    let position = index % size;
                    index /= size;
                    place + position * stride
                })
            };
            let span = place(count - 1) + 1;
            const BEFORE: usize = 3;
            let total = BEFORE + span + 5;
            let bytes = Arena::bytes_for(element, &[total]).expect("a size");
            let mut arena = Arena::new(context, bytes, "a test").expect("memory");
            let whole = arena.tensor(element, &[total]).expect("a tensor");
            change_bytes(context, &whole, |bytes| bytes.fill(0x3c));
            let view = whole.view(BEFORE, shape, strides).expect("a view");
            fill(context, &NOISE, &view).expect("numbers");
            let mut found = Vec::new();
            change_bytes(context, &whole, |bytes| found = decoded(bytes, dtype));
            let untouched = decoded(&[0x3c; 4], dtype)[0];
            let mut expected = vec![untouched; total];
            for (index, number) in numbers(&NOISE, 0, count, dtype).into_iter().enumerate() {
                expected[BEFORE + place(index)] = number;
            }
            let wrong = (0..total).find(|&i| found[i].to_bits() != expected[i].to_bits());
            assert_eq!(wrong, None, "{what}: the first wrong place");
        }
    }
}

#[test]
fn views_of_any_strides_are_filled() {
    let context = ComputeContext::cpu(2, usize::MAX).expect("a context");
    fills_views_of(&Arc::new(context));
}

#[test]
fn cuda_has_the_bits_of_the_cpu() {
    let found = cuda::available().and_then(|()| ComputeContext::cuda_private(0, usize::MAX));
    match found {
        Ok(context) => fills_views_of(&Arc::new(context)),
        Err(why) => {
            assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {why}");
            println!("skipped: no CUDA device ({why})");
        }
    }
}
