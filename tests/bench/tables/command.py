"""The command: which tables, of which device, into which folder."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import xserv

from tables import attention, errors, gemm, kernels, report, scheduling
from tables.device import Device, open_device
from tables.report import Table
from tables.scale import SCALES, Scale

DESCRIPTION = """Measures what the library does on this machine, and writes each table as Markdown, JSON and SVG.

    python3 tests/bench/tables TABLE... [--device cpu|cuda] [--out DIR] [--quick] [--model FOLDER]

Tables: gemm (matrix products by every backend), attention (time, memory and accuracy), errors (of every operator
against float64), scheduling (requests at once and one after another; needs --model), kernels (of a step of decoding
and of a prompt, by the profiler of PyTorch; CUDA only, needs --model), or all. Needs NumPy, and on CUDA PyTorch.
A table that fails is written as failed, and the others are made all the same; the exit code is then 1.
"""


class Options(NamedTuple):
    """The settings that the tables of models need."""

    device: Device
    scale: Scale
    model: Optional[Path]
    random_weights: bool
    steps: Optional[Path]


Maker = Callable[[Options], Table]
TABLES: Dict[str, Maker] = {
    "gemm": lambda options: gemm.run(options.device, options.scale),
    "attention": lambda options: attention.run(options.device, options.scale),
    "errors": lambda options: errors.run(options.device),
    "scheduling": lambda options: scheduling.run(options.device, options.scale, options.model, options.random_weights),
    "kernels": lambda options: kernels.run(
        options.device, options.scale, options.model, options.random_weights, options.steps
    ),
}


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python3 tests/bench/tables", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("tables", nargs="+", choices=[*TABLES, "all"], metavar="TABLE")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--threads", type=int, default=0, metavar="N", help="on the CPU; 0 (default): one for each core")
    made.add_argument("--out", type=Path, default=Path("target/tables"), metavar="DIR", help="default target/tables")
    made.add_argument("--model", type=Path, metavar="FOLDER", help="of scheduling and kernels")
    made.add_argument("--random", action="store_true", help="make the weights up: the folder needs config.json alone")
    made.add_argument("--steps", type=Path, metavar="FILE", help="kernels: what `cargo bench --bench steps -- FOLDER "
                      "--profile --json` has printed, for a table of the library's own marks")  # fmt: skip
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", default="full", help="fewer, shorter")
    size.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="to test this program")
    return made


def make(name: str, options: Options) -> Table:
    """Makes a table; one that raises is a failed one."""
    try:
        return TABLES[name](options)
    except Exception as error:  # noqa: BLE001: the other tables are made all the same
        traceback.print_exc()
        return Table(name, name.capitalize(), failures=[f"{type(error).__name__}: {error}"])


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    given = parser().parse_args(arguments)
    try:
        device = open_device(given.device, given.threads)
    except (ValueError, xserv.Error) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    options = Options(device, SCALES[given.device, given.size], given.model, given.random, given.steps)
    names = list(TABLES) if "all" in given.tables else list(dict.fromkeys(given.tables))
    began = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    machine: Dict[str, Any] = dict(date=began.isoformat(), version=xserv.library_version, **device.describe())
    failed: List[str] = []
    for name in names:
        start = time.monotonic()
        table = make(name, options)
        table.settings = dict(size=given.size, seconds=round(time.monotonic() - start, 1), **table.settings)
        files = report.write(table, machine, given.out)
        reasons = table.failures or ([table.skipped] if table.skipped else [])
        print(json.dumps(dict(table=name, outcome=table.outcome, seconds=table.settings["seconds"], why=reasons,
                              files=[str(file) for file in files])), flush=True)  # fmt: skip
        if table.failures:
            failed.append(name)
        device.release()
    if failed:
        print(f"tables: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
