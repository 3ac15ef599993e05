//! Between the projection and the attention: heads normalised or not, rotated and put into the cache.

use std::sync::Arc;

use crate::support::device::{assert_rounded, cuda_context, Bench};
use crate::support::rounded::{norm_rope, turned_only};
use crate::support::{assert_close, backends, fp8, Guarded, Random, Tolerance, DTYPES};
use xserv::backend::cpu::CpuBackend;
use xserv::backend::ComputeContext;
use xserv::memory::{DType, HostBuffer, Pages};
use xserv::ops::kv_cache::cpu::kv_cache_append;
use xserv::ops::kv_cache::layout::{KvBlocks, KvFormat, KvLayout};
use xserv::ops::kv_cache::KvSlots;
use xserv::ops::qk_norm_rope_append::{cpu, qk_norm_rope_append, QkNormRope, QkNorms};
use xserv::ops::rms_norm::cpu_heads::rms_norm_heads;
use xserv::ops::rope::cpu_table::{self, RopeTable};
use xserv::ops::rope::RopePairing;

const BLOCK_SIZE: usize = 16;
const MAX_POSITION: usize = 300;
const EPS: f32 = 1e-6;

/// Query heads, kv heads, elements of a head, and from head to head.
type Heads = (usize, usize, usize, usize);

