"""The state that the parts of an application share, and a request on its way through the library."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Callable, Dict, List, Literal, Optional, Set, Union

import xserv
from starlette.requests import Request

from .auth import Keys
from .errors import ApiError, client_has_left, from_library, shutting_down, timed_out
from .limits import Admission
from .logprobs import TokenTexts
from .metrics import Metrics
from .settings import Settings


#: In the scope of a request, where the server has it: Connection.when_left().
WHEN_LEFT = "xserv.when_left"


class State:
    """A model and what is counted, limited and known about its requests."""

    def __init__(self, model: xserv.Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.keys = Keys(settings.api_keys)
        self.admission = Admission(settings.max_running, settings.max_queued)
        self.metrics = Metrics(model, self.admission)
        self.texts = TokenTexts(model)
        self.created = int(time.time())
        self.live: Set[Generation] = set()
        end = model.tokenize("</think>", add_special_tokens=False) if model.info.has_tokenizer else []
        self._end_of_thought = end[0] if len(end) == 1 else None

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.settings.model_names[0]

    def count_reasoning(self, result: xserv.Result) -> int:
        """The number of tokens of a sample's thought, its end included."""
        if not result.reasoning:
            return 0
        if self._end_of_thought in result.token_ids:
            return result.token_ids.index(self._end_of_thought) + 1
        if not result.content and not result.tool_calls:
            return len(result.token_ids)
        return len(self.model.tokenize(result.reasoning, add_special_tokens=False, parse_special_tokens=False))

    def refuse_new(self) -> None:
        """From now on requests are refused; those that run go on."""
        self.admission.close()

    def end_all(self) -> None:
        """Ends the requests that still run: each gets an error."""
        for generation in list(self.live):
            generation.stop("shutting_down")


