//! Writes the keys and values of new tokens into their slots of the KV cache.

use crate::backend::cpu::math::{bf16_bits, fp8_code};
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::memory::{DType, Plain};
use crate::ops::kv_cache::layout::{KvBlocks, KvFormat, BLOCK_SIZE, MAX_HEAD_DIM};
use std::ops::Range;

/// Writes keys and values into the cache. k and v are [num_tokens, num_kv_heads, head_dim] f32 with
/// token rows `row_stride` elements apart; token i goes to slot `slot_mapping[i]`: block
/// `slot / 32`, place `slot % 32`. Values are rounded to what the cache stores (to nearest even).
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
            match (layout.format, layout.dtype) {
                (KvFormat::Fp8, DType::BF16) => call.append::<u8, 2>(0..num_tokens, fp8_code),
                (KvFormat::Fp8, _) => call.append::<u8, 1>(0..num_tokens, fp8_code),
                (KvFormat::Dense, DType::F32) => call.append::<f32, 1>(0..num_tokens, |x| x),
                (KvFormat::Dense, DType::F16) => call.append::<u16, 1>(0..num_tokens, f16_bits),
                (KvFormat::Dense, DType::BF16) => backend.run(Bf16Head(call)),
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

/// The tokens whose keys and values are written together.
const RUN: usize = 16;

/// A head of a bf16 cache. The keys of runs of tokens with slots side by side are transposed in
/// registers.
struct Bf16Head<'a, 'b>(Head<'a, 'b>);

impl Kernel for Bf16Head<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let call = self.0;
        let head_dim = call.cache.layout().head_dim;
        let mut token = 0;
        while token < call.slot_mapping.len() {
            let run = call.slot_mapping[token..].first_chunk::<RUN>().filter(|run| {
                let is_run = run.iter().zip(run[0]..).all(|(&slot, next)| slot == next);
                is_run && (run[0] as usize).is_multiple_of(RUN)
            });
            // SAFETY: the caller of `append` has nobody else use this head; the instruction set is
            // there.
            unsafe {
                if let Some(run) = run.filter(|_| head_dim.is_multiple_of(2 * RUN)) {
                    call.append_run::<S>(token, run[0] as usize);
                    token += RUN;
                } else {
                    call.append::<u16, 2>(token..token + 1, bf16_bits);
                    token += 1;
                }
            }
        }
    }
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
    #[inline(always)]
    unsafe fn append<T: Plain, const PAIR: usize>(
        &self,
        tokens: Range<usize>,
        convert: impl Fn(f32) -> T,
    ) {
        let layout = self.cache.layout();
        let (head_dim, value_columns) = (layout.head_dim, layout.value_columns());
        for (token, &slot) in
            self.slot_mapping.iter().enumerate().take(tokens.end).skip(tokens.start)
        {
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

    /// Appends [`RUN`] tokens from `token` on, whose slots are those from `slot` on, a multiple of
    /// [`RUN`], to a cache of bf16 whose head_dim is a multiple of twice as many.
    ///
    /// # Safety
    /// As for [`Head::append`]; the instruction set is there.
    #[inline(always)]
    unsafe fn append_run<S: Simd>(&self, token: usize, slot: usize) {
        let layout = self.cache.layout();
        let (head_dim, value_columns) = (layout.head_dim, layout.value_columns());
        let (block, place) = (slot / BLOCK_SIZE, slot % BLOCK_SIZE);
        // SAFETY: this task alone uses the head.
        let (keys, values) = unsafe { self.cache.panels_mut::<u16>(block, self.kv_head) };
        let first = token * self.row_stride + self.kv_head * head_dim;
        let row = |i: usize| first + i * self.row_stride..first + i * self.row_stride + head_dim;
        let mut rounded = [[0_u16; MAX_HEAD_DIM]; RUN];
        for (i, rounded) in rounded.iter_mut().enumerate() {
            round::<S>(&self.k[row(i)], rounded);
        }
        // Pairs of elements are words: [tokens][pairs] becomes [pairs][tokens].
        for (square, keys) in keys.chunks_exact_mut(RUN * 2 * BLOCK_SIZE).enumerate() {
            // SAFETY: a square is 16 pairs of 16 tokens: of rows of head_dim elements that the
            // square lies within, and in a panel of pairs of BLOCK_SIZE words, from `place` on.
            unsafe {
                let rows = std::array::from_fn(|i| {
                    S::Vector::load(rounded[i].as_ptr().add(square * 2 * RUN).cast())
                });
                for (i, words) in S::Vector::transpose(rows).into_iter().enumerate() {
                    words.store(keys.as_mut_ptr().add(2 * (i * BLOCK_SIZE + place)).cast());
                }
            }
        }
        for (i, rounded) in rounded.iter_mut().enumerate() {
            round::<S>(&self.v[row(i)], rounded);
        }
        let values = values[place * value_columns..].chunks_exact_mut(2 * value_columns);
        for (pair, to) in rounded.chunks_exact(2).zip(values) {
            let both = pair[0].iter().zip(&pair[1]);
            for (to, (&first, &second)) in to.chunks_exact_mut(2).zip(both) {
                (to[0], to[1]) = (first, second);
            }
        }
    }
}

/// Rounds values to bf16, whole sixteens of them.
#[inline(always)]
fn round<S: Simd>(from: &[f32], to: &mut [u16]) {
    for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(16)) {
        // SAFETY: sixteen are read and written; the callers' instruction set is there.
        unsafe {
            let values = S::Vector::load(from.as_ptr()).round_to_bf16();
            values.store_high_halves(to.as_mut_ptr());
        }
    }
}
