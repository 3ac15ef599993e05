//! # xserv
//!
//! Embeddable LLM inference: opens a Hugging Face folder of Qwen3 or GPT-2 and generates text,
//! through the C interface of `include/xserv.h`.
//!
//! ## Layers
//!
//! ```text
//! ffi  ->  engine  ->  model  ->  ops  ->  backend/{cpu,cuda}  ->  memory
//!             \->  text
//! ```
//!
//! An arrow means "may use"; nothing points back (`tests/abi/layering.rs` holds the code to it).
//! All layers use [`error`], [`panic_guard`] and [`thread_state`]; [`text`] (tokenizer,
//! detokenizer, chat template) knows nothing of tensors.
//!
//! ## Operators
//!
//! [`ops`] has three floors. The operators of the CPU model work on f32 slices and packed weights
//! ([`ops::linear`] and its neighbours). [`ops::host`] works on typed slices. [`ops::tensor`] is what C
//! sees: one file an operator with its contract, its checks, a CPU half that calls `ops::host`, and a CUDA
//! half that launches the kernels of `csrc/ops`. The model on a GPU ([`model`]) is made of these, and of
//! [`ops::stepwise`], which rounds where Transformers rounds.
//!
//! The build script compiles `csrc/ops/*.cu` to fatbins inside the library; `backend/cuda` finds the driver
//! at run time, loads them, and gives a [`backend::ComputeContext`] its stream, its caching allocator and
//! its sticky errors. A kernel never follows an index that it cannot trust: it reports the first one in a
//! record that the host reads when it synchronises.
//!
//! ## Threads
//!
//! Calls run on the threads of the host. A model has a pool of threads of its own for its kernels
//! and, from its first request on, a thread for its scheduler ([`engine`]), which runs all forward
//! passes, takes part in their kernels, and sleeps when there is nothing to do. Callers wait for it
//! and do the rest themselves: tokenizing, detokenizing, stop strings and callbacks. A chat
//! template runs on a thread of its own, for its large stack. A load has a thread for the tokenizer
//! and one that starts the GPU, both of which end before it returns.

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
