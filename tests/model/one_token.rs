//! The kernels that decode one sequence of a small model on a Hopper GPU: each against plain loops, and the chain of
//! them against the forward pass.

use std::sync::Arc;

use xserv::backend::{Arena, ComputeContext, DeviceTensor};
use xserv::memory::{DType, ElementType};
use xserv::ops::attention::cuda_fused::DecodeSequences;
use xserv::ops::attention::cuda_fused_project::{decode_attention_o, has_decode_attention_o};
use xserv::ops::kv_cache::KvSlots;
use xserv::ops::linear::cuda_gemv_mma::{
    decode_gemv_mma, has_decode_gemv_mma, OneTokenLinear, NUM_SUMS,
};
use xserv::ops::qk_norm_rope_append::QkNormRope;

use crate::driver::{cuda_context, load_on_cuda};
use crate::files::{Random, Store, TestModel};
use crate::steps::compare_chain;
use crate::stepwise::{decode, download, round, upload};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 3072;
const NUM_HEADS: usize = 16;
const NUM_KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 32;
const EPS: f32 = 1e-6;
const DTYPES: [DType; 2] = [DType::BF16, DType::F16];

/// A context on a GPU that has the kernels.
fn hopper() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    let has_all = has_decode_attention_o(&context, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN)
        && has_decode_gemv_mma(&context, HIDDEN, INTERMEDIATE, NUM_KV_HEADS);
    if !has_all {
        println!("skipped: not a Hopper GPU");
    }
    has_all.then_some(context)
}

/// The step between numbers of a type near 1.
fn unit(dtype: DType) -> f64 {
    if dtype == DType::BF16 {
        1.0 / 256.0
    } else {
        1.0 / 2048.0
    }
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bits = |&x: &f64| match dtype {
        DType::F16 => half::f16::from_f32(x as f32).to_bits(),
        _ => half::bf16::from_f32(x as f32).to_bits(),
    };
    values.iter().flat_map(|x| bits(x).to_ne_bytes()).collect()
}

/// Memory of a test, and random numbers for it.
struct Bench {
    context: Arc<ComputeContext>,
    arena: Arena,
    random: Random,
    dtype: DType,
}

impl Bench {
    fn new(context: &Arc<ComputeContext>, dtype: DType, seed: u64) -> Self {
        let arena = Arena::new(context, 64 << 20, "a test").expect("memory");
        Bench { context: context.clone(), arena, random: Random(seed), dtype }
    }

    /// Numbers of the type about `offset`, as the device has them too.
    fn filled(&mut self, shape: &[usize], scale: f64, offset: f64) -> (DeviceTensor, Vec<f64>) {
        let len: usize = shape.iter().product();
        let values: Vec<f64> =
            (0..len).map(|_| round(self.dtype, offset + scale * self.random.signed())).collect();
        (self.of(shape, &values), values)
    }

    fn of(&mut self, shape: &[usize], values: &[f64]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::Float(self.dtype), shape).expect("room");
        upload(&self.context, &tensor, &encode(self.dtype, values));
        tensor
    }

    fn f32s(&mut self, shape: &[usize], values: &[f64]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::Float(DType::F32), shape).expect("room");
        let bytes: Vec<u8> = values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect();
        upload(&self.context, &tensor, &bytes);
        tensor
    }

    fn ints(&mut self, shape: &[usize], values: &[i32]) -> DeviceTensor {
        let tensor = self.arena.tensor(ElementType::I32, shape).expect("room");
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        upload(&self.context, &tensor, &bytes);
        tensor
    }

    /// NaNs, for results.
    fn poisoned(&mut self, shape: &[usize]) -> DeviceTensor {
        let len: usize = shape.iter().product();
        self.of(shape, &vec![f64::NAN; len])
    }
}

fn product(weight: &[f64], row: usize, x: &[f64]) -> f64 {
    let row = &weight[row * x.len()..(row + 1) * x.len()];
    row.iter().zip(x).map(|(w, x)| w * x).sum()
}

fn rms_norm(dtype: DType, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(x, w)| round(dtype, round(dtype, x * scale) * w)).collect()
}

/// Each difference is at most so much of the value or of the typical value, whichever is larger.
fn assert_near(what: &str, got: &[f64], want: &[f64], bar: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let typical = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let mut worst = 0.0f64;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).abs() / want.abs().max(typical);
        assert!(off <= bar, "{what} [{i}]: {got} instead of {want}");
        worst = worst.max(off);
    }
    println!("{what}: worst {worst:.2e} of {bar:.2e}");
}

