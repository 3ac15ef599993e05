//! One new token a sequence on Hopper: all between the projections in one kernel, and with the
//! output projection.

use std::sync::Arc;

use super::tensors::FUSED_DIMS;
use crate::support::device::{
    assert_near, cuda_context, decode, download, product, round, unit, Bench, HALVES,
};
use crate::support::{fp8, reference, rounded};
use xserv::backend::{ComputeContext, DeviceTensor};
use xserv::memory::DType;
use xserv::ops::attention::cuda_fused::{
    attention_fused, has_attention_fused, DecodeScratch, DecodeSequences,
};
use xserv::ops::attention::cuda_fused_project::{
    attention_fused_project, has_attention_fused_project,
};
use xserv::ops::kv_cache::KvSlots;
use xserv::ops::qk_norm_rope_append::{QkNormRope, QkNorms};

const BLOCK_SIZE: usize = 32;
const MAX_POSITION: usize = 4200;
const EPS: f32 = 1e-6;

/// The wrong index that the kernel is given, if any.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Slot,
    Block,
}

/// What a check varies beside the sizes.
#[derive(Clone, Copy, Debug)]
struct How {
    has_norms: bool,
    fault: Fault,
    /// Whether the cache stores floats of 8 bits.
    is_fp8: bool,
    /// The most keys that a token sees.
    window: Option<usize>,
}

/// The model of today: norms, all keys, a cache of the heads' type.
const PLAIN: How = How { has_norms: true, fault: Fault::None, is_fp8: false, window: None };

/// Query heads, kv heads, elements of a head.
type Heads = (usize, usize, usize);

/// A tensor on the device, and its values.
type Both = (DeviceTensor, Vec<f64>);

/// Sequences in a cache, the heads of one new token of each, and all that the kernels need besides.
struct Sequences {
    /// Whether heads are normalised before they are rotated.
    has_norms: bool,
    /// Whether the cache stores floats of 8 bits.
    is_fp8: bool,
    /// The most keys that a token sees.
    window: Option<usize>,
    bench: Bench,
    heads: Heads,
    lens: Vec<usize>,
    /// The slot of each key of each sequence.
    slots_of: Vec<Vec<usize>>,
    qkv: Both,
    q_norm: Both,
    k_norm: Both,
    cos: Both,
    sin: Both,
    k: Both,
    v: Both,
    positions: DeviceTensor,
    slots: DeviceTensor,
    block_tables: DeviceTensor,
    context_lens: DeviceTensor,
}

