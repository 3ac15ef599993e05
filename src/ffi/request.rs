//! Requests and the tokens that cancel them.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::answer::answer_format;
use super::guard::{
    array_argument, flag, guard, guard_or, guard_work, init_struct, text_argument, GrowingStruct,
    Out, NUL_TERMINATED,
};
use super::handle::HandleTable;
use super::status::xserv_status;
use super::text::chat_prompt;
use super::types::{XSERV_NUL_TERMINATED, XSERV_SEED_RANDOM, XSERV_UNSET_FLOAT, XSERV_UNSET_INT};
use crate::engine::{
    CancelToken, Constraint, LogProbsWanted, LogitBias, Prompt, Request, SamplingOverrides,
    ToolChoice, MAX_LOGIT_BIASES,
};
use crate::error::{try_with_capacity, Error, Result};
use crate::text::MAX_CHOICES;

/// A switch that stops requests from another thread. Several requests may share one.
pub struct xserv_cancel_token {
    _opaque: [u8; 0],
}

/// A number that is added to the logit of a token, for xserv_request.logit_bias.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_logit_bias {
    /// The token, below the model's vocab_size.
    pub token_id: u32,
    /// -10000 to 10000; or minus infinity, which bans the token.
    pub bias: f32,
}

/// Logits from which a token is to be chosen, as passed to the callback. It is valid during the callback
/// only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_logits_event {
    /// sizeof(xserv_logits_event) in the library; fields beyond it do not exist.
    pub struct_size: usize,
    /// The model's own logits, one for each token of the vocabulary. The callback may change them:
    /// everything else (logit_bias, min_tokens, penalties, first_tokens, temperature and filters) is
    /// applied to what it leaves. Minus infinity bans a token; NaN, plus infinity, and the ban of all
    /// tokens end the request with XSERV_STATUS_INVALID_ARGUMENT. num_log_probs without
    /// processed_log_probs are those of what it leaves.
    pub logits: *mut f32,
    /// Number of logits.
    pub vocab_size: usize,
    /// The ids of the prompt.
    pub prompt_tokens: *const u32,
    /// Number of ids of the prompt.
    pub num_prompt_tokens: usize,
    /// The ids that the sample has so far; not NULL even if there are none.
    pub token_ids: *const u32,
    /// Number of token_ids.
    pub num_tokens: u32,
    /// Which sample of the request, from 0.
    pub sample: u32,
}

/// Called before every choice of a token, on the thread that called xserv_generate, with no lock held: it
/// may call any function of the library, also on the same model. Returns true to continue, false to stop
/// the request as xserv_token_callback does. Of a request with several samples, one is asked about at a
/// time.
pub type xserv_logits_callback =
    Option<unsafe extern "C" fn(event: *const xserv_logits_event, user_data: *mut c_void) -> bool>;

/// The forms that the text of an answer can be made to take (xserv_request.constraint_kind).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_constraint_kind {
    /// Any text.
    XSERV_CONSTRAINT_NONE = 0,
    /// A JSON value that the JSON schema in xserv_request.constraint allows (drafts 4 to 2020-12), its
    /// properties in the order of the schema. References lead to places within the schema only. Keywords:
    /// type, enum, const, anyOf, oneOf (of alternatives that exclude each other), allOf, $ref, properties,
    /// patternProperties, additionalProperties, required, minProperties, maxProperties, items, prefixItems,
    /// additionalItems, minItems, maxItems, minLength, maxLength, pattern, format, minimum, maximum,
    /// exclusiveMinimum, exclusiveMaximum, multipleOf. Other keywords of those drafts that allow or forbid
    /// something are refused; annotations and words that no draft has count for nothing, as the drafts say.
    /// Bounds and constants that a 64-bit floating-point number does not hold exactly are refused, and so is
    /// a minProperties of more than one key beside those in required: keys that the schema does not name may
    /// come several times. If an object may have such keys beside ones that it names, strings have no control
    /// characters but those with short escapes (\n, \r, \t, \b, \f), and constants with others are refused.
    /// Times have leap seconds at 23:59:60 UTC only.
    XSERV_CONSTRAINT_JSON_SCHEMA = 1,
    /// Any JSON object.
    XSERV_CONSTRAINT_JSON_OBJECT = 2,
    /// A text that the regular expression in xserv_request.constraint matches as a whole; in the syntax of
    /// Rust's regex crate, without anchors and word boundaries.
    XSERV_CONSTRAINT_REGEX = 3,
    /// A text of the context-free grammar in xserv_request.constraint, in the EBNF of Lark with the
    /// extensions of llguidance: it begins with the rule start; rules have lower-case names, terminals
    /// upper-case ones; %json { ... } stands for a value of a JSON schema.
    XSERV_CONSTRAINT_GRAMMAR = 4,
    /// One of the texts in xserv_request.choices.
    XSERV_CONSTRAINT_CHOICE = 5,
}