class Generation:
    """A request from its admission to its end: its streams, its client, its figures.

    finish() must be called, whatever happens after enter().
    """

    def __init__(self, state: State, request: Request, num_samples: int) -> None:
        self._state, self._request = state, request
        self._weight = min(num_samples, state.settings.max_running)
        self._admitted = False
        self._entering: "Optional[asyncio.Future[None]]" = None
        self._end_watch: Optional[Callable[[], Any]] = None
        self.streams: List[xserv.AsyncTextStream] = []
        self.entry: Dict[str, Any] = request.scope.get("xserv.log", {})
        #: The field of the request that asks for the form of its answer.
        self.form: Optional[str] = None
        self.began = time.perf_counter()
        self.first_token: Optional[float] = None
        #: Why it was stopped, "disconnected" or "shutting_down"; None if it was not.
        self.stopped: Optional[str] = None
        #: Whether a stream of it has come to its end, which what it gives next is part of.
        self.has_ended = False

    async def enter(self) -> None:
        """Waits for its turn, as long as the client does."""
        state = self._state
        self._watch()
        try:
            if not state.admission.enter_now(self._weight):
                await self._wait_for_its_turn()
        except BaseException:
            self._watch_no_more()
            raise
        self._admitted = True
        state.live.add(self)
        state.metrics.waiting.observe(time.perf_counter() - self.began)

    async def _wait_for_its_turn(self) -> None:
        state, seconds = self._state, self._state.settings.request_seconds
        self._entering = asyncio.ensure_future(state.admission.enter(self._weight))
        try:
            await asyncio.wait((self._entering,), timeout=seconds or None)
            if not self._entering.done():
                raise timed_out(seconds)
            if self._entering.cancelled():
                raise self.error()
            self._entering.result()
        except BaseException:
            entering = self._entering
            if not entering.cancel() and not entering.cancelled() and entering.exception() is None:
                state.admission.leave(self._weight)
            raise

    def submit(
        self, prompt: Optional[str], options: xserv.GenerateOptions, stream: Union[bool, Literal["answers"]]
    ) -> xserv.AsyncTextStream:
        """Hands a prompt to the library. Raises ApiError for what it refuses at once."""
        try:
            submitted = self._state.model.generate_async(prompt, stream=stream, **options)
        except Exception as error:
            raise self.failure(error) from error
        self.streams.append(submitted)
        if self.stopped is not None:
            submitted.close()
        return submitted

    async def results(self) -> List[xserv.Result]:
        """Waits for the results of all that was submitted. Raises ApiError."""
        found = []
        for stream in self.streams:
            try:
                async for _ in stream:
                    pass
            except xserv.Error as error:
                raise self.failure(error) from error
            found.append(self.result_of(stream))
        return found

    def result_of(self, stream: xserv.AsyncTextStream) -> xserv.Result:
        """The result of a stream that has ended. Raises ApiError if it did not come to its own end."""
        result = stream.result
        if result is None or self.stopped is not None:
            raise self.error()
        reasons = {sample.finish_reason for sample in result.samples}
        if "cancelled" in reasons:
            raise shutting_down()
        if "deadline" in reasons:
            raise timed_out(self._state.settings.request_seconds)
        return result

    def failure(self, error: BaseException) -> ApiError:
        """Translates an exception for the client."""
        return error if isinstance(error, ApiError) else from_library(error, self.form)

    def error(self) -> ApiError:
        """Why it was stopped."""
        if self.stopped == "disconnected":
            return client_has_left()
        return shutting_down()

    def stop(self, reason: str) -> None:
        """Ends it, from whatever state it is in: the library computes no further step of it."""
        if self.stopped is None:
            self.stopped = reason
        if self._entering is not None:
            self._entering.cancel()
        for stream in self.streams:
            stream.close()

    def _watch(self) -> None:
        """Stops it if its client leaves."""
        scope = self._request.scope
        when_left = scope.get(WHEN_LEFT)
        if when_left is not None:
            self._end_watch = when_left(scope, self._client_has_left)
        if self._end_watch is None:
            self._end_watch = asyncio.ensure_future(self._receive_the_end()).cancel

    def _watch_no_more(self) -> None:
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    async def _receive_the_end(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._client_has_left()

    def _client_has_left(self) -> None:
        self.stop("disconnected")

    def saw_token(self) -> None:
        """Called with the first events of a stream."""
        if self.first_token is None:
            self.first_token = time.perf_counter() - self.began

    def finish(self) -> None:
        """Gives back its place, and counts what it has done."""
        if not self._admitted:
            return
        self._admitted = False
        state = self._state
        self._watch_no_more()
        for stream in self.streams:
            stream.close()
        state.live.discard(self)
        state.admission.leave(self._weight)
        self._count(time.perf_counter() - self.began)

    def _count(self, seconds: float) -> None:
        metrics, entry = self._state.metrics, self.entry
        results = [stream.result for stream in self.streams if stream.result is not None]
        samples = [sample for result in results for sample in result.samples]
        prompt_tokens = sum(result.num_prompt_tokens for result in results)
        cached_tokens = sum(result.num_cached_tokens for result in results)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        metrics.prompt_tokens.add(prompt_tokens)
        metrics.cached_tokens.add(cached_tokens)
        metrics.generated_tokens.add(num_tokens)
        metrics.whole.observe(seconds)
        was_streaming = self.first_token is not None
        for sample in samples:
            metrics.ended.add(1, (sample.finish_reason,))
            metrics.answer_tokens.observe(len(sample.token_ids))
            if not was_streaming and sample.tokens_per_second > 0:
                metrics.between_tokens.observe(1 / sample.tokens_per_second)
        if not was_streaming and results and results[0].time_to_first_token_seconds > 0:
            self.first_token = results[0].time_to_first_token_seconds
        if self.first_token is not None:
            metrics.first_token.observe(self.first_token)
            entry["first_token_seconds"] = round(self.first_token, 6)
        if self.stopped == "disconnected":
            metrics.disconnected.add(1)
        entry.update(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=num_tokens,
            finish_reasons=[sample.finish_reason for sample in samples],
        )
        if self.stopped is not None:
            entry["stopped"] = self.stopped
