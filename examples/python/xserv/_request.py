"""The arguments of Model.generate(), and the C struct made from them."""

from __future__ import annotations

import difflib
import inspect
import json
import operator
from array import array
from collections.abc import Mapping as MappingType
from ctypes import Structure, byref, c_char, c_char_p, c_float, c_uint32, memmove, sizeof, string_at
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, Tuple, TypedDict, Union

from . import _library as c
from ._errors import invalid_argument
from ._library import library

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
        pretend to be another turn.
    add_generation_prompt: with messages: whether to open the assistant's turn. Default True.
    add_special_tokens: with a text: whether to add the special tokens that the tokenizer adds around a text
        (Qwen and GPT-2: none; Llama and Mistral: the one that begins a text, unless the text begins with it).
        Default True.
    parse_special_tokens: with a text: whether special tokens written in it, such as <|im_end|>, become their
        ids. Default True; False treats them as ordinary text: use it for text that you do not trust.

    How to choose tokens. What is left out comes from the model's generation_config.json or, if that has
    nothing, is the neutral value. The options mean what they mean in Transformers, and are applied in its
    order: logit_bias, repetition, presence and frequency penalty, no_repeat_ngram_size, temperature,
    top_k, top_p, min_p, typical_p.

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
        model (on a GPU up to rounding, unless the model was loaded with deterministic=True). Default: a fresh
        one, which Result.seed tells.
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
    processed_logprobs: with logprobs: whether they are those of the logits after logit_bias, min_tokens, penalties
        and temperature, instead of the model's own. (top_k, top_p and min_p never count.) Default False.

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
        the tools, and nothing it writes is taken for a call), "required" (exactly one call, of any of them) or {"type": "function", "function": {"name": ...}}
        (exactly one call of that tool). A required call is written as the model's chat template writes calls, with
        arguments that the tool's JSON schema allows, after a thought where the model may have one.
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


#: The largest `logprobs`.
MAX_LOGPROBS = 20

# Fields of xserv_request that are numbers, and those that are switches, by the same names.
_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "no_repeat_ngram_size",
    "seed",
    "priority",
    "time_limit_ms",
    "cache_key",
    "num_samples",
)
_SWITCHES = (
    "add_generation_prompt",
    "add_special_tokens",
    "parse_special_tokens",
    "parse_special_in_messages",
    "skip_special_tokens",
    "ignore_eos",
)


# At most one of these is given.
_FORMS = ("response_format", "regex", "grammar", "choice")


def build_request(prompt: Optional[str], options: Mapping[str, Any]) -> Tuple[c.Request, int]:
    """Fills an xserv_request, and tells how many bytes of it are text to be tokenized. ctypes keeps alive what its
    pointers point to."""
    _check_names(prompt, options)
    request = c.Request()
    library.xserv_request_init(byref(request), sizeof(request))
    text_bytes = 0
    if prompt is not None:
        data = prompt.encode()
        request.prompt, request.prompt_len = data, len(data)
        text_bytes += len(data)
    tokens = options.get("tokens")
    if tokens is not None:
        ids = token_array(tokens)
        # An empty array would be a NULL pointer: no prompt at all.
        request.prompt_tokens = ids if len(ids) else (c_uint32 * 1)()
        request.num_prompt_tokens = len(ids)
    for name, field in (
        ("messages", "messages_json"),
        ("tools", "tools_json"),
        ("variables", "template_variables_json"),
    ):
        if options.get(name) is not None:
            data = json_bytes(options[name], name)
            setattr(request, field, data)
            text_bytes += len(data)

    stop = options.get("stop") or ()
    stops = [_stop_bytes(text) for text in ([stop] if isinstance(stop, str) else stop)]
    request.stop_strings = (c_char_p * len(stops))(*stops)
    request.num_stop_strings = len(stops)
    stop_ids = token_array(options.get("stop_token_ids") or (), "stop_token_ids")
    request.stop_token_ids = stop_ids
    request.num_stop_token_ids = len(stop_ids)

    first = token_array(options.get("first_tokens") or (), "first_tokens")
    request.first_tokens = first
    request.num_first_tokens = len(first)

    for name in _NUMBERS:
        if options.get(name) is not None:
            set_number(request, name, options[name])
    for name in _SWITCHES:
        if options.get(name) is not None:
            setattr(request, name, bool(options[name]))

    answer_format = options.get("answer_format")
    if answer_format is None:
        answer_format = "auto" if options.get("messages") is not None else "none"
    request.answer_format = choice(c.ANSWER_FORMATS, answer_format, "answer_format")
    _set_constraint(request, options)
    _set_tool_choice(request, options)
    biases = _bias_array(options.get("logit_bias") or {})
    request.logit_bias = biases
    request.num_logit_bias = len(biases)
    if options.get("logprobs") is not None:
        request.num_log_probs = _num_logprobs(options["logprobs"], "logprobs")
        request.processed_log_probs = bool(options.get("processed_logprobs"))
    if options.get("prompt_logprobs") is not None:
        request.num_prompt_log_probs = _num_logprobs(options["prompt_logprobs"], "prompt_logprobs")
    processor: Optional[LogitsProcessor] = options.get("logits_processor")
    if processor is not None:
        if not callable(processor):
            raise TypeError(f"logits_processor is {processor!r}, but must be a function")
        request.processor = GuardedProcessor(processor)
        request.logits_callback = c.LogitsCallback(request.processor)
    return request, text_bytes


