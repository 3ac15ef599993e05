"""Times of calls on an NVIDIA GPU, by events on PyTorch's streams."""

from __future__ import annotations

import importlib
import statistics
from typing import Any, Callable, Dict, List, Sequence

Call = Callable[[], Any]
_STREAMS: Dict[str, Any] = {}


def graph_time(calls: Sequence[Call], min_ms: float = 8.0, repetitions: int = 9, most: int = 400) -> float:
    """Median milliseconds of a call; `calls` has one for each buffer set, taken in turn in one CUDA graph, so that
    neither launches nor data in the cache count."""
    torch: Any = importlib.import_module("torch")
    # One for all: whoever computes has a context for each stream.
    if "graphs" not in _STREAMS:
        _STREAMS["graphs"] = torch.cuda.Stream()
    stream = _STREAMS["graphs"]
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for call in [*calls, *calls[:2]]:
            call()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
    estimate = max(begin.elapsed_time(end) / len(calls), 1e-3)
    torch.cuda.current_stream().wait_stream(stream)
    rounds = max(1, min(int(min_ms / estimate / len(calls)) + 1, max(1, most // len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    times: List[float] = []
    for _ in range(repetitions):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (rounds * len(calls)))
    return statistics.median(times)


def event_time(call: Call, repetitions: int = 1) -> float:
    """Median milliseconds of a call that takes many times as long as a launch."""
    torch: Any = importlib.import_module("torch")
    times: List[float] = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
