"""Errors in units of rounding.

A unit is the distance between neighbouring numbers of the type (an ulp) at the size of the reference. Of an operator
that adds numbers of both signs, results that happen to be small cannot be exact to their own size: there the unit is
that at the root mean square of all references, where it is larger ("rms"; otherwise "element"). Where rows differ in
size, as those of causal attention do, it is that of the row ("row"). A result that is rounded correctly is off by at
most half a unit.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from tables.device import Floats

#: Bits of the fraction, and the exponent of the smallest normal number.
_FORMATS = {"f32": (23, -126), "f16": (10, -14), "bf16": (7, -126)}

Measure = Literal["element", "rms", "row"]


class Error(NamedTuple):
    """The distance of results from their references."""

    max_units: float
    rms_units: float
    max_error: float
    #: The place of the largest error.
    place: int


def units(size: Floats, dtype: str) -> Floats:
    """The distance between neighbouring numbers of the type at these sizes."""
    fraction, lowest = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(size))
    exponent = np.where(size == 0, lowest, exponent - 1)
    found: Floats = np.ldexp(1.0, np.maximum(exponent, lowest) - fraction)
    return found


def error_in_units(got: Floats, want: Floats, dtype: str, measure: Measure) -> Error:
    """The largest error and the root mean square of all; infinite where one of the two is not finite and the other
    one is something else."""
    if got.shape != want.shape:
        raise ValueError(f"results of shape {got.shape} cannot be compared with {want.shape}")
    if not want.size:
        return Error(0.0, 0.0, 0.0, 0)
    is_finite = np.isfinite(got) & np.isfinite(want)
    is_same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        distance = np.where(is_same, 0.0, np.where(is_finite, np.abs(got - want), math.inf))
    size = np.where(is_finite, np.abs(want), 0.0)
    if measure == "rms":
        size = np.maximum(size, math.sqrt(float(np.mean(size**2))))
    elif measure == "row":
        size = np.maximum(size, np.sqrt(np.mean(size**2, axis=-1, keepdims=True)))
    in_units = distance / units(size, dtype)
    index = int(np.argmax(in_units))
    rms = math.sqrt(float(np.mean(in_units**2)))
    return Error(float(in_units.flat[index]), rms, float(distance.max()), index)
