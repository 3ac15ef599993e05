//! Requests of callers, and the reasons why they end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use super::logit_changes::LogitBias;
use super::sampler::SamplingOverrides;
pub use crate::model::LogProbsWanted;
use crate::text::{Constraint, ToolForm};

/// The interval at which a thread that waits for the engine checks whether it should give up.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A switch with which other threads stop requests.
#[derive(Default)]
pub struct CancelToken {
    cancelled: AtomicBool,
}

impl CancelToken {
    /// Stops every request that carries the token, now and later.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Whether [`CancelToken::cancel`] has been called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// A conversation as JSON texts.
#[derive(Clone, Copy, Debug)]
pub struct ChatPrompt<'a> {
    /// An array of messages.
    pub messages: &'a str,
    /// An array of tool descriptions.
    pub tools: Option<&'a str>,
    /// An object of further template variables.
    pub variables: Option<&'a str>,
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Special tokens written in messages and tools become their ids. (It does not matter where the
    /// text is wanted alone.)
    pub parse_special: bool,
}

/// The format by which the text of an answer is taken apart into thoughts, content and calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// As the model's chat template and the request say: without tools there are no calls.
    Auto,
    /// With calls of this form.
    Named(ToolForm),
}

/// Which tools an answer calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice<'a> {
    /// As the model likes.
    #[default]
    Auto,
    /// None: the model is not shown the tools, and no call is read.
    None,
    /// The answer is one call, of any of the tools, after a thought where the model may have one.
    Required,
    /// The answer is one call of the tool of this name.
    Named(&'a str),
}

/// The prompt that a generation continues.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Text, to be tokenized.
    Text {
        /// The text.
        text: &'a str,
        /// Let the tokenizer add the special tokens that it adds by itself.
        add_special: bool,
        /// Special tokens written in the text become their ids.
        parse_special: bool,
    },
    /// Token ids.
    TokenIds(&'a [u32]),
    /// A conversation, to be rendered and tokenized.
    Chat(ChatPrompt<'a>),
}

/// One generation to be done. Fields that are `None` come from the model's generation_config.json.
pub struct Request<'a> {
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// The settings with which tokens are chosen.
    pub sampling: SamplingOverrides,
    /// Seed of the random draws; `None` draws one from the operating system.
    pub seed: Option<u64>,
    /// Most tokens to generate; `None`: the config's max_new_tokens, else until the context is
    /// full.
    pub max_tokens: Option<u32>,
    /// The text ends before the first of these that appears.
    pub stop_strings: Vec<&'a str>,
    /// Tokens that end the generation, besides the model's own.
    pub stop_token_ids: &'a [u32],
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Do not stop at the model's own end tokens.
    pub ignore_eos: bool,
    /// Stops the request from another thread.
    pub cancel: Option<Arc<CancelToken>>,
    /// Higher goes first.
    pub priority: i32,
    /// Independent continuations of the prompt; sample `i` draws with the seed plus `i`. At least
    /// 1.
    pub num_samples: u32,
    /// Time from the call after which the request ends with the tokens that it has.
    pub time_limit: Option<Duration>,
    /// Requests with different numbers share no keys and values.
    pub cache_key: u64,
    /// The biases added to logits before everything else, each token at most once.
    pub logit_bias: Vec<LogitBias>,
    /// The number of tokens before which no end token is chosen.
    pub min_tokens: u32,
    /// The tokens with which the answer begins, whatever is likely.
    pub first_tokens: &'a [u32],
    /// The form that the text of the answer takes.
    pub constraint: Option<Constraint<'a>>,
    /// Which tools of a conversation the answer calls.
    pub tool_choice: ToolChoice<'a>,
    /// `None`: no log-probabilities.
    pub log_probs: Option<LogProbsWanted>,
    /// The number of likeliest tokens in the place of each token of the prompt that are told with its
    /// own log-probability; `None`: nothing is.
    pub prompt_log_probs: Option<u32>,
    /// `None`: the text is not taken apart.
    pub answer_format: Option<AnswerFormat>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token of the model or of the request.
    StopToken,
    /// A stop string of the request.
    StopString,
    /// The most tokens that the request allows.
    MaxTokens,
    /// No position is left.
    ContextFull,
    /// The callback stopped it.
    Callback,
    /// Another thread cancelled it, or the model was freed.
    Cancelled,
    /// Its time limit has passed.
    Deadline,
    /// The constraint is fulfilled, and nothing can follow.
    Complete,
}
