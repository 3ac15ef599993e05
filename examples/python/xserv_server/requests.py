"""The bodies of requests: what they may have, and of which type."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Dict, FrozenSet, List, Literal, Mapping, Optional, Tuple, Type, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from .errors import ApiError, client_has_left, from_validation, invalid
from .limits import check_is_json, header_of

_Body = TypeVar("_Body", bound="Body")
_Result = TypeVar("_Result")

#: Bodies beyond this are read by another thread.
LONG_BODY_BYTES = 64 << 10

#: Fields that a client may send although they change nothing here: accounting, routing, storage, and what is always so.
HARMLESS: FrozenSet[str] = frozenset(
    (
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "return_token_ids", "add_generation_prompt_id", "prompt_cache_options",
    )
)  # fmt: skip

#: Fields that would change the answer and are not implemented, with the value that changes nothing.
NEUTRAL: Mapping[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True,
    "continue_final_message": False,
    "return_tokens_as_token_ids": False,
    "modalities": ["text"],
    "bad_words": [],
    "suffix": "",
    "n_best": 1,
}


class Part(BaseModel):
    """A part of a request. Numbers must be numbers, and strings strings."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Body(BaseModel):
    """A request. What it has beyond the fields is refused by name, unless it would change nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_unknown(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS or (name in NEUTRAL and NEUTRAL[name] == value):
                continue
            what = f"{name} can only be {NEUTRAL[name]!r} here" if name in NEUTRAL else f"there is no parameter {name}"
            raise invalid(name, what, "unsupported_parameter" if name in NEUTRAL else "unknown_parameter")


class StreamOptions(Part):
    include_usage: Optional[bool] = None
    include_obfuscation: Optional[bool] = None
    continuous_usage_stats: Optional[Literal[False]] = None


class StructuredOutputs(Part):
    """The form of an answer, by vLLM's names."""

    json_schema: Union[None, str, Dict[str, Any]] = Field(default=None, alias="json")
    json_object: Optional[bool] = None
    regex: Optional[str] = None
    choice: Optional[List[str]] = None
    grammar: Optional[str] = None


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: Optional[str] = None
    schema_: Union[None, Dict[str, Any], bool] = Field(default=None, alias="schema")


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Optional[JsonSchema] = None


class Sampling(Body):
    """The fields that chats and completions have in common."""

    model: str
    stream: Optional[bool] = None
    stream_options: Optional[StreamOptions] = None
    n: Optional[int] = Field(default=None, ge=1, le=128)
    best_of: Optional[int] = None
    max_tokens: Optional[int] = Field(default=None, ge=0)
    min_tokens: Optional[int] = Field(default=None, ge=0)
    temperature: Optional[float] = Field(default=None, ge=0, le=100)
    top_p: Optional[float] = Field(default=None, gt=0, le=1)
    top_k: Optional[int] = Field(default=None, ge=-1, lt=2**32 - 1)
    min_p: Optional[float] = Field(default=None, ge=0, le=1)
    typical_p: Optional[float] = Field(default=None, gt=0, le=1)
    presence_penalty: Optional[float] = Field(default=None, ge=-2, le=2)
    frequency_penalty: Optional[float] = Field(default=None, ge=-2, le=2)
    repetition_penalty: Optional[float] = Field(default=None, gt=0, le=1000)
    no_repeat_ngram_size: Optional[int] = Field(default=None, ge=0, lt=2**32 - 1)
    logit_bias: Optional[Dict[str, float]] = None
    seed: Optional[int] = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Union[None, str, List[str]] = None
    stop_token_ids: Optional[List[int]] = None
    ignore_eos: Optional[bool] = None
    cache_salt: Optional[str] = Field(default=None, min_length=1)
    response_format: Optional[ResponseFormat] = None
    structured_outputs: Optional[StructuredOutputs] = None
    guided_json: Union[None, str, Dict[str, Any]] = None
    guided_regex: Optional[str] = None
    guided_choice: Optional[List[str]] = None
    guided_grammar: Optional[str] = None


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: Optional[str] = None
    parameters: Optional[Dict[str, Any]] = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: Union[None, str, Dict[str, Any]] = None


class Call(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    id: Optional[str] = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message; what it has besides goes to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Union[None, str, List[TextPart]] = None
    tool_calls: Optional[List[Call]] = None
    tool_call_id: Optional[str] = None
    name: Optional[str] = None
    reasoning: Optional[str] = None
    reasoning_content: Optional[str] = None


class ChatRequest(Sampling):
    messages: List[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Optional[int] = Field(default=None, ge=0)
    logprobs: Optional[bool] = None
    top_logprobs: Optional[int] = Field(default=None, ge=0, le=20)
    tools: Optional[List[Tool]] = None
    tool_choice: Union[None, Literal["none", "auto", "required"], NamedTool] = None
    parallel_tool_calls: Optional[bool] = None
    chat_template_kwargs: Optional[Dict[str, Any]] = None
    reasoning_effort: Optional[Literal["none", "minimal", "low", "medium", "high", "xhigh"]] = None
    include_reasoning: Optional[bool] = None
    add_generation_prompt: Optional[bool] = None


class CompletionRequest(Sampling):
    prompt: Union[str, List[str], List[int], List[List[int]]]
    echo: Optional[bool] = None
    logprobs: Optional[int] = Field(default=None, ge=0, le=20)
    add_special_tokens: Optional[bool] = None


class TokenizeRequest(Body):
    model: Optional[str] = None
    prompt: Optional[str] = None
    messages: Optional[List[ChatMessage]] = Field(default=None, min_length=1)
    tools: Optional[List[Tool]] = None
    chat_template_kwargs: Optional[Dict[str, Any]] = None
    add_special_tokens: Optional[bool] = None
    add_generation_prompt: Optional[bool] = None
    return_token_strs: Optional[bool] = None


class DetokenizeRequest(Body):
    model: Optional[str] = None
    tokens: List[int]


async def _all_of(request: Request) -> bytes:
    receive, parts = request.receive, []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_has_left()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_body(request: Request, kind: Type[_Body]) -> Tuple[_Body, bool]:
    """Reads the body of a request and checks its types, and tells whether it is so long that another thread should
    look at it. Raises ApiError."""
    check_is_json(header_of(request.scope, b"content-type"))
    data = await _all_of(request)
    is_long = len(data) > LONG_BODY_BYTES
    try:
        body = await asyncio.to_thread(kind.model_validate_json, data) if is_long else kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from None
    body.refuse_unknown()
    return body, is_long


async def work_out(is_long: bool, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls a function that reads all of a body: here, or on another thread if that takes a while."""
    return await asyncio.to_thread(function, *arguments) if is_long else function(*arguments)


def check_model(name: Optional[str], names: Any) -> None:
    if name is not None and name not in names:
        shown = name if len(name) <= 100 else name[:97] + "..."
        raise ApiError(404, f"there is no model {shown!r} here", param="model", code="model_not_found")
