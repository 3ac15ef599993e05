//! Conversations, built without writing JSON.

#![allow(non_camel_case_types)]

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::guard::{guard, guard_or, guard_work, optional_text, text_argument, Out};
use super::handle::HandleTable;
use super::status::xserv_status;
use super::types::XSERV_NUL_TERMINATED;
use crate::error::{Error, ErrorKind, Result};
use crate::process::Process;
use crate::text::Messages;

/// A conversation: messages that are added one by one, and become the JSON of a request. It belongs
/// to no model. One thread at a time uses it; a concurrent call from another one waits.
pub struct xserv_messages {
    _opaque: [u8; 0],
}

struct MessagesObject {
    messages: Mutex<Messages>,
    process: Process,
}

static MESSAGES: HandleTable<MessagesObject> = HandleTable::new(11, "messages");

impl MessagesObject {
    fn lock(&self) -> Result<MutexGuard<'_, Messages>> {
        if !self.process.is_current() {
            // Another thread of the parent may have held the lock.
            let message = "the messages were made before this process was forked";
            return Err(Error::new(ErrorKind::Forked, message));
        }
        Ok(self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Makes an empty conversation.
///
/// messages: receives a handle that the caller frees with xserv_messages_free().
///
/// # Safety
/// `messages` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_messages_new(messages: *mut *mut xserv_messages) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(messages, "messages") }?;
        let object =
            MessagesObject { messages: Mutex::new(Messages::new()?), process: Process::current() };
        out.set(MESSAGES.insert(Arc::new(object))?);
        Ok(())
    })
}

/// Adds a message to the end of a conversation.
///
/// role: "system", "user", "assistant", or what else the model's chat template knows. content: any
/// text; it is copied, and nothing in it needs escaping. Special tokens written in it, such as
/// <|im_end|>, stay ordinary text in requests (see parse_special_in_messages of xserv_request).
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (not UTF-8; more than 16 MiB of messages).
///
/// # Safety
/// `role` and `content` are NUL-terminated.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_messages_add(
    messages: *mut xserv_messages,
    role: *const c_char,
    content: *const c_char,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let role = unsafe { text_argument(role, XSERV_NUL_TERMINATED, "role") }?;
        // SAFETY: as above.
        let content = unsafe { text_argument(content, XSERV_NUL_TERMINATED, "content") }?;
        MESSAGES.get(messages)?.lock()?.add(role, content)
    })
}

/// Adds the result of a tool that the model has called: a message of the role "tool".
///
/// tool_call_id: the id of the call, for templates that want one, or NULL. name: the tool's name, or
/// NULL. content: the result, as text or JSON.
///
/// Errors: as xserv_messages_add().
///
/// # Safety
/// `tool_call_id` and `name` are NULL or NUL-terminated; `content` is NUL-terminated.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_messages_add_tool_result(
    messages: *mut xserv_messages,
    tool_call_id: *const c_char,
    name: *const c_char,
    content: *const c_char,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let id = unsafe { optional_text(tool_call_id, "tool_call_id") }?;
        // SAFETY: as above.
        let name = unsafe { optional_text(name, "name") }?;
        // SAFETY: as above.
        let content = unsafe { text_argument(content, XSERV_NUL_TERMINATED, "content") }?;
        MESSAGES.get(messages)?.lock()?.add_tool_result(id, name, content)
    })
}

/// Adds messages that are JSON already: one object with a "role", or an array of them. For fields
/// that the other functions do not have, and for an answer of the model with calls of tools
/// (message_json of xserv_result_info). A "content" that is a list of texts, [{"type": "text",
/// "text": "..."}], becomes one string with line breaks between them when it is rendered by a
/// template that takes strings alone.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (no JSON; no objects; no role; more than 16 MiB of
/// messages); then none is added.
///
/// # Safety
/// `json` is NUL-terminated.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_messages_add_json(
    messages: *mut xserv_messages,
    json: *const c_char,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let json = unsafe { text_argument(json, XSERV_NUL_TERMINATED, "json") }?;
        MESSAGES.get(messages)?.lock()?.add_json(json.as_bytes())
    })
}

/// Removes a message, for conversations that outgrow their context.
///
/// index: its place, from 0; those after it move up.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (there are fewer messages).
#[must_use]
#[no_mangle]
pub extern "C" fn xserv_messages_remove(
    messages: *mut xserv_messages,
    index: usize,
) -> xserv_status {
    guard(|| MESSAGES.get(messages)?.lock()?.remove(index))
}

/// Returns the number of messages; 0 if the handle is bad (see xserv_last_error()).
#[no_mangle]
pub extern "C" fn xserv_messages_count(messages: *const xserv_messages) -> usize {
    guard_or(0, || Ok(MESSAGES.get(messages)?.lock()?.len()))
}

/// Returns the conversation as a NUL-terminated JSON array, for messages_json of a request or of
/// xserv_chat_options. Valid until a message is added or removed, or the conversation is freed; NULL
/// if the handle is bad (see xserv_last_error()).
#[no_mangle]
pub extern "C" fn xserv_messages_json(messages: *const xserv_messages) -> *const c_char {
    guard_or(std::ptr::null(), || {
        Ok(MESSAGES.get(messages)?.lock()?.json_with_nul().as_ptr() as *const c_char)
    })
}

/// Frees a conversation; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_messages_free(messages: *mut xserv_messages) {
    guard_or((), || MESSAGES.remove(messages).map(drop))
}