impl Sequences {
    /// Sequences of `lens` tokens with the new one, and tables of `table_len` blocks. The fault is
    /// the first sequence's. Blocks before the window have no entry in the tables.
    fn new(
        context: &Arc<ComputeContext>,
        dtype: DType,
        heads: Heads,
        (lens, table_len): (&[usize], usize),
        How { has_norms, fault, is_fp8, window }: How,
    ) -> Self {
        let (num_heads, num_kv_heads, head_dim) = heads;
        let seed = lens.iter().sum::<usize>() as u64 + 17;
        let mut bench = Bench::with_room(context, dtype, seed, 192 << 20);
        let (num_seqs, half) = (lens.len(), head_dim / 2);
        let qkv = bench.filled(&[num_seqs, num_heads + 2 * num_kv_heads, head_dim], 2.0, 0.0);
        let q_norm = bench.filled(&[head_dim], 0.3, 1.0);
        let k_norm = bench.filled(&[head_dim], 0.3, 1.0);
        let position_of = |len: usize| len.max(1) - 1;
        let [cos, sin] = [f64::cos as fn(f64) -> f64, f64::sin].map(|function| {
            let mut table = vec![f64::NAN; MAX_POSITION * half];
            for position in lens.iter().map(|&len| position_of(len)) {
                for (i, entry) in table[position * half..][..half].iter_mut().enumerate() {
                    let angle = position as f64 * 1e4f64.powf(-(i as f64) / half as f64);
                    *entry = round(dtype, function(angle));
                }
            }
            (bench.of(&[MAX_POSITION, half], &table), table)
        });

        // Blocks in any order; where no key of a sequence stands there is no number, and where no
        // block is wanted no block is named.
        let needed = |len: usize| len.max(1).div_ceil(BLOCK_SIZE);
        let num_blocks = lens.iter().map(|&len| needed(len)).sum::<usize>() + 3;
        let mut order: Vec<usize> = (0..num_blocks).collect();
        for i in (1..num_blocks).rev() {
            order.swap(i, bench.random.below(i + 1));
        }
        let mut tables = vec![-1; num_seqs * table_len];
        let mut slots_of = Vec::new();
        for (table, &len) in tables.chunks_exact_mut(table_len).zip(lens) {
            let blocks = order.split_off(order.len() - needed(len));
            let first_key = len.saturating_sub(window.unwrap_or(usize::MAX));
            let hidden = first_key / BLOCK_SIZE;
            for (entry, &block) in table.iter_mut().zip(&blocks).skip(hidden) {
                *entry = block as i32;
            }
            let slot = |key: usize| blocks[key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
            slots_of.push((0..len.max(1)).map(slot).collect::<Vec<_>>());
        }
        let row = num_kv_heads * head_dim;
        let shape = [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim];
        let [k, v] = [(); 2].map(|()| {
            let mut values = vec![f64::NAN; num_blocks * BLOCK_SIZE * row];
            for (slots, &len) in slots_of.iter().zip(lens) {
                for &slot in &slots[..position_of(len)] {
                    for value in &mut values[slot * row..(slot + 1) * row] {
                        let number = bench.random.signed();
                        *value = if is_fp8 { fp8::round(number) } else { round(dtype, number) };
                    }
                }
            }
            let cache = match is_fp8 {
                true => bench.fp8s(&shape, &values),
                false => bench.of(&shape, &values),
            };
            (cache, values)
        });

        let mut new_slots: Vec<i32> =
            slots_of.iter().map(|slots| slots[slots.len() - 1] as i32).collect();
        match fault {
            Fault::None => {}
            Fault::Slot => new_slots[0] = (num_blocks * BLOCK_SIZE) as i32,
            Fault::Block => tables[0] = num_blocks as i32,
        }
        let positions: Vec<i32> = lens.iter().map(|&len| position_of(len) as i32).collect();
        let told_lens: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
        Sequences {
            has_norms,
            is_fp8,
            window,
            heads,
            lens: lens.to_vec(),
            slots_of,
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            k,
            v,
            positions: bench.ids(&positions),
            slots: bench.ids(&new_slots),
            block_tables: bench.ints(&[num_seqs, table_len], &tables),
            context_lens: bench.ids(&told_lens),
            bench,
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.heads.2 as f32).sqrt()
    }

    fn how(&self) -> QkNormRope<'_> {
        QkNormRope {
            norms: self.has_norms.then_some(QkNorms {
                q: &self.q_norm.0,
                k: &self.k_norm.0,
                eps: EPS,
            }),
            cos: &self.cos.0,
            sin: &self.sin.0,
            positions: &self.positions,
        }
    }

