"""Matrix products: every backend side by side, over squares and over the shapes of models."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import plots
from xserv import UnsupportedError

from tables.device import ELEMENT_BYTES, Device
from tables.report import Column, Row, Section, Table
from tables.scale import Scale

#: The backends that a device may have; one that is not there is a word in its cells.
BACKENDS = {"cpu": ("naive", "blocked"), "cuda": ("naive", "tiled", "cublas", "tensor_core")}
#: Rows and columns of the weights as they are stored, of Qwen3-0.6B and Qwen3-8B.
MODEL_SHAPES: Dict[str, Tuple[int, int]] = {
    "0.6B qkv": (4096, 1024), "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072),
    "0.6B lm_head": (151936, 1024),
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288),
    "8B lm_head": (151936, 4096),
}  # fmt: skip
#: The output matrix multiplies one position of each sequence only.
MOST_OUTPUT_ROWS = 32


class Product(NamedTuple):
    """C [m, n] = A [m, k] B."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


class Measurer:
    """Times products, and leaves out those that would take too long, as the ones before them tell."""

    def __init__(self, device: Device, scale: Scale) -> None:
        self.device, self.scale = device, scale
        self.rates: Dict[Tuple[str, str], float] = {}

    def row(self, product: Product, dtype: str) -> Row:
        """TFLOP/s of every backend, or why there is none."""
        device, (m, n, k) = self.device, product[1:]
        row: Row = dict(shape=product.name, m=m, n=n, k=k, dtype=dtype)
        wanted = []
        for backend in BACKENDS[device.name]:
            rate = self.rates.get((backend, dtype))
            seconds = product.flops / rate if rate else 0.0
            if seconds > self.scale.longest_call_s:
                row[backend] = f"left out: about {seconds:.2g} s a product"
            else:
                wanted.append(backend)
        if not wanted:
            return row
        num_bytes = ELEMENT_BYTES[dtype] * (m * k + n * k + m * n)
        sets = [
            (device.random(dtype, (m, k), 2 * i), device.random(dtype, (n, k), 2 * i + 1), device.empty(dtype, (m, n)))
            for i in range(min(device.buffer_sets(num_bytes), self.scale.most_buffer_sets))
        ]
        for backend in wanted:
            row[backend] = self._time(product, dtype, backend, sets)
        del sets
        return row

    def _time(self, product: Product, dtype: str, backend: Any, sets: List[Tuple[Any, Any, Any]]) -> Any:
        device = self.device

        def multiply(a: Any, b: Any, c: Any) -> None:
            device.context().gemm(a, b, c, transpose_b=True, backend=backend)

        try:
            milliseconds = device.milliseconds([lambda s=s: multiply(*s) for s in sets], self.scale.budget_s)  # type: ignore[misc]
        except UnsupportedError as error:
            return f"not there: {error}" if backend == "cublas" else "not for this type"
        rate = product.flops / milliseconds * 1e3
        if product.m > 8:  # rows alone are no measure of products
            self.rates[backend, dtype] = rate
        return rate / 1e12


def best(row: Row, backends: Tuple[str, ...]) -> Optional[float]:
    """The best rate of a row."""
    rates = [row[backend] for backend in backends if isinstance(row.get(backend), float)]
    return max(rates) if rates else None


def ceilings(rows: List[Row], device: Device) -> Dict[str, float]:
    """The rate of products of each type: on CUDA cuBLAS's at the largest square, else the best that was measured."""
    found: Dict[str, float] = {}
    for row in rows:
        rate = row.get("cublas") if device.name == "cuda" and row["m"] == max(r["m"] for r in rows) else None
        if isinstance(rate, float):
            found[row["dtype"]] = rate
    for dtype in {row["dtype"] for row in rows} - set(found):
        rates = [best(row, BACKENDS[device.name]) for row in rows if row["dtype"] == dtype]
        found[dtype] = max((rate for rate in rates if rate is not None), default=float("nan"))
    return found


