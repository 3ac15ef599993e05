//! # xserv
//!
//! Embeddable LLM inference: opens a Hugging Face folder of Qwen3 or GPT-2 and generates text,
//! through the C interface of `include/xserv.h`.
//!
//! ## Layers
//!
//! ```text
//! ffi  ->  engine  ->  model  ->  ops  ->  backend/cpu  ->  memory
//!             \->  text
//! ```
//!
//! An arrow means "may use"; nothing points back (`tests/abi/layering.rs` holds the code to it).
//! [`error`], [`panic_guard`] and [`thread_state`] are used by all; [`text`] (tokenizer, detokenizer,
//! chat template) knows nothing of tensors.
//!
//! ## Threads
//!
//! Calls run on the threads of the host. A model has a pool of threads of its own for its kernels; the
//! calling thread takes part. Requests of several threads take turns, one forward pass at a time, and
//! hold no lock while they sample or call back. Chat templates run on a thread of their own, for its
//! large stack.

pub mod backend;
pub mod engine;
pub mod error;
pub mod ffi;
pub mod memory;
pub mod model;
pub mod ops;
pub mod panic_guard;
pub mod text;
pub mod thread_state;
