"""Makes the C struct of a request from the arguments of Model.generate()."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import operator
from array import array
from collections.abc import Mapping as MappingType
from ctypes import (
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_uint8,
    c_uint32,
    c_uint64,
    memmove,
    sizeof,
)
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple, Type, Union

from . import _library as c
from ._errors import invalid_argument
from ._library import defaults, library
from ._options import GenerateOptions, LogitBias, LogitsCallback, LogitsProcessor, Request

#: The largest `logprobs`.
MAX_LOGPROBS = 20

# Options that xserv_request has as numbers (or switches, of a byte) by the same names; the words for a choice have to be
# looked up.
_NUMBERS = {
    name: kind
    for name, kind, *_ in Request._fields_
    if name in GenerateOptions.__annotations__
    and name not in ("answer_format", "tool_choice")
    and kind in (c_uint8, c_int32, c_uint32, c_uint64, c_float)
}

_DEFAULTS = defaults(Request, library.xserv_request_init)

# Options that are written as JSON, with the fields that take it.
_TEXTS = (
    ("messages", "messages_json"),
    ("tools", "tools_json"),
    ("variables", "template_variables_json"),
)

# At most one of these is given.
_FORMS = ("response_format", "regex", "grammar", "choice")


def build_request(prompt: Optional[str], options: Mapping[str, Any]) -> Tuple[Request, int]:
    """Fills an xserv_request, and tells how many bytes of it are text to be tokenized. ctypes keeps alive what its
    pointers point to."""
    _check_names(prompt, options)
    request: Request = Request.from_buffer_copy(_DEFAULTS)
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
    for name, field in _TEXTS:
        if options.get(name) is not None:
            data = json_bytes(options[name], name)
            setattr(request, field, data)
            text_bytes += len(data)

    stop = options.get("stop")
    if stop:
        stops = [_stop_bytes(text) for text in ([stop] if isinstance(stop, str) else stop)]
        request.stop_strings = (c_char_p * len(stops))(*stops)
        request.num_stop_strings = len(stops)
    for name in ("stop_token_ids", "first_tokens"):
        if options.get(name):
            ids = token_array(options[name], name)
            setattr(request, name, ids)
            setattr(request, "num_" + name, len(ids))

    for name, value in options.items():
        kind = _NUMBERS.get(name)
        if kind is not None and value is not None:
            set_number(request, name, bool(value) if kind is c_uint8 else value)

    answer_format = options.get("answer_format")
    if answer_format is None:
        answer_format = "auto" if options.get("messages") is not None else "none"
    request.answer_format = choice(c.ANSWER_FORMATS, answer_format, "answer_format")
    _set_constraint(request, options)
    _set_tool_choice(request, options)
    if options.get("logit_bias"):
        biases = _bias_array(options["logit_bias"])
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
        request.logits_callback = LogitsCallback(request.processor)
    return request, text_bytes


def refuse_processor(request: Request) -> None:
    """Refuses a logits_processor where the library has no thread to call it on."""
    if request.processor is not None:
        raise invalid_argument("logits_processor can be given to generate() without stream only")


class GuardedProcessor:
    """Calls a logits_processor for the library. `error` is what it raised."""

    def __init__(self, function: LogitsProcessor) -> None:
        self._function = function
        self._buffer = bytearray()
        self.error: Optional[BaseException] = None

    def __call__(self, pointer: Any, user_data: Optional[int]) -> bool:
        if self.error is not None:
            return False
        try:
            event = pointer.contents
            length = event.vocab_size * sizeof(c_float)
            # A copy: the function may keep it for longer than the library keeps its logits.
            logits = self._buffer if len(self._buffer) == length else bytearray(length)
            place = (c_char * length).from_buffer(logits)
            memmove(place, event.logits, length)
            prompt = event.prompt_tokens[: event.num_prompt_tokens]
            generated = event.token_ids[: event.num_tokens] if event.num_tokens else []
            goes_on = self._function(prompt, generated, memoryview(logits).cast("f"))
            memmove(event.logits, place, length)
            del place
            try:
                # Memory that is in use does not change its length.
                logits.append(0)
                logits.pop()
                self._buffer = logits
            except BufferError:
                self._buffer = bytearray()  # the function has kept it
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


def _set_constraint(request: Request, options: Mapping[str, Any]) -> None:
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


def _set_tool_choice(request: Request, options: Mapping[str, Any]) -> None:
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
    values = (LogitBias * len(ids))()
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


@functools.lru_cache(maxsize=None)
def _kinds_of(struct: Type[Structure]) -> Dict[str, Any]:
    return {field[0]: field[1] for field in struct._fields_}


def set_number(struct: Structure, name: str, value: Union[int, float]) -> None:
    """Sets a field, and refuses values that it cannot hold; ctypes would drop the upper bits of an integer."""
    kind = _kinds_of(type(struct))[name]
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
