//! The engine: requests in, tokens out. Joins a model, its tokenizer and its chat template, and
//! runs the requests of any number of threads on them.
//!
//! The life of a request ([`Engine::submit`]): the prompt becomes token ids (`prompt`), each sample
//! of it a sequence of the scheduler. The scheduler's thread (`worker`) asks the [`Scheduler`]
//! which sequences take part in the next step, makes one batch of them (`batch_builder`), has the
//! model run it, chooses the tokens ([`Sampler`]) and puts them into the request's `inbox`. The
//! caller takes them out ([`Ticket`]): turning ids into text, looking for stop strings and calling
//! back happen on the caller's thread.
//!
//! ```text
//! options     the options of a load
//! load        the act of loading; placement, memory_plan, step_limits: what it decides first
//! engine      the handle of a loaded model; prompt and generate: requests on their way in
//! evaluate    logits and scores of given tokens; scored: sequences that are scored,
//!             some of them for a thread that waits in a score_call
//! constraint  the constraint of a request on its way in; constrained: what keeps a sequence to it
//! tool_choice which tools an answer may, must or must not call
//! scheduler   who takes part in a step (policy, no model)
//! preemption  who loses its blocks, and how it goes on; swap: blocks that wait on the host
//! block_pool  the blocks of the KV cache and the prefix cache
//! service     the scheduler's thread from outside; submission: a request for it
//! intake      the state that the thread shares with others
//! worker      the thread; active: the work of each sequence; pace: when steps begin
//! alone       sequences that are computed alone; host_logits: logits that the host changes
//! lease       logits, computed by the thread that wants them
//! inbox       from the worker to a caller; ticket: the caller's side
//! answer      what answers consist of; answer_output: those of a sample
//! ```

mod active;
mod alerts;
mod alone;
mod answer;
mod answer_output;
mod batch_builder;
pub mod block_pool;
mod config_fields;
mod constrained;
mod constraint;
mod device_starter;
// The file is named after its type, `Engine`.
#[allow(clippy::module_inception)]
mod engine;
mod evaluate;
mod generate;
mod generation_config;
#[doc(hidden)]
pub mod harness;
mod host_call;
mod host_logits;
mod inbox;
mod inspect;
mod intake;
mod lease;
mod load;
mod log;
mod logit_changes;
mod memory_plan;
mod options;
mod pace;
mod placement;
mod plan;
mod planned_copies;
mod preemption;
mod prompt;
mod prompt_log_probs;
mod request;
mod sampler;
pub mod scheduler;
mod score_call;
mod scored;
mod sequence;
mod service;
mod stats;
mod step_limits;
mod step_model;
mod step_resources;
mod step_size;
mod submission;
mod swap;
mod text_files;
mod ticket;
mod tokenizer_reader;
mod tool_choice;
mod worker;

pub use answer::{parse_response, Response};
pub use engine::{Engine, ModelShape};
pub use generate::MAX_SAMPLES;
pub use generation_config::GenerationConfig;
pub use host_logits::{LogitsEvent, OnLogits};
pub use inbox::Waker;
pub use inspect::{inspect, Inspection};
pub use log::{LogLevel, LogTarget, Logger};
pub use logit_changes::{LogitBias, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES};
pub use options::{DeviceChoice, EngineOptions};
pub use plan::{plan, Plan};
pub use prompt_log_probs::PromptLogProbs;
pub use request::{
    AnswerFormat, CancelToken, ChatPrompt, FinishReason, LogProbsWanted, Prompt, Request,
    ToolChoice,
};
pub use sampler::{Sampler, SamplingOverrides, SamplingParams};
pub use scheduler::Scheduler;
pub use stats::{EngineStats, FIRST_BUCKET_US, NUM_STEP_BUCKETS};
pub use swap::{SwapCosts, SwapCounts};
pub use ticket::{Event, Generation, Ticket, TicketHandle};

pub use crate::text::Constraint;

pub use crate::model::{
    ActivationFormat, KvFormat, LogProbs, TokenLogProb, TokenScore, WeightStorage,
    MAX_TOP_LOG_PROBS,
};
pub use crate::text::{Answer, AnswerPart, ToolCall, ToolForm};
