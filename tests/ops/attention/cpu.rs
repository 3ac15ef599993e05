//! Slices of all types on the CPU: layouts, masks, ragged and paged keys.

use crate::support::typed::{
    close_rms, for_storage, normals, same_bits_on_any_number_of_threads, typed, values, Typed,
};
use crate::support::{backends, golden, reference, Random};
use xserv::backend::cpu::CpuBackend;
use xserv::ops::attention::cpu_flash::{attention_flash, FlashScratch};
use xserv::ops::attention::cpu_naive::{attention_naive, Attention, HeadStrides, Sequences};
use xserv::ops::common::storage::Storage;

for_storage!(golden_vectors, masks, windows, ragged, paged, threads, refusals);

/// q [q_len, heads, dim], k and v [kv_len, kv_heads, dim] -> f64 result with or without the mask.
fn exact<T: Storage>(
    (q, k, v): (&[T], &[T], &[T]),
    heads: (usize, usize, usize),
    causal: bool,
    scale: f32,
) -> Vec<f64> {
    reference::attention((&values(q), &values(k), &values(v)), heads, causal, scale.into())
}

fn both<T: Storage>(what: &str, attention: &Attention<'_, T>, len: usize, expected: &[f64]) {
    for backend in backends(&[1, 2]) {
        let what = format!("{what} on {}", backend.name());
        let mut out = Typed::<T>::new(len);
        attention_flash(&backend, attention, out.get(), &mut FlashScratch::new()).unwrap();
        close_rms::<T>(&format!("flash {what}"), &out.checked(&what), expected, 2e-5);
        let mut out = Typed::<T>::new(len);
        attention_naive(&backend, attention, out.get()).unwrap();
        close_rms::<T>(&format!("naive {what}"), &out.checked(&what), expected, 2e-5);
    }
}

fn golden_vectors<T: Storage>() {
    let Some(golden) = golden::open("attention") else { return };
    for case in &golden.cases {
        let ending = if T::DTYPE.size_bytes() == 4 { ".f32" } else { ".bf16" };
        if !case.name.ends_with(ending) || T::DTYPE.name() == "f16" {
            continue;
        }
        let (q, k) = (golden.tensor(case, "q"), golden.tensor(case, "k"));
        let (num_seqs, num_heads, q_len, head_dim) =
            (q.shape[0], q.shape[1], q.shape[2], q.shape[3]);
        let (num_kv_heads, kv_len) = (k.shape[1], k.shape[2]);
        let v = typed::<T>(&golden.tensor(case, "v").f32());
        let (q, k) = (typed::<T>(&q.f32()), typed::<T>(&k.f32()));
        let q_strides = HeadStrides::by_head(q_len, num_heads, head_dim);
        let kv_strides = HeadStrides::by_head(kv_len, num_kv_heads, head_dim);
        let attention = Attention {
            q: &q,
            q_strides,
            k: &k,
            k_strides: kv_strides,
            v: &v,
            v_strides: kv_strides,
            out_strides: q_strides,
            num_heads,
            num_kv_heads,
            head_dim,
            scale: case.params["scale"].as_f64().unwrap() as f32,
            causal: true,
            window: None,
            sequences: Sequences::Batch { num_seqs, q_len, kv_len },
        };
        both(&case.name, &attention, q.len(), &golden.tensor(case, "y").values);
    }
}

struct Case<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

fn case<T: Storage>(
    random: &mut Random,
    q_len: usize,
    kv_len: usize,
    shape: (usize, usize, usize),
) -> Case<T> {
    let (heads, kv_heads, dim) = shape;
    Case {
        q: normals(random, q_len * heads * dim),
        k: normals(random, kv_len * kv_heads * dim),
        v: normals(random, kv_len * kv_heads * dim),
    }
}

fn attention_of<'a, T>(
    case: &'a Case<T>,
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    causal: bool,
    sequences: Sequences<'a>,
) -> Attention<'a, T> {
    let q_strides = HeadStrides::by_token(0, num_heads, head_dim);
    let kv_strides = HeadStrides::by_token(0, num_kv_heads, head_dim);
    Attention {
        q: &case.q,
        q_strides,
        k: &case.k,
        k_strides: kv_strides,
        v: &case.v,
        v_strides: kv_strides,
        out_strides: q_strides,
        num_heads,
        num_kv_heads,
        head_dim,
        scale: 0.3,
        causal,
        window: None,
        sequences,
    }
}

