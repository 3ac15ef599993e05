//! Norms, activations, softmax, argmax and rope on awkward shapes.

use crate::support::{
    assert_close, assert_same_bits, backends, reference, Guarded, Random, Tolerance,
};
use xserv::backend::cpu::CpuBackend;
use xserv::ops;

const WIDTHS: [usize; 12] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 128, 257, 1024];
const ROWS: [usize; 6] = [0, 1, 2, 31, 33, 300];

#[test]
fn rms_norm() {
    let mut random = Random::new(20);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let weight = random.normals(width);
            for rows in ROWS {
                let x = random.normals(rows * width);
                let mut out = Guarded::new(x.len());
                ops::rms_norm::cpu::rms_norm(&backend, &x, &weight, 1e-6, out.get()).unwrap();
                let expected = reference::rms_norm(&x, &weight, 1e-6);
                let what = format!("rms_norm {rows}x{width} on {}", backend.name());
                // Measured 3e-7.
                assert_close(&what, out.checked(&what), &expected, Tolerance::OnePlus(2e-6));
            }
        }
    }
}

#[test]
fn rms_norm_of_heads_inside_a_fused_row() {
    let mut random = Random::new(21);
    let (num_heads, head_dim, row_stride) = (5, 48, 400);
    let weight = random.normals(head_dim);
    for backend in backends(&[1, 2]) {
        for num_tokens in [0, 1, 200] {
            // As long as it must be: the last row ends with its heads.
            let len = if num_tokens == 0 { 0 } else { (num_tokens - 1) * row_stride + 240 };
            let before = random.normals(len);
            let mut x = Guarded::of(&before);
            ops::rms_norm::cpu_heads::rms_norm_heads(
                &backend,
                x.get(),
                num_tokens,
                row_stride,
                num_heads,
                &weight,
                1e-6,
            )
            .unwrap();
            let mut expected: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
            for token in 0..num_tokens {
                let row = token * row_stride..token * row_stride + 240;
                expected[row.clone()].copy_from_slice(&reference::rms_norm(
                    &before[row],
                    &weight,
                    1e-6,
                ));
            }
            assert_close("heads", x.checked("heads"), &expected, Tolerance::OnePlus(2e-6));
        }
        let mut short = vec![0.0; 2 * row_stride];
        let call = |x: &mut [f32], tokens, stride| {
            ops::rms_norm::cpu_heads::rms_norm_heads(
                &backend, x, tokens, stride, num_heads, &weight, 1e-6,
            )
        };
        assert!(call(&mut short, 3, row_stride).is_err());
        assert!(call(&mut short, 2, 239).is_err());
    }
}

#[test]
fn layer_norm() {
    let mut random = Random::new(22);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let (weight, bias) = (random.normals(width), random.normals(width));
            for rows in ROWS {
                let x = random.normals(rows * width);
                let mut out = Guarded::new(x.len());
                ops::layer_norm::cpu::layer_norm(
                    &backend,
                    &x,
                    &weight,
                    Some(&bias),
                    1e-5,
                    out.get(),
                )
                .unwrap();
                let expected = reference::layer_norm(&x, &weight, &bias, 1e-5);
                let what = format!("layer_norm {rows}x{width} on {}", backend.name());
                assert_close(&what, out.checked(&what), &expected, Tolerance::OnePlus(2e-5));
            }
        }
    }
}

