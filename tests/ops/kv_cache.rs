//! The paged KV cache: blocks on the CPU, keys and values into their slots on a GPU, and blocks to
//! the host and back.

use crate::support::device::{cuda_context, decode, download, upload};
use crate::support::{backends, fp8, to_bytes, Random, DTYPES};
use std::sync::Arc;
use xserv::backend::cpu::CpuBackend;
use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, Device, ElementType, HostBuffer, Pages};
use xserv::ops::kv_cache::cpu::kv_cache_append;
use xserv::ops::kv_cache::cuda_swap::{kv_cache_swap, KvCopy, KvParts, MAX_KV_COPIES};
use xserv::ops::kv_cache::layout::KvFormat;
use xserv::ops::kv_cache::layout::{KvBlocks, KvLayout, BLOCK_SIZE};
use xserv::ops::kv_cache::widen::{Widened, WidenedSizes};
use xserv::ops::kv_cache::{cuda, KvSlots};

/// Returns where the element of a key and that of a value lie in the panels of a head, as
/// `layout.rs` describes them.
fn places(layout: &KvLayout, token: usize, i: usize) -> [usize; 2] {
    let values = layout.head_dim * BLOCK_SIZE;
    let columns = layout.head_dim.next_multiple_of(16);
    match layout.dtype {
        DType::BF16 => [
            (i / 2 * BLOCK_SIZE + token) * 2 + i % 2,
            values + (token / 2 * columns + i) * 2 + token % 2,
        ],
        _ => [i * BLOCK_SIZE + token, values + token * columns + i],
    }
}

/// Few tokens and many, rows with a gap; what no token has stays as it is.
#[test]
fn keys_and_values_go_to_their_slots() {
    let mut random = Random::new(6);
    let formats = [KvFormat::Dense, KvFormat::Fp8];
    for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| formats.map(|f| (dtype, f))) {
        for (num_kv_heads, head_dim, num_tokens, is_shuffled) in [
            (1, 2, 1, true),
            (2, 40, 33, true),
            (3, 80, 200, true),
            (8, 128, 70, true),
            (2, 40, 70, false),
            (3, 96, 70, false),
            (8, 128, 200, false),
        ] {
            let layout = KvLayout { dtype, format, num_layers: 2, num_kv_heads, head_dim };
            let (num_blocks, layer) = (9, 1);
            let row_stride = num_kv_heads * head_dim + 5;
            let k = random.normals(num_tokens * row_stride);
            let v = random.normals(num_tokens * row_stride);
            let mut slots: Vec<u32> = (0..(num_blocks * BLOCK_SIZE) as u32).collect();
            if is_shuffled {
                for i in (1..slots.len()).rev() {
                    slots.swap(i, random.below(i + 1));
                }
            } else {
                // Side by side, as those of a prompt, but not from the first of a block on.
                slots.drain(..7);
            }
            slots.truncate(num_tokens);

            let stored = |x: f32| match format {
                KvFormat::Dense => to_bytes(&[x], dtype),
                KvFormat::Fp8 => vec![fp8::code(x.into())],
            };
            let size = stored(0.0).len();
            let mut want = vec![0xee_u8; num_blocks * layout.block_bytes()];
            for (token, &slot) in slots.iter().enumerate() {
                let (block, place) = (slot as usize / BLOCK_SIZE, slot as usize % BLOCK_SIZE);
                for head in 0..num_kv_heads {
                    let panels = block * layout.block_bytes()
                        + (layer * num_kv_heads + head) * layout.block_bytes()
                            / (layout.num_layers * num_kv_heads);
                    for i in 0..head_dim {
                        let from = token * row_stride + head * head_dim + i;
                        for (x, at) in [&k, &v].into_iter().zip(places(&layout, place, i)) {
                            let at = panels + at * size;
                            want[at..at + size].copy_from_slice(&stored(x[from]));
                        }
                    }
                }
            }
            for backend in backends(&[1, 2]) {
                let mut bytes = HostBuffer::zeroed(want.len(), Pages::Default).unwrap();
                bytes.as_bytes_mut().fill(0xee);
                let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), layer).unwrap();
                kv_cache_append(&backend, &k, &v, row_stride, &slots, &mut cache).unwrap();
                let what =
                    format!("{dtype} {format:?} {num_tokens} tokens of {num_kv_heads}x{head_dim}");
                assert!(bytes.as_bytes() == want, "{what} on {}", backend.name());
            }
        }
    }
}

