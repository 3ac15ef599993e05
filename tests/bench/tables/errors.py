"""Measures how far every operator is from float64, in every type; on a GPU the CPU's operators too."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_bool, c_double, c_float, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List

import numpy as np
import plots
from xserv import _library, ops

from tables.cases import Case, cases, is_absent
from tables.device import Cpu, Device, Floats
from tables.report import Column, Row, Section, Table
from tables.units import error_in_units

library = _library.library


class GradCheckOptions(Structure):
    """xserv_grad_check_options in C."""

    _fields_ = [("struct_size", c_size_t), ("eps", c_double), ("rel_tol", c_double), ("atol", c_double)]


class GradCheckResult(Structure):
    """xserv_grad_check_result in C."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("passed", c_uint32),
        ("reserved", c_uint32),
        ("num_failed", c_uint64),
        ("worst_index", c_uint64),
        ("worst_analytic", c_double),
        ("worst_numeric", c_double),
        ("worst_error", c_double),
    ]


_Loss = CFUNCTYPE(c_bool, POINTER(c_float), c_size_t, POINTER(c_double), c_void_p)
library.xserv_grad_check_options_init.argtypes = [POINTER(GradCheckOptions), c_size_t]
library.xserv_grad_check_options_init.restype = None
library.xserv_grad_check.argtypes = [
    POINTER(GradCheckOptions), _Loss, c_void_p, POINTER(c_float), POINTER(c_float), c_size_t, POINTER(GradCheckResult)
]  # fmt: skip


def _measured(device: Device, case: Case, table: Table) -> Row:
    row: Row = dict(
        device=device.name, operator=case.operator, what=case.what, dtype=case.dtype, measure=case.measure, bound=case.bound
    )
    where = f"{case.operator} ({case.what}, {case.dtype}, {device.name})"
    try:
        got, want = case.run()
    except Exception as error:  # noqa: BLE001: the other operators are measured all the same
        if is_absent(error):
            return dict(row, outcome="not there")
        table.failures.append(f"{where}: {error}")
        return dict(row, outcome="FAILED")
    found = error_in_units(got, want, case.dtype, case.measure)
    row.update(max_units=found.max_units, rms_units=found.rms_units, max_error=found.max_error, outcome="right")
    if not found.max_units <= case.bound:
        row["outcome"] = "WRONG"
        table.failures.append(
            f"{where}: element {found.place} is {got.flat[found.place]!r} and should be {want.flat[found.place]!r}: "
            f"{found.max_units:.3g} units of rounding, of which {case.bound:g} are right"
        )
    return row


def _gradient_of(device: Device, which: str, sizes: Any) -> Row:
    """Compares gemm_backward with central differences of a loss that gemm computes."""
    m, n, k = sizes
    random = np.random.default_rng(8)
    operands: Dict[str, Floats] = {
        name: random.standard_normal(shape).astype(np.float32).astype(np.float64)
        for name, shape in (("a", (m, k)), ("b", (k, n)), ("dc", (m, n)))
    }
    a, b, dc = (device.put(operands[name], "f32") for name in ("a", "b", "dc"))
    da, db = device.empty("f32", (m, k)), device.empty("f32", (k, n))
    device.context().gemm_backward(a, b, dc, da, db)
    gradient = device.get(da if which == "a" else db).astype(np.float32).ravel()
    values = operands[which].astype(np.float32).ravel()
    raised: List[BaseException] = []

    def loss(moved: Any, count: int, result: Any, _: Any) -> bool:
        try:
            there = np.ctypeslib.as_array(moved, (count,)).astype(np.float64).reshape(operands[which].shape)
            given = device.put(there, "f32")
            c = device.empty("f32", (m, n))
            device.context().gemm(given if which == "a" else a, given if which == "b" else b, c)
            result[0] = float(np.sum(device.get(c) * operands["dc"]))
            return True
        except BaseException as error:  # noqa: BLE001: must not cross the C code; it is raised below
            raised.append(error)
            return False

    options, result = GradCheckOptions(), GradCheckResult(struct_size=ctypes.sizeof(GradCheckResult))
    library.xserv_grad_check_options_init(byref(options), ctypes.sizeof(options))
    options.eps = 0.5  # the loss is linear in each element: a large step has no error but that of rounding
    as_floats = [array.ctypes.data_as(POINTER(c_float)) for array in (values, gradient)]
    code = library.xserv_grad_check(byref(options), _Loss(loss), None, *as_floats, values.size, byref(result))
    if raised:
        raise raised[0]
    _library.check(code)
    worst = tuple(int(i) for i in np.unravel_index(result.worst_index, operands[which].shape))
    return dict(
        device=device.name, gradient=f"d{which}", sizes=f"{m} x {n} x {k}", elements=values.size,
        worst=f"[{worst[0]}, {worst[1]}]", analytic=result.worst_analytic, numeric=result.worst_numeric,
        error=result.worst_error, tolerance=f"{options.atol:g} + {options.rel_tol:g} of the larger",
        failed=int(result.num_failed), outcome="right" if result.passed else "WRONG",
    )  # fmt: skip


