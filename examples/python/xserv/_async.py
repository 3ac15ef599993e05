"""Generation for asyncio: the event loop waits for one file descriptor, whatever the number of streams.

The library writes to an eventfd when a submission has events after it had none. All streams of an event loop
share one (class Wakeups). When it can be read, the loop asks the streams that somebody waits for whether they
have events, until it has found as many as the eventfd has counted. (The library could call a Python function for
each stream instead. But that would run on the thread that computes the model, which would have to wait for the
interpreter's lock while all requests stand still.)
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from ctypes import CDLL, addressof, byref, c_int, c_uint, c_uint8, c_void_p, get_errno, sizeof, string_at
from itertools import chain
from typing import (
    Any,
    AsyncIterator,
    Awaitable,
    Callable,
    Deque,
    Dict,
    Generator,
    List,
    Literal,
    Optional,
    Set,
    TypeVar,
    overload,
)

from . import _library as c
from ._errors import Error, NotCopyable
from ._library import check, library, next_event, poll
from ._options import Request
from ._process import num_forks
from ._stream import (
    Events,
    Piece,
    Result,
    StreamEvent,
    TokenEvent,
    answer_event_from,
    describe,
    event_from,
    stream_event_from,
    submit_options,
    take_result,
    wants_logprobs,
)

_T = TypeVar("_T")

#: Prompts of up to this many bytes are tokenized on the loop's thread, in a millisecond or two, longer ones on
#: another.
LONG_PROMPT_BYTES = 4096

#: Who waits for the result alone need not be woken for every token: events are looked at after this share of the time
#: that the request has taken, and this many seconds at most. Until they are, the library wakes nobody.
RESULT_DELAY, LONGEST_DELAY = 0.01, 0.05

#: A stream that is behind gives this many pieces without a wait; then other tasks have their turn.
PIECES_AT_ONCE = 32


def _new_eventfd() -> int:
    if sys.version_info >= (3, 10):
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    eventfd = CDLL(None, use_errno=True).eventfd
    eventfd.restype, eventfd.argtypes = c_int, [c_uint, c_int]
    fd = int(eventfd(0, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(get_errno(), os.strerror(get_errno()))
    return fd


def _running_loop() -> Optional[asyncio.AbstractEventLoop]:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Wakeups:
    """The eventfd of an event loop. It exists while there are submissions that may write to it. A forked child shares its
    parent's epoll descriptors, and must leave them alone.

    Everything but leave() and call_on_loop() is called on the loop's thread. A stream that is made while no
    loop runs has one of its own, for the loop that awaits it first.
    """

    def __init__(self, loop: Optional[asyncio.AbstractEventLoop]) -> None:
        self._loop = loop
        self._num_forks = num_forks()
        # A stream may be dropped on any thread, also by a garbage collection within one of the blocks that hold
        # this lock.
        self._lock = threading.RLock()
        self._members: Set[Submission] = set()
        # Who waits for events, by the handles of the submissions, the longest first: those that have had some,
        # which the model is computing, and those that may have to wait for others.
        self._running: Dict[int, "asyncio.Future[None]"] = {}
        self._queued: Dict[int, "asyncio.Future[None]"] = {}
        # Requests with long prompts and those after them, by the handle of their model; the first is being
        # submitted.
        self._queues: Dict[int, Deque[Submission]] = {}
        self._ready = c_uint8()
        self._has_asked_all = True
        self._look_at_all = False
        #: How many times submissions may have been counted and not woken, since nobody waited for them.
        self.num_wakes = 0
        self.fd = _new_eventfd()
        if loop is not None:
            try:
                loop.add_reader(self.fd, self._on_wake)
            except BaseException:
                self._loop = None
                self._shut()
                raise

    def join(self, member: "Submission") -> bool:
        """Keeps the descriptor open until `member` leaves. False if it has been closed already."""
        with self._lock:
            if self.fd >= 0:
                self._members.add(member)
            return self.fd >= 0

    def leave(self, member: "Submission") -> None:
        """Closes the descriptor after the last member. Any thread may call it."""
        self._members.discard(member)
        if not self._members:
            self.call_on_loop(self._shut)
        elif not self._has_asked_all and self._num_forks == num_forks():
            self.call_on_loop(self._count_is_off)

    def call_on_loop(self, work: Callable[[], None]) -> None:
        """Calls work() now, or on the loop's thread if the loop is running on another one."""
        loop = self._loop
        if loop is not None and self._num_forks == num_forks() and loop.is_running() and loop is not _running_loop():
            try:
                loop.call_soon_threadsafe(work)
                return
            except RuntimeError:  # it has been closed in the meantime
                pass
        work()

    def _shut(self) -> None:
        if self._num_forks == num_forks():
            with self._lock:
                if self._members:
                    return
                fd, self.fd = self.fd, -1
            if fd >= 0 and self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(fd)
        else:  # another thread of the parent may have held the lock
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # The loop ended before it came to _shut().
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is None:
            loop.add_reader(self.fd, self._on_wake)
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("the stream belongs to another event loop, and can be awaited only there")

    def expect(self, submission: "Submission") -> "asyncio.Future[None]":
        """What is done when the submission has been handed over, or may have events, or is closed. For a stream that
        is bound; expect_no_more() follows."""
        assert self._loop is not None
        waiter = submission.waiter = self._loop.create_future()
        if submission.handle is not None:
            (self._running if submission.is_running else self._queued)[submission.handle] = waiter
        return waiter

    def expect_no_more(self, submission: "Submission", handle: Optional[int]) -> None:
        """`handle`: the submission's when expect() was called."""
        submission.waiter = None
        if handle is not None:
            (self._running if submission.is_running else self._queued).pop(handle, None)

    def _on_wake(self) -> None:
        try:
            # Before the streams are asked: an event that comes later makes it readable again.
            num_ready = int.from_bytes(os.read(self.fd, 8), sys.byteorder) if self.fd >= 0 else 0
        except BlockingIOError:
            num_ready = 0
        num_waiting = len(self._running) + len(self._queued)
        looks_at_all, self._look_at_all = self._look_at_all, False
        if num_ready == 0 and not looks_at_all:
            return
        self.num_wakes += 1
        if looks_at_all:
            num_ready = num_waiting + 1  # none is the last
        elif num_ready >= num_waiting:
            # As when all have an event at each step. One that has none, because others were counted that nobody waits
            # for, looks in vain and waits again.
            woken_now = [*self._running.values(), *self._queued.values()]
            self._running.clear()
            self._queued.clear()
            self._has_asked_all = True
            for waiter in woken_now:
                _wake(waiter)
            return
        # Each submission that has events has added one to the number, so that not all need be asked.
        ready, address = self._ready, addressof(self._ready)
        woken: List[int] = []
        for handle in chain(self._running, self._queued):
            # A failure wakes its reader as well, to whom xserv_next() will tell it.
            if poll(handle, address) or ready.value:
                woken.append(handle)
                if len(woken) == num_ready:
                    self._has_asked_all = False
                    break
        else:
            self._has_asked_all = True
        for handle in woken:
            _wake((self._running if handle in self._running else self._queued).pop(handle))

    def _count_is_off(self) -> None:
        """Asks all streams once more. A stream may have been found before the library counted it, and freed, so
        that it never was; then another one, which had been counted, was not looked for."""
        if not self._has_asked_all and not self._look_at_all:
            if self._loop is not None and not self._loop.is_closed():
                self._look_at_all = True
                self._loop.call_soon(self._on_wake)

    def submit(self, submission: "Submission", prompt_bytes: int, has_form: bool) -> None:
        """Submits at once, or on another thread if the prompt is long. Requests of a model keep their order, except
        those with a form: a schema or grammar may take a second to compile, for which no other request waits."""
        queue = self._queues.get(submission.model)
        if has_form and self._loop is not None:
            compiling = self._loop.run_in_executor(None, submission.submit)
            compiling.add_done_callback(lambda _: submission.wake())
            return
        if self._loop is None or (queue is None and prompt_bytes <= LONG_PROMPT_BYTES):
            submission.submit()
            if submission.error is not None:
                raise submission.error
        elif queue is not None:
            queue.append(submission)
        else:
            self._queues[submission.model] = deque([submission])
            try:
                self._submit_next(submission.model)
            except BaseException:
                del self._queues[submission.model]
                raise

    def _submit_next(self, model: int) -> None:
        assert self._loop is not None
        job = self._loop.run_in_executor(None, self._queues[model][0].submit)
        job.add_done_callback(lambda _: self._submitted(model))

    def _submitted(self, model: int) -> None:
        queue = self._queues[model]
        queue.popleft().wake()
        while queue and queue[0].closed:
            queue.popleft()
        if not queue:
            del self._queues[model]
            return
        try:
            self._submit_next(model)
        except RuntimeError as error:  # the loop's executor has been shut down
            del self._queues[model]
            for submission in queue:
                submission.error = error
                submission.wake()


