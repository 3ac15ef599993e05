//! The operators on typed slices, f32 and bf16, under the names that the PyTorch baselines have.

use super::{numbers, Bench, Work};
use half::bf16;
use xserv::backend::cpu::CpuBackend;
use xserv::ops::activation::cpu::{activation, Activation};
use xserv::ops::argmax::cpu::argmax;
use xserv::ops::attention::cpu_flash::{attention_flash, FlashScratch};
use xserv::ops::attention::cpu_naive::{Attention, HeadStrides, Sequences};
use xserv::ops::common::storage::Storage;
use xserv::ops::elementwise::cpu::add;
use xserv::ops::gemm::cpu::{gemm, Gemm, GemmScratch};
use xserv::ops::layer_norm::cpu::layer_norm;
use xserv::ops::rms_norm::cpu::{add_rms_norm, rms_norm};
use xserv::ops::rope::cpu::rope;
use xserv::ops::rope::RopePairing;
use xserv::ops::silu_mul::cpu::silu_mul;
use xserv::ops::softmax::cpu::softmax;
use xserv::ops::top_k::cpu::top_k;
use xserv::ops::transpose::cpu::transpose;

pub fn all(bench: &Bench, backend: &CpuBackend) {
    typed::<f32>(bench, backend);
    typed::<bf16>(bench, backend);
}

fn stored<T: Storage>(len: usize) -> Vec<T> {
    numbers(len).into_iter().map(T::from_f32).collect()
}

fn typed<T: Storage>(bench: &Bench, backend: &CpuBackend) {
    elementwise::<T>(bench, backend);
    products::<T>(bench, backend);
    attentions::<T>(bench, backend);
}

fn elementwise<T: Storage>(bench: &Bench, backend: &CpuBackend) {
    let (dtype, size) = (T::DTYPE, T::DTYPE.size_bytes() as f64);
    let run = |name: String, elements: usize, f: &mut dyn FnMut()| {
        bench.run(backend, &name, 0.3, Work::Bytes(size * elements as f64), f);
    };
    for (rows, width) in [(1, 1024), (512, 1024), (512, 4096)] {
        let (x, weight): (Vec<T>, Vec<T>) = (stored(rows * width), stored(width));
        let (mut out, mut sums) = (x.clone(), x.clone());
        run(format!("rmsnorm_{dtype}_{rows}x{width}"), 2 * x.len(), &mut || {
            rms_norm(backend, &x, &weight, 1e-6, &mut out).unwrap();
        });
        run(format!("add_rmsnorm_{dtype}_{rows}x{width}"), 4 * x.len(), &mut || {
            add_rms_norm(backend, &x, &x, &weight, 1e-6, &mut sums, &mut out).unwrap();
        });
        run(format!("layernorm_{dtype}_{rows}x{width}"), 2 * x.len(), &mut || {
            layer_norm(backend, &x, &weight, Some(&weight), 1e-6, &mut out).unwrap();
        });
    }
    for (rows, width) in [(512, 3072), (512, 12_288)] {
        let (x, up): (Vec<T>, Vec<T>) = (stored(rows * width), stored(rows * width));
        let mut out = x.clone();
        for (name, function) in [
            ("gelu_tanh", Activation::GeluTanh),
            ("gelu_erf", Activation::GeluErf),
            ("silu", Activation::Silu),
        ] {
            run(format!("{name}_{dtype}_{rows}x{width}"), 2 * x.len(), &mut || {
                activation(backend, function, &x, &mut out).unwrap();
            });
        }
        run(format!("silu_mul_{dtype}_{rows}x{width}"), 3 * x.len(), &mut || {
            silu_mul(backend, &x, width, &up, width, width, &mut out).unwrap();
        });
        run(format!("add_{dtype}_{rows}x{width}"), 3 * x.len(), &mut || {
            add(backend, &x, &up, &mut out).unwrap();
        });
        run(format!("transpose_{dtype}_{rows}x{width}"), 2 * x.len(), &mut || {
            transpose(backend, &x, rows, width, &mut out).unwrap();
        });
    }
    for (rows, width) in [(16, 512), (8192, 512), (1, 151_936)] {
        let x: Vec<T> = stored(rows * width);
        let (mut out, mut indices) = (x.clone(), vec![0i64; 50 * rows]);
        run(format!("softmax_{dtype}_{rows}x{width}"), 2 * x.len(), &mut || {
            softmax(backend, &x, width, &mut out).unwrap();
        });
        run(format!("argmax_{dtype}_{rows}x{width}"), x.len(), &mut || {
            argmax(backend, &x, width, &mut indices[..rows]).unwrap();
        });
        run(format!("top_50_{dtype}_{rows}x{width}"), x.len(), &mut || {
            top_k(backend, &x, width, 50, &mut out[..50 * rows], &mut indices).unwrap();
        });
    }
    let positions: Vec<i64> = (0..512).collect();
    let (cos, sin) = (numbers(512 * 64), numbers(512 * 64));
    let mut x: Vec<T> = stored(512 * 16 * 128);
    run(format!("rope_{dtype}_512x16x128"), 2 * x.len(), &mut || {
        let pairing = RopePairing::SplitHalf;
        rope(backend, &mut x, 2048, 16, 128, &positions, &cos, &sin, pairing).unwrap();
        // Not to infinity: the table is no table of cosines.
        x[0] = T::from_f32(1.0);
    });
}

