//! The projection to heads with what follows it, on Hopper, against a product in f64 that is
//! rounded where Transformers rounds.

use std::sync::Arc;

use crate::support::device::{cuda_context, decode, download, encode, round, upload, HALVES};
use crate::support::rounded::{norm_rope, turned_only};
use crate::support::Random;
use xserv::backend::{Arena, ComputeContext};
use xserv::memory::{DType, ElementType};
use xserv::ops::kv_cache::KvSlots;
use xserv::ops::linear::cuda_prefill::has_linear_prefill;
use xserv::ops::linear::cuda_prefill_heads::{is_prefill_heads_faster, linear_prefill_heads};
use xserv::ops::qk_norm_rope_append::{QkNormRope, QkNorms};

const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 32;
const MAX_POSITION: usize = 900;
const EPS: f32 = 1e-6;
/// Rows of x repeat with this period, which no tile has.
const PERIOD: usize = 37;
const UNTOUCHED: u8 = 0xee;

/// The steps applied to heads besides rotating them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Heads {
    Normed,
    Plain,
    Biased,
}

fn check(
    context: &Arc<ComputeContext>,
    dtype: DType,
    (num_tokens, k): (usize, usize),
    heads: Heads,
) {
    let (num_heads, num_kv_heads) = (16, 8);
    let total_heads = num_heads + 2 * num_kv_heads;
    let rows = total_heads * HEAD_DIM;
    let num_blocks = num_tokens / BLOCK_SIZE + 3;
    let num_slots = num_blocks * BLOCK_SIZE;
    let name = format!("{dtype} {heads:?} heads of {num_tokens} x {k}");
    let mut random = Random::new((num_tokens + k) as u64);
    let mut values = |len: usize, scale: f64, offset: f64| {
        let values: Vec<f64> = (0..len).map(|_| offset + scale * random.signed()).collect();
        encode(dtype, &values)
    };
    let weight_bytes = values(rows * k, 3.0 / (k as f64).sqrt(), 0.0);
    let period_bytes = values(PERIOD * k, 1.0, 0.0);
    let norm_bytes = [0.9, 1.1].map(|offset| values(HEAD_DIM, 0.3, offset));
    let bias_bytes = values(rows, 1.0, 0.0);
    let table_bytes = [0, 1].map(|_| values(MAX_POSITION * HEAD_DIM / 2, 1.0, 0.0));
    let x_bytes: Vec<u8> = (0..num_tokens)
        .flat_map(|row| &period_bytes[row % PERIOD * k * 2..][..k * 2])
        .copied()
        .collect();
    // Every token another slot, and one that is not there; positions in no order, and one beyond
    // the table.
    let mut slots: Vec<u32> = (0..num_slots as u32).collect();
    for i in (1..num_slots).rev() {
        slots.swap(i, random.below(i + 1));
    }
    slots.truncate(num_tokens);
    let mut positions: Vec<u32> =
        (0..num_tokens).map(|_| random.below(MAX_POSITION) as u32).collect();
    let has_faults = num_tokens == 161;
    if has_faults {
        slots[70] = num_slots as u32;
        positions[140] = MAX_POSITION as u32;
    }

    let element = ElementType::Float(dtype);
    let elements = num_tokens * (k + rows) + rows * k + 2 * num_slots * num_kv_heads * HEAD_DIM;
    let bytes = 2 * (elements + MAX_POSITION * HEAD_DIM) + 16 * num_tokens + (1 << 16);
    let mut arena = Arena::new(context, bytes, "a test").expect("memory");
    let mut tensor = |element, shape: &[usize], bytes: &[u8]| {
        let tensor = arena.tensor(element, shape).expect("room");
        upload(context, &tensor, bytes);
        tensor
    };
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
    let x = tensor(element, &[num_tokens, k], &x_bytes);
    let weight = tensor(element, &[rows, k], &weight_bytes);
    let [q_norm, k_norm] = [0, 1].map(|i| tensor(element, &[HEAD_DIM], &norm_bytes[i]));
    let bias = tensor(element, &[rows], &bias_bytes);
    let table_shape = [MAX_POSITION, HEAD_DIM / 2];
    let [cos, sin] = [0, 1].map(|i| tensor(element, &table_shape, &table_bytes[i]));
    let position_tensor = tensor(ElementType::I32, &[num_tokens], &words(&positions));
    let slot_tensor = tensor(ElementType::I32, &[num_tokens], &words(&slots));
    let untouched = |elements: usize| vec![UNTOUCHED; 2 * elements];
    let qkv = tensor(element, &[num_tokens, total_heads, HEAD_DIM], &untouched(num_tokens * rows));
    let cache_shape = [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM];
    let row_len = num_kv_heads * HEAD_DIM;
    let caches = [0, 1].map(|_| tensor(element, &cache_shape, &untouched(num_slots * row_len)));

    assert!(
        is_prefill_heads_faster(context, num_tokens, &weight, HEAD_DIM, HEAD_DIM),
        "{name}: not what it is for"
    );
    let how = QkNormRope {
        norms: (heads == Heads::Normed).then_some(QkNorms { q: &q_norm, k: &k_norm, eps: EPS }),
        cos: &cos,
        sin: &sin,
        positions: &position_tensor,
    };
    let kv = KvSlots { k: &caches[0], v: &caches[1], slots: &slot_tensor };
    let mut results = Vec::new();
    for _ in 0..2 {
        let bias = (heads == Heads::Biased).then_some(&*bias);
        linear_prefill_heads(context, &x, &weight, bias, &how, &kv, &qkv).expect("the operator");
        let reported = context.synchronize();
        assert_eq!(reported.is_err(), has_faults, "{name}: {reported:?}");
        results.push([&qkv, &caches[0], &caches[1]].map(|tensor| download(context, tensor)));
    }
    assert!(results[0] == results[1], "{name}: another time other bits");
    let [got_qkv, got_k, got_v] = &results[0];

    let (xs, weights) = (decode(dtype, &period_bytes), decode(dtype, &weight_bytes));
    let biases = decode(dtype, &bias_bytes);
    let mut products = Vec::new();
    for row in xs.chunks_exact(k) {
        for (column, bias) in weights.chunks_exact(k).zip(&biases) {
            let sum: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
            let bias = if heads == Heads::Biased { *bias } else { 0.0 };
            products.push(round(dtype, sum + bias));
        }
    }
    let norms = [0, 1].map(|i| decode(dtype, &norm_bytes[i]));
    let tables = [0, 1].map(|i| decode(dtype, &table_bytes[i]));
    let (mut num_flipped, mut num_elements) = (0, 0);
    let mut written = vec![false; num_slots];
    for token in 0..num_tokens {
        let (slot, position) = (slots[token] as usize, positions[token] as usize);
        let half = HEAD_DIM / 2;
        let row = |table: &[f64], otherwise: f64| match position < MAX_POSITION {
            true => table[position * half..][..half].to_vec(),
            false => vec![otherwise; half],
        };
        let (cos, sin) = (row(&tables[0], 1.0), row(&tables[1], 0.0));
        let turned = |raw: &[f64], norm: &[f64]| match heads {
            Heads::Normed => norm_rope(dtype, raw, norm, (&cos, &sin), EPS),
            // The reference of the product may be rounded the other way.
            Heads::Plain | Heads::Biased => {
                let place = |i: usize| 0.01 * raw[i].abs() + 1e-4;
                let far = |i: usize| place(i) + place((i + HEAD_DIM / 2) % HEAD_DIM);
                let all = turned_only(dtype, raw, (&cos, &sin)).into_iter().enumerate();
                all.map(|(i, (want, most))| (want, most + far(i))).collect()
            }
        };
        if let Some(slot) = written.get_mut(slot) {
            *slot = true;
        }
        for index in 0..total_heads {
            let raw = &products[(token % PERIOD * total_heads + index) * HEAD_DIM..][..HEAD_DIM];
            let in_qkv = (token * total_heads + index) * HEAD_DIM * 2;
            let (bytes, first, want) = if index < num_heads {
                (got_qkv, in_qkv, turned(raw, &norms[0]))
            } else {
                let stays = &got_qkv[in_qkv..][..HEAD_DIM * 2];
                assert!(stays.iter().all(|&b| b == UNTOUCHED), "{name}: keys, values of {token}");
                if slot >= num_slots {
                    continue;
                }
                let is_value = index >= num_heads + num_kv_heads;
                let kv_head = (index - num_heads) % num_kv_heads;
                let place = (slot * row_len + kv_head * HEAD_DIM) * 2;
                match is_value {
                    // One rounding of a sum in f32.
                    true => {
                        (got_v, place, raw.iter().map(|&v| (v, 0.01 * v.abs() + 1e-4)).collect())
                    }
                    false => (got_k, place, turned(raw, &norms[1])),
                }
            };
            let got = decode(dtype, &bytes[first..][..HEAD_DIM * 2]);
            for (i, (got, (want, most))) in got.into_iter().zip(want).enumerate() {
                num_flipped += usize::from(got != want);
                num_elements += 1;
                assert!(
                    (got - want).abs() <= most,
                    "{name}: {got:e}, not {want:e} in token {token}, head {index}, element {i}"
                );
            }
        }
    }
    let share = num_flipped as f64 / num_elements as f64;
    println!("{name}: {:.3} % of the roundings flipped", share * 100.0);
    assert!(share < 0.02, "{name}: {share} of the elements are not those of the reference");
    for (slot, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        for cache in [got_k, got_v] {
            let stays = &cache[slot * row_len * 2..][..row_len * 2];
            assert!(stays.iter().all(|&byte| byte == UNTOUCHED), "{name}: slot {slot}");
        }
    }
}

#[test]
fn heads_of_prompts_on_cuda_are_rounded_as_in_transformers() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_prefill(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        for (num_tokens, k) in [(129, 256), (161, 320), (384, 192), (500, 512)] {
            for heads in [Heads::Normed, Heads::Plain, Heads::Biased] {
                check(&context, dtype, (num_tokens, k), heads);
            }
        }
    }
}
