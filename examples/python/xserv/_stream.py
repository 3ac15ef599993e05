"""Runs a generation in a thread of its own, so that its text can be iterated and Ctrl-C works."""

from __future__ import annotations

import json
import math
import queue
import struct
import threading
from ctypes import byref, c_void_p, sizeof, string_at
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Literal, NamedTuple, Optional, Tuple, Union, overload

from . import _library as c
from . import _process
from ._errors import NotCopyable, forked
from ._library import check, defaults, library
from ._options import Request


class TokenLogProb(NamedTuple):
    """The log-probability of a token: the natural logarithm of its probability, at most 0; minus infinity for a
    token that is banned."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer.

    id: made up by the library, for the message with the tool's result (tool_call_id).
    name: the name of the tool, which the model may have invented.
    arguments_json: the arguments as JSON text; `arguments` reads it. Check them before you act on them.
    is_complete: whether the model has written the call to its end. If not, do not act on it.
    """

    id: str
    name: str
    arguments_json: str
    is_complete: bool = True

    @property
    def arguments(self) -> Any:
        """The arguments, nearly always a dict. ValueError if the call is not complete and they are no JSON."""
        return json.loads(self.arguments_json)


@dataclass(frozen=True)
class Answer:
    """A text taken apart, by Model.parse_response() or parse_response(); see Result for the fields."""

    reasoning: Optional[str]
    content: str
    tool_calls: List[ToolCall]
    message: Dict[str, Any]


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a generation, or of one sample of it: a copy, which stays valid when the model is closed.
    str(result) is its text.

    text: the generated text; empty if the model has no tokenizer.
    token_ids: the generated token ids, a stop token included.
    num_prompt_tokens: the number of tokens of the prompt.
    num_cached_tokens: the number of prompt tokens whose keys and values were in the prefix cache, and cost nothing.
    finish_reason: why the generation ended: "stop_token" (the model's end token, or one of stop_token_ids),
        "stop_string" (one of stop), "max_tokens", "context_full" (the longest context is reached), "deadline"
        (time_limit_ms), "cancelled" (the stream or the model was closed), "complete" (the text is all that
        response_format, regex, grammar or choice asks for, and nothing can follow).
    seed: the seed that was used, with which the request can be repeated.
    time_to_first_token_seconds: from the request to its first token, waiting for other requests included; 0 if
        there was none.
    total_seconds: from the request to its end.
    prompt_tokens_per_second: prompt tokens computed per second; 0 if none was computed.
    tokens_per_second: tokens generated per second after the first one; 0 with fewer than two.
    samples: all samples of the request (num_samples), of which this is the first; empty in the samples themselves.
    logprobs: the log-probability of each of token_ids; None if the request did not ask for them (logprobs).
    top_logprobs: for each of token_ids the most likely tokens in its place, the likeliest first, as many as logprobs
        asked for; the token itself may or may not be among them. None if logprobs was not given.
    prompt_token_ids: the ids of the prompt; None if the request did not ask for prompt_logprobs.
    prompt_logprobs: the log-probability of each of prompt_token_ids after those before it: None for the first, and for
        all that were not computed when the request was stopped. None if prompt_logprobs was not given.
    prompt_top_logprobs: for each of prompt_token_ids the most likely tokens in its place; None where prompt_logprobs is.
    reasoning: what the model thought, without the tags around it; None if it did not, or answer_format is "none".
    content: what it says: the text without thoughts and calls. The whole text if answer_format is "none".
    tool_calls: the tools that it calls, in order.
    message: the answer as a message, to be appended to the messages of the next request; None if answer_format is
        "none". It has the calls as chat templates take them, with arguments that are objects.
    """

    text: str
    token_ids: List[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reason: str
    seed: int
    time_to_first_token_seconds: float
    total_seconds: float
    prompt_tokens_per_second: float
    tokens_per_second: float
    samples: "List[Result]" = field(default_factory=list, compare=False)
    logprobs: Optional[List[float]] = None
    top_logprobs: Optional[List[List[TokenLogProb]]] = None
    prompt_token_ids: Optional[List[int]] = None
    prompt_logprobs: Optional[List[Optional[float]]] = None
    prompt_top_logprobs: Optional[List[Optional[List[TokenLogProb]]]] = None
    reasoning: Optional[str] = None
    content: str = ""
    tool_calls: List[ToolCall] = field(default_factory=list)
    message: Optional[Dict[str, Any]] = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        samples = f", {len(self.samples)} samples" if len(self.samples) > 1 else ""
        return (
            f"<xserv.Result {text!r}: {len(self.token_ids)} tokens after {self.num_prompt_tokens}, "
            f"{self.finish_reason}, {self.tokens_per_second:.1f} tokens/s{samples}>"
        )


class Piece(str):
    """A piece of text: a string of whole characters, never empty. `sample` is the index of the sample of the
    request that it continues, from 0; always 0 without num_samples."""

    sample: int

    def __new__(cls, text: str, sample: int) -> "Piece":
        piece = super().__new__(cls, text)
        piece.sample = sample
        return piece

    def __getnewargs__(self) -> Tuple[str, int]:  # type: ignore[override]  # copy and pickle call __new__ with them
        return (str(self), self.sample)


@dataclass(frozen=True)
class TokenEvent:
    """A step of a generation: a token, text that was held back until the end, or the end of a sample; or a token of
    the prompt (prompt_logprobs).

    token_id: the token that was generated, or that of the prompt; None if the event is none of a token.
    text: the text that became final with it: whole characters, and often none, because a character may span
        tokens and what may be the beginning of a stop string is held back.
    logprob: the log-probability of the token; None if the request did not ask for it (logprobs), or without a token.
    top_logprobs: the most likely tokens in the place of this one, the likeliest first; None where logprob is.
    sample: the index of the sample of the request, from 0; always 0 without num_samples.
    finish_reason: why the sample has ended, as in Result; only the last event of a sample has one, and nothing else.
    is_prompt: whether the token is one of the prompt: they come first, from the second one on, without text, and only
        if the request asks for them (prompt_logprobs).
    """

    token_id: Optional[int]
    text: str
    logprob: Optional[float] = None
    top_logprobs: Optional[List[TokenLogProb]] = None
    sample: int = 0
    finish_reason: Optional[str] = None
    is_prompt: bool = False


@dataclass(frozen=True)
class AnswerEvent:
    """A part of an answer that became certain, from events(answers=True). It repeats the text of TokenEvents: show
    the one or the other.

    kind: "reasoning" and "content" have more text of a thought or of what is said; "tool_call_begin" has the id and
        the name of a call, "tool_call_arguments" more of the JSON text of its arguments, "tool_call_end" whether the
        model has written it to its end.
    text: the piece of text; empty when a call begins or ends.
    sample: the index of the sample of the request, from 0; always 0 without num_samples.
    index: the number of the call in the sample, from 0; None without a call.
    id, name: of the call that begins.
    is_complete: of the call that ends.
    """

    kind: Literal["reasoning", "content", "tool_call_begin", "tool_call_arguments", "tool_call_end"]
    text: str
    sample: int = 0
    index: Optional[int] = None
    id: Optional[str] = None
    name: Optional[str] = None
    is_complete: Optional[bool] = None


StreamEvent = Union[TokenEvent, AnswerEvent]


def answer_event_from(event: Any, number: int) -> AnswerEvent:
    kind: Any = c.ANSWER_EVENTS[number]
    length = event.text_len
    made = AnswerEvent.__new__(AnswerEvent)
    # Does the work of __init__() of a frozen dataclass in a third of its time: there is one for nearly every token.
    fields = made.__dict__
    fields["kind"] = kind
    fields["text"] = string_at(event.text, length).decode() if length else ""
    fields["sample"] = event.sample
    if number in c.CALL_EVENTS:
        fields["index"] = event.tool_call_index
        fields["id"] = event.tool_call_id.decode() if event.tool_call_id is not None else None
        fields["name"] = event.tool_name.decode() if event.tool_name is not None else None
        fields["is_complete"] = bool(event.tool_call_is_complete) if kind == "tool_call_end" else None
    else:
        fields["index"] = fields["id"] = fields["name"] = fields["is_complete"] = None
    return made


def stream_event_from(event: Any, wants_logprobs: bool) -> StreamEvent:
    """Copies an event of the library's, which is not EVENT_NONE or EVENT_DONE."""
    number = event.kind
    return answer_event_from(event, number) if number in c.ANSWER_EVENTS else event_from(event, wants_logprobs)


def event_from(event: Any, wants_logprobs: bool) -> TokenEvent:
    """Copies an event of the library's that is none of an answer, EVENT_NONE or EVENT_DONE."""
    logprob, top = None, None
    is_prompt = event.kind == c.EVENT_PROMPT
    if is_prompt or (wants_logprobs and event.kind == c.EVENT_TOKEN):
        logprob, top = event.log_prob, _top_from(event.top_log_probs, event.num_top_log_probs)
    return TokenEvent(
        is_prompt=is_prompt,
        token_id=event.token_id if is_prompt or event.kind == c.EVENT_TOKEN else None,
        text=string_at(event.text, event.text_len).decode() if event.text_len else "",
        logprob=logprob,
        top_logprobs=top,
        sample=event.sample,
        finish_reason=c.FINISH_REASONS.get(event.finish_reason, "unknown") if event.kind == c.EVENT_END else None,
    )


def _top_from(log_probs: Any, count: int) -> List[TokenLogProb]:
    """Copies `count` of the library's pairs in one go: read by the fields of ctypes they take twice as long."""
    if count == 0:
        return []
    return list(map(TokenLogProb._make, _LOG_PROB.iter_unpack(string_at(log_probs, count * _LOG_PROB.size))))


def _tops_from(log_probs: Any, num_tokens: int, num_top: int) -> List[List[TokenLogProb]]:
    """The same for the tokens of a sequence, of which each has `num_top`."""
    pairs = _top_from(log_probs, num_tokens * num_top)
    return [pairs[index * num_top : (index + 1) * num_top] for index in range(num_tokens)]


def wants_logprobs(request: Request) -> bool:
    return bool(request.num_log_probs != c.UNSET_INT)


# xserv_log_prob of include/xserv.h.
_LOG_PROB = struct.Struct("=If")

_SUBMIT_DEFAULTS = defaults(c.SubmitOptions, library.xserv_submit_options_init)

#: What a submission is asked to tell: every event, the parts of the answer and the ends of samples, or those ends.
Events = Literal["all", "answers", "ends"]

_END = 1 << c.EVENT_END
_TOKENS = 1 << c.EVENT_TOKEN | 1 << c.EVENT_TEXT
_ANSWERS = sum(1 << kind for kind in c.ANSWER_EVENTS)


def submit_options(request: Request, events: Events) -> c.SubmitOptions:
    """The options that ask for events of a request."""
    options: c.SubmitOptions = c.SubmitOptions.from_buffer_copy(_SUBMIT_DEFAULTS)
    kinds = _END
    if events == "all":
        kinds |= _TOKENS
        if request.num_prompt_log_probs != c.UNSET_INT:
            kinds |= 1 << c.EVENT_PROMPT
    if events != "ends" and request.answer_format:
        kinds |= _ANSWERS
    options.events = kinds
    return options


def describe(result: Optional[Result], closed: bool, num_pieces: int) -> str:
    """The state of a stream, for its repr()."""
    if result is not None:
        return f"ended by {result.finish_reason} after {len(result.token_ids)} tokens"
    pieces = "1 piece" if num_pieces == 1 else f"{num_pieces} pieces"
    return f"closed after {pieces}" if closed else f"running, {pieces} read"


def _answer_from(info: Any) -> Answer:
    calls = [info.tool_calls[index] for index in range(info.num_tool_calls)]
    return Answer(
        reasoning=string_at(info.reasoning, info.reasoning_len).decode() or None,
        content=string_at(info.content, info.content_len).decode(),
        tool_calls=[
            ToolCall(
                id=call.id.decode(),
                name=call.name.decode(),
                arguments_json=string_at(call.arguments_json, call.arguments_len).decode(),
                is_complete=bool(call.is_complete),
            )
            for call in calls
        ],
        message=json.loads(info.message_json),
    )


def take_answer(handle: c_void_p) -> Answer:
    """Copies the answer of a result and frees its handle."""
    try:
        info = c.ResultInfo(struct_size=sizeof(c.ResultInfo))
        check(library.xserv_result_get_info(handle, byref(info)))
        return _answer_from(info)
    finally:
        library.xserv_result_free(handle)


def _result_from(info: Any, wants_logprobs: bool) -> Result:
    text = string_at(info.text, info.text_len).decode()
    answer = _answer_from(info) if info.message_json is not None else None
    num_top = info.num_top_log_probs
    result = Result.__new__(Result)
    # As for the parts of an answer.
    result.__dict__.update(
        text=text,
        token_ids=info.token_ids[: info.num_tokens] if info.num_tokens else [],
        num_prompt_tokens=info.num_prompt_tokens,
        num_cached_tokens=info.num_cached_tokens,
        finish_reason=c.FINISH_REASONS.get(info.finish_reason, "unknown"),
        seed=info.seed,
        time_to_first_token_seconds=info.time_to_first_token_seconds,
        total_seconds=info.total_seconds,
        prompt_tokens_per_second=info.prompt_tokens_per_second,
        tokens_per_second=info.tokens_per_second,
        samples=[],
        logprobs=(info.log_probs[: info.num_tokens] if info.num_tokens else []) if wants_logprobs else None,
        top_logprobs=_tops_from(info.top_log_probs, info.num_tokens, num_top) if wants_logprobs else None,
        **_prompt_from(info),
        reasoning=answer.reasoning if answer else None,
        content=answer.content if answer else text,
        tool_calls=answer.tool_calls if answer else [],
        message=answer.message if answer else None,
    )
    return result


def _first_sample_of(result: Result) -> Result:
    sample = Result.__new__(Result)
    sample.__dict__.update(result.__dict__)
    sample.__dict__["samples"] = []
    return sample


def _prompt_from(info: Any) -> Dict[str, Any]:
    """The fields of a Result that tell of the prompt's tokens."""
    if not info.prompt_log_probs:
        return {"prompt_token_ids": None, "prompt_logprobs": None, "prompt_top_logprobs": None}
    count, num_top = info.num_prompt_tokens, info.num_prompt_top_log_probs
    logprobs = [None if math.isnan(value) else value for value in info.prompt_log_probs[:count]]
    all_tops = _tops_from(info.prompt_top_log_probs, count, num_top)
    tops = [None if logprob is None else top for logprob, top in zip(logprobs, all_tops)]
    return {
        "prompt_token_ids": info.prompt_tokens[:count],
        "prompt_logprobs": logprobs,
        "prompt_top_logprobs": tops,
    }


def take_result(handle: c_void_p, wants_logprobs: bool) -> Result:
    """Copies a result and frees its handle."""
    try:
        info = c.ResultInfo(struct_size=sizeof(c.ResultInfo))
        check(library.xserv_result_get_info(handle, byref(info)))
        result = _result_from(info, wants_logprobs)
        # The first sample is what has just been copied.
        num_samples = info.num_samples
        if num_samples:
            result.samples.append(_first_sample_of(result))
        for index in range(1, num_samples):
            check(library.xserv_result_get_sample(handle, index, byref(info)))
            result.samples.append(_result_from(info, wants_logprobs))
        return result
    finally:
        library.xserv_result_free(handle)


# An item of a job's queue: ("event", StreamEvent), then once ("result", Result) or ("error", exception).
_Item = Tuple[str, Any]


class _Job:
    """The thread that waits for the library, and what the reader shares with it."""

    def __init__(self, model: Any, model_handle: int, request: Request, want_events: bool) -> None:
        self.model, self.model_handle, self.request = model, model_handle, request
        self.want_events, self.wants_logprobs = want_events, wants_logprobs(request)
        # Bounded: what a slow reader has not taken stays in the library, which needs less memory for it.
        self.items: "queue.Queue[_Item]" = queue.Queue(maxsize=64)
        self.stopped = threading.Event()
        self.cancel = c_void_p()
        check(library.xserv_cancel_token_new(byref(self.cancel)))
        request.cancel = self.cancel
        self.num_forks = _process.num_forks()
        self._done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="xserv-generate", daemon=True)

    def start(self) -> None:
        _process.begin(self._done, self.stop, calls_python=self.request.processor is not None)
        try:
            self.thread.start()
        except BaseException:
            _process.end(self._done)
            raise

    def is_of_parent(self) -> bool:
        """Whether the process was forked since: then there is no thread, and the queue may be locked for ever."""
        return self.num_forks != _process.num_forks()

    def stop(self) -> None:
        self.stopped.set()
        check(library.xserv_cancel_token_cancel(self.cancel))

    def _put(self, item: _Item) -> None:
        while True:
            try:
                return self.items.put(item, timeout=0.1)
            except queue.Full:
                if not self.stopped.is_set():
                    continue
            # The reader may be gone. Then unread text is of no use, but the end is.
            try:
                self.items.get_nowait()
            except queue.Empty:
                pass

    def _run(self) -> None:
        try:
            try:
                self._put(("result", self._follow() if self.want_events else self._generate()))
            except BaseException as error:
                self._put(("error", error))
        finally:
            _process.end(self._done)

    def _generate(self) -> Result:
        handle = c_void_p()
        no_callback = c.TokenCallback()
        check(library.xserv_generate(self.model_handle, byref(self.request), no_callback, None, byref(handle)))
        if self.request.processor is not None and self.request.processor.error is not None:
            library.xserv_result_free(handle)
            raise self.request.processor.error
        return take_result(handle, self.wants_logprobs)

    def _follow(self) -> Result:
        """Puts every event into the queue. (The callback of xserv_generate() is told no log-probabilities.)"""
        submission = c_void_p()
        options = submit_options(self.request, "all")
        check(library.xserv_submit(self.model_handle, byref(self.request), byref(options), byref(submission)))
        try:
            event = c.Event(struct_size=sizeof(c.Event))
            while event.kind != c.EVENT_DONE:
                check(library.xserv_next(submission, c.WAIT_FOREVER, byref(event)))
                if event.kind not in (c.EVENT_NONE, c.EVENT_DONE):
                    self._put(("event", stream_event_from(event, self.wants_logprobs)))
            handle = c_void_p()
            check(library.xserv_submission_take_result(submission, byref(handle)))
            return take_result(handle, self.wants_logprobs)
        finally:
            library.xserv_submission_free(submission)

    def __del__(self) -> None:
        library.xserv_cancel_token_free(self.cancel)