#[test]
fn linear_layers_of_one_token_on_cuda_are_products() {
    let Some(context) = hopper() else { return };
    for dtype in DTYPES {
        let mut bench = Bench::new(&context, dtype, 3);
        let unit = unit(dtype);
        let (norm, norm_values) = bench.filled(&[HIDDEN], 0.3, 1.0);
        let (x, x_values) = bench.filled(&[1, HIDDEN], 3.0, 0.0);

        for num_outs in [32, 4096] {
            let (weight, values) = bench.filled(&[num_outs, HIDDEN], 0.05, 0.0);
            let out = bench.poisoned(&[1, num_outs]);
            let layer = OneTokenLinear::Norm { norm: &norm, eps: EPS };
            decode_gemv_mma(&context, &x, layer, &weight, &out).expect("the operator");
            let h = rms_norm(dtype, &x_values, &norm_values);
            let want: Vec<f64> = (0..num_outs).map(|row| product(&values, row, &h)).collect();
            let got = decode(dtype, &download(&context, &out));
            assert_near(&format!("{dtype} norm, {num_outs}"), &got, &want, 2.0 * unit);
        }

        let parts: Vec<f64> =
            (0..NUM_SUMS * HIDDEN).map(|_| f64::from(bench.random.signed() as f32)).collect();
        let sums = bench.f32s(&[NUM_SUMS, HIDDEN], &parts);
        let (weight, values) = bench.filled(&[2 * INTERMEDIATE, HIDDEN], 0.05, 0.0);
        let hidden = bench.poisoned(&[1, HIDDEN]);
        let out = bench.poisoned(&[1, INTERMEDIATE]);
        let layer =
            OneTokenLinear::SumsSwiGlu { norm: &norm, eps: EPS, sums: &sums, hidden: &hidden };
        decode_gemv_mma(&context, &x, layer, &weight, &out).expect("the operator");
        let mid: Vec<f64> = (0..HIDDEN)
            .map(|i| {
                let sum: f64 = (0..NUM_SUMS).map(|g| parts[g * HIDDEN + i]).sum();
                round(dtype, x_values[i] + round(dtype, sum))
            })
            .collect();
        let got = decode(dtype, &download(&context, &hidden));
        assert_near(&format!("{dtype} the residual stream"), &got, &mid, unit);
        let h = rms_norm(dtype, &mid, &norm_values);
        let want: Vec<f64> = (0..INTERMEDIATE)
            .map(|row| {
                let gate = round(dtype, product(&values, row, &h));
                let up = round(dtype, product(&values, INTERMEDIATE + row, &h));
                round(dtype, gate / (1.0 + (-gate).exp())) * up
            })
            .collect();
        let got = decode(dtype, &download(&context, &out));
        assert_near(&format!("{dtype} sums and SwiGLU"), &got, &want, 6.0 * unit);

        let (act, act_values) = bench.filled(&[1, INTERMEDIATE], 1.0, 0.0);
        let (weight, values) = bench.filled(&[HIDDEN, INTERMEDIATE], 0.05, 0.0);
        let out = bench.poisoned(&[1, HIDDEN]);
        let layer = OneTokenLinear::Residual { residual: &x };
        decode_gemv_mma(&context, &act, layer, &weight, &out).expect("the operator");
        let want: Vec<f64> = (0..HIDDEN)
            .map(|row| x_values[row] + round(dtype, product(&values, row, &act_values)))
            .collect();
        let got = decode(dtype, &download(&context, &out));
        assert_near(&format!("{dtype} residual"), &got, &want, 2.0 * unit);

        // What the kernels do not serve is refused.
        let odd = bench.poisoned(&[1, 24]);
        let (weight, _) = bench.filled(&[24, HIDDEN], 0.05, 0.0);
        let layer = OneTokenLinear::Norm { norm: &norm, eps: EPS };
        assert!(decode_gemv_mma(&context, &x, layer, &weight, &odd).is_err());
    }
}

/// A head normalised and rotated, each step rounded.
fn rotated(dtype: DType, head: &[f64], weight: &[f64], cos: &[f64], sin: &[f64]) -> Vec<f64> {
    let normed = rms_norm(dtype, head, weight);
    let half = HEAD_DIM / 2;
    let times = |a: f64, b: f64| round(dtype, a * b);
    (0..HEAD_DIM)
        .map(|i| {
            let (cos, sin) = (cos[i % half], sin[i % half]);
            let own = times(normed[i], cos);
            let other = times(normed[(i + half) % HEAD_DIM], sin);
            round(dtype, if i < half { own - other } else { own + other })
        })
        .collect()
}

