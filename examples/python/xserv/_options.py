"""What a request says: the keywords of Model.generate(), and xserv_request of include/xserv.h in ctypes. A field of the
struct that is a number and has the name of a keyword takes its value; _request.py does the rest by hand."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Callable, List, Mapping, Optional, Sequence, TypedDict, Union

#: A list of {"role": ..., "content": ...}, or such a list as JSON.
Messages = Union[str, Sequence[Mapping[str, Any]]]
Tools = Union[str, Sequence[Mapping[str, Any]]]
#: Called with the ids of the prompt, the ids generated so far and the logits, which it may change.
LogitsProcessor = Callable[[List[int], List[int], "memoryview[float]"], Optional[bool]]


class GenerateOptions(TypedDict, total=False):
    """The keywords of Model.generate() and Model.generate_async(). All may be left out; None is the same as
    leaving out.

    What to continue, besides a text as `prompt`:

    tokens: the prompt as token ids, each below ModelInfo.vocab_size; nothing is added to them.
    messages: the prompt as a conversation, a list of {"role": ..., "content": ...} or the same as JSON, which
        is rendered with the model's chat template.
    tools: with messages: a list of tool descriptions for the template, or the same as JSON.
    variables: with messages: further variables of the template, such as {"enable_thinking": False}.
    parse_special_in_messages: with messages: whether special tokens written in messages and tools, such as
        <|im_end|>, become their ids, as in Transformers. Default False: they are ordinary text, so that no text can
        pretend to be another turn (unless the template or the tokenizer's normalizer makes one of other letters).
    add_generation_prompt: with messages: whether to open the assistant's turn. Default True.
    add_special_tokens: with a text: whether to add the special tokens that the tokenizer adds around a text
        (Qwen and GPT-2: none; Llama and Mistral: the one that begins a text, unless the text begins with it).
        Default True.
    parse_special_tokens: with a text: whether special tokens written in it, such as <|im_end|>, become their
        ids. Default True; False treats them as ordinary text: use it for text that you do not trust.

    How to choose tokens. What is left out comes from the model's generation_config.json or, if that has
    nothing, is the neutral value. The options mean what they mean in Transformers, and are applied in its
    order: logit_bias, repetition, presence and frequency penalty, no_repeat_ngram_size, min_tokens,
    temperature, top_k, top_p, min_p, typical_p.

    temperature: the logits are divided by it; at least 0, and 0 always takes the most likely token (greedy). If
        left out, generation is greedy unless generation_config.json has do_sample.
    top_k: keep the k most likely tokens; 0 (neutral) keeps all.
    top_p: keep the most likely tokens that together have this probability; above 0, at most 1 (neutral).
    min_p: drop tokens less likely than this fraction of the most likely one; 0 (neutral) to 1.
    repetition_penalty: divides positive and multiplies negative logits of tokens that are in the prompt or were
        generated; 0.001 to 1000, 1 is neutral.
    presence_penalty: subtracted from the logits of tokens that were generated; -10000 to 10000, 0 is neutral.
    frequency_penalty: subtracted from the logits of tokens once for each time they were generated; -10000 to
        10000, 0 is neutral.
    typical_p: keep the tokens whose information content is nearest to the entropy and that together have this
        probability (locally typical sampling); above 0, at most 1 (neutral).
    no_repeat_ngram_size: bans tokens that would repeat a sequence of this length from the prompt or the answer;
        0 (neutral) allows all. On a GPU such a request is not computed ahead of its tokens.
    first_tokens: the token ids with which the answer begins, whatever is likely. They count as generated.
    logit_bias: numbers that are added to the logits of tokens before everything else, by token id, at most 16384;
        -10000 to 10000, or -math.inf, which bans the token.
    logits_processor: a function that changes the logits before every choice of a token, and before everything else is
        applied to them: called with the ids of the prompt, the ids generated so far, and the logits, a writable
        memoryview of floats (numpy.asarray() and torch.frombuffer() take it without a copy). -math.inf bans a token.
        It returns None, or False to stop. It runs on a thread of its own, and costs a copy of the logits to the host
        and back with every token. For generate() without stream only.
    seed: of the random draws, 0 to 2**64 - 2. The same seed gives the same tokens, whatever else runs on the
        model (on a GPU, and with quantised weights on a CPU with AMX or AMD's AVX-512 BF16, up to rounding,
        unless the model was loaded with deterministic=True). Default: a fresh one, which Result.seed tells.
    num_samples: the number of independent continuations of the prompt, which is computed once for all; 1
        (default) to 256. Sample i draws with seed + i. Result.samples has them all, and Piece.sample tells
        whose a piece is.

    What to tell of the choice:

    logprobs: tells the log-probability of each generated token, and of this many of the most likely tokens in its
        place, 0 to 20: natural logarithms of the softmax over the whole vocabulary. Result.logprobs and
        Result.top_logprobs have them, and the events of a stream. Default: none.
    prompt_logprobs: tells the log-probability of each token of the prompt after those before it, and of this many of
        the most likely tokens in its place, 0 to 20: Result.prompt_logprobs and Result.prompt_top_logprobs have them,
        and the events of a stream. The prompt is then computed by itself first, whole. Default: none.
    processed_logprobs: with logprobs: whether they are those of the logits after logit_bias, penalties,
        no_repeat_ngram_size, min_tokens, first_tokens, the form of the answer and the temperature, instead of the
        model's own. A token that one of these bans has minus infinity. (top_k, top_p, min_p and typical_p never
        count.) Default False.

    answer_format: how the text is taken apart, into reasoning, content and tool_calls of the Result: "auto" (the
        default with messages: as the model's chat template writes calls, or as its response_template says if that
        form is none of those below; without tools there are none), "none"
        (the default else), "thinking" (thoughts and content alone), or the form in which calls are written:
        "json_tags" (Hermes, Qwen2.5, Qwen3), "xml_tags" (Qwen3-Coder, Qwen3.5), "bare_json" (Llama 3),
        "marked_json" (Mistral). The text itself stays as it is.

    The form of the answer's text, at most one of these. What cannot be followed to the letter is refused at once. A
    text that is complete, and that nothing can follow, ends as "complete"; at max_tokens it may end incomplete. Where
    the prompt has begun a thought and answer_format is not "none", the form is that of what comes after the thought.

    response_format: as OpenAI's interface has it: {"type": "json_schema", "json_schema": {"schema": ...}}, a JSON
        value that the JSON schema allows, its properties in the order of the schema; {"type": "json_object"}, any JSON
        object; or {"type": "text"}. "name", "description" and "strict" beside "schema" count for nothing: the schema is
        always followed strictly.
    regex: a regular expression, in the syntax of Rust's regex crate, that matches the text as a whole.
    grammar: a context-free grammar in the EBNF of Lark.
    tool_choice: which of the tools the answer calls: "auto" (default: as the model likes), "none" (it is not shown
        the tools, and nothing it writes is taken for a call), "required" (exactly one call, of any of them) or
        {"type": "function", "function": {"name": ...}} (exactly one call of that tool). A required call is written
        as the model's chat template writes calls, with arguments that the tool's JSON schema allows, after a
        thought where the model may have one.
    choice: texts, of which the answer is one.

    When to stop:

    min_tokens: the number of generated tokens before which no token that ends the generation is chosen: neither the
        model's own end tokens (unless ignore_eos) nor stop_token_ids. A string of stop ends the text all the
        same. At most max_tokens; default 0.
    max_tokens: the largest number of tokens to generate. Default: max_new_tokens of generation_config.json,
        else until the context is full. 0 generates nothing.
    stop: a string or several, at most 64 of 1 to 1024 bytes: the text ends before the first one that appears,
        and no part of it is given out.
    stop_token_ids: tokens that end the generation, in addition to the model's own end tokens
        (ModelInfo.eos_token_ids).
    ignore_eos: whether to go on after the model's own end tokens. Default False.
    time_limit_ms: milliseconds from the call after which the request ends with what it has; 0 (default): no limit.

    And:

    skip_special_tokens: whether special tokens are left out of the text. Default True. (A token that ends the
        generation is never in it.)
    priority: when requests compete for room, those with the higher number go first; among equal ones (default
        0) the one that was submitted first. A 32-bit integer.
    cache_key: requests share the keys and values of common prefixes only with requests of the same number, 0
        (default) to 2**64 - 1. Their text does not depend on it, but the time that they take does: users who
        must not learn of each other's prompts get a number each.
    """

    tokens: Optional[Sequence[int]]
    messages: Optional[Messages]
    tools: Optional[Tools]
    variables: Optional[Mapping[str, Any]]
    max_tokens: Optional[int]
    temperature: Optional[float]
    top_k: Optional[int]
    top_p: Optional[float]
    min_p: Optional[float]
    repetition_penalty: Optional[float]
    presence_penalty: Optional[float]
    frequency_penalty: Optional[float]
    typical_p: Optional[float]
    no_repeat_ngram_size: Optional[int]
    first_tokens: Optional[Sequence[int]]
    seed: Optional[int]
    stop: Union[None, str, Sequence[str]]
    stop_token_ids: Optional[Sequence[int]]
    add_generation_prompt: Optional[bool]
    parse_special_in_messages: Optional[bool]
    answer_format: Optional[str]
    add_special_tokens: Optional[bool]
    parse_special_tokens: Optional[bool]
    skip_special_tokens: Optional[bool]
    ignore_eos: Optional[bool]
    priority: Optional[int]
    time_limit_ms: Optional[int]
    cache_key: Optional[int]
    num_samples: Optional[int]
    logit_bias: Optional[Mapping[int, float]]
    min_tokens: Optional[int]
    response_format: Optional[Mapping[str, Any]]
    regex: Optional[str]
    grammar: Optional[str]
    tool_choice: Union[None, str, Mapping[str, Any]]
    choice: Optional[Sequence[str]]
    logprobs: Optional[int]
    processed_logprobs: Optional[bool]
    prompt_logprobs: Optional[int]
    logits_processor: Optional[LogitsProcessor]


class LogitBias(Structure):
    _fields_ = [("token_id", c_uint32), ("bias", c_float)]


class LogitsEvent(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("logits", c_void_p),
        ("vocab_size", c_size_t),
        ("prompt_tokens", POINTER(c_uint32)),
        ("num_prompt_tokens", c_size_t),
        ("token_ids", POINTER(c_uint32)),
        ("num_tokens", c_uint32),
        ("sample", c_uint32),
    ]


LogitsCallback = CFUNCTYPE(c_bool, POINTER(LogitsEvent), c_void_p)


class Request(Structure):
    #: The function that logits_callback calls.
    processor: Any = None
    _fields_ = [
        ("struct_size", c_size_t),
        ("prompt", c_char_p),
        ("prompt_len", c_size_t),
        ("prompt_tokens", POINTER(c_uint32)),
        ("num_prompt_tokens", c_size_t),
        ("messages_json", c_char_p),
        ("tools_json", c_char_p),
        ("template_variables_json", c_char_p),
        ("stop_strings", POINTER(c_char_p)),
        ("num_stop_strings", c_size_t),
        ("stop_token_ids", POINTER(c_uint32)),
        ("num_stop_token_ids", c_size_t),
        ("cancel", c_void_p),
        ("max_tokens", c_uint32),
        ("top_k", c_uint32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("seed", c_uint64),
        ("add_generation_prompt", c_uint8),
        ("add_special_tokens", c_uint8),
        ("parse_special_tokens", c_uint8),
        ("skip_special_tokens", c_uint8),
        ("ignore_eos", c_uint8),
        ("processed_log_probs", c_uint8),
        ("parse_special_in_messages", c_uint8),
        ("reserved", c_uint8 * 1),
        ("priority", c_int32),
        ("num_samples", c_uint32),
        ("time_limit_ms", c_uint64),
        ("cache_key", c_uint64),
        ("logit_bias", POINTER(LogitBias)),
        ("num_logit_bias", c_size_t),
        ("min_tokens", c_uint32),
        ("num_log_probs", c_uint32),
        ("typical_p", c_float),
        ("no_repeat_ngram_size", c_uint32),
        ("first_tokens", POINTER(c_uint32)),
        ("num_first_tokens", c_size_t),
        ("logits_callback", LogitsCallback),
        ("logits_user_data", c_void_p),
        ("num_prompt_log_probs", c_uint32),
        ("answer_format", c_uint32),
        ("constraint_kind", c_uint32),
        ("reserved2", c_uint32),
        ("constraint", c_char_p),
        ("constraint_len", c_size_t),
        ("choices", POINTER(c_char_p)),
        ("num_choices", c_size_t),
        ("tool_choice", c_uint32),
        ("reserved3", c_uint32),
        ("tool_choice_name", c_char_p),
    ]
