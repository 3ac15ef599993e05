//! Text: tokenizing, detokenizing (whole and streaming), chat templates.

#![allow(non_camel_case_types)]

use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

use super::guard::{
    array_argument, flag, guard, guard_or, guard_work, init_struct, optional_text, read_struct,
    text_argument, with_nul, GrowingStruct, Out,
};
use super::handle::HandleTable;
use super::model::{engine_of, xserv_model};
use super::status::xserv_status;
use crate::engine::{ChatPrompt, Engine};
use crate::error::{Error, Result};
use crate::text::Detokenizer;

/// A list of token ids that the library made. It is immutable; any number of threads may read it.
pub struct xserv_tokens {
    _opaque: [u8; 0],
}

/// A text that the library made. It is immutable; any number of threads may read it.
pub struct xserv_text {
    _opaque: [u8; 0],
}

/// A streaming detokenizer, which turns a stream of token ids into text. One thread at a time uses
/// it; a concurrent call from another one waits.
pub struct xserv_detokenizer {
    _opaque: [u8; 0],
}

/// How to tokenize. Fill with xserv_tokenize_options_default().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_tokenize_options {
    /// sizeof(xserv_tokenize_options).
    pub struct_size: usize,
    /// 1 (default): add the special tokens that the tokenizer adds around a text (Qwen and GPT-2:
    /// none; Llama and Mistral: the one that begins a text, unless the text begins with it, as a
    /// rendered conversation does). 0: the text alone.
    pub add_special_tokens: u8,
    /// 1 (default): special tokens written in the text, such as <|im_end|>, become their ids. 0:
    /// they are ordinary text; use this for text that you do not trust.
    pub parse_special_tokens: u8,
    /// Unused, 0.
    pub reserved: [u8; 6],
}

// SAFETY: repr(C), struct_size first, integers only.
unsafe impl GrowingStruct for xserv_tokenize_options {
    const SIZES: &'static [usize] = &[16];
    const NAME: &'static str = "xserv_tokenize_options";
    const HOW: &'static str = "fill it with xserv_tokenize_options_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == [0; 6]
    }
    fn defaults() -> Self {
        xserv_tokenize_options {
            struct_size: size_of::<Self>(),
            add_special_tokens: 1,
            parse_special_tokens: 1,
            reserved: [0; 6],
        }
    }
}

/// A conversation to be rendered. Fill with xserv_chat_options_default(), then set messages_json.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_chat_options {
    /// sizeof(xserv_chat_options).
    pub struct_size: usize,
    /// NUL-terminated JSON: an array of messages, [{"role": "user", "content": "..."}, ...].
    /// Required.
    pub messages_json: *const c_char,
    /// NUL-terminated JSON array of tool descriptions for the template, or NULL (default).
    pub tools_json: *const c_char,
    /// NUL-terminated JSON object of further template variables, such as
    /// {"enable_thinking": false}, or NULL (default).
    pub template_variables_json: *const c_char,
    /// 1 (default): end with the opening of the assistant's turn. 0: end after the last message.
    pub add_generation_prompt: u8,
    /// As in xserv_request. Only xserv_tokenize_chat() looks at it: the text of a conversation does
    /// not show what its special tokens are.
    pub parse_special_in_messages: u8,
    /// Unused, 0.
    pub reserved: [u8; 6],
}

// SAFETY: repr(C), struct_size first, integers and pointers only.
unsafe impl GrowingStruct for xserv_chat_options {
    const SIZES: &'static [usize] = &[40];
    const NAME: &'static str = "xserv_chat_options";
    const HOW: &'static str = "fill it with xserv_chat_options_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == [0; 6]
    }
    fn defaults() -> Self {
        xserv_chat_options {
            struct_size: size_of::<Self>(),
            messages_json: std::ptr::null(),
            tools_json: std::ptr::null(),
            template_variables_json: std::ptr::null(),
            add_generation_prompt: 1,
            parse_special_in_messages: 0,
            reserved: [0; 6],
        }
    }
}

/// A text with its final NUL.
struct TextObject(Vec<u8>);

