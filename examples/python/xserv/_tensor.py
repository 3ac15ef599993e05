"""Tensors in memory of the library, which other libraries take over with from_dlpack()."""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, List, Literal, Optional, Sequence, Tuple

from ._errors import NotCopyable, closed
from ._library import DTYPES, check, library
from ._request import choice

if TYPE_CHECKING:
    from .ops import Context

DTypeName = Literal["f32", "f16", "bf16", "i32", "i64"]

ELEMENTS = {name: number for name, number in DTYPES.items() if name != "auto"}
ELEMENTS.update(i32=4, i64=5)
READ_ONLY, IS_COPIED = 1, 2
CPU, CUDA = 1, 2
# The versions of DLPack that capsules may have.
_OLD, _VERSIONED = b"dltensor", b"dltensor_versioned"


class DataType(Structure):
    """xserv_tensor_dtype in C, DLDataType in DLPack."""

    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DeviceOf(Structure):
    """xserv_tensor_device in C, DLDevice in DLPack."""

    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class View(Structure):
    """xserv_tensor in C, DLTensor in DLPack."""

    _fields_ = [
        ("data", c_void_p),
        ("device", DeviceOf),
        ("ndim", c_int32),
        ("dtype", DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, c_void_p)


class ManagedTensor(Structure):
    """xserv_managed_tensor in C, DLManagedTensor in DLPack."""

    _fields_ = [("dl_tensor", View), ("manager_ctx", c_void_p), ("deleter", _DELETER)]


class ManagedTensorVersioned(Structure):
    """xserv_managed_tensor_versioned in C, DLManagedTensorVersioned in DLPack."""

    _fields_ = [
        ("version_major", c_uint32),
        ("version_minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", _DELETER),
        ("flags", c_uint64),
        ("dl_tensor", View),
    ]


library.xserv_owned_tensor_new.argtypes = [c_void_p, c_uint32, c_uint32, POINTER(c_int64), POINTER(c_void_p)]
library.xserv_owned_tensor_view.argtypes = [c_void_p, POINTER(View)]
library.xserv_owned_tensor_to_dlpack.argtypes = [c_void_p, POINTER(POINTER(ManagedTensor))]
library.xserv_owned_tensor_to_dlpack_versioned.argtypes = [c_void_p, c_uint64, POINTER(POINTER(ManagedTensorVersioned))]
library.xserv_owned_tensor_free.argtypes, library.xserv_owned_tensor_free.restype = [c_void_p], None

# An instance of the package's own: other packages declare these functions differently.
_python = ctypes.PyDLL(None)
_python.PyCapsule_New.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = c_void_p


_Entry = Tuple[Any, bytes, Any]


def _take(entries: List[_Entry]) -> Tuple[int, _Entry]:
    """Takes the last entry; returns how many references to its capsule there are, and the entry."""
    capsule, name, managed = entries.pop()
    return sys.getrefcount(capsule), (capsule, name, managed)


#: The number of references if nobody else has one, which differs between versions of Python.
_ALONE = _take([(object(), b"", None)])[0]


class _Capsules:
    """The capsules that were made, so that one that nobody consumes gives its memory back.

    A capsule's destructor is a C function that may run while an exception is on its way, where no Python code can run.
    So capsules have none: this list keeps them, and those that only the list still has are freed when the next one is
    made, or when a tensor is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: List[_Entry] = []

    def add(self, managed: Any, name: bytes) -> Any:
        """Makes a capsule of a managed tensor."""
        capsule = _python.PyCapsule_New(ctypes.cast(managed, c_void_p), name, None)
        with self._lock:
            self.sweep()
            self._kept.append((capsule, name, managed))
        return capsule

    def sweep(self) -> None:
        """Frees what was dropped without having been consumed."""
        with self._lock:
            kept, self._kept = self._kept, []
            while kept:
                count, entry = _take(kept)
                capsule, name, managed = entry
                if not _python.PyCapsule_IsValid(capsule, name):
                    continue  # consumed: who did so has renamed it, and calls the deleter
                if count > _ALONE:
                    self._kept.append(entry)
                else:
                    managed.contents.deleter(ctypes.cast(managed, c_void_p))


_capsules = _Capsules()


class Tensor(NotCopyable):
    """A contiguous tensor in memory of a context's device, made by ops.Context.tensor().

    The operators take it as it is; other libraries share its memory, without a copy: torch.from_dlpack(tensor),
    numpy.from_dlpack(tensor) (in f32, f16 and integers). What they made of it stays valid after the tensor and its
    context are closed. Its content is arbitrary until it is written.

    Any thread may use it. close(), the end of a with block or dropping it gives up this hold on the memory.
    """

    _instead = "share it as it is, or copy its elements with ops.Context.copy()"

    def __init__(self, context: "Context", dtype: DTypeName, shape: Sequence[int], *, read_only: bool = False) -> None:
        self._handle: Optional[c_void_p] = None
        self._owner: Optional[Tensor] = None
        self._context = context
        self._read_only = read_only
        sizes = [int(size) for size in shape]
        handle = c_void_p()
        element = choice(ELEMENTS, dtype, "dtype")
        array = (c_int64 * len(sizes))(*sizes)
        check(library.xserv_owned_tensor_new(context._live_handle(), element, len(sizes), array, byref(handle)))
        self._handle = handle
        self._dtype: DTypeName = dtype
        self._shape = tuple(sizes)

    def as_read_only(self) -> "Tensor":
        """Returns a tensor of the same memory that operators refuse to write to, and that DLPack calls read-only."""
        self._live_handle()
        other = object.__new__(Tensor)
        other._handle, other._owner, other._context = None, self._owner or self, self._context
        other._read_only, other._dtype, other._shape = True, self._dtype, self._shape
        return other

    def _live_handle(self) -> c_void_p:
        handle = self._owner._handle if self._owner is not None else self._handle
        if handle is None:
            raise closed("tensor")
        return handle

    def _view(self) -> View:
        view = View()
        check(library.xserv_owned_tensor_view(self._live_handle(), byref(view)))
        return view

    @property
    def shape(self) -> Tuple[int, ...]:
        """The sizes, outermost first."""
        return self._shape

    @property
    def dtype(self) -> DTypeName:
        """The type of the elements."""
        return self._dtype

    @property
    def device(self) -> str:
        """The device that holds the memory: "cpu" or "cuda"."""
        return "cpu" if self.__dlpack_device__()[0] == CPU else "cuda"

    @property
    def read_only(self) -> bool:
        """Whether operators refuse to write to it."""
        return self._read_only

    def __repr__(self) -> str:
        state = ", read-only" if self._read_only else ""
        return f"<xserv.Tensor: {self._dtype} {list(self._shape)}{state}>"

    def close(self) -> None:
        """Gives up this hold on the memory. What was made of the tensor stays valid; later calls raise ClosedError."""
        handle, self._handle = self._handle, None
        if handle:
            library.xserv_owned_tensor_free(handle)
        _capsules.sweep()

    def __enter__(self) -> "Tensor":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def __dlpack_device__(self) -> Tuple[int, int]:
        """The device in DLPack's numbers: (1, 0) is the CPU, (2, i) CUDA device i."""
        device = self._view().device
        return int(device.device_type), int(device.device_id)

    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """Returns a DLPack capsule of the memory; see Python's array API standard for the arguments.

        stream: on CUDA the consumer's stream; all work queued on the context is done before this returns, unless it
            is -1. On the CPU there is none.
        max_version: from (1, 0) on the capsule is a "dltensor_versioned", which says whether it may be written to.
        dl_device: the tensor's own device, or (1, 0) for a copy on the CPU.
        copy: True for a copy; False raises BufferError where one would be needed; None (default): only if needed.

        Raises BufferError for a read-only tensor without a version, and for what cannot be done.
        """
        own = self.__dlpack_device__()
        wanted = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if wanted not in (own, (CPU, 0)):
            raise BufferError(f"the tensor is on device {own} of DLPack, and cannot be exported to {wanted}")
        if own[0] == CPU and stream is not None:
            raise BufferError("a tensor on the CPU has no stream")
        if wanted != own and copy is False:
            raise BufferError(f"device {wanted} needs a copy, which copy=False forbids")
        if own[0] != CPU and stream != -1:
            self._context._settle()
        if wanted != own or copy:
            return self._copy_to(wanted)._capsule(max_version, IS_COPIED)
        return self._capsule(max_version, READ_ONLY if self._read_only else 0)

    def _copy_to(self, device: Tuple[int, int]) -> "Tensor":
        from .ops import Context

        if device == self.__dlpack_device__():
            made = Tensor(self._context, self._dtype, self._shape)
        else:
            with Context("cpu", num_threads=1) as cpu:
                made = Tensor(cpu, self._dtype, self._shape)
        self._context.copy(self, made)
        self._context.synchronize()
        return made

    def _capsule(self, max_version: Optional[Tuple[int, int]], flags: int) -> Any:
        if max_version is not None and max_version[0] >= 1:
            versioned = POINTER(ManagedTensorVersioned)()
            check(library.xserv_owned_tensor_to_dlpack_versioned(self._live_handle(), flags, byref(versioned)))
            return _capsules.add(versioned, _VERSIONED)
        if flags & READ_ONLY:
            raise BufferError("the tensor is read-only, which only DLPack from version 1.0 on can say")
        old = POINTER(ManagedTensor)()
        check(library.xserv_owned_tensor_to_dlpack(self._live_handle(), byref(old)))
        return _capsules.add(old, _OLD)


def copied_capsule(
    values: Any,
    dtype: DTypeName,
    shape: Sequence[int],
    stream: Optional[int],
    max_version: Optional[Tuple[int, int]],
    dl_device: Optional[Tuple[int, int]],
) -> Any:
    """Returns a DLPack capsule of a copy of a ctypes array. The arguments are those of Tensor.__dlpack__()."""
    from .ops import Context

    if dl_device not in (None, (CPU, 0)):
        raise BufferError(f"only the CPU, (1, 0), is there, and not {dl_device}")
    if stream is not None:
        raise BufferError("a tensor on the CPU has no stream")
    with Context("cpu", num_threads=1) as cpu, Tensor(cpu, dtype, shape) as made:
        ctypes.memmove(made._view().data, values, ctypes.sizeof(values))
        return made._capsule(max_version, IS_COPIED)


def take_view(tensor: Any) -> Tuple[int, bool, Any]:
    """Returns the address of the DLTensor of whatever speaks DLPack, whether it is read-only, and what has to live
    until it was used."""
    if isinstance(tensor, Tensor):
        view = tensor._view()
        return ctypes.addressof(view), tensor.read_only, (view, tensor)
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{type(tensor).__name__} does not speak DLPack")
    # -1: the exporter need not wait for anything; the order of the streams is up to the caller.
    arguments = {"stream": -1} if tensor.__dlpack_device__()[0] == CUDA else {}
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # an exporter from before version 1.0
        capsule = tensor.__dlpack__(**arguments)
    if not _python.PyCapsule_IsValid(capsule, _VERSIONED):
        return _python.PyCapsule_GetPointer(capsule, _OLD), False, capsule
    address = _python.PyCapsule_GetPointer(capsule, _VERSIONED)
    managed = ManagedTensorVersioned.from_address(address)
    if managed.version_major != 1:
        raise BufferError(f"the tensor is of version {managed.version_major} of DLPack, and only 1 is known")
    offset = ManagedTensorVersioned.dl_tensor.offset
    return address + offset, bool(managed.flags & READ_ONLY), capsule
