//! The library for Rust programs: the same engine as behind the C interface, without C.
//!
//! ```no_run
//! use xserv::{Message, Model, Request};
//!
//! # fn main() -> xserv::Result<()> {
//! let model = Model::open("Qwen/Qwen3-0.6B")?; // a folder, or a repository in the local Hugging Face cache
//! let request = Request::chat(&[Message::user("Tell me a story.")]).max_tokens(256);
//! for piece in model.stream(&request)?.text() {
//!     print!("{}", piece?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] may be used from any thread; each step of it computes the requests of all threads
//! together. Nothing here needs a runtime, prints, or ends the process. The Cargo feature `reserve`
//! (on by default) sets the global allocator of the shared library: a program with one of its own,
//! or that wants the system's, takes the crate with `default-features = false`.
//!
//! The other modules of this crate are the library's inside: they are documented for those who work
//! on it, and change without notice.

mod model;
mod request;
mod stream;

pub use crate::engine::{
    parse_response, ActivationFormat, Answer, AnswerFormat, AnswerPart, CancelToken, DeviceChoice,
    EngineOptions as LoadOptions, EngineStats, Event, FinishReason, Generation, KvFormat, LogLevel,
    LogProbs, LogTarget, Logger, LogitsEvent, PromptLogProbs, Response,
    SamplingOverrides as Sampling, TokenLogProb, TokenScore, ToolCall, ToolForm, WeightStorage,
};
pub use crate::error::{Error, ErrorKind, Result};
pub use crate::memory::DType;
pub use model::Model;
pub use request::{Message, Request, ToolChoice};
pub use stream::{Stream, TextStream};
