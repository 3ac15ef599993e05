//! `ops::host`: norms, activations, softmax, casts, rope, lookups, on all types and awkward shapes.

use crate::host_support::{close, for_storage, normals, typed, values, Typed};
use crate::support::{assert_same_bits, backends, reference, Random};
use xserv::backend::cpu::CpuBackend;
use xserv::ops;
use xserv::ops::activation::cpu::Activation;
use xserv::ops::common::storage::Storage;
use xserv::ops::rope::RopePairing;

const WIDTHS: [usize; 10] = [1, 2, 15, 17, 31, 32, 33, 257, 1000, 2049];
const ROWS: [usize; 7] = [0, 1, 3, 5, 31, 33, 130];

for_storage!(
    norms,
    layer_norms,
    activations,
    silu_muls,
    softmaxes,
    sums_and_products,
    casts,
    transposes,
    embeddings,
    ropes,
    largest,
    threads,
);

fn norms<T: Storage>() {
    let mut random = Random::new(40);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let weight: Vec<T> = normals(&mut random, width);
            for rows in ROWS {
                let x: Vec<T> = normals(&mut random, rows * width);
                let y: Vec<T> = normals(&mut random, rows * width);
                let what = format!("rms_norm {rows}x{width} on {}", backend.name());
                let mut out = Typed::new(x.len());
                ops::rms_norm::cpu::rms_norm(&backend, &x, &weight, 1e-6, out.get()).unwrap();
                let expected = reference::rms_norm(&values(&x), &values(&weight), 1e-6);
                close::<T>(&what, &out.checked(&what), &expected, 2e-6);

                let (mut sums, mut out) = (Typed::new(x.len()), Typed::new(x.len()));
                ops::rms_norm::cpu::add_rms_norm(
                    &backend,
                    &x,
                    &y,
                    &weight,
                    1e-6,
                    sums.get(),
                    out.get(),
                )
                .unwrap();
                let added: Vec<T> =
                    x.iter().zip(&y).map(|(x, y)| T::from_f32(x.to_f32() + y.to_f32())).collect();
                assert_same_bits(&what, &sums.checked(&what), &values(&added));
                let expected = reference::rms_norm(&values(&added), &values(&weight), 1e-6);
                close::<T>(&what, &out.checked(&what), &expected, 2e-6);
            }
        }
    }
    let backend = CpuBackend::new(1).unwrap();
    let (x, mut out) = (vec![T::default(); 6], vec![T::default(); 6]);
    assert!(ops::rms_norm::cpu::rms_norm(&backend, &x, &x[..4], 1e-6, &mut out).is_err());
    assert!(ops::rms_norm::cpu::rms_norm(&backend, &x, &x[..0], 1e-6, &mut out).is_err());
    assert!(ops::rms_norm::cpu::rms_norm(&backend, &x[..3], &x[..3], 1e-6, &mut out).is_err());
}

fn layer_norms<T: Storage>() {
    let mut random = Random::new(41);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let weight: Vec<T> = normals(&mut random, width);
            let bias: Vec<T> = normals(&mut random, width);
            for rows in ROWS {
                let x: Vec<T> = normals(&mut random, rows * width);
                for bias in [None, Some(&bias[..])] {
                    let what = format!("layer_norm {rows}x{width} on {}", backend.name());
                    let mut out = Typed::new(x.len());
                    ops::layer_norm::cpu::layer_norm(&backend, &x, &weight, bias, 1e-5, out.get())
                        .unwrap();
                    let zeros = vec![T::default(); width];
                    let expected = reference::layer_norm(
                        &values(&x),
                        &values(&weight),
                        &values(bias.unwrap_or(&zeros)),
                        1e-5,
                    );
                    close::<T>(&what, &out.checked(&what), &expected, 2e-5);
                }
            }
        }
    }
}

/// erfc by its series and continued fraction, in f64.
fn erfc(x: f64) -> f64 {
    let z = x.abs();
    let upper = if z < 2.0 {
        let (mut term, mut sum, mut n) = (z, z, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -z * z / n;
            sum += term / (2.0 * n + 1.0);
        }
        1.0 - 2.0 / std::f64::consts::PI.sqrt() * sum
    } else {
        let mut fraction = z;
        for n in (1..200).rev() {
            fraction = z + f64::from(n) / 2.0 / fraction;
        }
        (-z * z).exp() / std::f64::consts::PI.sqrt() / fraction
    };
    if x < 0.0 {
        2.0 - upper
    } else {
        upper
    }
}