/// Which tools an answer calls (xserv_request.tool_choice). A call that must be made is written as
/// the model's chat template writes calls, to the blank, without the id that some write; its
/// arguments are what the JSON schema of its tool allows. Where the template writes arguments as
/// plain text between tags, strings have no quotes; a schema that allows strings and other values
/// allows no string that would be read as one of the others, and none of the others that would be
/// read as a string. No such string contains </parameter> or </function>, or has a line that begins
/// with <parameter=.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_tool_choice {
    /// As the model likes; nothing keeps its calls to their schemas.
    XSERV_TOOL_CHOICE_AUTO = 0,
    /// None: the model is not shown the tools, and nothing that it writes is taken for a call, whatever
    /// xserv_request.answer_format says. A constraint can be given as without tools.
    XSERV_TOOL_CHOICE_NONE = 1,
    /// The answer is exactly one call, of any of the tools. A model that thinks may think first.
    XSERV_TOOL_CHOICE_REQUIRED = 2,
    /// The answer is exactly one call of the tool xserv_request.tool_choice_name. A model that thinks may
    /// think first.
    XSERV_TOOL_CHOICE_NAMED = 3,
}

/// A request to generate. Fill with xserv_request_default(), then set exactly one of prompt,
/// prompt_tokens and messages_json, and whatever else you need. The library copies what it needs
/// during the call.
///
/// Sampling fields left unset take the value of the model's generation_config.json, or if that has
/// none the neutral value given below. Parameters have the meaning that they have in Transformers,
/// and are applied in its order: logit_bias, repetition, presence and frequency penalty,
/// no_repeat_ngram_size, min_tokens, temperature, top_k, top_p, min_p, typical_p.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_request {
    /// sizeof(xserv_request).
    pub struct_size: usize,
    /// The prompt as text to be continued, UTF-8; or NULL. The text that comes begins with the space
    /// before its first word, so that both can be put together; an answer to messages_json does not,
    /// with tokenizers that take such a space for the beginning of a text (Llama 2, Mistral).
    pub prompt: *const c_char,
    /// Bytes of prompt; default XSERV_NUL_TERMINATED.
    pub prompt_len: usize,
    /// The prompt as token ids; or NULL.
    pub prompt_tokens: *const u32,
    /// Number of ids in prompt_tokens.
    pub num_prompt_tokens: usize,
    /// The prompt as a conversation: NUL-terminated JSON array of messages, rendered with the
    /// model's chat template (see xserv_chat_options); or NULL. Integers beyond 64 bits are read as 64-bit
    /// floating-point numbers, in tools and template variables too.
    pub messages_json: *const c_char,
    /// With messages_json: JSON array of tools, or NULL.
    pub tools_json: *const c_char,
    /// With messages_json: JSON object of template variables, or NULL.
    pub template_variables_json: *const c_char,
    /// Stop strings: the text ends before the first one that appears, even if it is spread over
    /// several tokens, and no part of it is ever passed to the callback. NUL-terminated UTF-8, not
    /// empty, at most 64 strings of 1024 bytes.
    pub stop_strings: *const *const c_char,
    /// Number of stop strings.
    pub num_stop_strings: usize,
    /// Tokens that end the generation, in addition to the model's own end tokens.
    pub stop_token_ids: *const u32,
    /// Number of stop tokens.
    pub num_stop_token_ids: usize,
    /// Lets another thread stop the request; or NULL. Must live until the call returns.
    pub cancel: *const xserv_cancel_token,
    /// The largest number of tokens to generate. Default XSERV_UNSET_INT: max_new_tokens of
    /// generation_config.json, else until the context is full. 0 generates nothing.
    pub max_tokens: u32,
    /// Keep the k most likely tokens; 0: all. Default XSERV_UNSET_INT; neutral: 0.
    pub top_k: u32,
    /// 0: always the most likely token (greedy). Greater: logits are divided by it. Default
    /// XSERV_UNSET_FLOAT: as generation_config.json says, greedy if its do_sample is false or
    /// absent.
    pub temperature: f32,
    /// Keep the most likely tokens that together have this probability; above 0, at most 1. Default
    /// XSERV_UNSET_FLOAT; neutral: 1.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 to 1. Default
    /// XSERV_UNSET_FLOAT; neutral: 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that are in the prompt or were
    /// generated; 0.001 to 1000. Default XSERV_UNSET_FLOAT; neutral: 1.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that were generated; -10000 to 10000. Default
    /// XSERV_UNSET_FLOAT; neutral: 0.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens once for each time they were generated; -10000 to
    /// 10000. Default XSERV_UNSET_FLOAT; neutral: 0.
    pub frequency_penalty: f32,
    /// Seed of the random draws: the same seed gives the same tokens, whatever else runs on the
    /// model. Where xserv_load_options.deterministic makes a difference and is 0, that holds up to
    /// rounding, which depends on what is computed together. Default XSERV_SEED_RANDOM.
    pub seed: u64,
    /// With messages_json: 1 (default) opens the assistant's turn.
    pub add_generation_prompt: u8,
    /// With prompt: 1 (default) adds the special tokens that the tokenizer adds to a text (Qwen and
    /// GPT-2: none; Llama and Mistral: the one that begins a text, unless the prompt begins with it,
    /// as a rendered conversation does).
    pub add_special_tokens: u8,
    /// With prompt: 1 (default) turns special tokens written in the text into their ids. 0: they
    /// are ordinary text.
    pub parse_special_tokens: u8,
    /// 1 (default): special tokens do not appear in the text. 0: they do (but a token that ends the
    /// generation never does).
    pub skip_special_tokens: u8,
    /// 1: the model's own end tokens do not end the generation. Default 0.
    pub ignore_eos: u8,
    /// With num_log_probs: 0 (default): log-probabilities of the model's own logits; 1: of the logits
    /// after logit_bias, penalties, no_repeat_ngram_size, min_tokens, first_tokens, the constraint and
    /// the temperature (which does not count if it is 0). A token that one of these bans has minus
    /// infinity. The filters top_k, top_p, min_p and typical_p never count.
    pub processed_log_probs: u8,
    /// With messages_json: 0 (default): special tokens written in messages and tools, such as
    /// <|im_end|>, are ordinary text, so that no text can pretend to be another turn (in messages
    /// of the assistant, tags such as <think> keep their meaning; template_variables_json always
    /// do). They are found in texts as these were given: a template that takes something out of the
    /// middle of texts or changes their letters can make one afterwards, and so can a tokenizer that
    /// finds special tokens in normalised text. 1: they become their ids, as in Transformers; only
    /// for text that you trust.
    pub parse_special_in_messages: u8,
    /// Unused, 0.
    pub reserved: [u8; 1],
    /// When requests compete, those with the higher number go first; among equal ones (default 0)
    /// the one that was submitted first.
    pub priority: i32,
    /// The number of independent continuations of the prompt, which is computed once for all; 1
    /// (default) to 256. Sample i draws with the seed plus i, and gives what a request of its own
    /// with that seed would give.
    pub num_samples: u32,
    /// Milliseconds from the call after which the request ends with what it has, as
    /// XSERV_FINISH_DEADLINE; 0 (default): no limit.
    pub time_limit_ms: u64,
    /// Requests share the keys and values of common prefixes only with requests of the same number
    /// (their output does not depend on it, but the time that they take does). Default 0. A host
    /// whose users must not learn of each other's prompts gives each a number of their own.
    pub cache_key: u64,
    /// Numbers that are added to logits before anything else is applied to them, for each token at
    /// most one; or NULL.
    pub logit_bias: *const xserv_logit_bias,
    /// Number of biases, at most 16384.
    pub num_logit_bias: usize,
    /// The number of generated tokens before which no token that ends the generation is chosen: neither
    /// the model's own end tokens (unless ignore_eos is 1, where they end nothing) nor stop_token_ids.
    /// Their logits are minus infinity until then. Stop strings end the text all the same. At most
    /// max_tokens; default 0.
    pub min_tokens: u32,
    /// Tells the log-probability of every generated token, and of this number of the most likely tokens
    /// in its place, at most 20; 0: of the generated token alone. Default XSERV_UNSET_INT: none. They are
    /// natural logarithms of the softmax over the whole vocabulary, computed in f32, and come with the
    /// events of a submission (xserv_event) and with the result (xserv_result_info).
    pub num_log_probs: u32,
    /// Keep the tokens whose information content is nearest to the entropy and that together have this
    /// probability (locally typical sampling, Meister et al. 2022); above 0, at most 1. Default
    /// XSERV_UNSET_FLOAT; neutral: 1.
    pub typical_p: f32,
    /// Bans tokens that would repeat a sequence of this length from the prompt or the answer. Default
    /// XSERV_UNSET_INT; neutral: 0. On a GPU such a request is not computed ahead of its tokens, so it is
    /// slower than others.
    pub no_repeat_ngram_size: u32,
    /// The tokens with which the answer begins, whatever is likely: they are neither banned nor
    /// penalised, count as generated, and may end the answer. Or NULL.
    pub first_tokens: *const u32,
    /// Number of first_tokens, at most the context.
    pub num_first_tokens: usize,
    /// For xserv_generate() only, xserv_submit() refuses it: called before every choice of a token, to
    /// change the logits; or NULL. While it runs the request's sample waits, and nothing else does. It
    /// costs a copy of the logits to the calling thread and back with every token (0.6 MB each way for a
    /// vocabulary of 151,936), and on a GPU the request cannot be computed ahead of it.
    pub logits_callback: xserv_logits_callback,
    /// Passed to logits_callback.
    pub logits_user_data: *mut c_void,
    /// Tells the log-probability of every token of the prompt after those before it, and of this number
    /// of the most likely tokens in its place, at most 20; 0: of the token alone. Default XSERV_UNSET_INT:
    /// none. They are those of the model's own logits, and come with XSERV_EVENT_PROMPT events and with
    /// the result. The prompt is computed by itself first, whole, with nothing taken from the prefix
    /// cache, in which the samples then find it.
    pub num_prompt_log_probs: u32,
    /// An xserv_answer_format: whether and how the text is taken apart, into reasoning, content and
    /// tool_calls of xserv_result_info and the kinds of xserv_event that tell them as they come. Default
    /// XSERV_ANSWER_NONE. What else the request gives does not change, but for where a constraint begins
    /// after a thought (constraint_kind). Needs a tokenizer.
    pub answer_format: u32,
    /// An xserv_constraint_kind: the form that the text of the answer takes. Default
    /// XSERV_CONSTRAINT_NONE. A token that ends the answer (min_tokens) comes only where the text
    /// is complete; where nothing else can follow, the answer ends as XSERV_FINISH_COMPLETE. It may
    /// also end incomplete, for another reason: at max_tokens, say, or before a stop string.
    /// Special tokens are no text. first_tokens must fit. If answer_format is set and the prompt
    /// has begun a thought (`<think>`), the model first ends that as it likes, and the constraint
    /// begins after it; else it begins with the first token. What cannot be followed to the letter
    /// is refused, in two seconds at most; of a JSON schema the message names the path. A
    /// constraint that becomes too complex on the way ends the answer with
    /// XSERV_STATUS_UNSUPPORTED, and one that leaves no token because others are banned
    /// (logit_bias, min_tokens, no_repeat_ngram_size) or end the answer (end and stop tokens) with
    /// XSERV_STATUS_INVALID_ARGUMENT. On a GPU
    /// the host computes which tokens may come while the device computes the logits.
    pub constraint_kind: u32,
    /// Unused, 0.
    pub reserved2: u32,
    /// The JSON schema, regular expression or grammar, UTF-8, at most 2 MiB; or NULL, for kinds that have
    /// none.
    pub constraint: *const c_char,
    /// Bytes of constraint; default XSERV_NUL_TERMINATED.
    pub constraint_len: usize,
    /// For XSERV_CONSTRAINT_CHOICE: NUL-terminated UTF-8 texts, not empty, together at most 2 MiB; or NULL.
    pub choices: *const *const c_char,
    /// Number of choices, at most 4096.
    pub num_choices: usize,
    /// An xserv_tool_choice; others than XSERV_TOOL_CHOICE_AUTO (default) need messages_json.
    /// XSERV_TOOL_CHOICE_REQUIRED and _NAMED need tools_json and are constraints, as those of
    /// constraint_kind, beside which they cannot be given; XSERV_STATUS_UNSUPPORTED if the model's chat
    /// template writes calls in no form that is known, or in one that cannot be kept to a tool's schema.
    /// With an answer_format the call is in tool_calls of the result.
    pub tool_choice: u32,
    /// Unused, 0.
    pub reserved3: u32,
    /// With XSERV_TOOL_CHOICE_NAMED: the name of one of the tools, UTF-8 and NUL-terminated; else NULL.
    pub tool_choice_name: *const c_char,
}

