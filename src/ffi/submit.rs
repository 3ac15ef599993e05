//! Requests for event loops: submitted, then polled for events without blocking.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::generate::{
    append_top, finish_code, new_result, pointer_to, xserv_log_prob, xserv_result,
};
use super::guard::{
    guard, guard_or, guard_work, init_struct, read_struct, with_nul, write_struct, GrowingStruct,
    Out,
};
use super::handle::HandleTable;
use super::model::{engine_of, xserv_model};
use super::request::{request_of, xserv_request};
use super::status::xserv_status;
use super::types::XSERV_NO_TOKEN;
use super::wake::waker_of;
use crate::engine::{AnswerPart, Event, Generation, Ticket, TicketHandle};
use crate::error::{Error, Result};

/// Used for the timeout of xserv_next(): wait as long as it takes.
pub const XSERV_WAIT_FOREVER: u32 = u32::MAX;

/// A submitted request. Any thread may use it. Each event is given once, to one of the threads that
/// ask for it.
pub struct xserv_submission {
    _opaque: [u8; 0],
}

/// Called when a submission has events after it had none. Runs on one of the library's threads, with
/// no lock held, and must be quick: the model computes nothing meanwhile. It may call every function
/// that does not wait for the model: xserv_submit(), xserv_poll(), xserv_next() with a timeout of 0,
/// xserv_submission_take_result(), xserv_cancel() and the _free functions, for its own submission
/// too. It may run before xserv_submit() has returned, and is never called by xserv_submit() itself.
///
/// xserv_submission_free() waits for this callback, and xserv_model_free() for those of all requests
/// of the model, if they are running on another thread (within a callback xserv_model_free() waits
/// for none). So call neither while you hold a lock that such a callback takes.
pub type xserv_wake_callback = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// How to be notified of a submission's events. Fill with xserv_submit_options_default(), then set
/// wake, wake_fd, both or neither (then call xserv_poll() or xserv_next() from time to time, or
/// wait in xserv_next()).
///
/// A notification is given once: after it, take events until there are none before waiting again.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_submit_options {
    /// sizeof(xserv_submit_options), set by xserv_submit_options_default().
    pub struct_size: usize,
    /// Called when there are events; NULL (default): not called.
    pub wake: xserv_wake_callback,
    /// Passed to wake.
    pub wake_user_data: *mut c_void,
    /// A non-blocking file descriptor (an eventfd with EFD_NONBLOCK, a pipe): when there are
    /// events, the eight bytes of the 64-bit number 1 are written to it. Several submissions may
    /// share one. The caller owns it, and keeps it open until the submission is freed. If nobody
    /// can read it any more, nothing is written and no SIGPIPE is raised. -1 (default): none.
    pub wake_fd: i32,
    /// The kinds of events to be told: the sum of 1 << kind, for each xserv_event_kind that is
    /// wanted; 0 (default): TOKEN, TEXT, END and DONE, also in later versions that have more.
    /// XSERV_EVENT_DONE is told in any case. The result has all of the text and the tokens.
    pub events: u32,
}

// SAFETY: repr(C), struct_size first, integers, pointers and nullable function pointers; a caller
// who passes a function pointer that is none breaks the contract of that field.
unsafe impl GrowingStruct for xserv_submit_options {
    const SIZES: &'static [usize] = &[32];
    const NAME: &'static str = "xserv_submit_options";
    const HOW: &'static str = "fill it with xserv_submit_options_default()";
    fn defaults() -> Self {
        xserv_submit_options {
            struct_size: size_of::<Self>(),
            wake: None,
            wake_user_data: std::ptr::null_mut(),
            wake_fd: -1,
            events: 0,
        }
    }
}