class TextStream(Iterator[Piece], NotCopyable):
    """The pieces of a text, as they are generated: strings, each with the number of its `sample`. events() has the
    tokens as well.

    close(), the end of a with block, or dropping the stream stops a generation that still runs. What a reader that
    is slower than the model has not read yet is kept for it. Several threads may read one stream: each
    piece goes to one of them. The errors of the request are raised to whoever reads. After os.fork() the child gets a
    ForkedError.

    `result` is the Result once the stream has ended or was closed, and None before.
    """

    _instead = "make a stream for each reader"

    result: Optional[Result]

    def __init__(self, model: Any, model_handle: int, request: Request, want_events: bool = True) -> None:
        self._job: Optional[_Job] = _Job(model, model_handle, request, want_events)
        self._num_pieces = 0
        self.result = None
        self._job.start()

    def __repr__(self) -> str:
        return f"<xserv.TextStream: {describe(self.result, self._job is None, self._num_pieces)}>"

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> Piece:
        event = self._take()
        while event is not None:
            if isinstance(event, TokenEvent) and event.text:
                return Piece(event.text, event.sample)
            event = self._take()
        raise StopIteration

    @overload
    def events(self, *, answers: Literal[False] = False) -> Iterator[TokenEvent]: ...
    @overload
    def events(self, *, answers: Literal[True]) -> Iterator[StreamEvent]: ...
    def events(self, *, answers: bool = False) -> Iterator[Any]:
        """Iterates over the events instead of the pieces of text: every token with its id and, if the request asks
        for them, its log-probabilities, and the end of every sample. An event is given once, here or as a piece.

        answers: also the parts of the answer (AnswerEvent), after the tokens that made them certain, if the request
            has messages or an answer_format.
        """
        event = self._take()
        while event is not None:
            if answers or isinstance(event, TokenEvent):
                yield event
            event = self._take()

    def _take(self) -> Optional[StreamEvent]:
        """Waits for the next event. None after the last one."""
        job = self._job
        if job is None:
            return None
        if job.is_of_parent():
            raise forked("the stream was made before this process was forked")
        # Waiting for a queue can be interrupted by Ctrl-C; waiting inside the library could not.
        kind, value = job.items.get()
        if kind == "event":
            assert isinstance(value, (TokenEvent, AnswerEvent))
            self._num_pieces += isinstance(value, TokenEvent) and bool(value.text)
            return value
        # The end is put back, because another thread may be waiting for it as well.
        job.items.put((kind, value))
        job.thread.join()
        self._job = None
        if kind == "error":
            raise value
        if value is not None:
            self.result = value
        return None

    def wait(self) -> Result:
        """Reads to the end and returns the Result. If it is interrupted, the generation stops. ValueError if
        the stream was closed before its end."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.close()
            raise
        if self.result is None:
            raise ValueError("the stream was closed before its end")
        return self.result

    def close(self) -> None:
        """Stops the generation if it still runs, waits until it has stopped, and sets `result` to what there
        is. Any thread may call it; one that is reading gets the end of the stream."""
        job = self._job
        if job is None:
            return
        if job.is_of_parent():
            self._job = None
            return
        job.stop()
        job.thread.join()
        end: _Item = ("result", None)
        try:
            while True:
                item = job.items.get_nowait()
                if item[0] != "event":
                    end = item
        except queue.Empty:
            pass
        if end[0] == "result" and end[1] is not None:
            self.result = end[1]
        job.items.put(end)  # for a thread that is reading
        self._job = None

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None and not job.is_of_parent():
            job.stop()
