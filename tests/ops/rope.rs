//! Rotary embeddings: slices of all types with tables of their own, a model's table, tensors, and
//! rounded tables.

use crate::support::device::{cuda_context, round, Bench};
use crate::support::tensors::*;
use crate::support::typed::{close, for_storage, normals, values, Typed};
use crate::support::{
    assert_close, backends, golden, reference, Guarded, Random, Tolerance, DTYPES,
};
use xserv::backend::cpu::CpuBackend;
use xserv::ffi::*;
use xserv::memory::DType;
use xserv::ops::common::storage::Storage;
use xserv::ops::rope::cpu_table::{self, RopeTable};
use xserv::ops::rope::cuda_rounded::rope_tables;
use xserv::ops::rope::{cpu, RopePairing};

for_storage!(slices);

fn slices<T: Storage>() {
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
                    cpu::rope(
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
                    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                    let places: Vec<usize> = positions.iter().map(|&p| p as usize).collect();
                    let expected = reference::rope(
                        &values(&before),
                        (row_stride, num_heads, head_dim),
                        &places,
                        &wide(&cos),
                        &wide(&sin),
                        pairing == RopePairing::Interleaved,
                    );
                    let what = format!("rope {num_tokens}x{num_heads}x{head_dim} {pairing:?}");
                    close::<T>(&what, &x.checked(&what), &expected, 2e-6);
                }
            }
            let mut x = vec![T::default(); 2 * num_heads * head_dim];
            for wrong in [-1, 40] {
                let result = cpu::rope(
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

#[test]
fn rope_with_strides_and_scaling() {
    let mut random = Random::new(25);
    for head_dim in [2, 16, 80, 128] {
        let inv_freq: Vec<f32> =
            (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let table = RopeTable::new(&inv_freq, 1.25, 1000).unwrap();
        let (num_heads, row_stride) = (3, 3 * head_dim + 7);
        for backend in backends(&[1, 2]) {
            for num_tokens in [0usize, 1, 33, 500] {
                let len = if num_tokens == 0 { 0 } else { num_tokens * row_stride - 7 };
                let before = random.normals(len);
                let positions: Vec<u32> =
                    (0..num_tokens).map(|t| ((t * 37 + 255) % 1000) as u32).collect();
                let mut x = Guarded::of(&before);
                let pairing = RopePairing::SplitHalf;
                cpu_table::rope(
                    &backend,
                    x.get(),
                    row_stride,
                    num_heads,
                    &positions,
                    &table,
                    pairing,
                )
                .unwrap();
                // The f32 angle is the operator's contract.
                let [cos, sin] = [f64::cos, f64::sin].map(|function| -> Vec<f64> {
                    let angle = |p: u32, inv_freq: f32| f64::from(p as f32 * inv_freq);
                    let row = |p| inv_freq.iter().map(move |f| 1.25 * function(angle(p, *f)));
                    positions.iter().flat_map(|&p| row(p)).collect()
                });
                let own_rows: Vec<usize> = (0..num_tokens).collect();
                let heads = (row_stride, num_heads, head_dim);
                let expected = reference::rope(&before, heads, &own_rows, &cos, &sin, false);
                assert_close("rope", x.checked("rope"), &expected, Tolerance::OnePlus(2e-6));
            }
        }
        let backend = CpuBackend::new(1).unwrap();
        let pairing = RopePairing::SplitHalf;
        let mut x = vec![0.0; head_dim];
        assert!(cpu_table::rope(&backend, &mut x, head_dim, 1, &[1000], &table, pairing).is_err());
        assert!(
            cpu_table::rope(&backend, &mut x, head_dim, 1, &[u32::MAX], &table, pairing).is_err()
        );
        assert!(cpu_table::rope(&backend, &mut x, head_dim, 2, &[0], &table, pairing).is_err());
    }
}

fn frequencies(head_dim: usize) -> Vec<f64> {
    let half = head_dim / 2;
    (0..half).map(|i| f64::from((1e4f64).powf(-(i as f64) / half as f64) as f32)).collect()
}

/// Returns the table in f64, from the frequencies as f32.
fn angles(inv_freq: &[f64], positions: usize, scale: f64) -> [Vec<f64>; 2] {
    [f64::cos, f64::sin].map(|function| {
        let row = |p| inv_freq.iter().map(move |f| scale * function(p as f64 * f));
        (0..positions).flat_map(row).collect()
    })
}

#[test]
fn rope_table() {
    for context in contexts() {
        for (positions, head_dim, scale) in
            [(0, 8, 1.0), (1, 2, 1.0), (300, 128, 1.0), (70_000, 6, 1.25)]
        {
            let what = format!("rope_table {positions}x{head_dim} on {}", context.name);
            let inv_freq = frequencies(head_dim);
            let half = (head_dim / 2) as i64;
            let shape = [positions as i64, half];
            let freq_tensor = TestTensor::new(&context, Type::F32, &[half], &inv_freq);
            let blank = vec![f64::NAN; positions * head_dim / 2];
            let cos = TestTensor::strided(&context, Type::F32, &shape, &[half + 1, 1], 0, &blank);
            let sin = TestTensor::new(&context, Type::F32, &shape, &blank);
            // SAFETY: live tensors of the context.
            unsafe {
                let views = (freq_tensor.view(), cos.view(), sin.view());
                ok(xserv_op_rope_table(context.handle, &views.0, scale as f32, &views.1, &views.2));
            }
            let want = angles(&inv_freq, positions, scale);
            compare(&what, &cos.read(&what), &want[0], 1e-7);
            compare(&what, &sin.read(&what), &want[1], 1e-7);
        }
    }
}

#[test]
fn tensors() {
    let mut random = Random::new(33);
    for context in contexts() {
        for element in FLOATS {
            for index in INDICES {
                for (tokens, num_heads, num_kv_heads, head_dim) in [
                    (1, 1, 1, 2),
                    (3, 32, 8, 128),
                    (33, 5, 1, 64),
                    (2, 3, 3, 80),
                    (4, 2, 1, 6),
                    (300, 17, 3, 16),
                    (0, 2, 2, 16),
                    (2, 40, 0, 32),
                    (1, 1, 1, 1024),
                ] {
                    for pairing in [0, 1] {
                        let what = format!(
                            "rope {element:?} {index:?} {tokens}x({num_heads}+{num_kv_heads})x{head_dim} \
                             pairing {pairing} on {}",
                            context.name
                        );
                        let num_positions = 50;
                        let half = (head_dim / 2) as i64;
                        let table = angles(&frequencies(head_dim), num_positions, 1.0);
                        let table = table
                            .map(|t| t.iter().map(|&x| Type::F32.round(x)).collect::<Vec<_>>());
                        let [cos, sin] = table.each_ref().map(|values| {
                            TestTensor::new(
                                &context,
                                Type::F32,
                                &[num_positions as i64, half],
                                values,
                            )
                        });
                        let position_values = ids_below(&mut random, num_positions, tokens);
                        let positions =
                            TestTensor::new(&context, index, &[tokens as i64], &position_values);
                        // q, k and v of each token in one row.
                        let row = (num_heads + 2 * num_kv_heads) * head_dim;
                        let fused = element.round_all(&random.normals(tokens * row));
                        let qkv = TestTensor::new(
                            &context,
                            element,
                            &[tokens as i64, row as i64],
                            &fused,
                        );
                        let part = |first: usize, heads: usize| {
                            let values: Vec<f64> = fused
                                .chunks_exact(row)
                                .flat_map(|row| {
                                    row[first..first + heads * head_dim].iter().copied()
                                })
                                .collect();
                            let shape = [tokens as i64, heads as i64, head_dim as i64];
                            let strides = [row as i64, head_dim as i64, 1];
                            (shape, slice(&qkv.view(), element, &shape, &strides, first), values)
                        };
                        let (q_shape, q, q_values) = part(0, num_heads);
                        let (k_shape, k, k_values) = part(num_heads * head_dim, num_kv_heads);
                        let [q_want, k_want] = [(&q_values, num_heads), (&k_values, num_kv_heads)]
                            .map(|(values, heads)| {
                                if values.is_empty() {
                                    return Vec::new();
                                }
                                let (cos, sin) = (&table[0], &table[1]);
                                let places: Vec<usize> =
                                    position_values.iter().map(|&p| p as usize).collect();
                                let sizes = (heads * head_dim, heads, head_dim);
                                reference::rope(values, sizes, &places, cos, sin, pairing == 1)
                            });
                        let bar = element.bar(1e-6, 6e-4, 4.5e-3);
                        // Out of place: contiguous, then with heads outermost and off their
                        // alignment.
                        let head_first =
                            |shape: [i64; 3]| [shape[2] + 1, (shape[2] + 1) * shape[0].max(1), 1];
                        for strides in [None, Some((head_first(q_shape), head_first(k_shape)))] {
                            let out = |shape: [i64; 3], strides: Option<[i64; 3]>| {
                                let blank = vec![f64::NAN; shape.iter().product::<i64>() as usize];
                                match strides {
                                    None => TestTensor::new(&context, element, &shape, &blank),
                                    Some(s) => TestTensor::strided(
                                        &context, element, &shape, &s, 1, &blank,
                                    ),
                                }
                            };
                            let q_out = out(q_shape, strides.map(|s| s.0));
                            let k_out = out(k_shape, strides.map(|s| s.1));
                            // SAFETY: live tensors of the context.
                            unsafe {
                                let (q_out, k_out) = (q_out.view(), k_out.view());
                                let (p, c, s) = (positions.view(), cos.view(), sin.view());
                                ok(xserv_op_rope(
                                    context.handle,
                                    &q,
                                    &k,
                                    &p,
                                    &c,
                                    &s,
                                    pairing,
                                    &q_out,
                                    &k_out,
                                ));
                            }
                            compare(&what, &q_out.read(&what), &q_want, bar);
                            compare(&what, &k_out.read(&what), &k_want, bar);
                        }
                        assert_eq!(qkv.read(&what), fused, "{what}: the input was changed");
                        // In place, without copies; v stays as it is.
                        let before = num_allocations(&context);
                        // SAFETY: as above.
                        unsafe {
                            let (p, c, s) = (positions.view(), cos.view(), sin.view());
                            ok(xserv_op_rope(context.handle, &q, &k, &p, &c, &s, pairing, &q, &k));
                        }
                        assert_eq!(
                            num_allocations(&context),
                            before,
                            "{what}: something was copied"
                        );
                        let after = qkv.read(&what);
                        for (token, (after, was)) in
                            after.chunks_exact(row).zip(fused.chunks_exact(row)).enumerate()
                        {
                            let (q_len, k_len) = (num_heads * head_dim, num_kv_heads * head_dim);
                            compare(
                                &what,
                                &after[..q_len],
                                &q_want[token * q_len..][..q_len],
                                2.0 * bar,
                            );
                            let k_after = &after[q_len..q_len + k_len];
                            compare(&what, k_after, &k_want[token * k_len..][..k_len], 2.0 * bar);
                            assert_eq!(
                                after[q_len + k_len..],
                                was[q_len + k_len..],
                                "{what}: v was changed"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn golden_vectors() {
    let Some(golden) = golden::open("rope") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = golden_type(&case.name);
            let what = format!("rope {} on {}", case.name, context.name);
            let (x, positions) = (golden.tensor(case, "x"), golden.tensor(case, "positions"));
            let want = golden.tensor(case, "y").values;
            let (heads, head_dim) = (x.shape[1], x.shape[2]);
            let theta = case.params["theta"].as_f64().or(case.params["base"].as_f64());
            let half = head_dim / 2;
            let Some(theta) = theta else { panic!("{what}: no theta in {}", case.params) };
            let inv_freq: Vec<f64> = (0..half)
                .map(|i| f64::from((1.0 / theta.powf(2.0 * i as f64 / head_dim as f64)) as f32))
                .collect();
            // A table with a row for each token, as all positions would be 131072 rows.
            let rows = [f64::cos, f64::sin].map(|function| -> Vec<f64> {
                let row =
                    |p: &f64| inv_freq.iter().map(|f| Type::F32.round(function(p * f))).collect();
                positions.values.iter().flat_map(|p| -> Vec<f64> { row(p) }).collect()
            });
            let shape = [x.shape[0] as i64, heads as i64, head_dim as i64];
            let [cos, sin] = rows
                .map(|rows| TestTensor::new(&context, Type::F32, &[shape[0], half as i64], &rows));
            let x = TestTensor::new(&context, element, &shape, &x.values);
            let out = TestTensor::blank(&context, element, &shape);
            let tokens: Vec<f64> = (0..shape[0]).map(|token| token as f64).collect();
            let tokens = TestTensor::new(&context, Type::I64, &shape[..1], &tokens);
            let pairing = u32::from(!case.name.starts_with("half"));
            // SAFETY: live tensors of the context.
            unsafe {
                let (c, s, x, p, out) =
                    (cos.view(), sin.view(), x.view(), tokens.view(), out.view());
                let null = std::ptr::null();
                ok(xserv_op_rope(context.handle, &x, null, &p, &c, &s, pairing, &out, null));
            }
            let got = out.read(&what);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let position = positions.values[i / (heads * head_dim)];
                let bar = (1e-5 + 5e-7 * position) * (1.0 + w.abs())
                    + element.bar(0.0, 0.0, 8e-3 * w.abs());
                assert!(
                    (g - w).abs() <= bar,
                    "{what}: element {i} at position {position} is {g}, not {w}"
                );
            }
        }
    }
}

#[test]
fn positions_outside_the_table() {
    for context in contexts() {
        for (index, bad) in
            [(Type::I32, 20.0), (Type::I32, -1.0), (Type::I64, 20.0), (Type::I64, -5e9)]
        {
            let x: Vec<f64> = (0..96).map(f64::from).collect();
            let x_tensor = TestTensor::new(&context, Type::F32, &[3, 2, 16], &x);
            let table = TestTensor::new(&context, Type::F32, &[20, 8], &[0.5; 160]);
            let positions = TestTensor::new(&context, index, &[3], &[0.0, bad, 19.0]);
            let out = TestTensor::blank(&context, Type::F32, &[3, 2, 16]);
            // SAFETY: live tensors of the context.
            let message = unsafe {
                let (x, t, p, out) = (x_tensor.view(), table.view(), positions.view(), out.view());
                let null = std::ptr::null();
                let status = xserv_op_rope(context.handle, &x, null, &p, &t, &t, 0, &out, null);
                reported(&context, status)
            };
            assert!(message.contains(&format!("{bad}")) && message.contains('1'), "{message}");
            if context.name == "cuda" {
                assert_eq!(out.read("rope")[32..64], x[32..64], "the token is copied as it is");
            }
        }
    }
}

#[test]
fn refusals() {
    for context in contexts() {
        let c = context.handle;
        let tensor = |element, shape: &[i64]| {
            let len = shape.iter().product::<i64>() as usize;
            TestTensor::new(&context, element, shape, &vec![0.0; len])
        };
        let null = std::ptr::null();
        let owned = [
            tensor(Type::F32, &[10, 8]),
            tensor(Type::F32, &[3, 8]),
            tensor(Type::I32, &[3]),
            tensor(Type::F16, &[3, 8]),
            tensor(Type::F32, &[3, 2, 8]),
            tensor(Type::F32, &[3, 2, 8]),
            tensor(Type::F32, &[20, 4]),
            tensor(Type::F32, &[20, 4]),
            tensor(Type::F32, &[3, 2, 7]),
            tensor(Type::F32, &[4]),
            tensor(Type::F32, &[3, 1, 8]),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [table, out, ids, half, q, q_out, cos, sin, odd, freq, k] = &views;
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            says(
                xserv_op_rope_table(c, half, 1.0, cos, sin),
                "inv_freq has elements of f16",
                "f32",
            );
            says(xserv_op_rope_table(c, freq, 1.0, ids, sin), "cos has elements of i32", "f32");
            says(
                xserv_op_rope_table(c, freq, f32::NAN, cos, sin),
                "attention_scale is NaN",
                "finite",
            );
            says(xserv_op_rope_table(c, freq, 1.0, table, sin), "cos has shape [10, 8]", "[10, 4]");
            says(xserv_op_rope_table(c, freq, 1.0, cos, table), "sin has shape [10, 8]", "[20, 4]");
            says(xserv_op_rope_table(c, freq, 1.0, cos, cos), "sin overlaps cos", "no memory");

            let rope = |q, k, p, cos, sin, pairing, q_out, k_out| {
                xserv_op_rope(c, q, k, p, cos, sin, pairing, q_out, k_out)
            };
            let n = null;
            says(rope(n, n, ids, cos, sin, 0, q_out, n), "q", "NULL");
            says(rope(q, n, ids, cos, sin, 2, q_out, n), "pairing is 2", "xserv_rope_pairing");
            says(rope(q, k, ids, cos, sin, 0, q_out, n), "k_out is NULL", "k is not");
            says(rope(q, n, ids, cos, sin, 0, q_out, k), "k is NULL", "k_out is not");
            says(rope(odd, n, ids, cos, sin, 0, odd, n), "q: head_dim is 7", "odd");
            says(rope(out, n, ids, cos, sin, 0, q_out, n), "q has 2 dimensions", "[num_tokens");
            says(rope(q, n, q, cos, sin, 0, q_out, n), "positions has elements of f32", "i32");
            says(rope(q, n, ids, half, sin, 0, q_out, n), "cos has elements of f16", "f32");
            says(rope(q, n, ids, table, sin, 0, q_out, n), "cos has shape [10, 8]", "[10, 4]");
            says(rope(q, n, ids, cos, out, 0, q_out, n), "sin has shape [3, 8]", "[20, 4]");
            says(rope(q, n, ids, cos, sin, 0, k, n), "q_out has shape [3, 1, 8]", "[3, 2, 8]");
            says(rope(q, out, ids, cos, sin, 0, q_out, out), "k has 2 dimensions", "[num_tokens");
            says(rope(q, odd, ids, cos, sin, 0, q_out, odd), "k has shape [3, 2, 7]", "[3, 2, 8]");
            says(rope(q, k, ids, cos, sin, 0, q_out, q), "k_out has shape [3, 2, 8]", "[3, 1, 8]");
            says(rope(q, q, ids, cos, sin, 0, q_out, q_out), "k_out overlaps q_out", "no memory");
            let first = slice(q, Type::F32, &[3, 1, 8], &[16, 8, 1], 0);
            says(rope(q, k, ids, cos, sin, 0, q, &first), "k_out overlaps q", "no memory");
            let later = slice(q, Type::F32, &[2, 2, 8], &[16, 8, 1], 16);
            let sooner = slice(q, Type::F32, &[2, 2, 8], &[16, 8, 1], 0);
            let two = slice(ids, Type::I32, &[2], &[1], 0);
            says(rope(&later, n, &two, cos, sin, 0, &sooner, n), "q_out overlaps q", "same view");
        }
    }
}

/// The angle and the product with the scaling in f32, and then one rounding: known to the last bit,
/// but for what f64 itself may be off by.
#[test]
fn tables_on_cuda_are_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for (num_positions, head_dim, scaling) in
            [(1, 2, 1.0), (300, 128, 1.0), (40_960, 64, 1.0), (1000, 80, 1.25), (70, 6, 0.1)]
        {
            let half = head_dim / 2;
            let mut bench = Bench::new(&context, dtype, 1);
            let inv_freq = frequencies(head_dim);
            let freq_tensor = bench.f32s(&[half], &inv_freq);
            let [cos, sin] = [(); 2].map(|()| bench.poisoned(&[num_positions, half]));
            rope_tables(&context, &freq_tensor, scaling, &cos, &sin).expect("the operator");
            for (table, function) in [(&cos, f64::cos as fn(f64) -> f64), (&sin, f64::sin)] {
                let got = bench.read(table);
                for (i, got) in got.into_iter().enumerate() {
                    let angle = (i / half) as f32 * inv_freq[i % half] as f32;
                    let value = function(f64::from(angle)) as f32 * scaling;
                    let want = round(dtype, f64::from(value));
                    let most = if dtype == DType::F32 { 1.2e-7 } else { 0.0 };
                    assert!(
                        (got - want).abs() <= most,
                        "{dtype} {num_positions}x{head_dim} scaled by {scaling}: {got:e}, not \
                         {want:e} at position {}",
                        i / half
                    );
                }
            }
        }
    }
}