/// What a sequence's length and place are, and what the kernel is told instead.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Slot,
    Block,
}

fn check_attention(context: &Arc<ComputeContext>, dtype: DType, len: usize, fault: Fault) {
    const MAX_POSITION: usize = 4200;
    let mut bench = Bench::new(context, dtype, len as u64 + 17);
    let table_len = len.div_ceil(BLOCK_SIZE).max(4).next_power_of_two();
    let num_blocks = table_len + 3;
    let total_heads = NUM_HEADS + 2 * NUM_KV_HEADS;
    let row = NUM_KV_HEADS * HEAD_DIM;

    let (qkv, qkv_values) = bench.filled(&[1, total_heads, HEAD_DIM], 2.0, 0.0);
    let (q_norm, q_weight) = bench.filled(&[HEAD_DIM], 0.3, 1.0);
    let (k_norm, k_weight) = bench.filled(&[HEAD_DIM], 0.3, 1.0);
    let (weight, weight_values) = bench.filled(&[HIDDEN, NUM_HEADS * HEAD_DIM], 0.05, 0.0);
    let half = HEAD_DIM / 2;
    let position = len.max(1) - 1;
    let angles: Vec<f64> =
        (0..half).map(|i| position as f64 * 1e4f64.powf(-(i as f64) / half as f64)).collect();
    let tables = [f64::cos as fn(f64) -> f64, f64::sin].map(|f| {
        let own: Vec<f64> = angles.iter().map(|&angle| round(dtype, f(angle))).collect();
        let mut all = vec![f64::NAN; MAX_POSITION * half];
        all[position * half..(position + 1) * half].copy_from_slice(&own);
        (bench.of(&[MAX_POSITION, half], &all), own)
    });
    let [(cos, cos_values), (sin, sin_values)] = &tables;

    // Blocks in any order; where no key of the sequence stands there is no number.
    let mut blocks: Vec<i32> = (0..num_blocks as i32).collect();
    for i in (1..num_blocks).rev() {
        blocks.swap(i, bench.random.below(i + 1));
    }
    blocks.truncate(table_len);
    let place = |key: usize| blocks[key / BLOCK_SIZE] as usize * BLOCK_SIZE + key % BLOCK_SIZE;
    let [k_before, v_before] = [0, 1].map(|_| {
        let mut values = vec![f64::NAN; num_blocks * BLOCK_SIZE * row];
        for key in 0..len.saturating_sub(1) {
            let at = place(key) * row;
            for value in &mut values[at..at + row] {
                *value = round(dtype, bench.random.signed());
            }
        }
        values
    });
    let shape = [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM];
    let (k, v) = (bench.of(&shape, &k_before), bench.of(&shape, &v_before));
    let mut told_blocks = blocks.clone();
    if fault == Fault::Block {
        told_blocks[0] = num_blocks as i32;
    }
    let slot = if fault == Fault::Slot { num_blocks * BLOCK_SIZE } else { place(position) };
    let block_tables = bench.ints(&[1, table_len], &told_blocks);
    let context_lens = bench.ints(&[1], &[len as i32]);
    let positions = bench.ints(&[1], &[position as i32]);
    let slots = bench.ints(&[1], &[slot as i32]);
    let nans = vec![f64::NAN; NUM_KV_HEADS * HIDDEN];
    let sums = bench.f32s(&[NUM_KV_HEADS, HIDDEN], &nans);
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let how =
        QkNormRope { q_norm: &q_norm, k_norm: &k_norm, eps: EPS, cos, sin, positions: &positions };
    let kv = KvSlots { k: &k, v: &v, slots: &slots };
    let sequences =
        DecodeSequences { block_tables: &block_tables, context_lens: &context_lens, scale };
    decode_attention_o(context, &qkv, &how, &kv, &sequences, &weight, &sums).expect("the operator");
    let reported = context.synchronize();
    assert_eq!(reported.is_err(), fault != Fault::None, "{dtype} {len} {fault:?}: {reported:?}");
    let got = decode(DType::F32, &download(context, &sums));
    let [k_after, v_after] = [&k, &v].map(|tensor| decode(dtype, &download(context, tensor)));
    let what = format!("{dtype} attention over {len} keys, {fault:?}");

    // The cache: the new key and value, and else what was there.
    let head = |index: usize| &qkv_values[index * HEAD_DIM..(index + 1) * HEAD_DIM];
    let new_k: Vec<f64> = (0..NUM_KV_HEADS)
        .flat_map(|g| rotated(dtype, head(NUM_HEADS + g), &k_weight, cos_values, sin_values))
        .collect();
    let new_v: Vec<f64> =
        (0..NUM_KV_HEADS).flat_map(|g| head(NUM_HEADS + NUM_KV_HEADS + g).to_vec()).collect();
    let has_written = len > 0 && fault != Fault::Slot;
    let own = place(position) * row..place(position) * row + row;
    let is_same = |a: &f64, b: &f64| a == b || (a.is_nan() && b.is_nan());
    for (before, after) in [(&k_before, &k_after), (&v_before, &v_after)] {
        let mut pairs = before.iter().zip(after).enumerate();
        let is_kept = |i: usize| !has_written || !own.contains(&i);
        assert!(pairs.all(|(i, (a, b))| !is_kept(i) || is_same(a, b)), "{what}: the cache");
    }
    if has_written {
        assert_near(&format!("{what}: the key"), &k_after[own.clone()], &new_k, 2.0 * unit(dtype));
        assert!(v_after[own] == new_v, "{what}: the value");
    }
    if fault != Fault::None {
        return;
    }
    if len == 0 {
        assert!(got.iter().all(|&sum| sum == 0.0), "{what}");
        return;
    }

    let old = |values: &[f64], key: usize, g: usize| {
        let at = place(key) * row + g * HEAD_DIM;
        values[at..at + HEAD_DIM].to_vec()
    };
    let mut want = Vec::new();
    for g in 0..NUM_KV_HEADS {
        let at = g * HEAD_DIM..(g + 1) * HEAD_DIM;
        let mut keys: Vec<Vec<f64>> = (0..position).map(|key| old(&k_before, key, g)).collect();
        let mut values: Vec<Vec<f64>> = (0..position).map(|key| old(&v_before, key, g)).collect();
        keys.push(new_k[at.clone()].to_vec());
        values.push(new_v[at].to_vec());
        let mut outs = Vec::new();
        for index in 2 * g..2 * g + 2 {
            let q = rotated(dtype, head(index), &q_weight, cos_values, sin_values);
            let scores: Vec<f64> =
                keys.iter().map(|key| product(key, 0, &q) * f64::from(scale)).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..HEAD_DIM {
                let sum: f64 = weights.iter().zip(&values).map(|(w, value)| w * value[i]).sum();
                outs.push(round(dtype, sum / total));
            }
        }
        let columns = 2 * g * HEAD_DIM..(2 * g + 2) * HEAD_DIM;
        for weights in weight_values.chunks(NUM_HEADS * HEAD_DIM) {
            want.push(product(&weights[columns.clone()], 0, &outs));
        }
    }
    assert_near(&what, &got, &want, 8.0 * unit(dtype));
}

