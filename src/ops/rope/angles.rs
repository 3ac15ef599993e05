//! The positions, tables and pairs by which heads are rotated, and where the heads lie.

use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::index::Index;
use crate::ops::common::staging::host_slice;

/// Which values of a head form pair i of `head_dim / 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// `(x[i], x[i + head_dim / 2])`, which Hugging Face checkpoints of Qwen3 and Llama use.
    SplitHalf,
    /// `(x[2i], x[2i + 1])`, as in the paper.
    Interleaved,
}

/// The positions and tables to rotate by.
pub(super) struct Angles<'a> {
    pub positions: &'a Tensor,
    pub positions_are_i64: bool,
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
    pub pairing: RopePairing,
}

impl Angles<'_> {
    pub fn max_position(&self) -> usize {
        self.cos.shape().first().map_or(0, |&size| size as usize)
    }

    /// # Safety
    /// The positions are contiguous, on the host, of the type that the flag says.
    pub unsafe fn position(&self, token: usize) -> Option<usize> {
        // SAFETY: by contract.
        unsafe {
            if self.positions_are_i64 {
                host_slice::<i64>(self.positions).get(token)?.to_index(self.max_position())
            } else {
                host_slice::<i32>(self.positions).get(token)?.to_index(self.max_position())
            }
        }
    }

    /// Fails if a position is outside the table.
    ///
    /// # Safety
    /// The requirements are those of [`Angles::position`].
    pub unsafe fn check_positions(&self) -> Result<()> {
        for token in 0..self.positions.num_elements() as usize {
            // SAFETY: by contract.
            if unsafe { self.position(token) }.is_some() {
                continue;
            }
            // SAFETY: by contract.
            let position = unsafe {
                if self.positions_are_i64 {
                    host_slice::<i64>(self.positions).get(token).copied()
                } else {
                    host_slice::<i32>(self.positions).get(token).copied().map(i64::from)
                }
            };
            return Err(Error::invalid_argument(format!(
                "positions: position {} of token {token} is outside the table of {} positions",
                position.unwrap_or_default(),
                self.max_position()
            )));
        }
        Ok(())
    }
}

/// Returns the strides of tokens and of heads, if the elements of each head lie one after another.
pub(super) fn head_strides(tensor: &Tensor) -> Option<(i64, i64)> {
    match (&**tensor.shape(), &**tensor.strides()) {
        (&[_, _, head_dim], &[token, head, step]) if step == 1 || head_dim == 1 => {
            Some((token, head))
        }
        _ => None,
    }
}