#[test]
fn large_numbers_stay_finite_in_f16() {
    let backend = CpuBackend::new(1).unwrap();
    let layout = KvLayout {
        dtype: DType::F16,
        format: KvFormat::Dense,
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 2,
    };
    let mut bytes = HostBuffer::zeroed(layout.block_bytes(), Pages::Default).unwrap();
    let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 0).unwrap();
    let (k, v) = ([1e6, -1e6], [f32::INFINITY, f32::NEG_INFINITY]);
    kv_cache_append(&backend, &k, &v, 2, &[3], &mut cache).unwrap();
    for (i, want) in [(0, 65504.0), (1, -65504.0)] {
        for at in places(&layout, 3, i) {
            let bytes = &bytes.as_bytes()[2 * at..2 * at + 2];
            assert_eq!(half::f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(), want);
        }
    }
}

#[test]
fn refuses_wrong_shapes() {
    let backend = CpuBackend::new(1).unwrap();
    let layout = KvLayout {
        dtype: DType::BF16,
        format: KvFormat::Dense,
        num_layers: 3,
        num_kv_heads: 2,
        head_dim: 16,
    };
    let mut bytes = HostBuffer::zeroed(4 * layout.block_bytes(), Pages::Default).unwrap();
    assert!(KvBlocks::new(layout, bytes.as_bytes_mut(), 3).is_err());
    for head_dim in [0, 15, 258] {
        let layout = KvLayout { head_dim, ..layout };
        assert!(KvBlocks::new(layout, bytes.as_bytes_mut(), 0).is_err());
    }
    let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 0).unwrap();
    let row = [0.0; 32];
    assert!(kv_cache_append(&backend, &row, &row, 32, &[4 * 32], &mut cache).is_err());
    assert!(kv_cache_append(&backend, &row, &row[1..], 32, &[0], &mut cache).is_err());
    assert!(kv_cache_append(&backend, &row, &row, 16, &[0, 1], &mut cache).is_err());
    kv_cache_append(&backend, &row, &row, 32, &[127], &mut cache).unwrap();
}

#[test]
fn keys_and_values_on_cuda_go_to_their_slots_bit_for_bit() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(4);
    for (dtype, num_heads, num_kv_heads, stride) in
        [(DType::BF16, 4, 4, 64), (DType::F32, 12, 12, 64), (DType::F16, 6, 2, 80)]
    {
        for (num_tokens, is_fp8) in
            [1, 5, 33, 200].into_iter().flat_map(|n| [(n, false), (n, true)])
        {
            let (size, num_blocks) = (dtype.size_bytes(), 9);
            let element = ElementType::Float(dtype);
            let (cached, cached_size) = match is_fp8 {
                true => (ElementType::Fp8, 1),
                false => (element, size),
            };
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
            let [k, v] = [0, 1].map(|_| arena.tensor(cached, &shape).expect("room"));
            let slot_tensor = arena.tensor(ElementType::I32, &[num_tokens]).expect("room");
            // Any bits are copied as they are; of numbers that are none only codes are.
            let bytes: Vec<u8> = match is_fp8 {
                true => to_bytes(&random.normals(qkv.num_elements() as usize), dtype),
                false => (0..qkv.size_bytes()).map(|_| random.next() as u8).collect(),
            };
            upload(&context, &qkv, &bytes);
            let words: Vec<u8> = slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect();
            upload(&context, &slot_tensor, &words);
            let source = |from: usize| {
                let bytes = &bytes[from * size..(from + num_kv_heads * stride) * size];
                match is_fp8 {
                    true => decode(dtype, bytes).into_iter().map(fp8::code).collect(),
                    false => bytes.to_vec(),
                }
            };
            let row = num_kv_heads * stride * cached_size;
            let before = vec![0xee_u8; num_slots * row];
            upload(&context, &k, &before);
            upload(&context, &v, &before);

            cuda::kv_cache_append(&context, &qkv, &KvSlots { k: &k, v: &v, slots: &slot_tensor })
                .expect("the operator");
            let reported = context.synchronize();
            assert_eq!(reported.is_err(), num_tokens == 33, "{reported:?}");
            let (mut want_k, mut want_v) = (before.clone(), before);
            for (token, &slot) in slots.iter().enumerate().filter(|(_, &s)| s < num_slots as u32) {
                let to = slot as usize * row..(slot as usize + 1) * row;
                let keys = (token * heads + num_heads) * stride;
                want_k[to.clone()].copy_from_slice(&source(keys));
                want_v[to].copy_from_slice(&source(keys + num_kv_heads * stride));
            }
            let what = format!("{dtype} {num_tokens} tokens, 8 bits: {is_fp8}");
            assert!(download(&context, &k) == want_k, "{what}: keys");
            assert!(download(&context, &v) == want_v, "{what}: values");
            assert!(download(&context, &qkv) == bytes, "{what}: the heads themselves");
        }
    }
}