fn masks<T: Storage>() {
    let mut random = Random::new(70);
    for shape in
        [(1, 1, 1), (4, 2, 16), (3, 1, 33), (4, 4, 64), (2, 1, 128), (1, 1, 256), (5, 1, 17)]
    {
        for (q_len, kv_len) in [(1, 1), (1, 31), (1, 33), (2, 64), (7, 65), (33, 33), (60, 100)] {
            for causal in [false, true] {
                let case = case::<T>(&mut random, q_len, kv_len, shape);
                let sequences = Sequences::Batch { num_seqs: 1, q_len, kv_len };
                let attention = attention_of(&case, shape, causal, sequences);
                let expected = exact((&case.q, &case.k, &case.v), shape, causal, 0.3);
                let what = format!("{q_len} queries, {kv_len} keys, {shape:?}, causal {causal}");
                both(&what, &attention, case.q.len(), &expected);
            }
        }
    }
    // More queries than keys, and none at all.
    let shape = (2, 1, 16);
    let case = case::<T>(&mut random, 9, 4, shape);
    let sequences = Sequences::Batch { num_seqs: 1, q_len: 9, kv_len: 4 };
    let attention = attention_of(&case, shape, false, sequences);
    let expected = exact((&case.q, &case.k, &case.v), shape, false, 0.3);
    both("9 over 4", &attention, case.q.len(), &expected);
    let sequences = Sequences::Batch { num_seqs: 1, q_len: 9, kv_len: 0 };
    let attention = attention_of(&case, shape, false, sequences);
    both("no keys", &attention, case.q.len(), &vec![0.0; case.q.len()]);
}

/// Windows of one key, within a block of keys, of whole blocks, up to all keys and beyond.
fn windows<T: Storage>() {
    let mut random = Random::new(75);
    for shape in [(4, 2, 16), (3, 1, 33), (2, 1, 128), (7, 1, 64)] {
        for (q_len, kv_len) in [(1, 1), (1, 200), (2, 64), (33, 33), (60, 100), (150, 300)] {
            for window in [1, 2, 7, 31, 32, 33, 64, 97, kv_len, kv_len + 5] {
                let case = case::<T>(&mut random, q_len, kv_len, shape);
                let sequences = Sequences::Batch { num_seqs: 1, q_len, kv_len };
                let attention = Attention {
                    window: Some(window),
                    ..attention_of(&case, shape, true, sequences)
                };
                let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| values(x));
                let operands = (&q[..], &k[..], &v[..]);
                let scale = f64::from(attention.scale);
                let expected = reference::windowed_attention(operands, shape, true, window, scale);
                let what = format!("{q_len} queries, {kv_len} keys, {shape:?}, window {window}");
                both(&what, &attention, case.q.len(), &expected);
            }
        }
    }
}

const Q_LENS: [usize; 6] = [3, 0, 1, 40, 1, 13];
const KV_LENS: [usize; 6] = [3, 5, 64, 40, 33, 100];

fn ends(lens: &[usize]) -> Vec<i32> {
    let mut ends = vec![0];
    lens.iter().for_each(|&len| ends.push(ends[ends.len() - 1] + len as i32));
    ends
}

fn ragged_expected<T: Storage>(case: &Case<T>, shape: (usize, usize, usize)) -> Vec<f64> {
    let (q_row, kv_row) = (shape.0 * shape.2, shape.1 * shape.2);
    let (mut q, mut kv, mut expected) = (0, 0, Vec::new());
    for (q_len, kv_len) in Q_LENS.into_iter().zip(KV_LENS) {
        let part = |x: &[T], row: usize, first: usize, len: usize| {
            x[first * row..(first + len) * row].to_vec()
        };
        let operands = (
            &part(&case.q, q_row, q, q_len)[..],
            &part(&case.k, kv_row, kv, kv_len)[..],
            &part(&case.v, kv_row, kv, kv_len)[..],
        );
        expected.extend(exact(operands, shape, true, 0.3));
        (q, kv) = (q + q_len, kv + kv_len);
    }
    expected
}

fn ragged<T: Storage>() {
    let mut random = Random::new(71);
    for shape in [(4, 2, 32), (6, 1, 24)] {
        let case = case::<T>(&mut random, Q_LENS.iter().sum(), KV_LENS.iter().sum(), shape);
        let (q, k) = (ends(&Q_LENS), ends(&KV_LENS));
        let sequences = Sequences::Ragged { cu_seqlens_q: &q, cu_seqlens_k: &k };
        let attention = attention_of(&case, shape, true, sequences);
        both("ragged", &attention, case.q.len(), &ragged_expected(&case, shape));
    }
}

