//! Evaluation: the logits of given tokens.

#![allow(non_camel_case_types)]

use super::guard::{
    array_argument, array_argument_mut, guard_or, guard_work, init_struct, read_struct,
    GrowingStruct,
};
use super::model::{engine_of, xserv_model};
use super::request::{cancel_token, xserv_cancel_token};
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

/// How to compute logits. Fill with xserv_logits_options_default(), then change what you need.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_logits_options {
    /// sizeof(xserv_logits_options), set by xserv_logits_options_default().
    pub struct_size: usize,
    /// An xserv_logits_rows: the rows to compute. Default XSERV_LOGITS_LAST.
    pub rows: u32,
    /// Unused, 0.
    pub reserved: u32,
    /// Stops the call from another thread, at the next layer of the forward pass or while it waits
    /// for its turn; NULL (default): nothing does.
    pub cancel: *const xserv_cancel_token,
}

// SAFETY: repr(C), struct_size first, integers and a handle, which is not followed.
unsafe impl GrowingStruct for xserv_logits_options {
    const SIZES: &'static [usize] = &[24];
    const NAME: &'static str = "xserv_logits_options";
    const HOW: &'static str = "fill it with xserv_logits_options_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == 0
    }
    fn defaults() -> Self {
        xserv_logits_options {
            struct_size: size_of::<Self>(),
            rows: xserv_logits_rows::XSERV_LOGITS_LAST as u32,
            reserved: 0,
            cancel: std::ptr::null(),
        }
    }
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_logits_options) of the header that the program is built with; no byte
/// beyond it is written. xserv_logits_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_logits_options_init(
    options: *mut xserv_logits_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Computes the logits (scores before softmax) of the token that follows each of the given ones.
///
/// token_ids: num_tokens ids, at least one and no more than the context. options: NULL for the
/// defaults. logits: receives f32 [rows, vocab_size], row-major, with rows 1 or num_tokens as the
/// options say; num_logits is its size in elements and must be exactly rows * vocab_size
/// (vocab_size: see xserv_model_get_info()). On failure its content is undefined.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (an id outside the vocabulary, a wrong size),
/// XSERV_STATUS_CONTEXT_FULL, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_CANCELLED (by the options'
/// cancel token, or because the model was freed).
///
/// # Safety
/// `token_ids` is readable for `num_tokens` ids, `options` is NULL or readable for its struct_size,
/// `logits` is writable for `num_logits` floats and overlaps neither.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_logits(
    model: *const xserv_model,
    token_ids: *const u32,
    num_tokens: usize,
    options: *const xserv_logits_options,
    logits: *mut f32,
    num_logits: usize,
) -> xserv_status {
    guard_work(|| {
        let engine = engine_of(model)?;
        // SAFETY: by the contract above.
        let options = unsafe { read_struct(options, "options") }?;
        let cancel = cancel_token(options.cancel)?;
        let all = match options.rows {
            v if v == xserv_logits_rows::XSERV_LOGITS_LAST as u32 => false,
            v if v == xserv_logits_rows::XSERV_LOGITS_ALL as u32 => true,
            v => {
                return Err(Error::invalid_argument(format!(
                    "options.rows is {v}, not an xserv_logits_rows"
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
        engine.logits(ids, all, cancel.as_deref(), out)
    })
}

fn check_size(vocab_size: usize, num_tokens: usize, all: bool) -> Result<usize> {
    let rows = if all { num_tokens } else { 1 };
    rows.checked_mul(vocab_size)
        .ok_or_else(|| Error::invalid_argument(format!("num_tokens {num_tokens} is impossible")))
}