// SAFETY: repr(C), struct_size first, integers, floats, pointers and a nullable function pointer; a caller
// who passes one that is none breaks the contract of that field.
unsafe impl GrowingStruct for xserv_request {
    const SIZES: &'static [usize] = &[176, 304];
    const NAME: &'static str = "xserv_request";
    const HOW: &'static str = "fill it with xserv_request_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == [0; 1] && self.reserved2 == 0 && self.reserved3 == 0
    }
    fn defaults() -> Self {
        xserv_request {
            struct_size: size_of::<Self>(),
            prompt: std::ptr::null(),
            prompt_len: XSERV_NUL_TERMINATED,
            prompt_tokens: std::ptr::null(),
            num_prompt_tokens: 0,
            messages_json: std::ptr::null(),
            tools_json: std::ptr::null(),
            template_variables_json: std::ptr::null(),
            stop_strings: std::ptr::null(),
            num_stop_strings: 0,
            stop_token_ids: std::ptr::null(),
            num_stop_token_ids: 0,
            cancel: std::ptr::null(),
            max_tokens: XSERV_UNSET_INT,
            top_k: XSERV_UNSET_INT,
            temperature: XSERV_UNSET_FLOAT,
            top_p: XSERV_UNSET_FLOAT,
            min_p: XSERV_UNSET_FLOAT,
            repetition_penalty: XSERV_UNSET_FLOAT,
            presence_penalty: XSERV_UNSET_FLOAT,
            frequency_penalty: XSERV_UNSET_FLOAT,
            seed: XSERV_SEED_RANDOM,
            add_generation_prompt: 1,
            add_special_tokens: 1,
            parse_special_tokens: 1,
            skip_special_tokens: 1,
            ignore_eos: 0,
            processed_log_probs: 0,
            parse_special_in_messages: 0,
            reserved: [0; 1],
            priority: 0,
            num_samples: 1,
            time_limit_ms: 0,
            cache_key: 0,
            logit_bias: std::ptr::null(),
            num_logit_bias: 0,
            min_tokens: 0,
            num_log_probs: XSERV_UNSET_INT,
            typical_p: XSERV_UNSET_FLOAT,
            no_repeat_ngram_size: XSERV_UNSET_INT,
            first_tokens: std::ptr::null(),
            num_first_tokens: 0,
            logits_callback: None,
            logits_user_data: std::ptr::null_mut(),
            num_prompt_log_probs: XSERV_UNSET_INT,
            answer_format: 0,
            constraint_kind: xserv_constraint_kind::XSERV_CONSTRAINT_NONE as u32,
            reserved2: 0,
            constraint: std::ptr::null(),
            constraint_len: XSERV_NUL_TERMINATED,
            choices: std::ptr::null(),
            num_choices: 0,
            tool_choice: xserv_tool_choice::XSERV_TOOL_CHOICE_AUTO as u32,
            reserved3: 0,
            tool_choice_name: std::ptr::null(),
        }
    }
}

