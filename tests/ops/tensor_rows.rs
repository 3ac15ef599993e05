//! Embedding, rotary embeddings, argmax and top-k over tensors, against f64.

use super::support::tensors::*;
use super::support::{golden, Random};
use xserv::ffi::*;

const INDICES: [Type; 2] = [Type::I32, Type::I64];

fn ids_below(random: &mut Random, n: usize, len: usize) -> Vec<f64> {
    (0..len).map(|_| random.below(n) as f64).collect()
}

#[test]
fn embedding() {
    let mut random = Random::new(31);
    for context in contexts() {
        for element in FLOATS {
            for index in INDICES {
                for (vocab, width, tokens) in [
                    (1, 1, 1),
                    (50, 8, 33),
                    (50, 7, 5),
                    (9, 1030, 3),
                    (300, 2056, 4),
                    (5, 64, 0),
                    (7, 2, 9),
                ] {
                    let what = format!(
                        "embedding {element:?} {index:?} {vocab}x{width} of {tokens} on {}",
                        context.name
                    );
                    let table = element.round_all(&random.normals(vocab * width));
                    let ids = ids_below(&mut random, vocab, tokens);
                    let want: Vec<f64> = ids
                        .iter()
                        .flat_map(|&id| table[id as usize * width..][..width].iter().copied())
                        .collect();
                    let (v, w, t) = (vocab as i64, width as i64, tokens as i64);
                    let ids = TestTensor::new(&context, index, &[t], &ids);
                    let tables = [
                        TestTensor::new(&context, element, &[v, w], &table),
                        TestTensor::strided(&context, element, &[v, w], &[w + 2, 1], 0, &table),
                        TestTensor::strided(&context, element, &[v, w], &[w + 8, 1], 1, &table),
                        TestTensor::strided(&context, element, &[v, w], &[1, v], 0, &table),
                    ];
                    for table in &tables {
                        let blank = vec![f64::NAN; want.len()];
                        let outputs = [
                            TestTensor::new(&context, element, &[t, w], &blank),
                            TestTensor::strided(&context, element, &[t, w], &[w + 4, 1], 0, &blank),
                            TestTensor::strided(
                                &context,
                                element,
                                &[t, w],
                                &[2 * w + 1, 2],
                                1,
                                &blank,
                            ),
                        ];
                        for out in outputs {
                            // SAFETY: live tensors of the context.
                            unsafe {
                                let (table, ids) = (table.view(), ids.view());
                                ok(xserv_op_embedding(context.handle, &table, &ids, &out.view()));
                            }
                            assert_eq!(
                                out.read(&what),
                                want,
                                "{what} {:?} {:?}",
                                table.strides,
                                out.strides
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn embedding_of_more_dimensions() {
    for context in contexts() {
        let table: Vec<f64> = (0..40).map(f64::from).collect();
        let table = TestTensor::new(&context, Type::F32, &[10, 4], &table);
        // Every other id; a scalar id.
        let ids = TestTensor::strided(
            &context,
            Type::I64,
            &[2, 3],
            &[8, 2],
            0,
            &[9.0, 0.0, 1.0, 5.0, 5.0, 2.0],
        );
        let out = TestTensor::blank(&context, Type::F32, &[2, 3, 4]);
        let id = TestTensor::new(&context, Type::I32, &[], &[7.0]);
        let row = TestTensor::blank(&context, Type::F32, &[4]);
        // SAFETY: live tensors of the context.
        unsafe {
            ok(xserv_op_embedding(context.handle, &table.view(), &ids.view(), &out.view()));
            ok(xserv_op_embedding(context.handle, &table.view(), &id.view(), &row.view()));
        }
        let firsts: Vec<f64> =
            out.read("embedding").chunks_exact(4).map(|row| row[0] / 4.0).collect();
        assert_eq!(firsts, [9.0, 0.0, 1.0, 5.0, 5.0, 2.0]);
        assert_eq!(row.read("embedding"), [28.0, 29.0, 30.0, 31.0]);
    }
}

#[test]
fn golden_embedding() {
    let Some(golden) = golden::open("embedding") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = if case.name.ends_with(".bf16") { Type::BF16 } else { Type::F32 };
            let what = format!("embedding {} on {}", case.name, context.name);
            let shape = |shape: &[usize]| shape.iter().map(|&n| n as i64).collect::<Vec<_>>();
            let (table, ids, y) = (
                golden.tensor(case, "table"),
                golden.tensor(case, "ids"),
                golden.tensor(case, "y"),
            );
            let table = TestTensor::new(&context, element, &shape(&table.shape), &table.values);
            let ids = TestTensor::new(&context, Type::I32, &shape(&ids.shape), &ids.values);
            let out = TestTensor::blank(&context, element, &shape(&y.shape));
            // SAFETY: live tensors of the context.
            unsafe {
                ok(xserv_op_embedding(context.handle, &table.view(), &ids.view(), &out.view()))
            };
            assert_eq!(out.read(&what), y.values, "{what}");
        }
    }
}

/// A wrong index is reported at once on the CPU, and by the wait on CUDA; it is never followed.
#[track_caller]
fn reported(context: &Context, status: xserv_status) -> String {
    if context.name == "cpu" {
        return refused(status);
    }
    ok(status);
    let message = refused(xserv_context_synchronize(context.handle));
    // Once.
    ok(xserv_context_synchronize(context.handle));
    message
}

#[test]
fn ids_outside_the_table() {
    for context in contexts() {
        for (index, bad) in [
            (Type::I32, 10.0),
            (Type::I32, -1.0),
            (Type::I64, 10.0),
            (Type::I64, -1.0),
            (Type::I64, 4294967296.0),
            (Type::I32, -2147483648.0),
        ] {
            let table = TestTensor::new(&context, Type::BF16, &[10, 8], &[1.0; 80]);
            let ids = TestTensor::new(&context, index, &[4], &[0.0, 9.0, bad, 3.0]);
            let out = TestTensor::blank(&context, Type::BF16, &[4, 8]);
            // SAFETY: live tensors of the context.
            let message = unsafe {
                let views = (table.view(), ids.view(), out.view());
                let status = xserv_op_embedding(context.handle, &views.0, &views.1, &views.2);
                reported(&context, status)
            };
            assert!(message.contains(&format!("{bad}")) && message.contains('2'), "{message}");
            if context.name == "cuda" {
                let got = out.read("embedding");
                assert_eq!(&got[16..24], [0.0; 8]);
                assert!(got[..16].iter().chain(&got[24..]).all(|&x| x == 1.0));
            }
        }
    }
}

/// Rotates x [num_tokens, num_heads, head_dim] by the table as stored.
fn rope_reference(
    x: &[f64],
    [num_heads, head_dim]: [usize; 2],
    positions: &[f64],
    cos: &[f64],
    sin: &[f64],
    pairing: u32,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut out = x.to_vec();
    for (token, heads) in out.chunks_exact_mut(num_heads * head_dim).enumerate() {
        for head in heads.chunks_exact_mut(head_dim) {
            for i in 0..half {
                let angle = positions[token] as usize * half + i;
                let (a, b) = if pairing == 0 { (i, i + half) } else { (2 * i, 2 * i + 1) };
                let (x, y) = (head[a], head[b]);
                head[a] = x * cos[angle] - y * sin[angle];
                head[b] = y * cos[angle] + x * sin[angle];
            }
        }
    }
    out
}

fn frequencies(head_dim: usize) -> Vec<f64> {
    let half = head_dim / 2;
    (0..half).map(|i| f64::from((1e4f64).powf(-(i as f64) / half as f64) as f32)).collect()
}

/// The table in f64, from the frequencies as f32.
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
fn rope() {
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
                                rope_reference(
                                    values,
                                    [heads, head_dim],
                                    &position_values,
                                    cos,
                                    sin,
                                    pairing,
                                )
                            });
                        let bar = element.bar(1e-6, 6e-4, 4.5e-3);
                        // Out of place: contiguous, then with heads outermost and off their alignment.
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
fn golden_rope() {
    let Some(golden) = golden::open("rope") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = if case.name.ends_with(".bf16") { Type::BF16 } else { Type::F32 };
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

/// The places of the k largest, NaN first, the lowest of equals first.
fn largest(row: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| {
        let key = |i: usize| (row[i].is_nan(), if row[i].is_nan() { 0.0 } else { row[i] });
        let (a, b) = (key(a), key(b));
        b.0.cmp(&a.0).then(b.1.partial_cmp(&a.1).unwrap())
    });
    order.truncate(k);
    order
}

/// Rows with many equal values, and some with NaN, infinities and zeros of both signs.
fn logits(random: &mut Random, element: Type, rows: usize, width: usize) -> Vec<f64> {
    let mut x = element.round_all(&random.normals(rows * width));
    for (number, row) in x.chunks_exact_mut(width.max(1)).enumerate() {
        match number % 6 {
            1 => row.fill(f64::NEG_INFINITY),
            2 => {
                row[width / 2] = f64::NAN;
                row[width / 3] = f64::NAN;
            }
            3 => row
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = if i % 2 == 0 { -0.0 } else { 0.0 }),
            4 => row.iter_mut().for_each(|x| *x = x.round()),
            5 => row[width - 1] = f64::INFINITY,
            _ => {}
        }
    }
    x
}

#[test]
fn argmax() {
    let mut random = Random::new(34);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in [
                (0, 5),
                (1, 1),
                (7, 31),
                (6, 33),
                (3, 1023),
                (12, 256),
                (2, 4104),
                (600, 9),
                (2, 40_003),
            ] {
                let what = format!("argmax {element:?} {rows}x{width} on {}", context.name);
                let x = logits(&mut random, element, rows, width);
                let want: Vec<f64> =
                    x.chunks_exact(width).map(|row| largest(row, 1)[0] as f64).collect();
                let (n, w) = (rows as i64, width as i64);
                let inputs = [
                    TestTensor::new(&context, element, &[n, w], &x),
                    TestTensor::strided(&context, element, &[n, w], &[(w + 7) / 8 * 8, 1], 0, &x),
                    TestTensor::strided(&context, element, &[n, w], &[w + 1, 1], 1, &x),
                    TestTensor::strided(&context, element, &[n, w], &[1, n.max(1)], 0, &x),
                ];
                for input in inputs {
                    for index in INDICES {
                        let out = TestTensor::blank(&context, index, &[n]);
                        let spread =
                            TestTensor::strided(&context, index, &[n], &[3], 0, &vec![-1.0; rows]);
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_argmax(context.handle, &input.view(), &out.view()));
                            ok(xserv_op_argmax(context.handle, &input.view(), &spread.view()));
                        }
                        assert_eq!(out.read(&what), want, "{what} {:?}", input.strides);
                        assert_eq!(spread.read(&what), want, "{what} {:?}", input.strides);
                    }
                }
            }
        }
    }
}