/// Blocks of a cache of several parts go to places in two buffers and from there to other blocks;
/// what is between and beside them stays as it is.
#[test]
fn blocks_on_cuda_go_to_the_host_and_back_bit_for_bit() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(5);
    // Blocks of fewer units of 16 bytes than a block of threads has, and of more than it has in
    // flight.
    for (num_parts, heads, head_dim, num_blocks) in [(1, 1, 8, 5), (6, 2, 64, 11), (2, 8, 128, 7)] {
        let shape = [num_blocks, BLOCK_SIZE, heads, head_dim];
        let element = ElementType::Float(DType::BF16);
        let block_bytes = 2 * BLOCK_SIZE * heads * head_dim;
        let part_bytes = num_blocks * block_bytes;
        let mut arena = Arena::new(&context, num_parts * part_bytes, "a test").expect("memory");
        let tensors: Vec<_> =
            (0..num_parts).map(|_| arena.tensor(element, &shape).expect("room")).collect();
        let mut before = Vec::new();
        for tensor in &tensors {
            let bytes: Vec<u8> = (0..part_bytes).map(|_| random.next() as u8).collect();
            upload(&context, tensor, &bytes);
            before.push(bytes);
        }
        let parts = KvParts::new(tensors.iter().map(|tensor| &**tensor)).expect("one allocation");
        let place_bytes = parts.place_bytes();
        assert_eq!(place_bytes, num_parts * block_bytes);

        let buffer = |_| {
            let mut buffer =
                PinnedBuffer::new(&context, 3 * place_bytes + 64, "a test").expect("memory");
            buffer.bytes().expect("bytes").fill(0xee);
            buffer
        };
        let mut buffers = [0, 1].map(buffer);
        let copy =
            |block, buffer, place| KvCopy { block, buffer, offset: 32 + place * place_bytes };
        let last = num_blocks as u32 - 1;
        let out = [copy(last, 0, 0), copy(0, 1, 2), copy(2, 0, 2), copy(1, 1, 1)];
        kv_cache_swap(&context, &parts, &mut buffers, &out, true).expect("the operator");
        let mut want = [(); 2].map(|()| vec![0xee_u8; 3 * place_bytes + 64]);
        for copy in &out {
            for (part, bytes) in before.iter().enumerate() {
                let from = copy.block as usize * block_bytes;
                let to = copy.offset + part * block_bytes;
                want[copy.buffer][to..to + block_bytes]
                    .copy_from_slice(&bytes[from..from + block_bytes]);
            }
        }
        let what = format!("{num_parts} parts of {num_blocks} blocks of {block_bytes} bytes");
        for (buffer, want) in buffers.iter_mut().zip(&want) {
            assert!(buffer.bytes().expect("bytes") == want.as_slice(), "{what}: to the host");
        }
        for (tensor, before) in tensors.iter().zip(&before) {
            assert!(download(&context, tensor) == *before, "{what}: the cache was changed");
        }

        // To other blocks; what no copy names stays.
        let back = [copy(3, 0, 0), copy(2, 1, 2), copy(0, 1, 1)];
        kv_cache_swap(&context, &parts, &mut buffers, &back, false).expect("the operator");
        for (part, (tensor, before)) in tensors.iter().zip(&before).enumerate() {
            let mut after = before.clone();
            for copy in &back {
                let to = copy.block as usize * block_bytes;
                let from = copy.offset + part * block_bytes;
                after[to..to + block_bytes]
                    .copy_from_slice(&want[copy.buffer][from..from + block_bytes]);
            }
            assert!(download(&context, tensor) == after, "{what}: part {part} from the host");
        }

        // Impossible copies are refused, and copy nothing.
        let mut refused = |copies: &[KvCopy]| {
            let result = kv_cache_swap(&context, &parts, &mut buffers, copies, true);
            assert!(result.is_err(), "{what}: {copies:?}");
        };
        refused(&[copy(num_blocks as u32, 0, 0)]);
        refused(&[copy(0, 2, 0)]);
        refused(&[copy(0, 0, 3)]);
        refused(&[KvCopy { block: 0, buffer: 0, offset: 8 }]);
        refused(&[KvCopy { block: 0, buffer: 0, offset: 1 << 60 }]);
        refused(&vec![copy(0, 0, 0); MAX_KV_COPIES + 1]);
    }
}

