"""Draws the tables of README.md: a figure (SVG) and its raw numbers (CSV) for each, from README.md alone."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import List, NamedTuple

import plots

Table = List[List[str]]


class Figure(NamedTuple):
    name: str
    #: The beginning of the table's header line.
    header: str
    title: str
    unit: str
    columns: List[int]


FIGURES = [
    Figure("cpu", "| | prompt of 512, tokens/s | generation", "Qwen3-0.6B on two CPU cores", "tokens/s", [1, 2]),
    Figure("h200-8b", "| | Qwen3-8B | limit", "Qwen3-8B on one H200", "milliseconds (less is better)", [1, 2, 3]),
    Figure("h200-06b", "| | Qwen3-8B | limit", "Qwen3-0.6B on one H200", "milliseconds (less is better)", [4, 5, 6]),
    Figure("families", "| sequences | 1 | 8", "A step of decoding on one H200", "milliseconds (less is better)", [1, 2, 3, 4, 5, 6]),
    Figure("sampling", "| | Qwen3-0.6B | Qwen3-8B |", "What sampling settings cost on one H200", "share of the rate", [1, 2]),
    Figure("deterministic", "| | 1 sequence | 8 | 32 |", "Steps with and without deterministic", "milliseconds (less is better)", [1, 2, 3, 4, 5]),
    Figure("quantised", "| `weights` | bits a number", "Quantised weights: KL divergence to bf16", "KL divergence", [3]),
]  # fmt: skip


def table_of(readme: str, header: str) -> Table:
    """The cells of the table whose first line begins so."""
    start = readme.find("\n" + header)
    if start < 0:
        raise ValueError(f"README.md has no table that begins {header!r}")
    lines = readme[start + 1 :].split("\n\n")[0].split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not re.fullmatch(r"[|:\- ]+", line)]
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"the table of {header!r} is not whole")
    return rows


def number(cell: str) -> float:
    """The number that a cell begins with; NaN for an empty one."""
    found = re.match(r"[\d,.]+", cell)
    return float(found.group(0).replace(",", "")) if found else float("nan")


def draw(figure: Figure, table: Table, folder: Path) -> None:
    columns = figure.columns
    rows = [row for row in table[1:] if any(row[column] for column in columns)]
    if figure.name == "sampling":  # the first row is a rate, and the others are shares of it
        rows = [row for row in rows if number(row[1]) < 10]
    with (folder / f"{figure.name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[table[0][0], *(table[0][c] for c in columns)], *([r[0], *(r[c] for c in columns)] for r in rows)])

    def series(column: int) -> plots.Series:
        labels = [re.split(r" \(", row[column])[0] for row in rows]
        return plots.Series(table[0][column], [number(row[column]) for row in rows], labels)

    names = [re.sub(r"[`*]", "", row[0]) for row in rows]
    # From a token to a prompt of 8192 the times differ by hundreds.
    picture = plots.bars(figure.title, figure.unit, names, [series(c) for c in columns], log=figure.name.startswith("h200"))
    (folder / f"{figure.name}.svg").write_text(picture, encoding="utf-8")


def draw_all(readme: Path, folder: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        draw(figure, table_of(text, figure.header), folder)
