//! # xserv
//!
//! Embeddable LLM inference: opens a Hugging Face folder of Qwen3, Qwen2.5, Llama, Mistral, Mixtral or
//! GPT-2 and generates text, through the C interface of `include/xserv.h`, or from Rust:
//!
//! ```
//! # fn main() -> xserv::Result<()> {
//! let model = xserv::Model::open("examples/models/tiny-qwen3")?;
//! let answer = model.generate(&xserv::Request::text("Once upon a time").max_tokens(32))?;
//! println!("{}", answer.text);
//! # Ok(())
//! # }
//! ```
//!
//! The face for Rust is [`api`], whose names are also those of the crate. All that follows is for
//! those who work on the library.
//!
//! ## Layers
//!
//! ```text
//! ffi, api  ->  engine  ->  model  ->  ops  ->  backend/{cpu,cuda}  ->  memory
//!    |             \->  text            ^
//!    \->  self_test  -------------------/
//! ```
//!
//! An arrow means "may use"; nothing points back (`tests/abi/layering.rs` holds the code to it).
//! All layers use [`error`], [`panic_guard`], [`process`], [`reserve`], [`thread_state`] and
//! [`threads`]; [`text`] (tokenizer, detokenizer, chat template) knows nothing of tensors.
//!
//! ## Operators
//!
//! Each operator is one folder of [`ops`], which holds the table of them. The decoder
//! ([`model::decoder`]) says what is computed, in the words of the papers; the operator alone
//! decides by which kernel. How to add an operator, a family, a weight format or a sampling
//! parameter, and what the words of this code mean, is in [`guide`].
//!
//! The build script compiles the `.cu` files of `csrc` to fatbins inside the library;
//! `backend/cuda` finds the driver at run time, loads them, and gives a [`backend::ComputeContext`]
//! its stream, its caching allocator and its sticky errors. A kernel never follows an index that it
//! cannot trust: it reports the first one in a record that the host reads when it synchronises.
//!
//! ## Threads
//!
//! Calls run on the threads of the host. A model has a pool of threads of its own for its kernels
//! and, from its first request on, a thread for its scheduler ([`engine`]), which runs all forward
//! passes, takes part in their kernels, and sleeps when there is nothing to do. Callers wait for it
//! and do the rest themselves: tokenizing, detokenizing, stop strings and callbacks. A chat
//! template is rendered by threads that keep it compiled, up to four of which wait for more; what is
//! unusual about a rendering has a thread of its own, for its large stack. A load has a thread for the
//! tokenizer and one that starts the GPU, both of which end before it returns.

pub mod api;
pub mod backend;
pub mod engine;
pub mod error;
pub mod ffi;
#[doc = include_str!("guide.md")]
pub mod guide {}
pub mod memory;
pub mod model;
pub mod ops;
pub mod panic_guard;
pub mod process;
pub mod reserve;
pub mod self_test;
pub mod text;
#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod thread_exit;
pub mod thread_state;
pub mod threads;

pub use api::{
    parse_response, ActivationFormat, Answer, AnswerFormat, AnswerPart, CancelToken, DType,
    DeviceChoice, Error, ErrorKind, Event, FinishReason, Generation, KvFormat, LoadOptions,
    LogProbs, LogitsEvent, Message, Model, PromptLogProbs, Request, Response, Result, Sampling,
    Stream, TokenLogProb, TokenScore, ToolCall, ToolChoice, ToolForm, WeightStorage,
};

/// The Rust program of README.md is run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