/// With `is_wrong` the third token has a slot outside the cache and the last a position outside the
/// table.
fn check(
    context: &Arc<ComputeContext>,
    dtype: DType,
    heads: Heads,
    num_tokens: usize,
    (has_norms, is_wrong, is_fp8): (bool, bool, bool),
) {
    let (num_heads, num_kv_heads, head_dim, stride) = heads;
    let what =
        format!("{dtype} {num_tokens} tokens of {heads:?}, norms: {has_norms}, wrong: {is_wrong}, 8 bits: {is_fp8}");
    let mut bench = Bench::new(context, dtype, (num_tokens + head_dim) as u64);
    let (total_heads, half) = (num_heads + 2 * num_kv_heads, head_dim / 2);
    let num_blocks = num_tokens / BLOCK_SIZE + 2;
    let num_slots = num_blocks * BLOCK_SIZE;

    // The padding after the elements of a head is zero.
    let (_, mut heads_before) = bench.filled(&[num_tokens * total_heads, stride], 3.0, 0.1);
    heads_before.chunks_exact_mut(stride).for_each(|head| head[head_dim..].fill(0.0));
    let qkv = bench.of(&[num_tokens, total_heads, stride], &heads_before);
    let (q_norm, q_weight) = bench.filled(&[head_dim], 0.3, 1.0);
    let (k_norm, k_weight) = bench.filled(&[head_dim], 0.3, 1.0);
    // The operator does not know where they come from.
    let (cos, cos_values) = bench.filled(&[MAX_POSITION, half], 1.0, 0.0);
    let (sin, sin_values) = bench.filled(&[MAX_POSITION, half], 1.0, 0.0);
    let mut positions: Vec<usize> =
        (0..num_tokens).map(|_| bench.random.below(MAX_POSITION)).collect();
    let mut slots: Vec<usize> = (0..num_slots).collect();
    for i in (1..num_slots).rev() {
        slots.swap(i, bench.random.below(i + 1));
    }
    slots.truncate(num_tokens);
    if is_wrong {
        slots[2] = num_slots;
        positions[num_tokens - 1] = MAX_POSITION;
    }
    let ids = |values: &[usize]| values.iter().map(|&value| value as i32).collect::<Vec<_>>();
    let position_tensor = bench.ids(&ids(&positions));
    let slot_tensor = bench.ids(&ids(&slots));
    let cache_shape = [num_blocks, BLOCK_SIZE, num_kv_heads, stride];
    let len = cache_shape.iter().product();
    let caches = [(); 2].map(|()| match is_fp8 {
        true => bench.fp8s(&cache_shape, &vec![f64::NAN; len]),
        false => bench.poisoned(&cache_shape),
    });
    let stored = |x: &[f64]| match is_fp8 {
        true => x.iter().map(|&x| fp8::round(x)).collect(),
        false => x.to_vec(),
    };

    let how = QkNormRope {
        norms: has_norms.then_some(QkNorms { q: &q_norm, k: &k_norm, eps: EPS }),
        cos: &cos,
        sin: &sin,
        positions: &position_tensor,
    };
    let kv = KvSlots { k: &caches[0], v: &caches[1], slots: &slot_tensor };
    qk_norm_rope_append(context, &qkv, &how, &kv).expect("the operator");
    let reported = context.synchronize();
    assert_eq!(reported.is_err(), is_wrong, "{what}: {reported:?}");
    let [heads_after, k_after, v_after] =
        [&qkv, &caches[0], &caches[1]].map(|tensor| bench.read(tensor));

    let row = num_kv_heads * stride;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    let mut is_written = vec![false; num_slots];
    for token in 0..num_tokens {
        let position = positions[token];
        // Beyond the table nothing is rotated.
        let [cos, sin] = [(&cos_values, 1.0), (&sin_values, 0.0)].map(|(table, otherwise)| {
            match position < MAX_POSITION {
                true => table[position * half..][..half].to_vec(),
                false => vec![otherwise; half],
            }
        });
        if let Some(is_written) = is_written.get_mut(slots[token]) {
            *is_written = true;
        }
        for index in 0..total_heads {
            let at = (token * total_heads + index) * stride;
            let before = &heads_before[at..at + stride];
            let after = &heads_after[at..at + stride];
            let turned = |weight| match has_norms {
                true => norm_rope(dtype, &before[..head_dim], weight, (&cos, &sin), EPS),
                false => turned_only(dtype, &before[..head_dim], (&cos, &sin)),
            };
            if index < num_heads {
                got.extend(&after[..head_dim]);
                want.extend(turned(&q_weight));
                assert!(after[head_dim..].iter().all(|&x| x == 0.0), "{what}: behind a query");
                continue;
            }
            assert_eq!(after, before, "{what}: keys and values of token {token} stay");
            if slots[token] >= num_slots {
                continue;
            }
            let is_value = index >= num_heads + num_kv_heads;
            let place = slots[token] * row + (index - num_heads) % num_kv_heads * stride;
            if is_value {
                assert_eq!(v_after[place..place + stride], stored(before), "{what}: token {token}");
            } else {
                let key = &k_after[place..place + stride];
                got.extend(&key[..head_dim]);
                want.extend(turned(&k_weight).into_iter().map(|(want, most)| match is_fp8 {
                    // A number that may be off may become a neighbour in 8 bits.
                    true => {
                        let sides = [fp8::round(want - most), fp8::round(want + most)];
                        let nearest = fp8::round(want);
                        let off = sides.map(|side| (side - nearest).abs());
                        (nearest, off[0].max(off[1]))
                    }
                    false => (want, most),
                }));
                assert!(key[head_dim..].iter().all(|&x| x == 0.0), "{what}: behind a key");
            }
        }
    }
    assert_rounded(&what, dtype, &got, &want, 0.02);
    for (slot, _) in is_written.iter().enumerate().filter(|(_, is_written)| !**is_written) {
        for cache in [&k_after, &v_after] {
            let stays = &cache[slot * row..(slot + 1) * row];
            assert!(stays.iter().all(|x| x.is_nan()), "{what}: slot {slot}");
        }
    }
}

/// Heads with a kernel of their own, heads of whole vectors with and without a gap after them, and
/// others.
const HEADS: [Heads; 8] = [
    (16, 8, 128, 128),
    (4, 1, 64, 64),
    (3, 3, 80, 80),
    (4, 2, 64, 72),
    (5, 1, 256, 256),
    (2, 2, 30, 32),
    (3, 1, 2, 4),
    (7, 1, 128, 136),
];

