//! Every golden vector of every operator of the CPU; those of tensors are beside the operators.

use crate::support::{assert_close, backends, golden, to_bytes, Guarded, Tolerance};
use xserv::memory::{DType, HostBuffer, Pages};
use xserv::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use xserv::ops::kv_cache::layout::KvFormat;
use xserv::ops::kv_cache::layout::{KvBlocks, KvLayout, BLOCK_SIZE};
use xserv::ops::{
    activation, attention, embedding, kv_cache, layer_norm, linear, rms_norm, rope, silu_mul,
    softmax,
};

#[test]
fn rms_norm() {
    let Some(golden) = golden::open("rmsnorm") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x").f32();
            let weight = golden.tensor(case, "weight").f32();
            let eps = case.params["eps"].as_f64().unwrap() as f32;
            let mut out = Guarded::new(x.len());
            rms_norm::cpu::rms_norm(&backend, &x, &weight, eps, out.get()).unwrap();
            let what = format!("rmsnorm {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(2e-5));
        }
    }
}

#[test]
fn layer_norm() {
    let Some(golden) = golden::open("layernorm") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x").f32();
            let weight = golden.tensor(case, "weight").f32();
            let bias = golden.tensor(case, "bias").f32();
            let eps = case.params["eps"].as_f64().unwrap() as f32;
            let mut out = Guarded::new(x.len());
            layer_norm::cpu::layer_norm(&backend, &x, &weight, Some(&bias), eps, out.get())
                .unwrap();
            let what = format!("layernorm {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(1e-4));
        }
    }
}

#[test]
fn gelu_tanh() {
    let Some(golden) = golden::open("gelu_tanh") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let mut x = Guarded::of(&golden.tensor(case, "x").f32());
            activation::cpu::activation_in_place(
                &backend,
                activation::cpu::Activation::GeluTanh,
                x.get(),
            )
            .unwrap();
            let what = format!("gelu_tanh {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, x.checked(&what), &reference, Tolerance::OnePlus(2e-6));
        }
    }
}

#[test]
fn silu() {
    let Some(golden) = golden::open("silu") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x").f32();
            let mut out = Guarded::new(x.len());
            activation::cpu::silu(&backend, &x, out.get()).unwrap();
            let what = format!("silu {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(2e-6));
        }
    }
}

#[test]
fn silu_mul() {
    let Some(golden) = golden::open("silu_mul") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let gate = golden.tensor(case, "gate");
            let up = golden.tensor(case, "up").f32();
            let width = *gate.shape.last().unwrap();
            let mut gate_up = Vec::new();
            for (g, u) in gate.f32().chunks(width).zip(up.chunks(width)) {
                gate_up.extend_from_slice(g);
                gate_up.extend_from_slice(u);
            }
            let mut out = Guarded::new(up.len());
            silu_mul::cpu_stacked::silu_mul(&backend, &gate_up, width, out.get()).unwrap();
            let what = format!("silu_mul {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(5e-6));
        }
    }
}

#[test]
fn softmax() {
    let Some(golden) = golden::open("softmax") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x");
            let row_len = *x.shape.last().unwrap();
            let x = x.f32();
            let mut out = Guarded::new(x.len());
            softmax::cpu::softmax(&backend, &x, row_len, out.get()).unwrap();
            let what = format!("softmax {} on {}", case.name, backend.name());
            // A fully masked row is NaN in the reference and zeros here.
            let mut reference = golden.tensor(case, "y").values;
            reference.iter_mut().filter(|r| r.is_nan()).for_each(|r| *r = 0.0);
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(2e-6));
        }
    }
}

#[test]
fn embedding() {
    let Some(golden) = golden::open("embedding") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let table = golden.tensor(case, "table");
            let ids = golden.tensor(case, "ids").u32();
            let dtype = dtype_of(&case.name);
            let (vocab_size, width) = (table.shape[0], table.shape[1]);
            let order = PairOrder::of(&backend);
            let mut matrix = PackedMatrix::zeroed(vocab_size, width, dtype, order).unwrap();
            let bytes = to_bytes(&table.f32(), dtype);
            matrix.writer().unwrap().pack_rows(0, &bytes, dtype).unwrap();
            let mut out = Guarded::new(ids.len() * width);
            embedding::cpu_packed::embedding(&backend, &matrix, &ids, out.get()).unwrap();
            let what = format!("embedding {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::Exact);
        }
    }
}