/// A streaming detokenizer and the last piece that it returned, with its final NUL.
struct DetokenizerObject {
    engine: Arc<Engine>,
    state: Mutex<(Detokenizer, Vec<u8>)>,
}

static TOKENS: HandleTable<Vec<u32>> = HandleTable::new(2, "tokens");
static TEXTS: HandleTable<TextObject> = HandleTable::new(3, "text");
static DETOKENIZERS: HandleTable<DetokenizerObject> = HandleTable::new(4, "detokenizer");

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_tokenize_options) of the header that the program is built with; no
/// byte beyond it is written. xserv_tokenize_options_default() passes it. Does nothing if options
/// is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_tokenize_options_init(
    options: *mut xserv_tokenize_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Turns text into token ids.
///
/// text: UTF-8 of text_len bytes, or up to its NUL with XSERV_NUL_TERMINATED; at most 16 MiB.
/// options: NULL for the defaults. tokens: receives a list that the caller frees with
/// xserv_tokens_free().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (not UTF-8: the message gives the offset; too long),
/// XSERV_STATUS_UNSUPPORTED (the model has no usable tokenizer, or one that takes shorter texts only:
/// the message says why), XSERV_STATUS_INVALID_FILE (tokenizer.json makes the text take more than a
/// second of processor time and 4 microseconds a byte, as only one that means harm does),
/// XSERV_STATUS_CANCELLED (the model was freed meanwhile).
///
/// # Safety
/// `text` is readable for `text_len` bytes or NUL-terminated; `options` is NULL or readable for its
/// struct_size; `tokens` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_tokenize(
    model: *const xserv_model,
    text: *const c_char,
    text_len: usize,
    options: *const xserv_tokenize_options,
    tokens: *mut *mut xserv_tokens,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(tokens, "tokens") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let text = unsafe { text_argument(text, text_len, "text") }?;
        let add_special = flag(options.add_special_tokens, "options.add_special_tokens")?;
        let parse_special = flag(options.parse_special_tokens, "options.parse_special_tokens")?;
        let ids = engine_of(model)?.tokenize(text, add_special, parse_special)?;
        out.set(TOKENS.insert(Arc::new(ids))?);
        Ok(())
    })
}

/// Returns the ids of a list; num_tokens, if not NULL, receives their number. Valid until the list
/// is freed; NULL if the handle is bad (see xserv_last_error()).
///
/// # Safety
/// `num_tokens` is NULL or writable.
#[no_mangle]
pub unsafe extern "C" fn xserv_tokens_data(
    tokens: *const xserv_tokens,
    num_tokens: *mut usize,
) -> *const u32 {
    guard_or(std::ptr::null(), || {
        let ids = TOKENS.get(tokens)?;
        if !num_tokens.is_null() {
            // SAFETY: writable by contract.
            unsafe { Out::new(num_tokens, "num_tokens") }?.set(ids.len());
        }
        Ok(ids.as_ptr())
    })
}

/// Frees a list of tokens; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_tokens_free(tokens: *mut xserv_tokens) {
    guard_or((), || TOKENS.remove(tokens).map(drop))
}

/// Turns token ids into text. Bytes that are not UTF-8 become U+FFFD.
///
/// skip_special_tokens: true leaves special tokens such as <|im_end|> out. text: receives a text
/// that the caller frees with xserv_text_free().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (an id at or beyond the model's vocab_size; ids below it
/// for which the tokenizer has no token have no text).
///
/// # Safety
/// `token_ids` is readable for `num_tokens` ids (ignored if 0); `text` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_detokenize(
    model: *const xserv_model,
    token_ids: *const u32,
    num_tokens: usize,
    skip_special_tokens: bool,
    text: *mut *mut xserv_text,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(text, "text") }?;
        // SAFETY: as above.
        let ids = unsafe { array_argument(token_ids, num_tokens, "token_ids") }?;
        let decoded = engine_of(model)?.detokenize(ids, skip_special_tokens)?;
        out.set(new_text(&decoded)?);
        Ok(())
    })
}

fn new_text(text: &str) -> Result<*mut xserv_text> {
    TEXTS.insert(Arc::new(TextObject(with_nul(text)?)))
}

