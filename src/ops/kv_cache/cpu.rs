//! Writes the keys and values of new tokens into their slots of the KV cache.

use crate::backend::cpu::math::{bf16_bits, fp8_code};
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::{CpuBackend, SendPointer};
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
    // SAFETY: `check_strided` has found the rows, which are only read while this lasts.
    let append = unsafe { Append::new(k.as_ptr(), v.as_ptr(), row_stride, slot_mapping, cache)? };
    // SAFETY: one task writes one head.
    let write = |kv_head| unsafe { append.write(backend, 0..num_tokens, kv_head..kv_head + 1) };
    // A task is a head: tokens that share a slot, or a cache line, stay on one thread.
    if num_tokens * num_kv_heads * head_dim < 32 * 1024 {
        (0..num_kv_heads).for_each(write);
        Ok(())
    } else {
        backend.parallel_for(num_kv_heads, &write)
    }
}

/// Keys and values on their way into a cache, which nobody else uses meanwhile.
pub(in crate::ops) struct Append<'a, 'b> {
    k: SendPointer<f32>,
    v: SendPointer<f32>,
    row_stride: usize,
    slot_mapping: &'a [u32],
    cache: &'a KvBlocks<'b>,
}

impl<'a, 'b> Append<'a, 'b> {
    /// # Safety
    /// `k` and `v` have rows of all heads of the cache, `row_stride` elements apart, for each slot. They
    /// are alive as long as this, and nobody writes those of the tokens that are passed to
    /// [`Append::write`] during its call.
    pub unsafe fn new(
        k: *const f32,
        v: *const f32,
        row_stride: usize,
        slot_mapping: &'a [u32],
        cache: &'a mut KvBlocks<'b>,
    ) -> Result<Self> {
        let num_slots = cache.num_blocks() * BLOCK_SIZE;
        if let Some(slot) = slot_mapping.iter().find(|&&slot| slot as usize >= num_slots) {
            return Err(Error::internal(format!(
                "kv_cache_append: slot {slot} of a cache of {num_slots} slots"
            )));
        }
        let (k, v) = (SendPointer(k.cast_mut()), SendPointer(v.cast_mut()));
        Ok(Append { k, v, row_stride, slot_mapping, cache })
    }

    /// Writes some heads of some tokens.
    ///
    /// # Safety
    /// Nobody else uses these heads of the blocks that the slots of these tokens lie in.
    pub unsafe fn write(&self, backend: &CpuBackend, tokens: Range<usize>, kv_heads: Range<usize>) {
        let layout = self.cache.layout();
        for kv_head in kv_heads {
            let call = Head { all: self, kv_head };
            let tokens = tokens.clone();
            // SAFETY: passed on to the caller.
            unsafe {
                match (layout.format, layout.dtype) {
                    (KvFormat::Fp8, DType::BF16) => call.append::<u8, 2>(tokens, fp8_code),
                    (KvFormat::Fp8, _) => call.append::<u8, 1>(tokens, fp8_code),
                    (KvFormat::Dense, DType::F32) => call.append::<f32, 1>(tokens, |x| x),
                    (KvFormat::Dense, DType::F16) => call.append::<u16, 1>(tokens, f16_bits),
                    (KvFormat::Dense, DType::BF16) => backend.run(Bf16Head(call, tokens)),
                }
            }
        }
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
struct Bf16Head<'a, 'b>(Head<'a, 'b>, Range<usize>);

impl Kernel for Bf16Head<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Bf16Head(call, tokens) = self;
        let head_dim = call.all.cache.layout().head_dim;
        let slots = call.all.slot_mapping.get(..tokens.end).unwrap_or_default();
        let mut token = tokens.start;
        while token < slots.len() {
            let run = slots[token..].first_chunk::<RUN>().filter(|run| {
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

#[derive(Clone, Copy)]
struct Head<'a, 'b> {
    all: &'a Append<'a, 'b>,
    kv_head: usize,
}

impl Head<'_, '_> {
    /// Returns the key and the value of a token.
    #[inline(always)]
    fn rows(&self, token: usize) -> (&[f32], &[f32]) {
        let Append { k, v, row_stride, cache, .. } = self.all;
        let head_dim = cache.layout().head_dim;
        let start = token * row_stride + self.kv_head * head_dim;
        // SAFETY: `Append::new` has been told that every token has a row of all heads, and that nobody
        // writes it now.
        unsafe {
            (
                std::slice::from_raw_parts(k.get().add(start), head_dim),
                std::slice::from_raw_parts(v.get().add(start), head_dim),
            )
        }
    }

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
        let value_columns = self.all.cache.layout().value_columns();
        for (token, &slot) in
            self.all.slot_mapping.iter().enumerate().take(tokens.end).skip(tokens.start)
        {
            let (block, place) = (slot as usize / BLOCK_SIZE, slot as usize % BLOCK_SIZE);
            // SAFETY: this task alone uses the head, and the references end with the loop's body.
            let (keys, values) = unsafe { self.all.cache.panels_mut::<T>(block, self.kv_head) };
            let (k, v) = self.rows(token);
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
        let value_columns = self.all.cache.layout().value_columns();
        let (block, place) = (slot / BLOCK_SIZE, slot % BLOCK_SIZE);
        // SAFETY: this task alone uses the head.
        let (keys, values) = unsafe { self.all.cache.panels_mut::<u16>(block, self.kv_head) };
        let mut rounded = [[0_u16; MAX_HEAD_DIM]; RUN];
        for (i, rounded) in rounded.iter_mut().enumerate() {
            round::<S>(self.rows(token + i).0, rounded);
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
            round::<S>(self.rows(token + i).1, rounded);
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
