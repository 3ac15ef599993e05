"""The kernels of a step of decoding and of a prompt, as PyTorch's profiler (CUPTI) sees them in this process, and the
parts of steps as the library's own marks tell them.

The profiler needs no root: it records when kernels ran and with what, and reads no counters. So the bytes of a kernel
are not measured: they are those that it has to read and write, where its name tells which (`work`).
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import plots
import xserv

from tables import trace
from tables.device import Device
from tables.report import Column, Row, Section, Table
from tables.scale import Scale
from tables.scheduling import open_model, prompt_of
from tables.work import Ceilings, Shape, add_work

#: Bars of a plot.
MOST_BARS = 14


def measure_ceilings(device: Device, scale: Scale) -> Ceilings:
    """Reading by a search for the largest elements of long rows, and multiplying by the largest square."""
    rows, width = 16384, 65536  # 4 GiB
    context = device.context
    source, places = device.random("f32", (rows, width)), device.empty("i32", (rows,))
    read = rows * width * 4 / device.milliseconds([lambda: context().argmax(source, places)], scale.budget_s) / 1e6
    del source
    device.release()
    size = 8192
    a, b = (device.random("bf16", (size, size), seed) for seed in (1, 2))
    c = device.empty("bf16", (size, size))
    call = lambda: context().gemm(a, b, c, transpose_b=True)  # noqa: E731
    tflops = 2.0 * size**3 / device.milliseconds([call], scale.budget_s) / 1e9
    del a, b, c
    device.release()
    return Ceilings(read, tflops)


def _record(model: xserv.Model, torch: Any, prompt: List[int], count: int) -> List[trace.Event]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        model.generate(tokens=prompt, max_tokens=count, ignore_eos=True, temperature=0.0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found = trace.kernels_of(json.loads(file.read_text(encoding="utf-8")))
    if not found:
        raise RuntimeError("the profiler saw no kernel: CUPTI is missing, or another profiler is at work")
    return found


COLUMNS = [
    Column("kernel", "kernel"), Column("launches", "launches", ".4g"), Column("us", "us", ".1f"),
    Column("us_each", "us each", ".2f"), Column("of_step", "of all", ".1%"), Column("mb", "MB", ",.1f"),
    Column("of_ceiling", "of the ceiling", ".0%"), Column("grid", "grid"), Column("block", "block"),
    Column("registers", "registers", "d"), Column("shared_kib", "shared, KiB", ".1f"),
    Column("blocks_there", "blocks on a multiprocessor", "d"), Column("threads_there", "threads there", "d"),
    Column("limit", "limited by"),
]  # fmt: skip


def _section(name: str, title: str, rows: List[Row]) -> Section:
    section = Section(name, title, COLUMNS, rows)
    shown = rows[:MOST_BARS]
    picture = plots.bars(title, "us", [row["kernel"] for row in shown], [plots.Series("", [row["us"] for row in shown])])
    section.plots.append((f"kernels-{name}", picture))
    return section


def profiled(device: Any, scale: Scale, folder: Path, random_weights: bool, table: Table) -> List[Section]:
    """The tables of kernels of a decoding step and of a prompt."""
    torch = importlib.import_module("torch")
    ceilings = measure_ceilings(device, scale)
    table.settings["ceilings"] = f"reads of {ceilings.read_gb_s:.0f} GB/s, products of {ceilings.tflop_s:.0f} TFLOP/s (bf16)"
    chip = trace.Multiprocessor.of(torch.cuda.get_device_properties(0))
    length, steps = scale.prompt_tokens, 16
    with open_model(device, folder, random_weights, 1, length + 2 * steps) as model:
        info = model.info
        prompt = prompt_of(1, length, info.vocab_size)
        for _ in range(2):  # loads kernels and records graphs
            model.generate(tokens=prompt, max_tokens=steps + 1, ignore_eos=True, temperature=0.0)
        alone = _record(model, torch, prompt, 1)
        whole = _record(model, torch, prompt, steps + 1)
    first = trace.after_prompt(whole, alone)
    if first == len(whole):
        raise RuntimeError("the kernels of decoding cannot be told from those of the prompt")
    shape = Shape.of(folder, info)
    bytes_each = 4 if info.dtype == "f32" else 2
    decode_rows = trace.rows_of(whole[first:], steps, chip)
    prompt_rows = trace.rows_of(alone, 1, chip)
    kv_bytes = info.kv_bytes_per_token * (length + (steps + 1) / 2)
    add_work(decode_rows, shape, 1, kv_bytes, ceilings, bytes_each)
    add_work(prompt_rows, shape, length, float(info.kv_bytes_per_token * length), ceilings, bytes_each)
    table.settings.update(model=folder.resolve().name, runs_on=info.device, dtype=info.dtype)
    decoding = _section("decode", f"A step of decoding after {length} tokens", decode_rows)
    decoding.notes.append(f"Of one sequence; the mean of {steps} steps. Kernels that overlap count twice.")
    if first != len(alone):
        decoding.notes.append(
            f"The prompt has {len(alone)} kernels by itself and {first} of the same names before these: a few of the "
            "prompt's last kernels are among those of the steps."
        )
    decoding.notes.append(
        "MB are what the kernel has to read of weights, keys and values, or to read and write where it has none of these; "
        "the ceiling is the time that reading or multiplying takes at the rates above, whichever is longer."
    )
    return [decoding, _section("prompt", f"A prompt of {length} tokens", prompt_rows)]


def marked(file: Path, table: Table) -> Section:
    """The parts of steps, from the lines of JSON that the bench `steps` prints with --profile."""
    columns = [
        Column("step", "step"), Column("part", "part"), Column("count", "count", "d"), Column("us", "us", ".1f"),
        Column("mb", "MB", ",.1f"), Column("limit_us", "least, us", ".1f"), Column("of_ceiling", "of the ceiling", ".0%"),
    ]  # fmt: skip
    section = Section("parts", "Parts of steps by the library's own marks", columns)
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        found: Dict[str, Any] = json.loads(line)
        if found.get("metric") == "ceilings":
            rates = f"reads of {found['memory_gb_s']:.0f} GB/s, products of {found['gemm_tflop_s']:.0f} TFLOP/s"
            table.settings["ceilings_of_parts"] = rates
        if "part" not in found:
            continue
        known = bool(found["bytes"] or found["flops"])
        section.rows.append(dict(
            step=found["metric"], part=found["part"], count=found["count"], us=found["us"],
            mb=found["bytes"] / 1e6 if known else None, limit_us=found["limit_us"] if known else None,
            of_ceiling=found["limit_us"] / found["us"] if known and found["us"] else None,
        ))  # fmt: skip
    if not section.rows:
        raise ValueError(f"{file} has no parts of steps: it is not what `steps --profile --json` prints")
    names = [f"{row['step']}: {row['part']}" for row in section.rows]
    series = [plots.Series("", [row["us"] for row in section.rows])]
    section.plots.append(("kernels-parts", plots.bars(section.title, "us", names, series)))
    return section


def run(device: Device, scale: Scale, folder: Optional[Path], random_weights: bool, steps: Optional[Path]) -> Table:
    """The table."""
    table = Table("kernels", "Kernels of a step of decoding and of a prompt")
    if steps is not None:
        table.sections.append(marked(steps, table))
    if device.name != "cuda":
        if steps is None:
            table.skipped = "the CPU has no kernels; --steps FILE makes a table of the parts of steps"
    elif folder is None:
        table.failures.append("--model FOLDER is missing")
    else:
        table.sections = [*profiled(device, scale, folder, random_weights, table), *table.sections]
    return table
