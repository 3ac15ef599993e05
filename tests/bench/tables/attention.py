"""Attention: naive, flash and split_kv side by side, the memory that they take, and how exact flash is."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import plots
from xserv import OutOfMemoryError, UnsupportedError

from tables.device import ELEMENT_BYTES, Device, Floats
from tables.report import Column, Row, Section, Table
from tables.scale import Scale
from tables.units import error_in_units

#: Types of the timed tensors: those of models on the device.
DTYPE = {"cpu": "f32", "cuda": "bf16"}
def bound_of(dtype: str, keys: int) -> float:
    """Units of rounding that an element of flash may be off. The mean of n normal values is as small as 1 / sqrt(n),
    but is added up in f32 from numbers that are not, so that its units of f32 grow with sqrt(n). Those of 16-bit types
    do not: there CUDA rounds the weights."""
    return 4 * math.sqrt(keys) if dtype == "f32" else 8.0


ACCURACY_GROUPS = (1, 4, 8)
ACCURACY_HEADS = 8

MIB = 1 << 20


def flops(heads: int, head_dim: int, q_len: int, kv_len: int, causal: bool) -> float:
    """Multiplications and additions of both products; with causal those of the keys that are seen."""
    pairs = q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2 if causal else q_len * kv_len
    return 4.0 * heads * head_dim * pairs


class Measurer:
    """Times attention, and leaves out what would take too long, as what was timed before tells."""

    def __init__(self, device: Device, scale: Scale) -> None:
        self.device, self.scale = device, scale
        self.rates: Dict[Tuple[str, bool], float] = {}

    def rows(self, q_len: int, kv_len: int, batch: int, backends: Tuple[str, ...], causal: bool) -> List[Row]:
        """One row for each backend."""
        device, dtype = self.device, DTYPE[self.device.name]
        heads, kv_heads = self.scale.heads
        dim = self.scale.head_dim
        num_bytes = ELEMENT_BYTES[dtype] * batch * dim * 2 * (heads * q_len + kv_heads * kv_len)
        num_sets = min(device.buffer_sets(num_bytes), self.scale.most_buffer_sets)
        shapes = ((batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, dim))
        sets = [
            [*(device.random(dtype, shape, 4 * i + j) for j, shape in enumerate(shapes)), device.empty(dtype, shapes[0])]
            for i in range(num_sets)
        ]
        work = batch * flops(heads, dim, q_len, kv_len, causal)
        rows = []
        for backend in backends:
            row: Row = dict(batch=batch, queries=q_len, keys=kv_len, backend=backend, dtype=dtype)
            # The scores of naive, where they are all in memory: a size that cannot fit is asked for, to be refused.
            is_too_large = backend == "naive" and 4 * batch * heads * q_len * kv_len > self.scale.max_memory_bytes
            is_refused = device.name == "cuda" and is_too_large
            row.update(self._measure(backend, sets, causal, q_len > 1, work, is_refused))
            if q_len == 1 and "ms" in row:  # decoding reads its keys and values, and does little else
                row["gb_s"] = num_bytes / row["ms"] / 1e6
            rows.append(row)
        return rows

    def _measure(
        self, backend: Any, sets: List[List[Any]], causal: bool, is_prompt: bool, work: float, is_refused: bool
    ) -> Row:
        device, kind = self.device, (backend, is_prompt)
        seconds = work / self.rates[kind] if kind in self.rates and not is_refused else 0.0
        if seconds > self.scale.longest_call_s:
            return dict(note=f"left out: about {seconds:.2g} s a call")
        try:
            with device.fresh_context(self.scale.max_memory_bytes) as context:
                context.attention(*sets[0], causal=causal, backend=backend)
                context.synchronize()
                peak = context.memory_stats()["peak"]
        except OutOfMemoryError as error:
            return dict(note=f"refused: {error}")
        except UnsupportedError as error:
            return dict(note=f"not there: {error}")

        def attend(q: Any, k: Any, v: Any, out: Any) -> None:
            device.context().attention(q, k, v, out, causal=causal, backend=backend)

        calls = [lambda s=s: attend(*s) for s in sets]
        milliseconds = device.milliseconds(calls, self.scale.budget_s)
        self.rates[kind] = work / milliseconds * 1e3
        return dict(ms=milliseconds, tflop_s=work / milliseconds / 1e9, workspace_mib=peak / MIB)


def reference(q: Floats, k: Floats, v: Floats, causal: bool, rows: List[int]) -> Floats:
    """Attention of some queries of [length, heads, head_dim] in float64."""
    length, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.empty((len(rows), heads, dim))
    for begin in range(0, len(rows), 512):
        part = np.array(rows[begin : begin + 512])
        for head in range(heads):
            scores = q[part, head] @ k[:, head // group].T / math.sqrt(dim)
            if causal:
                scores[np.arange(k.shape[0])[None, :] > part[:, None] + k.shape[0] - length] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[begin : begin + len(part), head] = weights @ v[:, head // group] / weights.sum(axis=1, keepdims=True)
    return out


def reference_on_gpu(device: Any, q: Any, k: Any, v: Any, causal: bool) -> Floats:
    """The same of all queries by PyTorch in float64, head by head and in pieces."""
    torch = device.torch
    length, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.empty((length, heads, dim), dtype=torch.float64, device="cuda")
    keys = torch.arange(k.shape[0], device="cuda")
    for head in range(heads):
        k64, v64 = k[:, head // group].double(), v[:, head // group].double()
        for begin in range(0, length, 2048):
            scores = q[begin : begin + 2048, head].double() @ k64.T / math.sqrt(dim)
            if causal:
                queries = torch.arange(begin, begin + scores.shape[0], device="cuda") + k.shape[0] - length
                scores.masked_fill_(keys[None, :] > queries[:, None], -math.inf)
            out[begin : begin + 2048, head] = torch.softmax(scores, -1) @ v64
    values: Floats = out.cpu().numpy()
    return values


def accuracy(device: Device, scale: Scale, table: Table) -> Section:
    """Measures how far flash is from float64."""
    columns = [
        Column("queries", "queries", "d"), Column("group", "query heads per KV head", "d"), Column("causal", "causal"),
        Column("dtype", "type"), Column("compared", "elements compared", ",d"), Column("max_units", "max, units"),
        Column("rms_units", "rms, units"), Column("max_error", "max, absolute"), Column("bound", "right up to", ".4g"),
        Column("outcome", "outcome"),
    ]  # fmt: skip
    section = Section("accuracy", "Accuracy of flash against float64", columns)
    dim = scale.head_dim
    types = ("f32",) if device.name == "cpu" else ("f32", "bf16")
    for length in scale.accuracy_lengths:
        rows = sorted({*range(0, length, scale.accuracy_stride), length - 1})
        for group in ACCURACY_GROUPS:
            for causal in (False, True):
                for dtype in types:
                    kv_heads = ACCURACY_HEADS // group
                    q = device.random(dtype, (1, length, ACCURACY_HEADS, dim), 1)
                    k, v = (device.random(dtype, (1, length, kv_heads, dim), seed) for seed in (2, 3))
                    out = device.empty(dtype, (1, length, ACCURACY_HEADS, dim))
                    device.context().attention(q, k, v, out, causal=causal, backend="flash")
                    got = device.get(out)[0][rows]
                    if device.name == "cuda":
                        want = reference_on_gpu(device, q[0], k[0], v[0], causal)[rows]
                    else:
                        q64, k64, v64 = (device.get(x)[0] for x in (q, k, v))
                        want = reference(q64, k64, v64, causal, rows)
                    found = error_in_units(got, want, dtype, "row")
                    is_right = found.max_units <= bound_of(dtype, length)
                    section.rows.append(dict(
                        queries=length, group=group, causal=causal, dtype=dtype, compared=got.size,
                        max_units=found.max_units, rms_units=found.rms_units, max_error=found.max_error,
                        bound=bound_of(dtype, length), outcome="right" if is_right else "WRONG",
                    ))  # fmt: skip
                    if not is_right:
                        table.failures.append(
                            f"flash, {length} queries, {dtype}, {group} query heads per KV head, causal {causal}: "
                            f"{found.max_units:.3g} units of rounding, of which {bound_of(dtype, length):g} are right"
                        )
            device.release()
    every = "every query" if scale.accuracy_stride == 1 else f"one of {scale.accuracy_stride} queries and the last one"
    section.notes.append(
        f"{ACCURACY_HEADS} query heads of {dim}; {every}. A unit is the distance of neighbouring numbers of the type at "
        "the size of the reference, or of the root mean square of its row where that is larger."
    )
    groups = [f"{r['queries']}, {r['group']}:1, {'causal' if r['causal'] else 'all keys'}, {r['dtype']}" for r in section.rows]
    series = [plots.Series("max", [r["max_units"] for r in section.rows])]
    series.append(plots.Series("rms", [r["rms_units"] for r in section.rows]))
    section.plots.append(("attention-accuracy", plots.bars("Flash against float64", "units of rounding", groups, series)))
    return section


def _picture(title: str, y_label: str, rows: List[Row], key: str, lengths: Tuple[int, ...], by: str) -> str:
    def value(name: str, length: int) -> Optional[float]:
        found = [row.get(key) for row in rows if row["backend"] == name and row["keys"] == length and row["batch"] == 1]
        return found[0] if found else None

    names = list(dict.fromkeys(row["backend"] for row in rows))
    series = [plots.Series(name, [value(name, length) for length in lengths]) for name in names]
    x = [float(length) for length in lengths]
    return plots.lines(title, by, y_label, x, series, log_x=True, log_y=True, x_name=lambda n: f"{n:.0f}")


def run(device: Device, scale: Scale) -> Table:
    """The table."""
    heads, kv_heads = scale.heads
    table = Table("attention", "Attention", dict(
        heads=f"{heads} query heads, {kv_heads} KV heads of {scale.head_dim}", type=DTYPE[device.name],
        limit=f"a context may take {scale.max_memory_bytes / 2**30:.3g} GiB of work space",
        longest_call_s=scale.longest_call_s,
    ))  # fmt: skip
    columns = [
        Column("batch", "sequences", "d"), Column("queries", "queries each", "d"), Column("keys", "keys", "d"),
        Column("backend", "backend"), Column("ms", "ms"), Column("tflop_s", "TFLOP/s"), Column("gb_s", "GB/s", ".0f"),
        Column("workspace_mib", "work space, MiB", ",.2f"), Column("note", "note"),
    ]  # fmt: skip
    measurer = Measurer(device, scale)
    prompts = Section("prompts", "Prompts, causal", [column for column in columns if column.key != "gb_s"])
    for length in scale.lengths:
        prompts.rows += measurer.rows(length, length, 1, ("naive", "flash"), True)
        device.release()
    decoding = Section("decoding", "One query for each sequence", columns)
    for batch in (1, 8):
        for length in scale.lengths:
            decoding.rows += measurer.rows(1, length, batch, ("naive", "flash", "split_kv"), False)
        device.release()
    prompts.notes.append("TFLOP/s count the keys that a query sees. The work space is the most that a context of its own took.")
    decoding.notes.append("GB/s count queries, keys, values and results once.")
    by, lengths = "tokens", scale.lengths
    prompts.plots = [
        ("attention", _picture(f"Prompts, {device.name}", "TFLOP/s", prompts.rows, "tflop_s", lengths, by)),
        ("attention-memory", _picture("Work space of prompts", "MiB", prompts.rows, "workspace_mib", lengths, by)),
    ]
    picture = _picture(f"One query, {device.name}", "ms", decoding.rows, "ms", lengths, "keys")
    decoding.plots = [("attention-decoding", picture)]
    table.sections = [prompts, decoding, accuracy(device, scale, table)]
    return table
