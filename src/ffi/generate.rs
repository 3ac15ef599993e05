//! Generation: requests, the callback, cancellation, results.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::guard::{
    array_argument, flag, guard, guard_or, read_struct, text_argument, with_nul, write_struct,
    GrowingStruct, Out, NUL_TERMINATED,
};
use super::handle::HandleTable;
use super::model::{engine_of, xserv_model};
use super::status::xserv_status;
use super::text::chat_prompt;
use super::types::{
    xserv_finish_reason, XSERV_NO_TOKEN, XSERV_NUL_TERMINATED, XSERV_SEED_RANDOM,
    XSERV_UNSET_FLOAT, XSERV_UNSET_INT,
};
use crate::engine::{CancelToken, FinishReason, Generation, Prompt, Request, SamplingOverrides};
use crate::error::{try_with_capacity, Error, Result};

/// A switch that stops requests from another thread. One may be shared by several requests.
pub struct xserv_cancel_token {
    _opaque: [u8; 0],
}

/// What a generation came to. Immutable; any number of threads may read it.
pub struct xserv_result {
    _opaque: [u8; 0],
}

/// What to generate. Fill with xserv_request_default(), then set exactly one of prompt, prompt_tokens
/// and messages_json, and what else you need. The library copies what it needs during the call.
///
/// Sampling fields left unset take the value of the model's generation_config.json, and if that has
/// none the neutral value given below. Parameters mean what they mean in Transformers, and are applied
/// in its order: repetition, presence and frequency penalty, temperature, top_k, top_p, min_p.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_request {
    /// sizeof(xserv_request).
    pub struct_size: usize,
    /// The prompt as text to be continued, UTF-8; or NULL.
    pub prompt: *const c_char,
    /// Bytes of prompt; default XSERV_NUL_TERMINATED.
    pub prompt_len: usize,
    /// The prompt as token ids; or NULL.
    pub prompt_tokens: *const u32,
    /// Number of ids in prompt_tokens.
    pub num_prompt_tokens: usize,
    /// The prompt as a conversation: NUL-terminated JSON array of messages, rendered with the model's
    /// chat template (see xserv_chat_options); or NULL.
    pub messages_json: *const c_char,
    /// With messages_json: JSON array of tools, or NULL.
    pub tools_json: *const c_char,
    /// With messages_json: JSON object of template variables, or NULL.
    pub template_variables_json: *const c_char,
    /// Stop strings: the text ends before the first one that appears, also when it is spread over
    /// tokens, and no part of it is ever passed to the callback. NUL-terminated UTF-8, not empty, at
    /// most 64 strings of 1024 bytes.
    pub stop_strings: *const *const c_char,
    /// Number of stop strings.
    pub num_stop_strings: usize,
    /// Tokens that end the generation, beside the model's own end tokens.
    pub stop_token_ids: *const u32,
    /// Number of stop tokens.
    pub num_stop_token_ids: usize,
    /// Lets another thread stop the request; or NULL. Must live until the call returns.
    pub cancel: *const xserv_cancel_token,
    /// Most tokens to generate. Default XSERV_UNSET_INT: max_new_tokens of generation_config.json, else
    /// until the context is full. 0 generates nothing.
    pub max_tokens: u32,
    /// Keep the k most likely tokens; 0: all. Default XSERV_UNSET_INT; neutral: 0.
    pub top_k: u32,
    /// 0: always the most likely token (greedy). Greater: logits are divided by it. Default
    /// XSERV_UNSET_FLOAT: as generation_config.json says, greedy if its do_sample is false or absent.
    pub temperature: f32,
    /// Keep the most likely tokens that together have this probability; above 0, at most 1. Default
    /// XSERV_UNSET_FLOAT; neutral: 1.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 to 1. Default
    /// XSERV_UNSET_FLOAT; neutral: 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that are in the prompt or in what was
    /// generated; 0.001 to 1000. Default XSERV_UNSET_FLOAT; neutral: 1.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that were generated; -10000 to 10000. Default
    /// XSERV_UNSET_FLOAT; neutral: 0.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens for each time they were generated; -10000 to 10000. Default
    /// XSERV_UNSET_FLOAT; neutral: 0.
    pub frequency_penalty: f32,
    /// Seed of the random draws: the same seed gives the same tokens, whatever else runs on the model; on a
    /// GPU with xserv_load_options.deterministic always, without it to its rounding, which depends on what is
    /// computed together. Default XSERV_SEED_RANDOM.
    pub seed: u64,
    /// With messages_json: 1 (default) opens the assistant's turn.
    pub add_generation_prompt: u8,
    /// With prompt: 1 (default) adds what the tokenizer adds by itself (Qwen3 and GPT-2: nothing).
    pub add_special_tokens: u8,
    /// With prompt: 1 (default) turns special tokens written in the text into their ids. 0: they are
    /// ordinary text.
    pub parse_special_tokens: u8,
    /// 1 (default): special tokens do not appear in the text. 0: they do (but a token that ends the
    /// generation never does).
    pub skip_special_tokens: u8,
    /// 1: the model's own end tokens do not end the generation. Default 0.
    pub ignore_eos: u8,
    /// Unused, 0.
    pub reserved: [u8; 3],
    /// When requests compete, those with the higher number go first; of equal ones (default 0) the one that
    /// came first.
    pub priority: i32,
    /// Independent continuations of the prompt, which is computed once for all; 1 (default) to 256. Sample i
    /// draws with the seed plus i, and is what a request of its own with that seed would give.
    pub num_samples: u32,
    /// Milliseconds from the call after which the request ends with what it has, as XSERV_FINISH_DEADLINE;
    /// 0 (default): no limit.
    pub time_limit_ms: u64,
    /// Requests share the keys and values of common beginnings (their output does not depend on it, but the
    /// time that they take does) only with requests of the same number. Default 0. A host whose users must
    /// not learn of each other's prompts gives each a number.
    pub cache_key: u64,
}

