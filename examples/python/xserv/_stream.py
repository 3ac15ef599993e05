"""Runs a generation in a thread of its own, so that its text can be iterated and Ctrl-C works."""

from __future__ import annotations

import atexit
import queue
import threading
from ctypes import byref, c_void_p, sizeof, string_at
from dataclasses import dataclass, field
from typing import Any, Iterator, List, Optional, Set, Tuple

from . import _library as c
from ._library import check, library


@dataclass(frozen=True)
class Result:
    """The result of a generation."""

    text: str
    token_ids: List[int]
    num_prompt_tokens: int
    #: The prompt tokens whose keys and values were found in the prefix cache.
    num_cached_tokens: int
    #: "stop_token", "stop_string", "max_tokens", "context_full", "callback", "cancelled" or "deadline".
    finish_reason: str
    seed: int
    time_to_first_token_seconds: float
    total_seconds: float
    prompt_tokens_per_second: float
    tokens_per_second: float
    #: All samples of the request (num_samples), of which this is the first.
    samples: "List[Result]" = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text


class Piece(str):
    """A piece of text, and which sample of the request it continues."""

    sample: int

    def __new__(cls, text: str, sample: int) -> "Piece":
        piece = super().__new__(cls, text)
        piece.sample = sample
        return piece


def _result_from(info: Any) -> Result:
    return Result(
        text=string_at(info.text, info.text_len).decode(),
        token_ids=info.token_ids[: info.num_tokens] if info.num_tokens else [],
        num_prompt_tokens=info.num_prompt_tokens,
        num_cached_tokens=info.num_cached_tokens,
        finish_reason=c.FINISH_REASONS.get(info.finish_reason, "unknown"),
        seed=info.seed,
        time_to_first_token_seconds=info.time_to_first_token_seconds,
        total_seconds=info.total_seconds,
        prompt_tokens_per_second=info.prompt_tokens_per_second,
        tokens_per_second=info.tokens_per_second,
    )


def take_result(handle: c_void_p) -> Result:
    try:
        info = c.ResultInfo(struct_size=sizeof(c.ResultInfo))
        check(library.xserv_result_get_info(handle, byref(info)))
        result = _result_from(info)
        for index in range(info.num_samples):
            check(library.xserv_result_get_sample(handle, index, byref(info)))
            result.samples.append(_result_from(info))
        return result
    finally:
        library.xserv_result_free(handle)


# An item of a job's queue: ("text", Piece), then once ("result", Result) or ("error", exception).
_Item = Tuple[str, Any]


class _Job:
    """The thread that makes the blocking call, and what the reader shares with it."""

    def __init__(self, model: Any, request: c.Request, want_text: bool) -> None:
        self.model, self.request = model, request
        # Bounded: a reader that is slower than the model makes the model wait.
        self.items: "queue.Queue[_Item]" = queue.Queue(maxsize=64)
        self.stopped = threading.Event()
        self.failure: Optional[BaseException] = None
        self.callback = c.TokenCallback(self._on_token) if want_text else c.TokenCallback()
        self.cancel = c_void_p()
        check(library.xserv_cancel_token_new(byref(self.cancel)))
        request.cancel = self.cancel
        self.thread = threading.Thread(target=self._run, name="xserv-generate", daemon=True)

    def start(self) -> None:
        _running.add(self)
        try:
            self.thread.start()
        except BaseException:
            _running.discard(self)
            raise

    def stop(self) -> None:
        self.stopped.set()
        check(library.xserv_cancel_token_cancel(self.cancel))

    def _on_token(self, event: Any, _: Any) -> bool:
        try:
            if event.contents.text_len:
                text = string_at(event.contents.text, event.contents.text_len).decode()
                self._put(("text", Piece(text, event.contents.sample)))
        except BaseException as error:  # must not cross the C code
            self.failure = error
        return self.failure is None and not self.stopped.is_set()

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
        handle = c_void_p()
        try:
            try:
                check(library.xserv_generate(self.model.handle, byref(self.request), self.callback, None, byref(handle)))
                result = take_result(handle)
                if self.failure is not None:
                    raise self.failure
                self._put(("result", result))
            except BaseException as error:
                self._put(("error", error))
        finally:
            self.callback = c.TokenCallback()  # it refers to this object, which would never be freed
            _running.discard(self)

    def __del__(self) -> None:
        library.xserv_cancel_token_free(self.cancel)


_running: Set[_Job] = set()


@atexit.register
def _stop_all() -> None:
    """Ends generations that still run: a thread must not return from the library into an interpreter that is gone."""
    for job in list(_running):
        job.stop()
        job.thread.join()


class TextStream(Iterator[Piece]):
    """The pieces of a text, as they are generated: strings, each with the number of its `sample`. `result` is the
    Result once it has ended.

    close(), the end of a with block, or dropping the stream stops a generation that still runs.
    """

    def __init__(self, model: Any, request: c.Request, want_text: bool = True) -> None:
        self._job: Optional[_Job] = _Job(model, request, want_text)
        self.result: Optional[Result] = None
        self._job.start()

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> Piece:
        job = self._job
        if job is None:
            raise StopIteration
        # Waiting for a queue can be interrupted by Ctrl-C; waiting inside the library could not.
        kind, value = job.items.get()
        if kind == "text":
            assert isinstance(value, Piece)
            return value
        # The end is put back, because another thread may be waiting for it as well.
        job.items.put((kind, value))
        job.thread.join()
        self._job = None
        if kind == "error":
            raise value
        if value is not None:
            self.result = value
        raise StopIteration

    def wait(self) -> Result:
        """Reads to the end and returns the result. If it is interrupted, the generation stops."""
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
        """Stops the generation if it still runs, and waits until it has stopped."""
        job = self._job
        if job is None:
            return
        job.stop()
        job.thread.join()
        end: _Item = ("result", None)
        try:
            while True:
                item = job.items.get_nowait()
                if item[0] != "text":
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
        if job is not None:
            job.stop()
