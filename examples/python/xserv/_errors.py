"""The exceptions of the package: Error, and a subclass for each status of the library."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Dict, NoReturn, Optional, Tuple, Type


class Error(Exception):
    """A call of the library has failed; the subclasses say in which way.

    `str(error)` is one sentence that says what was wrong with what, `code` the number of the status, and
    `status` its name in C, such as "XSERV_STATUS_NOT_FOUND". Where Python has an exception for the same thing
    the subclass is one of those too, so that `except FileNotFoundError` catches a NotFoundError.
    """

    code: int
    status: str

    def __init__(self, message: str, code: int, status: str) -> None:
        # OSError would take three arguments for an errno, a text and a file name.
        super().__init__(message)
        self.code = code
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Tuple[Any, ...]:
        return (type(self), (str(self), self.code, self.status))


class InvalidArgumentError(Error, ValueError):
    """An argument or option is out of its range, or does not go with the others."""


class ClosedError(Error, ValueError):
    """The model, stream or context has been closed."""


class NotFoundError(Error, FileNotFoundError):
    """A file or folder does not exist, or the local Hugging Face cache has no such model. `errno` is ENOENT."""

    errno: Optional[int]

    def __init__(self, message: str, code: int, status: str) -> None:
        super().__init__(message, code, status)
        self.errno = errno.ENOENT


class FileError(Error, OSError):
    """The operating system refused to read a file. `errno` is None; the sentence has the system's reason."""


class InvalidFileError(Error, ValueError):
    """A file of the model is damaged, or does not follow its format."""


class UnsupportedError(Error, NotImplementedError):
    """The model, tokenizer or option is valid, but this library does not implement it."""


class OutOfMemoryError(Error, MemoryError):
    """The memory limit, the memory of the device or that of the machine is exhausted."""


class ContextFullError(Error, ValueError):
    """The prompt is longer than the context."""


class CancelledError(Error):
    """The call was cancelled: by its progress callback, because the model was closed, or because the program is ending
    and the call has a callback. (It is not asyncio's.)"""


class TemplateError(Error, ValueError):
    """The chat template failed or refused the messages, or exceeded its limits of time, size or depth."""


class NoDeviceError(Error, RuntimeError):
    """The device does not exist, or this process or this build of the library cannot use it."""


class ForkedError(Error, RuntimeError):
    """The process was forked after the object was made: a child has to load a model of its own."""


class InternalError(Error, RuntimeError):
    """The library itself is at fault. The call had no effect; please report the sentence."""


class DeviceLostError(Error, RuntimeError):
    """The GPU has failed for good; this process cannot use it again."""


BAD_HANDLE = 2
_KINDS: Dict[int, Type[Error]] = {
    1: InvalidArgumentError,
    3: NotFoundError,
    4: FileError,
    5: InvalidFileError,
    6: UnsupportedError,
    7: OutOfMemoryError,
    8: ContextFullError,
    9: CancelledError,
    10: TemplateError,
    11: NoDeviceError,
    12: ForkedError,
    13: InternalError,
    14: DeviceLostError,
}


def error_of(message: str, code: int, status: str) -> Error:
    """Returns the exception for a status. A number of a later library is an Error."""
    return _KINDS.get(code, Error)(message, code, status)


def invalid_argument(message: str) -> Error:
    return InvalidArgumentError(message, 1, "XSERV_STATUS_INVALID_ARGUMENT")


def cancelled(message: str) -> Error:
    return CancelledError(message, 9, "XSERV_STATUS_CANCELLED")


def forked(message: str) -> Error:
    return ForkedError(message, 12, "XSERV_STATUS_FORKED")


def closed(what: str) -> Error:
    return ClosedError(f"the {what} has been closed", BAD_HANDLE, "XSERV_STATUS_BAD_HANDLE")


class NotCopyable:
    """An owner of something in the library. A copy would free it a second time, under the first one."""

    _instead = "use the object itself"

    # copy.copy(), copy.deepcopy() and pickle all come here. For a type checker there is nothing to see.
    if not TYPE_CHECKING:

        def __reduce_ex__(self, protocol: int) -> NoReturn:
            raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; {self._instead}")
