//! Generation: the blocking call, its callback, results.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::answer::{xserv_tool_call, DescribedAnswer};
use super::guard::{
    call_host, guard, guard_or, guard_work, read_struct, with_nul, write_struct, GrowingStruct, Out,
};
use super::handle::HandleTable;
use super::model::{engine_of, xserv_model};
use super::request::{request_of, xserv_logits_event, xserv_request};
use super::status::xserv_status;
use super::types::{xserv_finish_reason, XSERV_NO_TOKEN};
use crate::engine::{FinishReason, Generation, LogitsEvent, TokenLogProb};
use crate::error::{try_with_capacity, Error, Result};

/// The result of a generation. It is immutable; any number of threads may read it.
pub struct xserv_result {
    _opaque: [u8; 0],
}

/// One step of a generation, as passed to the callback. It is valid during the callback only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_token_event {
    /// sizeof(xserv_token_event) in the library; fields beyond it do not exist.
    pub struct_size: usize,
    /// The text that this token made final: whole UTF-8 characters, NUL-terminated, possibly empty
    /// (a character may span tokens, and text that may be the start of a stop string is held back).
    pub text: *const c_char,
    /// Bytes of text without the NUL.
    pub text_len: usize,
    /// The token, or XSERV_NO_TOKEN for the one event that may come after the last token, with text
    /// that was held back.
    pub token_id: u32,
    /// Number of tokens generated so far, this one included.
    pub num_tokens: u32,
    /// Which sample of the request, from 0.
    pub sample: u32,
    /// Unused, 0.
    pub reserved: u32,
}

/// Called for every generated token, on the thread that called xserv_generate, with no lock held:
/// it may call any function of the library, also on the same model. Returns true to continue, false
/// to stop, after which it is not called again. It is not called while the prompt is computed, which
/// can take seconds: to stop that as well, cancel the request (cancel of xserv_request) from another
/// thread, or submit it and call xserv_cancel(), as a program does on Ctrl-C.
pub type xserv_token_callback =
    Option<unsafe extern "C" fn(event: *const xserv_token_event, user_data: *mut c_void) -> bool>;

/// The log-probability of a token: the natural logarithm of its probability.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_log_prob {
    /// The token.
    pub token_id: u32,
    /// At most 0; minus infinity for a token that is banned.
    pub log_prob: f32,
}