#[test]
fn activations() {
    let mut random = Random::new(23);
    let extremes = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 87.0, -87.5, 88.5, -88.5, -104.0]
        .into_iter()
        .chain([1e10, -1e10, 1e30, -1e30, f32::MAX, f32::MIN]);
    let mut x: Vec<f32> = extremes.collect();
    x.extend((-4000..4000).map(|i| i as f32 / 100.0));
    for backend in backends(&[1, 2]) {
        for len in [0, 1, 15, 16, 17, 33, x.len()] {
            let x = &x[..len];
            let mut out = Guarded::new(len);
            ops::activation::cpu::silu(&backend, x, out.get()).unwrap();
            let expected: Vec<f64> = x.iter().map(|&x| reference::silu(x)).collect();
            assert_close("silu", out.checked("silu"), &expected, Tolerance::OnePlus(2e-6));
            let mut out = Guarded::of(x);
            ops::activation::cpu::activation_in_place(
                &backend,
                ops::activation::cpu::Activation::GeluTanh,
                out.get(),
            )
            .unwrap();
            let expected: Vec<f64> = x.iter().map(|&x| reference::gelu_tanh(x)).collect();
            assert_close("gelu", out.checked("gelu"), &expected, Tolerance::OnePlus(2e-6));
        }
        for (rows, width) in [(0, 3), (1, 1), (3, 33), (40, 3072)] {
            let gate_up: Vec<f32> = random.normals(2 * rows * width);
            let mut out = Guarded::new(rows * width);
            ops::silu_mul::cpu_stacked::silu_mul(&backend, &gate_up, width, out.get()).unwrap();
            let expected: Vec<f64> = gate_up
                .chunks(2 * width)
                .flat_map(|row| {
                    row[..width]
                        .iter()
                        .zip(&row[width..])
                        .map(|(&g, &u)| reference::silu(g) * f64::from(u))
                })
                .collect();
            assert_close("silu_mul", out.checked("silu_mul"), &expected, Tolerance::OnePlus(2e-6));
        }
        // The largest values: no NaN, and zero where the gate closes.
        let mut out = [f32::NAN; 2];
        ops::silu_mul::cpu_stacked::silu_mul(&backend, &[1e30, -1e30, 1.0, 1e30], 2, &mut out)
            .unwrap();
        assert_eq!(out, [1e30, 0.0]);
        let mut nan = [f32::NAN; 20];
        ops::activation::cpu::activation_in_place(
            &backend,
            ops::activation::cpu::Activation::GeluTanh,
            &mut nan,
        )
        .unwrap();
        assert!(nan.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn softmax() {
    let mut random = Random::new(24);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            for rows in ROWS {
                let mut x = random.normals(rows * width);
                for (row, x) in x.chunks_mut(width).enumerate() {
                    match row % 4 {
                        1 => x.iter_mut().for_each(|x| *x = *x * 100.0 + 1000.0),
                        2 => x.iter_mut().step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
                        3 => x.fill(f32::NEG_INFINITY),
                        _ => {}
                    }
                }
                let mut out = Guarded::new(x.len());
                ops::softmax::cpu::softmax(&backend, &x, width, out.get()).unwrap();
                let expected = reference::softmax(&x, width);
                let what = format!("softmax {rows}x{width} on {}", backend.name());
                assert_close(&what, out.checked(&what), &expected, Tolerance::OnePlus(2e-6));
            }
        }
        let mut out = [0.0; 3];
        ops::softmax::cpu::softmax(&backend, &[1.0, f32::NAN, 2.0], 3, &mut out).unwrap();
        assert!(out.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn argmax() {
    for backend in backends(&[1]) {
        for width in WIDTHS {
            for at in [0, width / 2, width - 1] {
                let mut x = vec![-1.0; 2 * width];
                x[at] = 5.0;
                x[width - 1] = 5.0;
                let mut out = [9, 9];
                ops::argmax::cpu_checked::argmax(&backend, &x, width, &mut out).unwrap();
                assert_eq!(out, [at as u32, 0], "the lowest index of the largest value");
                x[width + at] = f32::NAN;
                assert!(ops::argmax::cpu_checked::argmax(&backend, &x, width, &mut out).is_err());
            }
        }
        assert!(ops::argmax::cpu_checked::argmax(&backend, &[], 0, &mut [0]).is_err());
        ops::argmax::cpu_checked::argmax(&backend, &[f32::NEG_INFINITY; 2], 2, &mut [7]).unwrap();
    }
}

#[test]
fn rope_with_strides_and_scaling() {
    let mut random = Random::new(25);
    for head_dim in [2, 16, 80, 128] {
        let inv_freq: Vec<f32> =
            (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let table = ops::rope::cpu_table::RopeTable::new(&inv_freq, 1.25, 1000).unwrap();
        let (num_heads, row_stride) = (3, 3 * head_dim + 7);
        for backend in backends(&[1, 2]) {
            for num_tokens in [0usize, 1, 33, 500] {
                let len = if num_tokens == 0 { 0 } else { num_tokens * row_stride - 7 };
                let before = random.normals(len);
                let positions: Vec<u32> =
                    (0..num_tokens).map(|t| ((t * 37 + 255) % 1000) as u32).collect();
                let mut x = Guarded::of(&before);
                let pairing = ops::rope::RopePairing::SplitHalf;
                ops::rope::cpu_table::rope(
                    &backend,
                    x.get(),
                    row_stride,
                    num_heads,
                    &positions,
                    &table,
                    pairing,
                )
                .unwrap();
                let mut expected: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
                for (token, &position) in positions.iter().enumerate() {
                    for head in 0..num_heads {
                        for (i, inv_freq) in inv_freq.iter().enumerate() {
                            let a = token * row_stride + head * head_dim + i;
                            let b = a + head_dim / 2;
                            // The f32 angle is the operator's contract.
                            let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
                            let (x, y) = (f64::from(before[a]), f64::from(before[b]));
                            expected[a] = 1.25 * (x * cos - y * sin);
                            expected[b] = 1.25 * (y * cos + x * sin);
                        }
                    }
                }
                assert_close("rope", x.checked("rope"), &expected, Tolerance::OnePlus(2e-6));
            }
        }
        let backend = CpuBackend::new(1).unwrap();
        let pairing = ops::rope::RopePairing::SplitHalf;
        let mut x = vec![0.0; head_dim];
        assert!(ops::rope::cpu_table::rope(
            &backend,
            &mut x,
            head_dim,
            1,
            &[1000],
            &table,
            pairing
        )
        .is_err());
        assert!(ops::rope::cpu_table::rope(
            &backend,
            &mut x,
            head_dim,
            1,
            &[u32::MAX],
            &table,
            pairing
        )
        .is_err());
        assert!(ops::rope::cpu_table::rope(&backend, &mut x, head_dim, 2, &[0], &table, pairing)
            .is_err());
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut random = Random::new(26);
    let x = random.normals(400 * 512);
    let weight = random.normals(512);
    for one in backends(&[1]) {
        let run = |backend: &CpuBackend| {
            let mut out = vec![0.0; x.len()];
            ops::rms_norm::cpu::rms_norm(backend, &x, &weight, 1e-6, &mut out).unwrap();
            ops::activation::cpu::activation_in_place(
                backend,
                ops::activation::cpu::Activation::GeluTanh,
                &mut out,
            )
            .unwrap();
            let mut out2 = vec![0.0; x.len()];
            ops::softmax::cpu::softmax(backend, &out, 512, &mut out2).unwrap();
            ops::layer_norm::cpu::layer_norm(
                backend,
                &out2,
                &weight,
                Some(&weight),
                1e-6,
                &mut out,
            )
            .unwrap();
            out
        };
        let expected = run(&one);
        for num_threads in [2, 3] {
            let backend = CpuBackend::with_isa(num_threads, one.isa()).unwrap();
            assert_same_bits(backend.name(), &expected, &run(&backend));
        }
    }
}