static CANCEL_TOKENS: HandleTable<CancelToken> = HandleTable::new(5, "cancel token");

/// Sets every field to its default, which leaves the prompt to be set.
///
/// struct_size: sizeof(xserv_request) of the header that the program is built with; no byte beyond it is
/// written. xserv_request_default() passes it. Does nothing if request is NULL.
///
/// # Safety
/// `request` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_request_init(request: *mut xserv_request, struct_size: usize) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(request, struct_size) };
        Ok(())
    })
}

/// Makes a cancel token, which the caller frees with xserv_cancel_token_free().
///
/// # Safety
/// `cancel_token` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_cancel_token_new(
    cancel_token: *mut *mut xserv_cancel_token,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: writable by contract.
        let out = unsafe { Out::new(cancel_token, "cancel_token") }?;
        out.set(CANCEL_TOKENS.insert(Arc::new(CancelToken::default()))?);
        Ok(())
    })
}

/// Stops every request that carries this token: running ones end with XSERV_FINISH_CANCELLED at the
/// next layer of the forward pass, those that start later end at once. Any thread may call it, any
/// number of times. It takes a lock, so it must not be called from a signal handler; write a byte to
/// a pipe there, for which a thread polls. (A flag that the token callback checks is not seen while a
/// prompt is computed.)
#[no_mangle]
pub extern "C" fn xserv_cancel_token_cancel(
    cancel_token: *const xserv_cancel_token,
) -> xserv_status {
    guard(|| {
        CANCEL_TOKENS.get(cancel_token)?.cancel();
        Ok(())
    })
}