#[test]
fn attention_with_the_output_projection_on_cuda_is_both() {
    let Some(context) = hopper() else { return };
    for dtype in DTYPES {
        // One key, tiles and blocks that are full or not, fewer tiles than blocks of a cluster and more, and tables
        // for short and long contexts.
        for len in [0, 1, 2, 15, 16, 17, 32, 33, 127, 129, 512, 1000, 2048, 2049, 4133] {
            check_attention(&context, dtype, len, Fault::None);
        }
    }
}

#[test]
fn attention_of_one_token_on_cuda_follows_no_bad_index() {
    let Some(context) = hopper() else { return };
    for len in [33, 700, 3000] {
        check_attention(&context, DType::BF16, len, Fault::Slot);
        check_attention(&context, DType::BF16, len, Fault::Block);
    }
    check_attention(&context, DType::BF16, 33, Fault::None);
}

/// By steps, as graphs too, with contexts that both forms of the attention serve.
#[test]
fn decoding_a_small_model_in_chains_on_cuda_is_the_forward_pass() {
    for dtype in DTYPES {
        let Some(context) = hopper() else { return };
        let dir = TestModel::small_qwen3(5).write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for (batch, lens) in [(1, 1..151), (1, 2100..2500), (2, 1..151), (3, 1..151)] {
            compare_chain(&model, batch, lens);
        }
    }
}