/// A description of a result. Set struct_size, then call xserv_result_get_info(). Pointers belong
/// to the result and are valid until it is freed.
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
    /// Seconds from the call to the first token, waiting for other requests included; 0 if none was
    /// generated.
    pub time_to_first_token_seconds: f64,
    /// Seconds of the whole call, callbacks included.
    pub total_seconds: f64,
    /// Computed prompt tokens per second of prompt processing (0 if there was none).
    pub prompt_tokens_per_second: f64,
    /// Tokens per second after the first token, callbacks included (0 with fewer than two tokens).
    pub tokens_per_second: f64,
    /// Number of prompt tokens whose keys and values were in the prefix cache, and cost nothing.
    pub num_cached_tokens: usize,
    /// Number of times that the request was preempted to make room for others, and resumed.
    pub num_preemptions: u32,
    /// Number of samples in the result.
    pub num_samples: u32,
    /// The log-probabilities of the generated ids, num_tokens of them. NULL if the request has no
    /// num_log_probs, or nothing was generated.
    pub log_probs: *const f32,
    /// The most likely tokens in the place of each generated one, which may or may not be among them:
    /// num_top_log_probs for each of num_tokens, the likeliest first, of equals the one with the lower
    /// id first. NULL if there are none.
    pub top_log_probs: *const xserv_log_prob,
    /// Number of top_log_probs of a generated id: num_log_probs of the request, or the size of the
    /// vocabulary if that is less; 0 if there are none.
    pub num_top_log_probs: usize,
    /// The ids of the prompt, num_prompt_tokens of them. NULL if the request has no
    /// num_prompt_log_probs.
    pub prompt_tokens: *const u32,
    /// The log-probabilities of the ids of the prompt, num_prompt_tokens of them, each after those before
    /// it; that of the first, which comes after nothing, is NaN, and so are those that were not computed
    /// before the request was stopped. NULL if the request has no num_prompt_log_probs.
    pub prompt_log_probs: *const f32,
    /// The most likely tokens in the place of each id of the prompt: num_prompt_top_log_probs for each of
    /// num_prompt_tokens, in the order of top_log_probs; token 0 with NaN where there are none. NULL if
    /// there are none at all.
    pub prompt_top_log_probs: *const xserv_log_prob,
    /// Number of prompt_top_log_probs of an id: num_prompt_log_probs of the request, or the size of the
    /// vocabulary if that is less; 0 if there are none.
    pub num_prompt_top_log_probs: usize,
    /// What the model thought, without the tags and the white space next to them: UTF-8, NUL-terminated,
    /// possibly empty. NULL if the request has no answer_format.
    pub reasoning: *const c_char,
    /// Bytes of reasoning without the NUL.
    pub reasoning_len: usize,
    /// What it says: the text without thoughts and calls, and without the white space next to
    /// those. NULL if the request has no answer_format.
    pub content: *const c_char,
    /// Bytes of content without the NUL.
    pub content_len: usize,
    /// The tools that it calls, in order; NULL if there are none.
    pub tool_calls: *const xserv_tool_call,
    /// Number of tool_calls.
    pub num_tool_calls: usize,
    /// The answer as a message of a conversation, for xserv_messages_add_json(): NUL-terminated
    /// JSON with role and content, and reasoning_content and tool_calls where there are some, in
    /// the form that chat templates take (arguments are objects, calls that are not complete are
    /// left out). NULL if the request has no answer_format.
    pub message_json: *const c_char,
}

// SAFETY: repr(C), struct_size first, integers, floats and pointers only.
unsafe impl GrowingStruct for xserv_result_info {
    const SIZES: &'static [usize] = &[112, 224];
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
            log_probs: std::ptr::null(),
            top_log_probs: std::ptr::null(),
            num_top_log_probs: 0,
            prompt_tokens: std::ptr::null(),
            prompt_log_probs: std::ptr::null(),
            prompt_top_log_probs: std::ptr::null(),
            num_prompt_top_log_probs: 0,
            reasoning: std::ptr::null(),
            reasoning_len: 0,
            content: std::ptr::null(),
            content_len: 0,
            tool_calls: std::ptr::null(),
            num_tool_calls: 0,
            message_json: std::ptr::null(),
        }
    }
}

/// The memory that a sample of a result points to for C.
struct Described {
    /// The text and the final NUL.
    text: Vec<u8>,
    /// The log-probability of each token, if the request wanted them.
    log_probs: Vec<f32>,
    /// The most likely tokens in the place of each token, one after the other.
    top: Vec<xserv_log_prob>,
    /// The number of entries of `top` that each token has.
    num_top: usize,
    /// The parts of the text, if the request wanted them.
    answer: Option<DescribedAnswer>,
}

impl Described {
    fn new(generation: &Generation) -> Result<Self> {
        let all = &generation.log_probs;
        let num_top = all.first().map_or(0, |first| first.top.len());
        let is_whole = all.is_empty() || all.len() == generation.token_ids.len();
        if !is_whole || all.iter().any(|one| one.top.len() != num_top) {
            return Err(Error::internal("a token lacks log-probabilities"));
        }
        let mut log_probs = try_with_capacity(all.len(), "log-probabilities")?;
        log_probs.extend(all.iter().map(|one| one.chosen));
        let mut top = try_with_capacity(all.len().saturating_mul(num_top), "log-probabilities")?;
        for one in all {
            append_top(&mut top, &one.top)?;
        }
        let answer = generation.answer.as_ref().map(DescribedAnswer::new).transpose()?;
        Ok(Described { text: with_nul(&generation.text)?, log_probs, top, num_top, answer })
    }
}