/// Returns the cancel token of a handle; `None` for NULL.
pub(super) fn cancel_token(token: *const xserv_cancel_token) -> Result<Option<Arc<CancelToken>>> {
    if token.is_null() {
        Ok(None)
    } else {
        CANCEL_TOKENS.get(token).map(Some)
    }
}

/// Frees a cancel token; NULL is allowed. Requests that carry it continue.
#[no_mangle]
pub extern "C" fn xserv_cancel_token_free(cancel_token: *mut xserv_cancel_token) {
    guard_or((), || CANCEL_TOKENS.remove(cancel_token).map(drop))
}

fn unset_float(value: f32) -> Option<f32> {
    (value != XSERV_UNSET_FLOAT).then_some(value)
}

fn unset_int(value: u32) -> Option<u32> {
    (value != XSERV_UNSET_INT).then_some(value)
}

/// # Safety
/// The pointers of `c` obey the contracts of their fields for `'a`.
unsafe fn prompt_of<'a>(c: &xserv_request) -> Result<Prompt<'a>> {
    let given = [!c.prompt.is_null(), !c.prompt_tokens.is_null(), !c.messages_json.is_null()];
    if given.iter().filter(|g| **g).count() != 1 {
        return Err(Error::invalid_argument(
            "request: exactly one of prompt, prompt_tokens and messages_json must be set",
        ));
    }
    if c.messages_json.is_null() && !(c.tools_json.is_null() && c.template_variables_json.is_null())
    {
        return Err(Error::invalid_argument(
            "request: tools_json and template_variables_json need messages_json",
        ));
    }
    // SAFETY: by contract.
    let chat = unsafe {
        chat_prompt(
            c.messages_json,
            c.tools_json,
            c.template_variables_json,
            c.add_generation_prompt,
            c.parse_special_in_messages,
        )
    }?;
    if let Some(chat) = chat {
        return Ok(Prompt::Chat(chat));
    }
    if !c.prompt_tokens.is_null() {
        // SAFETY: by contract.
        let ids = unsafe {
            array_argument(c.prompt_tokens, c.num_prompt_tokens, "request.prompt_tokens")
        }?;
        return Ok(Prompt::TokenIds(ids));
    }
    Ok(Prompt::Text {
        // SAFETY: by contract.
        text: unsafe { text_argument(c.prompt, c.prompt_len, "request.prompt") }?,
        add_special: flag(c.add_special_tokens, "request.add_special_tokens")?,
        parse_special: flag(c.parse_special_tokens, "request.parse_special_tokens")?,
    })
}

