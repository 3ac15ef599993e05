"""The device that a table is about: its tensors, contexts, clock and name.

On the CPU tensors are NumPy's, in bf16, which NumPy does not have, the library's own; on CUDA they are PyTorch's.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
import numpy.typing as npt
import xserv
from xserv import ops

from tables.timing import Call, event_time, graph_time

Floats = npt.NDArray[np.float64]

DTYPES = ("f32", "f16", "bf16")
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
#: The number of random values that large tensors repeat.
PATTERN = 1 << 20


class Device:
    """The properties that all devices have in common."""

    name: str

    def describe(self) -> Dict[str, Any]:
        """Returns the facts about the machine that a reader has to know."""
        raise NotImplementedError

    def context(self) -> ops.Context:
        """A context for work in the order in which it is asked for."""
        raise NotImplementedError

    def fresh_context(self, max_memory_bytes: int = 0) -> ops.Context:
        """A context that has not allocated anything yet."""
        raise NotImplementedError

    def empty(self, dtype: str, shape: Sequence[int]) -> Any:
        """A tensor whose content is arbitrary; dtype may be i32, too."""
        raise NotImplementedError

    def random(self, dtype: str, shape: Sequence[int], seed: int = 0) -> Any:
        """Normal random numbers; large tensors may repeat them."""
        raise NotImplementedError

    def put(self, values: Floats, dtype: str) -> Any:
        """The values, rounded to the type."""
        raise NotImplementedError

    def integers(self, values: Sequence[int]) -> Any:
        """A tensor of i32."""
        raise NotImplementedError

    def get(self, tensor: Any) -> Floats:
        """The elements, after all work that was queued."""
        raise NotImplementedError

    def milliseconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """The median time of a call; `calls` are the same work on buffers of their own, taken in turn."""
        raise NotImplementedError

    def buffer_sets(self, num_bytes: int) -> int:
        """Returns the number of sets of buffers of this size that together are several times the cache."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives memory back that nothing uses any more."""