/// Returns the bytes of a text: UTF-8, NUL-terminated; len_bytes, if not NULL, receives the length
/// without the NUL. Valid until the text is freed; NULL if the handle is bad (see
/// xserv_last_error()).
///
/// # Safety
/// `len_bytes` is NULL or writable.
#[no_mangle]
pub unsafe extern "C" fn xserv_text_data(
    text: *const xserv_text,
    len_bytes: *mut usize,
) -> *const c_char {
    guard_or(std::ptr::null(), || {
        let text = TEXTS.get(text)?;
        if !len_bytes.is_null() {
            // SAFETY: writable by contract.
            unsafe { Out::new(len_bytes, "len_bytes") }?.set(text.0.len() - 1);
        }
        Ok(text.0.as_ptr() as *const c_char)
    })
}

/// Frees a text; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_text_free(text: *mut xserv_text) {
    guard_or((), || TEXTS.remove(text).map(drop))
}

/// Makes a streaming detokenizer, for token ids that come one at a time. It keeps its model alive.
///
/// skip_special_tokens: true leaves special tokens out. detokenizer: receives a handle that the
/// caller frees with xserv_detokenizer_free().
///
/// # Safety
/// `detokenizer` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_detokenizer_new(
    model: *const xserv_model,
    skip_special_tokens: bool,
    detokenizer: *mut *mut xserv_detokenizer,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(detokenizer, "detokenizer") }?;
        let engine = engine_of(model)?;
        let state = Mutex::new((engine.detokenizer(skip_special_tokens)?, Vec::new()));
        out.set(DETOKENIZERS.insert(Arc::new(DetokenizerObject { engine, state }))?);
        Ok(())
    })
}

/// Takes the next token and gives the text that is final now: whole UTF-8 characters, possibly
/// none. A character that spans tokens comes with the last of them; bytes that cannot become a
/// character come as U+FFFD.
///
/// text: receives UTF-8, NUL-terminated, that belongs to the detokenizer and is valid until the
/// next call with it. len_bytes: if not NULL, receives the length without the NUL.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (an id at or beyond the model's vocab_size; ids below it
/// for which the tokenizer has no token have no text).
///
/// # Safety
/// `text` is writable; `len_bytes` is NULL or writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_detokenizer_push(
    detokenizer: *mut xserv_detokenizer,
    token_id: u32,
    text: *mut *const c_char,
    len_bytes: *mut usize,
) -> xserv_status {
    // SAFETY: by the contract above.
    unsafe {
        next_piece(detokenizer, text, len_bytes, |engine, stream| {
            engine.check_token_id(token_id)?;
            stream.push(token_id)
        })
    }
}

/// Ends the stream: gives what is still held back (an unfinished character comes as U+FFFD). The
/// detokenizer can then be used for another stream. Arguments as in xserv_detokenizer_push().
///
/// # Safety
/// As xserv_detokenizer_push().
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_detokenizer_finish(
    detokenizer: *mut xserv_detokenizer,
    text: *mut *const c_char,
    len_bytes: *mut usize,
) -> xserv_status {
    // SAFETY: by the contract above.
    unsafe { next_piece(detokenizer, text, len_bytes, |_, stream| stream.finish()) }
}

/// # Safety
/// `text` is writable; `len_bytes` is NULL or writable.
unsafe fn next_piece(
    detokenizer: *mut xserv_detokenizer,
    text: *mut *const c_char,
    len_bytes: *mut usize,
    advance: impl FnOnce(&Engine, &mut Detokenizer) -> Result<String>,
) -> xserv_status {
    guard(|| {
        // SAFETY: by contract.
        let out = unsafe { Out::new(text, "text") }?;
        let object = DETOKENIZERS.get(detokenizer)?;
        object.engine.check_process()?;
        let mut state = object.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, kept) = &mut *state;
        let mut piece = advance(&object.engine, stream)?.into_bytes();
        // Only an empty piece has no room, and is no loss: the stream has advanced.
        piece.try_reserve_exact(1).map_err(|_| Error::out_of_memory("a piece of text", 1))?;
        piece.push(0);
        *kept = piece;
        if !len_bytes.is_null() {
            // SAFETY: by contract.
            unsafe { Out::new(len_bytes, "len_bytes") }?.set(kept.len() - 1);
        }
        out.set(kept.as_ptr() as *const c_char);
        Ok(())
    })
}

