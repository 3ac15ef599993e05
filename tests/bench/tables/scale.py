"""The amount that is measured: everything, less of it in little time, or as little as shows that it works."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple


class Scale(NamedTuple):
    """Sizes and limits of all tables."""

    #: Seconds to spend on one measurement.
    budget_s: float
    #: Seconds that one call may take; what would take longer is left out.
    longest_call_s: float
    most_buffer_sets: int
    #: gemm: rows of squares, types, tokens for the shapes of models, and the most elements of a weight.
    squares: Tuple[int, ...]
    gemm_types: Tuple[str, ...]
    tokens: Tuple[int, ...]
    largest_weight: int
    #: attention: lengths of prompts and contexts, query and KV heads, and the most memory of a context.
    lengths: Tuple[int, ...]
    heads: Tuple[int, int]
    head_dim: int
    max_memory_bytes: int
    #: attention: the numbers of queries whose results are compared, and of how many one is.
    accuracy_lengths: Tuple[int, ...]
    accuracy_stride: int
    #: scheduling: requests at once, tokens of prompts and answers, and repeats.
    concurrency: Tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    repeats: int


_CPU_FULL = Scale(
    budget_s=0.4, longest_call_s=4.0, most_buffer_sets=4,
    squares=(128, 256, 512, 1024, 2048, 4096, 8192), gemm_types=("f32", "bf16"), tokens=(1, 32, 512),
    largest_weight=110_000_000,
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768), heads=(16, 8), head_dim=128, max_memory_bytes=2 << 30,
    accuracy_lengths=(4096, 8192), accuracy_stride=64,
    concurrency=(1, 2, 4, 8), prompt_tokens=256, answer_tokens=32, repeats=3,
)  # fmt: skip
_CPU_QUICK = _CPU_FULL._replace(
    budget_s=0.05, longest_call_s=0.5, tokens=(1, 32), largest_weight=10_000_000, accuracy_lengths=(4096,),
    prompt_tokens=64, answer_tokens=16, repeats=1,
)  # fmt: skip
_CUDA_FULL = Scale(
    budget_s=0.2, longest_call_s=2.0, most_buffer_sets=16,
    squares=(128, 256, 512, 1024, 2048, 4096, 8192), gemm_types=("f32", "bf16"), tokens=(1, 32, 512, 2048),
    largest_weight=1 << 40,
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768), heads=(32, 8), head_dim=128, max_memory_bytes=16 << 30,
    accuracy_lengths=(4096, 8192), accuracy_stride=1,
    concurrency=(1, 2, 4, 8), prompt_tokens=512, answer_tokens=128, repeats=5,
)  # fmt: skip
_CUDA_QUICK = _CUDA_FULL._replace(budget_s=0.08, longest_call_s=0.5, tokens=(1, 512), answer_tokens=64, repeats=3)
_TINY = _CPU_QUICK._replace(
    budget_s=0.0, longest_call_s=0.3, most_buffer_sets=1, squares=(16, 48), tokens=(1, 2), largest_weight=2_200_000,
    lengths=(32, 64), heads=(4, 2), head_dim=64, max_memory_bytes=1 << 20, accuracy_lengths=(96,), accuracy_stride=16,
    concurrency=(1, 2), prompt_tokens=8, answer_tokens=4,
)  # fmt: skip

SCALES: Dict[Tuple[str, str], Scale] = {
    ("cpu", "full"): _CPU_FULL,
    ("cpu", "quick"): _CPU_QUICK,
    ("cpu", "tiny"): _TINY,
    ("cuda", "full"): _CUDA_FULL,
    ("cuda", "quick"): _CUDA_QUICK,
    ("cuda", "tiny"): _TINY,
}