/// Blocks of several sequences, of which the last are not wanted, and of none; every code, in every
/// type that is computed with.
#[test]
fn keys_and_values_of_8_bits_are_widened_exactly() {
    for (dtype, on_cuda) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        let context = match on_cuda {
            true => cuda_context(),
            false => Some(ComputeContext::cpu(1, 64 << 20).map(Arc::new).expect("a context")),
        };
        let Some(context) = context else { continue };
        let (num_blocks, block_size, heads, head_dim) = (5, 16, 2, 24);
        let block_len = block_size * heads * head_dim;
        let tensor = |element, shape: &[usize], bytes: &[u8]| {
            let tensor = DeviceTensor::temporary(&context, element, shape, "a test").expect("room");
            put(&context, &tensor, bytes);
            tensor
        };
        let codes = |step: usize| -> Vec<u8> {
            let finite = |code: u8| if code & 0x7f == 0x7f { 0 } else { code };
            (0..num_blocks * block_len).map(|i| finite((i * step % 256) as u8)).collect()
        };
        let (k_codes, v_codes) = (codes(1), codes(7));
        let cache_shape = [num_blocks, block_size, heads, head_dim];
        let k = tensor(ElementType::Fp8, &cache_shape, &k_codes);
        let v = tensor(ElementType::Fp8, &cache_shape, &v_codes);
        let words =
            |values: &[i32]| values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
        // 33 keys in blocks 4, 0 and 3; none; 16 in block 2.
        let tables = [[4, 0, 3, -1], [-1; 4], [2, -1, -1, -1]];
        let lens = [33, 0, 16];
        let table = tensor(ElementType::I32, &[3, 4], &words(tables.as_flattened()));
        let lens = tensor(ElementType::I32, &[3], &words(&lens));
        let sizes = WidenedSizes {
            dtype,
            num_seqs: 3,
            blocks_per_seq: 3,
            block_size,
            num_kv_heads: heads,
            head_dim,
        };
        let widened = Widened::new(&context, &sizes).expect("room");
        let untouched = vec![0xee_u8; widened.k.size_bytes()];
        put(&context, &widened.k, &untouched);
        put(&context, &widened.v, &untouched);
        widened.fill(&context, &k, &v, &table, &lens, None).expect("the operator");
        context.synchronize().expect("no fault");
        for (cache, codes) in [(&widened.k, &k_codes), (&widened.v, &v_codes)] {
            let got = get(&context, cache);
            for (place, block) in [4i32, 0, 3, -1, -1, -1, 2, -1, -1].into_iter().enumerate() {
                let bytes = block_len * dtype.size_bytes();
                let got = &got[place * bytes..(place + 1) * bytes];
                if block < 0 {
                    assert!(got.iter().all(|&byte| byte == 0xee), "{dtype} place {place}");
                    continue;
                }
                let codes = &codes[block as usize * block_len..][..block_len];
                let want: Vec<f64> = codes.iter().map(|&code| fp8::number(code)).collect();
                assert!(decode(dtype, got) == want, "{dtype} place {place}");
            }
        }
        let ids: Vec<i32> = (0..9).collect();
        assert!(get(&context, &widened.block_tables) == words(&ids), "{dtype} the table");
        // The last keys alone, and the others of the tile of 128 in which they begin.
        let (long, seen) = ([16 * 16 + 3], 60);
        let blocks: Vec<i32> = (0..17).map(|place| if place < 8 { -1 } else { 2 }).collect();
        let sizes = WidenedSizes { num_seqs: 1, blocks_per_seq: 17, ..sizes };
        let partly = Widened::new(&context, &sizes).expect("room");
        let untouched = vec![0xee_u8; partly.k.size_bytes()];
        put(&context, &partly.k, &untouched);
        put(&context, &partly.v, &untouched);
        let table_of_one = tensor(ElementType::I32, &[1, 17], &words(&blocks));
        let len_of_one = tensor(ElementType::I32, &[1], &words(&long));
        let outcome = partly.fill(&context, &k, &v, &table_of_one, &len_of_one, Some(seen));
        outcome.expect("the operator");
        context.synchronize().expect("no fault");
        let (got, bytes) = (get(&context, &partly.k), block_len * dtype.size_bytes());
        for (place, got) in got.chunks(bytes).enumerate() {
            let is_untouched = got.iter().all(|&byte| byte == 0xee);
            assert_eq!(is_untouched, place < 8, "{dtype} place {place}");
        }
        // A block that is not there.
        let wrong = tensor(ElementType::I32, &[3, 4], &words(&[5; 12]));
        let outcome = widened.fill(&context, &k, &v, &wrong, &lens, None);
        let reported = outcome.and_then(|()| context.synchronize());
        assert!(reported.is_err_and(|error| error.message().contains("is 5")), "{dtype}");
    }
}

/// Copies bytes to a contiguous tensor of either device.
fn put(context: &Arc<ComputeContext>, tensor: &DeviceTensor, bytes: &[u8]) {
    match context.device() {
        Device::Cuda(_) => upload(context, tensor, bytes),
        // SAFETY: memory of the test's own, of that many bytes.
        Device::Cpu => unsafe {
            assert_eq!(tensor.size_bytes(), bytes.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), tensor.data(), bytes.len());
        },
    }
}

fn get(context: &Arc<ComputeContext>, tensor: &DeviceTensor) -> Vec<u8> {
    match context.device() {
        Device::Cuda(_) => download(context, tensor),
        // SAFETY: as above.
        Device::Cpu => unsafe {
            std::slice::from_raw_parts(tensor.data(), tensor.size_bytes()).to_vec()
        },
    }
}