/// Appends the most likely tokens in the place of a token, as C has them.
pub(super) fn append_top(to: &mut Vec<xserv_log_prob>, top: &[TokenLogProb]) -> Result<()> {
    let no_memory = |_| Error::out_of_memory("log-probabilities", size_of_val(top));
    to.try_reserve(top.len()).map_err(no_memory)?;
    to.extend(
        top.iter().map(|one| xserv_log_prob { token_id: one.token_id, log_prob: one.log_prob }),
    );
    Ok(())
}

/// Returns where the elements are; NULL if there are none.
pub(super) fn pointer_to<T>(elements: &[T]) -> *const T {
    if elements.is_empty() {
        std::ptr::null()
    } else {
        elements.as_ptr()
    }
}

struct ResultObject {
    samples: Vec<(Generation, Described)>,
    /// The most likely tokens in the place of those of the prompt.
    prompt_top: Vec<xserv_log_prob>,
}

impl ResultObject {
    fn sample(&self, sample: usize) -> Result<&(Generation, Described)> {
        self.samples.get(sample).ok_or_else(|| {
            let count = self.samples.len();
            Error::invalid_argument(format!("sample is {sample}, but the result has {count}"))
        })
    }
}

/// Makes a handle for the samples of a request, which it takes; on failure it leaves them.
pub(super) fn new_result(generations: &mut Vec<Generation>) -> Result<*mut xserv_result> {
    let mut samples = try_with_capacity(generations.len(), "results")?;
    let mut described = try_with_capacity(generations.len(), "results")?;
    for generation in generations.iter() {
        described.push(Described::new(generation)?);
    }
    let mut prompt_top = Vec::new();
    if let Some(prompt) = generations.first().and_then(|it| it.prompt_log_probs.as_ref()) {
        append_top(&mut prompt_top, &prompt.top)?;
    }
    samples.extend(generations.drain(..).zip(described));
    let object = Arc::new(ResultObject { samples, prompt_top });
    RESULTS.insert(object.clone()).inspect_err(|_| {
        if let Some(object) = Arc::into_inner(object) {
            generations.extend(object.samples.into_iter().map(|(generation, _)| generation));
        }
    })
}

static RESULTS: HandleTable<ResultObject> = HandleTable::new(6, "result");

/// Generates text, and returns when it is done.
///
/// Any number of threads may call it on one model: each step computes as many of their requests
/// together as there is room for, and none waits for another's callback. A request that does not
/// fit at the moment waits, or is preempted and resumed; its output does not depend on it. Being
/// stopped by the callback or cancelled is a success: the result has what was generated, and says
/// why it ended. When the prompt and max_tokens do not fit into the context together, generation
/// ends with XSERV_FINISH_CONTEXT_FULL.
///
/// request: what to generate. callback: called for every token, or NULL. user_data: passed to the
/// callback. result: receives a handle that the caller frees with xserv_result_free(); NULL if the
/// callback is all you need.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (the message names the field; or no token is left to choose),
/// XSERV_STATUS_UNSUPPORTED (text without a tokenizer, messages without a usable chat template, a
/// constraint or a tool_choice that cannot be kept to), XSERV_STATUS_CONTEXT_FULL (the prompt alone is
/// too long), XSERV_STATUS_TEMPLATE, XSERV_STATUS_INVALID_FILE (logits that are not finite: damaged
/// weights), XSERV_STATUS_DEVICE_LOST, XSERV_STATUS_OUT_OF_MEMORY.
///
/// # Safety
/// `request` is readable for its struct_size and its pointers obey their fields' comments; `result`
/// is NULL or writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_generate(
    model: *const xserv_model,
    request: *const xserv_request,
    callback: xserv_token_callback,
    user_data: *mut c_void,
    result: *mut *mut xserv_result,
) -> xserv_status {
    guard_work(|| {
        let out = if result.is_null() {
            None
        } else {
            // SAFETY: by the contract above.
            Some(unsafe { Out::new(result, "result") }?)
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
                // SAFETY: the caller's function with the caller's data, on the caller's thread; the
                // event lives until it returns.
                Ok(call_host(|| unsafe { callback(&event, user_data) }))
            };
        let mut generations = match c_request.logits_callback {
            None => engine.generate(&request, &mut on_token)?,
            Some(change) => {
                let mut on_logits = |event: &LogitsEvent<'_>, logits: &mut [f32]| {
                    let event = xserv_logits_event {
                        struct_size: size_of::<xserv_logits_event>(),
                        logits: logits.as_mut_ptr(),
                        vocab_size: logits.len(),
                        prompt_tokens: event.prompt_token_ids.as_ptr(),
                        num_prompt_tokens: event.prompt_token_ids.len(),
                        token_ids: event.token_ids.as_ptr(),
                        num_tokens: event.token_ids.len() as u32,
                        sample: event.sample as u32,
                    };
                    let user_data = c_request.logits_user_data;
                    // SAFETY: the caller's function with the caller's data, on the caller's thread;
                    // the event and its logits live until it returns.
                    Ok(call_host(|| unsafe { change(&event, user_data) }))
                };
                engine.generate_with(&request, &mut on_token, &mut on_logits)?
            }
        };
        if let Some(out) = out {
            out.set(new_result(&mut generations)?);
        }
        Ok(())
    })
}