#[test]
fn top_k() {
    let mut random = Random::new(35);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width, k) in [
                (0, 5, 2),
                (4, 9, 0),
                (1, 1, 1),
                (6, 33, 33),
                (7, 1030, 1024),
                (3, 16_384, 50),
                (2, 16_385, 1),
                (6, 20_001, 77),
                (1, 300_000, 1024),
            ] {
                let what = format!("top_k {element:?} {rows}x{width} k {k} on {}", context.name);
                let x = logits(&mut random, element, rows, width);
                let mut want = (Vec::new(), Vec::new());
                for row in x.chunks_exact(width) {
                    let places = largest(row, k);
                    want.0.extend(places.iter().map(|&i| row[i].to_bits()));
                    want.1.extend(places.iter().map(|&i| i as f64));
                }
                let (n, w) = (rows as i64, width as i64);
                let inputs = [
                    TestTensor::new(&context, element, &[n, w], &x),
                    TestTensor::strided(
                        &context,
                        element,
                        &[n, w],
                        &[(w + 7) / 8 * 8 + 8, 1],
                        0,
                        &x,
                    ),
                    TestTensor::strided(&context, element, &[n, w], &[w + 1, 1], 1, &x),
                ];
                for input in inputs {
                    let shape = [n, k as i64];
                    let values = TestTensor::blank(&context, element, &shape);
                    let strides = [1, n.max(1)];
                    let blank = vec![-1.0; rows * k];
                    let indices =
                        TestTensor::strided(&context, Type::I32, &shape, &strides, 0, &blank);
                    // SAFETY: live tensors of the context.
                    unsafe {
                        let views = (input.view(), values.view(), indices.view());
                        ok(xserv_op_top_k(context.handle, &views.0, &views.1, &views.2));
                    }
                    assert_eq!(indices.read(&what), want.1, "{what} {:?}", input.strides);
                    let got = values.read(&what);
                    assert_eq!(got.len(), want.0.len(), "{what}");
                    for (got, &want) in got.iter().zip(&want.0) {
                        let want = f64::from_bits(want);
                        assert!(
                            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                            "{what}: {got}, not {want}"
                        );
                    }
                }
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
        let says = |status: xserv_status, start: &str, also: &str| {
            let message = refused(status);
            assert!(message.starts_with(start) && message.contains(also), "{message}");
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
            tensor(Type::F32, &[3, 0]),
            tensor(Type::I32, &[3, 8]),
            tensor(Type::I64, &[3, 8]),
            tensor(Type::F32, &[3, 1, 8]),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [table, out, ids, half, q, q_out, cos, sin, odd, freq, nothing, ints, longs, k] =
            &views;
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            says(xserv_op_embedding(c, table, null, out), "ids", "NULL");
            says(xserv_op_embedding(c, ids, ids, out), "table has elements of i32", "f32");
            says(xserv_op_embedding(c, table, out, out), "ids has elements of f32", "i64");
            says(xserv_op_embedding(c, table, ids, half), "out has elements of f16", "f32");
            says(
                xserv_op_embedding(c, freq, ids, out),
                "table has 1 dimensions",
                "[vocab_size, width]",
            );
            says(xserv_op_embedding(c, table, ids, table), "out has shape [10, 8]", "[3, 8]");
            let rows = slice(table, Type::F32, &[3, 8], &[8, 1], 40);
            says(xserv_op_embedding(c, table, ids, &rows), "out overlaps table", "no memory");

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

            says(xserv_op_argmax(c, ids, ids), "x has elements of i32", "f32");
            says(xserv_op_argmax(c, out, out), "out has elements of f32", "i32");
            says(xserv_op_argmax(c, table, ids), "out has shape [3]", "[10]");
            says(xserv_op_argmax(c, nothing, ids), "x has shape [3, 0]", "no elements");
            says(xserv_op_top_k(c, ids, out, ints), "x has elements of i32", "f32");
            says(xserv_op_top_k(c, table, half, ints), "values has elements of f16", "f32");
            says(xserv_op_top_k(c, out, out, longs), "indices has elements of i64", "i32");
            says(xserv_op_top_k(c, table, out, ints), "values has shape [3, 8]", "[10, 8]");
            says(xserv_op_top_k(c, out, out, ints), "values overlaps x", "no memory");
            says(xserv_op_top_k(c, nothing, out, ints), "values has shape [3, 8]", "at most 0");
            says(xserv_op_top_k(c, out, nothing, ints), "indices has shape [3, 8]", "[3, 0]");
        }
        let wide = tensor(Type::F32, &[1, 1100]);
        let values = tensor(Type::F32, &[1, 1025]);
        let indices = tensor(Type::I32, &[1, 1025]);
        // SAFETY: as above.
        unsafe {
            let status = xserv_op_top_k(c, &wide.view(), &values.view(), &indices.view());
            says(status, "values has shape [1, 1025]", "1024");
        }
    }
}