#[test]
fn heads_on_cuda_are_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for heads in HEADS {
            for num_tokens in [1, 5, 33] {
                for is_fp8 in [false, true] {
                    check(&context, dtype, heads, num_tokens, (true, false, is_fp8));
                }
                for is_fp8 in [false, true] {
                    check(&context, dtype, heads, num_tokens, (false, false, is_fp8));
                }
            }
        }
    }
}

#[test]
fn wrong_slots_and_positions_on_cuda_are_reported_and_not_followed() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for heads in HEADS {
            for is_fp8 in [false, true] {
                check(&context, dtype, heads, 9, (true, true, is_fp8));
            }
            for is_fp8 in [false, true] {
                check(&context, dtype, heads, 9, (false, true, is_fp8));
            }
        }
    }
}

/// On the CPU: q, k and v are those of float64, and all bits those of the three operators in turn, for any
/// slots and any number of threads.
#[test]
fn heads_on_the_cpu_are_normalised_turned_and_stored() {
    let mut random = Random::new(77);
    for (num_heads, num_kv_heads, head_dim) in [(16, 8, 128), (4, 4, 16), (6, 2, 80)] {
        let heads = num_heads + 2 * num_kv_heads;
        let (stride, turned) = (heads * head_dim, (num_heads + num_kv_heads) * head_dim);
        let inv_freq: Vec<f32> =
            (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let table = RopeTable::new(&inv_freq, 1.0, 5000).unwrap();
        let weights = [(); 2].map(|()| random.normals(head_dim));
        for (num_tokens, slots_of) in [(0, 0), (1, 7), (300, 7), (300, 0), (70, 999), (700, 999)] {
            let num_blocks = num_tokens / 32 + 2;
            let mut slots: Vec<u32> = (slots_of % 32..(32 * num_blocks) as u32).collect();
            if slots_of == 999 {
                // Blocks are shared by tokens far from each other.
                slots.sort_by_key(|slot| slot % 32);
            }
            slots.truncate(num_tokens);
            let positions: Vec<u32> = (0..num_tokens).map(|t| (t * 37 % 5000) as u32).collect();
            let before = random.normals(num_tokens * stride);
            for (has_norms, has_rope) in [(true, true), (false, true), (false, false)] {
                let norms = has_norms.then_some((&weights[0][..], &weights[1][..]));
                let rope = has_rope.then_some(&table);
                let (positions, slots) = (&positions[..], &slots[..]);
                let how = cpu::QkNormRope { num_heads, norms, eps: EPS, rope, positions, slots };
                let dtype = DTYPES[(num_tokens + head_dim) % 3];
                let format = if has_rope { KvFormat::Dense } else { KvFormat::Fp8 };
                let layout = KvLayout { dtype, format, num_layers: 2, num_kv_heads, head_dim };
                let what = format!("{num_tokens} tokens of {num_heads} heads, {dtype} {format:?}");
                let run = |backend: &CpuBackend, in_turn: bool| {
                    let len = num_blocks * layout.block_bytes();
                    let mut bytes = HostBuffer::zeroed(len, Pages::Default).unwrap();
                    bytes.as_bytes_mut().fill(0xee);
                    let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 1).unwrap();
                    let mut guarded = Guarded::of(&before);
                    let qkv = guarded.get();
                    if !in_turn {
                        cpu::qk_norm_rope_append(backend, qkv, &how, &mut cache).unwrap();
                    } else if num_tokens > 0 {
                        let q_len = num_heads * head_dim;
                        if let Some((q, k)) = norms {
                            rms_norm_heads(backend, qkv, num_tokens, stride, num_heads, q, EPS)
                                .unwrap();
                            let keys = &mut qkv[q_len..];
                            rms_norm_heads(backend, keys, num_tokens, stride, num_kv_heads, k, EPS)
                                .unwrap();
                        }
                        if let Some(table) = rope {
                            let (heads, pairing) =
                                (num_heads + num_kv_heads, RopePairing::SplitHalf);
                            cpu_table::rope(backend, qkv, stride, heads, positions, table, pairing)
                                .unwrap();
                        }
                        let (k, v) = (&qkv[q_len..], &qkv[turned..]);
                        kv_cache_append(backend, k, v, stride, slots, &mut cache).unwrap();
                    }
                    (guarded.checked(&what).to_vec(), bytes.as_bytes().to_vec())
                };
                for backend in backends(&[1, 2, 3]) {
                    let (qkv, cache) = run(&backend, false);
                    let (want_qkv, want_cache) = run(&backend, true);
                    assert!(qkv == want_qkv, "{what} on {}: heads", backend.name());
                    assert!(cache == want_cache, "{what} on {}: the cache", backend.name());
                    let mut want: Vec<f64> = before.iter().map(|&x| x.into()).collect();
                    for (token, row) in want.chunks_exact_mut(stride).enumerate() {
                        for (head, x) in row[..turned].chunks_exact_mut(head_dim).enumerate() {
                            if has_norms {
                                let squares: f64 = x.iter().map(|x| x * x).sum();
                                let root = (squares / head_dim as f64 + f64::from(EPS)).sqrt();
                                let weight = &weights[usize::from(head >= num_heads)];
                                x.iter_mut()
                                    .zip(weight)
                                    .for_each(|(x, &w)| *x *= f64::from(w) / root);
                            }
                            let (first, second) = x.split_at_mut(head_dim / 2);
                            for ((x, y), f) in first.iter_mut().zip(second).zip(&inv_freq) {
                                let angle = f64::from(positions[token] as f32 * f);
                                let (sin, cos) =
                                    if has_rope { angle.sin_cos() } else { (0.0, 1.0) };
                                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
                            }
                        }
                    }
                    assert_close(&what, &qkv, &want, Tolerance::OnePlus(4e-6));
                }
            }
        }
    }
}