/// The kind of an event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_event_kind {
    /// No event: none came within the timeout.
    XSERV_EVENT_NONE = 0,
    /// A token was generated.
    XSERV_EVENT_TOKEN = 1,
    /// Text that was held back became final with the end of the sample.
    XSERV_EVENT_TEXT = 2,
    /// A sample has ended.
    XSERV_EVENT_END = 3,
    /// All samples have ended; there will be no more events.
    XSERV_EVENT_DONE = 4,
    /// How likely a token of the prompt was, in the order of the prompt and from its second token on, for
    /// a request with num_prompt_log_probs; only told if xserv_submit_options.events asks for it.
    XSERV_EVENT_PROMPT = 5,
    /// More of what the model thinks. This kind and those after it are told to those who ask for
    /// them (events of xserv_submit_options), if the request has an answer_format. They come after
    /// the token that made them certain and before the end of the sample, and repeat the text of
    /// tokens: a program that shows them does not show that of XSERV_EVENT_TOKEN.
    XSERV_EVENT_REASONING = 6,
    /// More of what the model says.
    XSERV_EVENT_CONTENT = 7,
    /// The model begins to call a tool: tool_call_index, tool_call_id and tool_name.
    XSERV_EVENT_TOOL_CALL_BEGIN = 8,
    /// More of the JSON text of its arguments.
    XSERV_EVENT_TOOL_CALL_ARGUMENTS = 9,
    /// The call has ended: tool_call_is_complete.
    XSERV_EVENT_TOOL_CALL_END = 10,
}

/// An event of a submission. Set struct_size, then call xserv_next().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_event {
    /// sizeof(xserv_event), set by the caller.
    pub struct_size: usize,
    /// An xserv_event_kind.
    pub kind: u32,
    /// The index of the sample of the request, from 0.
    pub sample: u32,
    /// The text that became final: whole UTF-8 characters, NUL-terminated, possibly empty. Valid
    /// until the next xserv_next() on the submission, by whichever thread, or until it is freed.
    pub text: *const c_char,
    /// Bytes of text without the NUL.
    pub text_len: usize,
    /// XSERV_EVENT_TOKEN, XSERV_EVENT_PROMPT: the token; else XSERV_NO_TOKEN.
    pub token_id: u32,
    /// Number of tokens of the sample so far; XSERV_EVENT_PROMPT: those of the prompt, this one
    /// included.
    pub num_tokens: u32,
    /// XSERV_EVENT_END: an xserv_finish_reason.
    pub finish_reason: u32,
    /// Unused, 0.
    pub reserved: u32,
    /// XSERV_EVENT_TOKEN: the log-probability of the token, if the request has num_log_probs;
    /// XSERV_EVENT_PROMPT: that of the token of the prompt; else NaN.
    pub log_prob: f32,
    /// Number of top_log_probs: num_log_probs of the request (XSERV_EVENT_PROMPT: num_prompt_log_probs),
    /// or the size of the vocabulary if that is less; 0 if there are none.
    pub num_top_log_probs: u32,
    /// The most likely tokens in the place of this one, which may or may not be among them: the
    /// likeliest first, of equals the one with the lower id first; or NULL. Valid as long as text.
    pub top_log_probs: *const xserv_log_prob,
    /// XSERV_EVENT_TOOL_CALL_BEGIN: the id of the call, made up by the library; else NULL. Valid as long as
    /// text.
    pub tool_call_id: *const c_char,
    /// XSERV_EVENT_TOOL_CALL_BEGIN: the name of the tool, which the model may have invented; else NULL. Valid
    /// as long as text.
    pub tool_name: *const c_char,
    /// XSERV_EVENT_TOOL_CALL_...: the number of the call in the sample, from 0.
    pub tool_call_index: u32,
    /// XSERV_EVENT_TOOL_CALL_END: as is_complete of xserv_tool_call.
    pub tool_call_is_complete: u32,
}