// SAFETY: repr(C), struct_size first, integers, floats and pointers only.
unsafe impl GrowingStruct for xserv_request {
    const FIRST_SIZE: usize = 152;
    const NAME: &'static str = "xserv_request";
    const HOW: &'static str = "fill it with xserv_request_default()";
    fn defaults() -> Self {
        xserv_request {
            struct_size: size_of::<Self>(),
            prompt: std::ptr::null(),
            prompt_len: XSERV_NUL_TERMINATED,
            prompt_tokens: std::ptr::null(),
            num_prompt_tokens: 0,
            messages_json: std::ptr::null(),
            tools_json: std::ptr::null(),
            template_variables_json: std::ptr::null(),
            stop_strings: std::ptr::null(),
            num_stop_strings: 0,
            stop_token_ids: std::ptr::null(),
            num_stop_token_ids: 0,
            cancel: std::ptr::null(),
            max_tokens: XSERV_UNSET_INT,
            top_k: XSERV_UNSET_INT,
            temperature: XSERV_UNSET_FLOAT,
            top_p: XSERV_UNSET_FLOAT,
            min_p: XSERV_UNSET_FLOAT,
            repetition_penalty: XSERV_UNSET_FLOAT,
            presence_penalty: XSERV_UNSET_FLOAT,
            frequency_penalty: XSERV_UNSET_FLOAT,
            seed: XSERV_SEED_RANDOM,
            add_generation_prompt: 1,
            add_special_tokens: 1,
            parse_special_tokens: 1,
            skip_special_tokens: 1,
            ignore_eos: 0,
            reserved: [0; 3],
            priority: 0,
            num_samples: 1,
            time_limit_ms: 0,
            cache_key: 0,
        }
    }
}
const _: () = assert!(size_of::<xserv_request>() == 176);

/// One step of a generation, as the callback sees it. Valid during the callback only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_token_event {
    /// sizeof(xserv_token_event) in the library; fields beyond it are not there.
    pub struct_size: usize,
    /// The text that became certain with this token: whole UTF-8 characters, NUL-terminated, possibly
    /// empty (a character may span tokens, and what may be the start of a stop string is held back).
    pub text: *const c_char,
    /// Bytes of text without the NUL.
    pub text_len: usize,
    /// The token, or XSERV_NO_TOKEN for the one event that may come after the last token, with text that
    /// was held back.
    pub token_id: u32,
    /// Number of tokens generated so far, this one included.
    pub num_tokens: u32,
    /// Which sample of the request, from 0.
    pub sample: u32,
    /// Unused, 0.
    pub reserved: u32,
}