def cpu_name() -> str:
    """The processor, as Linux calls it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Cpu(Device):
    """The processor of this machine."""

    name = "cpu"

    def __init__(self, num_threads: int = 0) -> None:
        self._threads = num_threads
        self._context = ops.Context("cpu", num_threads=num_threads)

    def describe(self) -> Dict[str, Any]:
        threads = self._threads or len(os.sched_getaffinity(0))
        return dict(device="cpu", processor=cpu_name(), threads=threads)

    def context(self) -> ops.Context:
        return self._context

    def fresh_context(self, max_memory_bytes: int = 0) -> ops.Context:
        return ops.Context("cpu", num_threads=self._threads, max_memory_bytes=max_memory_bytes)

    def empty(self, dtype: str, shape: Sequence[int]) -> Any:
        if dtype == "bf16":
            return self._context.tensor("bf16", shape)
        return np.empty(shape, dict(f32=np.float32, f16=np.float16, i32=np.int32)[dtype])

    def random(self, dtype: str, shape: Sequence[int], seed: int = 0) -> Any:
        count = math.prod(shape)
        pattern = np.random.default_rng(seed).standard_normal(min(count, PATTERN), dtype=np.float32)
        return self._cast(np.resize(pattern, tuple(shape)), dtype)

    def put(self, values: Floats, dtype: str) -> Any:
        return self._cast(np.ascontiguousarray(values, dtype=np.float32), dtype)

    def _cast(self, values: npt.NDArray[np.float32], dtype: str) -> Any:
        if dtype == "f32":
            return values
        if dtype == "f16":
            return values.astype(np.float16)
        made = self.empty(dtype, values.shape)
        self._context.cast(values, made)
        return made

    def integers(self, values: Sequence[int]) -> Any:
        return np.array(values, np.int32)

    def get(self, tensor: Any) -> Floats:
        if isinstance(tensor, xserv.Tensor):
            plain = np.empty(tensor.shape, np.float32)
            self._context.cast(tensor, plain)
            return plain.astype(np.float64)
        return np.asarray(tensor, dtype=np.float64)

    def milliseconds(self, calls: Sequence[Call], budget_s: float) -> float:
        calls[0]()  # loads what the first call loads
        times: List[float] = []
        began = time.perf_counter()
        while not times or (time.perf_counter() - began < budget_s and len(times) < 1000):
            start = time.perf_counter()
            calls[len(times) % len(calls)]()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def buffer_sets(self, num_bytes: int) -> int:
        # Caches of processors are found in many forms; 64 MiB are several times the second level of all.
        return max(1, min(8, math.ceil((64 << 20) / max(1, num_bytes))))


class Cuda(Device):
    """An NVIDIA GPU, the first one."""

    name = "cuda"

    def __init__(self) -> None:
        if ops.cuda_device_count() == 0:
            raise ValueError("--device cuda: the library finds no CUDA device (no GPU, no driver, or built without kernels)")
        try:
            self.torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ValueError(f"--device cuda needs PyTorch with CUDA, for its tensors and its clock: {error}") from error
        if not self.torch.cuda.is_available():
            raise ValueError("--device cuda: this PyTorch cannot use the GPU")
        torch = self.torch
        self.dtypes = dict(f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16, i32=torch.int32)
        self._contexts: Dict[int, ops.Context] = {}

    def describe(self) -> Dict[str, Any]:
        info = ops.cuda_device_info()
        name = bytes(info.name).rstrip(b"\0").decode()
        capability = f"{info.compute_capability_major}.{info.compute_capability_minor}"
        return dict(
            device="cuda", card=name, multiprocessors=info.num_multiprocessors, compute_capability=capability,
            memory_gib=round(info.memory_bytes / 2**30, 1), torch=self.torch.__version__,
        )  # fmt: skip

    def context(self) -> ops.Context:
        """A context on PyTorch's current stream: the one that is captured, while one is."""
        stream = self.torch.cuda.current_stream().cuda_stream
        if stream not in self._contexts:
            self._contexts[stream] = ops.Context("cuda", stream=stream)
        return self._contexts[stream]

    def fresh_context(self, max_memory_bytes: int = 0) -> ops.Context:
        stream = self.torch.cuda.current_stream().cuda_stream
        return ops.Context("cuda", stream=stream, max_memory_bytes=max_memory_bytes)

    def empty(self, dtype: str, shape: Sequence[int]) -> Any:
        return self.torch.empty(tuple(shape), dtype=self.dtypes[dtype], device="cuda")

    def random(self, dtype: str, shape: Sequence[int], seed: int = 0) -> Any:
        generator = self.torch.Generator(device="cuda")
        generator.manual_seed(seed)
        return self.torch.randn(tuple(shape), dtype=self.dtypes[dtype], device="cuda", generator=generator)

    def put(self, values: Floats, dtype: str) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(values)).cuda().to(self.dtypes[dtype])

    def integers(self, values: Sequence[int]) -> Any:
        return self.torch.tensor(list(values), dtype=self.torch.int32, device="cuda")

    def get(self, tensor: Any) -> Floats:
        self.context().synchronize()
        values: Floats = tensor.to(self.torch.float64).cpu().numpy()
        return values

    def milliseconds(self, calls: Sequence[Call], budget_s: float) -> float:
        calls[0]()
        once = event_time(calls[-1])
        if once > 20:
            more = min(3, int(budget_s * 1e3 / once))
            return event_time(calls[0], more) if more else once
        return graph_time(calls, min_ms=min(8.0, budget_s * 1e3 / 10), repetitions=7)

    def buffer_sets(self, num_bytes: int) -> int:
        return max(2, min(16, math.ceil(200e6 / max(1, num_bytes))))

    def release(self) -> None:
        self.torch.cuda.synchronize()
        for context in self._contexts.values():
            context.trim()
        self.torch.cuda.empty_cache()


def open_device(name: str, num_threads: int = 0) -> Device:
    """Returns the device of this name; raises ValueError where it cannot be used."""
    return Cuda() if name == "cuda" else Cpu(num_threads)
