//! Activations in e4m3: on the host against float64, and on a GPU to the bit against the host.

use crate::support::device::{cuda_context, download, encode, Bench, HALVES};
use crate::support::Random;
use xserv::backend::DeviceTensor;
use xserv::memory::DType;
use xserv::ops::quantised::activations::{fp8_code, input_scale, round_inputs};
use xserv::ops::quantised::cuda::has_dequantise;
use xserv::ops::quantised::cuda_activations::{
    has_normalise_inputs, normalise_inputs, quantise_inputs, round_inputs as round_on_device,
    QuantisedInputs,
};
use xserv::ops::rms_norm::cuda_rounded::add_rms_norm;

/// Inputs that share a scale as they are in e4m3: in float64 but for the scale and the quotients, which
/// are f32.
pub fn in_e4m3(x: &[f64]) -> Vec<f64> {
    let scale = x.iter().fold(0.0_f64, |largest, x| largest.max(x.abs())) as f32 / 448.0;
    let number = |x: f64| {
        let value = f64::from(x as f32 / scale);
        if value == 0.0 {
            return 0.0;
        }
        let step = 2.0_f64.powf(value.abs().log2().floor().max(-6.0) - 3.0);
        ((value / step).round_ties_even() * step).clamp(-448.0, 448.0) * f64::from(scale)
    };
    x.iter().map(|&x| if scale == 0.0 { 0.0 } else { number(x) }).collect()
}

/// Rows with numbers of all sizes, zeros among them, and what is no number at the ends.
fn awkward_rows(random: &mut Random, num_rows: usize, k: usize) -> Vec<f64> {
    let mut x: Vec<f64> = (0..num_rows * k)
        .map(|_| {
            let size = 2f64.powi(random.below(40) as i32 - 30);
            if random.below(10) == 0 {
                0.0
            } else {
                random.signed() * size
            }
        })
        .collect();
    for (row, x) in x.chunks_exact_mut(k).enumerate() {
        match row % 7 {
            1 => x.fill(0.0),
            2 => x[k - 1] = 65_504.0,
            3 => x[0] = f64::NAN,
            4 => x[k / 2] = f64::INFINITY,
            5 => x.fill(-448.0),
            // The largest is 448 steps of 2^-8: codes in the middle of two are met exactly.
            6 => x
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = (448 - i as i32 % 449) as f64 / 256.0),
            _ => {}
        }
    }
    x
}

#[test]
fn rounded_activations_are_those_of_float64() {
    let mut random = Random::new(3);
    for k in [1, 8, 100, 128, 129, 300] {
        for _ in 0..20 {
            let x: Vec<f32> = (0..k).map(|_| random.signed() as f32 * 3.0).collect();
            let mut got = vec![f32::NAN; k];
            round_inputs(&x, &mut got);
            let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let want: Vec<f32> =
                wide.chunks(128).flat_map(in_e4m3).map(|number| number as f32).collect();
            assert_eq!(got, want, "{k} inputs");
        }
    }
}

/// Returns the bits of numbers, those that are none being alike.
fn bits(x: f32) -> u32 {
    if x.is_nan() {
        f32::NAN.to_bits()
    } else {
        x.to_bits()
    }
}

/// A norm that quantises gives what a norm and then the codes of its results are, to the bit.
#[test]
fn a_norm_on_cuda_quantises_what_it_gives() {
    let Some(context) = cuda_context() else { return };
    if !has_dequantise(&context).unwrap() {
        println!("skipped: a build without kernels");
        return;
    }
    let eps = 1e-2;
    for dtype in HALVES {
        for (num_rows, k) in
            [(1, 8), (1, 4096), (7, 136), (33, 200), (5, 5120), (3, 12_288), (2, 16_384)]
        {
            let mut bench = Bench::new(&context, dtype, 3 * k as u64);
            let shape = [num_rows, k];
            let mut values = awkward_rows(&mut bench.random, num_rows, k);
            values[0] = 0.0;
            let weight = bench.filled(&[k], 0.3, 1.0).0;
            let x = bench.filled(&shape, 1.0, 0.0).0;
            for x in [None, Some(&*x)] {
                let (apart, together) = (bench.of(&shape, &values), bench.of(&shape, &values));
                let normed = bench.poisoned(&shape);
                let of_both = || QuantisedInputs::new(&context, num_rows, k).expect("memory");
                let (want, got) = (of_both(), of_both());
                add_rms_norm(&context, x, &apart, &weight, eps, &normed).expect("the norm");
                quantise_inputs(&context, &normed, &want).expect("the codes");
                assert!(has_normalise_inputs(&together));
                normalise_inputs(&context, x, &together, &weight, eps, &got).expect("both");
                let what = format!("{dtype} {num_rows} x {k}, added: {}", x.is_some());
                let bits_of = |tensor: &DeviceTensor| -> Vec<u64> {
                    bench.read(tensor).iter().map(|x| x.to_bits()).collect()
                };
                assert_eq!(bits_of(&apart), bits_of(&together), "{what}: the stream");
                let memories = [&want, &got].map(|inputs| download(&context, inputs.words()));
                let codes = num_rows * k.div_ceil(128) * 128;
                assert!(memories[0][..codes] == memories[1][..codes], "{what}: the codes");
                let pitch = num_rows.next_multiple_of(4) * 4;
                let scales = |memory: &[u8]| -> Vec<u8> {
                    let all = &memory[want.scales_start()..][..pitch * k.div_ceil(128)];
                    all.chunks(pitch).flat_map(|group| group[..num_rows * 4].to_vec()).collect()
                };
                assert!(scales(&memories[0]) == scales(&memories[1]), "{what}: the scales");
            }
        }
    }
}

