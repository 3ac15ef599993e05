//! Evaluation: the logits of given tokens, and how likely they are.

#![allow(non_camel_case_types)]

use super::guard::{
    array_argument, array_argument_mut, guard_or, guard_work, init_struct, read_struct,
    GrowingStruct,
};
use super::model::{engine_of, xserv_model};
use super::request::{cancel_token, xserv_cancel_token};
use super::status::xserv_status;
use crate::engine::TokenScore;
use crate::error::{try_filled, Error, Result};

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

/// How likely a given token was after those before it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_token_score {
    /// The natural logarithm of the token's softmax over the whole vocabulary: finite, and at most 0.
    pub log_prob: f32,
    /// 1 if no other token was likelier, nor as likely with a lower id; else 0.
    pub is_likeliest: u32,
}

/// How to score tokens. Fill with xserv_score_options_default(), then change what you need.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_score_options {
    /// sizeof(xserv_score_options), set by xserv_score_options_default().
    pub struct_size: usize,
    /// Stops the call from another thread, whatever it waits for; NULL (default): nothing does.
    pub cancel: *const xserv_cancel_token,
    /// Calls and requests share the keys and values of common prefixes only with those of the same
    /// number. Default 0.
    pub cache_key: u64,
}

// SAFETY: repr(C), struct_size first, integers and a handle, which is not followed.
unsafe impl GrowingStruct for xserv_score_options {
    const SIZES: &'static [usize] = &[24];
    const NAME: &'static str = "xserv_score_options";
    const HOW: &'static str = "fill it with xserv_score_options_default()";
    fn defaults() -> Self {
        xserv_score_options {
            struct_size: size_of::<Self>(),
            cancel: std::ptr::null(),
            cache_key: 0,
        }
    }
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_score_options) of the header that the program is built with; no byte
/// beyond it is written. xserv_score_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_score_options_init(
    options: *mut xserv_score_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Computes how likely the model holds given tokens, each after all those before it, by the model's
/// own logits.
///
/// token_ids: num_tokens ids, at least one and no more than the context. num_given: from 1 to
/// num_tokens; the tokens from this index on are scored. options: NULL for the defaults. scores:
/// receives one for each of them; num_scores is its size in elements and must be exactly
/// num_tokens - num_given, which may be 0. On failure its content is undefined.
///
/// The sum of log_prob is the log-likelihood of the scored tokens, and exp(-sum / num_scores) their
/// perplexity. If every is_likeliest is 1, they are what the model generates with temperature 0 and
/// no penalties. The keys and values of tokens before num_given may come from the prefix cache, so
/// that many continuations of one prompt compute most of the prompt once.
///
/// Calls at the same time share steps, so that many short texts take much less time from several
/// threads than one after another.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (an id outside the vocabulary, a wrong size),
/// XSERV_STATUS_CONTEXT_FULL, XSERV_STATUS_INVALID_FILE (logits that are not finite: damaged
/// weights), XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_CANCELLED (by the options' cancel token, or
/// because the model was freed).
///
/// # Safety
/// `token_ids` is readable for `num_tokens` ids, `options` is NULL or readable for its struct_size,
/// `scores` is writable for `num_scores` scores and overlaps neither.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_score(
    model: *const xserv_model,
    token_ids: *const u32,
    num_tokens: usize,
    num_given: usize,
    options: *const xserv_score_options,
    scores: *mut xserv_token_score,
    num_scores: usize,
) -> xserv_status {
    guard_work(|| {
        let engine = engine_of(model)?;
        // SAFETY: by the contract above.
        let options = unsafe { read_struct(options, "options") }?;
        let cancel = cancel_token(options.cancel)?;
        let wanted = num_tokens.checked_sub(num_given).filter(|_| num_given > 0);
        let Some(wanted) = wanted else {
            return Err(Error::invalid_argument(format!(
                "num_given is {num_given}, but must be from 1 to num_tokens, which is {num_tokens}"
            )));
        };
        if num_scores != wanted {
            return Err(Error::invalid_argument(format!(
                "num_scores is {num_scores}, but num_tokens - num_given is {wanted}"
            )));
        }
        // SAFETY: by the contract above.
        let ids = unsafe { array_argument(token_ids, num_tokens, "token_ids") }?;
        // SAFETY: as above.
        let out = unsafe { array_argument_mut(scores, num_scores, "scores") }?;
        let mut found = try_filled(num_scores, TokenScore::default(), "scores")?;
        engine.score(ids, num_given, options.cache_key, cancel.as_deref(), &mut found)?;
        for (to, score) in out.iter_mut().zip(&found) {
            *to = xserv_token_score {
                log_prob: score.log_prob,
                is_likeliest: u32::from(score.is_likeliest),
            };
        }
        Ok(())
    })
}
