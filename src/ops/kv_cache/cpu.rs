//! Writes the keys and values of new tokens into their slots of the KV cache.

use crate::backend::cpu::math::bf16_bits;
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::memory::{DType, Plain};
use crate::ops::kv_cache::layout::{KvBlocks, BLOCK_SIZE};

/// Writes keys and values into the cache. k and v are [num_tokens, num_kv_heads, head_dim] f32 with
/// token rows `row_stride` elements apart; token i goes to slot `slot_mapping[i]`: block
/// `slot / 32`, place `slot % 32`. Values are rounded to the type of the cache (to nearest even).
pub fn kv_cache_append(
    backend: &CpuBackend,
    k: &[f32],
    v: &[f32],
    row_stride: usize,
    slot_mapping: &[u32],
    cache: &mut KvBlocks<'_>,
) -> Result<()> {
    let layout = *cache.layout();
    let (num_kv_heads, head_dim) = (layout.num_kv_heads, layout.head_dim);
    let num_tokens = slot_mapping.len();
    for x in [k, v] {
        crate::ops::common::check::check_strided(
            "kv_cache_append",
            x.len(),
            num_tokens,
            row_stride,
            num_kv_heads,
            head_dim,
        )?;
    }
    let num_slots = cache.num_blocks() * BLOCK_SIZE;
    if let Some(slot) = slot_mapping.iter().find(|&&slot| slot as usize >= num_slots) {
        return Err(Error::internal(format!(
            "kv_cache_append: slot {slot} of a cache of {num_slots} slots"
        )));
    }
    let cache = &*cache;
    let append = |kv_head: usize| {
        let call = Head { k, v, row_stride, slot_mapping, cache, kv_head };
        // SAFETY: we hold the cache as `&mut`, and one task writes one head.
        unsafe {
            match layout.dtype {
                DType::F32 => call.append::<f32, 1>(|x| x),
                DType::F16 => call.append::<u16, 1>(f16_bits),
                DType::BF16 => call.append::<u16, 2>(bf16_bits),
            }
        }
    };
    // A task is a head: tokens that share a slot, or a cache line, stay on one thread.
    if num_tokens * num_kv_heads * head_dim < 32 * 1024 {
        (0..num_kv_heads).for_each(append);
        Ok(())
    } else {
        backend.parallel_for(num_kv_heads, &append)
    }
}

/// Rounds to f16, replacing numbers that are too large by its largest: an infinity in the cache
/// would become NaN where it is multiplied by the weight zero of a query that does not see it.
fn f16_bits(x: f32) -> u16 {
    const LARGEST: f32 = 65504.0;
    half::f16::from_f32_const(x.clamp(-LARGEST, LARGEST)).to_bits()
}

struct Head<'a, 'b> {
    k: &'a [f32],
    v: &'a [f32],
    row_stride: usize,
    slot_mapping: &'a [u32],
    cache: &'a KvBlocks<'b>,
    kv_head: usize,
}

impl Head<'_, '_> {
    /// `PAIR` is the number of elements that lie side by side along the summed axis.
    ///
    /// # Safety
    /// Nobody else uses this head of the cache.
    unsafe fn append<T: Plain, const PAIR: usize>(&self, convert: impl Fn(f32) -> T) {
        let layout = self.cache.layout();
        let (head_dim, value_columns) = (layout.head_dim, layout.value_columns());
        for (token, &slot) in self.slot_mapping.iter().enumerate() {
            let (block, place) = (slot as usize / BLOCK_SIZE, slot as usize % BLOCK_SIZE);
            // SAFETY: this task alone uses the head, and the references end with the loop's body.
            let (keys, values) = unsafe { self.cache.panels_mut::<T>(block, self.kv_head) };
            let start = token * self.row_stride + self.kv_head * head_dim;
            let k = &self.k[start..start + head_dim];
            let v = &self.v[start..start + head_dim];
            for (row, k) in keys.chunks_exact_mut(BLOCK_SIZE * PAIR).zip(k.chunks_exact(PAIR)) {
                for (slot, &k) in row[place * PAIR..(place + 1) * PAIR].iter_mut().zip(k) {
                    *slot = convert(k);
                }
            }
            let row = &mut values[place / PAIR * value_columns * PAIR..][..value_columns * PAIR];
            for (slot, &v) in row[place % PAIR..].iter_mut().step_by(PAIR).zip(v) {
                *slot = convert(v);
            }
        }
    }
}
