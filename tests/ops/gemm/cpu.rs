//! Slices of all types: transposes, strides and shapes that take each way of the operator.

use crate::support::typed::{
    close_rms, for_storage, normals, same_bits_on_any_number_of_threads, typed, values, Typed,
};
use crate::support::{backends, golden, reference, Random};
use xserv::backend::cpu::CpuBackend;
use xserv::ops::common::storage::Storage;
use xserv::ops::gemm::cpu::{gemm, gemm_naive, Gemm, GemmScratch};

for_storage!(shapes, golden_vectors, factors, threads, refusals);

fn exact<T: Storage>(g: &Gemm, a: &[T], b: &[T], c: &[T]) -> Vec<f64> {
    reference::gemm(
        (&values(a), &values(b), &values(c)),
        (g.m, g.n, g.k),
        (g.transpose_a, g.transpose_b),
        (g.lda, g.ldb, g.ldc),
        (g.alpha, g.beta),
    )
}

fn shapes<T: Storage>() {
    let mut random = Random::new(60);
    let backends = backends(&[1, 2]);
    let mut scratch = GemmScratch::new();
    for (m, n, k) in [
        (1, 1, 1),
        (1, 70, 33),
        (2, 130, 64),
        (8, 31, 100),
        (7, 65, 31),
        (65, 3, 40),
        (33, 8, 17),
        (9, 9, 9),
        (31, 33, 32),
        (65, 129, 47),
        (30, 70, 3100),
        // More columns than are arranged in tiles at a time.
        (17, 700, 3100),
        (3, 600, 200),
        (5, 40, 0),
        (0, 4, 4),
    ] {
        for flags in 0..4 {
            let (transpose_a, transpose_b) = (flags & 1 > 0, flags & 2 > 0);
            let gap = if flags == 0 { 0 } else { 3 };
            let tight = Gemm::contiguous(m, n, k, transpose_a, transpose_b);
            let (lda, ldb, ldc) = (tight.lda + gap, tight.ldb + gap, tight.ldc + gap);
            let (alpha, beta) = if flags == 1 { (0.5, -2.0) } else { (1.0, 0.0) };
            let g = Gemm { lda, ldb, ldc, alpha, beta, ..tight };
            let len = |rows: usize, columns: usize, stride: usize| {
                if rows == 0 || columns == 0 {
                    0
                } else {
                    (rows - 1) * stride + columns
                }
            };
            let a_len = if transpose_a { len(k, m, lda) } else { len(m, k, lda) };
            let b_len = if transpose_b { len(n, k, ldb) } else { len(k, n, ldb) };
            let (a, b): (Vec<T>, Vec<T>) =
                (normals(&mut random, a_len), normals(&mut random, b_len));
            let mut before: Vec<T> = normals(&mut random, len(m, n, ldc));
            if beta == 0.0 {
                // Must not be read.
                for row in before.chunks_mut(ldc) {
                    row.iter_mut().take(n).for_each(|c| *c = T::from_f32(f32::NAN));
                }
            }
            let expected = exact(&g, &a, &b, &before);
            for backend in &backends {
                let what = format!("{g:?} on {}", backend.name());
                let mut c = Typed::of(&before);
                gemm(backend, &g, &a, &b, c.get(), &mut scratch).unwrap();
                close_rms::<T>(&what, &c.checked(&what), &expected, 5e-6);
                let mut c = Typed::of(&before);
                gemm_naive(backend, &g, &a, &b, c.get()).unwrap();
                close_rms::<T>(&what, &c.checked(&what), &expected, 5e-6);
            }
        }
    }
}

fn golden_vectors<T: Storage>() {
    let Some(golden) = golden::open("gemm") else { return };
    let mut scratch = GemmScratch::new();
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let ending = if T::DTYPE.size_bytes() == 4 { ".f32" } else { ".bf16" };
            if !case.name.ends_with(ending) || T::DTYPE.name() == "f16" {
                continue;
            }
            let tensor = |name: &str| typed::<T>(&golden.tensor(case, name).f32());
            let (a, b, dc) = (tensor("a"), tensor("b"), tensor("dc"));
            let shape = golden.tensor(case, "a").shape;
            let (m, k, n) = (shape[0], shape[1], b.len() / shape[1]);
            // Forward, and both products of the backward pass.
            for (name, x, y, g) in [
                ("c", &a, &b, Gemm::contiguous(m, n, k, false, false)),
                ("da", &dc, &b, Gemm::contiguous(m, k, n, false, true)),
                ("db", &a, &dc, Gemm::contiguous(k, n, m, true, false)),
            ] {
                let what = format!("gemm {} {name} on {}", case.name, backend.name());
                let mut out = Typed::<T>::new(g.m * g.n);
                gemm(&backend, &g, x, y, out.get(), &mut scratch).unwrap();
                close_rms::<T>(&what, &out.checked(&what), &golden.tensor(case, name).values, 2e-5);
            }
        }
    }
}

/// Nothing is read that a factor of zero makes pointless.
fn factors<T: Storage>() {
    let nan = [T::from_f32(f32::NAN); 40 * 40];
    let mut scratch = GemmScratch::new();
    for backend in backends(&[1]) {
        for (m, n) in [(40, 40), (1, 40), (40, 1)] {
            let g = Gemm { alpha: 0.0, beta: 0.5, ..Gemm::contiguous(m, n, 40, false, false) };
            let mut c = Typed::of(&vec![T::from_f32(3.0); m * n]);
            gemm(&backend, &g, &nan[..m * 40], &nan[..n * 40], c.get(), &mut scratch).unwrap();
            assert!(c.checked("alpha 0").iter().all(|&c| c == 1.5));
        }
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(61);
    for (m, n, k) in [(300, 300, 300), (2, 2000, 301), (3, 500, 1000)] {
        for transpose_b in [false, true] {
            let g = Gemm::contiguous(m, n, k, false, transpose_b);
            let a: Vec<T> = normals(&mut random, m * k);
            let b: Vec<T> = normals(&mut random, n * k);
            same_bits_on_any_number_of_threads(|backend| {
                let mut c = vec![T::default(); m * n];
                gemm(backend, &g, &a, &b, &mut c, &mut GemmScratch::new()).unwrap();
                values(&c)
            });
        }
    }
}

fn refusals<T: Storage>() {
    let backend = CpuBackend::new(1).unwrap();
    let x = [T::default(); 12];
    let call = |g: &Gemm, a: usize, b: usize, c: usize| {
        let mut out = vec![T::default(); c];
        gemm(&backend, g, &x[..a], &x[..b], &mut out, &mut GemmScratch::new()).is_ok()
    };
    let g = Gemm::contiguous(3, 2, 4, false, false);
    assert!(call(&g, 12, 8, 6));
    assert!(!call(&g, 11, 8, 6));
    assert!(!call(&g, 12, 7, 6));
    assert!(!call(&g, 12, 8, 5));
    assert!(!call(&Gemm { ldc: 1, ..g }, 12, 8, 6));
    assert!(!call(&Gemm { lda: usize::MAX, ..g }, 12, 8, 6));
}
