//! Attention over keys and values where they lie, with grouped query heads:
//! `out = softmax(scale * q K^T) V` for each query head h, over kv head
//! `h / (num_heads / num_kv_heads)`.
//!
//! With `causal` query i of a sequence sees keys `0..=kv_len - q_len + i`, of these the last
//! `window` alone if there is one, otherwise all of them.
//! The result is computed in f32 and rounded once. A query that sees no key gives zeros.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_filled, try_with_capacity, Error, Result};
use crate::ops::common::storage::Storage;
use crate::ops::kv_cache::layout::MAX_HEAD_DIM;
use crate::ops::softmax::cpu::softmax_in_place;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where the heads of a tensor lie: element `i` of head h of token t of sequence (or block) s is at
/// `s * seq + t * token + h * head + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadStrides {
    /// The distance in elements from sequence to sequence, or from block to block of a paged cache.
    /// Not used for ragged tensors, where a sequence begins at a token.
    pub seq: usize,
    /// The distance in elements from token to token.
    pub token: usize,
    /// The distance in elements from head to head.
    pub head: usize,
}

impl HeadStrides {
    /// Returns the strides of [seqs, tokens, heads, head_dim] without gaps. For tests.
    #[doc(hidden)]
    pub fn by_token(num_tokens: usize, num_heads: usize, head_dim: usize) -> Self {
        let token = num_heads.saturating_mul(head_dim);
        HeadStrides { seq: num_tokens.saturating_mul(token), token, head: head_dim }
    }

    /// Returns the strides of [seqs, heads, tokens, head_dim] without gaps. For tests.
    #[doc(hidden)]
    pub fn by_head(num_tokens: usize, num_heads: usize, head_dim: usize) -> Self {
        let head = num_tokens.saturating_mul(head_dim);
        HeadStrides { seq: num_heads.saturating_mul(head), token: head_dim, head }
    }
}

/// Which tokens belong together.
#[derive(Clone, Copy, Debug)]
pub enum Sequences<'a> {
    /// Sequences of equal lengths.
    Batch {
        /// The number of sequences.
        num_seqs: usize,
        /// The number of queries of each sequence.
        q_len: usize,
        /// The number of keys of each sequence.
        kv_len: usize,
    },
    /// Sequences one after another.
    Ragged {
        /// The first query of each sequence, [num_seqs + 1]; the first entry is 0, the last the
        /// number of queries.
        cu_seqlens_q: &'a [i32],
        /// The first key of each sequence, [num_seqs + 1]; the first entry is 0, the last the
        /// number of keys.
        cu_seqlens_k: &'a [i32],
    },
    /// Queries one sequence after another; keys and values in blocks, [num_blocks, block_size,
    /// num_kv_heads, head_dim].
    Paged {
        /// The first query of each sequence, [num_seqs + 1]; the first entry is 0, the last the
        /// number of queries.
        cu_seqlens_q: &'a [i32],
        /// The number of keys of each sequence, [num_seqs].
        context_lens: &'a [i32],
        /// The blocks of each sequence in order, [num_seqs, max_blocks_per_seq].
        block_tables: &'a [i32],
        /// The number of entries of a row of `block_tables`.
        max_blocks_per_seq: usize,
        /// The number of tokens of a block.
        block_size: usize,
    },
}

/// The operands of attention, except for the output.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, T> {
    /// Queries.
    pub q: &'a [T],
    /// Where the queries lie.
    pub q_strides: HeadStrides,
    /// Keys.
    pub k: &'a [T],
    /// Where the keys lie.
    pub k_strides: HeadStrides,
    /// Values.
    pub v: &'a [T],
    /// Where the values lie.
    pub v_strides: HeadStrides,
    /// Where the output is to lie.
    pub out_strides: HeadStrides,
    /// The number of query heads.
    pub num_heads: usize,
    /// The number of key and value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// The number of elements of a head: up to 256.
    pub head_dim: usize,
    /// The factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Whether a query sees no later keys; then no sequence may have more queries than keys.
    pub causal: bool,
    /// The most keys that a query sees; all of them if `None`. Only with `causal`, or with one query
    /// a sequence.
    pub window: Option<usize>,
    /// Which tokens belong together.
    pub sequences: Sequences<'a>,
}

