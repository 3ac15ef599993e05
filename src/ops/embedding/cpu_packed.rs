//! Embedding lookup: `out[i] = table[token_ids[i]]`, exact, from matrices in the layout of products.

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::quantised::QuantisedPanels;

/// Writes row `token_ids[i]` of `table` [vocab_size, hidden_size] to row i of `out`
/// [num_tokens, hidden_size].
pub fn embedding(
    backend: &CpuBackend,
    table: &PackedMatrix,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<()> {
    rows(backend, [table.out_features(), table.in_features()], token_ids, out, |id, row| {
        table.row_to_f32(id, row)
    })
}

/// The same with a table that is quantised.
pub fn embedding_quantised(
    backend: &CpuBackend,
    table: &QuantisedPanels,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<()> {
    rows(backend, [table.out_features(), table.in_features()], token_ids, out, |id, row| {
        table.row_to_f32(id, row)
    })
}

/// Has `read` write row `token_ids[i]` of a table [vocab_size, hidden_size] to row i of `out`.
fn rows(
    backend: &CpuBackend,
    [vocab_size, hidden_size]: [usize; 2],
    token_ids: &[u32],
    out: &mut [f32],
    read: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
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
            let _ = read(*id as usize, row);
        }
    })
}