def refuse_processor(request: c.Request) -> None:
    """Refuses a logits_processor where the library has no thread to call it on."""
    if request.processor is not None:
        raise invalid_argument("logits_processor can be given to generate() without stream only")


class GuardedProcessor:
    """Calls a logits_processor for the library. `error` is what it raised."""

    def __init__(self, function: LogitsProcessor) -> None:
        self._function = function
        self.error: Optional[BaseException] = None

    def __call__(self, pointer: Any, user_data: Optional[int]) -> bool:
        if self.error is not None:
            return False
        try:
            event = pointer.contents
            # A copy: the function may keep it for longer than the library keeps its logits.
            logits = bytearray(string_at(event.logits, event.vocab_size * sizeof(c_float)))
            prompt = event.prompt_tokens[: event.num_prompt_tokens]
            generated = event.token_ids[: event.num_tokens] if event.num_tokens else []
            goes_on = self._function(prompt, generated, memoryview(logits).cast("f"))
            memmove(event.logits, (c_char * len(logits)).from_buffer(logits), len(logits))
            return goes_on is None or bool(goes_on)
        except BaseException as error:
            self.error = error
            return False


def _check_names(prompt: object, options: Mapping[str, Any]) -> None:
    """Refuses here what the library would refuse with the names of C's fields."""
    names = GenerateOptions.__annotations__
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            raise TypeError(f"generate() has no option {name}" + (f"; did you mean {close[0]}?" if close else ""))
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError(
            f"the prompt is a {type(prompt).__name__}, but must be a string; "
            "token ids are given as tokens=, a conversation as messages="
        )
    given = [name for name in ("tokens", "messages") if options.get(name) is not None]
    if prompt is not None:
        given.insert(0, "a prompt")
    if len(given) != 1:
        what = " and ".join(given) if given else "none of them"
        raise invalid_argument(f"exactly one of a prompt, tokens and messages must be given, not {what}")
    for name in ("tools", "variables", "tool_choice"):
        if options.get(name) is not None and options.get("messages") is None:
            raise invalid_argument(f"{name} can be given with messages only")
    forms = [name for name in _FORMS if options.get(name) is not None]
    if len(forms) > 1:
        raise invalid_argument(f"{' and '.join(forms)} cannot be given together")
    if options.get("processed_logprobs") and options.get("logprobs") is None:
        raise invalid_argument("processed_logprobs can be given with logprobs only")


def _set_constraint(request: c.Request, options: Mapping[str, Any]) -> None:
    """The form of the answer, of which at most one is given."""
    if options.get("response_format") is not None:
        kind, text = _response_format(options["response_format"])
    elif options.get("regex") is not None:
        kind, text = c.CONSTRAINT_REGEX, _form_text(options["regex"], "regex")
    elif options.get("grammar") is not None:
        kind, text = c.CONSTRAINT_GRAMMAR, _form_text(options["grammar"], "grammar")
    elif options.get("choice") is not None:
        texts = options["choice"]
        if isinstance(texts, (str, bytes)):
            raise TypeError(f"choice must be a sequence of strings, not a {type(texts).__name__}")
        data = [without_nul(_form_text(text, "each choice"), "a choice") for text in texts]
        # An empty array would be a NULL pointer.
        request.choices = (c_char_p * max(len(data), 1))(*data)
        request.num_choices = len(data)
        kind, text = c.CONSTRAINT_CHOICE, None
    else:
        return
    request.constraint_kind = kind
    if text is not None:
        request.constraint, request.constraint_len = text, len(text)


def _set_tool_choice(request: c.Request, options: Mapping[str, Any]) -> None:
    wanted = options.get("tool_choice")
    if wanted is None:
        return
    if isinstance(wanted, str):
        request.tool_choice = choice(c.TOOL_CHOICES, wanted, "tool_choice")
        return
    function = wanted.get("function") if isinstance(wanted, MappingType) else None
    name = function.get("name") if isinstance(function, MappingType) else None
    if not isinstance(name, str):
        raise TypeError(
            f"tool_choice is {wanted!r}; it can be {', '.join(c.TOOL_CHOICES)} or "
            '{"type": "function", "function": {"name": ...}}'
        )
    request.tool_choice = c.TOOL_CHOICE_NAMED
    request.tool_choice_name = without_nul(name.encode(), "the name of a tool")