/// Describes a result; if it has several samples, the first.
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
/// sample: counted from 0. info: struct_size must be set. Its pointers belong to the result.
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
    let (g, described) = object.sample(sample)?;
    let prompt = g.prompt_log_probs.as_deref();
    let value = xserv_result_info {
        text: described.text.as_ptr() as *const c_char,
        text_len: described.text.len() - 1,
        token_ids: g.token_ids.as_ptr(),
        num_tokens: g.token_ids.len(),
        num_prompt_tokens: g.num_prompt_tokens,
        finish_reason: finish_code(g.finish_reason) as u32,
        seed: g.seed,
        time_to_first_token_seconds: g.time_to_first_token_seconds,
        total_seconds: g.total_seconds,
        prompt_tokens_per_second: g.prompt_tokens_per_second,
        tokens_per_second: g.tokens_per_second,
        num_cached_tokens: g.num_cached_tokens,
        num_preemptions: g.num_preemptions,
        num_samples: object.samples.len() as u32,
        log_probs: pointer_to(&described.log_probs),
        top_log_probs: pointer_to(&described.top),
        num_top_log_probs: described.num_top,
        prompt_tokens: prompt.map_or(std::ptr::null(), |it| it.token_ids.as_ptr()),
        prompt_log_probs: prompt.map_or(std::ptr::null(), |it| it.log_probs.as_ptr()),
        prompt_top_log_probs: pointer_to(&object.prompt_top),
        num_prompt_top_log_probs: prompt.map_or(0, |it| it.num_top),
        ..xserv_result_info::defaults()
    };
    let value = match &described.answer {
        None => value,
        Some(answer) => xserv_result_info {
            reasoning: answer.reasoning.as_ptr() as *const c_char,
            reasoning_len: answer.reasoning.len() - 1,
            content: answer.content.as_ptr() as *const c_char,
            content_len: answer.content.len() - 1,
            tool_calls: pointer_to(&answer.calls),
            num_tool_calls: answer.calls.len(),
            message_json: answer.message.as_ptr() as *const c_char,
            ..value
        },
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
        FinishReason::Complete => xserv_finish_reason::XSERV_FINISH_COMPLETE,
    }
}

/// Returns the generated text of a result: UTF-8, NUL-terminated, valid until the result is freed.
/// Should the model have generated a NUL, xserv_result_info.text_len is the whole length. NULL if
/// the handle is bad (see xserv_last_error()).
#[no_mangle]
pub extern "C" fn xserv_result_text(result: *const xserv_result) -> *const c_char {
    guard_or(std::ptr::null(), || {
        Ok(RESULTS.get(result)?.sample(0)?.1.text.as_ptr() as *const c_char)
    })
}

/// Frees a result; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_result_free(result: *mut xserv_result) {
    guard_or((), || RESULTS.remove(result).map(drop))
}