// SAFETY: repr(C), struct_size first, integers, floats and pointers only.
unsafe impl GrowingStruct for xserv_event {
    const SIZES: &'static [usize] = &[48, 88];
    const NAME: &'static str = "xserv_event";
    const HOW: &'static str = "set it to sizeof(xserv_event)";
    fn defaults() -> Self {
        xserv_event {
            struct_size: size_of::<Self>(),
            kind: xserv_event_kind::XSERV_EVENT_NONE as u32,
            sample: 0,
            text: c"".as_ptr(),
            text_len: 0,
            token_id: XSERV_NO_TOKEN,
            num_tokens: 0,
            finish_reason: 0,
            reserved: 0,
            log_prob: f32::NAN,
            num_top_log_probs: 0,
            top_log_probs: std::ptr::null(),
            tool_call_id: std::ptr::null(),
            tool_name: std::ptr::null(),
            tool_call_index: 0,
            tool_call_is_complete: 0,
        }
    }
}

/// The state of the thread that takes events.
struct Taker {
    ticket: Ticket,
    /// The text of the last event, with its NUL.
    text: Vec<u8>,
    /// The id and the name of the call that begins with it, with their NULs.
    call: [Vec<u8>; 2],
    /// The most likely tokens of the last event.
    top: Vec<xserv_log_prob>,
    /// The samples, after an attempt to make a result of them has failed.
    generations: Vec<Generation>,
}

struct Submission {
    /// Never locked while a thread waits for events.
    taker: Mutex<Taker>,
    handle: TicketHandle,
    /// The kinds of events that the caller wants, as bits.
    events: u32,
}

/// The bit of a kind of events.
const fn bit(kind: xserv_event_kind) -> u32 {
    1 << kind as u32
}

/// The events that a caller who asks for none in particular gets; those of the first version.
const USUAL_EVENTS: u32 = bit(xserv_event_kind::XSERV_EVENT_TOKEN)
    | bit(xserv_event_kind::XSERV_EVENT_TEXT)
    | bit(xserv_event_kind::XSERV_EVENT_END)
    | bit(xserv_event_kind::XSERV_EVENT_DONE);

/// The events that tell the parts of answers.
const ANSWER_EVENTS: u32 = bit(xserv_event_kind::XSERV_EVENT_REASONING)
    | bit(xserv_event_kind::XSERV_EVENT_CONTENT)
    | bit(xserv_event_kind::XSERV_EVENT_TOOL_CALL_BEGIN)
    | bit(xserv_event_kind::XSERV_EVENT_TOOL_CALL_ARGUMENTS)
    | bit(xserv_event_kind::XSERV_EVENT_TOOL_CALL_END);

/// The events that a caller may ask for.
const ALL_EVENTS: u32 = USUAL_EVENTS | bit(xserv_event_kind::XSERV_EVENT_PROMPT) | ANSWER_EVENTS;

/// Returns the events that a caller wants, as bits.
fn wanted_events(options: &xserv_submit_options) -> Result<u32> {
    match options.events {
        0 => Ok(USUAL_EVENTS),
        events if events & !ALL_EVENTS == 0 => Ok(events | bit(xserv_event_kind::XSERV_EVENT_DONE)),
        events => Err(Error::invalid_argument(format!(
            "options.events is {events:#x}, which has bits of no xserv_event_kind of this version"
        ))),
    }
}

impl Submission {
    /// Locks the state for taking events. After a fork the lock may be held for ever, so a child is
    /// refused.
    fn taker(&self) -> Result<MutexGuard<'_, Taker>> {
        self.handle.check_process()?;
        Ok(self.taker.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the next event that the caller wants, if there is one.
    fn try_next(&self) -> Result<Option<xserv_event>> {
        let mut taker = self.taker()?;
        let Taker { ticket, text, call, top, .. } = &mut *taker;
        loop {
            let Some(event) = ticket.try_next()? else { return Ok(None) };
            if matches!(event, Event::Answer { .. }) && self.events & ANSWER_EVENTS == 0 {
                continue;
            }
            let described = describe(&event, text, call, top);
            if described.is_err() {
                // The caller does not get this event, so it must not take those after it for the
                // next.
                match event {
                    Event::Token { sample, .. }
                    | Event::Text { sample, .. }
                    | Event::Answer { sample, .. } => ticket.fail(sample),
                    Event::Prompt { .. } => ticket.fail_all(),
                    _ => {}
                }
            }
            let described = described?;
            if self.events & (1 << described.kind) != 0 {
                return Ok(Some(described));
            }
        }
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.handle.disarm();
    }
}

static SUBMISSIONS: HandleTable<Submission> = HandleTable::new(10, "submission");

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_submit_options) of the header that the program is built with; no byte
/// beyond it is written. xserv_submit_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_submit_options_init(
    options: *mut xserv_submit_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Submits a request and returns at once; xserv_next() delivers what is generated.