fn products<T: Storage>(bench: &Bench, backend: &CpuBackend) {
    let dtype = T::DTYPE;
    let mut scratch = GemmScratch::new();
    for (name, m, n, k, transpose_a, transpose_b, copies) in [
        (format!("matmul_{dtype}_1024"), 1024, 1024, 1024, false, false, 1),
        (format!("matmul_{dtype}_1024_trans_b"), 1024, 1024, 1024, false, true, 1),
        (format!("matmul_{dtype}_1024_trans_a"), 1024, 1024, 1024, true, false, 1),
        (format!("linear_{dtype}_512x2048x6144"), 512, 6144, 2048, false, true, 1),
        (format!("gemv_{dtype}_4096x12288"), 1, 12_288, 4096, false, true, 3),
        (format!("gemv_8_{dtype}_4096x12288"), 8, 12_288, 4096, false, true, 3),
        (format!("gemv_columns_{dtype}_4096x12288"), 1, 12_288, 4096, false, false, 3),
    ] {
        if !bench.wanted(&name) {
            continue;
        }
        let shape = Gemm::contiguous(m, n, k, transpose_a, transpose_b);
        let (a, b): (Vec<T>, Vec<T>) = (stored(m * k), stored(copies * n * k));
        let mut c = vec![T::default(); m * n];
        // Copies, so that a vector's matrix comes from memory.
        let work = match copies {
            1 => Work::Flops(2.0 * (m * n * k) as f64),
            _ => Work::Bytes((n * k * dtype.size_bytes()) as f64),
        };
        let mut turn = 0;
        bench.run(backend, &name, 1.0, work, || {
            let b = &b[turn * n * k..(turn + 1) * n * k];
            gemm(backend, &shape, &a, b, &mut c, &mut scratch).unwrap();
            turn = (turn + 1) % copies;
        });
    }
}

fn attentions<T: Storage>(bench: &Bench, backend: &CpuBackend) {
    let (num_heads, num_kv_heads, head_dim) = (16, 8, 128);
    let dtype = T::DTYPE;
    for (kind, q_len, kv_len) in [("decode", 1, 2048), ("prefill", 512, 512)] {
        for by_head in [true, false] {
            let layout = if by_head { "" } else { "_by_token" };
            let name = if q_len == 1 {
                format!("sdpa_{kind}_{dtype}_gqa16x8_ctx{kv_len}{layout}")
            } else {
                format!("sdpa_{kind}_{dtype}_gqa16x8_{q_len}{layout}")
            };
            let strides = |len, heads| match by_head {
                true => HeadStrides::by_head(len, heads, head_dim),
                false => HeadStrides::by_token(len, heads, head_dim),
            };
            let q: Vec<T> = stored(q_len * num_heads * head_dim);
            let k: Vec<T> = stored(kv_len * num_kv_heads * head_dim);
            let v = k.clone();
            let mut out = q.clone();
            let attention = Attention {
                q: &q,
                q_strides: strides(q_len, num_heads),
                k: &k,
                k_strides: strides(kv_len, num_kv_heads),
                v: &v,
                v_strides: strides(kv_len, num_kv_heads),
                out_strides: strides(q_len, num_heads),
                num_heads,
                num_kv_heads,
                head_dim,
                scale: 0.088,
                causal: true,
                window: None,
                sequences: Sequences::Batch { num_seqs: 1, q_len, kv_len },
            };
            let work = match q_len {
                1 => Work::Bytes((2 * k.len() * dtype.size_bytes()) as f64),
                _ => Work::Flops(2.0 * (num_heads * q_len * (q_len + 1) * head_dim) as f64),
            };
            let mut scratch = FlashScratch::new();
            bench.run(backend, &name, 0.5, work, || {
                attention_flash(backend, &attention, &mut out, &mut scratch).unwrap();
            });
        }
    }
}
