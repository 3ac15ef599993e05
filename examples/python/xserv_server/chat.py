"""/v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, AsyncGenerator, AsyncIterator, Dict, List, Optional, Sequence, Tuple, Union

import xserv
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from .auth import Caller
from .errors import ApiError, invalid
from .forms import form_of
from .logprobs import chat_entry
from .requests import ChatMessage, ChatRequest, NamedTool, Tool, check_model, read_body, work_out
from .responses import JsonResponse
from .sampling import sampling_options
from .sse import DONE, ChunkWriter, last_events, quoted, start
from .state import Generation, State

FINISH_REASONS = {
    "stop_token": "stop",
    "stop_string": "stop",
    "complete": "stop",
    "max_tokens": "length",
    "context_full": "length",
}

#: Names that chat_template_kwargs cannot have.
_NO_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents")


#: The fields of most messages.
_PLAIN = {"role", "content"}

#: Roles that chat templates know by another name.
_ROLES = {"developer": "system"}


async def chat_completions(state: State, request: Request, caller: Caller) -> Response:
    """Answers a conversation."""
    body, is_long = await read_body(request, ChatRequest)
    check_model(body.model, state.settings.model_names)
    generation = Generation(state, request, body.n or 1)
    generation.form, options = await work_out(is_long, chat_options, state, body, caller)
    generation.entry.update(model=body.model, stream=bool(body.stream), n=body.n or 1)
    await generation.enter()
    answer = _Answer(state, body, generation)
    if body.stream:
        return await start(generation, answer.chunks(options))
    try:
        generation.submit(None, options, stream=False)
        (result,) = await generation.results()
        return JsonResponse(answer.whole(result))
    finally:
        generation.finish()


def chat_options(
    state: State, body: ChatRequest, caller: Caller
) -> Tuple[Optional[str], xserv.GenerateOptions]:
    """The field that asks for the form of the answer, and the options of the library. Raises ApiError."""
    options = sampling_options(body, caller, state.settings.request_seconds)
    options["messages"] = template_messages(body.messages)
    options["variables"] = variables_of(body.chat_template_kwargs, body.reasoning_effort)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; the first is the older name")
        options["max_tokens"] = body.max_completion_tokens
    else:
        options["max_tokens"] = body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs can be given with logprobs only")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0

    name, form = form_of(body)
    tools = _tools(body)
    can_call = bool(tools) and body.tool_choice != "none"
    if tools:
        options["tools"] = template_tools(tools)
        options["tool_choice"] = _tool_choice(body)
    options["answer_format"] = "auto"
    if form and can_call:
        raise invalid(name, f"{name} cannot be given with tools that may be called; tool_choice none forbids the calls")
    options.update(form)  # type: ignore[typeddict-item]
    # The schemas of tools that must be called are the form of the answer.
    return name if form or not can_call else "tools", options


def template_messages(messages: Sequence[ChatMessage]) -> List[Dict[str, Any]]:
    """The messages as chat templates take them."""
    found = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, str) and message.model_fields_set == _PLAIN:
            found.append({"role": _ROLES.get(message.role, message.role), "content": content})
            continue
        fields = message.model_dump(exclude_none=True)
        fields.setdefault("content", "")
        fields["role"] = _ROLES.get(message.role, message.role)
        if message.reasoning is not None:
            fields.setdefault("reasoning_content", message.reasoning)
        for number, call in enumerate(fields.get("tool_calls", ())):
            place = f"messages[{index}].tool_calls[{number}].function.arguments"
            call["function"]["arguments"] = _arguments(call["function"].get("arguments"), place)
        found.append(fields)
    return found


def _arguments(arguments: Any, place: str) -> Any:
    """The arguments of a call as an object: requests have them as a text, templates write them as JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise invalid(place, f"{place} is no JSON") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid(place, f"{place} must be a JSON object")
    return arguments or {}


def template_tools(tools: Sequence[Tool]) -> List[Dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def variables_of(given: Optional[Dict[str, Any]], reasoning_effort: Optional[str] = None) -> Optional[Dict[str, Any]]:
    variables = dict(given or {})
    for name in _NO_VARIABLES:
        if name in variables:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot have {name}")
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables or None


def _tools(body: ChatRequest) -> List[Tool]:
    tools = body.tools or []
    if not tools and body.tool_choice not in (None, "none"):
        raise invalid("tool_choice", "tool_choice can be given with tools only")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "two of the tools have the same name")
    return tools


def _tool_choice(body: ChatRequest) -> Union[None, str, Dict[str, Any]]:
    choice = body.tool_choice
    return choice.model_dump(include={"type", "function"}) if isinstance(choice, NamedTool) else choice


def usage_of(state: State, results: Sequence[xserv.Result]) -> Dict[str, Any]:
    """The tokens of some prompts and of all their samples."""
    prompt = sum(result.num_prompt_tokens for result in results)
    samples = [sample for result in results for sample in result.samples]
    generated = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": sum(state.count_reasoning(sample) for sample in samples)},
    }


