"""A table: its rows, and the files that it becomes."""

from __future__ import annotations

import datetime
import json
import math
import platform
from html import escape
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import xserv
from xserv import ops

Cell = Union[None, int, float, str]
COLOURS = ["#226b58", "#d08a3c", "#5b7fa8", "#8a5a8c", "#a33f2f", "#777770"]


class Column(NamedTuple):
    #: The key of the column in a row, and in JSON.
    key: str
    #: What stands over it.
    title: str
    #: How a number is written, as in format().
    form: str = ""


class Plot(NamedTuple):
    """Lines over a column; each series is the rows that have one value in the column `by`."""

    x: str
    y: str
    by: str
    x_title: str
    y_title: str
    log_x: bool = True
    log_y: bool = True


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Table:
    def __init__(self, name: str, title: str, columns: Sequence[Column], device: str, plot: Optional[Plot] = None) -> None:
        self.name = name
        self.title = title
        self.columns = list(columns)
        self.plot = plot
        self.rows: List[Dict[str, Cell]] = []
        self.notes: List[str] = []
        self.settings: Dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "device": device,
            "card": ops.cuda_device_info().name.decode() if device == "cuda" else processor(),
            "xserv": xserv.library_version(),
        }

    def add(self, **cells: Cell) -> None:
        """Adds a row; columns that are not named stay empty."""
        unknown = set(cells) - {column.key for column in self.columns}
        if unknown:
            raise ValueError(f"{self.name} has no column {sorted(unknown)}")
        self.rows.append(cells)

    def write(self, folder: Path) -> None:
        """Writes NAME-DEVICE.md, .json and, with a plot, .svg."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.name}-{self.settings['device']}"
        (folder / f"{stem}.md").write_text(self.markdown(), encoding="utf-8")
        kept = {"title": self.title, "settings": self.settings, "notes": self.notes, "rows": self.rows}
        (folder / f"{stem}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        if self.plot is not None:
            (folder / f"{stem}.svg").write_text(self.svg(self.plot), encoding="utf-8")

    def markdown(self) -> str:
        said = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        lines = [f"## {self.title}", "", said, ""]
        lines.append("| " + " | ".join(column.title for column in self.columns) + " |")
        lines.append("|" + "|".join("---" for _ in self.columns) + "|")
        for row in self.rows:
            lines.append("| " + " | ".join(self._text(column, row.get(column.key)) for column in self.columns) + " |")
        return "\n".join(lines + [""] + [f"- {note}" for note in self.notes]) + "\n"

    @staticmethod
    def _text(column: Column, cell: Cell) -> str:
        if cell is None:
            return ""
        return cell.replace("|", "\\|") if isinstance(cell, str) else format(cell, column.form)

    def svg(self, plot: Plot) -> str:
        """Lines and their points, with axes that are linear or logarithmic."""
        series: Dict[str, List[List[float]]] = {}
        for row in self.rows:
            x, y = row.get(plot.x), row.get(plot.y)
            if isinstance(x, (int, float)) and isinstance(y, (int, float)) and y > 0 and x > 0:
                series.setdefault(str(row.get(plot.by)), []).append([float(x), float(y)])
        width, height, left, top, right, bottom = 760, 420, 70, 40, 170, 50
        points = [point for line in series.values() for point in line]
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{left}" y="20" font-weight="bold">{escape(self.title)}</text>',
        ]
        if points:
            axes = [
                _Axis([p[0] for p in points], plot.log_x, left, width - right),
                _Axis([p[1] for p in points], plot.log_y, height - bottom, top),
            ]
            for value in axes[0].ticks():
                x = axes[0].place(value)
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="#ddd"/>')
                parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{value:g}</text>')
            for value in axes[1].ticks():
                y = axes[1].place(value)
                parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
                parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
            for index, (name, line) in enumerate(series.items()):
                colour = COLOURS[index % len(COLOURS)]
                dash = ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
                places = [(axes[0].place(x), axes[1].place(y)) for x, y in sorted(line)]
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
                y = top + 16 * index + 10
                parts.append(f'<line x1="{width - right + 12}" x2="{width - right + 30}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
                parts.append(f'<text x="{width - right + 36}" y="{y + 4}">{escape(name)}</text>')
        parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 12}" text-anchor="middle">{escape(plot.x_title)}</text>')
        middle = (top + height - bottom) / 2
        parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(plot.y_title)}</text>')
        return "\n".join(parts + ["</svg>"]) + "\n"


class _Axis:
    """Where numbers stand between two places."""

    def __init__(self, values: Sequence[float], is_log: bool, first: float, last: float) -> None:
        self.is_log, self.first, self.last = is_log, first, last
        self.low, self.high = (min(values), max(values)) if is_log else (0.0, max(values))
        if self.low == self.high:
            self.low, self.high = (self.low / 2, self.high * 2) if is_log else (self.low, self.high + 1)

    def place(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> List[float]:
        if not self.is_log:
            step = 10 ** math.floor(math.log10(self.high / 2))
            step *= next(f for f in (1, 2, 5, 10) if self.high / (step * f) <= 8)
            return [step * i for i in range(int(self.high / step) + 1)]
        base = 10 if self.high / self.low > 300 else 2
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        return [float(base) ** i for i in range(first, last + 1)]