fn activations<T: Storage>() {
    let extremes = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 87.0, -87.5, 88.5, -88.5, -104.0]
        .into_iter()
        .chain([6e4, -6e4, 1e10, -1e10, 1e30, -1e30, f32::MAX, f32::MIN]);
    let mut x: Vec<f32> = extremes.collect();
    x.extend((-4000..4000).map(|i| i as f32 / 250.0));
    let x: Vec<T> = typed::<T>(&x).into_iter().filter(|x| x.to_f32().is_finite()).collect();
    type Exact = fn(f32) -> f64;
    let cases: [(Activation, Exact); 3] = [
        (Activation::GeluTanh, reference::gelu_tanh),
        (Activation::GeluErf, |x| {
            let x = f64::from(x);
            0.5 * x * erfc(-x / 2f64.sqrt())
        }),
        (Activation::Silu, reference::silu),
    ];
    for backend in backends(&[1, 2]) {
        for (function, exact) in cases {
            for len in [0, 1, 15, 16, 17, 33, 257, x.len()] {
                let x = &x[..len];
                let what = format!("{function:?} of {len} on {}", backend.name());
                let expected: Vec<f64> = values(x).into_iter().map(exact).collect();
                let mut out = Typed::new(len);
                ops::activation::cpu::activation(&backend, function, x, out.get()).unwrap();
                let got = out.checked(&what);
                close::<T>(&what, &got, &expected, 5e-7);
                let mut in_place = Typed::of(x);
                ops::activation::cpu::activation_in_place(&backend, function, in_place.get())
                    .unwrap();
                assert_same_bits(&what, &got, &in_place.checked(&what));
            }
            let mut special = typed::<T>(&[f32::INFINITY, f32::NAN]);
            ops::activation::cpu::activation_in_place(&backend, function, &mut special).unwrap();
            assert_eq!(special[0].to_f32(), f32::INFINITY);
            assert!(special[1].to_f32().is_nan());
        }
        assert!(ops::activation::cpu::silu(&backend, &x, &mut []).is_err());
    }
}

fn silu_muls<T: Storage>() {
    let mut random = Random::new(42);
    for backend in backends(&[1, 2]) {
        for (rows, width, gate_stride, up_stride) in
            [(0, 3, 3, 3), (1, 1, 0, 0), (3, 33, 66, 35), (40, 3072, 6144, 6144), (5, 300, 300, 0)]
        {
            let what = format!("silu_mul {rows}x{width} on {}", backend.name());
            let len = |stride: usize| if rows == 0 { 0 } else { (rows - 1) * stride + width };
            let gate: Vec<T> = normals(&mut random, len(gate_stride));
            let up: Vec<T> = normals(&mut random, len(up_stride));
            let mut out = Typed::new(rows * width);
            ops::silu_mul::cpu::silu_mul(
                &backend,
                &gate,
                gate_stride,
                &up,
                up_stride,
                width,
                out.get(),
            )
            .unwrap();
            let mut expected = Vec::new();
            for r in 0..rows {
                for i in 0..width {
                    let gate = gate[r * gate_stride + i].to_f32();
                    let up = up[r * up_stride + i].to_f32();
                    expected.push(reference::silu(gate) * f64::from(up));
                }
            }
            close::<T>(&what, &out.checked(&what), &expected, 2e-6);
        }
        let x = vec![T::default(); 10];
        let mut out = vec![T::default(); 6];
        assert!(ops::silu_mul::cpu::silu_mul(&backend, &x, 8, &x, 3, 3, &mut out).is_err());
        assert!(ops::silu_mul::cpu::silu_mul(&backend, &x, 3, &x, usize::MAX, 3, &mut out).is_err());
        assert!(ops::silu_mul::cpu::silu_mul(&backend, &x, 3, &x, 3, 0, &mut out).is_err());
    }
}

