//! Embedding lookup: `out[i] = table[token_ids[i]]`, exact.

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::packed_matrix::PackedMatrix;

/// Writes row `token_ids[i]` of `table` [vocab_size, hidden_size] to row i of `out`
/// [num_tokens, hidden_size].
pub fn embedding(
    backend: &CpuBackend,
    table: &PackedMatrix,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<()> {
    let hidden_size = table.in_features();
    let vocab_size = table.out_features();
    if token_ids.len().checked_mul(hidden_size) != Some(out.len()) {
        return Err(Error::internal(format!(
            "embedding: {} tokens of {hidden_size} values into {}",
            token_ids.len(),
            out.len()
        )));
    }
    if let Some(id) = token_ids.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(Error::invalid_argument(format!(
            "token id {id} is outside the vocabulary of {vocab_size}"
        )));
    }
    backend.parallel_rows(out, hidden_size, |first, rows| {
        for (row, id) in rows.chunks_exact_mut(hidden_size).zip(&token_ids[first..]) {
            // This cannot fail: id and length were checked above.
            let _ = table.row_to_f32(*id as usize, row);
        }
    })
}
