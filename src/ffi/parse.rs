//! Texts of models that a program has: taking answers apart.

#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::answer::{answer_format, xserv_answer_format};
use super::generate::{new_result, xserv_result};
use super::guard::{
    guard_or, guard_work, init_struct, optional_text, read_struct, text_argument, GrowingStruct,
    Out,
};
use super::model::{engine_of, xserv_model};
use super::status::xserv_status;
use crate::engine::{parse_response, FinishReason, Generation, Response};
use crate::error::{Error, Result};

/// The longest text that is taken apart, in bytes.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// How to take a text apart. Fill with xserv_parse_options_default().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_parse_options {
    /// sizeof(xserv_parse_options).
    pub struct_size: usize,
    /// The prompt that the text goes on with, or the end of it, NUL-terminated; or NULL (default). It says
    /// whether the text begins in a thought. Without it, a text does that has the end of a thought
    /// and not the beginning.
    pub prompt: *const c_char,
    /// NUL-terminated JSON array of tools, for the types of parameters; or NULL (default).
    pub tools_json: *const c_char,
    /// An xserv_answer_format other than XSERV_ANSWER_NONE; default XSERV_ANSWER_AUTO.
    pub answer_format: u32,
    /// Unused, 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, integers and pointers only.
unsafe impl GrowingStruct for xserv_parse_options {
    const SIZES: &'static [usize] = &[32];
    const NAME: &'static str = "xserv_parse_options";
    const HOW: &'static str = "fill it with xserv_parse_options_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == 0
    }
    fn defaults() -> Self {
        xserv_parse_options {
            struct_size: size_of::<Self>(),
            prompt: std::ptr::null(),
            tools_json: std::ptr::null(),
            answer_format: xserv_answer_format::XSERV_ANSWER_AUTO as u32,
            reserved: 0,
        }
    }
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_parse_options) of the header that the program is built with; no byte
/// beyond it is written. xserv_parse_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_parse_options_init(
    options: *mut xserv_parse_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Takes a text that a model has generated apart, as answer_format of a request does: for programs
/// that have only the text. Nothing is computed, and no text is an error: what is no call is content.
///
/// model: whose text it is; NULL if options names the format. text: UTF-8 of text_len bytes, or up
/// to its NUL with XSERV_NUL_TERMINATED; at most 16 MiB; best with special tokens in it, as some
/// models write calls between them. options: NULL for the defaults. result: receives a result whose
/// reasoning, content, tool_calls and message_json are what was found, whose text is the text, and
/// which has no tokens and no times. The caller frees it with xserv_result_free().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (not UTF-8; too long; tools_json is no array; no format).
///
/// # Safety
/// `text` is readable for `text_len` bytes or NUL-terminated; `options` is NULL or readable for its
/// struct_size, and its strings end in NULs; `result` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_parse_response(
    model: *const xserv_model,
    text: *const c_char,
    text_len: usize,
    options: *const xserv_parse_options,
    result: *mut *mut xserv_result,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above, here and below.
        let out = unsafe { Out::new(result, "result") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let text = unsafe { text_argument(text, text_len, "text") }?;
        let response = Response {
            text,
            // SAFETY: as above.
            prompt: unsafe { optional_text(options.prompt, "options.prompt") }?,
            // SAFETY: as above.
            tools: unsafe { optional_text(options.tools_json, "options.tools_json") }?,
            format: answer_format(options.answer_format, "options.answer_format")?.ok_or_else(
                || Error::invalid_argument("options.answer_format is XSERV_ANSWER_NONE"),
            )?,
        };
        if text.len() > MAX_RESPONSE_BYTES {
            return Err(Error::invalid_argument(format!(
                "the text has {} bytes, at most {MAX_RESPONSE_BYTES} are taken apart",
                text.len()
            )));
        }
        let engine = if model.is_null() { None } else { Some(engine_of(model)?) };
        let generation = generation_of(engine.as_deref(), &response)?;
        out.set(new_result(&mut vec![generation])?);
        Ok(())
    })
}

/// A result that has nothing but a text and its parts.
fn generation_of(
    engine: Option<&crate::engine::Engine>,
    response: &Response<'_>,
) -> Result<Generation> {
    let mut text = String::new();
    let no_memory = |_| Error::out_of_memory("a text", response.text.len());
    text.try_reserve_exact(response.text.len()).map_err(no_memory)?;
    text.push_str(response.text);
    Ok(Generation {
        text,
        token_ids: Vec::new(),
        num_prompt_tokens: 0,
        num_cached_tokens: 0,
        num_preemptions: 0,
        finish_reason: FinishReason::StopToken,
        seed: 0,
        time_to_first_token_seconds: 0.0,
        total_seconds: 0.0,
        prompt_tokens_per_second: 0.0,
        tokens_per_second: 0.0,
        log_probs: Vec::new(),
        prompt_log_probs: None,
        answer: Some(parse_response(engine, response)?),
    })
}
