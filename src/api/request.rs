//! Requests that own what they say.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{json, Value};

use crate::engine::{
    self, AnswerFormat, CancelToken, ChatPrompt, Constraint, LogProbsWanted, LogitBias,
    SamplingOverrides,
};

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(Value);

impl Message {
    /// A message of any role: "system", "user", "assistant", "tool", or what else the model's chat
    /// template knows.
    pub fn new(role: &str, content: &str) -> Self {
        Message(json!({"role": role, "content": content}))
    }

    /// Returns a message of the user.
    pub fn user(content: &str) -> Self {
        Message::new("user", content)
    }

    /// Returns an answer of the model.
    pub fn assistant(content: &str) -> Self {
        Message::new("assistant", content)
    }

    /// Instructions for the whole conversation.
    pub fn system(content: &str) -> Self {
        Message::new("system", content)
    }

    /// A message with further fields, such as `tool_calls`: a JSON object with a `role`, as the
    /// chat completion format of hosted services has it. It is checked when the request is made.
    pub fn from_json(message: Value) -> Self {
        Message(message)
    }

    pub(super) fn json(&self) -> &Value {
        &self.0
    }
}

#[derive(Clone, Debug)]
enum Source {
    Text(String),
    Tokens(Vec<u32>),
    Chat(String),
}

/// Which tools an answer calls. A call that must be made is written as the model's chat template writes
/// calls, and its arguments are what the JSON schema of its tool allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes; nothing keeps its calls to their schemas.
    #[default]
    Auto,
    /// None: the model is not shown the tools, and nothing that it writes is taken for a call, whatever
    /// [`Request::answer_format`] says.
    None,
    /// The answer is exactly one call, of any of the tools. A model that thinks may think first.
    Required,
    /// The answer is exactly one call of the tool of this name.
    Named(String),
}

impl ToolChoice {
    fn as_engine(&self) -> engine::ToolChoice<'_> {
        match self {
            ToolChoice::Auto => engine::ToolChoice::Auto,
            ToolChoice::None => engine::ToolChoice::None,
            ToolChoice::Required => engine::ToolChoice::Required,
            ToolChoice::Named(name) => engine::ToolChoice::Named(name),
        }
    }
}

/// The form of an answer; [`engine::Constraint`] with texts of its own.
#[derive(Clone, Debug)]
enum Form {
    JsonSchema(String),
    JsonObject,
    Regex(String),
    Grammar(String),
    Choice(Vec<String>),
}

impl Form {
    fn as_engine(&self) -> Constraint<'_> {
        match self {
            Form::JsonSchema(schema) => Constraint::JsonSchema(schema),
            Form::JsonObject => Constraint::JsonObject,
            Form::Regex(regex) => Constraint::Regex(regex),
            Form::Grammar(grammar) => Constraint::Grammar(grammar),
            Form::Choice(texts) => Constraint::Choice(texts.iter().map(String::as_str).collect()),
        }
    }
}

/// A request for generation: a prompt, and settings that otherwise are the model's own (its
/// generation_config.json). The setters take the request and return it.
///
/// ```
/// use xserv::{Message, Request};
///
/// let plain = Request::text("Once upon a time").max_tokens(32).temperature(0.0);
/// let chat = Request::chat(&[Message::system("Be brief."), Message::user("What is 27 plus 58?")])
///     .stop("\n")
///     .seed(7);
/// # drop((plain, chat));
/// ```
#[derive(Clone)]
pub struct Request {
    source: Source,
    tools: Option<String>,
    variables: Option<String>,
    parse_special: bool,
    sampling: SamplingOverrides,
    seed: Option<u64>,
    max_tokens: Option<u32>,
    stop_strings: Vec<String>,
    stop_token_ids: Vec<u32>,
    skip_special: bool,
    ignore_eos: bool,
    cancel: Option<Arc<CancelToken>>,
    priority: i32,
    num_samples: u32,
    time_limit: Option<Duration>,
    cache_key: u64,
    logit_bias: Vec<LogitBias>,
    min_tokens: u32,
    first_tokens: Vec<u32>,
    form: Option<Form>,
    tool_choice: ToolChoice,
    log_probs: Option<LogProbsWanted>,
    prompt_log_probs: Option<u32>,
    answer_format: Option<AnswerFormat>,
    parse_special_in_messages: bool,
}

