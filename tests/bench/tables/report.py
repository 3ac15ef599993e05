"""Tables and how they are written: Markdown for people, JSON for programs, SVG for both."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import plots

Cell = Any
Row = Dict[str, Cell]


@dataclass
class Column:
    """A column of a table: its key in the rows, its title, and how its numbers are written."""

    key: str
    title: str
    #: A format of numbers, as of format(); texts are written as they are.
    form: str = ".3g"


@dataclass
class Section:
    """Rows with the same columns, under a heading of their own, with the plots that are drawn of them."""

    name: str
    title: str
    columns: List[Column]
    rows: List[Row] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    #: Names of files without their endings, and SVG documents.
    plots: List[Tuple[str, str]] = field(default_factory=list)


@dataclass
class Table:
    """The results of one run of a table."""

    name: str
    title: str
    settings: Dict[str, Any] = field(default_factory=dict)
    sections: List[Section] = field(default_factory=list)
    #: Why the table does not apply to this machine; None if it does.
    skipped: Optional[str] = None
    #: Why the table failed, one sentence each.
    failures: List[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """"passed", "failed" or "skipped"."""
        if self.failures:
            return "failed"
        return "passed" if self.skipped is None else "skipped"


def shown(cell: Cell, form: str) -> str:
    """A cell of Markdown: empty for what was not measured."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, (int, float)):
        return format(cell, form) if math.isfinite(cell) else str(cell)
    return str(cell).replace("|", "\\|").replace("\n", " ")


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def markdown_rows(columns: Sequence[Column], rows: Sequence[Row]) -> List[str]:
    """The lines of a Markdown table; columns with numbers are aligned to the right."""
    lines = ["| " + " | ".join(column.title for column in columns) + " |"]
    rules = ["---:" if any(_is_number(row.get(column.key)) for row in rows) else "---" for column in columns]
    lines.append("|" + "|".join(rules) + "|")
    for row in rows:
        lines.append("| " + " | ".join(shown(row.get(column.key), column.form) for column in columns) + " |")
    return lines


def to_markdown(table: Table, machine: Mapping[str, Any]) -> str:
    """The table as a page."""
    lines = [f"# {table.title}", ""]
    lines += [f"- {key}: {value}" for key, value in {**machine, **table.settings}.items()]
    lines.append("")
    if table.skipped is not None:
        lines += [f"Skipped: {table.skipped}", ""]
    for failure in table.failures:
        lines += [f"**Failed:** {failure}", ""]
    for section in table.sections:
        lines += [f"## {section.title}", ""]
        for note in section.notes:
            lines += [note, ""]
        if section.rows:
            lines += [*markdown_rows(section.columns, section.rows), ""]
        for name, _ in section.plots:
            lines += [f"![{section.title}]({name}.svg)", ""]
    return "\n".join(lines).rstrip() + "\n"


def _plain(value: Any) -> Any:
    """JSON has no infinities and no NaN: they are written as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return str(value)


def to_json(table: Table, machine: Mapping[str, Any]) -> str:
    """The table for programs."""
    sections = [dict(name=one.name, title=one.title, notes=one.notes, rows=one.rows) for one in table.sections]
    whole = dict(
        table=table.name, title=table.title, outcome=table.outcome, skipped=table.skipped, failures=table.failures,
        machine=machine, settings=table.settings, sections=sections,
    )  # fmt: skip
    return json.dumps(_plain(whole), indent=1) + "\n"


def _placeholder(table: Table) -> str:
    """The plot of a table that has none, which says why."""
    reason = table.failures[0] if table.failures else table.skipped or "no values"
    return plots.bars(f"{table.title}: {table.outcome}. {reason}"[:110], "", [], [])


def write(table: Table, machine: Mapping[str, Any], folder: Path) -> List[Path]:
    """Writes NAME.md, NAME.json and an SVG file for every plot, at least NAME.svg. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = dict(one for section in table.sections for one in section.plots)
    if table.name not in drawn:
        drawn[table.name] = next(iter(drawn.values()), _placeholder(table))
    texts = {f"{table.name}.md": to_markdown(table, machine), f"{table.name}.json": to_json(table, machine)}
    texts.update({f"{name}.svg": picture for name, picture in drawn.items()})
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
