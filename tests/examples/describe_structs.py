"""Describes the structs and constants of the Python package, to be compared with xserv.h.

describe_structs.py python   prints one line for each: name, size and offset of a field; name and value
describe_structs.py c        prints a C program that prints the same lines, from the header
"""

import ctypes
import re
import sys

from xserv import _library as c
from xserv import _load, _tensor, ops, self_test


def structs():
    """(name as in C, struct) for every struct that the package declares."""
    others = {
        "LoadOptions": _load.LoadOptions,
        "Tensor": _tensor.View,
        "TensorDtype": _tensor.DataType,
        "TensorDevice": _tensor.DeviceOf,
        "ManagedTensor": _tensor.ManagedTensor,
        "ManagedTensorVersioned": _tensor.ManagedTensorVersioned,
    }
    for name, value in sorted({**vars(c), **vars(ops), **vars(self_test), **others}.items()):
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure:
            yield "xserv" + re.sub("[A-Z]", lambda letter: "_" + letter.group().lower(), name), value


def constants():
    """(name as in C without the prefix, value)."""
    for name in ("ABI_VERSION", "LOGITS_ALL", "LOGITS_LAST", "NO_TOKEN", "SEED_RANDOM", "UNSET_INT"):
        yield name, getattr(c, name)
    for prefix, values in (
        ("DEVICE", c.DEVICES),
        ("DTYPE", c.DTYPES),
        ("GEMM", ops.GEMM_BACKENDS),
        ("ATTENTION", ops.ATTENTION_BACKENDS),
        ("ROPE", ops.ROPE_PAIRINGS),
    ):
        for name, value in values.items():
            yield f"{prefix}_{name.upper()}", value
    for prefix, names in (("FINISH", c.FINISH_REASONS), ("LOG", c.LOG_LEVELS)):
        for value, name in names.items():
            yield f"{prefix}_{name.upper()}", value


def print_python():
    for name, struct in structs():
        print(name, ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            print(f"{name}.{field}", place.size, place.offset)
    for name, value in constants():
        print(name, value)


def print_c():
    print("#include <stddef.h>\n#include <stdio.h>\n#include <xserv.h>\n\nint main(void) {")
    for name, struct in structs():
        print(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            size, offset = f"sizeof((({name} *)0)->{field})", f"offsetof({name}, {field})"
            print(f'  printf("{name}.{field} %zu %zu\\n", {size}, {offset});')
    for name, _ in constants():
        print(f'  printf("{name} %llu\\n", (unsigned long long)XSERV_{name});')
    print("}")


print_c() if sys.argv[1] == "c" else print_python()