fn paged<T: Storage>() {
    let mut random = Random::new(72);
    for (shape, block_size) in
        [((4, 2, 32), 16), ((4, 2, 32), 5), ((6, 1, 24), 64), ((2, 2, 16), 32)]
    {
        let (_, kv_heads, dim) = shape;
        let case = case::<T>(&mut random, Q_LENS.iter().sum(), KV_LENS.iter().sum(), shape);
        let max_blocks_per_seq = 100usize.div_ceil(block_size);
        let num_blocks = 6 * max_blocks_per_seq;
        // Blocks in a shuffled order; what no sequence owns is NaN.
        let mut order: Vec<i32> = (0..num_blocks as i32).collect();
        (1..num_blocks).rev().for_each(|i| order.swap(i, random.below(i + 1)));
        let row = kv_heads * dim;
        let mut k = vec![T::from_f32(f32::NAN); num_blocks * block_size * row];
        let mut v = k.clone();
        let mut from = 0;
        for (seq, kv_len) in KV_LENS.into_iter().enumerate() {
            for token in 0..kv_len {
                let block = order[seq * max_blocks_per_seq + token / block_size] as usize;
                let to = (block * block_size + token % block_size) * row;
                k[to..to + row].copy_from_slice(&case.k[from * row..(from + 1) * row]);
                v[to..to + row].copy_from_slice(&case.v[from * row..(from + 1) * row]);
                from += 1;
            }
        }
        let cu_seqlens_q = ends(&Q_LENS);
        let context_lens = KV_LENS.map(|len| len as i32);
        let sequences = Sequences::Paged {
            cu_seqlens_q: &cu_seqlens_q,
            context_lens: &context_lens,
            block_tables: &order,
            max_blocks_per_seq,
            block_size,
        };
        let strides = HeadStrides::by_token(block_size, kv_heads, dim);
        let attention = Attention {
            k: &k,
            v: &v,
            k_strides: strides,
            v_strides: strides,
            ..attention_of(&case, shape, true, sequences)
        };
        both("paged", &attention, case.q.len(), &ragged_expected(&case, shape));
        let mut wrong = order.clone();
        wrong[0] = num_blocks as i32;
        let mut out = vec![T::default(); case.q.len()];
        let backend = CpuBackend::new(1).unwrap();
        for table in [&wrong, &vec![-1; num_blocks]] {
            let sequences = Sequences::Paged {
                cu_seqlens_q: &cu_seqlens_q,
                context_lens: &context_lens,
                block_tables: table,
                max_blocks_per_seq,
                block_size,
            };
            let attention = Attention { sequences, ..attention };
            assert!(attention_naive(&backend, &attention, &mut out).is_err());
        }
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(73);
    let shape = (4, 2, 64);
    for (q_len, kv_len) in [(200, 300), (1, 1000)] {
        let case = case::<T>(&mut random, q_len, kv_len, shape);
        let sequences = Sequences::Batch { num_seqs: 1, q_len, kv_len };
        for window in [None, Some(90)] {
            let attention = Attention { window, ..attention_of(&case, shape, true, sequences) };
            same_bits_on_any_number_of_threads(|backend| {
                let mut out = vec![T::default(); case.q.len()];
                attention_flash(backend, &attention, &mut out, &mut FlashScratch::new()).unwrap();
                values(&out)
            });
        }
    }
}

fn refusals<T: Storage>() {
    let mut random = Random::new(74);
    let backend = CpuBackend::new(1).unwrap();
    let shape = (4, 2, 16);
    let case = case::<T>(&mut random, 8, 8, shape);
    let sequences = Sequences::Batch { num_seqs: 1, q_len: 8, kv_len: 8 };
    let good = attention_of(&case, shape, true, sequences);
    let call = |attention: &Attention<'_, T>| {
        let mut out = vec![T::default(); case.q.len()];
        let flash = attention_flash(&backend, attention, &mut out, &mut FlashScratch::new());
        let naive = attention_naive(&backend, attention, &mut out);
        assert_eq!(flash.is_ok(), naive.is_ok());
        flash.is_ok()
    };
    assert!(call(&good));
    let lens = |q_len, kv_len| Sequences::Batch { num_seqs: 1, q_len, kv_len };
    assert!(!call(&Attention { sequences: lens(8, 7), ..good }), "causal with too few keys");
    assert!(!call(&Attention { sequences: lens(8, 9), ..good }));
    assert!(!call(&Attention { sequences: lens(9, 9), ..good }));
    assert!(!call(&Attention { num_heads: 3, ..good }));
    assert!(!call(&Attention { num_kv_heads: 0, ..good }));
    assert!(!call(&Attention { head_dim: 0, ..good }));
    assert!(!call(&Attention { head_dim: 257, ..good }));
    // Rows of the output on top of each other.
    let overlapping = HeadStrides { token: 16, ..good.out_strides };
    assert!(!call(&Attention { out_strides: overlapping, ..good }));
    let huge = HeadStrides { token: usize::MAX, ..good.k_strides };
    assert!(!call(&Attention { k_strides: huge, ..good }));
    for wrong in [[0, 9].as_slice(), &[0, -1], &[1, 8], &[]] {
        let sequences = Sequences::Ragged { cu_seqlens_q: wrong, cu_seqlens_k: wrong };
        assert!(!call(&Attention { sequences, ..good }), "{wrong:?}");
    }
}
