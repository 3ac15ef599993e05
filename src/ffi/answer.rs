//! Answers taken apart: thoughts, content, calls of tools.

#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::guard::with_nul;
use crate::engine::{Answer, AnswerFormat, ToolForm};
use crate::error::{try_with_capacity, Error, Result};

/// How the text of an answer is taken apart: into what the model thinks (between `<think>` tags), what
/// it says, and the tools that it calls. Thoughts are found in all formats but NONE, and begin where
/// the prompt says: some templates open one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_answer_format {
    /// Not at all.
    XSERV_ANSWER_NONE = 0,
    /// As the model's chat template writes calls. A request of messages without tools_json has no
    /// calls, whatever the model writes. If that form is none of those below, or thoughts have
    /// other tags, and the model's tokenizer_config.json has a response_template (as Transformers
    /// defines it, version 1), its rules are followed: thoughts and content are told as they come,
    /// calls when they are complete. A template that is not supported (lookaround in its
    /// expressions) is not used, and the log says why.
    XSERV_ANSWER_AUTO = 1,
    /// Thoughts and content alone.
    XSERV_ANSWER_THINKING = 2,
    /// Calls are written `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3).
    XSERV_ANSWER_JSON_TAGS = 3,
    /// Calls are written `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`
    /// (Qwen3-Coder, Qwen3.5). Values become JSON by the types in tools_json; without one they are strings.
    XSERV_ANSWER_XML_TAGS = 4,
    /// Calls are written `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`
    /// (Llama 3). They are told when they are complete.
    XSERV_ANSWER_BARE_JSON = 5,
    /// Calls are written `[TOOL_CALLS]` and a list of such objects, or `[TOOL_CALLS]NAME{...}` (Mistral).
    XSERV_ANSWER_MARKED_JSON = 6,
}

/// A call of a tool in an answer. Pointers belong to the result.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_tool_call {
    /// Made up by the library, for xserv_messages_add_tool_result(). NUL-terminated.
    pub id: *const c_char,
    /// The name of the tool, NUL-terminated. The model may have invented it.
    pub name: *const c_char,
    /// The arguments as JSON, NUL-terminated: an object, unless the model has written something else. Check
    /// them before you act on them: a model writes what it likes.
    pub arguments_json: *const c_char,
    /// Bytes of arguments_json without the NUL.
    pub arguments_len: usize,
    /// 1: the model has written the call to its end. 0: it was cut, or went wrong; do not act on it,
    /// even if the arguments are JSON by chance.
    pub is_complete: u32,
    /// Unused, 0.
    pub reserved: u32,
}

/// Reads a format; `None`: not taken apart.
pub(super) fn answer_format(code: u32, name: &str) -> Result<Option<AnswerFormat>> {
    const FORMS: [(xserv_answer_format, ToolForm); 5] = [
        (xserv_answer_format::XSERV_ANSWER_THINKING, ToolForm::None),
        (xserv_answer_format::XSERV_ANSWER_JSON_TAGS, ToolForm::JsonTags),
        (xserv_answer_format::XSERV_ANSWER_XML_TAGS, ToolForm::XmlTags),
        (xserv_answer_format::XSERV_ANSWER_BARE_JSON, ToolForm::BareJson),
        (xserv_answer_format::XSERV_ANSWER_MARKED_JSON, ToolForm::MarkedJson),
    ];
    if code == xserv_answer_format::XSERV_ANSWER_NONE as u32 {
        return Ok(None);
    }
    if code == xserv_answer_format::XSERV_ANSWER_AUTO as u32 {
        return Ok(Some(AnswerFormat::Auto));
    }
    match FORMS.iter().find(|(known, _)| *known as u32 == code) {
        Some((_, form)) => Ok(Some(AnswerFormat::Named(*form))),
        None => Err(Error::invalid_argument(format!(
            "{name} is {code}, which is no xserv_answer_format"
        ))),
    }
}

/// The texts of an answer for C, each with its final NUL.
pub(super) struct DescribedAnswer {
    pub reasoning: Vec<u8>,
    pub content: Vec<u8>,
    pub message: Vec<u8>,
    pub calls: Vec<xserv_tool_call>,
    /// The memory that `calls` points to.
    _texts: Vec<Vec<u8>>,
}

// SAFETY: the pointers in `calls` are into `_texts`, which is never changed and lives as long.
unsafe impl Send for DescribedAnswer {}
// SAFETY: as above.
unsafe impl Sync for DescribedAnswer {}

impl DescribedAnswer {
    pub fn new(answer: &Answer) -> Result<Self> {
        let mut calls = try_with_capacity(answer.calls.len(), "tool calls")?;
        let mut texts: Vec<Vec<u8>> = try_with_capacity(answer.calls.len() * 3, "tool calls")?;
        for call in &answer.calls {
            let mut keep = |text: &str| -> Result<*const c_char> {
                let bytes = with_nul(text)?;
                let pointer = bytes.as_ptr() as *const c_char;
                // The bytes stay where they are when the vector around them moves.
                texts.push(bytes);
                Ok(pointer)
            };
            calls.push(xserv_tool_call {
                id: keep(&call.id)?,
                name: keep(&call.name)?,
                arguments_json: keep(&call.arguments)?,
                arguments_len: call.arguments.len(),
                is_complete: u32::from(call.is_complete),
                reserved: 0,
            });
        }
        Ok(DescribedAnswer {
            reasoning: with_nul(&answer.reasoning)?,
            content: with_nul(&answer.content)?,
            message: with_nul(&answer.message().to_string())?,
            calls,
            _texts: texts,
        })
    }
}
