"""Finds libxserv.so and loads it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, List, Mapping, Tuple

#: For each function its result and its arguments.
Functions = Mapping[str, Tuple[Any, Any]]


def places(abi_version: int) -> List[str]:
    """Returns where a library may be, in the order in which the places are tried.

    Every entry but the last is a file; the last is a name that the system's loader looks for. A file that
    XSERV_LIBRARY names is the only place: nobody who chose a library wants another one instead.
    """
    chosen = os.environ.get("XSERV_LIBRARY")
    if chosen:
        return [chosen]
    soname = f"libxserv.so.{abi_version}"
    package = Path(__file__).resolve().parent
    files = [package / "libxserv.so", package / soname]
    checkout = package.parents[2] if len(package.parents) > 2 else package
    if (checkout / "include" / "xserv.h").is_file():
        target = Path(os.environ.get("CARGO_TARGET_DIR") or checkout / "target")
        files += [target / profile / "libxserv.so" for profile in ("release", "debug")]
    # Installed libraries bear the number of their ABI in their names.
    prefixes = [sys.prefix, os.path.expanduser("~/.local"), "/usr/local"]
    files += [Path(prefix, "lib", soname) for prefix in prefixes]
    return list(dict.fromkeys([str(file) for file in files] + [soname]))


def load(abi_version: int, functions: Functions) -> ctypes.CDLL:
    """Returns the first library that loads and fits this package, with its functions declared.

    Raises ImportError if there is none; the message names every place and what was wrong with it.
    """
    looked_at = []
    for place in places(abi_version):
        if os.sep in place and not os.path.isfile(place):
            looked_at.append(f"{place}: no such file")
            continue
        try:
            # CDLL releases the interpreter's lock during calls, so that other threads can run.
            library = ctypes.CDLL(place)
        except OSError as error:
            reason = str(error)
            # The loader's message begins with the name of the file or library that it is about.
            looked_at.append(reason if reason.startswith(f"{place}: ") else f"{place}: {reason}")
            continue
        problem = _declare(library, abi_version, functions)
        if not problem:
            return library
        looked_at.append(f"{place} {problem}")
    if os.environ.get("XSERV_LIBRARY"):
        raise ImportError(f"XSERV_LIBRARY does not name a library that this package can use: {looked_at[0]}")
    raise ImportError(
        "No libxserv.so that this package can use was found. Build it with cargo build --release, install it with "
        "csrc/install --prefix ~/.local, or set XSERV_LIBRARY to the file. These places were looked at, the last one "
        "by the system's loader:\n  " + "\n  ".join(looked_at)
    )


def _declare(library: ctypes.CDLL, abi_version: int, functions: Functions) -> str:
    """Declares the functions, or returns why the library does not fit."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name, None)
        if function is None:
            return f"has no function {name}: it does not fit this package"
        function.restype, function.argtypes = result, arguments
    if library.xserv_abi_version() != abi_version:
        return f"has ABI version {library.xserv_abi_version()}, not {abi_version}"
    return ""