/// # Safety
/// The pointer `logit_bias` of `c` obeys the contract of its field.
unsafe fn logit_bias_of(c: &xserv_request) -> Result<Vec<LogitBias>> {
    // SAFETY: by contract.
    let given = unsafe { array_argument(c.logit_bias, c.num_logit_bias, "request.logit_bias") }?;
    if given.len() > MAX_LOGIT_BIASES {
        return Err(Error::invalid_argument(format!(
            "request.num_logit_bias is {}, but at most {MAX_LOGIT_BIASES} are allowed",
            given.len()
        )));
    }
    let mut biases = try_with_capacity(given.len(), "biases")?;
    biases.extend(given.iter().map(|b| LogitBias { token_id: b.token_id, bias: b.bias }));
    Ok(biases)
}

/// # Safety
/// The pointers `constraint` and `choices` of `c` obey the contracts of their fields for `'a`.
unsafe fn constraint_of<'a>(c: &xserv_request) -> Result<Option<Constraint<'a>>> {
    use xserv_constraint_kind as kind;
    const TEXTS: [u32; 3] = [
        kind::XSERV_CONSTRAINT_JSON_SCHEMA as u32,
        kind::XSERV_CONSTRAINT_REGEX as u32,
        kind::XSERV_CONSTRAINT_GRAMMAR as u32,
    ];
    let wants_text = TEXTS.contains(&c.constraint_kind);
    let wants_choices = c.constraint_kind == kind::XSERV_CONSTRAINT_CHOICE as u32;
    if c.constraint_kind > kind::XSERV_CONSTRAINT_CHOICE as u32 {
        return Err(Error::invalid_argument(format!(
            "request.constraint_kind is {}, which is no xserv_constraint_kind",
            c.constraint_kind
        )));
    }
    if c.constraint.is_null() == wants_text {
        return Err(Error::invalid_argument(if wants_text {
            "request.constraint is NULL, but its kind needs a text"
        } else {
            "request.constraint is set, but its kind has no text"
        }));
    }
    if (!c.choices.is_null() || c.num_choices > 0) && !wants_choices {
        return Err(Error::invalid_argument(
            "request.choices needs the constraint_kind XSERV_CONSTRAINT_CHOICE",
        ));
    }
    let text = if wants_text {
        // SAFETY: by contract, here and below.
        unsafe { text_argument(c.constraint, c.constraint_len, "request.constraint") }?
    } else {
        ""
    };
    Ok(match c.constraint_kind {
        k if k == kind::XSERV_CONSTRAINT_JSON_SCHEMA as u32 => Some(Constraint::JsonSchema(text)),
        k if k == kind::XSERV_CONSTRAINT_JSON_OBJECT as u32 => Some(Constraint::JsonObject),
        k if k == kind::XSERV_CONSTRAINT_REGEX as u32 => Some(Constraint::Regex(text)),
        k if k == kind::XSERV_CONSTRAINT_GRAMMAR as u32 => Some(Constraint::Grammar(text)),
        k if k == kind::XSERV_CONSTRAINT_CHOICE as u32 => {
            let pointers =
                // SAFETY: as above.
                unsafe { array_argument(c.choices, c.num_choices, "request.choices") }?;
            if pointers.len() > MAX_CHOICES {
                return Err(Error::invalid_argument(format!(
                    "request.num_choices is {}, but at most {MAX_CHOICES} are allowed",
                    pointers.len()
                )));
            }
            let mut choices = try_with_capacity(pointers.len(), "choices")?;
            for (i, pointer) in pointers.iter().enumerate() {
                let name = format!("request.choices[{i}]");
                // SAFETY: as above.
                choices.push(unsafe { text_argument(*pointer, NUL_TERMINATED, &name) }?);
            }
            Some(Constraint::Choice(choices))
        }
        _ => None,
    })
}

