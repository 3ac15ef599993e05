"""/v1/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any, AsyncGenerator, Dict, List, Optional

import xserv
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from .auth import Caller
from .chat import FINISH_REASONS, usage_of
from .errors import ApiError, from_library, invalid
from .forms import form_of
from .logprobs import CompletionLogprobs
from .requests import CompletionRequest, check_model, read_body, work_out
from .responses import JsonResponse
from .sampling import sampling_options
from .sse import DONE, ChunkWriter, last_events, merged, quoted, start
from .state import Generation, State

#: The samples of all prompts of a request.
MAX_SAMPLES = 4096
#: OpenAI's.
DEFAULT_MAX_TOKENS = 16


@dataclass
class _Prompt:
    """A prompt: a text, or token ids; and what echo shows of it."""

    text: Optional[str]
    tokens: Optional[List[int]]
    shown: str = ""


async def completions(state: State, request: Request, caller: Caller) -> Response:
    """Continues prompts."""
    body, is_long = await read_body(request, CompletionRequest)
    check_model(body.model, state.settings.model_names)
    prompts = await work_out(is_long, _prompts_of, state, body)
    options = sampling_options(body, caller, state.settings.request_seconds)
    options["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    options["add_special_tokens"] = body.add_special_tokens
    options["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = body.logprobs
    name, form = form_of(body)
    options.update(form)  # type: ignore[typeddict-item]
    num_samples = len(prompts) * (body.n or 1)
    if num_samples > MAX_SAMPLES:
        raise invalid("prompt", f"{len(prompts)} prompts with n {body.n or 1} are more than {MAX_SAMPLES} samples")

    generation = Generation(state, request, num_samples)
    generation.form = name
    generation.entry.update(model=body.model, stream=bool(body.stream), n=body.n or 1, prompts=len(prompts))
    await generation.enter()
    answer = _Answer(state, body, prompts, generation)
    if body.stream:
        return await start(generation, answer.chunks(options))
    try:
        await answer.submit(options, stream=False)
        results = await generation.results()
        return JsonResponse(answer.whole(results))
    finally:
        generation.finish()


def _prompts_of(state: State, body: CompletionRequest) -> List[_Prompt]:
    given = body.prompt
    if isinstance(given, str):
        prompts = [_Prompt(given, None)]
    elif not given:
        raise invalid("prompt", "prompt is empty")
    elif isinstance(given[0], int):
        prompts = [_Prompt(None, given)]
    else:
        prompts = [_Prompt(each, None) if isinstance(each, str) else _Prompt(None, each) for each in given]
    vocab_size = state.model.info.vocab_size
    for index, prompt in enumerate(prompts):
        place = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if not prompt.text and not prompt.tokens:
            raise invalid(place, f"{place} is empty")
        if prompt.tokens and not 0 <= min(prompt.tokens) <= max(prompt.tokens) < vocab_size:
            token = next(token for token in prompt.tokens if not 0 <= token < vocab_size)
            raise invalid(place, f"{place} has the token {token}, but the vocabulary has {vocab_size}")
        if body.echo:
            prompt.shown = _shown(state, prompt)
            if prompt.tokens is None and body.logprobs is not None:
                prompt.tokens = _tokenize(state, body, prompt.text or "")
    return prompts


def _shown(state: State, prompt: _Prompt) -> str:
    return state.model.detokenize(prompt.tokens or ()) if prompt.text is None else prompt.text


def _tokenize(state: State, body: CompletionRequest, text: str) -> List[int]:
    try:
        return state.model.tokenize(text, add_special_tokens=body.add_special_tokens is not False)
    except Exception as error:
        raise from_library(error) from error


class _Answer:
    """The continuations of some prompts, whole or in chunks."""

    def __init__(
        self, state: State, body: CompletionRequest, prompts: List[_Prompt], generation: Generation
    ) -> None:
        self._state, self._body, self._prompts, self._generation = state, body, prompts, generation
        self._n = body.n or 1
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        generation.entry["id"] = self._id

    def _fields(self) -> Dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._state.name}

    async def submit(self, options: xserv.GenerateOptions, stream: bool) -> List[xserv.AsyncTextStream]:
        """Hands all prompts over, and lets other tasks have their turn between them."""
        found = []
        for index, prompt in enumerate(self._prompts):
            if index % 16 == 15:
                await asyncio.sleep(0)
            own: xserv.GenerateOptions = {**options}
            if prompt.tokens is not None:
                own["tokens"], own["add_special_tokens"] = prompt.tokens, None
            found.append(self._generation.submit(prompt.text if prompt.tokens is None else None, own, stream))
        return found

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._state.texts, self._body.logprobs or 0, 0)

    # Whole.

    def whole(self, results: List[xserv.Result]) -> Dict[str, Any]:
        choices = [
            self._choice(prompt, result, sample, number * self._n + index)
            for number, (prompt, result) in enumerate(zip(self._prompts, results))
            for index, sample in enumerate(result.samples)
        ]
        return {**self._fields(), "choices": choices, "usage": usage_of(self._state, results)}

    def _choice(self, prompt: _Prompt, result: xserv.Result, sample: xserv.Result, index: int) -> Dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            made = self._logprobs()
            if self._body.echo and result.prompt_logprobs is not None:
                tops: Any = result.prompt_top_logprobs
                for token, logprob, top in zip(result.prompt_token_ids or (), result.prompt_logprobs, tops):
                    made.add(token, logprob, top)
            for token, own, own_top in zip(sample.token_ids, sample.logprobs or (), sample.top_logprobs or ()):
                made.add(token, own, own_top)
            logprobs = made.take()
        return {
            "index": index,
            "text": prompt.shown + sample.text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS.get(sample.finish_reason, "stop"),
        }

    # In chunks.

    async def chunks(self, options: xserv.GenerateOptions) -> AsyncGenerator[bytes, None]:
        generation, body = self._generation, self._body
        has_begun, text = False, ""
        try:
            streams = await self.submit(options, stream=True)
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            writer = ChunkWriter(self._fields(), with_usage)
            writers = [self._writer_of(writer, number, prompt) for number, prompt in enumerate(self._prompts)]
            observe, clock, last = self._state.metrics.between_tokens.observe, time.perf_counter, 0.0
            batches: Any = merged([stream.batches() for stream in streams])  # type: ignore[misc]
            async for number, batch in batches:
                text += writers[number].write(batch)
                now = clock()
                if has_begun:
                    observe((now - last) / len(batch))
                last = now
                if text and not has_begun:
                    generation.saw_token()
                    has_begun = True
                # What comes with the end is sent with it.
                if text and any(stream.result is None for stream in streams):
                    yield text.encode()
                    text = ""
            results = [generation.result_of(stream) for stream in streams]
            data = text.encode()
            if with_usage:
                data += writer.usage(usage_of(self._state, results))
            generation.has_ended = True
            yield data + DONE
        except (xserv.Error, ApiError) as error:
            yield text.encode() + last_events(generation, error, has_begun)

    def _writer_of(self, writer: ChunkWriter, number: int, prompt: _Prompt) -> "_PromptWriter":
        made = None
        if self._body.logprobs is not None:
            made = [self._logprobs() for _ in range(self._n)]
        return _PromptWriter(writer, prompt, number * self._n, self._n, bool(self._body.echo), made)


class _PromptWriter:
    """Turns the events of a prompt's stream into chunks."""

    def __init__(
        self,
        writer: ChunkWriter,
        prompt: _Prompt,
        first_index: int,
        n: int,
        echo: bool,
        logprobs: Optional[List[CompletionLogprobs]],
    ) -> None:
        self._writer, self._prompt, self._first, self._n, self._echo = writer, prompt, first_index, n, echo
        self._logprobs = logprobs
        if echo and logprobs is not None and prompt.tokens:
            for each in logprobs:
                each.add(prompt.tokens[0], None, None)

    def write(self, batch: List[xserv.TokenEvent]) -> str:
        found = []
        logprobs = self._logprobs
        for event in batch:
            sample, token = event.sample, event.token_id
            if event.is_prompt:
                for each in logprobs or ():
                    each.add(token or 0, event.logprob, event.top_logprobs)
                continue
            if self._echo:
                # The prompt's own chunk, once for each sample, as soon as all of it is known.
                self._echo = False
                found += [self._chunk(index, self._prompt.shown, "null") for index in range(self._n)]
            if token is not None and logprobs is not None:
                logprobs[sample].add(token, event.logprob, event.top_logprobs)
            if event.finish_reason is not None:
                if event.finish_reason in FINISH_REASONS:
                    found.append(self._chunk(sample, event.text, f'"{FINISH_REASONS[event.finish_reason]}"'))
            elif event.text or (token is not None and logprobs is not None):
                found.append(self._chunk(sample, event.text, "null"))
        return "".join(found)

    def _chunk(self, sample: int, text: str, reason: str) -> str:
        logprobs = "null" if self._logprobs is None else to_json(self._logprobs[sample].take()).decode()
        rest = f'"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}'
        return self._writer.choice(self._first + sample, rest)
