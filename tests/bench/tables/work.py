"""The bytes and multiplications of the kernels of a step, as far as their names and the numbers of their launches
tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional


class Ceilings(NamedTuple):
    """The rates of the device, measured in this run."""

    read_gb_s: float
    tflop_s: float


class Shape(NamedTuple):
    """Sizes of a model of Llama's family, which Qwen3 is of, too: layers, the elements of the weights of one, and of the
    output matrix."""

    layers: int
    qkv: int
    o: int
    gate_up: int
    down: int
    lm_head: int
    hidden: int
    #: Query heads times head_dim.
    width: int
    vocab: int

    @staticmethod
    def of(folder: Path, info: Any) -> Optional["Shape"]:
        """The sizes that config.json tells; None for a family with other layers, such as GPT-2."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "intermediate_size" not in config:
            return None
        hidden, inner, width = info.hidden_size, config["intermediate_size"], info.num_heads * info.head_dim
        qkv = (info.num_heads + 2 * info.num_kv_heads) * info.head_dim * hidden
        return Shape(
            info.num_layers, qkv, width * hidden, 2 * hidden * inner, hidden * inner, info.vocab_size * hidden, hidden,
            width, info.vocab_size,
        )  # fmt: skip


class Work(NamedTuple):
    """The work of all launches of a kernel in one step."""

    bytes: float
    flops: float


def weights_of(kernel: str, launches: float, shape: Shape) -> Optional[float]:
    """The elements of weights that a product's launches of one step read together."""
    layers = shape.layers
    # The last layer of a prompt goes on with one row, in kernels of other names.
    if not kernel.startswith("xserv_") and launches in (2 * layers - 2, 2 * layers):  # of cuBLAS
        return launches / 2 * (shape.o + shape.down)
    if not kernel.startswith("xserv_linear_") or "quantised" in kernel:
        return None
    if "swiglu" in kernel and launches in (layers - 1, layers):
        return launches * shape.gate_up
    if "_heads_" in kernel and launches == layers:
        return layers * shape.qkv
    if "residual" in kernel and launches == 2 * layers:
        return layers * (shape.o + shape.down)
    if "residual" in kernel and launches == layers:
        return layers * shape.down
    if "_norm_" in kernel and launches in (layers, layers + 1):
        return layers * shape.qkv + (shape.lm_head if launches > layers else 0)
    if "_norm_" in kernel and launches == 1:
        return shape.lm_head
    return None


def weights_of_last_row(kernel: str, launches: float, shape: Shape) -> Optional[float]:
    """The same of the last row of a prompt, after the attention of the last layer."""
    if "skinny_swiglu" in kernel and launches == 1:
        return shape.gate_up
    if "skinny_plain" in kernel and launches in (1, 2):
        return shape.lm_head if launches == 1 else shape.o + shape.down
    return None


def work_of(
    kernel: str, launches: float, shape: Shape, tokens: int, kv_bytes: float, bytes_each: int, blocks: int
) -> Optional[Work]:
    """Returns the work of a kernel's launches in one greedy step. `kv_bytes` is what the step's attention reads of the
    cache, `blocks` are those of a launch."""
    last = weights_of_last_row(kernel, launches, shape) if tokens > 1 else None
    if last is not None:
        return Work(last * bytes_each, 2.0 * last)
    weights = weights_of(kernel, launches, shape)
    if weights is not None:
        return Work(weights * bytes_each, 2.0 * weights * tokens)
    # The last layer of a prompt has one row only, after its attention.
    rows = launches if tokens == 1 else max(launches - 2, 0) * tokens + 2
    if kernel.startswith("xserv_attention_") and launches == shape.layers:
        projection = shape.layers * shape.o if "fused_project" in kernel else 0
        keys = 0.5 * tokens * (tokens + 1)  # that all queries see, if they are not one
        flops = 4.0 * shape.width * keys * shape.layers if tokens > 1 else 0.0
        activations = 2.0 * shape.width * tokens * shape.layers if tokens > 1 else 0.0
        return Work(kv_bytes + (projection + activations) * bytes_each, flops + 2.0 * projection * tokens)
    if kernel.startswith("xserv_add_rms_norm"):  # two arrays in, two out
        return Work(4.0 * rows * shape.hidden * bytes_each, 0.0)
    if kernel.startswith("xserv_embedding") and launches == 1:
        return Work(2.0 * tokens * shape.hidden * bytes_each, 0.0)
    if kernel.startswith("xserv_embedding_i32") and launches == 2:  # they take a prompt's last row out of two tensors
        return Work(2.0 * launches * shape.hidden * bytes_each, 0.0)
    if kernel.startswith("xserv_sample_scan") and launches == 1:
        return Work(float(shape.vocab * bytes_each), 0.0)
    if kernel.startswith("xserv_sample_choose") and launches == 1 and blocks:  # a place of 8 bytes for each block of the scan
        return Work(8.0 * blocks, 0.0)
    return None


def add_work(
    rows: List[Dict[str, Any]], shape: Optional[Shape], tokens: int, kv_bytes: float, ceilings: Ceilings, bytes_each: int
) -> None:
    """Adds bytes, and the share of what the device allows, to the rows of kernels of which they are known."""
    if shape is None:
        return
    attention = [row for row in rows if row["kernel"].startswith("xserv_attention_")]
    for row in rows:
        # Several kernels of attention share what is known of all of them together.
        shared = len(attention) > 1 and row in attention
        blocks = math.prod(int(n) for n in row["grid"].split(" x ")) if "grid" in row else 0
        sizes = (shape, tokens, kv_bytes, bytes_each, blocks)
        work = None if shared else work_of(row["kernel"], row["launches"], *sizes)
        if work is not None:
            row["mb"] = work.bytes / 1e6
            limit_us = max(work.bytes / ceilings.read_gb_s / 1e3, work.flops / ceilings.tflop_s / 1e6)
            row["of_ceiling"] = limit_us / row["us"]
