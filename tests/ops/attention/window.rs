//! Sliding windows of tensors: every form and backend, tiles that a window divides in every way, and
//! bits that depend on a row alone.

use super::tensors::{row_major, Case, FUSED_DIMS};
use crate::support::tensors::*;
use crate::support::Random;
use xserv::ffi::xserv_attention_backend::*;

/// One key, within a tile, at its borders, over several tiles, as many as there are keys, and more.
const WINDOWS: [usize; 10] = [1, 2, 15, 16, 17, 63, 64, 100, 129, 600];

#[test]
fn batched_and_paged() {
    let mut random = Random::new(90);
    let contexts = contexts();
    let lens = [(1, 1), (1, 300), (1, 2049), (17, 17), (65, 600), (130, 300), (200, 200)];
    for (turn, dim) in [64, 80, 96, 128, 256, 40].into_iter().enumerate() {
        for (index, element) in FLOATS.into_iter().enumerate() {
            for (n, (q_len, kv_len)) in lens.into_iter().enumerate() {
                if dim != 128 && (n + turn) % 3 != index {
                    continue;
                }
                let window = WINDOWS[random.below(WINDOWS.len())];
                let (num_kv_heads, ratio) = [(2, 1), (1, 4), (1, 5), (1, 12)][random.below(4)];
                let heads = (num_kv_heads * ratio, num_kv_heads, dim);
                let num_seqs = if q_len * kv_len > 4000 { 1 } else { 2 };
                let (q_lens, kv_lens) = ([q_len; 2], [kv_len; 2]);
                let lens = (&q_lens[..num_seqs], &kv_lens[..num_seqs]);
                let case = Case::in_window(&mut random, element, heads, lens, window);
                for context in &contexts {
                    let is_fused = context.name == "cpu" || FUSED_DIMS.contains(&dim);
                    let auto = XSERV_ATTENTION_AUTO;
                    case.batched(context, auto, "batched", row_major, 0);
                    case.batched(context, XSERV_ATTENTION_NAIVE, "batched", row_major, 0);
                    if is_fused {
                        case.batched(context, XSERV_ATTENTION_FLASH, "batched", row_major, 0);
                        let blocks = ([16, 32, 64][random.below(3)], random.below(2) == 0);
                        case.paged(context, &mut random, auto, blocks);
                    }
                }
            }
        }
    }
}

/// Every window over prompts of all types, of lengths that tiles do not divide.
#[test]
fn prompts() {
    let mut random = Random::new(91);
    let contexts = contexts();
    let lens = ([300, 1, 129, 64, 0, 200], [300, 333, 515, 64, 9, 700]);
    for (n, window) in WINDOWS.into_iter().enumerate() {
        for (m, element) in FLOATS.into_iter().enumerate() {
            let heads = [(4, 2, 128), (2, 1, 64), (2, 2, [80, 96, 256][n % 3])][(n + m) % 3];
            let case = Case::in_window(&mut random, element, heads, (&lens.0, &lens.1), window);
            let poisoned = case.poisoned(&[2, 4]);
            for context in &contexts {
                case.packed(context, XSERV_ATTENTION_AUTO);
                poisoned.packed(context, XSERV_ATTENTION_AUTO);
                case.paged(context, &mut random, XSERV_ATTENTION_FLASH, (32, true));
                case.paged(context, &mut random, XSERV_ATTENTION_AUTO, (16, true));
            }
        }
    }
}

/// Long contexts, of which a window leaves less than a chunk of keys, one, and several.
#[test]
fn decoding() {
    let mut random = Random::new(92);
    let contexts = contexts();
    let q_lens = [1, 1, 1, 0, 1, 1, 1];
    let kv_lens = [1, 0, 256, 40, 257, 3001, 33];
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for (m, element) in FLOATS.into_iter().enumerate() {
            // Each type and length takes a third of them.
            for window in
                [1, 31, 32, 250, 256, 300, 700, 1500].into_iter().skip((n + m) % 3).step_by(3)
            {
                let heads = [(8, 1, dim), (2, 2, dim), (9, 1, dim)][n % 3];
                let lens = (&q_lens[..], &kv_lens[..]);
                let case = Case::in_window(&mut random, element, heads, lens, window);
                let stored = Case::in_window(&mut random, element, heads, lens, window);
                let stored = stored.stored_as(Type::Fp8);
                for context in &contexts {
                    let found = case.packed(context, XSERV_ATTENTION_SPLIT_KV);
                    let blocks = ([16, 64][n % 2], true);
                    let paged = case.paged(context, &mut random, XSERV_ATTENTION_SPLIT_KV, blocks);
                    // The host takes runs of keys that lie together.
                    assert!(context.name == "cpu" || paged == found, "paged is not packed");
                    case.paged(context, &mut random, XSERV_ATTENTION_FLASH, (32, true));
                    stored.paged(context, &mut random, XSERV_ATTENTION_AUTO, blocks);
                }
            }
        }
    }
}

/// A cache of 8-bit floats under prompts, whose visible keys are widened.
#[test]
fn prompts_over_a_cache_of_8_bits() {
    let mut random = Random::new(93);
    let contexts = contexts();
    let ragged = ([130, 1, 0, 64], [130, 33, 9, 515]);
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for (element, window) in FLOATS.into_iter().zip([20, 64, 200]) {
            let heads = [(4, 2, dim), (5, 1, dim)][n % 2];
            let lens = (&ragged.0[..], &ragged.1[..]);
            let case = Case::in_window(&mut random, element, heads, lens, window);
            let case = case.stored_as(Type::Fp8);
            for context in &contexts {
                case.paged(context, &mut random, XSERV_ATTENTION_AUTO, (32, true));
            }
        }
    }
}

/// A row's bits are the same whatever rows are beside it: those before it in a tile see other keys,
/// and bring tiles of keys that it does not see. The host's tiles of tensors depend on their size.
#[test]
fn a_row_has_the_same_bits_beside_any_others_on_cuda() {
    let Some(context) = cuda() else { return };
    let mut random = Random::new(94);
    let lens = ([400, 200], [400, 1900]);
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for (m, element) in FLOATS.into_iter().enumerate() {
            for window in [1, 50, 64, 127, 200, 260] {
                let heads = [(4, 2, dim), (3, 1, dim)][(n + m) % 2];
                let lens = (&lens.0[..], &lens.1[..]);
                let case = Case::in_window(&mut random, element, heads, lens, window);
                let row = heads.0 * dim;
                let whole = case.packed(&context, XSERV_ATTENTION_FLASH);
                for count in [1, 37, 64, 130] {
                    let part = case.last_queries(count).packed(&context, XSERV_ATTENTION_FLASH);
                    let ends = [400 * row, 600 * row];
                    let (first, second) = part.split_at(count * row);
                    let what = format!("{element:?} {heads:?} window {window}, {count} queries");
                    assert!(first == &whole[ends[0] - count * row..ends[0]], "{what}");
                    assert!(second == &whole[ends[1] - count * row..ends[1]], "{what}, second");
                }
            }
        }
    }
}
