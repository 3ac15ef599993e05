"""Every operator with numbers to work on, and its reference in float64."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from xserv import UnsupportedError, ops

from tables.attention import reference as attention_reference
from tables.device import DTYPES, Device, Floats
from tables.units import Measure

ROWS, WIDTH = 37, 1031
EPS = 1e-6


class Outcome(NamedTuple):
    """A result and what it should be."""

    got: Floats
    want: Floats


class Case(NamedTuple):
    """One operator in one type."""

    operator: str
    what: str
    #: The type of the result, in whose units errors are counted.
    dtype: str
    measure: Measure
    #: Units that an element may be off; 0: every bit has to be right.
    bound: float
    run: Callable[[], Outcome]


#: Units that an element may be off, of f32 and of the 16-bit types: attention has more, as CUDA rounds its weights.
#: A sum that is rounded to f32 and then to 16 bits is off by hardly more than half a unit. Products with quantised
#: matrices round the inputs to integers of 16 bits on the CPU, and the numbers of the matrix to the type on CUDA.
BOUNDS: Dict[str, Tuple[float, float]] = {
    "exact": (0.0, 0.0), "rounded": (0.5, 0.501), "rotation": (8.0, 1.0), "function": (64.0, 1.0),
    "sum": (128.0, 1.5), "attention": (128.0, 8.0), "quantised": (2048.0, 4.0),
}  # fmt: skip


def bound(kind: str, dtype: str) -> float:
    """The bound of a kind of operator."""
    return BOUNDS[kind][0 if dtype == "f32" else 1]


class Numbers:
    """Normal random numbers as the type holds them: a tensor, and its elements in float64."""

    def __init__(self, device: Device, dtype: str, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._random = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tuple[Any, Floats]:
        tensor = self.device.put(self._random.standard_normal(shape) * scale, self.dtype)
        return tensor, self.device.get(tensor)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    found: Floats = np.exp(-np.logaddexp(0.0, -x))
    return found


_erf = np.vectorize(math.erf, otypes=[float])


def gelu_tanh(x: Floats) -> Floats:
    """GPT-2's GELU."""
    found: Floats = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


def _one(device: Device, dtype: str, want: Floats, call: Callable[[Any], None]) -> Outcome:
    out = device.empty(dtype, want.shape)
    call(out)
    return Outcome(device.get(out), want)