///
/// Tokenizing (and rendering of messages) is done in this call, and takes milliseconds for a long
/// prompt. The request's cancel token, stop
/// strings and everything else may be freed when it returns. Freeing the model ends the request as
/// cancelled.
///
/// request: what to generate. options: NULL for the defaults. submission: receives a handle, which
/// the caller frees with xserv_submission_free().
///
/// Errors: as xserv_generate().
///
/// # Safety
/// `request` is readable for its struct_size and its pointers obey their fields' comments;
/// `options` is NULL or readable for its struct_size; `submission` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_submit(
    model: *const xserv_model,
    request: *const xserv_request,
    options: *const xserv_submit_options,
    submission: *mut *mut xserv_submission,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above, here and below.
        let out = unsafe { Out::new(submission, "submission") }?;
        if request.is_null() {
            return Err(Error::invalid_argument("request is NULL"));
        }
        // SAFETY: as above.
        let c_request = unsafe { read_struct(request, "request") }?;
        if c_request.logits_callback.is_some() {
            return Err(Error::invalid_argument(
                "request.logits_callback is for xserv_generate(): a submission has no thread to call it on",
            ));
        }
        // SAFETY: as above.
        let request = unsafe { request_of(&c_request) }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        let events = wanted_events(&options)?;
        let engine = engine_of(model)?;
        let (ticket, prepared) = engine
            .prepare(&request, waker_of(options.wake, options.wake_user_data, options.wake_fd)?)?;
        let handle = ticket.handle();
        let taker = Mutex::new(Taker {
            ticket,
            text: Vec::new(),
            call: Default::default(),
            top: Vec::new(),
            generations: Vec::new(),
        });
        // The handle comes first: nothing fails once the callback may run, so this call never has
        // to wait for it.
        let submission: *mut xserv_submission =
            SUBMISSIONS.insert(Arc::new(Submission { taker, handle, events }))?;
        if let Err(error) = engine.hand_over(prepared) {
            SUBMISSIONS.remove(submission)?;
            return Err(error);
        }
        out.set(submission);
        Ok(())
    })
}

/// Takes the next event of a submission.
///
/// timeout_ms: the time to wait for one; 0 does not wait, XSERV_WAIT_FOREVER waits as long as it
/// takes. If none comes, the event's kind is XSERV_EVENT_NONE. Once all samples have ended it is
/// XSERV_EVENT_DONE, in this and in every later call. That another thread waits for an event of the
/// same submission makes no difference.
///
/// event: struct_size must be set.
///
/// Errors: the failure of a sample, which has then ended, and the next call continues with the others:
/// XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST, XSERV_STATUS_INVALID_FILE (logits that are not
/// finite), XSERV_STATUS_UNSUPPORTED (a constraint that became too complex),
/// XSERV_STATUS_INVALID_ARGUMENT (no token is left to choose). This includes a lack of memory in this
/// very call: no event is left out without the sample's end. XSERV_STATUS_INVALID_ARGUMENT also where
/// it is called in a wake-up callback with a timeout other than 0.
///
/// # Safety
/// `event` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_next(
    submission: *const xserv_submission,
    timeout_ms: u32,
    event: *mut xserv_event,
) -> xserv_status {
    guard(|| {
        let object = SUBMISSIONS.get(submission)?;
        let timeout = match timeout_ms {
            XSERV_WAIT_FOREVER => None,
            ms => Some(Duration::from_millis(u64::from(ms))),
        };
        // Checked by writing first: an event taken and then not written would be lost.
        // SAFETY: by the contract above, here and below.
        unsafe { write_struct(event, "event", &xserv_event::defaults()) }?;
        let Some(value) = object.handle.wait_for(timeout, || object.try_next())? else {
            return Ok(());
        };
        // SAFETY: as above.
        unsafe { write_struct(event, "event", &value) }
    })
}