def _section(name: str, title: str, rows: List[Row], device: Device, ceiling: Dict[str, float]) -> Section:
    backends = BACKENDS[device.name]
    for row in rows:
        for backend in backends:
            if isinstance(row.get(backend), float):
                row[f"{backend}_share"] = row[backend] / ceiling[row["dtype"]]
    columns = [Column("shape", "shape"), Column("m", "m", "d"), Column("n", "n", "d"), Column("k", "k", "d")]
    columns.append(Column("dtype", "type"))
    for backend in backends:
        columns += [Column(backend, f"{backend}, TFLOP/s"), Column(f"{backend}_share", "share", ".1%")]
    return Section(name, title, columns, rows)


def _value(rows: List[Row], dtype: str, m: int, backend: str) -> Optional[float]:
    found = [row.get(backend) for row in rows if row["dtype"] == dtype and row["m"] == m]
    return found[0] if found and isinstance(found[0], float) else None


def run(device: Device, scale: Scale) -> Table:
    """The table."""
    measurer = Measurer(device, scale)
    table = Table("gemm", "Matrix products", dict(
        multiplied="C = A B^T of random normal numbers, as a layer multiplies by its weights",
        time="median; buffers in turn, together larger than the cache",
        longest_product_s=scale.longest_call_s,
    ))  # fmt: skip
    backends = BACKENDS[device.name]
    squares = [
        measurer.row(Product(f"{size}²", size, size, size), dtype) for dtype in scale.gemm_types for size in scale.squares
    ]
    device.release()
    ceiling = ceilings(squares, device)
    of_models: List[Row] = []
    for dtype in scale.gemm_types:
        for name, (n, k) in MODEL_SHAPES.items():
            if n * k > scale.largest_weight:
                continue
            for tokens in scale.tokens:
                if "lm_head" not in name or tokens <= MOST_OUTPUT_ROWS:
                    of_models.append(measurer.row(Product(f"{name} x {tokens}", tokens, n, k), dtype))
            device.release()
    if device.name == "cpu":
        ceiling = ceilings(squares + of_models, device)
    table.settings["rate_of_products"] = ", ".join(f"{dtype} {rate:.3g} TFLOP/s" for dtype, rate in ceiling.items())
    first = _section("squares", "Squares", squares, device, ceiling)
    sizes = [float(size) for size in scale.squares]
    series = [
        plots.Series(f"{backend} {dtype}", [_value(squares, dtype, size, backend) for size in scale.squares])
        for dtype in scale.gemm_types
        for backend in backends
    ]
    series = [one for one in series if any(value is not None for value in one.values)]
    picture = plots.lines(
        f"Products of squares, {device.name}", "rows and columns", "TFLOP/s", sizes, series, log_x=True, log_y=True,
        x_name=lambda size: f"{size:.0f}",
    )  # fmt: skip
    first.plots.append(("gemm", picture))
    second = _section("models", "Shapes of Qwen3-0.6B and Qwen3-8B", of_models, device, ceiling)
    for dtype in scale.gemm_types:
        rows = [row for row in of_models if row["dtype"] == dtype]
        bars = [
            plots.Series(backend, [row[backend] if isinstance(row.get(backend), float) else None for row in rows])
            for backend in backends
        ]
        if rows:
            title = f"Products of models, {dtype}, {device.name}"
            picture = plots.bars(title, "TFLOP/s", [row["shape"] for row in rows], bars, log=True)
            second.plots.append((f"gemm-models-{dtype}", picture))
    table.sections = [first, second]
    if device.name == "cuda" and not any(isinstance(row.get("cublas"), float) for row in squares):
        first.notes.append("cuBLAS is not installed where the library looks for it; the shares are of the best backend.")
    shares = [row[f"{backends[-1]}_share"] for row in of_models if f"{backends[-1]}_share" in row]
    if shares:
        second.notes.append(f"The median share of {backends[-1]} is {statistics.median(shares):.1%}.")
    return table