    fn kv(&self) -> KvSlots<'_> {
        KvSlots { k: &self.k.0, v: &self.v.0, slots: &self.slots }
    }

    fn sequences(&self) -> DecodeSequences<'_> {
        DecodeSequences {
            block_tables: &self.block_tables,
            context_lens: &self.context_lens,
            scale: self.scale(),
            window: self.window,
        }
    }

    /// Heads of a sequence from `first` on, as the projection wrote them.
    fn raw(&self, seq: usize, first: usize, count: usize) -> &[f64] {
        let (num_heads, num_kv_heads, head_dim) = self.heads;
        let first = seq * (num_heads + 2 * num_kv_heads) + first;
        &self.qkv.1[first * head_dim..(first + count) * head_dim]
    }

    /// The same normalised and rotated, each step rounded.
    fn rotated(&self, seq: usize, first: usize, count: usize, weight: &[f64]) -> Vec<f64> {
        let (dtype, half) = (self.bench.dtype, self.heads.2 / 2);
        let position = self.slots_of[seq].len() - 1;
        let [cos, sin] = [&self.cos.1, &self.sin.1].map(|table| &table[position * half..][..half]);
        let heads = self.raw(seq, first, count).chunks_exact(2 * half);
        heads
            .flat_map(|head| {
                let normed = match self.has_norms {
                    true => rounded::rms_norm(dtype, head, weight, EPS),
                    false => head.to_vec(),
                };
                rounded::rope(dtype, &normed, cos, sin)
            })
            .collect()
    }

    fn new_key(&self, seq: usize) -> Vec<f64> {
        let (num_heads, num_kv_heads, _) = self.heads;
        self.rotated(seq, num_heads, num_kv_heads, &self.k_norm.1)
    }

    fn new_value(&self, seq: usize) -> &[f64] {
        let (num_heads, num_kv_heads, _) = self.heads;
        self.raw(seq, num_heads + num_kv_heads, num_kv_heads)
    }

    /// Returns the new key and value as they are multiplied. One of 8 bits is what the cache has: of a
    /// number between two the wrong one may have been taken, and `check_cache` has seen that it is near.
    fn new_row(&self, seq: usize) -> [Vec<f64>; 2] {
        if !self.is_fp8 {
            return [self.new_key(seq), self.new_value(seq).to_vec()];
        }
        let row = self.heads.1 * self.heads.2;
        let slots = &self.slots_of[seq];
        let slot = slots[slots.len() - 1];
        let own = slot * row..(slot + 1) * row;
        [&self.k.0, &self.v.0].map(|cache| self.bench.read(cache)[own.clone()].to_vec())
    }

    /// Returns the attention of a sequence, rounded: [num_heads, head_dim].
    fn attention(&self, seq: usize) -> Vec<f64> {
        let row = self.heads.1 * self.heads.2;
        let old = |cache: &[f64]| -> Vec<f64> {
            let slots = &self.slots_of[seq][..self.lens[seq].max(1) - 1];
            slots.iter().flat_map(|slot| cache[slot * row..(slot + 1) * row].to_vec()).collect()
        };
        let q = self.rotated(seq, 0, self.heads.0, &self.q_norm.1);
        let [new_key, new_value] = self.new_row(seq);
        let k = [old(&self.k.1), new_key].concat();
        let v = [old(&self.v.1), new_value].concat();
        let window = self.window.unwrap_or(usize::MAX);
        let (operands, scale) = ((&q[..], &k[..], &v[..]), self.scale().into());
        let exact = reference::windowed_attention(operands, self.heads, true, window, scale);
        exact.into_iter().map(|x| round(self.bench.dtype, x)).collect()
    }

    /// The cache: the new keys and values, and else what was there.
    fn check_cache(&self, what: &str, fault: Fault) {
        let row = self.heads.1 * self.heads.2;
        let [k_after, v_after] = [&self.k.0, &self.v.0].map(|cache| self.bench.read(cache));
        let mut is_new = vec![false; k_after.len()];
        for (seq, slots) in self.slots_of.iter().enumerate() {
            if self.lens[seq] == 0 || (seq == 0 && fault == Fault::Slot) {
                continue;
            }
            let slot = slots[slots.len() - 1];
            let own = slot * row..(slot + 1) * row;
            is_new[own.clone()].fill(true);
            // A key is rounded after the norm, each of two products and their difference, and a term may be
            // several times the typical size.
            let bar = 3.0 * unit(self.bench.dtype);
            let what = format!("{what}: the key of sequence {seq}");
            let (key, value) = (self.new_key(seq), self.new_value(seq));
            if self.is_fp8 {
                let most = key.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                for (got, want) in k_after[own.clone()].iter().zip(&key) {
                    let sides = [-1.0, 1.0].map(|side| fp8::round(want + side * bar * most));
                    assert!((sides[0]..=sides[1]).contains(got), "{what}: {got} for {want}");
                }
                let value: Vec<f64> = value.iter().map(|&x| fp8::round(x)).collect();
                assert!(v_after[own] == value, "{what}, and its value");
            } else {
                assert_near(&what, &k_after[own.clone()], &key, bar);
                assert!(v_after[own] == *value, "{what}, and its value");
            }
        }
        for (before, after) in [(&self.k.1, &k_after), (&self.v.1, &v_after)] {
            let is_same = |a: &f64, b: &f64| a == b || (a.is_nan() && b.is_nan());
            let mut all = before.iter().zip(after).zip(&is_new);
            assert!(all.all(|((a, b), is_new)| *is_new || is_same(a, b)), "{what}: the cache");
        }
    }
}

