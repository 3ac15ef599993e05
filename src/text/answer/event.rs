//! The parts of an answer, one by one and put together.

use serde_json::{json, Value};

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Distinguishes calls, for the message with the result.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// JSON: of a call that is complete nearly always an object, but that is the model's to hold.
    pub arguments: String,
    /// Whether the model has written the call to its end. If not, `arguments` is where it stopped.
    pub is_complete: bool,
}

/// A part of an answer that became certain with a piece of its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// More of what the model thinks; not empty.
    Reasoning(String),
    /// More of what it says; not empty.
    Content(String),
    /// A call begins; the parts up to its end belong to it.
    CallBegin {
        /// The number of the call in the answer, from 0.
        index: usize,
        /// See [`ToolCall::id`].
        id: String,
        /// The name of the tool.
        name: String,
    },
    /// More of the JSON text of the arguments; not empty.
    Arguments {
        /// The number of the call.
        index: usize,
        /// A piece of the text.
        piece: String,
    },
    /// The call has ended.
    CallEnd {
        /// The number of the call.
        index: usize,
        /// See [`ToolCall::is_complete`].
        is_complete: bool,
    },
}

/// The parts of an answer, put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The model's thoughts, without the tags and the white space next to them.
    pub reasoning: String,
    /// The content, without thoughts, calls, and the white space next to those.
    pub content: String,
    /// The calls, in their order.
    pub calls: Vec<ToolCall>,
}

impl Answer {
    /// Returns the answer as a message of a conversation, as chat templates take it: JSON with `content`, and
    /// `reasoning_content` and `tool_calls` where there are some. Calls that are not complete are left out.
    pub fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        let complete = self.calls.iter().filter(|call| call.is_complete);
        let calls: Vec<Value> = complete
            .map(|call| {
                // Templates go through an object; hosted services have its text.
                let arguments = serde_json::from_str(&call.arguments)
                    .ok()
                    .filter(Value::is_object)
                    .unwrap_or_else(|| Value::from(call.arguments.as_str()));
                let function = json!({"name": call.name, "arguments": arguments});
                json!({"id": call.id, "type": "function", "function": function})
            })
            .collect();
        if !calls.is_empty() {
            message["tool_calls"] = Value::from(calls);
        }
        message
    }

    /// Adds a part to those before it.
    pub fn add(&mut self, part: &AnswerPart) {
        match part {
            AnswerPart::Reasoning(text) => self.reasoning.push_str(text),
            AnswerPart::Content(text) => self.content.push_str(text),
            AnswerPart::CallBegin { id, name, .. } => self.calls.push(ToolCall {
                id: id.clone(),
                name: name.clone(),
                ..ToolCall::default()
            }),
            AnswerPart::Arguments { piece, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(piece);
                }
            }
            AnswerPart::CallEnd { is_complete, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.is_complete = *is_complete;
                }
            }
        }
    }
}

/// Appends a part, as one with the last of `parts` where both are text of the same kind.
pub(super) fn append(parts: &mut Vec<AnswerPart>, part: AnswerPart) {
    match (parts.last_mut(), &part) {
        (Some(AnswerPart::Reasoning(before)), AnswerPart::Reasoning(text))
        | (Some(AnswerPart::Content(before)), AnswerPart::Content(text)) => before.push_str(text),
        (
            Some(AnswerPart::Arguments { index: before, piece }),
            AnswerPart::Arguments { index, piece: more },
        ) if before == index => piece.push_str(more),
        _ => parts.push(part),
    }
}