fn softmaxes<T: Storage>() {
    let mut random = Random::new(43);
    for backend in backends(&[1, 2]) {
        // The last is cut into parts.
        for (width, rows) in
            WIDTHS.into_iter().flat_map(|w| ROWS.map(|r| (w, r))).chain([(40_000, 5)])
        {
            let mut x = random.normals(rows * width);
            for (row, x) in x.chunks_mut(width).enumerate() {
                match row % 4 {
                    1 => x.iter_mut().for_each(|x| *x = *x * 100.0 + 1000.0),
                    2 => x.iter_mut().step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
                    3 => x.fill(f32::NEG_INFINITY),
                    _ => {}
                }
            }
            let x: Vec<T> = typed(&x);
            let what = format!("softmax {rows}x{width} on {}", backend.name());
            let mut out = Typed::new(x.len());
            ops::softmax::cpu::softmax(&backend, &x, width, out.get()).unwrap();
            let expected = reference::softmax(&values(&x), width);
            close::<T>(&what, &out.checked(&what), &expected, 2e-6);
        }
        for width in [3, 20_000] {
            let mut x = vec![T::from_f32(1.0); width];
            x[1] = T::from_f32(f32::NAN);
            let mut out = vec![T::default(); width];
            ops::softmax::cpu::softmax(&backend, &x, width, &mut out).unwrap();
            assert!(out.iter().all(|x| x.to_f32().is_nan()));
        }
    }
}

fn sums_and_products<T: Storage>() {
    let mut random = Random::new(44);
    for backend in backends(&[1, 2]) {
        for len in [0, 1, 31, 33, 1000, 100_001] {
            let (a, b): (Vec<T>, Vec<T>) = (normals(&mut random, len), normals(&mut random, len));
            let (mut sums, mut products) = (Typed::new(len), Typed::new(len));
            ops::elementwise::cpu::add(&backend, &a, &b, sums.get()).unwrap();
            ops::elementwise::cpu::mul(&backend, &a, &b, products.get()).unwrap();
            let exact = |f: fn(f32, f32) -> f32| -> Vec<f32> {
                let pairs = a.iter().zip(&b);
                pairs.map(|(a, b)| T::from_f32(f(a.to_f32(), b.to_f32())).to_f32()).collect()
            };
            assert_same_bits("add", &sums.checked("add"), &exact(|a, b| a + b));
            assert_same_bits("mul", &products.checked("mul"), &exact(|a, b| a * b));
        }
        assert!(ops::elementwise::cpu::add(&backend, &[T::default()], &[], &mut [T::default()])
            .is_err());
    }
}

/// From every bit pattern of the 16-bit types, and to them against the `half` crate.
fn casts<T: Storage>() {
    let mut random = Random::new(45);
    let mut x: Vec<f32> = (0..=u16::MAX).map(|b| half::f16::from_bits(b).to_f32()).collect();
    x.extend((0..=u16::MAX).map(|b| half::bf16::from_bits(b).to_f32()));
    x.extend((0..200_000).map(|_| f32::from_bits(random.next() as u32)));
    // Ties and their neighbours, around the subnormal numbers and the largest of f16.
    for base in [1.0f32, 6.1e-5, 5.96e-8, 2.98e-8, 65504.0, 65520.0, 3.3e38] {
        x.extend((-3000i32..3000).map(|i| f32::from_bits(base.to_bits().wrapping_add_signed(i))));
    }
    let x: Vec<T> = typed(&x);
    let wide = values(&x);
    let same = |what: &str, got: &[f32], expected: &mut dyn Iterator<Item = f32>| {
        for ((&got, expected), x) in got.iter().zip(expected).zip(&wide) {
            let both_nan = got.is_nan() && expected.is_nan();
            let same = both_nan || got.to_bits() == expected.to_bits();
            assert!(same, "{what}: {x:e} became {got:e}, not {expected:e}");
        }
    };
    for backend in backends(&[1, 2]) {
        let mut out = Typed::<f32>::new(x.len());
        ops::elementwise::cpu::cast(&backend, &x, out.get()).unwrap();
        same("to f32", &out.checked("cast"), &mut wide.iter().copied());
        let mut out = Typed::<half::f16>::new(x.len());
        ops::elementwise::cpu::cast(&backend, &x, out.get()).unwrap();
        let expected = wide.iter().map(|&x| half::f16::from_f32(x).to_f32());
        same("to f16", &out.checked("cast"), &mut { expected });
        let mut out = Typed::<half::bf16>::new(x.len());
        ops::elementwise::cpu::cast(&backend, &x, out.get()).unwrap();
        let expected = wide.iter().map(|&x| half::bf16::from_f32(x).to_f32());
        same("to bf16", &out.checked("cast"), &mut { expected });
    }
}

