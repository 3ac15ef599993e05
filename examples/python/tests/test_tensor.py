"""Tensors in memory of the library, and what other libraries make of them through DLPack."""

import ctypes
import gc
import os
import threading
import unittest

import xserv
from xserv import ops

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None

MODEL = os.environ.get("XSERV_TEST_MODEL", "")

needs_numpy = unittest.skipIf(numpy is None, "numpy is not installed")
needs_torch = unittest.skipIf(torch is None, "torch is not installed")


def view_of(capsule, name):
    """The DLTensor of a capsule."""
    python = ctypes.PyDLL(None)
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return python.PyCapsule_GetPointer(capsule, name)


def consume(capsule, name):
    """Takes a managed tensor over as other libraries do; returns its deleter."""
    python = ctypes.PyDLL(None)
    python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    kind = {b"dltensor": xserv._tensor.ManagedTensor, b"dltensor_versioned": xserv._tensor.ManagedTensorVersioned}[name]
    address = view_of(capsule, name)
    managed = kind.from_address(address)
    # The name must live as long as the capsule.
    python.PyCapsule_SetName(capsule, {b"dltensor": USED, b"dltensor_versioned": USED_VERSIONED}[name])
    return lambda: managed.deleter(address)


USED, USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"


class Tensors(unittest.TestCase):
    def setUp(self):
        self.context = ops.Context("cpu", num_threads=1)
        self.addCleanup(self.context.close)

    def filled(self, values=(1, 2, 3, 4, 5, 6), shape=(2, 3)):
        tensor = self.context.tensor("f32", shape)
        ctypes.memmove(tensor._view().data, (ctypes.c_float * len(values))(*values), 4 * len(values))
        return tensor

    def values(self, tensor):
        count = 1
        for size in tensor.shape:
            count *= size
        return list((ctypes.c_float * count).from_address(tensor._view().data))

    def allocated(self):
        return self.context.memory_stats()["allocated"]

    def test_properties(self):
        tensor = self.filled()
        self.assertIsInstance(tensor, xserv.Tensor)
        self.assertEqual((tensor.shape, tensor.dtype, tensor.device), ((2, 3), "f32", "cpu"))
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        self.assertFalse(tensor.read_only)
        self.assertEqual(repr(tensor), "<xserv.Tensor: f32 [2, 3]>")
        self.assertEqual(repr(tensor.as_read_only()), "<xserv.Tensor: f32 [2, 3], read-only>")
        for dtype in ("f32", "f16", "bf16", "i32", "i64"):
            self.assertEqual(self.context.tensor(dtype, [3]).dtype, dtype)
        for wrong in ("auto", "f64"):
            with self.assertRaises(ValueError):
                self.context.tensor(wrong, [3])
        with self.assertRaises(xserv.InvalidArgumentError):
            self.context.tensor("f32", [-1])
        with self.assertRaises(TypeError):
            __import__("copy").copy(tensor)

    def test_operators_take_it(self):
        x, out = self.filled(), self.context.tensor("f32", (2, 3))
        self.context.add(x, x, out)
        self.assertEqual(self.values(out), [2, 4, 6, 8, 10, 12])
        self.context.add(x.as_read_only(), x, x)
        self.assertEqual(self.values(x), [2, 4, 6, 8, 10, 12])

    def test_read_only_results_are_refused(self):
        x = self.filled()
        with self.assertRaisesRegex(xserv.InvalidArgumentError, "^out is read-only"):
            self.context.silu(x, x.as_read_only())
        with self.assertRaisesRegex(xserv.InvalidArgumentError, "^target is read-only"):
            self.context.copy(x, x.as_read_only())
        indices = self.context.tensor("i32", (2, 2)).as_read_only()
        with self.assertRaisesRegex(xserv.InvalidArgumentError, "^indices is read-only"):
            self.context.top_k(x, self.context.tensor("f32", (2, 2)), indices)
        self.assertEqual(self.values(x), [1, 2, 3, 4, 5, 6])

    def test_capsules_of_both_kinds(self):
        tensor = self.filled()
        for max_version in (None, (0, 8)):
            address = view_of(tensor.__dlpack__(max_version=max_version), b"dltensor")
            self.assertEqual(xserv._tensor.View.from_address(address).data, tensor._view().data)
        for source, flags in ((tensor, 0), (tensor.as_read_only(), 1)):
            capsule = source.__dlpack__(max_version=(1, 0))
            managed = xserv._tensor.ManagedTensorVersioned.from_address(view_of(capsule, b"dltensor_versioned"))
            self.assertEqual((managed.version_major, managed.flags), (1, flags))
            self.assertEqual(managed.dl_tensor.data, tensor._view().data)
        with self.assertRaisesRegex(BufferError, "read-only"):
            tensor.as_read_only().__dlpack__()

    def test_arguments_of_dlpack(self):
        tensor = self.filled()
        for wrong in ({"stream": 1}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}):
            with self.assertRaises(BufferError):
                tensor.__dlpack__(**wrong)
        tensor.__dlpack__(dl_device=(1, 0), copy=False)
        capsule = tensor.__dlpack__(max_version=(1, 1), copy=True)
        managed = xserv._tensor.ManagedTensorVersioned.from_address(view_of(capsule, b"dltensor_versioned"))
        self.assertEqual(managed.flags, 2)
        self.assertNotEqual(managed.dl_tensor.data, tensor._view().data)
        self.assertEqual(list((ctypes.c_float * 6).from_address(managed.dl_tensor.data)), [1, 2, 3, 4, 5, 6])

    def test_the_consumer_frees_it_on_any_thread(self):
        for version, name in ((None, b"dltensor"), ((1, 0), b"dltensor_versioned")):
            before = self.allocated()
            tensor = self.filled()
            capsule = tensor.__dlpack__(max_version=version)
            deleter = consume(capsule, name)
            tensor.close()
            self.assertGreater(self.allocated(), before)
            del capsule
            thread = threading.Thread(target=deleter)
            thread.start()
            thread.join()
            self.assertEqual(self.allocated(), before)

    def test_a_capsule_is_consumed_once(self):
        tensor = self.filled()
        capsule = tensor.__dlpack__()
        deleter = consume(capsule, b"dltensor")
        with self.assertRaises(ValueError):
            view_of(capsule, b"dltensor")
        deleter()
        tensor.close()

    def test_capsules_that_nobody_consumes_are_freed(self):
        before = self.allocated()
        tensor = self.filled()
        kept = [tensor.__dlpack__(max_version=version) for version in (None, (1, 0)) for _ in range(10)]
        tensor.close()
        self.assertGreater(self.allocated(), before)
        del kept
        gc.collect()
        self.filled().close()
        self.assertEqual(self.allocated(), before)

    def test_an_exception_on_its_way_does_no_harm(self):
        before = self.allocated()

        def fail(tensor):
            capsule = tensor.__dlpack__()
            self.assertIsNotNone(capsule)
            raise KeyError("mine")

        tensor = self.filled()
        with self.assertRaises(KeyError):
            fail(tensor)
        tensor.close()
        self.assertEqual(self.allocated(), before)

    def test_closed(self):
        tensor = self.filled()
        read_only = tensor.as_read_only()
        with tensor:
            pass
        tensor.close()
        for use in (tensor.__dlpack__, tensor.__dlpack_device__, read_only.__dlpack_device__, tensor.as_read_only):
            with self.assertRaises(xserv.ClosedError):
                use()

    @needs_numpy
    def test_numpy(self):
        tensor = self.filled()
        array = numpy.from_dlpack(tensor)
        self.assertEqual(array.tolist(), [[1, 2, 3], [4, 5, 6]])
        self.context.add(tensor, tensor, tensor)
        self.assertEqual(array.tolist(), [[2, 4, 6], [8, 10, 12]])
        before = self.allocated()
        tensor.close()
        self.context.close()
        self.assertEqual(array.tolist(), [[2, 4, 6], [8, 10, 12]])
        self.assertGreater(before, 0)

    @needs_numpy
    def test_read_only_arrays_of_numpy(self):
        array = numpy.ones((2, 3), dtype=numpy.float32)
        array.flags.writeable = False
        if tuple(int(part) for part in numpy.__version__.split(".")[:2]) < (2, 1):
            self.skipTest("this NumPy does not export read-only arrays")
        out = self.context.tensor("f32", (2, 3))
        self.context.add(array, array, out)
        self.assertEqual(self.values(out), [2] * 6)
        with self.assertRaisesRegex(xserv.InvalidArgumentError, "^out is read-only"):
            self.context.add(out, out, array)
        self.assertFalse(numpy.from_dlpack(out.as_read_only()).flags.writeable)

    @needs_torch
    def test_torch(self):
        before = self.allocated()
        tensor = self.filled()
        taken = torch.from_dlpack(tensor)
        self.assertEqual(taken.tolist(), [[1, 2, 3], [4, 5, 6]])
        taken += 1
        self.assertEqual(self.values(tensor), [2, 3, 4, 5, 6, 7])
        tensor.close()
        self.assertEqual(taken.tolist(), [[2, 3, 4], [5, 6, 7]])
        self.assertGreater(self.allocated(), before)
        del taken
        gc.collect()
        self.assertEqual(self.allocated(), before)
        half = torch.from_dlpack(self.context.tensor("bf16", (4,)))
        self.assertEqual((half.dtype, tuple(half.shape)), (torch.bfloat16, (4,)))


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "there is no PyTorch with CUDA")
class OnCuda(unittest.TestCase):
    def setUp(self):
        self.context = ops.Context("cuda")

    def tearDown(self):
        self.context.close()

    def squares(self):
        """A tensor whose numbers a queued product has just been asked to write."""
        ones = torch.ones((2048, 2048), device="cuda")
        torch.cuda.synchronize()
        tensor = self.context.tensor("f32", (2048, 2048))
        self.context.gemm(ones, ones, tensor)
        return tensor

    def test_torch_sees_what_was_queued(self):
        tensor = self.squares()
        taken = torch.from_dlpack(tensor)
        self.assertEqual((taken.device.type, float(taken.min()), float(taken.max())), ("cuda", 2048, 2048))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            taken = torch.from_dlpack(self.squares())
            self.assertEqual((float(taken.min()), float(taken.max())), (2048, 2048))

    def test_the_memory_outlives_tensor_and_context(self):
        tensor = self.squares()
        taken = torch.from_dlpack(tensor)
        tensor.close()
        self.context.close()
        taken += 1
        self.assertEqual(float(taken.sum()), 2049.0 * 2048 * 2048)

    def test_a_copy_on_the_cpu(self):
        tensor = self.squares()
        self.assertEqual(tensor.__dlpack_device__()[0], 2)
        with self.assertRaises(BufferError):
            tensor.__dlpack__(dl_device=(1, 0), copy=False)

        class OnTheCpu:
            """Asks for the copy, as newer libraries do by themselves."""

            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, stream=None, max_version=None, **_):
                return tensor.__dlpack__(dl_device=(1, 0), max_version=max_version)

        taken = torch.from_dlpack(OnTheCpu())
        self.assertEqual((taken.device.type, float(taken.min()), float(taken.max())), ("cpu", 2048, 2048))
        copy = torch.from_dlpack(tensor).clone()
        self.context.add(tensor, tensor, tensor)
        self.context.synchronize()
        self.assertEqual((float(taken.max()), float(copy.max())), (2048, 2048))


@unittest.skipIf(not MODEL, "XSERV_TEST_MODEL is not set")
class LogitsOut(unittest.TestCase):
    def test_logits_are_copied_out(self):
        with xserv.Model(MODEL, device="cpu") as model:
            logits = model.logits([10, 20, 30])
        self.assertEqual(logits.__dlpack_device__(), (1, 0))
        with self.assertRaises(BufferError):
            logits.__dlpack__(copy=False)
        with self.assertRaises(BufferError):
            logits.__dlpack__(dl_device=(2, 0))
        for library in (numpy, torch):
            if library is not None:
                taken = library.from_dlpack(logits)
                self.assertEqual(tuple(taken.shape), logits.shape)
                self.assertEqual(taken.tolist()[-1], list(logits[-1]))
        with ops.Context("cpu", num_threads=1) as context:
            best = context.tensor("i32", (logits.shape[0],))
            context.argmax(logits, best)
            found = list((ctypes.c_int32 * logits.shape[0]).from_address(best._view().data))
        rows = [list(logits[i]) for i in range(logits.shape[0])]
        self.assertEqual(found, [row.index(max(row)) for row in rows])


if __name__ == "__main__":
    unittest.main()
