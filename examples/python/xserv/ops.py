"""The library's operators on tensors of NumPy, PyTorch, CuPy, JAX and all that speak DLPack, in place.

    from xserv import ops

    with ops.Context() as context:             # CUDA where it can be used, else the CPU
        context.rms_norm(x, weight, 1e-6, out)  # out is written; nothing is copied or allocated
        context.synchronize()

A tensor is an xserv.Tensor, made by Context.tensor(), or whatever has __dlpack__: f32, f16 or bf16, i32 or i64 for
indices, at most 8 dimensions, any strides that are not negative, in memory of the context's device. Its memory belongs
to the caller; results go into tensors that the caller has made, and share no memory with the inputs unless the operator
says that they may be the same view. A read-only tensor is refused as a result. Sums are in f32 and rounded once.

On the CPU an operator has finished when its method returns. On CUDA it has queued its work on the context's
stream, and the tensors must live until that is done: pass `stream=torch.cuda.current_stream().cuda_stream` to
have it ordered with PyTorch's, and call synchronize() to wait for it.

Every operator raises InvalidArgumentError (the sentence names the tensor and the shapes), OutOfMemoryError,
DeviceLostError and ClosedError, and TypeError for what is no tensor.
"""

from __future__ import annotations

import ctypes
import operator
from ctypes import POINTER, Structure, byref, c_float, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Literal, Optional, Sequence

from ._errors import NotCopyable, closed, invalid_argument
from ._library import DEVICES, check, library
from ._request import choice, set_number
from ._tensor import DTypeName, Tensor, take_view

Device = Literal["auto", "cpu", "cuda"]
GemmBackend = Literal["auto", "naive", "tiled", "cublas", "tensor_core", "blocked"]
AttentionBackend = Literal["auto", "naive", "flash", "split_kv"]
RopePairing = Literal["split_half", "interleaved"]
QuantCode = Literal["int4", "int8", "fp8"]

GEMM_BACKENDS = {"auto": 0, "naive": 1, "tiled": 2, "cublas": 3, "tensor_core": 4, "blocked": 5}
ATTENTION_BACKENDS = {"auto": 0, "naive": 1, "flash": 2, "split_kv": 3}
ROPE_PAIRINGS = {"split_half": 0, "interleaved": 1}
QUANT_CODES = {"int4": 0, "int8": 1, "fp8": 2}


class ContextOptions(Structure):
    """xserv_context_options in C."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("device_kind", c_uint32),
        ("device_index", c_uint32),
        ("use_stream", c_uint32),
        ("num_threads", c_uint32),
        ("stream", c_void_p),
        ("max_memory_bytes", c_uint64),
    ]


class MemoryStats(Structure):
    """xserv_memory_stats in C; see Context.memory_stats()."""

    _fields_ = [("struct_size", c_size_t)] + [
        (name, c_uint64)
        for name in ("allocated", "reserved", "peak", "max_memory_bytes", "num_driver_calls", "num_allocations")
    ]


class DeviceInfo(Structure):
    """The properties of a CUDA device: memory_bytes, l2_bytes (of its second-level cache),
    compute_capability_major and _minor, num_multiprocessors, and name, bytes that end in a 0:
    bytes(info.name).rstrip(b"\\0").decode()."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("memory_bytes", c_uint64),
        ("l2_bytes", c_uint64),
        ("compute_capability_major", c_uint32),
        ("compute_capability_minor", c_uint32),
        ("num_multiprocessors", c_uint32),
        ("reserved", c_uint32),
        ("name", c_uint8 * 256),
    ]


class GemmOptions(Structure):
    """xserv_gemm_options in C."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("transpose_a", c_uint32),
        ("transpose_b", c_uint32),
        ("alpha", c_float),
        ("beta", c_float),
        ("backend", c_uint32),
        ("reserved", c_uint32),
    ]


class AttentionOptions(Structure):
    """xserv_attention_options in C."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("causal", c_uint32),
        ("backend", c_uint32),
        ("scale", c_float),
        ("max_q_len", c_uint32),
        ("max_kv_len", c_uint32),
        ("window", c_uint32),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("block_tables", c_void_p),
        ("context_lens", c_void_p),
    ]


