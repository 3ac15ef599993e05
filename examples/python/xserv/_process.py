"""The process: its forks, and what must not be under way when it ends.

A thread that returns to Python, or calls it, when the interpreter is going down is ended on the spot, in the middle of
the library: the process aborts. So whatever may do that is entered here, and the end of the program waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import Callable, Dict, List, NamedTuple, Set

from ._errors import cancelled


class _Call(NamedTuple):
    interrupt: Callable[[], object]
    calls_python: bool


class Closer:
    """Closes something, once. Whoever comes later waits until it is closed. The end of the program does it too."""

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        self._is_closed = False
        self._lock = threading.RLock()  # a garbage collection may come within it
        _closers.add(self)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close()
        _closers.discard(self)

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may hold the other


_under_way: Dict[threading.Event, _Call] = {}
_closers: Set[Closer] = set()
_is_ending = False
_num_forks = 0


def num_forks() -> int:
    """The number of forks that led to this process."""
    return _num_forks


def begin(done: threading.Event, interrupt: Callable[[], object], *, calls_python: bool) -> None:
    """Enters a call of the library, which lasts until end(done). The end of the program calls interrupt(), from the
    main thread, and waits for it.

    calls_python: whether the library calls Python meanwhile. Once the program is ending, CancelledError is then raised.
    """
    _under_way[done] = _Call(interrupt, calls_python)
    # In this order: the end of the program says so first, and looks afterwards.
    if calls_python and _is_ending:
        end(done)
        raise cancelled("the program is ending, and the library could not call Python any more")


def end(done: threading.Event) -> None:
    _under_way.pop(done, None)
    done.set()


def run_interruptibly(
    name: str, work: Callable[[], None], interrupt: Callable[[], object], *, calls_python: bool = False
) -> None:
    """Runs work() on a thread of its own and raises what it raises. An exception that reaches this
    thread meanwhile (Ctrl-C, which comes to the main thread only, and only between two bytecodes of
    Python) calls interrupt(), waits for the end of the work, and goes on. So does the end of the program."""
    raised: List[BaseException] = []
    # Not Thread.join(): after an exception in it, a second one may return at once (CPython issue 89437).
    done = threading.Event()

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            end(done)

    thread = threading.Thread(target=body, name=name)
    begin(done, interrupt, calls_python=calls_python)
    try:
        thread.start()
        done.wait()
    except BaseException:
        interrupt()
        while thread.ident is not None and not done.is_set():
            try:
                done.wait()
            except BaseException:  # another Ctrl-C changes nothing: it ends soon
                continue
        end(done)
        raise
    if raised:
        raise raised[0]


def _stop(calls: Dict[threading.Event, _Call]) -> None:
    for call in calls.values():
        with contextlib.suppress(Exception):  # the others have to be stopped too
            call.interrupt()
    for done in calls:
        done.wait()


@atexit.register
def _before_exit() -> None:
    global _is_ending
    _is_ending = True
    # Threads may go on to begin calls, which are refused if they matter: these come to an end.
    calls = _under_way.copy()
    while calls:
        _stop(calls)
        calls = {done: call for done, call in _under_way.copy().items() if call.calls_python}
    closers: List[Closer] = list(_closers.copy())
    for closer in closers:
        closer.close()


def _after_fork_in_child() -> None:
    global _num_forks
    _num_forks += 1
    # The threads do not exist in a child, so it must not wait for them.
    _under_way.clear()
    for closer in _closers:
        closer.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