fn log_probs_of(c: &xserv_request) -> Result<Option<LogProbsWanted>> {
    let processed = flag(c.processed_log_probs, "request.processed_log_probs")?;
    let wanted = unset_int(c.num_log_probs).map(|num_top| LogProbsWanted { num_top, processed });
    if processed && wanted.is_none() {
        return Err(Error::invalid_argument("request: processed_log_probs needs num_log_probs"));
    }
    Ok(wanted)
}

/// # Safety
/// The pointer `tool_choice_name` of `c` obeys the contract of its field for `'a`.
unsafe fn tool_choice_of<'a>(c: &xserv_request) -> Result<ToolChoice<'a>> {
    use xserv_tool_choice as choice;
    let is_named = c.tool_choice == choice::XSERV_TOOL_CHOICE_NAMED as u32;
    if c.tool_choice_name.is_null() == is_named {
        return Err(Error::invalid_argument(
            "request.tool_choice_name must be set with XSERV_TOOL_CHOICE_NAMED, and be NULL else",
        ));
    }
    match c.tool_choice {
        it if it == choice::XSERV_TOOL_CHOICE_AUTO as u32 => Ok(ToolChoice::Auto),
        it if it == choice::XSERV_TOOL_CHOICE_NONE as u32 => Ok(ToolChoice::None),
        it if it == choice::XSERV_TOOL_CHOICE_REQUIRED as u32 => Ok(ToolChoice::Required),
        _ if is_named => {
            let (name, len) = (c.tool_choice_name, NUL_TERMINATED);
            // SAFETY: by contract.
            let name = unsafe { text_argument(name, len, "request.tool_choice_name") }?;
            Ok(ToolChoice::Named(name))
        }
        it => Err(Error::invalid_argument(format!(
            "request.tool_choice is {it}, which is no xserv_tool_choice"
        ))),
    }
}

