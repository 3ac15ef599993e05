//! Rows of a table: slices of all types, packed weights, tensors, rows of tokens that a device has
//! chosen, and tables that are quantised.

use crate::quantised::{self, random_matrix, upload_tiles};
use crate::support::device::{cuda_context, round, Bench};
use crate::support::tensors::*;
use crate::support::typed::{for_storage, normals, values, Typed};
use crate::support::{
    assert_same_bits, backends, golden, reference, rounded_all, to_bytes, Guarded, Random, DTYPES,
};
use xserv::ffi::*;
use xserv::memory::DType;
use xserv::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use xserv::ops::common::storage::Storage;
use xserv::ops::embedding::cuda_chosen::embedding_chosen;
use xserv::ops::embedding::cuda_quantised::embedding_quantised;
use xserv::ops::embedding::{cpu, cpu_packed};
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix, QuantisedPanels};

for_storage!(slices);

fn slices<T: Storage>() {
    let mut random = Random::new(47);
    let (vocab_size, width) = (50, 1001);
    let table: Vec<T> = normals(&mut random, vocab_size * width);
    let ids: Vec<i64> = (0..77).map(|i| (i * 31) % 50).collect();
    let short: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    for backend in backends(&[1, 2]) {
        let mut out = Typed::new(ids.len() * width);
        cpu::embedding(&backend, &table, vocab_size, width, &ids, out.get()).unwrap();
        let places: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
        let expected = reference::embedding(&table, width, &places);
        assert_same_bits("embedding", &out.checked("embedding"), &values(&expected));
        let mut again = Typed::new(ids.len() * width);
        cpu::embedding(&backend, &table, vocab_size, width, &short, again.get()).unwrap();
        assert_same_bits("embedding", &again.checked("embedding"), &values(&expected));
        for wrong in [-1i64, 50, i64::MAX] {
            let mut out = vec![T::default(); 2 * width];
            let error = cpu::embedding(&backend, &table, vocab_size, width, &[3, wrong], &mut out);
            let message = error.unwrap_err().message().to_owned();
            let all = [format!("id {wrong} "), "index 1".into(), "vocabulary of 50".into()];
            assert!(all.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

#[test]
fn packed_weights() {
    let mut random = Random::new(5);
    for backend in backends(&[1, 2]) {
        for (dtype, order) in DTYPES
            .map(|dtype| (dtype, PairOrder::Rows))
            .into_iter()
            .chain([(DType::BF16, PairOrder::Tiles)])
        {
            let (vocab_size, width) = (131, 77);
            let table = rounded_all(&random.normals(vocab_size * width), dtype);
            let mut matrix = PackedMatrix::zeroed(vocab_size, width, dtype, order).unwrap();
            matrix.writer().unwrap().pack_rows(0, &to_bytes(&table, dtype), dtype).unwrap();
            for num_tokens in [0, 1, 33, 1000] {
                let ids: Vec<u32> =
                    (0..num_tokens).map(|_| random.below(vocab_size) as u32).collect();
                let mut out = Guarded::new(num_tokens * width);
                cpu_packed::embedding(&backend, &matrix, &ids, out.get()).unwrap();
                let places: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
                let expected = reference::embedding(&table, width, &places);
                assert_same_bits("embedding", out.checked("embedding"), &expected);
            }
            let error =
                cpu_packed::embedding(&backend, &matrix, &[3, 131], &mut vec![0.0; 2 * width])
                    .unwrap_err();
            assert!(error.message().contains("131"), "{error}");
        }
    }
}

/// Formats of tables, with groups that divide rows and that do not.
fn table_formats() -> Vec<QuantFormat> {
    let mut formats = Vec::new();
    for code in Code::ALL {
        for (group_size, scale) in
            [(32, DType::BF16), (128, DType::F16), (20, DType::F32), (usize::MAX, DType::F32)]
        {
            for has_zeros in [false, true] {
                if !has_zeros || !code.is_float() {
                    formats.push(QuantFormat {
                        code,
                        group_size,
                        has_zeros,
                        scale,
                        quantises_inputs: false,
                    });
                }
            }
        }
    }
    formats
}

/// Returns the numbers of a table in f64: `(code - zero) * scale`, rounded to f32 as the operators
/// say.
fn table_numbers(matrix: &QuantisedMatrix) -> Vec<f64> {
    let mut numbers = vec![0.0; matrix.out_features * matrix.in_features];
    for (row, numbers) in numbers.chunks_exact_mut(matrix.in_features).enumerate() {
        for (place, number) in numbers.iter_mut().enumerate() {
            let (scale, zero) = matrix.group(row, place / matrix.format.group_size);
            let code = matrix.code(row, place);
            let value = quantised::number(matrix.format.code, code, zero);
            *number = f64::from((value * f64::from(scale)) as f32);
        }
    }
    numbers
}

#[test]
fn packed_weights_that_are_quantised() {
    let mut random = Random::new(6);
    for backend in backends(&[1, 2]) {
        for format in table_formats() {
            for (vocab_size, width) in [(131, 77), (3, 8), (200, 256)] {
                let matrix = random_matrix(&mut random, vocab_size, width, format, 0.5);
                let numbers = table_numbers(&matrix);
                let panels = QuantisedPanels::pack(&backend, &matrix).expect("memory");
                for num_tokens in [0, 1, 33, 300] {
                    let ids: Vec<u32> =
                        (0..num_tokens).map(|_| random.below(vocab_size) as u32).collect();
                    let mut out = Guarded::new(num_tokens * width);
                    cpu_packed::embedding_quantised(&backend, &panels, &ids, out.get()).unwrap();
                    let places: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
                    let want = reference::embedding(&numbers, width, &places);
                    let want: Vec<f32> = want.iter().map(|&x| x as f32).collect();
                    assert_same_bits("embedding", out.checked("embedding"), &want);
                }
                let ids = [0, vocab_size as u32];
                let mut out = vec![0.0; 2 * width];
                let error =
                    cpu_packed::embedding_quantised(&backend, &panels, &ids, &mut out).unwrap_err();
                assert!(error.message().contains(&format!("id {vocab_size} ")), "{error}");
                let mut short = vec![0.0; width + 1];
                cpu_packed::embedding_quantised(&backend, &panels, &[0], &mut short)
                    .expect_err("another length");
            }
        }
    }
}

/// As `chosen_tokens_on_cuda`, in tables of every format; the last tile has rows that are none.
#[test]
fn chosen_tokens_in_a_quantised_table_on_cuda() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for format in table_formats() {
            for width in [8, 77, 200, 1024, 5120] {
                let mut bench = Bench::with_room(&context, dtype, width as u64, 16 << 20);
                let vocab_size = 131;
                let matrix = random_matrix(&mut bench.random, vocab_size, width, format, 0.5);
                let numbers: Vec<f64> =
                    table_numbers(&matrix).iter().map(|&x| round(dtype, x)).collect();
                let layout = TileLayout::new(vocab_size, width, format, false).expect("a layout");
                let memory = upload_tiles(&mut bench, &layout, &matrix);
                let table = QuantisedTiles::new(layout, &memory).expect("tiles");
                let ids = bench.ids(&[130, 0, 7, 1 << 30, 8, 12, 16]);
                let sources = bench.ids(&[-1, -1, 3, 0, -1, 2, -1]);
                let chosen = bench.ids(&[55, 1, -1, 127]);
                let out = bench.poisoned(&[7, width]);
                embedding_quantised(&context, &table, &ids, &sources, &chosen, &out)
                    .expect("the operator");
                context.synchronize().expect("no fault");
                let want = reference::embedding(&numbers, width, &[130, 0, 127, 55, 8, 0, 16]);
                assert_eq!(bench.read(&out), want, "{dtype} {format:?} rows of {width}");
            }
        }
    }
}

/// An id outside a quantised table is reported, and its row is zero.
#[test]
fn chosen_tokens_outside_a_quantised_table_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let format = QuantFormat {
        code: Code::Int8,
        group_size: 128,
        has_zeros: false,
        scale: DType::BF16,
        quantises_inputs: false,
    };
    for dtype in DTYPES {
        for (id, source, token) in [(10, -1, 3), (-2, -1, 3), (0, 1, 10), (0, 1, i32::MAX)] {
            let mut bench = Bench::new(&context, dtype, 1);
            let matrix = random_matrix(&mut bench.random, 10, 64, format, 1.0);
            let layout = TileLayout::new(10, 64, format, false).expect("a layout");
            let memory = upload_tiles(&mut bench, &layout, &matrix);
            let table = QuantisedTiles::new(layout, &memory).expect("tiles");
            let ids = bench.ids(&[9, id, 4]);
            let sources = bench.ids(&[-1, source, -1]);
            let chosen = bench.ids(&[2, token]);
            let out = bench.poisoned(&[3, 64]);
            embedding_quantised(&context, &table, &ids, &sources, &chosen, &out)
                .expect("the operator");
            let what = format!("{dtype} id {id}, source {source}, token {token}");
            assert!(context.synchronize().is_err(), "{what}: not reported");
            context.synchronize().expect("reported once");
            let got = bench.read(&out);
            assert_eq!(&got[64..128], [0.0; 64], "{what}");
            assert!(got[..64].iter().any(|&x| x != 0.0) && got[128..].iter().any(|&x| x != 0.0));
            let other = bench.poisoned(&[3, 65]);
            embedding_quantised(&context, &table, &ids, &sources, &chosen, &other)
                .expect_err("another width");
        }
    }
}

#[test]
fn tensors() {
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
                    let places: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
                    let want = reference::embedding(&table, width, &places);
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
fn more_dimensions() {
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
fn golden_vectors() {
    let Some(golden) = golden::open("embedding") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = golden_type(&case.name);
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
            tensor(Type::F32, &[4]),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [table, out, ids, half, freq] = &views;
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
        }
    }
}

/// Tokens of the batch and of rows that were chosen, one that was not and counts as 0, and rows in
/// units of 16 bytes and of two.
#[test]
fn chosen_tokens_on_cuda() {
    let Some(context) = cuda_context() else { return };
    const FROM_BATCH: i32 = -1;
    const NO_TOKEN: i32 = -1;
    for dtype in DTYPES {
        for width in [8, 12, 77, 1024, 12_288] {
            let mut bench = Bench::new(&context, dtype, width as u64);
            let vocab_size = 131;
            let (table, values) = bench.filled(&[vocab_size, width], 1.0, 0.0);
            let ids_values = [130, 0, 7, 99, 7, 12];
            // Ids of rows with a source are not read.
            let ids = bench.ids(&ids_values.map(|id| if id == 99 { 1 << 30 } else { id }));
            let sources = bench.ids(&[FROM_BATCH, FROM_BATCH, 3, 0, FROM_BATCH, 2]);
            let chosen = bench.ids(&[55, 1, NO_TOKEN, 130]);
            let out = bench.poisoned(&[6, width]);
            embedding_chosen(&context, &table, &ids, &sources, &chosen, &out)
                .expect("the operator");
            context.synchronize().expect("no fault");
            let want = reference::embedding(&values, width, &[130, 0, 130, 55, 7, 0]);
            assert_eq!(bench.read(&out), want, "{dtype} rows of {width}");
            assert_eq!(bench.read(&table), values, "{dtype}: the table was changed");
        }
    }
}

/// An id outside the table is reported, and its row is zero.
#[test]
fn chosen_tokens_outside_the_table_on_cuda() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for (id, source, token) in [(10, -1, 3), (-2, -1, 3), (0, 1, 10), (0, 1, i32::MAX)] {
            let mut bench = Bench::new(&context, dtype, 1);
            let (table, values) = bench.filled(&[10, 64], 1.0, 2.0);
            let ids = bench.ids(&[9, id, 4]);
            let sources = bench.ids(&[-1, source, -1]);
            let chosen = bench.ids(&[2, token]);
            let out = bench.poisoned(&[3, 64]);
            embedding_chosen(&context, &table, &ids, &sources, &chosen, &out)
                .expect("the operator");
            let what = format!("{dtype} id {id}, source {source}, token {token}");
            assert!(context.synchronize().is_err(), "{what}: not reported");
            context.synchronize().expect("reported once");
            let mut want = reference::embedding(&values, 64, &[9, 0, 4]);
            want[64..128].fill(0.0);
            assert_eq!(bench.read(&out), want, "{what}");
        }
    }
}