#[test]
fn rope() {
    let Some(golden) = golden::open("rope") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x");
            let positions = golden.tensor(case, "positions").u32();
            let (num_heads, head_dim) = (x.shape[1], x.shape[2]);
            // As Transformers computes it, in f32.
            let theta = case.params["theta"].as_f64().unwrap() as f32;
            let inv_freq: Vec<f32> = (0..head_dim / 2)
                .map(|i| 1.0 / theta.powf((2 * i) as f32 / head_dim as f32))
                .collect();
            let half = case.params["layout"] == "half-split";
            let pairing =
                if half { rope::RopePairing::SplitHalf } else { rope::RopePairing::Interleaved };
            let table = rope::cpu_table::RopeTable::new(&inv_freq, 1.0, 131_072).unwrap();
            let mut out = Guarded::of(&x.f32());
            let stride = num_heads * head_dim;
            rope::cpu_table::rope(
                &backend,
                out.get(),
                stride,
                num_heads,
                &positions,
                &table,
                pairing,
            )
            .unwrap();
            let what = format!("rope {} on {}", case.name, backend.name());
            let out = out.checked(&what);
            for (name, loose) in [("y", 5e-7), ("y_hf", 1.5e-7)] {
                if name == "y_hf" && !half {
                    continue;
                }
                let reference = golden.tensor(case, name).values;
                for (token, &position) in positions.iter().enumerate() {
                    let row = token * stride..(token + 1) * stride;
                    let tolerance = Tolerance::OnePlus(1e-5 + loose * f64::from(position));
                    let what = format!("{what}, {name}, position {position}");
                    assert_close(&what, &out[row.clone()], &reference[row], tolerance);
                }
            }
        }
    }
}

#[test]
fn linear() {
    let Some(golden) = golden::open("linear") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let x = golden.tensor(case, "x");
            let weight = golden.tensor(case, "weight");
            let (num_tokens, k, n) = (x.shape[0], x.shape[1], weight.shape[0]);
            let dtype = dtype_of(&case.name);
            let order = PairOrder::of(&backend);
            let mut matrix = PackedMatrix::zeroed(n, k, dtype, order).unwrap();
            let bytes = to_bytes(&weight.f32(), dtype);
            matrix.writer().unwrap().pack_rows(0, &bytes, dtype).unwrap();
            let mut out = Guarded::new(num_tokens * n);
            let scratch = &mut linear::cpu::LinearScratch::new();
            let (x, store) = (x.f32(), linear::cpu::Store::Overwrite);
            linear::cpu::linear(&backend, &x, num_tokens, &matrix, None, out.get(), store, scratch)
                .unwrap();
            let what = format!("linear {} on {}", case.name, backend.name());
            let reference = golden.tensor(case, "y").values;
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(2e-5));
        }
    }
}

/// The forward part of the gemm vectors: b [k, n] is packed by columns, as GPT-2's weights are.
#[test]
fn gemm_by_columns() {
    let Some(golden) = golden::open("gemm") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let a = golden.tensor(case, "a");
            let b = golden.tensor(case, "b");
            let bias = golden.tensor(case, "bias").f32();
            let (m, k, n) = (a.shape[0], a.shape[1], b.shape[1]);
            let dtype = dtype_of(&case.name);
            let order = PairOrder::of(&backend);
            let mut matrix = PackedMatrix::zeroed(n, k, dtype, order).unwrap();
            let bytes = to_bytes(&b.f32(), dtype);
            matrix.writer().unwrap().pack_columns(0, k, 0, &bytes, dtype).unwrap();
            for (name, bias) in [("c", None), ("c_bias", Some(&bias[..]))] {
                let mut out = Guarded::new(m * n);
                let scratch = &mut linear::cpu::LinearScratch::new();
                let (a, store) = (a.f32(), linear::cpu::Store::Overwrite);
                linear::cpu::linear(&backend, &a, m, &matrix, bias, out.get(), store, scratch)
                    .unwrap();
                let what = format!("gemm {} {name} on {}", case.name, backend.name());
                let reference = golden.tensor(case, name).values;
                assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(2e-5));
            }
        }
    }
}

