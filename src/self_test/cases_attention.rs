//! Attention in its three forms.

use crate::error::Result;
use crate::memory::{DType, ElementType, Tensor};
use crate::ops;
use crate::ops::attention::{AttentionBackend, AttentionOptions};
use crate::self_test::case::{rounding, Case, Emit, Output, Values, FLOATS};
use crate::self_test::reference;

const BACKENDS: [(AttentionBackend, &str); 4] = [
    (AttentionBackend::Auto, "auto"),
    (AttentionBackend::Naive, "naive"),
    (AttentionBackend::Flash, "flash"),
    (AttentionBackend::SplitKv, "split_kv"),
];

/// The queries and keys of a sequence, and whether the mask is causal: a prompt, one that goes on, and
/// a token.
const LENGTHS: [(i64, i64, bool); 3] = [(67, 67, true), (5, 131, false), (1, 259, true)];

/// The query heads and the heads of keys and values.
const HEADS: (i64, i64) = (4, 2);

pub(super) fn emit(emit: &mut Emit<'_>) -> Result<()> {
    for dtype in FLOATS {
        for backend in BACKENDS {
            for (q_len, kv_len, causal) in LENGTHS {
                if backend.0 == AttentionBackend::SplitKv && q_len > 1 {
                    continue;
                }
                emit(batched(dtype, backend, (q_len, kv_len), 64, causal))?;
            }
        }
        // Head sizes that have fused kernels, and one that has not.
        for head_dim in [80, 96, 128, 256, 24] {
            emit(batched(dtype, BACKENDS[0], (17, 37), head_dim, true))?;
        }
        // Windows of one key, within a tile, and over several of them.
        for (backend, window) in [(BACKENDS[0], 1), (BACKENDS[0], 40), (BACKENDS[1], 9)] {
            emit(windowed(dtype, backend, (67, 150), 64, window))?;
        }
        emit(windowed(dtype, BACKENDS[0], (1, 500), 128, 200))?;
        emit(packed(dtype))?;
        for lengths in [&[(1, 17), (1, 1), (1, 70)][..], &[(3, 17), (1, 1), (9, 40)]] {
            for stored in [ElementType::Float(dtype), ElementType::Fp8] {
                emit(paged(dtype, stored, lengths))?;
            }
        }
    }
    Ok(())
}

/// The weights of 16-bit types may be rounded before they meet the values, beside the result. The
/// values cancel in part, so that the error of the weights is several roundings of the result (4.2
/// on an H200).
fn bound(dtype: DType) -> f64 {
    2e-5 + 8.0 * rounding(dtype)
}

/// Returns the result of one sequence.
fn attend(q: &[f64], k: &[f64], v: &[f64], head_dim: i64, causal: bool) -> Vec<f64> {
    let (heads, kv_heads) = HEADS;
    let sizes = (heads as usize, kv_heads as usize, head_dim as usize);
    reference::attention((q, k, v), sizes, causal, 1.0 / (head_dim as f64).sqrt())
}

fn batched(
    dtype: DType,
    (backend, name): (AttentionBackend, &str),
    (q_len, kv_len): (i64, i64),
    head_dim: i64,
    causal: bool,
) -> Case {
    in_window(dtype, (backend, name), (q_len, kv_len), head_dim, (causal, None))
}

fn windowed(
    dtype: DType,
    backend: (AttentionBackend, &str),
    lengths: (i64, i64),
    head_dim: i64,
    window: u32,
) -> Case {
    in_window(dtype, backend, lengths, head_dim, (true, Some(window)))
}

fn in_window(
    dtype: DType,
    (backend, name): (AttentionBackend, &str),
    (q_len, kv_len): (i64, i64),
    head_dim: i64,
    (causal, window): (bool, Option<u32>),
) -> Case {
    let (batch, (heads, kv_heads)) = (2, HEADS);
    let (q_shape, kv_shape) =
        ([batch, q_len, heads, head_dim], [batch, kv_len, kv_heads, head_dim]);
    let q = Values::random(dtype, &q_shape, 80);
    let k = Values::random(dtype, &kv_shape, 81);
    let v = Values::random(dtype, &kv_shape, 82);
    let (q_size, kv_size) = (q.values.len() / batch as usize, k.values.len() / batch as usize);
    let pairs = k.values.chunks(kv_size).zip(v.values.chunks(kv_size));
    let sequences = q.values.chunks(q_size).zip(pairs);
    let sizes = (heads as usize, kv_heads as usize, head_dim as usize);
    let (keys, scale) = (window.map_or(usize::MAX, |w| w as usize), 1.0 / (head_dim as f64).sqrt());
    let expected = sequences
        .flat_map(|(q, (k, v))| {
            reference::windowed_attention((q, k, v), sizes, causal, keys, scale)
        })
        .collect();
    let mask = match (causal, window) {
        (true, Some(window)) => format!("a window of {window}"),
        (true, None) => "causal".to_string(),
        (false, _) => "full".to_string(),
    };
    Case {
        operator: "attention",
        what: format!("{dtype} {name} {q_shape:?} over {kv_len} keys, {mask}"),
        inputs: vec![q, k, v],
        outputs: vec![Output::floats(dtype, &q_shape, expected, bound(dtype))],
        is_optional: backend != AttentionBackend::Auto,
        compute: Box::new(move |context, i, o| {
            let options =
                AttentionOptions { causal, window, backend, ..AttentionOptions::default() };
            ops::attention::attention(context, &options, &i[0], &i[1], &i[2], &o[0])
        }),
    }
}