/// Called for every generated token, on the thread that called xserv_generate, with no lock held: it may
/// call any function of the library, also on the same model. Return true to go on, false to stop: it is
/// not called again then.
pub type xserv_token_callback =
    Option<unsafe extern "C" fn(event: *const xserv_token_event, user_data: *mut c_void) -> bool>;

/// What a generation came to. Set struct_size, then call xserv_result_get_info(). Pointers belong to the
/// result and are valid until it is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_result_info {
    /// sizeof(xserv_result_info), set by the caller.
    pub struct_size: usize,
    /// The generated text: UTF-8, NUL-terminated. Empty if the model has no usable tokenizer.
    pub text: *const c_char,
    /// Bytes of text without the NUL.
    pub text_len: usize,
    /// The generated ids, a stop token included.
    pub token_ids: *const u32,
    /// Number of generated ids.
    pub num_tokens: usize,
    /// Number of prompt tokens.
    pub num_prompt_tokens: usize,
    /// An xserv_finish_reason.
    pub finish_reason: u32,
    /// Unused, 0.
    pub reserved: u32,
    /// The seed that was used.
    pub seed: u64,
    /// Seconds from the call to the first token, waiting for other requests included; 0 if none came.
    pub time_to_first_token_seconds: f64,
    /// Seconds of the whole call, callbacks included.
    pub total_seconds: f64,
    /// Computed prompt tokens per second of prompt processing (0 if there was none).
    pub prompt_tokens_per_second: f64,
    /// Tokens per second after the first token, callbacks included (0 with fewer than two tokens).
    pub tokens_per_second: f64,
    /// Tokens of the prompt whose keys and values were there already, and cost nothing.
    pub num_cached_tokens: usize,
    /// How often the request made room for others, and was resumed.
    pub num_preemptions: u32,
    /// Samples of the result.
    pub num_samples: u32,
}

// SAFETY: repr(C), struct_size first, integers, floats and pointers only.
unsafe impl GrowingStruct for xserv_result_info {
    const FIRST_SIZE: usize = 96;
    const NAME: &'static str = "xserv_result_info";
    const HOW: &'static str = "set it to sizeof(xserv_result_info)";
    fn defaults() -> Self {
        xserv_result_info {
            struct_size: size_of::<Self>(),
            text: c"".as_ptr(),
            text_len: 0,
            token_ids: std::ptr::null(),
            num_tokens: 0,
            num_prompt_tokens: 0,
            finish_reason: 0,
            reserved: 0,
            seed: 0,
            time_to_first_token_seconds: 0.0,
            total_seconds: 0.0,
            prompt_tokens_per_second: 0.0,
            tokens_per_second: 0.0,
            num_cached_tokens: 0,
            num_preemptions: 0,
            num_samples: 0,
        }
    }
}
const _: () = assert!(size_of::<xserv_result_info>() == 112);

struct ResultObject {
    /// By sample, with the text and its final NUL.
    samples: Vec<(Generation, Vec<u8>)>,
}

impl ResultObject {
    fn sample(&self, sample: usize) -> Result<&(Generation, Vec<u8>)> {
        self.samples.get(sample).ok_or_else(|| {
            let count = self.samples.len();
            Error::invalid_argument(format!("sample is {sample}, but the result has {count}"))
        })
    }
}

/// A handle for what the samples of a request came to.
pub(super) fn new_result(generations: Vec<Generation>) -> Result<*mut xserv_result> {
    let mut samples = try_with_capacity(generations.len(), "results")?;
    for generation in generations {
        let text = with_nul(&generation.text)?;
        samples.push((generation, text));
    }
    RESULTS.insert(Arc::new(ResultObject { samples }))
}

static CANCEL_TOKENS: HandleTable<CancelToken> = HandleTable::new(5, "cancel token");
static RESULTS: HandleTable<ResultObject> = HandleTable::new(6, "result");