impl Request {
    fn new(source: Source) -> Self {
        Request {
            source,
            tools: None,
            variables: None,
            parse_special: true,
            sampling: SamplingOverrides::default(),
            seed: None,
            max_tokens: None,
            stop_strings: Vec::new(),
            stop_token_ids: Vec::new(),
            skip_special: true,
            ignore_eos: false,
            cancel: None,
            priority: 0,
            num_samples: 1,
            time_limit: None,
            cache_key: 0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            first_tokens: Vec::new(),
            form: None,
            tool_choice: ToolChoice::default(),
            log_probs: None,
            prompt_log_probs: None,
            answer_format: None,
            parse_special_in_messages: false,
        }
    }

    /// The continuation of a text.
    pub fn text(prompt: impl Into<String>) -> Self {
        Request::new(Source::Text(prompt.into()))
    }

    /// The continuation of token ids.
    pub fn tokens(prompt: impl Into<Vec<u32>>) -> Self {
        Request::new(Source::Tokens(prompt.into()))
    }

    /// The next turn of a conversation, rendered with the model's chat template.
    pub fn chat(messages: &[Message]) -> Self {
        let messages = messages.iter().map(|message| message.0.clone()).collect();
        Request::new(Source::Chat(Value::Array(messages).to_string()))
    }

    /// Tools that the model may call: a JSON array in the chat completion format of hosted
    /// services. For chats only.
    pub fn tools(mut self, tools: &Value) -> Self {
        self.tools = Some(tools.to_string());
        self
    }

    /// Further variables of the chat template, such as `{"enable_thinking": false}`: a JSON object.
    /// For chats only.
    pub fn template_variables(mut self, variables: &Value) -> Self {
        self.variables = Some(variables.to_string());
        self
    }

    /// Whether special tokens that are written in a text prompt become their ids. Default: true.
    pub fn parse_special_tokens(mut self, parse: bool) -> Self {
        self.parse_special = parse;
        self
    }

    /// The most tokens to generate. Default: the model's own setting, else until the context is full.
    pub fn max_tokens(mut self, max_tokens: u32) -> Self {
        self.max_tokens = Some(max_tokens);
        self
    }

    /// All sampling settings at once; `None` in a field leaves it to the model.
    pub fn sampling(mut self, sampling: SamplingOverrides) -> Self {
        self.sampling = sampling;
        self
    }