/// # Safety
/// The pointers of `c` obey the contracts of their fields for `'a`.
pub(super) unsafe fn request_of<'a>(c: &xserv_request) -> Result<Request<'a>> {
    // SAFETY: by contract, here and below.
    let prompt = unsafe { prompt_of(c) }?;
    let pointers =
        // SAFETY: as above.
        unsafe { array_argument(c.stop_strings, c.num_stop_strings, "request.stop_strings") }?;
    if pointers.len() > crate::text::MAX_STOP_STRINGS {
        return Err(Error::invalid_argument(format!(
            "request.num_stop_strings is {}, but at most {} are allowed",
            pointers.len(),
            crate::text::MAX_STOP_STRINGS
        )));
    }
    let mut stop_strings = try_with_capacity(pointers.len(), "stop strings")?;
    for (i, pointer) in pointers.iter().enumerate() {
        let name = format!("request.stop_strings[{i}]");
        // SAFETY: as above.
        stop_strings.push(unsafe { text_argument(*pointer, NUL_TERMINATED, &name) }?);
    }
    Ok(Request {
        prompt,
        sampling: SamplingOverrides {
            temperature: unset_float(c.temperature),
            top_k: unset_int(c.top_k),
            top_p: unset_float(c.top_p),
            min_p: unset_float(c.min_p),
            repetition_penalty: unset_float(c.repetition_penalty),
            presence_penalty: unset_float(c.presence_penalty),
            frequency_penalty: unset_float(c.frequency_penalty),
            typical_p: unset_float(c.typical_p),
            no_repeat_ngram_size: unset_int(c.no_repeat_ngram_size),
        },
        seed: (c.seed != XSERV_SEED_RANDOM).then_some(c.seed),
        max_tokens: unset_int(c.max_tokens),
        stop_strings,
        stop_token_ids: {
            // SAFETY: as above.
            unsafe {
                array_argument(c.stop_token_ids, c.num_stop_token_ids, "request.stop_token_ids")
            }?
        },
        skip_special: flag(c.skip_special_tokens, "request.skip_special_tokens")?,
        ignore_eos: flag(c.ignore_eos, "request.ignore_eos")?,
        cancel: cancel_token(c.cancel)?,
        priority: c.priority,
        num_samples: c.num_samples,
        time_limit: (c.time_limit_ms > 0).then(|| Duration::from_millis(c.time_limit_ms)),
        cache_key: c.cache_key,
        // SAFETY: as above.
        logit_bias: unsafe { logit_bias_of(c) }?,
        min_tokens: c.min_tokens,
        // SAFETY: as above.
        first_tokens: unsafe {
            array_argument(c.first_tokens, c.num_first_tokens, "request.first_tokens")
        }?,
        // SAFETY: as above.
        constraint: unsafe { constraint_of(c) }?,
        // SAFETY: as above.
        tool_choice: unsafe { tool_choice_of(c) }?,
        log_probs: log_probs_of(c)?,
        prompt_log_probs: unset_int(c.num_prompt_log_probs),
        answer_format: answer_format(c.answer_format, "request.answer_format")?,
    })
}
