//! The engine: requests in, tokens out. Joins a model, its tokenizer and its chat template, and runs
//! the requests of any number of threads on them.
//!
//! The life of a request ([`Engine::generate`]): the prompt becomes token ids (`prompt`), the request
//! takes turns with those of other threads at the `runner`, one forward pass at a time (`turns`);
//! between the passes, without any lock, it samples ([`Sampler`]), turns ids into text, looks for stop
//! strings and calls back.

mod block_manager;
mod engine_load;
mod fair_mutex;
mod generate;
mod generation_config;
mod inspect;
mod log;
mod memory_plan;
mod placement;
mod plan;
mod prompt;
mod request;
mod runner;
mod sampler;
mod tokenizer_reader;
mod turns;

pub use engine_load::{Engine, EngineOptions, ModelShape};
pub use generate::{FinishReason, Generation};
pub use generation_config::GenerationConfig;
pub use inspect::{inspect, Inspection};
pub use log::{LogLevel, Logger};
pub use placement::DeviceChoice;
pub use plan::{plan, Plan};
pub use prompt::{ChatPrompt, Prompt};
pub use request::{CancelToken, Request};
pub use sampler::{Sampler, SamplingOverrides, SamplingParams};
