//! Text in and out of a model: tokenizer, streaming detokenizer, stop strings, chat template.
//!
//! Everything here reads untrusted files and arguments, and uses two dependencies that were not
//! written for them: `tokenizers` panics on crafted files, `minijinja` builds values of any size.
//! So each call into them is [`guarded`], the files are checked for known-bad structures first
//! (`tokenizer_file.rs`), and templates run under a budget (`template/`).
//!
//! This module uses only [`crate::error`], [`crate::panic_guard`], [`crate::thread_state`] and
//! [`crate::threads`].

mod answer;
mod bounded_regex;
mod chat_template;
mod constraint;
mod cut;
mod detokenizer;
mod frame;
mod growth;
mod json_input;
mod marks;
mod messages;
mod pipeline;
mod special_tokens;
mod stop_strings;
mod template;
mod token_bytes;
mod tokenizer;
mod tokenizer_components;
mod tokenizer_file;
mod trial;
mod watch;

pub use answer::{
    after_thought, format_of, start_of, Answer, AnswerParser, AnswerPart, AnswerRules, AnswerStart,
    CallForm, Probe, ResponseTemplate, TemplateRules, ToolCall, ToolForm, ToolTypes,
};
pub use chat_template::{what_was_left_out, ChatInput, ChatTemplate, MAX_TEMPLATE_BYTES};
pub use constraint::{
    Constraint, GrammarCompiler, GrammarMatcher, Progress, TokenMask, ANSWER, MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
};
pub use detokenizer::Detokenizer;
pub use json_input::{parse_messages, parse_tools, parse_variables};
pub use marks::{Conversation, Marks};
pub use messages::Messages;
pub use special_tokens::{SpecialTokens, MAX_TOKENIZER_CONFIG_BYTES};
pub use stop_strings::{StopMatcher, StopOutput, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES};
pub use tokenizer::{Tokenizer, MAX_TEXT_BYTES};
pub use tokenizer_file::MAX_TOKENIZER_BYTES;
pub use watch::ShouldStop;

use crate::error::{Error, ErrorKind, Result};
use crate::panic_guard::catch_panic;
use std::fmt::Display;

/// Runs `body` and turns a panic inside it into an error of `kind` that begins with `what`.
///
/// Used for calls into dependencies that panic on bad input. `body` must leave nothing half-changed
/// that is used afterwards.
pub fn guarded<T>(
    kind: ErrorKind,
    what: impl Display,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    catch_panic(body)
        .unwrap_or_else(|text| Err(Error::new(kind, format!("{what}: {}", shortened(&text)))))
}

/// Makes an error of one of the `tokenizers` crate, which may carry one of our own.
fn crate_error(error: tokenizers::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(own) => *own,
        Err(error) => Error::invalid_file(shortened(&error.to_string())),
    }
}

/// Returns the first 300 bytes of a message: file content must not flood an error sentence.
pub(crate) fn shortened(message: &str) -> String {
    const LIMIT: usize = 300;
    if message.len() <= LIMIT {
        return message.to_owned();
    }
    let mut end = LIMIT;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...", message.get(..end).unwrap_or_default())
}