fn check_fused(
    context: &Arc<ComputeContext>,
    dtype: DType,
    heads: Heads,
    (lens, table_len): (&[usize], usize),
    how: How,
) {
    let (num_heads, _, head_dim) = heads;
    let what = format!("{dtype} {heads:?} over {lens:?} keys, {table_len} blocks, {how:?}");
    let fault = how.fault;
    let mut all = Sequences::new(context, dtype, heads, (lens, table_len), how);
    let out = all.bench.poisoned(&[lens.len(), num_heads, head_dim]);
    let scratch = DecodeScratch::new(context, lens.len(), num_heads, head_dim).expect("memory");
    let run = || {
        let (how, kv, sequences) = (all.how(), all.kv(), all.sequences());
        attention_fused(context, &all.qkv.0, &how, &kv, &sequences, &scratch, &out)
            .expect("the operator");
        let reported = context.synchronize();
        assert_eq!(reported.is_err(), fault != Fault::None, "{what}: {reported:?}");
        all.bench.read(&out)
    };
    let got = run();
    all.check_cache(&what, fault);
    // Again: the counters are left as they were, and the new key is written in the same place.
    assert!(run() == got, "{what}: another time other bits");
    for (seq, got) in got.chunks_exact(num_heads * head_dim).enumerate() {
        let what = format!("{what}, sequence {seq}");
        if lens[seq] == 0 {
            assert!(got.iter().all(|&x| x == 0.0), "{what}");
        } else if seq > 0 || fault == Fault::None {
            assert_near(&what, got, &all.attention(seq), 4.0 * unit(dtype));
        } else {
            assert!(got.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

/// All lengths, and such as clusters do not divide among their blocks.
const HEADS_OF_ATTENTION: [Heads; 12] = [
    (16, 8, 128),
    (8, 2, 128),
    (7, 1, 128),
    (8, 8, 64),
    (14, 2, 64),
    (12, 1, 64),
    (5, 1, 80),
    (16, 8, 80),
    (12, 1, 96),
    (6, 3, 96),
    (4, 2, 256),
    (9, 1, 256),
];

/// Groups of query heads that are one, few, eight and more; clusters of every size and chunks of
/// every length, which the number of sequences and the room of their tables decide on.
#[test]
fn attention_of_new_tokens_on_cuda_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    if !FUSED_DIMS.iter().all(|&dim| has_attention_fused(&context, dim).unwrap()) {
        println!("skipped: not a Hopper GPU");
        return;
    }
    let of_nine = [1, 2, 0, 31, 32, 33, 700, 16, 64];
    let of_forty: Vec<usize> = (0..40).map(|i| (i * 7) % 90).collect();
    let mut of_ten = vec![2500];
    of_ten.extend(&of_nine);
    let mut of_forty_one = vec![4150];
    of_forty_one.extend(&of_forty);
    let batches: [(&[usize], usize); 14] = [
        (&[1], 4),
        (&[33], 4),
        (&[1500], 64),
        (&[2049], 128),
        (&[0, 129], 8),
        (&[1, 32, 500], 16),
        (&[17, 0, 300, 64, 2100], 66),
        (&[31, 32, 33, 1, 2, 700], 32),
        (&of_nine, 32),
        (&of_ten, 300),
        (&of_forty, 8),
        (&of_forty_one, 300),
        // Few long ones, whose chunks are as many as the chip has room for.
        (&[4150, 0, 90], 300),
        (&[3100, 257, 1, 512], 512),
    ];
    for dtype in HALVES {
        for heads in HEADS_OF_ATTENTION {
            for batch in batches {
                check_fused(&context, dtype, heads, batch, PLAIN);
                check_fused(&context, dtype, heads, batch, How { has_norms: false, ..PLAIN });
                check_fused(&context, dtype, heads, batch, How { is_fp8: true, ..PLAIN });
            }
        }
    }
}

/// Windows of the new token alone, within a tile, and of several tiles and chunks, which begin at
/// borders and between them.
#[test]
fn attention_of_new_tokens_on_cuda_sees_a_window() {
    let Some(context) = cuda_context() else { return };
    if !FUSED_DIMS.iter().all(|&dim| has_attention_fused(&context, dim).unwrap()) {
        println!("skipped: not a Hopper GPU");
        return;
    }
    let many: Vec<usize> = (0..40).map(|i| (i * 37) % 700).collect();
    let batches: [(&[usize], usize); 7] = [
        (&[1500], 64),
        (&[2049], 128),
        (&[0, 3100], 128),
        (&[17, 0, 300, 64, 2100], 66),
        (&[31, 32, 33, 1, 2, 700], 32),
        (&many, 22),
        (&[3100, 257, 1, 512], 512),
    ];
    for (n, heads) in HEADS_OF_ATTENTION.into_iter().enumerate() {
        for (b, batch) in batches.into_iter().enumerate() {
            // Every batch and shape of heads takes a third of them.
            let windows = [1, 7, 16, 100, 256, 1000, 4096, 300, 64].into_iter().enumerate();
            for (m, window) in windows.skip((n + b) % 3).step_by(3) {
                let dtype = HALVES[(n + m) % 2];
                let how = How { is_fp8: (n + m) % 3 == 0, window: Some(window), ..PLAIN };
                check_fused(&context, dtype, heads, batch, how);
            }
        }
    }
}

#[test]
fn attention_of_new_tokens_on_cuda_follows_no_bad_index() {
    let Some(context) = cuda_context() else { return };
    if !has_attention_fused(&context, 128).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for fault in [Fault::Slot, Fault::Block, Fault::None] {
        for batch in [(&[700, 40][..], 32), (&[700, 40, 1, 2, 33], 66)] {
            for is_fp8 in [false, true] {
                let how = How { fault, is_fp8, ..PLAIN };
                for heads in [(16, 8, 128), (6, 3, 96)] {
                    check_fused(&context, DType::BF16, heads, batch, how);
                }
            }
        }
    }
}

const HIDDEN: usize = 1024;
/// The heads of the kernel with the output projection.
const HEADS: Heads = (16, 8, 128);

/// Returns a context on a GPU that has the kernel with the output projection.
fn with_projection() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    let has_it = has_attention_fused_project(&context, HEADS.0, HEADS.1, HEADS.2, HIDDEN).unwrap();
    if !has_it {
        println!("skipped: not a Hopper GPU");
    }
    has_it.then_some(context)
}

fn check_projected(context: &Arc<ComputeContext>, dtype: DType, len: usize, how: How) {
    let (num_heads, num_kv_heads, head_dim) = HEADS;
    let what = format!("{dtype} attention over {len} keys, {how:?}");
    let fault = how.fault;
    let table_len = len.div_ceil(BLOCK_SIZE).max(4).next_power_of_two();
    let mut all = Sequences::new(context, dtype, HEADS, (&[len], table_len), how);
    let (weight, weight_values) = all.bench.filled(&[HIDDEN, num_heads * head_dim], 0.05, 0.0);
    let sums = all.bench.f32s(&[num_kv_heads, HIDDEN], &vec![f64::NAN; num_kv_heads * HIDDEN]);
    let (how, kv, sequences) = (all.how(), all.kv(), all.sequences());
    attention_fused_project(context, &all.qkv.0, &how, &kv, &sequences, &weight, &sums)
        .expect("the operator");
    let reported = context.synchronize();
    assert_eq!(reported.is_err(), fault != Fault::None, "{what}: {reported:?}");
    let got = decode(DType::F32, &download(context, &sums));
    all.check_cache(&what, fault);
    if fault != Fault::None {
        return;
    }
    if len == 0 {
        assert!(got.iter().all(|&sum| sum == 0.0), "{what}");
        return;
    }
    let outs = all.attention(0);
    let mut want = Vec::new();
    for columns in (0..num_kv_heads).map(|g| 2 * g * head_dim..(2 * g + 2) * head_dim) {
        for row in weight_values.chunks_exact(num_heads * head_dim) {
            want.push(product(&row[columns.clone()], 0, &outs[columns.clone()]));
        }
    }
    assert_near(&what, &got, &want, 8.0 * unit(dtype));
}

#[test]
fn attention_with_the_output_projection_on_cuda_is_both() {
    let Some(context) = with_projection() else { return };
    for dtype in HALVES {
        // One key, tiles and blocks that are full or not, fewer tiles than blocks of a cluster and
        // more, and tables for short and long contexts.
        for len in [0, 1, 2, 15, 16, 17, 32, 33, 127, 129, 512, 1000, 2048, 2049, 4133] {
            check_projected(&context, dtype, len, PLAIN);
            check_projected(&context, dtype, len, How { has_norms: false, ..PLAIN });
            check_projected(&context, dtype, len, How { is_fp8: true, ..PLAIN });
        }
        for (len, window) in [(33, 1), (512, 5), (1000, 64), (2049, 333), (4133, 2000), (4133, 9)] {
            for is_fp8 in [false, true] {
                let window = Some(window);
                check_projected(&context, dtype, len, How { is_fp8, window, ..PLAIN });
            }
        }
    }
}

#[test]
fn attention_with_the_output_projection_on_cuda_follows_no_bad_index() {
    let Some(context) = with_projection() else { return };
    for len in [33, 700, 3000] {
        for is_fp8 in [false, true] {
            for fault in [Fault::Slot, Fault::Block] {
                check_projected(&context, DType::BF16, len, How { fault, is_fp8, ..PLAIN });
            }
        }
    }
    check_projected(&context, DType::BF16, 33, PLAIN);
}
