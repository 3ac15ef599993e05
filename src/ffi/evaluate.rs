//! Evaluation: the logits of given tokens.

#![allow(non_camel_case_types)]

use super::guard::{array_argument, array_argument_mut, guard};
use super::model::{engine_of, xserv_model};
use super::status::xserv_status;
use crate::error::{Error, Result};

/// Which rows of logits to compute.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_logits_rows {
    /// One row: the scores of the token after the last one given.
    XSERV_LOGITS_LAST = 0,
    /// A row for every token.
    XSERV_LOGITS_ALL = 1,
}

/// Computes the logits (scores before softmax) of the token that follows each of the given ones.
///
/// token_ids: num_tokens ids, at least one and no more than the context. rows: an
/// xserv_logits_rows. logits: receives f32 [rows, vocab_size], row-major, with rows 1 or
/// num_tokens; num_logits is its size in elements and must be exactly rows * vocab_size
/// (vocab_size: see xserv_model_get_info()). On failure its content is undefined.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (an id outside the vocabulary, a wrong size),
/// XSERV_STATUS_CONTEXT_FULL, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_CANCELLED (the model was
/// freed).
///
/// # Safety
/// `token_ids` is readable for `num_tokens` ids, `logits` writable for `num_logits` floats, and the
/// two do not overlap.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_logits(
    model: *const xserv_model,
    token_ids: *const u32,
    num_tokens: usize,
    rows: u32,
    logits: *mut f32,
    num_logits: usize,
) -> xserv_status {
    guard(|| {
        let engine = engine_of(model)?;
        let all = match rows {
            v if v == xserv_logits_rows::XSERV_LOGITS_LAST as u32 => false,
            v if v == xserv_logits_rows::XSERV_LOGITS_ALL as u32 => true,
            v => {
                return Err(Error::invalid_argument(format!(
                    "rows is {v}, not an xserv_logits_rows"
                )))
            }
        };
        // SAFETY: by the contract above.
        let ids = unsafe { array_argument(token_ids, num_tokens, "token_ids") }?;
        let wanted = check_size(engine.shape().vocab_size, num_tokens, all)?;
        if num_logits != wanted {
            return Err(Error::invalid_argument(format!(
                "num_logits is {num_logits}, but rows * vocab_size is {wanted}"
            )));
        }
        // SAFETY: as above.
        let out = unsafe { array_argument_mut(logits, num_logits, "logits") }?;
        engine.logits(ids, all, out)
    })
}

fn check_size(vocab_size: usize, num_tokens: usize, all: bool) -> Result<usize> {
    let rows = if all { num_tokens } else { 1 };
    rows.checked_mul(vocab_size)
        .ok_or_else(|| Error::invalid_argument(format!("num_tokens {num_tokens} is impossible")))
}
