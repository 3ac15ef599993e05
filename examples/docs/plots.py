"""Draws plots as SVG, with nothing but Python: bars for the pages of this folder, lines too for tests/bench/tables."""

from __future__ import annotations

import math
from html import escape
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

COLOURS = ["#226b58", "#d08a3c", "#5b7fa8", "#8a5a8c", "#a33f2f", "#8f8f88", "#3f8f9f", "#b59a2a"]
INK, FAINT = "#333333", "#dddddd"
WIDTH, RIGHT = 800, 70
#: About the width of a character of the smaller text, in pixels.
CHARACTER = 6.2

Value = Optional[float]


class Series(NamedTuple):
    """The values of one colour; None leaves a gap."""

    name: str
    values: Sequence[Value]
    #: The labels beside the bars instead of the numbers.
    labels: Optional[Sequence[str]] = None


class _Scale(NamedTuple):
    """A range of numbers and the pixels that it covers."""

    low: float
    high: float
    is_log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a number."""
        low, high, here = self.low, self.high, value
        if self.is_log:
            low, high, here = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> List[float]:
        """Round numbers within the range: powers of ten of a logarithmic one that has several."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(powers) > 1:
                return [10.0**power for power in powers]
            return [self.low, math.sqrt(self.low * self.high), self.high]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number with as many digits as a plot has room for."""
    if value == 0 or 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _range(values: Sequence[float], is_log: bool) -> Tuple[float, float]:
    usable = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if not usable:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    low, high = min(usable), max(usable)
    if is_log:
        return low / 1.3, high * 1.3
    low, high = min(low, 0.0), max(high, 0.0)
    return low, (high if high > low else low + 1.0)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _legend(names: Sequence[str], y: float) -> Tuple[List[str], float]:
    """The names beside their colours, in as many lines as they need; returns the place below them, too."""
    parts, x = [], 12.0
    for index, name in enumerate(names):
        width = 24 + len(name) * CHARACTER
        if x > 12 and x + width > WIDTH - 12:
            x, y = 12.0, y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, y, name, size=11))
        x += width
    return parts, y + 18


def _begin(title: str, series: Sequence[Series]) -> Tuple[List[str], float]:
    parts = [_text(12, 22, title, size=14, bold=True)]
    if len(series) < 2 and not (series and series[0].name):
        return parts, 40.0
    legend, y = _legend([one.name for one in series], 44)
    return parts + legend, y


def _end(parts: Sequence[str], height: float) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="{INK}">'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def bars(title: str, unit: str, groups: Sequence[str], series: Sequence[Series], *, log: bool = False) -> str:
    """Draws horizontal bars: for each group one of every series."""
    parts, top = _begin(title, series)
    thick, gap = 15, 10
    values = [value for one in series for value in one.values if value is not None]
    left = min(420.0, max(60.0, 18 + max((len(group) for group in groups), default=0) * CHARACTER))
    low, high = _range(values, log)
    scale = _Scale(low / 2 if log else low, high, log, left, WIDTH - RIGHT)
    height = len(groups) * (len(series) * thick + gap)
    for tick in scale.ticks():
        parts.append(_line(scale.at(tick), top, scale.at(tick), top + height, FAINT))
        parts.append(_text(scale.at(tick), top + height + 15, number(tick), anchor="middle", size=11))
    y = top + gap / 2
    origin = scale.start if log else scale.at(0.0)
    for place, group in enumerate(groups):
        parts.append(_text(left - 6, y + len(series) * thick / 2 + 4, group, anchor="end", size=11))
        for index, one in enumerate(series):
            value = one.values[place]
            if value is not None and math.isfinite(value) and (value > 0 or not log):
                x1, x2 = sorted((origin, scale.at(value)))
                colour = COLOURS[index % len(COLOURS)]
                size = f'width="{x2 - x1:.1f}" height="{thick - 2}"'
                parts.append(f'<rect x="{x1:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
                label = one.labels[place] if one.labels is not None else number(value)
                parts.append(_text(x2 + 4, y + thick - 5, label, size=10))
            y += thick
        y += gap
    parts.append(_line(left, top, left, top + height, INK))
    parts.append(_text((left + WIDTH - RIGHT) / 2, top + height + 34, unit, anchor="middle"))
    return _end(parts, top + height + 46)


def lines(
    title: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_name: Callable[[float], str] = number,
) -> str:
    """Draws a line for every series, with a mark at each of its values and the numbers of x below."""
    parts, top = _begin(title, series)
    height, left = 340.0, 76.0
    values = [value for one in series for value in one.values if value is not None]
    x_low, x_high = (min(x), max(x)) if x else (1.0, 2.0)
    if x_low == x_high:
        x_low, x_high = x_low / 2, x_high * 2 or 1.0
    across = _Scale(x_low, x_high, log_x, left + 20, WIDTH - 30)
    y_low, y_high = _range(values, log_y)
    up = _Scale(y_low, y_high if log_y else y_high * 1.05, log_y, top + height, top)
    for tick in up.ticks():
        parts.append(_line(left, up.at(tick), WIDTH - 20, up.at(tick), FAINT))
        parts.append(_text(left - 6, up.at(tick) + 4, number(tick), anchor="end", size=11))
    for place in x:
        parts.append(_text(across.at(place), top + height + 16, x_name(place), anchor="middle", size=11))
    for index, one in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        points = [
            (across.at(place), up.at(value))
            for place, value in zip(x, one.values)
            if value is not None and math.isfinite(value) and (value > 0 or not log_y)
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
    parts.append(_line(left, top + height, WIDTH - 20, top + height, INK))
    parts.append(_line(left, top, left, top + height, INK))
    parts.append(_text((left + WIDTH) / 2, top + height + 36, x_label, anchor="middle"))
    middle = top + height / 2
    turned = _text(0, 0, y_label, anchor="middle")
    parts.append(f'<g transform="translate(16 {middle:.1f}) rotate(-90)">{turned}</g>')
    return _end(parts, top + height + 48)