    /// The temperature; 0 takes the most likely token.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.sampling.temperature = Some(temperature);
        self
    }

    /// Keeps the `top_k` most likely tokens; 0 keeps all.
    pub fn top_k(mut self, top_k: u32) -> Self {
        self.sampling.top_k = Some(top_k);
        self
    }

    /// Keeps the most likely tokens whose probabilities reach this sum: above 0, at most 1.
    pub fn top_p(mut self, top_p: f32) -> Self {
        self.sampling.top_p = Some(top_p);
        self
    }

    /// Adds a number to the logit of a token before anything else is applied to it: -10000 to
    /// 10000, or minus infinity, which bans the token. May be called for up to 16384 tokens, once
    /// each.
    pub fn logit_bias(mut self, token_id: u32, bias: f32) -> Self {
        self.logit_bias.push(LogitBias { token_id, bias });
        self
    }

    /// Keeps the tokens whose information content is nearest to the entropy and that together have
    /// this probability (locally typical sampling); above 0, at most 1, which keeps all.
    pub fn typical_p(mut self, typical_p: f32) -> Self {
        self.sampling.typical_p = Some(typical_p);
        self
    }

    /// Bans tokens that would repeat a sequence of this length from the prompt or the answer; 0 allows all.
    pub fn no_repeat_ngram_size(mut self, size: u32) -> Self {
        self.sampling.no_repeat_ngram_size = Some(size);
        self
    }

    /// The text of the answer is a JSON value that this schema allows, its properties in the order
    /// of the schema. What cannot be followed to the letter is refused, by its path, when the
    /// request is made. The last form that is asked for counts. An answer whose text is complete,
    /// and that nothing can follow, ends as
    /// [`FinishReason::Complete`](super::FinishReason::Complete).
    pub fn json_schema(mut self, schema: &Value) -> Self {
        self.form = Some(Form::JsonSchema(schema.to_string()));
        self
    }

    /// The text of the answer is a JSON object. See [`json_schema`](Request::json_schema).
    pub fn json_object(mut self) -> Self {
        self.form = Some(Form::JsonObject);
        self
    }

    /// The text of the answer is one that a regular expression matches as a whole. See
    /// [`json_schema`](Request::json_schema).
    pub fn regex(mut self, regex: impl Into<String>) -> Self {
        self.form = Some(Form::Regex(regex.into()));
        self
    }

    /// The text of the answer is one of a context-free grammar, in the EBNF of Lark. See
    /// [`json_schema`](Request::json_schema).
    pub fn grammar(mut self, grammar: impl Into<String>) -> Self {
        self.form = Some(Form::Grammar(grammar.into()));
        self
    }

    /// The text of the answer is one of these. See [`json_schema`](Request::json_schema).
    pub fn choice<T: Into<String>>(mut self, texts: impl IntoIterator<Item = T>) -> Self {
        self.form = Some(Form::Choice(texts.into_iter().map(Into::into).collect()));
        self
    }

    /// The tokens with which the answer begins, whatever is likely. They count as generated.
    pub fn first_tokens(mut self, ids: impl Into<Vec<u32>>) -> Self {
        self.first_tokens = ids.into();
        self
    }

    /// The number of generated tokens before which none that ends the generation is chosen: neither
    /// the model's own end tokens (unless they are ignored) nor those of
    /// [`stop_token_ids`](Request::stop_token_ids). At most `max_tokens`; default: 0.
    pub fn min_tokens(mut self, min_tokens: u32) -> Self {
        self.min_tokens = min_tokens;
        self
    }

    /// Tells the log-probability of every generated token, and of the `num_top` most likely ones in
    /// its place, at most 20, by the model's own logits: see [`Event::Token`](super::Event::Token)
    /// and [`Generation`](super::Generation).
    pub fn log_probs(mut self, num_top: u32) -> Self {
        self.log_probs = Some(LogProbsWanted { num_top, processed: false });
        self
    }

    /// Tells how likely each token of the prompt was, and the `num_top` most likely ones in its
    /// place, at most 20: see [`Event::Prompt`](super::Event::Prompt) and
    /// [`Generation`](super::Generation). The prompt is then computed by itself first, whole.
    pub fn prompt_log_probs(mut self, num_top: u32) -> Self {
        self.prompt_log_probs = Some(num_top);
        self
    }

    /// As [`log_probs`](Request::log_probs), by the logits after biases, penalties, banned repetitions,
    /// `min_tokens`, first tokens, the form of the answer and the temperature. The filters top-k, top-p,
    /// min-p and typical-p do not count.
    pub fn processed_log_probs(mut self, num_top: u32) -> Self {
        self.log_probs = Some(LogProbsWanted { num_top, processed: true });
        self
    }

    /// Which of the tools the answer calls. Default: [`ToolChoice::Auto`]; the others need a
    /// conversation, and a call that must be made needs tools and no other form of the answer.
    pub fn tool_choice(mut self, choice: ToolChoice) -> Self {
        self.tool_choice = choice;
        self
    }

    /// Takes the answer apart into thoughts, content and calls of tools: see
    /// [`Event::Answer`](super::Event::Answer) and
    /// [`Generation::answer`](super::Generation::answer).
    pub fn answer_format(mut self, format: AnswerFormat) -> Self {
        self.answer_format = Some(format);
        self
    }

    /// Whether special tokens that are written in messages and tools become their ids, as in
    /// Transformers. Default: false, so that no text can pretend to be another turn, unless the
    /// template takes something out of its middle or changes its letters, or the tokenizer's
    /// normalizer does and has special tokens that are found afterwards.
    pub fn parse_special_in_messages(mut self, parse: bool) -> Self {
        self.parse_special_in_messages = parse;
        self
    }

    /// The seed of the random draws. The same seed gives the same text. Default: drawn from the
    /// operating system.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The text ends before this string. May be called several times.
    pub fn stop(mut self, stop: impl Into<String>) -> Self {
        self.stop_strings.push(stop.into());
        self
    }

    /// Tokens that end the text, besides the model's own.
    pub fn stop_token_ids(mut self, ids: impl Into<Vec<u32>>) -> Self {
        self.stop_token_ids = ids.into();
        self
    }

    /// Whether special tokens are left out of the text. Default: true.
    pub fn skip_special_tokens(mut self, skip: bool) -> Self {
        self.skip_special = skip;
        self
    }

    /// Goes on after the model's own end tokens. Default: false.
    pub fn ignore_eos(mut self, ignore: bool) -> Self {
        self.ignore_eos = ignore;
        self
    }

    /// A switch with which another thread stops the request, the computation of its prompt included.
    pub fn cancel_with(mut self, token: Arc<CancelToken>) -> Self {
        self.cancel = Some(token);
        self
    }

    /// Higher goes first. Default: 0.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Independent continuations of the prompt, which is computed once. Sample `i` draws with the
    /// seed plus `i`. Default: 1.
    pub fn num_samples(mut self, num_samples: u32) -> Self {
        self.num_samples = num_samples;
        self
    }

    /// The time from the call after which the request ends with the tokens that it has.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Requests with different keys share no keys and values, so that users cannot learn from times
    /// what others ask. Default: 0.
    pub fn cache_key(mut self, key: u64) -> Self {
        self.cache_key = key;
        self
    }

    /// The request as the engine takes it.
    pub(super) fn as_engine(&self) -> engine::Request<'_> {
        let prompt = match &self.source {
            Source::Text(text) => {
                engine::Prompt::Text { text, add_special: true, parse_special: self.parse_special }
            }
            Source::Tokens(ids) => engine::Prompt::TokenIds(ids),
            Source::Chat(messages) => engine::Prompt::Chat(ChatPrompt {
                messages,
                tools: self.tools.as_deref(),
                variables: self.variables.as_deref(),
                add_generation_prompt: true,
                parse_special: self.parse_special_in_messages,
            }),
        };
        engine::Request {
            prompt,
            sampling: self.sampling,
            seed: self.seed,
            max_tokens: self.max_tokens,
            stop_strings: self.stop_strings.iter().map(String::as_str).collect(),
            stop_token_ids: &self.stop_token_ids,
            skip_special: self.skip_special,
            ignore_eos: self.ignore_eos,
            cancel: self.cancel.clone(),
            priority: self.priority,
            num_samples: self.num_samples,
            time_limit: self.time_limit,
            cache_key: self.cache_key,
            logit_bias: self.logit_bias.clone(),
            min_tokens: self.min_tokens,
            first_tokens: &self.first_tokens,
            constraint: self.form.as_ref().map(Form::as_engine),
            tool_choice: self.tool_choice.as_engine(),
            log_probs: self.log_probs,
            prompt_log_probs: self.prompt_log_probs,
            answer_format: self.answer_format,
        }
    }
}