#[test]
fn activations_on_cuda_have_the_codes_and_scales_of_the_host() {
    let Some(context) = cuda_context() else { return };
    if !has_dequantise(&context).unwrap() {
        println!("skipped: a build without kernels");
        return;
    }
    for dtype in HALVES {
        for (num_rows, k) in
            [(1, 8), (1, 4096), (7, 136), (8, 128), (9, 3072), (33, 200), (130, 1000), (250, 4096)]
        {
            let mut bench = Bench::new(&context, dtype, k as u64);
            let values = awkward_rows(&mut bench.random, num_rows, k);
            let x = bench.of(&[num_rows, k], &values);
            let stored: Vec<f32> = bench.read(&x).iter().map(|&x| x as f32).collect();
            let inputs = QuantisedInputs::new(&context, num_rows, k).expect("memory");
            quantise_inputs(&context, &x, &inputs).expect("the operator");
            let words = download(&context, inputs.words());
            let (codes, scales) = words.split_at(inputs.scales_start());
            let scales: Vec<f32> = scales
                .chunks_exact(4)
                .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let (num_groups, pitch) = (k.div_ceil(128), num_rows.next_multiple_of(4));
            for (row, x) in stored.chunks_exact(k).enumerate() {
                for (group, x) in x.chunks(128).enumerate() {
                    let what = format!("{dtype} {num_rows} x {k}, row {row}, group {group}");
                    let scale = input_scale(x);
                    assert_eq!(bits(scales[group * pitch + row]), bits(scale), "{what}");
                    if !scale.is_finite() {
                        continue;
                    }
                    let codes = &codes[(row * num_groups + group) * 128..][..128];
                    for (input, &code) in codes.iter().enumerate() {
                        let want = match x.get(input) {
                            Some(&x) if scale != 0.0 => fp8_code(x / scale),
                            _ => 0,
                        };
                        assert_eq!(code, want, "{what}, input {input}");
                    }
                }
            }
        }
    }
}

#[test]
fn rounded_activations_on_cuda_have_the_bits_of_the_host() {
    let Some(context) = cuda_context() else { return };
    if !has_dequantise(&context).unwrap() {
        println!("skipped: a build without kernels");
        return;
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (num_rows, k) in [(1, 1), (7, 131), (16, 128), (70, 515)] {
            let mut bench = Bench::new(&context, dtype, k as u64);
            let values = awkward_rows(&mut bench.random, num_rows, k);
            let x = bench.of(&[num_rows, k], &values);
            let stored: Vec<f32> = bench.read(&x).iter().map(|&x| x as f32).collect();
            let out = bench.poisoned(&[num_rows, k]);
            round_on_device(&context, &x, &out).expect("the operator");
            let got = bench.read(&out);
            let mut want = vec![0.0; k];
            for (row, x) in stored.chunks_exact(k).enumerate() {
                round_inputs(x, &mut want);
                let wide: Vec<f64> = want.iter().map(|&x| f64::from(x)).collect();
                let want = xserv_bits(dtype, &wide);
                let got = xserv_bits(dtype, &got[row * k..(row + 1) * k]);
                assert_eq!(got, want, "{dtype} {num_rows} x {k}, row {row}");
            }
        }
    }
}

/// Returns the bytes of numbers of a type, those that are none being alike.
fn xserv_bits(dtype: DType, values: &[f64]) -> Vec<u8> {
    let alike: Vec<f64> =
        values.iter().map(|&x| if x.is_finite() { x } else { f64::NAN }).collect();
    encode(dtype, &alike)
}