fn transposes<T: Storage>() {
    let mut random = Random::new(46);
    for backend in backends(&[1, 2]) {
        for (rows, columns) in
            [(0, 3), (1, 1), (1, 40), (40, 1), (16, 16), (31, 33), (33, 65), (100, 257), (400, 300)]
        {
            let x: Vec<T> = normals(&mut random, rows * columns);
            let mut out = Typed::new(x.len());
            ops::transpose::cpu::transpose(&backend, &x, rows, columns, out.get()).unwrap();
            let expected: Vec<f32> = (0..columns)
                .flat_map(|c| (0..rows).map(move |r| (r, c)))
                .map(|(r, c)| x[r * columns + c].to_f32())
                .collect();
            assert_same_bits("transpose", &out.checked("transpose"), &expected);
        }
        assert!(ops::transpose::cpu::transpose(
            &backend,
            &[T::default(); 6],
            4,
            2,
            &mut [T::default(); 6]
        )
        .is_err());
    }
}

fn embeddings<T: Storage>() {
    let mut random = Random::new(47);
    let (vocab_size, width) = (50, 1001);
    let table: Vec<T> = normals(&mut random, vocab_size * width);
    let ids: Vec<i64> = (0..77).map(|i| (i * 31) % 50).collect();
    let short: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    for backend in backends(&[1, 2]) {
        let mut out = Typed::new(ids.len() * width);
        ops::embedding::cpu::embedding(&backend, &table, vocab_size, width, &ids, out.get())
            .unwrap();
        let expected: Vec<T> = ids
            .iter()
            .flat_map(|&id| &table[id as usize * width..(id as usize + 1) * width])
            .copied()
            .collect();
        assert_same_bits("embedding", &out.checked("embedding"), &values(&expected));
        let mut again = Typed::new(ids.len() * width);
        ops::embedding::cpu::embedding(&backend, &table, vocab_size, width, &short, again.get())
            .unwrap();
        assert_same_bits("embedding", &again.checked("embedding"), &values(&expected));
        for wrong in [-1i64, 50, i64::MAX] {
            let mut out = vec![T::default(); 2 * width];
            let error = ops::embedding::cpu::embedding(
                &backend,
                &table,
                vocab_size,
                width,
                &[3, wrong],
                &mut out,
            );
            let message = error.unwrap_err().message().to_owned();
            let all = [format!("id {wrong} "), "index 1".into(), "vocabulary of 50".into()];
            assert!(all.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

fn ropes<T: Storage>() {
    let mut random = Random::new(48);
    for backend in backends(&[1, 2]) {
        for head_dim in [2, 6, 80, 128, 300] {
            let (num_heads, num_positions, row_stride) = (3, 40, 3 * head_dim + 7);
            let half = head_dim / 2;
            let (cos, sin) = (random.normals(num_positions * half), random.normals(40 * half));
            for num_tokens in [0usize, 1, 33, 400] {
                for pairing in [RopePairing::SplitHalf, RopePairing::Interleaved] {
                    let len = if num_tokens == 0 { 0 } else { num_tokens * row_stride - 7 };
                    let before: Vec<T> = normals(&mut random, len);
                    let positions: Vec<i64> =
                        (0..num_tokens).map(|t| (t as i64 * 37 + 5) % 40).collect();
                    let mut x = Typed::of(&before);
                    ops::rope::cpu::rope(
                        &backend,
                        x.get(),
                        row_stride,
                        num_heads,
                        head_dim,
                        &positions,
                        &cos,
                        &sin,
                        pairing,
                    )
                    .unwrap();
                    let before: Vec<f64> = values(&before).into_iter().map(f64::from).collect();
                    let mut expected = before.clone();
                    for (token, &position) in positions.iter().enumerate() {
                        for head in 0..num_heads {
                            for i in 0..half {
                                let start = token * row_stride + head * head_dim;
                                let (a, b) = match pairing {
                                    RopePairing::SplitHalf => (start + i, start + i + half),
                                    RopePairing::Interleaved => (start + 2 * i, start + 2 * i + 1),
                                };
                                let angle = position as usize * half + i;
                                let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                                expected[a] = before[a] * c - before[b] * s;
                                expected[b] = before[b] * c + before[a] * s;
                            }
                        }
                    }
                    let what = format!("rope {num_tokens}x{num_heads}x{head_dim} {pairing:?}");
                    close::<T>(&what, &x.checked(&what), &expected, 2e-6);
                }
            }
            let mut x = vec![T::default(); 2 * num_heads * head_dim];
            for wrong in [-1, 40] {
                let result = ops::rope::cpu::rope(
                    &backend,
                    &mut x,
                    num_heads * head_dim,
                    num_heads,
                    head_dim,
                    &[0, wrong],
                    &cos,
                    &sin,
                    RopePairing::SplitHalf,
                );
                let message = result.unwrap_err().message().to_owned();
                assert!(message.contains(&format!("position {wrong} of token 1")), "{message}");
            }
        }
    }
}

fn largest<T: Storage>() {
    let mut random = Random::new(49);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let rows = 21;
            let mut x: Vec<T> = normals(&mut random, rows * width);
            for row in 0..rows {
                // Ties, and in some rows NaN.
                let (from, to) = (random.below(width), random.below(width));
                x[row * width + to] = x[row * width + from];
                if row % 5 == 4 {
                    x[row * width + random.below(width)] = T::from_f32(f32::NAN);
                }
            }
            for k in [1, 2, 7, 40, width] {
                let k = k.min(width);
                let mut expected = Vec::new();
                for row in x.chunks(width) {
                    let mut order: Vec<usize> = (0..width).collect();
                    let key = |i: usize| {
                        let x = row[i].to_f32();
                        if x.is_nan() {
                            f32::INFINITY
                        } else {
                            x
                        }
                    };
                    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap());
                    expected.extend(order[..k].iter().map(|&i| i as i64));
                }
                let (mut best, mut indices) = (Typed::<T>::new(rows * k), vec![-1i64; rows * k]);
                ops::top_k::cpu::top_k(&backend, &x, width, k, best.get(), &mut indices).unwrap();
                assert_eq!(indices, expected, "top {k} of {width}");
                let found: Vec<T> = (indices.iter().enumerate())
                    .map(|(i, &index)| x[i / k * width + index as usize])
                    .collect();
                assert_same_bits("top_k", &best.checked("top_k"), &values(&found));
                if k == 1 {
                    let mut out = vec![-1i32; rows];
                    ops::argmax::cpu::argmax(&backend, &x, width, &mut out).unwrap();
                    let out: Vec<i64> = out.into_iter().map(i64::from).collect();
                    assert_eq!(out, expected, "argmax of {width}");
                }
            }
        }
        let mut out = [7i64];
        let lowest = vec![T::from_f32(f32::NEG_INFINITY); 3];
        ops::argmax::cpu::argmax(&backend, &lowest, 3, &mut out).unwrap();
        assert_eq!(out, [0]);
        assert!(ops::argmax::cpu::argmax(&backend, &lowest[..0], 0, &mut out).is_err());
        let mut best = vec![T::default(); 4];
        assert!(ops::top_k::cpu::top_k(&backend, &lowest, 3, 4, &mut best, &mut [0i64; 4]).is_err());
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(50);
    let x: Vec<T> = normals(&mut random, 400 * 512);
    let weight: Vec<T> = normals(&mut random, 512);
    for one in backends(&[1]) {
        let run = |backend: &CpuBackend| {
            let (mut a, mut b) = (vec![T::default(); x.len()], vec![T::default(); x.len()]);
            ops::rms_norm::cpu::rms_norm(backend, &x, &weight, 1e-6, &mut a).unwrap();
            ops::activation::cpu::gelu_erf(backend, &a, &mut b).unwrap();
            ops::softmax::cpu::softmax(backend, &b, 512, &mut a).unwrap();
            ops::softmax::cpu::softmax(backend, &x, x.len(), &mut b).unwrap();
            let (mut sums, mut c) = (a.clone(), a.clone());
            ops::rms_norm::cpu::add_rms_norm(backend, &x, &b, &weight, 1e-6, &mut sums, &mut c)
                .unwrap();
            ops::layer_norm::cpu::layer_norm(backend, &c, &weight, None, 1e-6, &mut a).unwrap();
            values(&a)
        };
        let expected = run(&one);
        for num_threads in [2, 3] {
            let backend = CpuBackend::with_isa(num_threads, one.isa()).unwrap();
            assert_same_bits(backend.name(), &expected, &run(&backend));
        }
    }
}