/// Returns the start of each sequence, and the end of the last.
fn starts(lengths: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut starts = vec![0];
    for length in lengths {
        starts.push(starts.last().copied().unwrap_or(0) + length);
    }
    starts
}

/// Returns the rows `from..to` of heads.
fn rows(x: &Values, from: i64, to: i64) -> &[f64] {
    let size = x.shape.iter().skip(1).product::<i64>();
    &x.values[(from * size) as usize..(to * size) as usize]
}

fn indices(values: &[i64]) -> Values {
    Values::integers(ElementType::I32, &[values.len() as i64], values)
}

fn packed(dtype: DType) -> Case {
    let lengths = [(3, 3), (1, 19), (33, 40)];
    let (head_dim, (heads, kv_heads)) = (64, HEADS);
    let q_starts = starts(lengths.iter().map(|(q, _)| *q));
    let kv_starts = starts(lengths.iter().map(|(_, kv)| *kv));
    let (num_tokens, num_keys) = (q_starts[3], kv_starts[3]);
    let q_shape = [num_tokens, heads, head_dim];
    let q = Values::random(dtype, &q_shape, 83);
    let k = Values::random(dtype, &[num_keys, kv_heads, head_dim], 84);
    let v = Values::random(dtype, &[num_keys, kv_heads, head_dim], 85);
    let expected = (0..lengths.len()).flat_map(|s| {
        let (from, to) = (kv_starts[s], kv_starts[s + 1]);
        let q = rows(&q, q_starts[s], q_starts[s + 1]);
        attend(q, rows(&k, from, to), rows(&v, from, to), head_dim, true)
    });
    let expected = expected.collect();
    Case {
        operator: "attention",
        what: format!("{dtype} packed {q_shape:?}, causal"),
        inputs: vec![q, k, v, indices(&q_starts), indices(&kv_starts)],
        outputs: vec![Output::floats(dtype, &q_shape, expected, bound(dtype))],
        is_optional: false,
        compute: Box::new(|context, i, o| {
            let options = AttentionOptions {
                causal: true,
                cu_seqlens_q: Some(i[3]),
                cu_seqlens_k: Some(i[4]),
                ..AttentionOptions::default()
            };
            ops::attention::attention(context, &options, &i[0], &i[1], &i[2], &o[0])
        }),
    }
}

/// `stored`: what the cache has for a number.
fn paged(dtype: DType, stored: ElementType, lengths: &[(i64, i64)]) -> Case {
    let (head_dim, block_size, (heads, kv_heads)) = (64, 16, HEADS);
    let most_blocks = lengths.iter().map(|(_, kv)| (kv + block_size - 1) / block_size).max();
    let most_blocks = most_blocks.unwrap_or(0);
    let num_seqs = lengths.len() as i64;
    let num_blocks = num_seqs * most_blocks;
    // The blocks of a sequence lie apart, and backwards.
    let block = |s: i64, b: i64| num_blocks - 1 - (b * num_seqs + s);
    let tables = (0..num_seqs).flat_map(|s| (0..most_blocks).map(move |b| block(s, b)));
    let tables: Vec<i64> = tables.collect();
    let q_starts = starts(lengths.iter().map(|(q, _)| *q));
    let q_shape = [q_starts.last().copied().unwrap_or(0), heads, head_dim];
    let cache = [num_blocks, block_size, kv_heads, head_dim];
    let q = Values::random(dtype, &q_shape, 86);
    let numbers = |seed| Values::new(stored, &cache, Values::random(dtype, &cache, seed).values);
    let (k, v) = (numbers(87), numbers(88));
    let gather = |x: &Values, s: i64, length: i64| -> Vec<f64> {
        let size = (kv_heads * head_dim) as usize;
        let place = |i: i64| block(s, i / block_size) * block_size + i % block_size;
        (0..length).flat_map(|i| x.values[place(i) as usize * size..][..size].to_vec()).collect()
    };
    let expected = lengths.iter().zip(0..).flat_map(|(&(_, kv_len), s)| {
        let q = rows(&q, q_starts[s as usize], q_starts[s as usize + 1]);
        attend(q, &gather(&k, s, kv_len), &gather(&v, s, kv_len), head_dim, true)
    });
    let expected = expected.collect();
    let lens: Vec<i64> = lengths.iter().map(|(_, kv)| *kv).collect();
    let max_q_len = lengths.iter().map(|(q, _)| *q).max().unwrap_or(0) as u32;
    let tables = Values::integers(ElementType::I32, &[num_seqs, most_blocks], &tables);
    Case {
        operator: "attention",
        what: format!("{dtype} paged {q_shape:?} over {stored}, causal"),
        inputs: vec![q, k, v, indices(&q_starts), tables, indices(&lens)],
        outputs: vec![Output::floats(dtype, &q_shape, expected, bound(dtype))],
        is_optional: false,
        compute: Box::new(move |context, i, o: &[Tensor]| {
            let options = AttentionOptions {
                causal: true,
                cu_seqlens_q: Some(i[3]),
                block_tables: Some(i[4]),
                context_lens: Some(i[5]),
                max_q_len,
                ..AttentionOptions::default()
            };
            ops::attention::attention(context, &options, &i[0], &i[1], &i[2], &o[0])
        }),
    }
}