/// One sequence, resolved and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence<'a> {
    pub q_len: usize,
    pub kv_len: usize,
    /// The position of the first query's first head, in elements of q and out.
    pub q_start: usize,
    pub out_start: usize,
    /// The same position in k and v; not used with blocks.
    pub k_start: usize,
    pub v_start: usize,
    pub blocks: Option<(&'a [i32], usize)>,
}

impl Sequence<'_> {
    /// Returns the number of keys that query i sees.
    #[inline(always)]
    pub fn visible(&self, causal: bool, i: usize) -> usize {
        if causal {
            self.kv_len - self.q_len + i + 1
        } else {
            self.kv_len
        }
    }

    /// Returns where key and value j of head 0 lie, and how many follow at the token strides.
    #[inline(always)]
    pub fn key<T>(&self, attention: &Attention<'_, T>, j: usize) -> (usize, usize, usize) {
        let (k, v) = (&attention.k_strides, &attention.v_strides);
        match self.blocks {
            None => (self.k_start + j * k.token, self.v_start + j * v.token, self.kv_len - j),
            Some((table, size)) => {
                // This is not negative, which has been checked.
                let (block, place) = (table[j / size] as usize, j % size);
                (
                    block * k.seq + place * k.token,
                    block * v.seq + place * v.token,
                    (size - place).min(self.kv_len - j),
                )
            }
        }
    }
}

fn wrong<R>(what: String) -> Result<R> {
    Err(Error::internal(format!("attention: {what}")))
}

/// Returns `start + (tokens - 1) * token + (heads - 1) * head + head_dim`, if that is at most
/// `len`.
fn check_extent(
    name: &str,
    len: usize,
    start: Option<usize>,
    strides: &HeadStrides,
    tokens: usize,
    heads: usize,
    head_dim: usize,
) -> Result<()> {
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let end = || {
        let tokens = (tokens - 1).checked_mul(strides.token)?;
        let heads = (heads - 1).checked_mul(strides.head)?;
        start?.checked_add(tokens)?.checked_add(heads)?.checked_add(head_dim)
    };
    match end() {
        Some(end) if end <= len => Ok(()),
        _ => wrong(format!(
            "{name} of {len} values ends before {tokens} tokens of {heads} x {head_dim} from {start:?} \
             with strides {strides:?}"
        )),
    }
}

/// Whether no two heads of the output share elements.
fn is_disjoint(counts: [usize; 3], strides: &HeadStrides, head_dim: usize) -> bool {
    let mut axes =
        [(strides.seq, counts[0]), (strides.token, counts[1]), (strides.head, counts[2])];
    axes.sort_unstable();
    let mut extent = head_dim;
    for (stride, count) in axes.into_iter().filter(|&(_, count)| count > 1) {
        let last = (count - 1).checked_mul(stride).and_then(|last| last.checked_add(extent));
        match last {
            Some(end) if stride >= extent => extent = end,
            _ => return false,
        }
    }
    true
}

/// Returns the lengths and starts of ragged sequences, given their ends.
fn ragged(name: &str, ends: &[i32], seq: usize) -> Result<(usize, usize)> {
    match (usize::try_from(ends[seq]), usize::try_from(ends[seq + 1])) {
        (Ok(start), Ok(end)) if start <= end && (seq > 0 || start == 0) => Ok((start, end - start)),
        _ => wrong(format!("{name} of sequence {seq}: {} to {}", ends[seq], ends[seq + 1])),
    }
}