#[test]
fn attention() {
    let Some(golden) = golden::open("attention") else { return };
    for backend in backends(&[1, 2]) {
        for case in &golden.cases {
            let (q, k, v) =
                (golden.tensor(case, "q"), golden.tensor(case, "k"), golden.tensor(case, "v"));
            let (num_seqs, num_heads, q_len, head_dim) =
                (q.shape[0], q.shape[1], q.shape[2], q.shape[3]);
            let (num_kv_heads, kv_len) = (k.shape[1], k.shape[2]);
            let dtype = dtype_of(&case.name);
            let layout =
                KvLayout { dtype, format: KvFormat::Dense, num_layers: 1, num_kv_heads, head_dim };
            let blocks_per_seq = kv_len.div_ceil(BLOCK_SIZE);
            let num_bytes = num_seqs * blocks_per_seq * layout.block_bytes();
            let mut cache = HostBuffer::zeroed(num_bytes, Pages::Default).unwrap();
            let mut cache = KvBlocks::new(layout, cache.as_bytes_mut(), 0).unwrap();
            // [seqs, heads, tokens, dim] -> [tokens of all seqs, heads, dim]
            let by_token = |x: &golden::Tensor| {
                let (heads, tokens) = (x.shape[1], x.shape[2]);
                let x = x.f32();
                let mut out = Vec::new();
                for s in 0..num_seqs {
                    for t in 0..tokens {
                        for h in 0..heads {
                            let from = ((s * heads + h) * tokens + t) * head_dim;
                            out.extend_from_slice(&x[from..from + head_dim]);
                        }
                    }
                }
                out
            };
            let slots: Vec<u32> = (0..num_seqs)
                .flat_map(|s| (0..kv_len).map(move |t| s * blocks_per_seq * 32 + t))
                .map(|slot| slot as u32)
                .collect();
            let stride = num_kv_heads * head_dim;
            kv_cache::cpu::kv_cache_append(
                &backend,
                &by_token(&k),
                &by_token(&v),
                stride,
                &slots,
                &mut cache,
            )
            .unwrap();
            let cu_seqlens_q: Vec<u32> = (0..=num_seqs).map(|s| (s * q_len) as u32).collect();
            let block_tables: Vec<u32> = (0..(num_seqs * blocks_per_seq) as u32).collect();
            let batch = attention::cpu_paged::AttentionBatch {
                cu_seqlens_q: &cu_seqlens_q,
                context_lens: &vec![kv_len as u32; num_seqs],
                block_tables: &block_tables,
                max_blocks_per_seq: blocks_per_seq,
            };
            let q = by_token(&q);
            let mut out = Guarded::new(q.len());
            attention::cpu_paged::attention(
                &backend,
                &q,
                num_heads * head_dim,
                &cache,
                &batch,
                num_heads,
                (case.params["scale"].as_f64().unwrap() as f32, None),
                out.get(),
                &mut attention::cpu_paged::AttentionScratch::new(),
            )
            .unwrap();
            let what = format!("attention {} on {}", case.name, backend.name());
            let reference = by_token(&golden.tensor(case, "y"));
            let reference: Vec<f64> = reference.iter().map(|&y| f64::from(y)).collect();
            let tolerance = if dtype == DType::F32 { 2e-5 } else { 1.6e-2 };
            assert_close(&what, out.checked(&what), &reference, Tolerance::OnePlus(tolerance));
        }
    }
}

fn dtype_of(case: &str) -> DType {
    if case.ends_with(".bf16") {
        DType::BF16
    } else {
        DType::F32
    }
}
