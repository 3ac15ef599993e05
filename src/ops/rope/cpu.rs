//! Rotary position embedding (Su et al., 2021, equation 34): rotates pairs of values of each head
//! by the angle whose cosine and sine stand in a table; computed in f32 and rounded once.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::ops::common::index::Index;
use crate::ops::common::storage::{Storage, CHUNK};
use crate::ops::rope::angles::RopePairing;

/// Rotates in place x [num_tokens, num_heads, head_dim], token rows `row_stride` elements apart, by
/// the angles of `positions` [num_tokens]. `cos` and `sin` are [num_positions, head_dim / 2].
#[allow(clippy::too_many_arguments)]
pub fn rope<T: Storage, I: Index>(
    backend: &CpuBackend,
    x: &mut [T],
    row_stride: usize,
    num_heads: usize,
    head_dim: usize,
    positions: &[I],
    cos: &[f32],
    sin: &[f32],
    pairing: RopePairing,
) -> Result<()> {
    let (num_tokens, half) = (positions.len(), head_dim / 2);
    crate::ops::common::check::check_strided(
        "rope",
        x.len(),
        num_tokens,
        row_stride,
        num_heads,
        head_dim,
    )?;
    if !head_dim.is_multiple_of(2)
        || cos.len() != sin.len()
        || (half > 0 && !cos.len().is_multiple_of(half))
    {
        return Err(Error::internal(format!(
            "rope: {} cosines and {} sines for heads of {head_dim}",
            cos.len(),
            sin.len()
        )));
    }
    let row_len = num_heads * head_dim;
    if row_len == 0 {
        return Ok(());
    }
    let num_positions = cos.len() / half;
    if let Some(token) = positions.iter().position(|p| p.to_index(num_positions).is_none()) {
        return Err(Error::invalid_argument(format!(
            "position {} of token {token} is outside the rope table of {num_positions} positions",
            positions[token].to_i64()
        )));
    }
    let start = SendPointer(x.as_mut_ptr());
    backend.parallel_tokens(num_tokens, row_len, |tokens| {
        for token in tokens {
            // This is always some, as checked above.
            let Some(position) = positions[token].to_index(num_positions) else { continue };
            // SAFETY: `check_strided` has found (num_tokens - 1) * row_stride + row_len <= x.len()
            // and row_len <= row_stride, so rows lie in x and do not overlap; each token is given
            // out once.
            let row = unsafe {
                std::slice::from_raw_parts_mut(start.get().add(token * row_stride), row_len)
            };
            let angles = position * half..(position + 1) * half;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            backend.run(Rotate { row, cos, sin, pairing });
        }
    })
}

/// Rotates the heads of one token.
pub(crate) struct Rotate<'a, T> {
    /// The heads, [num_heads, head_dim].
    pub row: &'a mut [T],
    /// The cosines, [head_dim / 2].
    pub cos: &'a [f32],
    /// The sines, [head_dim / 2].
    pub sin: &'a [f32],
    pub pairing: RopePairing,
}

impl<T: Storage> Kernel for Rotate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let half = self.cos.len();
        if let Some(row) = T::as_f32_mut(self.row) {
            for head in row.chunks_exact_mut(2 * half) {
                rotate(head, half, self.cos, self.sin, self.pairing);
            }
            return;
        }
        let mut wide = [0.0; CHUNK];
        // Heads that fit together into the buffer are widened together; longer ones in parts.
        if 2 * half <= CHUNK {
            let heads = CHUNK / (2 * half);
            for heads in self.row.chunks_mut(heads * 2 * half) {
                let wide = &mut wide[..heads.len()];
                T::widen::<S>(heads, wide);
                for head in wide.chunks_exact_mut(2 * half) {
                    rotate(head, half, self.cos, self.sin, self.pairing);
                }
                T::narrow::<S>(wide, heads);
            }
            return;
        }
        for head in self.row.chunks_exact_mut(2 * half) {
            for i in 0..half {
                let (a, b) = match self.pairing {
                    RopePairing::SplitHalf => (i, i + half),
                    RopePairing::Interleaved => (2 * i, 2 * i + 1),
                };
                let (x, y) = turn(head[a].to_f32(), head[b].to_f32(), self.cos[i], self.sin[i]);
                (head[a], head[b]) = (T::from_f32(x), T::from_f32(y));
            }
        }
    }
}

#[inline(always)]
fn turn(x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (x * cos - y * sin, y * cos + x * sin)
}

#[inline(always)]
fn rotate(head: &mut [f32], half: usize, cos: &[f32], sin: &[f32], pairing: RopePairing) {
    let angles = cos.iter().zip(sin);
    match pairing {
        RopePairing::SplitHalf => {
            let (first, second) = head.split_at_mut(half);
            for ((a, b), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = turn(*a, *b, cos, sin);
            }
        }
        RopePairing::Interleaved => {
            for (pair, (&cos, &sin)) in head.chunks_exact_mut(2).zip(angles) {
                (pair[0], pair[1]) = turn(pair[0], pair[1], cos, sin);
            }
        }
    }
}