/// Checks everything and resolves the sequences.
pub(crate) fn resolve<'a, T>(
    attention: &Attention<'a, T>,
    out_len: usize,
) -> Result<Vec<Sequence<'a>>> {
    let Attention { num_heads, num_kv_heads, head_dim, .. } = *attention;
    if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
        return wrong(format!("{num_heads} heads over {num_kv_heads} kv heads"));
    }
    if head_dim == 0 || head_dim > MAX_HEAD_DIM {
        return wrong(format!("head_dim {head_dim} is not 1 to {MAX_HEAD_DIM}"));
    }
    let (q, k, v) = (&attention.q_strides, &attention.k_strides, &attention.v_strides);
    let out = &attention.out_strides;
    let num_seqs = match attention.sequences {
        Sequences::Batch { num_seqs, .. } => num_seqs,
        Sequences::Ragged { cu_seqlens_q, cu_seqlens_k } => {
            if cu_seqlens_q.is_empty() || cu_seqlens_q.len() != cu_seqlens_k.len() {
                let (q, k) = (cu_seqlens_q.len(), cu_seqlens_k.len());
                return wrong(format!("{q} ends of queries and {k} of keys"));
            }
            cu_seqlens_q.len() - 1
        }
        Sequences::Paged {
            cu_seqlens_q,
            context_lens,
            block_tables,
            max_blocks_per_seq,
            block_size,
        } => {
            if cu_seqlens_q.len() != context_lens.len() + 1
                || context_lens.len().checked_mul(max_blocks_per_seq) != Some(block_tables.len())
                || block_size == 0
            {
                return wrong(format!(
                    "{} ends of queries, {} contexts, {} block table entries in rows of \
                     {max_blocks_per_seq}, blocks of {block_size}",
                    cu_seqlens_q.len(),
                    context_lens.len(),
                    block_tables.len()
                ));
            }
            context_lens.len()
        }
    };
    let mut sequences = try_with_capacity(num_seqs, "attention sequences")?;
    let mut num_queries = 0;
    for seq in 0..num_seqs {
        let times = |stride: usize, index: usize| index.saturating_mul(stride);
        let mut s = Sequence {
            q_len: 0,
            kv_len: 0,
            q_start: 0,
            out_start: 0,
            k_start: 0,
            v_start: 0,
            blocks: None,
        };
        match attention.sequences {
            Sequences::Batch { q_len, kv_len, .. } => {
                (s.q_len, s.kv_len) = (q_len, kv_len);
                (s.q_start, s.out_start) = (times(q.seq, seq), times(out.seq, seq));
                (s.k_start, s.v_start) = (times(k.seq, seq), times(v.seq, seq));
                num_queries = q_len;
            }
            Sequences::Ragged { cu_seqlens_q, .. } | Sequences::Paged { cu_seqlens_q, .. } => {
                let (first, len) = ragged("queries", cu_seqlens_q, seq)?;
                (s.q_start, s.out_start) = (times(q.token, first), times(out.token, first));
                s.q_len = len;
                num_queries = first + len;
            }
        }
        match attention.sequences {
            Sequences::Batch { .. } => {}
            Sequences::Ragged { cu_seqlens_k, .. } => {
                let (first, len) = ragged("keys", cu_seqlens_k, seq)?;
                (s.k_start, s.v_start) = (times(k.token, first), times(v.token, first));
                s.kv_len = len;
            }
            Sequences::Paged {
                context_lens, block_tables, max_blocks_per_seq, block_size, ..
            } => {
                s.kv_len = usize::try_from(context_lens[seq]).unwrap_or(usize::MAX);
                let table = &block_tables[seq * max_blocks_per_seq..][..max_blocks_per_seq];
                if s.kv_len.div_ceil(block_size) > table.len() {
                    return wrong(format!(
                        "sequence {seq}: a context of {} in {} blocks of {block_size}",
                        context_lens[seq],
                        table.len()
                    ));
                }
                s.blocks = Some((table, block_size));
                for (index, &block) in table[..s.kv_len.div_ceil(block_size)].iter().enumerate() {
                    let tokens = block_size.min(s.kv_len - index * block_size);
                    let block = usize::try_from(block).unwrap_or(usize::MAX);
                    for (name, data, strides) in [("k", attention.k, k), ("v", attention.v, v)] {
                        let start = block.checked_mul(strides.seq);
                        check_extent(
                            name,
                            data.len(),
                            start,
                            strides,
                            tokens,
                            num_kv_heads,
                            head_dim,
                        )?;
                    }
                }
            }
        }
        if attention.causal && s.q_len > s.kv_len {
            return wrong(format!("sequence {seq}: {} queries, {} keys", s.q_len, s.kv_len));
        }
        let starts = [
            ("q", attention.q.len(), s.q_start, q, s.q_len, num_heads),
            ("out", out_len, s.out_start, out, s.q_len, num_heads),
            ("k", attention.k.len(), s.k_start, k, s.kv_len, num_kv_heads),
            ("v", attention.v.len(), s.v_start, v, s.kv_len, num_kv_heads),
        ];
        let own = if s.blocks.is_some() { 2 } else { 4 };
        for (name, len, start, strides, tokens, heads) in starts.into_iter().take(own) {
            check_extent(name, len, Some(start), strides, tokens, heads, head_dim)?;
        }
        sequences.push(s);
    }
    let num_out_seqs =
        if matches!(attention.sequences, Sequences::Batch { .. }) { num_seqs } else { 1 };
    if !is_disjoint([num_out_seqs, num_queries, num_heads], out, head_dim) {
        return wrong(format!("heads of the output overlap: {out:?}"));
    }
    Ok(sequences)
}