# The arguments of xserv_op_<name> after the context. t: a tensor that is read, o: one that is written,
# f: a float, u: a uint32_t, p: a struct.
_OPERATORS = {
    "copy": "to",
    "cast": "to",
    "rms_norm": "ttfo",
    "add_rms_norm": "tttfoo",
    "layer_norm": "tttfo",
    "softmax": "to",
    "gelu": "to",
    "gelu_tanh": "to",
    "silu": "to",
    "silu_mul": "tto",
    "add": "tto",
    "mul": "tto",
    "transpose": "to",
    "quantise": "tuuooo",
    "dequantise": "uuuttto",
    "linear_quantised": "tuuutttto",
    "embedding": "tto",
    "rope_table": "tfoo",
    "rope": "tttttuoo",
    "argmax": "to",
    "top_k": "too",
    "gemm": "ptto",
    "gemm_backward": "tttuoo",
    "attention": "pttto",
}
# The names of the tensors that are written, where they are not "out".
_RESULTS = {
    "copy": ("target",),
    "cast": ("target",),
    "quantise": ("codes", "scales", "zeros"),
    "add_rms_norm": ("residual_out", "out"),
    "rope_table": ("cos", "sin"),
    "rope": ("q_out", "k_out"),
    "top_k": ("values", "indices"),
    "gemm": ("c",),
    "gemm_backward": ("da", "db"),
}
_KINDS = {"t": c_void_p, "o": c_void_p, "f": c_float, "u": c_uint32, "p": c_void_p}


def _declare() -> None:
    library.xserv_context_options_init.argtypes = [POINTER(ContextOptions), c_size_t]
    library.xserv_context_options_init.restype = None
    library.xserv_context_new.argtypes = [POINTER(ContextOptions), POINTER(c_void_p)]
    library.xserv_context_get_device.argtypes = [c_void_p, POINTER(c_uint32)]
    library.xserv_context_get_memory_stats.argtypes = [c_void_p, POINTER(MemoryStats)]
    library.xserv_cuda_device_get_info.argtypes = [c_uint32, POINTER(DeviceInfo)]
    for name in ("synchronize", "trim"):
        getattr(library, f"xserv_context_{name}").argtypes = [c_void_p]
    library.xserv_gemm_options_init.argtypes = [POINTER(GemmOptions), c_size_t]
    library.xserv_gemm_options_init.restype = None
    library.xserv_attention_options_init.argtypes = [POINTER(AttentionOptions), c_size_t]
    library.xserv_attention_options_init.restype = None
    library.xserv_context_free.argtypes, library.xserv_context_free.restype = [c_void_p], None
    for name, arguments in _OPERATORS.items():
        getattr(library, f"xserv_op_{name}").argtypes = [c_void_p, *(_KINDS[kind] for kind in arguments)]


_declare()


def _group(name: str, size: int) -> int:
    """Returns the size of a group, and refuses what is no uint32_t; ctypes would drop the upper bits."""
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(f"{name} is {size!r}, but must be an integer") from None
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{name} cannot be {number}")
    return number


class _Views:
    """The DLTensors of a call's tensors, which are xserv_tensors. They must live until the call returns."""

    def __init__(self) -> None:
        self._kept: List[Any] = []

    def of(self, tensor: Any, result: Optional[str] = None) -> Optional[int]:
        """The address of a tensor's descriptor. result: the name of a tensor that is written to."""
        if tensor is None:
            return None
        address, is_read_only, kept = take_view(tensor)
        self._kept.append(kept)
        if is_read_only and result is not None:
            raise invalid_argument(f"{result} is read-only, and cannot be written to")
        return address


def cuda_device_count() -> int:
    """Returns the number of usable CUDA devices: 0 without a driver, and in a library built without CUDA
    kernels."""
    return int(library.xserv_cuda_device_count())


def cuda_device_info(device_index: int = 0) -> DeviceInfo:
    """Describes a CUDA device, without starting anything on it. Raises NoDeviceError, which says what is
    missing."""
    info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo))
    check(library.xserv_cuda_device_get_info(device_index, byref(info)))
    return info


