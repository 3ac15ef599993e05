//! Operators of models on a GPU that C does not see, against plain loops.

use std::sync::Arc;

use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, ElementType};
use xserv::ops::activation::cuda_rounded::gelu_tanh;
use xserv::ops::kv_cache::cuda::kv_cache_append;
use xserv::ops::kv_cache::KvSlots;

use crate::driver::cuda_context;
use crate::files::Random;

pub fn upload(context: &Arc<ComputeContext>, tensor: &DeviceTensor, bytes: &[u8]) {
    let mut host = PinnedBuffer::new(context, bytes.len(), "a test").expect("memory");
    host.bytes().expect("bytes").copy_from_slice(bytes);
    host.upload(0..bytes.len(), tensor, 0).expect("a copy");
    host.wait().expect("the copy");
}

pub fn download(context: &Arc<ComputeContext>, tensor: &DeviceTensor) -> Vec<u8> {
    let mut host = PinnedBuffer::new(context, tensor.size_bytes(), "a test").expect("memory");
    host.download(tensor, 0).expect("a copy");
    host.bytes().expect("bytes").to_vec()
}

/// `x` as a device stores it that computes in f32.
pub fn round(dtype: DType, x: f64) -> f64 {
    let x = x as f32;
    f64::from(match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    })
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match dtype {
        DType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_ne_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        DType::F16 => pairs().map(|bits| half::f16::from_bits(bits).to_f64()).collect(),
        DType::BF16 => pairs().map(|bits| half::bf16::from_bits(bits).to_f64()).collect(),
    }
}

/// Transformers' `gelu_new`, as PyTorch evaluates it: each operation in f32, stored in the type. `tanh_error` is
/// what the hyperbolic tangent may be off by.
fn gelu_new(dtype: DType, x: f64, tanh_error: f64) -> f64 {
    let round = |x| round(dtype, x);
    let cube = round(round(x * x) * x);
    let inner = round(x + round(f64::from(0.044715_f32) * cube));
    let angle = round(f64::from((2.0 / std::f64::consts::PI).sqrt() as f32) * inner);
    let tanh = round(angle.tanh() * (1.0 + tanh_error));
    round(round(0.5 * x) * round(1.0 + tanh))
}

/// Every number of 16 bits, and many of 32.
#[test]
fn gelu_on_cuda_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let mut random = Random(3);
    let some: Vec<u8> =
        (0..100_003).flat_map(|_| (8.0 * random.signed() as f32).to_ne_bytes()).collect();
    for (dtype, bytes) in [(DType::BF16, &every), (DType::F16, &every), (DType::F32, &some)] {
        let len = bytes.len() / dtype.size_bytes();
        let element = ElementType::Float(dtype);
        let mut arena = Arena::new(&context, bytes.len() + 4096, "a test").expect("memory");
        let all = arena.tensor(element, &[len + 1]).expect("room");
        // Whole vectors, and an address and a length that are none.
        for (first, len) in [(0, len), (1, len), (0, len - 3)] {
            let x = all.view(first, &[len], None).expect("a view");
            let bytes = &bytes[..len * dtype.size_bytes()];
            upload(&context, &x, bytes);
            gelu_tanh(&context, &x).expect("the operator");
            let got = decode(dtype, &download(&context, &x));
            for (x, got) in decode(dtype, bytes).into_iter().zip(got) {
                let [low, high] = [-5e-7, 5e-7].map(|error| gelu_new(dtype, x, error));
                let is_same = match dtype {
                    // What is left of 1 + tanh(x) has the absolute error of the tangent.
                    DType::F32 => (got - low).abs() <= 5e-7 * (1.0 + x.abs()),
                    _ => got == low || got == high || (got.is_nan() && low.is_nan()),
                };
                assert!(is_same, "{dtype} gelu({x:e}) = {got:e}, not {low:e} or {high:e}");
            }
        }
    }
}

#[test]
fn keys_and_values_on_cuda_go_to_their_slots_bit_for_bit() {
    let Some(context) = cuda_context() else { return };
    const BLOCK_SIZE: usize = 32;
    let mut random = Random(4);
    for (dtype, num_heads, num_kv_heads, stride) in
        [(DType::BF16, 4, 4, 64), (DType::F32, 12, 12, 64), (DType::F16, 6, 2, 80)]
    {
        for num_tokens in [1, 5, 33, 200] {
            let (size, num_blocks) = (dtype.size_bytes(), 9);
            let element = ElementType::Float(dtype);
            let num_slots = num_blocks * BLOCK_SIZE;
            // Every token another slot.
            let mut slots: Vec<u32> = (0..num_slots as u32).collect();
            for i in (1..num_slots).rev() {
                slots.swap(i, random.below(i + 1));
            }
            slots.truncate(num_tokens);
            // One that is not there.
            if num_tokens == 33 {
                slots[7] = num_slots as u32;
            }
            let heads = num_heads + 2 * num_kv_heads;
            let mut arena = Arena::new(&context, 16 << 20, "a test").expect("memory");
            let qkv = arena.tensor(element, &[num_tokens, heads, stride]).expect("room");
            let shape = [num_blocks, BLOCK_SIZE, num_kv_heads, stride];
            let [k, v] = [0, 1].map(|_| arena.tensor(element, &shape).expect("room"));
            let slot_tensor = arena.tensor(ElementType::I32, &[num_tokens]).expect("room");
            let bytes: Vec<u8> = (0..qkv.size_bytes()).map(|_| random.next() as u8).collect();
            upload(&context, &qkv, &bytes);
            let words: Vec<u8> = slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect();
            upload(&context, &slot_tensor, &words);
            let row = num_kv_heads * stride * size;
            let before = vec![0xee_u8; num_slots * row];
            upload(&context, &k, &before);
            upload(&context, &v, &before);

            kv_cache_append(&context, &qkv, &KvSlots { k: &k, v: &v, slots: &slot_tensor })
                .expect("the operator");
            let reported = context.synchronize();
            assert_eq!(reported.is_err(), num_tokens == 33, "{reported:?}");
            let (mut want_k, mut want_v) = (before.clone(), before);
            for (token, &slot) in slots.iter().enumerate().filter(|(_, &s)| s < num_slots as u32) {
                let to = slot as usize * row..(slot as usize + 1) * row;
                let keys = (token * heads + num_heads) * stride * size;
                want_k[to.clone()].copy_from_slice(&bytes[keys..keys + row]);
                want_v[to].copy_from_slice(&bytes[keys + row..keys + 2 * row]);
            }
            assert!(download(&context, &k) == want_k, "{dtype} keys of {num_tokens} tokens");
            assert!(download(&context, &v) == want_v, "{dtype} values of {num_tokens} tokens");
            assert!(download(&context, &qkv) == bytes, "{dtype} the heads themselves");
        }
    }
}