/// Sets every field to its default; the prompt is then still to be set.
///
/// # Safety
/// `request` is NULL or writable for an xserv_request.
#[no_mangle]
pub unsafe extern "C" fn xserv_request_default(request: *mut xserv_request) -> xserv_status {
    guard(|| {
        // SAFETY: writable by contract.
        unsafe { Out::new(request, "request") }?.set(xserv_request::defaults());
        Ok(())
    })
}

/// Makes a cancel token, which the caller ends with xserv_cancel_token_free().
///
/// # Safety
/// `cancel_token` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_cancel_token_new(
    cancel_token: *mut *mut xserv_cancel_token,
) -> xserv_status {
    guard(|| {
        // SAFETY: writable by contract.
        let out = unsafe { Out::new(cancel_token, "cancel_token") }?;
        out.set(CANCEL_TOKENS.insert(Arc::new(CancelToken::default()))?);
        Ok(())
    })
}

/// Stops every request that carries this token: those that run end with XSERV_FINISH_CANCELLED at the
/// next layer of the forward pass, those that start later end at once. Any thread may call it, any
/// number of times. It takes a lock, so it is not for signal handlers: there, set a flag that the token
/// callback looks at.
#[no_mangle]
pub extern "C" fn xserv_cancel_token_cancel(
    cancel_token: *const xserv_cancel_token,
) -> xserv_status {
    guard(|| {
        CANCEL_TOKENS.get(cancel_token)?.cancel();
        Ok(())
    })
}

/// Ends a cancel token. Requests that carry it go on. NULL does nothing.
#[no_mangle]
pub extern "C" fn xserv_cancel_token_free(cancel_token: *mut xserv_cancel_token) {
    guard_or((), || CANCEL_TOKENS.remove(cancel_token).map(drop))
}

fn unset_float(value: f32) -> Option<f32> {
    (value != XSERV_UNSET_FLOAT).then_some(value)
}

fn unset_int(value: u32) -> Option<u32> {
    (value != XSERV_UNSET_INT).then_some(value)
}

/// # Safety
/// The pointers of `c` obey the contracts of their fields for `'a`.
unsafe fn prompt_of<'a>(c: &xserv_request) -> Result<Prompt<'a>> {
    let given = [!c.prompt.is_null(), !c.prompt_tokens.is_null(), !c.messages_json.is_null()];
    if given.iter().filter(|g| **g).count() != 1 {
        return Err(Error::invalid_argument(
            "request: exactly one of prompt, prompt_tokens and messages_json must be set",
        ));
    }
    if c.messages_json.is_null() && !(c.tools_json.is_null() && c.template_variables_json.is_null())
    {
        return Err(Error::invalid_argument(
            "request: tools_json and template_variables_json need messages_json",
        ));
    }
    // SAFETY: by contract.
    let chat = unsafe {
        chat_prompt(
            c.messages_json,
            c.tools_json,
            c.template_variables_json,
            c.add_generation_prompt,
        )
    }?;
    if let Some(chat) = chat {
        return Ok(Prompt::Chat(chat));
    }
    if !c.prompt_tokens.is_null() {
        // SAFETY: by contract.
        let ids = unsafe {
            array_argument(c.prompt_tokens, c.num_prompt_tokens, "request.prompt_tokens")
        }?;
        return Ok(Prompt::TokenIds(ids));
    }
    Ok(Prompt::Text {
        // SAFETY: by contract.
        text: unsafe { text_argument(c.prompt, c.prompt_len, "request.prompt") }?,
        add_special: flag(c.add_special_tokens, "request.add_special_tokens")?,
        parse_special: flag(c.parse_special_tokens, "request.parse_special_tokens")?,
    })
}