def _of_rows(device: Device, dtype: str) -> Iterator[Case]:
    make = Numbers(device, dtype, 1)
    context = device.context
    x, x64 = make(ROWS, WIDTH, scale=2.0)
    y, y64 = make(ROWS, WIDTH)
    weight, weight64 = make(WIDTH)
    bias, bias64 = make(WIDTH)
    shape = f"{ROWS} x {WIDTH}"

    def rms(values: Floats) -> Floats:
        found: Floats = values / np.sqrt(np.mean(values**2, -1, keepdims=True) + EPS) * weight64
        return found

    centred = x64 - x64.mean(-1, keepdims=True)
    layer = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + EPS) * weight64 + bias64
    weights = np.exp(x64 - x64.max(-1, keepdims=True))
    softmax = weights / weights.sum(-1, keepdims=True)

    def case(operator: str, kind: str, want: Floats, call: Callable[[Any], None], measure: Measure = "rms") -> Case:
        return Case(operator, shape, dtype, measure, bound(kind, dtype), lambda: _one(device, dtype, want, call))

    yield case("rms_norm", "function", rms(x64), lambda out: context().rms_norm(x, weight, EPS, out), "element")
    yield case("layer_norm", "sum", layer, lambda out: context().layer_norm(x, weight, bias, EPS, out))
    yield case("softmax", "function", softmax, lambda out: context().softmax(x, out), "element")

    def added(which: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            total, out = device.empty(dtype, x64.shape), device.empty(dtype, x64.shape)
            context().add_rms_norm(x, y, weight, EPS, total, out)
            rounded = device.get(total)
            return Outcome(rounded, x64 + y64) if which == 0 else Outcome(device.get(out), rms(rounded))

        return run

    yield Case("add_rms_norm", f"{shape}, the sum", dtype, "element", bound("rounded", dtype), added(0))
    yield Case("add_rms_norm", f"{shape}, the norm", dtype, "element", bound("function", dtype), added(1))
    erf = x64 / 2 * (1 + _erf(x64 / math.sqrt(2)))
    yield case("gelu", "function", erf, lambda out: context().gelu(x, out))
    yield case("gelu_tanh", "function", gelu_tanh(x64), lambda out: context().gelu_tanh(x, out))
    yield case("silu", "function", x64 * sigmoid(x64), lambda out: context().silu(x, out), "element")
    gated = x64 * sigmoid(x64) * y64
    yield case("silu_mul", "function", gated, lambda out: context().silu_mul(x, y, out), "element")
    yield case("add", "rounded", x64 + y64, lambda out: context().add(x, y, out), "element")
    yield case("mul", "rounded", x64 * y64, lambda out: context().mul(x, y, out), "element")
    yield case("copy", "exact", x64, lambda out: context().copy(x, out), "element")
    yield case("transpose", "exact", x64.T, lambda out: context().transpose(x, out), "element")


def _casts(device: Device, dtype: str) -> Iterator[Case]:
    x, x64 = Numbers(device, "f32", 2)(ROWS, WIDTH)

    def cast() -> Outcome:
        return _one(device, dtype, x64, lambda out: device.context().cast(x, out))

    yield Case("cast", f"f32 to {dtype}", dtype, "element", bound("exact" if dtype == "f32" else "rounded", dtype), cast)


def _with_indices(device: Device, dtype: str) -> Iterator[Case]:
    make = Numbers(device, dtype, 3)
    context = device.context
    table, table64 = make(301, 128)
    ids = [(7 * i * i + 3) % 301 for i in range(53)]
    yield Case("embedding", "53 rows of 301 x 128", dtype, "element", 0.0,
               lambda: _one(device, dtype, table64[ids], lambda out: context().embedding(table, device.integers(ids), out)))  # fmt: skip

    x, x64 = make(ROWS, WIDTH)

    def largest() -> Outcome:
        out = device.empty("i32", (ROWS,))
        context().argmax(x, out)
        return Outcome(device.get(out), np.argmax(x64, -1).astype(np.float64))

    yield Case("argmax", f"{ROWS} x {WIDTH}", dtype, "element", 0.0, largest)
    order = np.argsort(-x64, axis=-1, kind="stable")[:, :50]

    def best(which: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            values, indices = device.empty(dtype, (ROWS, 50)), device.empty("i32", (ROWS, 50))
            context().top_k(x, values, indices)
            if which == 0:
                return Outcome(device.get(values), np.take_along_axis(x64, order, -1))
            return Outcome(device.get(indices), order.astype(np.float64))

        return run

    yield Case("top_k", f"50 of {ROWS} x {WIDTH}, values", dtype, "element", 0.0, best(0))
    yield Case("top_k", f"50 of {ROWS} x {WIDTH}, indices", dtype, "element", 0.0, best(1))


def _rope(device: Device, dtype: str) -> Iterator[Case]:
    make = Numbers(device, dtype, 4)
    context = device.context
    dim, heads, last = 128, 4, 40959
    inv_freq64 = device.get(device.put(1e6 ** (-np.arange(0, dim, 2) / dim), "f32"))
    positions = [0, 1, 2, 3, 17, 511, 4095, last]
    angles = np.array(positions)[:, None, None] * inv_freq64
    q, q64 = make(len(positions), heads, dim)
    k, k64 = make(len(positions), 2, dim)

    def tables() -> Tuple[Any, Any]:
        cos, sin = (device.empty("f32", (last + 1, dim // 2)) for _ in range(2))
        context().rope_table(device.put(inv_freq64, "f32"), 1.0, cos, sin)
        return cos, sin

    if dtype == "f32":
        sampled = [0, 1, 1000, last]

        def table_case(index: int) -> Callable[[], Outcome]:
            function = (np.cos, np.sin)[index]
            return lambda: Outcome(device.get(tables()[index])[sampled], function(np.outer(sampled, inv_freq64)))

        for index, name in enumerate(("cos", "sin")):
            what = f"{name}, positions to {last}"
            yield Case("rope_table", what, dtype, "rms", 1.0, table_case(index))

    def rotated(pairing: Any, x64: Floats) -> Floats:
        out, cos, sin = np.empty_like(x64), np.cos(angles), np.sin(angles)
        first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if pairing == "split_half" else (slice(0, dim, 2), slice(1, dim, 2))
        a, b = x64[..., first], x64[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def rotate(pairing: Any, which: int) -> Outcome:
        cos, sin = tables()
        outs = (device.empty(dtype, q64.shape), device.empty(dtype, k64.shape))
        context().rope(q, k, device.integers(positions), cos, sin, outs[0], outs[1], pairing)
        return Outcome(device.get(outs[which]), rotated(pairing, (q64, k64)[which]))

    def at_zero(pairing: Any) -> Outcome:
        return Outcome(rotate(pairing, 0).got[0], q64[0])

    for pairing in ops.ROPE_PAIRINGS:
        for which, name in enumerate("qk"):
            what = f"{pairing}, {name}, positions to {last}"
            yield Case("rope", what, dtype, "rms", bound("rotation", dtype),
                       lambda p=pairing, w=which: rotate(p, w))  # type: ignore[misc]  # fmt: skip
        yield Case("rope", f"{pairing}, position 0 is the input", dtype, "element", 0.0, lambda p=pairing: at_zero(p))  # type: ignore[misc]


def _products(device: Device, dtype: str) -> Iterator[Case]:
    make = Numbers(device, dtype, 5)
    context = device.context
    backends = ["naive", "blocked"] if device.name == "cpu" else ["naive", "tiled", "cublas", "tensor_core"]
    for m, n, k in ((1, 320, 512), (33, 65, 127), (256, 128, 1024)):
        a, a64 = make(m, k)
        b, b64 = make(n, k)
        for backend in ["auto", *backends]:
            def product(a: Any = a, b: Any = b, want: Floats = a64 @ b64.T, backend: Any = backend) -> Outcome:
                return _one(device, dtype, want, lambda out: context().gemm(a, b, out, transpose_b=True, backend=backend))

            yield Case("gemm", f"{backend}, {m} x {n} x {k}", dtype, "rms", bound("sum", dtype), product)
    m, n, k = 33, 65, 127
    a, a64 = make(m, k)
    b, b64 = make(k, n)
    dc, dc64 = make(m, n)

    def gradient(which: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            da, db = device.empty(dtype, (m, k)), device.empty(dtype, (k, n))
            context().gemm_backward(a, b, dc, da, db)
            return Outcome(device.get(da), dc64 @ b64.T) if which == 0 else Outcome(device.get(db), a64.T @ dc64)

        return run

    for which, name in enumerate(("da", "db")):
        yield Case("gemm_backward", f"{name}, {m} x {n} x {k}", dtype, "rms", bound("sum", dtype), gradient(which))


def _attention(device: Device, dtype: str) -> Iterator[Case]:
    make = Numbers(device, dtype, 6)
    context = device.context
    dim, heads, kv_heads = 64, 4, 2
    for q_len, kv_len in ((65, 129), (1, 300)):
        q, q64 = make(1, q_len, heads, dim)
        k, k64 = make(1, kv_len, kv_heads, dim)
        v, v64 = make(1, kv_len, kv_heads, dim)
        for causal in (False, True) if q_len > 1 else (False,):
            want = attention_reference(q64[0], k64[0], v64[0], causal, list(range(q_len)))[None]
            for backend in ("naive", "flash") if q_len > 1 else ("naive", "flash", "split_kv"):
                def attend(q: Any = q, k: Any = k, v: Any = v, want: Floats = want, causal: bool = causal,
                           backend: Any = backend) -> Outcome:  # fmt: skip
                    call = lambda out: context().attention(q, k, v, out, causal=causal, backend=backend)  # noqa: E731
                    return _one(device, dtype, want, call)

                what = f"{backend}, {q_len} queries, {kv_len} keys{', causal' if causal else ''}"
                yield Case("attention", what, dtype, "rms", bound("attention", dtype), attend)
    yield from _attention_of_caches(device, dtype)


def _attention_of_caches(device: Device, dtype: str) -> Iterator[Case]:
    """Sequences packed one after another, and the same keys and values in blocks of a cache."""
    make = Numbers(device, dtype, 7)
    dim, heads, kv_heads, block = 64, 4, 2, 16
    lengths = (5, 40, 33)
    ends: List[int] = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, q64 = make(ends[-1], heads, dim)
    k, k64 = make(ends[-1], kv_heads, dim)
    v, v64 = make(ends[-1], kv_heads, dim)
    parts = [slice(begin, end) for begin, end in zip(ends, ends[1:])]
    want = np.concatenate([
        attention_reference(q64[part], k64[part], v64[part], True, list(range(part.stop - part.start))) for part in parts
    ])  # fmt: skip
    per_sequence = max(-(-length // block) for length in lengths)
    blocks = [[i * per_sequence + (per_sequence - 1 - j) for j in range(per_sequence)] for i in range(len(lengths))]

    def cache(values: Floats) -> Any:
        made = np.zeros((len(lengths) * per_sequence, block, kv_heads, dim))
        for i, part in enumerate(parts):
            for j, row in enumerate(values[part]):
                made[blocks[i][j // block], j % block] = row
        return device.put(made, dtype)

    def packed() -> Outcome:
        cu = device.integers(ends)
        options: Dict[str, Any] = dict(causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
        return _one(device, dtype, want, lambda out: device.context().attention(q, k, v, out, **options))

    def paged() -> Outcome:
        flat: Sequence[int] = [one for row in blocks for one in row]
        tables = device.integers(flat).reshape(len(lengths), per_sequence)
        options: Dict[str, Any] = dict(
            causal=True, cu_seqlens_q=device.integers(ends), block_tables=tables, context_lens=device.integers(lengths)
        )
        call = lambda out: device.context().attention(q, cache(k64), cache(v64), out, **options)  # noqa: E731
        return _one(device, dtype, want, call)

    yield Case("attention", "packed, 3 sequences, causal", dtype, "rms", bound("attention", dtype), packed)
    yield Case("attention", "paged, 3 sequences, causal", dtype, "rms", bound("attention", dtype), paged)


def _words(codes: Floats, bits: int) -> npt.NDArray[np.int32]:
    """Codes in row-major order, packed into words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(codes.shape[0], -1, per_word)
    shifted = parts << (bits * np.arange(per_word)).astype(np.uint32)
    words: npt.NDArray[np.int32] = np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint32).view(np.int32)
    return words


def _integers(device: Device, values: npt.NDArray[Any]) -> Any:
    return device.integers([int(value) for value in values.ravel()]).reshape(values.shape)


def _fp8(codes: Floats) -> Floats:
    """The numbers of e4m3fn."""
    byte = codes.astype(np.int64)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    found: Floats = np.where(byte & 128, -size, size).astype(np.float64)
    return found


def _quantised(device: Device, dtype: str) -> Iterator[Case]:
    random = np.random.default_rng(9)
    context, rows, width, group = device.context, 48, 256, 32
    scales64 = device.get(device.put(random.uniform(0.01, 0.1, (rows, width // group)), "f32"))
    scales = device.put(scales64, "f32")
    wide = np.repeat(scales64, group, axis=1)
    x, x64 = Numbers(device, dtype, 9)(ROWS, width)
    zeros64 = random.integers(0, 16, scales64.shape).astype(np.float64)
    kinds: List[Tuple[Any, int, Floats, Any, Floats]] = []
    codes = random.integers(0, 16, (rows, width)).astype(np.float64)
    zeros = _integers(device, zeros64)
    kinds.append(("int4", 4, codes, zeros, (codes - np.repeat(zeros64, group, axis=1)) * wide))
    codes = random.integers(0, 256, (rows, width)).astype(np.float64)
    kinds.append(("int8", 8, codes, None, (codes - 128) * wide))
    codes = np.where(codes.astype(int) & 127 == 127, 0.0, codes)  # no number
    kinds.append(("fp8", 8, codes, None, _fp8(codes) * wide))
    for code, bits, codes, zero, numbers in kinds:
        words = _integers(device, _words(codes, bits))

        def numbers_of(code: Any = code, words: Any = words, zero: Any = zero, want: Floats = numbers) -> Outcome:
            return _one(device, dtype, want,
                        lambda out: context().dequantise(code, words, scales, zero, out, group_size=group))  # fmt: skip

        def product(code: Any = code, words: Any = words, zero: Any = zero, want: Floats = x64 @ numbers.T) -> Outcome:
            return _one(device, dtype, want, lambda out: context().linear_quantised(
                x, code, words, scales, zero, None, out, group_size=group))  # fmt: skip

        what = f"{code}, groups of {group}"
        yield Case("dequantise", f"{what}, {rows} x {width}", dtype, "element", bound("rounded", dtype), numbers_of)
        yield Case("linear_quantised", f"{what}, {ROWS} x {rows} x {width}", dtype, "rms", bound("quantised", dtype), product)

    # Numbers that have codes, and groups whose largest one is 127 steps.
    steps = random.integers(-127, 128, (rows, width)).astype(np.float64)
    steps[:, ::group] = 127
    given = device.put(steps / 32, dtype)

    def quantised(which: int) -> Outcome:
        words = _integers(device, np.zeros((rows, width // 4)))
        found = device.empty("f32", scales64.shape)
        context().quantise(given, "int8", words, found, group_size=group)
        if which == 0:
            return Outcome(device.get(found), np.full(scales64.shape, 1 / 32))
        return Outcome(device.get(words), _words(steps + 128, 8).astype(np.float64))

    what = f"int8, groups of {group}, {rows} x {width}"
    yield Case("quantise", f"{what}, scales", dtype, "element", 0.0, lambda: quantised(0))
    yield Case("quantise", f"{what}, codes", dtype, "element", 0.0, lambda: quantised(1))


def cases(device: Device) -> Iterator[Case]:
    """Every operator in every type that it has."""
    for dtype in DTYPES:
        for family in (_of_rows, _casts, _with_indices, _rope, _products, _attention, _quantised):
            yield from family(device, dtype)


def is_absent(error: Exception) -> bool:
    """Whether an error says that the device, the machine or the type lacks a variant, which is no fault."""
    return isinstance(error, UnsupportedError)