/// Describes an event for C; `text`, `call` and `top` keep what it points to.
fn describe(
    event: &Event,
    text: &mut Vec<u8>,
    call: &mut [Vec<u8>; 2],
    top: &mut Vec<xserv_log_prob>,
) -> Result<xserv_event> {
    let none = xserv_event::defaults();
    let mut keep = |piece: &str| -> Result<(*const c_char, usize)> {
        text.clear();
        text.try_reserve(piece.len() + 1)
            .map_err(|_| Error::out_of_memory("a piece of text", piece.len() + 1))?;
        text.extend_from_slice(piece.as_bytes());
        text.push(0);
        Ok((text.as_ptr() as *const c_char, piece.len()))
    };
    Ok(match *event {
        Event::Prompt { index, token, ref log_probs } => {
            top.clear();
            append_top(top, &log_probs.top)?;
            xserv_event {
                kind: xserv_event_kind::XSERV_EVENT_PROMPT as u32,
                token_id: token,
                num_tokens: index as u32 + 1,
                log_prob: log_probs.chosen,
                num_top_log_probs: top.len() as u32,
                top_log_probs: pointer_to(top),
                ..none
            }
        }
        Event::Logits(_) => return Err(Error::internal("logits that nobody asked for")),
        Event::Token { sample, token, ref text, num_tokens, ref log_probs } => {
            let (text, text_len) = keep(text)?;
            let event = xserv_event {
                kind: xserv_event_kind::XSERV_EVENT_TOKEN as u32,
                sample: sample as u32,
                text,
                text_len,
                token_id: token,
                num_tokens: num_tokens as u32,
                ..none
            };
            let Some(log_probs) = log_probs else { return Ok(event) };
            top.clear();
            append_top(top, &log_probs.top)?;
            xserv_event {
                log_prob: log_probs.chosen,
                num_top_log_probs: top.len() as u32,
                top_log_probs: pointer_to(top),
                ..event
            }
        }
        Event::Text { sample, ref text, num_tokens } => {
            let (text, text_len) = keep(text)?;
            xserv_event {
                kind: xserv_event_kind::XSERV_EVENT_TEXT as u32,
                sample: sample as u32,
                text,
                text_len,
                num_tokens: num_tokens as u32,
                ..none
            }
        }
        Event::End { sample, reason, num_tokens } => xserv_event {
            kind: xserv_event_kind::XSERV_EVENT_END as u32,
            sample: sample as u32,
            num_tokens: num_tokens as u32,
            finish_reason: finish_code(reason) as u32,
            ..none
        },
        Event::Answer { sample, ref part, num_tokens } => {
            let event =
                xserv_event { sample: sample as u32, num_tokens: num_tokens as u32, ..none };
            describe_part(event, part, &mut keep, call)?
        }
        Event::Done => xserv_event { kind: xserv_event_kind::XSERV_EVENT_DONE as u32, ..none },
    })
}