/// # Safety
/// The pointers of `c` obey the contracts of their fields for `'a`.
pub(super) unsafe fn request_of<'a>(c: &xserv_request) -> Result<Request<'a>> {
    // SAFETY: by contract, here and below.
    let prompt = unsafe { prompt_of(c) }?;
    let pointers =
        // SAFETY: as above.
        unsafe { array_argument(c.stop_strings, c.num_stop_strings, "request.stop_strings") }?;
    if pointers.len() > crate::text::MAX_STOP_STRINGS {
        return Err(Error::invalid_argument(format!(
            "request.num_stop_strings is {}, but at most {} are allowed",
            pointers.len(),
            crate::text::MAX_STOP_STRINGS
        )));
    }
    let mut stop_strings = try_with_capacity(pointers.len(), "stop strings")?;
    for (i, pointer) in pointers.iter().enumerate() {
        let name = format!("request.stop_strings[{i}]");
        // SAFETY: as above.
        stop_strings.push(unsafe { text_argument(*pointer, NUL_TERMINATED, &name) }?);
    }
    Ok(Request {
        prompt,
        sampling: SamplingOverrides {
            temperature: unset_float(c.temperature),
            top_k: unset_int(c.top_k),
            top_p: unset_float(c.top_p),
            min_p: unset_float(c.min_p),
            repetition_penalty: unset_float(c.repetition_penalty),
            presence_penalty: unset_float(c.presence_penalty),
            frequency_penalty: unset_float(c.frequency_penalty),
        },
        seed: (c.seed != XSERV_SEED_RANDOM).then_some(c.seed),
        max_tokens: unset_int(c.max_tokens),
        stop_strings,
        stop_token_ids: {
            // SAFETY: as above.
            unsafe {
                array_argument(c.stop_token_ids, c.num_stop_token_ids, "request.stop_token_ids")
            }?
        },
        skip_special: flag(c.skip_special_tokens, "request.skip_special_tokens")?,
        ignore_eos: flag(c.ignore_eos, "request.ignore_eos")?,
        cancel: match c.cancel.is_null() {
            true => None,
            false => Some(CANCEL_TOKENS.get(c.cancel)?),
        },
        priority: c.priority,
        num_samples: c.num_samples,
        time_limit: (c.time_limit_ms > 0).then(|| Duration::from_millis(c.time_limit_ms)),
        cache_key: c.cache_key,
    })
}

/// Generates text, and returns when it is done.
///
/// Any number of threads may call it on one model: their requests are computed together, in every step as many
/// as there is room for, and none waits for another's callback. A request that does not fit at the moment waits,
/// or makes room for others and is resumed; its output does not depend on it. Being
/// stopped by the callback or cancelled is a success: the result has what was generated, and says why
/// it ended. When the prompt and max_tokens do not fit into the context together, generation ends with
/// XSERV_FINISH_CONTEXT_FULL.
///
/// request: what to do. callback: told of every token, or NULL. user_data: passed to it. result: gets
/// a handle that the caller ends with xserv_result_free(); NULL if the callback is all you need.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (the message names the field), XSERV_STATUS_CONTEXT_FULL (the
/// prompt alone is too long), XSERV_STATUS_TEMPLATE, XSERV_STATUS_OUT_OF_MEMORY.
///
/// # Safety
/// `request` is readable for its struct_size and its pointers obey their fields' comments; `result` is
/// NULL or writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_generate(
    model: *const xserv_model,
    request: *const xserv_request,
    callback: xserv_token_callback,
    user_data: *mut c_void,
    result: *mut *mut xserv_result,
) -> xserv_status {
    guard(|| {
        let out = match result.is_null() {
            true => None,
            // SAFETY: by the contract above.
            false => Some(unsafe { Out::new(result, "result") }?),
        };
        if request.is_null() {
            return Err(Error::invalid_argument("request is NULL"));
        }
        // SAFETY: as above.
        let c_request = unsafe { read_struct(request, "request") }?;
        // SAFETY: as above.
        let request = unsafe { request_of(&c_request) }?;
        let engine = engine_of(model)?;
        let mut text = Vec::new();
        let mut on_token =
            |sample: usize, token: Option<u32>, piece: &str, num_tokens: usize| -> Result<bool> {
                let Some(callback) = callback else { return Ok(true) };
                text.clear();
                text.try_reserve(piece.len() + 1)
                    .map_err(|_| Error::out_of_memory("a piece of text", piece.len() + 1))?;
                text.extend_from_slice(piece.as_bytes());
                text.push(0);
                let event = xserv_token_event {
                    struct_size: size_of::<xserv_token_event>(),
                    text: text.as_ptr() as *const c_char,
                    text_len: piece.len(),
                    token_id: token.unwrap_or(XSERV_NO_TOKEN),
                    num_tokens: num_tokens as u32,
                    sample: sample as u32,
                    reserved: 0,
                };
                // SAFETY: the caller's function with the caller's data, on the caller's thread; the event
                // lives until it returns.
                Ok(unsafe { callback(&event, user_data) })
            };
        let generations = engine.generate(&request, &mut on_token)?;
        if let Some(out) = out {
            out.set(new_result(generations)?);
        }
        Ok(())
    })
}

