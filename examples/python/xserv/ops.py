"""The library's operators on tensors of NumPy, PyTorch, CuPy, JAX and all that speak DLPack, in place.

    from xserv import ops

    with ops.Context() as context:             # CUDA where it can be used, else the CPU
        context.rms_norm(x, weight, 1e-6, out)  # out is written; nothing is copied or allocated
        context.synchronize()

Every function is the C function xserv_op_<name>; include/xserv.h says what it does. Results go into
arrays that the caller has made. On CUDA the work is queued on the context's stream: pass
`stream=torch.cuda.current_stream().cuda_stream` to have it ordered with PyTorch's.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Optional

from ._library import DEVICES, check, library

GEMM_BACKENDS = {"auto": 0, "naive": 1, "tiled": 2, "cublas": 3, "tensor_core": 4, "blocked": 5}
ATTENTION_BACKENDS = {"auto": 0, "naive": 1, "flash": 2, "split_kv": 3}
ROPE_PAIRINGS = {"split_half": 0, "interleaved": 1}
_KDL_CUDA = 2


class ContextOptions(Structure):
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
    _fields_ = [("struct_size", c_size_t)] + [
        (name, c_uint64)
        for name in ("allocated", "reserved", "peak", "max_memory_bytes", "num_driver_calls", "num_allocations")
    ]


class DeviceInfo(Structure):
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
    _fields_ = [
        ("struct_size", c_size_t),
        ("causal", c_uint32),
        ("backend", c_uint32),
        ("scale", c_float),
        ("max_q_len", c_uint32),
        ("max_kv_len", c_uint32),
        ("reserved", c_uint32),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("block_tables", c_void_p),
        ("context_lens", c_void_p),
    ]


# The arguments of xserv_op_<name> after the context. t: a tensor, f: a float, u: a uint32_t, p: a
# struct.
_OPERATORS = {
    "copy": "tt",
    "cast": "tt",
    "rms_norm": "ttft",
    "add_rms_norm": "tttftt",
    "layer_norm": "tttft",
    "softmax": "tt",
    "gelu": "tt",
    "gelu_tanh": "tt",
    "silu": "tt",
    "silu_mul": "ttt",
    "add": "ttt",
    "mul": "ttt",
    "transpose": "tt",
    "embedding": "ttt",
    "rope_table": "tftt",
    "rope": "tttttutt",
    "argmax": "tt",
    "top_k": "ttt",
    "gemm": "pttt",
    "gemm_backward": "tttutt",
    "attention": "ptttt",
}
_KINDS = {"t": c_void_p, "f": c_float, "u": c_uint32, "p": c_void_p}


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

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], c_void_p


class _Views:
    """The DLPack capsules of a call's tensors: a DLManagedTensor begins with its DLTensor, which is an
    xserv_tensor. They must live until the call returns."""

    def __init__(self) -> None:
        self.capsules: List[Any] = []

    def of(self, tensor: Any) -> Optional[int]:
        if tensor is None:
            return None
        if not hasattr(tensor, "__dlpack__"):
            raise TypeError(f"{type(tensor).__name__} does not speak DLPack")
        # -1: the exporter need not wait for anything; the order of the streams is up to the caller.
        on_cuda = tensor.__dlpack_device__()[0] == _KDL_CUDA
        capsule = tensor.__dlpack__(stream=-1) if on_cuda else tensor.__dlpack__()
        self.capsules.append(capsule)
        return _capsule_pointer(capsule, b"dltensor")


def cuda_device_count() -> int:
    return int(library.xserv_cuda_device_count())


def cuda_device_info(device_index: int = 0) -> DeviceInfo:
    info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo))
    check(library.xserv_cuda_device_get_info(device_index, byref(info)))
    return info


class Context:
    """A device and a stream of work on it. May be used from several threads."""

    def __init__(
        self,
        device: str = "auto",
        *,
        device_index: int = 0,
        stream: Optional[int] = None,
        num_threads: int = 0,
        max_memory_bytes: int = 0,
    ) -> None:
        options = ContextOptions()
        library.xserv_context_options_init(byref(options), ctypes.sizeof(options))
        options.device_kind = DEVICES[device]
        options.device_index = device_index
        if stream is not None:
            options.use_stream, options.stream = 1, stream
        options.num_threads = num_threads
        options.max_memory_bytes = max_memory_bytes
        self._handle: Optional[c_void_p] = None
        handle = c_void_p()
        check(library.xserv_context_new(byref(options), byref(handle)))
        self._handle = handle

    @property
    def device(self) -> str:
        """"cpu" or "cuda"."""
        kind = c_uint32()
        check(library.xserv_context_get_device(self._handle, byref(kind)))
        return next(name for name, number in DEVICES.items() if number == kind.value)

    def memory_stats(self) -> Dict[str, int]:
        stats = MemoryStats(struct_size=ctypes.sizeof(MemoryStats))
        check(library.xserv_context_get_memory_stats(self._handle, byref(stats)))
        return {name: getattr(stats, name) for name, _ in MemoryStats._fields_[1:]}

    def synchronize(self) -> None:
        """Waits for all queued work; raises an Error if something went wrong in it."""
        check(library.xserv_context_synchronize(self._handle))

    def trim(self) -> None:
        check(library.xserv_context_trim(self._handle))

    def close(self) -> None:
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
        views = _Views()
        given = [views.of(value) if kind == "t" else value for kind, value in zip(_OPERATORS[name], arguments)]
        check(getattr(library, f"xserv_op_{name}")(self._handle, *given))

    def copy(self, source: Any, target: Any) -> None:
        self._call("copy", source, target)

    def cast(self, source: Any, target: Any) -> None:
        self._call("cast", source, target)

    def rms_norm(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        self._call("rms_norm", x, weight, eps, out)

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float, residual_out: Any, out: Any) -> None:
        self._call("add_rms_norm", x, residual, weight, eps, residual_out, out)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
        """bias may be None."""
        self._call("layer_norm", x, weight, bias, eps, out)

    def softmax(self, x: Any, out: Any) -> None:
        self._call("softmax", x, out)

    def gelu(self, x: Any, out: Any) -> None:
        """GELU with erf; gelu_tanh is GPT-2's."""
        self._call("gelu", x, out)

    def gelu_tanh(self, x: Any, out: Any) -> None:
        self._call("gelu_tanh", x, out)

    def silu(self, x: Any, out: Any) -> None:
        self._call("silu", x, out)

    def silu_mul(self, gate: Any, up: Any, out: Any) -> None:
        self._call("silu_mul", gate, up, out)

    def add(self, a: Any, b: Any, out: Any) -> None:
        self._call("add", a, b, out)

    def mul(self, a: Any, b: Any, out: Any) -> None:
        self._call("mul", a, b, out)

    def transpose(self, x: Any, out: Any) -> None:
        self._call("transpose", x, out)

    def embedding(self, table: Any, ids: Any, out: Any) -> None:
        self._call("embedding", table, ids, out)

    def rope_table(self, inv_freq: Any, attention_scale: float, cos: Any, sin: Any) -> None:
        self._call("rope_table", inv_freq, attention_scale, cos, sin)

    def rope(
        self, q: Any, k: Any, positions: Any, cos: Any, sin: Any, q_out: Any, k_out: Any, pairing: str = "split_half"
    ) -> None:
        """k and k_out may be None."""
        self._call("rope", q, k, positions, cos, sin, ROPE_PAIRINGS[pairing], q_out, k_out)

    def argmax(self, x: Any, out: Any) -> None:
        self._call("argmax", x, out)

    def top_k(self, x: Any, values: Any, indices: Any) -> None:
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
        backend: str = "auto",
    ) -> None:
        options = GemmOptions()
        library.xserv_gemm_options_init(byref(options), ctypes.sizeof(options))
        options.transpose_a, options.transpose_b = transpose_a, transpose_b
        options.alpha, options.beta = alpha, beta
        options.backend = GEMM_BACKENDS[backend]
        self._call("gemm", ctypes.addressof(options), a, b, c)

    def gemm_backward(self, a: Any, b: Any, dc: Any, da: Any, db: Any, transpose_kernels: bool = False) -> None:
        """The gradients of C = A B; da or db may be None."""
        self._call("gemm_backward", a, b, dc, int(transpose_kernels), da, db)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        *,
        causal: bool = False,
        scale: Optional[float] = None,
        backend: str = "auto",
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        block_tables: Any = None,
        context_lens: Any = None,
        max_q_len: Optional[int] = None,
        max_kv_len: Optional[int] = None,
    ) -> None:
        options, views = AttentionOptions(), _Views()
        library.xserv_attention_options_init(byref(options), ctypes.sizeof(options))
        options.causal, options.backend = causal, ATTENTION_BACKENDS[backend]
        if scale is not None:
            options.scale = scale
        options.cu_seqlens_q = views.of(cu_seqlens_q)
        options.cu_seqlens_k = views.of(cu_seqlens_k)
        options.block_tables = views.of(block_tables)
        options.context_lens = views.of(context_lens)
        if max_q_len is not None:
            options.max_q_len = max_q_len
        if max_kv_len is not None:
            options.max_kv_len = max_kv_len
        self._call("attention", ctypes.addressof(options), q, k, v, out)