def _form_text(text: object, what: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, not a {type(text).__name__}")
    return text.encode()


def _response_format(form: object) -> Tuple[int, Optional[bytes]]:
    if not isinstance(form, MappingType):
        raise TypeError(f"response_format is a {type(form).__name__}, but must be a mapping with a type")
    kind = form.get("type")
    if kind == "text":
        return c.CONSTRAINT_NONE, None
    if kind == "json_object":
        return c.CONSTRAINT_JSON_OBJECT, None
    if kind != "json_schema":
        raise invalid_argument(f"response_format's type is {kind!r}; it can be text, json_object or json_schema")
    wrapper = form.get("json_schema")
    if not isinstance(wrapper, MappingType) or wrapper.get("schema") is None:
        raise invalid_argument('response_format needs a schema: {"type": "json_schema", "json_schema": {"schema": ...}}')
    return c.CONSTRAINT_JSON_SCHEMA, json_bytes(wrapper["schema"], "the schema")


def _stop_bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"stop must be a string or a sequence of strings; {text!r} is not a string")
    return without_nul(text.encode(), "a stop string")


def without_nul(data: bytes, what: str) -> bytes:
    """Refuses what C would take for the end of a string."""
    if b"\0" in data:
        raise ValueError(f"{what} cannot contain a NUL character")
    return data


def json_bytes(value: Any, what: str) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    return without_nul(text.encode(), f"the JSON of {what}")


def token_array(tokens: Iterable[int], what: str = "tokens") -> Any:
    """The ids as a C array of uint32_t. Integers of NumPy are taken as well."""
    if isinstance(tokens, (str, bytes)):
        raise TypeError(f"{what} must be a sequence of integers, not a {type(tokens).__name__}")
    ids = array("I")
    for token in tokens:
        try:
            ids.append(token)
        except TypeError:
            raise TypeError(f"{what} must be integers; {token!r} is none") from None
        except OverflowError:
            raise ValueError(f"{token} is not a token id") from None
    return (c_uint32 * len(ids)).from_buffer(ids) if ids else (c_uint32 * 0)()


def _bias_array(biases: Mapping[int, float]) -> Any:
    if not isinstance(biases, MappingType):
        raise TypeError(f"logit_bias is a {type(biases).__name__}, but must be a mapping from token ids to numbers")
    ids = token_array(biases, "the token ids of logit_bias")
    values = (c.LogitBias * len(ids))()
    for place, token, bias in zip(values, ids, biases.values()):
        try:
            place.token_id, place.bias = token, float(bias)
        except (TypeError, ValueError):
            raise TypeError(f"logit_bias of token {token} is {bias!r}, but must be a number") from None
    return values


def _num_logprobs(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, but must be an integer") from None
    # Beyond them there is the number that stands for none.
    if not 0 <= number <= MAX_LOGPROBS:
        raise invalid_argument(f"{name} is {number}, but must be from 0 to {MAX_LOGPROBS}")
    return number


def choice(choices: Mapping[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise ValueError(f"{what} is {name!r}; it can be {', '.join(choices)}")
    return choices[name]


def set_number(struct: Structure, name: str, value: Union[int, float]) -> None:
    """Sets a field, and refuses values that it cannot hold; ctypes would drop the upper bits of an integer."""
    kind = {field[0]: field[1] for field in struct._fields_}[name]
    try:
        # Integers of NumPy are no ints, but have an index.
        number = float(value) if kind is c_float else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        wanted = "a number" if kind is c_float else "an integer"
        raise TypeError(f"{name} is {value!r}, but must be {wanted}") from None
    setattr(struct, name, number)
    if kind is not c_float and getattr(struct, name) != number:
        raise ValueError(f"{name} cannot be {number}")


def show_options(function: Any) -> None:
    """Has help() and editors show the GenerateOptions of a function, instead of **options."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, annotation in GenerateOptions.__annotations__.items():
        text = getattr(annotation, "__forward_arg__", annotation)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=text))
    function.__signature__ = signature.replace(parameters=parameters)
    own, options = function.__doc__, GenerateOptions.__doc__
    if own and options:  # python -OO leaves them out
        _, _, described = inspect.cleandoc(options).partition("\n\n")
        function.__doc__ = f"{inspect.cleandoc(own)}\n\n{described}\n"
