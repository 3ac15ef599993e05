//! Attention of tensors over a block cache of 8-bit floats, by every backend that serves it.

use super::tensors::{call, options, Case, FUSED_DIMS};
use crate::support::tensors::*;
use crate::support::Random;
use xserv::ffi::xserv_attention_backend::*;
use xserv::ffi::xserv_status::*;

/// One query a sequence, or none: kernels that read 8-bit floats themselves.
#[test]
fn decoding() {
    let mut random = Random::new(182);
    let contexts = contexts();
    let q_lens = [1, 1, 1, 0, 1, 1, 1];
    let kv_lens = [1, 0, 256, 40, 257, 1100, 33];
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for element in FLOATS {
            for heads in [[(8, 1, dim), (4, 2, dim)], [(2, 2, dim), (9, 1, dim)]][n % 2] {
                let lens = (&q_lens[..], &kv_lens[..]);
                let case = Case::new(&mut random, element, heads, lens, n % 2 == 0);
                let case = case.stored_as(Type::Fp8);
                for context in &contexts {
                    let blocks = ([16, 32, 64][n % 3], true);
                    let split = case.paged(context, &mut random, XSERV_ATTENTION_SPLIT_KV, blocks);
                    let auto = case.paged(context, &mut random, XSERV_ATTENTION_AUTO, blocks);
                    assert_eq!(split, auto, "{element:?} {heads:?} on {}", context.name);
                }
            }
        }
    }
}

/// Prompts, whose keys and values are widened: in one part and in several, packed and not.
#[test]
fn prompts() {
    let mut random = Random::new(188);
    let contexts = contexts();
    let ragged = ([130, 1, 0, 64], [130, 33, 9, 515]);
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for element in FLOATS {
            let heads = [(4, 2, dim), (5, 1, dim)][n % 2];
            let flash = XSERV_ATTENTION_FLASH;
            let case = Case::new(&mut random, element, heads, (&ragged.0, &ragged.1), true);
            let case = case.stored_as(Type::Fp8);
            let even = Case::new(&mut random, element, heads, (&[17; 3], &[217; 3]), n % 2 == 0);
            let even = even.stored_as(Type::Fp8);
            for context in &contexts {
                case.paged(context, &mut random, flash, (32, true));
                even.paged(context, &mut random, XSERV_ATTENTION_AUTO, (16, false));
            }
        }
    }
    // Three sequences of which two at a time would be too much, with and without packed queries.
    for (packed, num_queries) in [(true, 2), (false, 2)] {
        let lens = (&[num_queries; 3][..], &[4200, 70, 300][..]);
        let lens = if packed { lens } else { (lens.0, &[4200; 3][..]) };
        let case = Case::new(&mut random, Type::F32, (8, 8, 128), lens, true);
        let case = case.stored_as(Type::Fp8);
        for context in &contexts {
            case.paged(context, &mut random, XSERV_ATTENTION_AUTO, (32, packed));
        }
    }
}

/// Numbers of 8 bits are for a block cache alone, of which keys and values are both.
#[test]
fn refusals() {
    for context in &contexts() {
        let new = |element, shape: &[i64]| TestTensor::blank(context, element, shape);
        let (q, out) = (new(Type::F32, &[1, 1, 2, 64]), new(Type::F32, &[1, 1, 2, 64]));
        let (k, v) = (new(Type::Fp8, &[1, 16, 2, 64]), new(Type::Fp8, &[1, 16, 2, 64]));
        let dense = options(false, XSERV_ATTENTION_AUTO);
        assert_eq!(call(context, &dense, [&q, &k, &v, &out]), XSERV_STATUS_UNSUPPORTED);
        assert!(message().contains("block cache"), "{}", message());
        let tables = TestTensor::new(context, Type::I32, &[1, 1], &[0.0]);
        let lens = TestTensor::new(context, Type::I32, &[1], &[3.0]);
        let (tables, lens) = (tables.view(), lens.view());
        let mut paged = options(false, XSERV_ATTENTION_AUTO);
        (paged.block_tables, paged.context_lens) = (&tables, &lens);
        let wide = new(Type::F32, &[1, 16, 2, 64]);
        refused(call(context, &paged, [&q, &k, &wide, &out]));
        refused(call(context, &paged, [&q, &wide, &v, &out]));
        let narrow = new(Type::Fp8, &[1, 1, 2, 64]);
        refused(call(context, &paged, [&narrow, &k, &v, &out]));
    }
}

/// What the table says is not followed beyond the cache.
#[test]
fn bad_blocks() {
    for context in &contexts() {
        for q_len in [1, 5] {
            let new = |shape: &[i64]| {
                let len: i64 = shape.iter().product();
                TestTensor::new(context, Type::F32, shape, &vec![1.0; len as usize])
            };
            let (q, out) = (new(&[1, q_len, 2, 64]), new(&[1, q_len, 2, 64]));
            let cache = || TestTensor::new(context, Type::Fp8, &[2, 16, 2, 64], &[1.0; 4096]);
            let (k, v) = (cache(), cache());
            let tables = TestTensor::new(context, Type::I32, &[1, 2], &[1.0, 2.0]);
            let lens = TestTensor::new(context, Type::I32, &[1], &[20.0]);
            let (tables, lens) = (tables.view(), lens.view());
            let mut paged = options(true, XSERV_ATTENTION_AUTO);
            (paged.block_tables, paged.context_lens) = (&tables, &lens);
            let status = call(context, &paged, [&q, &k, &v, &out]);
            let seen = match context.name {
                "cpu" => status,
                _ => xserv::ffi::xserv_context_synchronize(context.handle),
            };
            refused(seen);
            assert!(message().contains("is 2"), "{}", message());
        }
    }
}
