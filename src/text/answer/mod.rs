//! The parts of the text that a model writes: thoughts, an answer, calls of tools.
//!
//! An [`AnswerParser`] takes the text in pieces, as it is generated, and tells what is certain: text
//! that may become a tag is held back. However a text is cut into pieces, the parts that are told are
//! the same when they are put together. Everything takes time in proportion to the text and no
//! recursion, and no text is an error: a malformed call is content.
//!
//! Answers in forms that are known here are taken apart in `tagged.rs`, others by the rules that come with a
//! model, in `templated.rs`.

mod call_form;
mod call_list;
mod call_object;
mod call_schema;
mod call_values;
mod detect;
mod event;
mod json;
mod parser;
mod pattern;
mod region_value;
mod response_template;
mod rules;
mod tag;
mod tagged;
mod tagged_calls;
mod tagged_marked;
mod tagged_prose;
mod tagged_state;
mod templated;
mod thought;
mod types;
mod xml;

pub use call_form::{CallForm, Probe};
pub use detect::{format_of, start_of};
pub use event::{Answer, AnswerPart, ToolCall};
pub use parser::AnswerParser;
pub use response_template::ResponseTemplate;
pub use rules::{AnswerRules, AnswerStart, TemplateRules, ToolForm};
pub use thought::after_thought;
pub use types::ToolTypes;