class _Answer:
    """The answer to a chat, whole or in chunks."""

    def __init__(self, state: State, body: ChatRequest, generation: Generation) -> None:
        self._state, self._body, self._generation = state, body, generation
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        generation.entry["id"] = self._id
        self._one_call = body.parallel_tool_calls is False
        self._with_reasoning = body.include_reasoning is not False

    def _fields(self, kind: str) -> Dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._state.name}

    def _finish_reason(self, reason: str, has_calls: bool) -> str:
        found = FINISH_REASONS.get(reason, "stop")
        is_named = isinstance(self._body.tool_choice, NamedTool)
        return "tool_calls" if found == "stop" and has_calls and not is_named else found

    # Whole.

    def whole(self, result: xserv.Result) -> Dict[str, Any]:
        choices = [self._choice(index, sample) for index, sample in enumerate(result.samples)]
        return {**self._fields("chat.completion"), "choices": choices, "usage": usage_of(self._state, [result])}

    def _choice(self, index: int, sample: xserv.Result) -> Dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in sample.tool_calls[: 1 if self._one_call else None]
        ]
        message: Dict[str, Any] = {
            "role": "assistant",
            "content": sample.content if sample.content or not calls else None,
            "refusal": None,
        }
        if sample.reasoning is not None and self._with_reasoning:
            message["reasoning_content"] = message["reasoning"] = sample.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if sample.logprobs is not None:
            tops: Sequence[Any] = sample.top_logprobs or ()
            rows = zip(sample.token_ids, sample.logprobs, tops)
            logprobs = {"content": [chat_entry(self._state.texts, *row) for row in rows], "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(sample.finish_reason, bool(calls)),
        }

    # In chunks.

    async def chunks(self, options: xserv.GenerateOptions) -> AsyncGenerator[bytes, None]:
        generation, body = self._generation, self._body
        has_begun, text = False, ""
        try:
            has_logprobs = bool(body.logprobs)
            stream = generation.submit(None, options, stream=True if has_logprobs else "answers")
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            writer = ChunkWriter(self._fields("chat.completion.chunk"), with_usage)
            deltas = _Deltas(self, writer, body.n or 1)
            observe, clock, last = self._state.metrics.between_tokens.observe, time.perf_counter, 0.0
            batches: AsyncIterator[List[Any]] = stream.batches(answers=True, tokens=has_logprobs)
            async for batch in batches:
                text = deltas.write(batch)
                now = clock()
                if has_begun:
                    observe((now - last) / len(batch))
                else:
                    generation.saw_token()
                    text = deltas.roles() + text
                    has_begun = True
                last = now
                # What comes with the end is sent with it.
                if text and stream.result is None:
                    yield text.encode()
                    text = ""
            result = generation.result_of(stream)
            data = text.encode()
            if with_usage:
                data += writer.usage(usage_of(self._state, [result]))
            generation.has_ended = True
            yield data + DONE
        except (xserv.Error, ApiError) as error:
            yield text.encode() + last_events(generation, error, has_begun)


class _Deltas:
    """Turns the events of a stream into chunks."""

    def __init__(self, answer: _Answer, writer: ChunkWriter, n: int) -> None:
        self._answer, self._writer, self._n = answer, writer, n
        self._texts = answer._state.texts
        self._has_logprobs = bool(answer._body.logprobs)
        self._pending: List[List[Dict[str, Any]]] = [[] for _ in range(n)]
        self._has_calls = [False] * n

    def roles(self) -> str:
        rest = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join(self._writer.choice(index, rest) for index in range(self._n))

    def write(self, batch: List[Any]) -> str:
        found = []
        for event in batch:
            if isinstance(event, xserv.AnswerEvent):
                is_content = event.kind == "content"
                delta = f'{{"content":{quoted(event.text)}}}' if is_content else self._delta(event)
                if delta is not None:
                    found.append(self._chunk(event.sample, delta))
            elif event.finish_reason is not None:
                reason = self._answer._finish_reason(event.finish_reason, self._has_calls[event.sample])
                # A sample that was cut off by the server has an error after it, and no end of its own.
                if event.finish_reason in FINISH_REASONS:
                    found.append(self._chunk(event.sample, "{}", f'"{reason}"'))
            elif event.token_id is not None and self._has_logprobs:
                entry = chat_entry(self._texts, event.token_id, event.logprob, event.top_logprobs)
                self._pending[event.sample].append(entry)
        return "".join(found)

    def _chunk(self, sample: int, delta: str, reason: str = "null") -> str:
        logprobs = "null"
        if self._has_logprobs and self._pending[sample]:
            logprobs = to_json({"content": self._pending[sample], "refusal": None}).decode()
            self._pending[sample] = []
        return self._writer.choice(sample, f'"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}')

    def _delta(self, event: xserv.AnswerEvent) -> Optional[str]:
        """The delta of what is no content."""
        kind = event.kind
        if kind == "reasoning":
            text = quoted(event.text)
            return f'{{"reasoning_content":{text},"reasoning":{text}}}' if self._answer._with_reasoning else None
        if kind == "tool_call_end" or (event.index and self._answer._one_call):
            return None
        self._has_calls[event.sample] = True
        if kind == "tool_call_begin":
            name, made_id = quoted(event.name or ""), quoted(event.id or "")
            function = f'"id":{made_id},"type":"function","function":{{"name":{name},"arguments":""}}'
        else:
            function = f'"function":{{"arguments":{quoted(event.text)}}}'
        return f'{{"tool_calls":[{{"index":{event.index},{function}}}]}}'