def gradients(devices: List[Device], table: Table) -> Section:
    """The gradients of products by finite differences."""
    columns = [
        Column("device", "device"), Column("gradient", "gradient"), Column("sizes", "m x n x k"),
        Column("elements", "elements", "d"), Column("worst", "worst element"), Column("analytic", "gemm_backward", ".8g"),
        Column("numeric", "by differences", ".8g"), Column("error", "difference"), Column("tolerance", "tolerance"),
        Column("failed", "outside", "d"), Column("outcome", "outcome"),
    ]  # fmt: skip
    section = Section("gradients", "Gradients of gemm by finite differences (f32)", columns)
    for device in devices:
        for which in "ab":
            row = _gradient_of(device, which, (9, 12, 17))
            section.rows.append(row)
            if row["outcome"] != "right":
                table.failures.append(
                    f"d{which} of gemm on {device.name}: element {row['worst']} is {row['analytic']!r}, by differences "
                    f"{row['numeric']!r}; {row['failed']} elements are outside the tolerance"
                )
    section.notes.append("The loss is the sum of the product's elements, each times a number of its own.")
    return section


def run(device: Device) -> Table:
    """The table."""
    table = Table("errors", "Errors of the operators against float64", dict(
        unit="the distance of neighbouring numbers of the type (ulp) at the size of the reference (element), or at the "
        "root mean square of all references where that is larger (rms); correct rounding is off by at most 0.5",
        inputs="normal random numbers, rounded to the type before the reference is computed",
    ))  # fmt: skip
    devices = [device] if device.name == "cpu" else [Cpu(), device]
    columns = [
        Column("device", "device"), Column("operator", "operator"), Column("what", "what"), Column("dtype", "type"),
        Column("max_units", "max, units"), Column("rms_units", "rms, units"), Column("max_error", "max, absolute"),
        Column("measure", "unit at"), Column("bound", "right up to", "g"), Column("outcome", "outcome"),
    ]  # fmt: skip
    operators = Section("operators", "Operators", columns)
    for one in devices:
        operators.rows += [_measured(one, case, table) for case in cases(one)]
    missing = set(ops._OPERATORS) - {row["operator"] for row in operators.rows}
    if missing:
        table.failures.append(f"operators that are not measured: {', '.join(sorted(missing))}")
    names = list(dict.fromkeys(row["operator"] for row in operators.rows))
    for one in devices:
        bars = []
        for dtype in dict.fromkeys(row["dtype"] for row in operators.rows):
            worst: List[Any] = []
            for name in names:
                key = (one.name, name, dtype)
                found = [r["max_units"] for r in operators.rows if (r["device"], r["operator"], r["dtype"]) == key and "max_units" in r]
                worst.append(max(found) if found else None)
            bars.append(plots.Series(dtype, worst))
        name = "errors" if one is device else f"errors-{one.name}"
        picture = plots.bars(f"Largest errors against float64, {one.name}", "units of rounding", names, bars, log=True)
        operators.plots.append((name, picture))
    table.sections = [operators, gradients(devices, table)]
    return table