/// Describes a part of an answer. `keep` keeps its text, `call` the id and the name of a call.
fn describe_part(
    event: xserv_event,
    part: &AnswerPart,
    keep: &mut dyn FnMut(&str) -> Result<(*const c_char, usize)>,
    call: &mut [Vec<u8>; 2],
) -> Result<xserv_event> {
    let mut of_text = |kind: xserv_event_kind, piece: &str| -> Result<xserv_event> {
        let (text, text_len) = keep(piece)?;
        Ok(xserv_event { kind: kind as u32, text, text_len, ..event })
    };
    Ok(match part {
        AnswerPart::Reasoning(piece) => of_text(xserv_event_kind::XSERV_EVENT_REASONING, piece)?,
        AnswerPart::Content(piece) => of_text(xserv_event_kind::XSERV_EVENT_CONTENT, piece)?,
        AnswerPart::Arguments { index, piece } => xserv_event {
            tool_call_index: *index as u32,
            ..of_text(xserv_event_kind::XSERV_EVENT_TOOL_CALL_ARGUMENTS, piece)?
        },
        AnswerPart::CallBegin { index, id, name } => {
            *call = [with_nul(id)?, with_nul(name)?];
            let [id, name] = call;
            xserv_event {
                kind: xserv_event_kind::XSERV_EVENT_TOOL_CALL_BEGIN as u32,
                tool_call_index: *index as u32,
                tool_call_id: id.as_ptr() as *const c_char,
                tool_name: name.as_ptr() as *const c_char,
                ..event
            }
        }
        AnswerPart::CallEnd { index, is_complete } => xserv_event {
            kind: xserv_event_kind::XSERV_EVENT_TOOL_CALL_END as u32,
            tool_call_index: *index as u32,
            tool_call_is_complete: u32::from(*is_complete),
            ..event
        },
    })
}

/// Sets `ready` to whether xserv_next() would have an event without waiting, 1 or 0. (In rare cases
/// it has none after a 1, because what came no longer matters.)
///
/// # Safety
/// `ready` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_poll(
    submission: *const xserv_submission,
    ready: *mut u8,
) -> xserv_status {
    guard(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(ready, "ready") }?;
        let object = SUBMISSIONS.get(submission)?;
        let has_event = object.taker()?.ticket.has_event();
        out.set(u8::from(has_event));
        Ok(())
    })
}

/// Cancels a request: events that were not taken yet are dropped, and its samples end as
/// XSERV_FINISH_CANCELLED. Any thread may call it, at any time and any number of times.
#[no_mangle]
pub extern "C" fn xserv_cancel(submission: *const xserv_submission) -> xserv_status {
    guard(|| {
        let object = SUBMISSIONS.get(submission)?;
        object.handle.check_process()?;
        object.handle.cancel();
        Ok(())
    })
}

/// Takes the result of a request, once xserv_next() has given XSERV_EVENT_DONE. It can be taken
/// once.
///
/// result: receives a handle that the caller frees with xserv_result_free().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT (the request has not ended, or its result was taken
/// already).
///
/// # Safety
/// `result` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_submission_take_result(
    submission: *const xserv_submission,
    result: *mut *mut xserv_result,
) -> xserv_status {
    guard(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(result, "result") }?;
        let object = SUBMISSIONS.get(submission)?;
        let mut taker = object.taker()?;
        if !taker.ticket.is_done() {
            return Err(Error::invalid_argument("submission: the request has not ended yet"));
        }
        if taker.generations.is_empty() {
            taker.generations = taker.ticket.take_generations()?;
        }
        if taker.generations.is_empty() {
            return Err(Error::invalid_argument("submission: its result was taken already"));
        }
        out.set(new_result(&mut taker.generations)?);
        Ok(())
    })
}

/// Frees a submission; a request that still runs is cancelled, and the call does not wait for the step
/// that is being computed. If its wake-up callback is running
/// on another thread, the call waits for it; it is not called again afterwards. (Two callbacks of
/// different models that free each other's submission at the same time would wait for ever, so they
/// must not.) NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_submission_free(submission: *mut xserv_submission) {
    guard_or((), || {
        if let Some(object) = SUBMISSIONS.remove(submission)? {
            object.handle.cancel();
            object.handle.disarm();
        }
        Ok(())
    })
}
