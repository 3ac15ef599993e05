"""How long calls take, and what they are given."""

from __future__ import annotations

import statistics
import time
from typing import Callable, List

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def synchronize(device: str) -> None:
    """Waits for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def stream_of(device: str) -> int | None:
    """The stream of PyTorch on which a context has to queue its work, so that events see it."""
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else None


def seconds(device: str, call: Callable[[], None], budget: float = 0.25, most: int = 200) -> float:
    """The median time of a call, in the number of calls that fit into `budget` seconds; three at least."""
    begin = time.perf_counter()
    call()
    synchronize(device)
    first = time.perf_counter() - begin
    if first > 2 * budget:
        return first
    count = max(3, min(most, int(budget / max(first, 1e-6))))
    if device == "cpu":
        times: List[float] = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def normals(device: str, dtype: str, *shape: int) -> torch.Tensor:
    """Random numbers, the same ones in every run."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return numbers.to(DTYPES[dtype]).to(device)
