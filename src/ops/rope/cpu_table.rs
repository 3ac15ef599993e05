//! Rotary position embedding (Su et al., 2021, equation 34): rotates pairs of values of each head
//! by `position * inv_freq[i]`.

use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Error, Result};
use crate::ops::rope::angles::RopePairing;
use crate::ops::rope::cpu::Rotate;
use std::sync::OnceLock;

/// The number of positions whose angles are computed together.
const BLOCK_POSITIONS: usize = 256;

/// The cosines and sines of all positions, computed in blocks when first asked for.
///
/// As in Transformers the angle is `position as f32 * inv_freq[i]` in f32, and the cosine and sine
/// are multiplied by `attention_scaling` (of YaRN; otherwise 1).
#[derive(Debug)]
pub struct RopeTable {
    inv_freq: Vec<f32>,
    attention_scaling: f32,
    max_positions: usize,
    /// The computed blocks, each [BLOCK_POSITIONS, 2, head_dim / 2]: cosines, then sines.
    blocks: Vec<OnceLock<Vec<f32>>>,
}

impl RopeTable {
    /// Makes a table for heads of `2 * inv_freq.len()` elements and positions below
    /// `max_positions`.
    pub fn new(inv_freq: &[f32], attention_scaling: f32, max_positions: usize) -> Result<Self> {
        let mut frequencies = try_with_capacity(inv_freq.len(), "rope frequencies")?;
        frequencies.extend_from_slice(inv_freq);
        let num_blocks = max_positions.div_ceil(BLOCK_POSITIONS);
        let mut blocks = try_with_capacity(num_blocks, "the rope table")?;
        blocks.resize_with(num_blocks, OnceLock::new);
        Ok(RopeTable { inv_freq: frequencies, attention_scaling, max_positions, blocks })
    }

    /// Returns the number of elements of a head.
    pub fn head_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Returns the cosines and sines ([head_dim / 2] each) of a position whose block has been
    /// computed.
    #[inline(always)]
    pub(in crate::ops) fn angles(&self, position: u32) -> (&[f32], &[f32]) {
        let half = self.inv_freq.len();
        let (block, row) =
            (position as usize / BLOCK_POSITIONS, position as usize % BLOCK_POSITIONS);
        match self.blocks.get(block).and_then(OnceLock::get) {
            Some(values) => values[2 * half * row..2 * half * (row + 1)].split_at(half),
            None => (&[], &[]),
        }
    }

    /// Computes the block of `position` unless it has been computed.
    pub(in crate::ops) fn prepare(&self, position: u32) -> Result<()> {
        let outside = || {
            Error::invalid_argument(format!(
                "position {position} is outside the rope table of {} positions",
                self.max_positions
            ))
        };
        if position as usize >= self.max_positions {
            return Err(outside());
        }
        let block = position as usize / BLOCK_POSITIONS;
        let slot = self.blocks.get(block).ok_or_else(outside)?;
        if slot.get().is_some() {
            return Ok(());
        }
        let half = self.inv_freq.len();
        let mut values = try_with_capacity(2 * half * BLOCK_POSITIONS, "the rope table")?;
        for row in 0..BLOCK_POSITIONS {
            let position = (block * BLOCK_POSITIONS + row) as f32;
            // The angle is in f32 as Transformers has it, and its cosine is rounded once.
            let angle = |f: &f32| f64::from(position * f);
            values.extend(
                self.inv_freq.iter().map(|f| angle(f).cos() as f32 * self.attention_scaling),
            );
            values.extend(
                self.inv_freq.iter().map(|f| angle(f).sin() as f32 * self.attention_scaling),
            );
        }
        // Another thread may have been first, with the same values.
        let _ = slot.set(values);
        Ok(())
    }
}

/// Rotates in place x [num_tokens, num_heads, head_dim], token rows `row_stride` elements apart, by
/// the angles of `positions` [num_tokens].
pub fn rope(
    backend: &CpuBackend,
    x: &mut [f32],
    row_stride: usize,
    num_heads: usize,
    positions: &[u32],
    table: &RopeTable,
    pairing: RopePairing,
) -> Result<()> {
    let head_dim = table.head_dim();
    let num_tokens = positions.len();
    crate::ops::common::check::check_strided(
        "rope",
        x.len(),
        num_tokens,
        row_stride,
        num_heads,
        head_dim,
    )?;
    for &position in positions {
        table.prepare(position)?;
    }
    let row_len = num_heads * head_dim;
    if row_len == 0 {
        return Ok(());
    }
    let start = SendPointer(x.as_mut_ptr());
    backend.parallel_tokens(num_tokens, row_len, |tokens| {
        for token in tokens {
            // SAFETY: `check_strided` has found (num_tokens - 1) * row_stride + row_len <= x.len()
            // and row_len <= row_stride, so rows lie in x and do not overlap; each token is given
            // out once.
            let row = unsafe {
                std::slice::from_raw_parts_mut(start.get().add(token * row_stride), row_len)
            };
            let (cos, sin) = table.angles(positions[token]);
            backend.run(Rotate { row, cos, sin, pairing });
        }
    })
}