# The Wakeups of the event loops, by their ids: a Wakeups keeps its loop alive.
_of_loops: "weakref.WeakValueDictionary[int, Wakeups]" = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_of_loops.clear)


def _join(member: "Submission") -> Wakeups:
    loop = _running_loop()
    found = None if loop is None else _of_loops.get(id(loop))
    if found is None or not found.join(member):
        found = Wakeups(loop)
        found.join(member)
        if loop is not None:
            _of_loops[id(loop)] = found
    return found


class Submission:
    """A request on its way to the library, and then its handle there."""

    def __init__(self, model: int, request: Request, events: Events) -> None:
        self.model = model
        self._events: Events = events
        self.handle: Optional[int] = None
        self.error: Optional[BaseException] = None
        self.closed = False
        self.waiter: "Optional[asyncio.Future[None]]" = None
        self.is_running = False
        self._request: Optional[Request] = request
        self._is_submitting = False
        # close() may come from a garbage collection within submit(), on its thread.
        self._lock = threading.RLock()
        self._num_forks = num_forks()
        self.wakeups = _join(self)

    def submit(self) -> None:
        """Hands the request over; `handle` or `error` is the outcome. May run on another thread, beside close()."""
        with self._lock:
            request, self._request = self._request, None
            if self.closed or request is None:
                return
            self._is_submitting = True  # the descriptor must stay open
        handle = c_void_p()
        try:
            options = submit_options(request, self._events)
            options.wake_fd = self.wakeups.fd
            check(library.xserv_submit(self.model, byref(request), byref(options), byref(handle)))
        except BaseException as error:
            self.error = error
        with self._lock:
            self._is_submitting = False
            self.handle = handle.value
            closed = self.closed
        if closed:
            self._end()

    def close(self) -> None:
        """Cancels the request, wherever it is. Any thread may call it."""
        if self._num_forks == num_forks():
            with self._lock:
                closed, self.closed = self.closed, True
                if closed or self._is_submitting:
                    return
        else:  # another thread of the parent may have held the lock
            closed, self.closed = self.closed, True
            if closed:
                return
        self._end()

    def _end(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            # Nothing is written to the descriptor after this.
            library.xserv_submission_free(handle)
        self.wakeups.leave(self)

    def wake(self) -> None:
        if self.waiter is not None:
            _wake(self.waiter)


def _piece_from(event: c.Event, kind: int) -> Optional[Piece]:
    if kind in c.ANSWER_EVENTS:
        return None
    return Piece(string_at(event.text, event.text_len).decode(), event.sample) if event.text_len else None


class _Events(AsyncIterator[Any]):
    """The events of a stream."""

    def __init__(self, stream: "AsyncTextStream", answers: bool) -> None:
        self._stream, self._answers = stream, answers

    def __aiter__(self) -> "_Events":
        return self

    def _make(self, event: c.Event, kind: int) -> Optional[StreamEvent]:
        if kind in c.ANSWER_EVENTS and not self._answers:
            return None
        return stream_event_from(event, self._stream._wants_logprobs)

    async def __anext__(self) -> StreamEvent:
        found: List[StreamEvent] = await self._stream._take(self._make)
        for event in found:
            return event
        raise StopAsyncIteration


class _Batches(AsyncIterator[List[StreamEvent]]):
    """The events of a stream, in lists of those that are there at once."""

    def __init__(self, stream: "AsyncTextStream", answers: bool, tokens: bool) -> None:
        self._stream, self._answers, self._tokens = stream, answers, tokens

    def __aiter__(self) -> "_Batches":
        return self

    def _make(self, event: c.Event, kind: int) -> Optional[StreamEvent]:
        if kind in c.ANSWER_EVENTS:
            return answer_event_from(event, kind) if self._answers else None
        if not self._tokens and kind != c.EVENT_END:
            return None
        return event_from(event, self._stream._wants_logprobs)

    def __anext__(self) -> Awaitable[List[StreamEvent]]:
        return self._stream._take(self._make, PIECES_AT_ONCE, ends=True)


class AsyncTextStream(AsyncIterator[Piece], NotCopyable):
    """The pieces of a text, as they are generated: strings, each with the number of its `sample`. events() has the
    tokens as well.

    Any number of streams run at once on one model, and are computed together. One task at a time can read a
    stream: another one that tries meanwhile gets a RuntimeError. The stream belongs to the event loop in which
    it was made (or, if none was running, to the one that awaits it first), and is used in that loop's thread.

    close(), the end of an async with block, or dropping the stream stops a generation that still runs; so does
    cancelling the task that waits. All streams of an event loop share one file descriptor.

    `result` is the Result once all pieces have been read; None before, and if the stream was closed before its end.
    """

    _instead = "give each task a stream of its own"

    result: Optional[Result]

    def __init__(
        self, model: Any, model_handle: int, request: Request, prompt_bytes: int, events: Events = "all"
    ) -> None:
        self.result = None
        self._model = model  # a model is closed when it is dropped
        self._is_awaited = False
        self._num_pieces = 0
        self._num_at_once = 0
        self._event = c.Event(struct_size=sizeof(c.Event))
        self._address = addressof(self._event)
        # Wakeups.num_wakes when there was no further event, or -1.
        self._empty_at = -1
        self._wants_logprobs = wants_logprobs(request)
        self._began = time.monotonic() if events == "ends" else None
        has_form = request.constraint_kind != c.CONSTRAINT_NONE or request.tool_choice >= c.TOOL_CHOICES["required"]
        self._submission = Submission(model_handle, request, events)
        try:
            self._submission.wakeups.submit(self._submission, prompt_bytes, has_form)
        except BaseException:
            self._submission.close()
            raise

    def __repr__(self) -> str:
        return f"<xserv.AsyncTextStream: {describe(self.result, self._submission.closed, self._num_pieces)}>"

    def __aiter__(self) -> "AsyncTextStream":
        return self

    async def __anext__(self) -> Piece:
        for piece in await self._take(_piece_from):
            return piece
        raise StopAsyncIteration

    @overload
    def events(self, *, answers: Literal[False] = False) -> AsyncIterator[TokenEvent]: ...
    @overload
    def events(self, *, answers: Literal[True]) -> AsyncIterator[StreamEvent]: ...
    def events(self, *, answers: bool = False) -> AsyncIterator[Any]:
        """Iterates over the events instead of the pieces of text: every token with its id and, if the request asks
        for them, its log-probabilities, and the end of every sample. An event is given once, here or as a piece.

        answers: also the parts of the answer (AnswerEvent), after the tokens that made them certain, if the request
            has messages or an answer_format.
        """
        return _Events(self, answers)

    def batches(self, *, answers: bool = False, tokens: bool = True) -> AsyncIterator[List[StreamEvent]]:
        """Iterates over lists of the events that are there at once, at least one and at most 32: for servers, which
        write them together. An event is given once, here or by events() or as a piece. If the end of the stream is there
        with the last events, `result` is known when they are given.

        answers: also the parts of the answer (AnswerEvent), as in events().
        tokens: False leaves out the TokenEvents of tokens and texts, so that only the ends of samples are left of
            them: for those who take the text from the parts of the answer. (A stream made with stream="answers" has
            none, and costs less.)
        """
        return _Batches(self, answers, tokens)

    async def _take(self, make: Callable[[c.Event, int], Optional[_T]], most: int = 1, ends: bool = False) -> List[_T]:
        """Waits for the next event of which make() makes something, and takes those that are there with it, up to
        this many. After the last one the list is empty, or with `ends` StopAsyncIteration is raised."""
        submission, event, address = self._submission, self._event, self._address
        wakeups = submission.wakeups
        if self._is_awaited:
            raise RuntimeError("another task is reading this stream; give each task a stream of its own")
        if not submission.closed:
            wakeups.bind(asyncio.get_running_loop())
        self._is_awaited = True
        batch: List[_T] = []
        try:
            while not submission.closed:
                if self._num_at_once >= PIECES_AT_ONCE:
                    if batch:
                        return batch
                    self._num_at_once = 0
                    await asyncio.sleep(0)
                    continue
                if submission.error is not None:
                    raise submission.error
                handle = submission.handle
                # If it had none, and an event that has come since has not been counted yet, it will be woken.
                if handle is not None and self._empty_at != wakeups.num_wakes:
                    code = next_event(handle, 0, address)
                    if code:
                        if batch:  # the failure comes again
                            return batch
                        check(code)
                    kind = event.kind
                    if kind == c.EVENT_DONE:
                        try:
                            self._end()
                        except Error:
                            if batch:  # the end, and its failure, come again
                                return batch
                            raise
                        break
                    if kind != c.EVENT_NONE:
                        made = make(event, kind)
                        if made is not None:
                            self._num_pieces += kind not in c.ANSWER_EVENTS and bool(event.text_len)
                            self._num_at_once += 1
                            batch.append(made)
                            if len(batch) >= most:
                                return batch
                        continue
                    self._num_at_once = 0
                    self._empty_at = wakeups.num_wakes
                    if batch:
                        return batch
                # It has no events, or another thread is submitting it.
                try:
                    await wakeups.expect(submission)
                finally:
                    wakeups.expect_no_more(submission, handle)
                    self._empty_at = -1
                if handle is not None:
                    submission.is_running = True
                    if self._began is not None:
                        await asyncio.sleep(min((time.monotonic() - self._began) * RESULT_DELAY, LONGEST_DELAY))
        except BaseException:
            submission.close()
            raise
        finally:
            self._is_awaited = False
        if ends and not batch:
            raise StopAsyncIteration
        return batch

    def _end(self) -> None:
        """Takes the result."""
        handle = c_void_p()
        check(library.xserv_submission_take_result(self._submission.handle, byref(handle)))
        self.result = take_result(handle, self._wants_logprobs)
        self._submission.close()

    async def wait(self) -> Result:
        """Reads to the end and returns the Result. ValueError if the stream was closed before its end."""
        async for _ in self:
            pass
        if self.result is None:
            raise ValueError("the stream was closed before its end")
        return self.result

    def __await__(self) -> Generator[Any, None, Result]:
        """`await model.generate_async(...)` is the same as `await stream.wait()`."""
        return self.wait().__await__()

    def close(self) -> None:
        """Stops the generation if it still runs, and returns at once. A task that waits for a piece gets the
        end of the stream. In another thread than the event loop's this is done a little later."""
        self._submission.wakeups.call_on_loop(self._close)

    def _close(self) -> None:
        self._submission.close()
        self._submission.wake()

    async def aclose(self) -> None:
        """As close(), for contextlib.aclosing()."""
        self.close()

    async def __aenter__(self) -> "AsyncTextStream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        submission = getattr(self, "_submission", None)
        if submission is not None:
            submission.close()