class Context(NotCopyable):
    """A device, a stream of work on it, and the memory that the work uses.

    Any thread may use it; calls from several queue in the order of their arrival, and contexts are independent
    of each other. Use it as a context manager, or call close(); a context that is dropped is closed.

    device: "cpu", "cuda", or "auto" (default): CUDA where it can be used, else the CPU.
    device_index: the index among the devices of that kind, from 0 (default).
    stream: on CUDA, the number of a cudaStream_t of the device's primary context (the one that PyTorch and CuPy
        use), on which the work is queued; 0 is the default stream. It must outlive the context. None (default):
        a stream of the context's own.
    num_threads: on the CPU, the number of threads, at most 1024; 0 (default): one for each core that the
        process may run on.
    max_memory_bytes: the most bytes of device memory that the context may hold for work spaces; 0 (default): no
        limit but that of the device.

    Raises NoDeviceError (the sentence says what is missing), UnsupportedError (a GPU before compute capability
    8.0), InvalidArgumentError and OutOfMemoryError.
    """

    _instead = "share it between threads as it is, or make another one"

    def __init__(
        self,
        device: Device = "auto",
        *,
        device_index: int = 0,
        stream: Optional[int] = None,
        num_threads: int = 0,
        max_memory_bytes: int = 0,
    ) -> None:
        self._handle: Optional[c_void_p] = None
        options = ContextOptions()
        library.xserv_context_options_init(byref(options), ctypes.sizeof(options))
        options.device_kind = choice(DEVICES, device, "device")
        if stream is not None:
            options.use_stream, options.stream = 1, stream
        numbers = dict(device_index=device_index, num_threads=num_threads, max_memory_bytes=max_memory_bytes)
        for name, number in numbers.items():
            set_number(options, name, number)
        handle = c_void_p()
        check(library.xserv_context_new(byref(options), byref(handle)))
        self._handle = handle

    def _live_handle(self) -> c_void_p:
        if self._handle is None:
            raise closed("context")
        return self._handle

    def __repr__(self) -> str:
        return f"<xserv.ops.Context: {'closed' if self._handle is None else self.device}>"

    @property
    def device(self) -> str:
        """The kind of device, "cpu" or "cuda"."""
        kind = c_uint32()
        check(library.xserv_context_get_device(self._live_handle(), byref(kind)))
        return next(name for name, number in DEVICES.items() if number == kind.value)

    def memory_stats(self) -> Dict[str, int]:
        """Returns statistics of the context's allocator of device memory, in bytes: "allocated" (in use),
        "reserved" (taken from the driver or the system), "peak" (the most that "allocated" has been),
        "max_memory_bytes" (the most that "reserved" may become; 0: no limit); and the numbers
        "num_driver_calls" (which took memory from the driver or gave it back) and "num_allocations"."""
        stats = MemoryStats(struct_size=ctypes.sizeof(MemoryStats))
        check(library.xserv_context_get_memory_stats(self._live_handle(), byref(stats)))
        return {field[0]: int(getattr(stats, field[0])) for field in MemoryStats._fields_[1:]}

    def tensor(self, dtype: DTypeName, shape: Sequence[int]) -> Tensor:
        """Makes a contiguous tensor in memory of the device, of "f32", "f16", "bf16", "i32" or "i64" and of at most 8
        dimensions. Its content is arbitrary. Operators take it, and torch.from_dlpack() shares its memory; it may
        outlive the context."""
        return Tensor(self, dtype, shape)

    def _settle(self) -> None:
        """Waits for all queued work, also if the context was closed, which has waited."""
        if self._handle is not None:
            self.synchronize()

    def synchronize(self) -> None:
        """Waits for all queued work. Raises what went wrong in it: DeviceLostError or, once,
        InvalidArgumentError for an index that a kernel met and did not follow (a token id outside the table, a
        position outside the table of angles, a block outside the cache)."""
        check(library.xserv_context_synchronize(self._live_handle()))

    def trim(self) -> None:
        """Returns memory that the context keeps for later work spaces to the driver."""
        check(library.xserv_context_trim(self._live_handle()))

    def close(self) -> None:
        """Frees the context, after waiting for its work. Later calls raise ClosedError."""
        handle, self._handle = self._handle, None
        if handle:
            library.xserv_context_free(handle)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _call(self, name: str, *arguments: Any) -> None:
        views, results = _Views(), iter(_RESULTS.get(name, ("out",)))
        given = [
            views.of(value) if kind == "t" else views.of(value, next(results)) if kind == "o" else value
            for kind, value in zip(_OPERATORS[name], arguments)
        ]
        check(getattr(library, f"xserv_op_{name}")(self._live_handle(), *given))

    def copy(self, source: Any, target: Any) -> None:
        """Copies bit for bit, between layouts and, on a CUDA context, between host and device in either
        direction. A copy from or to the host has finished when the call returns.

        source, target: the same shape and dtype.
        """
        self._call("copy", source, target)

    def cast(self, source: Any, target: Any) -> None:
        """Converts to the element type of target, rounded to nearest even; values too large for f16 become
        infinite.

        source, target: the same shape; f32, f16 or bf16 each.
        """
        self._call("cast", source, target)

    def rms_norm(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

        x, out: [..., width]; weight: [width]; all f32, all f16 or all bf16. eps: at least 0. out may be the
        same view as x.
        """
        self._call("rms_norm", x, weight, eps, out)

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float, residual_out: Any, out: Any) -> None:
        """residual_out = x + residual, and out = rms_norm(residual_out), in one pass.

        x, residual, residual_out, out: [..., width]; weight: [width]; all of one type. residual_out may be the
        same view as residual or x; out may be the same view as x, if residual_out is not.
        """
        self._call("add_rms_norm", x, residual, weight, eps, residual_out, out)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
        """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, with the
        population variance.

        x, out: [..., width]; weight, bias: [width], bias may be None; all of one type. eps: at least 0. out may
        be the same view as x.
        """
        self._call("layer_norm", x, weight, bias, eps, out)

    def softmax(self, x: Any, out: Any) -> None:
        """out_i = exp(x_i) / sum_j exp(x_j), over the last dimension. A row of -infinity only gives zeros.

        x, out: [..., width], of one type. out may be the same view as x.
        """
        self._call("softmax", x, out)

    def gelu(self, x: Any, out: Any) -> None:
        """out = x/2 (1 + erf(x / sqrt(2))), the exact GELU; GPT-2's is gelu_tanh.

        x, out: the same shape and type. out may be the same view as x.
        """
        self._call("gelu", x, out)

    def gelu_tanh(self, x: Any, out: Any) -> None:
        """out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU.

        x, out: the same shape and type. out may be the same view as x.
        """
        self._call("gelu_tanh", x, out)

    def silu(self, x: Any, out: Any) -> None:
        """out = x / (1 + exp(-x)).

        x, out: the same shape and type. out may be the same view as x.
        """
        self._call("silu", x, out)

    def silu_mul(self, gate: Any, up: Any, out: Any) -> None:
        """out = silu(gate) * up, the gated activation of SwiGLU.

        gate, up, out: [..., width], of one type. gate and up may be the halves of one tensor [..., 2 * width].
        out may be the same view as gate or as up.
        """
        self._call("silu_mul", gate, up, out)

    def add(self, a: Any, b: Any, out: Any) -> None:
        """out = a + b.

        a, b, out: the same shape and type; a stride of 0 broadcasts a or b. out may be the same view as a or as b.
        """
        self._call("add", a, b, out)

    def mul(self, a: Any, b: Any, out: Any) -> None:
        """out = a * b.

        a, b, out: the same shape and type; a stride of 0 broadcasts a or b. out may be the same view as a or as b.
        """
        self._call("mul", a, b, out)

    def transpose(self, x: Any, out: Any) -> None:
        """out[..., c, r] = x[..., r, c], bit for bit.

        x: [..., rows, columns]; out: [..., columns, rows]; of any one type.
        """
        self._call("transpose", x, out)

    def quantise(
        self, x: Any, code: QuantCode, codes: Any, scales: Any, zeros: Any = None, *, group_size: int = 0
    ) -> None:
        """Quantises a matrix to integers, each group of inputs of a row by itself, as weights="int8" and "int4" do.

        x: [out_features, in_features]; code: "int4" or "int8"; group_size: the inputs that share a scale, 0
        (default) for all. codes: [out_features, in_features * bits / 32], i32, the codes in row-major order, the
        first of a word in its lowest bits; scales: [out_features, in_features / group_size rounded up], f32 or
        bf16; zeros: as scales, i32, with "int4" alone. On CUDA the host does it.
        """
        number, size = choice(QUANT_CODES, code, "code"), _group("group_size", group_size)
        self._call("quantise", x, number, size, codes, scales, zeros)

    def dequantise(
        self,
        code: QuantCode,
        codes: Any,
        scales: Any,
        zeros: Any,
        out: Any,
        *,
        group_rows: int = 1,
        group_size: int = 0,
    ) -> None:
        """Computes the numbers of a quantised matrix: out[o, i] = (code - zero) * scale.

        code: "int4", "int8" or "fp8" (e4m3fn, which has no zeros). codes: as quantise() writes them; bytes in
        row-major order may be passed as words. scales: [out_features / group_rows, in_features / group_size],
        both rounded up; zeros: as scales, i32, or None for 8 and 128. out: [out_features, in_features].
        group_rows: the rows that share a scale, 128 for blocks of 128 x 128; group_size: the inputs, 0 for all.
        Scales that are not finite and codes of "fp8" that are no numbers are refused. On CUDA the matrix goes
        by way of the host.
        """
        number = choice(QUANT_CODES, code, "code")
        rows, size = _group("group_rows", group_rows), _group("group_size", group_size)
        self._call("dequantise", number, rows, size, codes, scales, zeros, out)

    def linear_quantised(
        self,
        x: Any,
        code: QuantCode,
        codes: Any,
        scales: Any,
        zeros: Any,
        bias: Any,
        out: Any,
        *,
        group_rows: int = 1,
        group_size: int = 0,
    ) -> None:
        """out = x W^T + bias with the quantised matrix W of dequantise().

        x: [num_tokens, in_features]; bias: [out_features] or None; out: [num_tokens, out_features]. The weight is
        brought into the order of the kernels in every call, on CUDA by way of the host, which costs far more
        than the product: this is for comparisons and rare products.
        """
        number = choice(QUANT_CODES, code, "code")
        rows, size = _group("group_rows", group_rows), _group("group_size", group_size)
        self._call("linear_quantised", x, number, rows, size, codes, scales, zeros, bias, out)

    def embedding(self, table: Any, ids: Any, out: Any) -> None:
        """out[i] = table[ids[i]], bit for bit.

        table: [vocab_size, width]; ids: [...], i32 or i64; out: [..., width], of the table's type. An id
        outside the table is refused on the CPU; on CUDA it gives zeros, and synchronize() reports it.
        """
        self._call("embedding", table, ids, out)

    def rope_table(self, inv_freq: Any, attention_scale: float, cos: Any, sin: Any) -> None:
        """Computes the table of rope(): cos[p, i] = attention_scale * cos(p * inv_freq[i]), sin likewise, exact
        to f32.

        inv_freq: [head_dim / 2]; cos, sin: [max_position, head_dim / 2]; all f32. attention_scale: 1 unless the
        model scales its rotary embeddings (YaRN).
        """
        self._call("rope_table", inv_freq, attention_scale, cos, sin)

    def rope(
        self,
        q: Any,
        k: Any,
        positions: Any,
        cos: Any,
        sin: Any,
        q_out: Any,
        k_out: Any,
        pairing: RopePairing = "split_half",
    ) -> None:
        """Applies rotary position embeddings: rotates pair i of every head of a token at position p by the
        angle of the table's entry [p, i].

        q, q_out: [num_tokens, num_heads, head_dim]; k, k_out: [num_tokens, num_kv_heads, head_dim], or both
        None; all of one type. positions: [num_tokens], i32 or i64. cos, sin: [max_position, head_dim / 2], f32,
        see rope_table().
        pairing: which elements form pair i: "split_half" (default), i and i + head_dim / 2, as in checkpoints
        of Hugging Face; or "interleaved", 2i and 2i + 1. q_out may be the same view as q, k_out as k. A
        position outside the table is refused on the CPU; on CUDA the token is copied unrotated, and
        synchronize() reports it.
        """
        self._call("rope", q, k, positions, cos, sin, choice(ROPE_PAIRINGS, pairing, "pairing"), q_out, k_out)

    def argmax(self, x: Any, out: Any) -> None:
        """Finds the index of the largest element along the last dimension; among equal ones the lowest. NaN is
        the largest.

        x: [..., width], width at least 1; out: [...], i32 or i64.
        """
        self._call("argmax", x, out)

    def top_k(self, x: Any, values: Any, indices: Any) -> None:
        """Finds the k largest elements along the last dimension, in descending order, and their indices.

        x: [..., width]; values: [..., k], of the type of x; indices: [..., k], i32; k is at most width and at
        most 1024.
        """
        self._call("top_k", x, values, indices)

    def gemm(
        self,
        a: Any,
        b: Any,
        c: Any,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
        backend: GemmBackend = "auto",
    ) -> None:
        """c = alpha * A B + beta * c; sums in f32, rounded once.

        A: [m, k]; B: [k, n]; c: [m, n]; all of one type. For a batch of products: c [batch, m, n], a and b of three
        dimensions with the same batch, or of two for one matrix that is used in all products.
        transpose_a, transpose_b: a holds the transpose of A, b that of B (as a weight of torch.nn.Linear does).
        alpha, beta: with 0, a and b, or c, are not read.
        backend: "auto" (default) takes the fastest; "naive"; on the CPU "blocked"; on CUDA "tiled", "cublas"
        (where it is installed) and "tensor_core" (f16 and bf16). One that is not there for the device or type
        raises UnsupportedError.
        """
        options = GemmOptions()
        library.xserv_gemm_options_init(byref(options), ctypes.sizeof(options))
        options.transpose_a, options.transpose_b = transpose_a, transpose_b
        options.alpha, options.beta = alpha, beta
        options.backend = choice(GEMM_BACKENDS, backend, "backend")
        self._call("gemm", ctypes.addressof(options), a, b, c)

    def gemm_backward(self, a: Any, b: Any, dc: Any, da: Any, db: Any, transpose_kernels: bool = False) -> None:
        """The gradients of C = A B: da = dc B^T and db = A^T dc.

        a, da: [m, k]; b, db: [k, n]; dc: [m, n], the gradient of the loss with respect to C; or all with the
        same leading batch dimension; all of one type. da or db may be None if it is not wanted.
        transpose_kernels: write transposes to memory first, instead of reading the operands transposed; the
        results are the same up to rounding.
        """
        self._call("gemm_backward", a, b, dc, int(transpose_kernels), da, db)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        *,
        causal: bool = False,
        window: Optional[int] = None,
        scale: Optional[float] = None,
        backend: AttentionBackend = "auto",
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        block_tables: Any = None,
        context_lens: Any = None,
        max_q_len: Optional[int] = None,
        max_kv_len: Optional[int] = None,
    ) -> None:
        """out = softmax(scale * q k^T) v, where query head h reads key/value head h / (num_heads / num_kv_heads).

        q, k, v, out: all of one type; out has the shape of q. Three forms:

        - batched: q [batch, q_len, num_heads, head_dim], k and v [batch, kv_len, num_kv_heads, head_dim].
        - packed, with cu_seqlens_q and cu_seqlens_k: q [num_tokens, num_heads, head_dim], k and v [num_kv_tokens,
          num_kv_heads, head_dim], sequence after sequence.
        - paged, with block_tables and context_lens: k and v [num_blocks, block_size, num_kv_heads, head_dim], q
          packed with cu_seqlens_q, or [num_seqs, q_len, num_heads, head_dim] without.

        causal: query i of a sequence sees keys 0 to kv_len - q_len + i; otherwise all of them. A query that
        sees no key gives zeros.
        window: with causal, the most keys that a query sees: those at positions p - window + 1 to p for a query at
        position p of its sequence. None (default): all keys up to p. Keys that a window hides cost no time.
        scale: the factor of the scores; None (default): 1 / sqrt(head_dim).
        backend: "auto" (default); "naive" (batched form only), "flash", or "split_kv" (for one query per
        sequence). One that does not support the form, head_dim or block size raises UnsupportedError.
        cu_seqlens_q, cu_seqlens_k: i32 [num_seqs + 1], the first token of each sequence and the end of the last.
        block_tables: i32 [num_seqs, max_blocks_per_seq], the blocks of each sequence in order.
        context_lens: i32 [num_seqs], the number of keys of each sequence.
        max_q_len, max_kv_len: the largest number of queries and of keys of a sequence, where it is known.
        """
        options, views = AttentionOptions(), _Views()
        library.xserv_attention_options_init(byref(options), ctypes.sizeof(options))
        options.causal, options.backend = causal, choice(ATTENTION_BACKENDS, backend, "backend")
        if scale is not None:
            options.scale = scale
        options.cu_seqlens_q = views.of(cu_seqlens_q)
        options.cu_seqlens_k = views.of(cu_seqlens_k)
        options.block_tables = views.of(block_tables)
        options.context_lens = views.of(context_lens)
        if window is not None:
            if window == 0:
                raise invalid_argument("window is 0, but a query sees at least its own key")
            set_number(options, "window", window)
        if max_q_len is not None:
            set_number(options, "max_q_len", max_q_len)
        if max_kv_len is not None:
            set_number(options, "max_kv_len", max_kv_len)
        self._call("attention", ctypes.addressof(options), q, k, v, out)
