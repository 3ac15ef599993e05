"""The kernels in a trace of PyTorch's profiler, and what limits the blocks of each on a multiprocessor."""

from __future__ import annotations

import math
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

Event = Mapping[str, Any]


class Multiprocessor(NamedTuple):
    """The resources that blocks share on one multiprocessor, and how many multiprocessors a GPU has; the numbers are
    those of an H200."""

    number: int = 132
    registers: int = 65536
    shared_bytes: int = 228 << 10
    threads: int = 2048
    blocks: int = 32

    @staticmethod
    def of(properties: Any) -> "Multiprocessor":
        """That of PyTorch's device properties; what an old PyTorch does not tell is that of an H200."""
        usual = Multiprocessor()
        capability = (properties.major, properties.minor)
        return Multiprocessor(
            number=properties.multi_processor_count,
            registers=getattr(properties, "regs_per_multiprocessor", usual.registers),
            shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", usual.shared_bytes),
            threads=getattr(properties, "max_threads_per_multi_processor", usual.threads),
            blocks={(8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24}.get(capability, usual.blocks),
        )


class Occupancy(NamedTuple):
    """The number of blocks that a multiprocessor holds, and what keeps it from holding more."""

    blocks: int
    threads: int
    limit: str


#: Shared memory that the driver takes for itself of each block.
RESERVED_SHARED_BYTES = 1024


def occupancy(grid: Sequence[int], block: Sequence[int], registers: int, shared: int, chip: Multiprocessor) -> Occupancy:
    """The blocks of a kernel on a multiprocessor. Registers are given to warps, in units of 256."""
    threads = math.prod(block)
    warps = -(-threads // 32)
    registers_of_warp = -(-max(registers, 1) * 32 // 256) * 256
    room = {
        "registers": chip.registers // (registers_of_warp * warps),
        "shared memory": chip.shared_bytes // (shared + RESERVED_SHARED_BYTES),
        "threads": chip.threads // (warps * 32),
        "blocks": chip.blocks,
        "grid": -(-math.prod(grid) // chip.number),
    }
    # A grid that is too small limits only if nothing else does.
    limit = min(room, key=lambda name: (room[name], name == "grid"))
    return Occupancy(room[limit], room[limit] * threads, limit)


def kernels_of(trace: Mapping[str, Any]) -> List[Event]:
    """The kernels of a Chrome trace, in the order in which they began."""
    found = [event for event in trace.get("traceEvents", []) if event.get("cat") == "kernel"]
    return sorted(found, key=lambda event: float(event["ts"]))


def short(name: str) -> str:
    """The name of a kernel without the types of its arguments and templates."""
    return re.sub(r"[<(].*", "", name.replace("void ", "")).split("::")[-1][:80]


def after_prompt(whole: Sequence[Event], prompt: Sequence[Event]) -> int:
    """Returns where the steps of decoding begin in the kernels of a request, given those of its prompt alone."""
    names = [short(event["name"]) for event in prompt]
    same = 0
    while same < min(len(whole), len(names)) and short(whole[same]["name"]) == names[same]:
        same += 1
    return same


def rows_of(events: Sequence[Event], steps: int, chip: Multiprocessor) -> List[Dict[str, Any]]:
    """A row for each kernel, the one that takes the longest first; times are those of one step."""
    groups: Dict[str, List[Event]] = {}
    for event in events:
        groups.setdefault(short(event["name"]), []).append(event)
    total = sum(float(event["dur"]) for event in events)
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: -sum(float(event["dur"]) for event in item[1])):
        took = sum(float(event["dur"]) for event in group)
        row: Dict[str, Any] = dict(kernel=name, launches=len(group) / steps, us=took / steps, of_step=took / total)
        row["us_each"] = took / len(group)
        given = group[0].get("args", {})
        if {"grid", "block", "registers per thread", "shared memory"} <= set(given):
            registers, shared = int(given["registers per thread"]), int(given["shared memory"])
            found = occupancy(given["grid"], given["block"], registers, shared, chip)
            row.update(
                grid=" x ".join(map(str, given["grid"])), block=" x ".join(map(str, given["block"])), registers=registers,
                shared_kib=shared / 1024, blocks_there=found.blocks, threads_there=found.threads, limit=found.limit,
            )  # fmt: skip
        rows.append(row)
    return rows