/// Describes a result; of several samples the first.
///
/// info: struct_size must be set. Its pointers belong to the result.
///
/// # Safety
/// `info` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_result_get_info(
    result: *const xserv_result,
    info: *mut xserv_result_info,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard(|| unsafe { describe(result, 0, info) })
}

/// Describes one of the samples of a result (xserv_request.num_samples).
///
/// sample: from 0. info: struct_size must be set. Its pointers belong to the result.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (there is no such sample).
///
/// # Safety
/// `info` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_result_get_sample(
    result: *const xserv_result,
    sample: usize,
    info: *mut xserv_result_info,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard(|| unsafe { describe(result, sample, info) })
}

/// # Safety
/// `info` is writable for the struct_size that it claims.
unsafe fn describe(
    result: *const xserv_result,
    sample: usize,
    info: *mut xserv_result_info,
) -> Result<()> {
    let object = RESULTS.get(result)?;
    let (g, text) = object.sample(sample)?;
    let value = xserv_result_info {
        struct_size: size_of::<xserv_result_info>(),
        text: text.as_ptr() as *const c_char,
        text_len: text.len() - 1,
        token_ids: g.token_ids.as_ptr(),
        num_tokens: g.token_ids.len(),
        num_prompt_tokens: g.num_prompt_tokens,
        finish_reason: finish_code(g.finish_reason) as u32,
        reserved: 0,
        seed: g.seed,
        time_to_first_token_seconds: g.time_to_first_token_seconds,
        total_seconds: g.total_seconds,
        prompt_tokens_per_second: g.prompt_tokens_per_second,
        tokens_per_second: g.tokens_per_second,
        num_cached_tokens: g.num_cached_tokens,
        num_preemptions: g.num_preemptions,
        num_samples: object.samples.len() as u32,
    };
    // SAFETY: by contract.
    unsafe { write_struct(info, "info", &value) }
}

pub(super) fn finish_code(reason: FinishReason) -> xserv_finish_reason {
    match reason {
        FinishReason::StopToken => xserv_finish_reason::XSERV_FINISH_STOP_TOKEN,
        FinishReason::StopString => xserv_finish_reason::XSERV_FINISH_STOP_STRING,
        FinishReason::MaxTokens => xserv_finish_reason::XSERV_FINISH_MAX_TOKENS,
        FinishReason::ContextFull => xserv_finish_reason::XSERV_FINISH_CONTEXT_FULL,
        FinishReason::Callback => xserv_finish_reason::XSERV_FINISH_CALLBACK,
        FinishReason::Cancelled => xserv_finish_reason::XSERV_FINISH_CANCELLED,
        FinishReason::Deadline => xserv_finish_reason::XSERV_FINISH_DEADLINE,
    }
}

/// The generated text of a result: UTF-8, NUL-terminated, valid until the result is freed. Should the
/// model have generated a NUL, xserv_result_info.text_len tells the whole length. NULL if the handle is
/// bad (see xserv_last_error()).
#[no_mangle]
pub extern "C" fn xserv_result_text(result: *const xserv_result) -> *const c_char {
    guard_or(std::ptr::null(), || Ok(RESULTS.get(result)?.sample(0)?.1.as_ptr() as *const c_char))
}

/// Ends a result. NULL does nothing.
#[no_mangle]
pub extern "C" fn xserv_result_free(result: *mut xserv_result) {
    guard_or((), || RESULTS.remove(result).map(drop))
}