/// Frees a detokenizer; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_detokenizer_free(detokenizer: *mut xserv_detokenizer) {
    guard_or((), || DETOKENIZERS.remove(detokenizer).map(drop))
}

/// Sets every field to its default, which leaves messages_json to be set.
///
/// struct_size: sizeof(xserv_chat_options) of the header that the program is built with; no byte beyond it is
/// written. xserv_chat_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_chat_options_init(
    options: *mut xserv_chat_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Renders a conversation with the model's own chat template (chat_template.jinja or
/// tokenizer_config.json), as Transformers does. Templates are run under limits of time, size and
/// depth.
///
/// text: receives a text that the caller frees with xserv_text_free().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (messages that are not an array of objects, bad JSON),
/// XSERV_STATUS_TEMPLATE (the template failed or refused the messages; the message quotes it),
/// XSERV_STATUS_UNSUPPORTED (the model has no usable chat template).
///
/// # Safety
/// `options` is readable for its struct_size and its strings end in NULs; `text` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_apply_chat_template(
    model: *const xserv_model,
    options: *const xserv_chat_options,
    text: *mut *mut xserv_text,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(text, "text") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let prompt = unsafe {
            chat_prompt(
                options.messages_json,
                options.tools_json,
                options.template_variables_json,
                options.add_generation_prompt,
                options.parse_special_in_messages,
            )
        }?
        .ok_or_else(|| Error::invalid_argument("options.messages_json is NULL"))?;
        out.set(new_text(&engine_of(model)?.apply_chat_template(&prompt)?)?);
        Ok(())
    })
}

/// Renders a conversation and turns it into token ids, as a request with these messages does: for
/// programs that count tokens. (To tokenize the text of xserv_apply_chat_template() gives other ids
/// where contents have special tokens written in them.)
///
/// tokens: receives a list that the caller frees with xserv_tokens_free().
///
/// Errors: as xserv_apply_chat_template() and xserv_tokenize().
///
/// # Safety
/// `options` is readable for its struct_size and its strings end in NULs; `tokens` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_tokenize_chat(
    model: *const xserv_model,
    options: *const xserv_chat_options,
    tokens: *mut *mut xserv_tokens,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(tokens, "tokens") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let prompt = unsafe {
            chat_prompt(
                options.messages_json,
                options.tools_json,
                options.template_variables_json,
                options.add_generation_prompt,
                options.parse_special_in_messages,
            )
        }?
        .ok_or_else(|| Error::invalid_argument("options.messages_json is NULL"))?;
        let ids = engine_of(model)?.tokenize_chat(&prompt)?;
        out.set(TOKENS.insert(Arc::new(ids))?);
        Ok(())
    })
}

/// Returns the conversation that C arguments describe, or `None` if `messages_json` is NULL.
///
/// # Safety
/// Each string is NULL or ends in a NUL, readable for `'a`.
pub(super) unsafe fn chat_prompt<'a>(
    messages_json: *const c_char,
    tools_json: *const c_char,
    template_variables_json: *const c_char,
    add_generation_prompt: u8,
    parse_special_in_messages: u8,
) -> Result<Option<ChatPrompt<'a>>> {
    // SAFETY: by contract, here and below.
    let Some(messages) = unsafe { optional_text(messages_json, "messages_json") }? else {
        return Ok(None);
    };
    Ok(Some(ChatPrompt {
        messages,
        // SAFETY: as above.
        tools: unsafe { optional_text(tools_json, "tools_json") }?,
        // SAFETY: as above.
        variables: unsafe { optional_text(template_variables_json, "template_variables_json") }?,
        add_generation_prompt: flag(add_generation_prompt, "add_generation_prompt")?,
        parse_special: flag(parse_special_in_messages, "parse_special_in_messages")?,
    }))
}