/// Computes all scores of a query first, then their softmax, then the sum of values: the reference
/// of [`super::attention_flash`].
pub fn attention_naive<T: Storage>(
    backend: &CpuBackend,
    attention: &Attention<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let sequences = resolve(attention, out.len())?;
    let longest = sequences.iter().map(|s| s.kv_len).max().unwrap_or(0);
    let num_lanes = backend.num_threads();
    let mut scores = try_filled(num_lanes.saturating_mul(longest), 0.0f32, "attention scores")?;
    let scores = SendPointer(scores.as_mut_ptr());
    let out = SendPointer(out.as_mut_ptr());
    let next_task = AtomicUsize::new(0);
    backend.parallel_for(num_lanes, &|lane| {
        // SAFETY: the buffer has num_lanes parts of this length; lane numbers are given out once.
        let scores =
            unsafe { std::slice::from_raw_parts_mut(scores.get().add(lane * longest), longest) };
        loop {
            let task = next_task.fetch_add(1, Ordering::Relaxed);
            let (seq, head) =
                (task / attention.num_heads.max(1), task % attention.num_heads.max(1));
            let Some(sequence) = sequences.get(seq).filter(|_| attention.num_heads > 0) else {
                return;
            };
            backend.run(NaiveHead { attention, sequence, head, scores, out: &out });
        }
    })
}

/// Computes one head of one sequence.
struct NaiveHead<'a, T> {
    attention: &'a Attention<'a, T>,
    sequence: &'a Sequence<'a>,
    head: usize,
    scores: &'a mut [f32],
    out: &'a SendPointer<T>,
}

impl<T: Storage> Kernel for NaiveHead<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let NaiveHead { attention, sequence, head, scores, out } = self;
        let Attention { head_dim, q_strides, k_strides, v_strides, out_strides, .. } = *attention;
        let kv_head = head / (attention.num_heads / attention.num_kv_heads);
        for i in 0..sequence.q_len {
            let q = sequence.q_start + i * q_strides.token + head * q_strides.head;
            let q = &attention.q[q..q + head_dim];
            let visible = sequence.visible(attention.causal, i);
            let first = attention.window.map_or(0, |window| visible.saturating_sub(window));
            let scores = &mut scores[..visible - first];
            for (j, score) in scores.iter_mut().enumerate() {
                let k = sequence.key(attention, first + j).0 + kv_head * k_strides.head;
                let pairs = q.iter().zip(&attention.k[k..k + head_dim]);
                *score = attention.scale * pairs.map(|(q, k)| q.to_f32() * k.to_f32()).sum::<f32>();
            }
            softmax_in_place::<S>(scores);
            let mut sums = [0.0f32; MAX_HEAD_DIM];
            for (j, &weight) in scores.iter().enumerate() {
                let v = sequence.key(attention, first + j).1 + kv_head * v_strides.head;
                for (sum, v) in sums.iter_mut().zip(&attention.v[v..v + head_dim]) {
                    *sum = S::mul_add(weight, v.to_f32(), *sum);
                }
            }
            let at = sequence.out_start + i * out_strides.token + head * out_strides.head;
            // SAFETY: `resolve` has found that this lies in `out` and shares nothing with other
            // tokens and heads; each is given out once.
            let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(at), head_dim) };
            T::narrow::<S>(&sums[..head_dim], out);
        }
    }
}
