"""The arguments of Model.generate(), and the C struct made from them."""

from __future__ import annotations

import json
from ctypes import Structure, byref, c_char_p, c_float, c_uint32, sizeof
from typing import Any, Mapping, Optional, Sequence, TypedDict, Union

from . import _library as c
from ._library import check, library

#: A list of {"role": ..., "content": ...}, or such a list as JSON.
Messages = Union[str, Sequence[Mapping[str, Any]]]
Tools = Union[str, Sequence[Mapping[str, Any]]]


class GenerateOptions(TypedDict, total=False):
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
    seed: Optional[int]
    stop: Union[None, str, Sequence[str]]
    stop_token_ids: Sequence[int]
    add_generation_prompt: bool
    add_special_tokens: bool
    parse_special_tokens: bool
    skip_special_tokens: bool
    ignore_eos: bool
    priority: int
    time_limit_ms: int
    cache_key: int
    num_samples: int


# Fields of xserv_request that are numbers, and those that are switches, by the same names.
_NUMBERS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
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
    "skip_special_tokens",
    "ignore_eos",
)


def build_request(prompt: Optional[str], **options: Any) -> c.Request:
    """Fills an xserv_request. ctypes keeps alive what its pointers point to."""
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise TypeError(f"generate() has no argument {', '.join(sorted(unknown))}")
    request = c.Request()
    library.xserv_request_init(byref(request), sizeof(request))
    if prompt is not None:
        data = prompt.encode()
        request.prompt, request.prompt_len = data, len(data)
    tokens = options.get("tokens")
    if tokens is not None:
        # An empty array would be a NULL pointer: no prompt at all.
        request.prompt_tokens = token_array(tokens) if len(tokens) else (c_uint32 * 1)()
        request.num_prompt_tokens = len(tokens)
    for name, field in (
        ("messages", "messages_json"),
        ("tools", "tools_json"),
        ("variables", "template_variables_json"),
    ):
        if options.get(name) is not None:
            setattr(request, field, json_bytes(options[name]))

    stop = options.get("stop") or ()
    stops = [text.encode() for text in ([stop] if isinstance(stop, str) else stop)]
    if any(b"\0" in text for text in stops):
        raise ValueError("a stop string cannot contain a NUL character")
    request.stop_strings = (c_char_p * len(stops))(*stops)
    request.num_stop_strings = len(stops)
    stop_ids = options.get("stop_token_ids", ())
    request.stop_token_ids = token_array(stop_ids)
    request.num_stop_token_ids = len(stop_ids)

    for name in _NUMBERS:
        if options.get(name) is not None:
            set_number(request, name, options[name])
    for name in _SWITCHES:
        if name in options:
            setattr(request, name, bool(options[name]))
    return request


def json_bytes(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode()


def token_array(tokens: Sequence[int]) -> Any:
    for token in tokens:  # ctypes would take 2**32 + 5 for 5
        if not 0 <= token < 2**32:
            raise ValueError(f"{token} is not a token id")
    return (c_uint32 * len(tokens))(*tokens)


def choice(choices: Mapping[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise ValueError(f"{what} is {name!r}; it can be {', '.join(choices)}")
    return choices[name]


def set_number(struct: Structure, name: str, value: Union[int, float]) -> None:
    """Sets a field, and refuses values that it cannot hold; ctypes would drop the upper bits of an integer."""
    setattr(struct, name, value)
    kind = {field[0]: field[1] for field in struct._fields_}[name]
    if kind is not c_float and getattr(struct, name) != value:
        raise ValueError(f"{name} cannot be {value}")