#[test]
fn heads_on_the_cpu_of_wrong_shapes_are_refused() {
    let backend = CpuBackend::new(2).unwrap();
    let (dtype, format) = (DType::BF16, KvFormat::Dense);
    let layout = KvLayout { dtype, format, num_layers: 1, num_kv_heads: 1, head_dim: 16 };
    let mut bytes = HostBuffer::zeroed(2 * layout.block_bytes(), Pages::Default).unwrap();
    let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 0).unwrap();
    let table = RopeTable::new(&[1.0; 8], 1.0, 100).unwrap();
    let narrow = RopeTable::new(&[1.0; 4], 1.0, 100).unwrap();
    let (weight, mut qkv) = ([1.0; 16], [1.0; 3 * 16 * 2]);
    let good = cpu::QkNormRope {
        num_heads: 1,
        norms: Some((&weight, &weight)),
        eps: EPS,
        rope: Some(&table),
        positions: &[3, 4],
        slots: &[5, 63],
    };
    let mut run = |how: &cpu::QkNormRope<'_>, len: usize| {
        cpu::qk_norm_rope_append(&backend, &mut qkv[..len], how, &mut cache).is_ok()
    };
    assert!(run(&good, 96));
    assert!(!run(&good, 95));
    for wrong in [
        cpu::QkNormRope { num_heads: 2, ..good },
        cpu::QkNormRope { num_heads: usize::MAX, ..good },
        cpu::QkNormRope { norms: Some((&weight[1..], &weight)), ..good },
        cpu::QkNormRope { norms: Some((&weight, &weight[1..])), ..good },
        cpu::QkNormRope { rope: Some(&narrow), ..good },
        cpu::QkNormRope { positions: &[3], ..good },
        cpu::QkNormRope { positions: &[3, 100], ..good },
        cpu::QkNormRope { slots: &[5, 64], ..good },
    ] {
        assert!(!run(&wrong, 96), "{wrong:?}");
    }
}
