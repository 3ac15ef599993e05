"""Whether the operators compute what they should on this machine.

    python3 -m xserv.self_test [--device cpu|cuda|auto] [--device-index N] [--verbose]

    from xserv.self_test import self_test

    for line in self_test("cuda"):
        print(line.operator, line.what, line.max_error, line.bound)

The test runs every operator at small and odd sizes, in every type and with every backend, and compares the results
with plain arithmetic in float64 and, on a GPU, with the operators on the CPU. It takes a few seconds.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_bool, c_char_p, c_double, c_size_t, c_uint32, c_void_p
from typing import Any, Callable, List, Literal, NamedTuple, Optional

from . import _errors, _process
from ._library import DEVICES, check, library
from ._request import choice, set_number
from .ops import ContextOptions, Device

_REFERENCES = {0: "float64", 1: "cpu"}
_OUTCOMES = {0: "passed", 1: "failed", 2: "unsupported"}


class SelfTestLine(Structure):
    """xserv_self_test_line in C."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("operator_name", c_char_p),
        ("what", c_char_p),
        ("text", c_char_p),
        ("message", c_char_p),
        ("max_error", c_double),
        ("bound", c_double),
        ("reference", c_uint32),
        ("outcome", c_uint32),
    ]


class Comparison(NamedTuple):
    """One comparison of the self-test. As a str it is a line for people."""

    operator: str
    """The operator, for example "rms_norm"."""
    what: str
    """The types, shapes and the variant."""
    outcome: Literal["passed", "failed", "unsupported"]
    """"unsupported": the device, the machine or the type lacks this variant, which is no fault."""
    reference: Literal["float64", "cpu"]
    """The reference that the result was compared with."""
    max_error: float
    """The largest distance of an element from the reference, divided by the size of the reference or, where that
    is larger, by the mean size of the elements."""
    bound: float
    """The largest error that is no fault; 0 where every bit has to be right."""
    message: str
    """Why it failed or is unsupported; otherwise empty."""
    text: str
    """The whole line."""

    def __str__(self) -> str:
        return self.text


_Callback = CFUNCTYPE(c_bool, POINTER(SelfTestLine), c_void_p)
library.xserv_self_test.argtypes = [POINTER(ContextOptions), _Callback, c_void_p]


def _comparison(line: Any) -> Comparison:
    return Comparison(
        operator=line.operator_name.decode(),
        what=line.what.decode(),
        outcome=_OUTCOMES[line.outcome],  # type: ignore[arg-type]
        reference=_REFERENCES[line.reference],  # type: ignore[arg-type]
        max_error=line.max_error,
        bound=line.bound,
        message=line.message.decode(),
        text=line.text.decode(),
    )


def self_test(
    device: Device = "auto",
    *,
    device_index: int = 0,
    num_threads: int = 0,
    report: Optional[Callable[[Comparison], object]] = None,
) -> List[Comparison]:
    """Runs the test and returns its comparisons, of which none has failed.

    device, device_index, num_threads: as for ops.Context.
    report: called with every comparison as it is made; what it raises ends the test and is raised here.

    Raises InternalError, which names the operators, if some comparisons failed, after all were reported: then the
    driver, the hardware or the library is at fault. Raises NoDeviceError, DeviceLostError, OutOfMemoryError,
    UnsupportedError and InvalidArgumentError as ops.Context does.
    """
    options = ContextOptions()
    library.xserv_context_options_init(byref(options), ctypes.sizeof(options))
    options.device_kind = choice(DEVICES, device, "device")
    set_number(options, "device_index", device_index)
    set_number(options, "num_threads", num_threads)
    made: List[Comparison] = []
    raised: List[BaseException] = []
    interrupted = threading.Event()

    def take(line: Any, _: Any) -> bool:
        try:
            made.append(_comparison(line.contents))
            if report is not None:
                report(made[-1])
            return not interrupted.is_set()
        except BaseException as error:  # noqa: B902: whatever it is, it is raised below
            raised.append(error)
            return False

    done = threading.Event()
    _process.begin(done, interrupted.set, calls_python=True)
    try:
        code = library.xserv_self_test(byref(options), _Callback(take), None)
    finally:
        _process.end(done)
    if raised:
        raise raised[0]
    check(code)
    return made


def _main() -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python3 -m xserv.self_test", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=list(DEVICES), default="auto", help="where (auto: the GPU if there is one)")
    parser.add_argument("--device-index", type=int, default=0, metavar="N", help="which GPU, from 0")
    parser.add_argument("--verbose", action="store_true", help="print every comparison")
    arguments = parser.parse_args()

    def report(comparison: Comparison) -> None:
        if arguments.verbose or comparison.outcome == "failed":
            print(comparison)

    try:
        made = self_test(arguments.device, device_index=arguments.device_index, report=report)
    except _errors.Error as error:
        print(f"xserv.self_test: {error}", file=sys.stderr)
        return 1
    print(f"{len(made)} comparisons of {len({one.operator for one in made})} operators, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
