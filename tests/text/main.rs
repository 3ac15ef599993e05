//! Tokenizer, detokenizer, stop strings and chat template, against vectors made with Transformers
//! and against files that mean harm.

#[path = "../support/model_files.rs"]
mod files;

mod answers;
mod call_forms;
mod chat_bombs;
mod chat_golden;
mod chat_semantics;
mod constraints;
mod detokenizer;
mod json_input;
mod marks;
mod response_templates;
mod stop_strings;
mod support;
mod tokenizer_bad;
mod tokenizer_golden;
mod tokenizer_large;
