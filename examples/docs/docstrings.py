"""Turns the docstrings of the Python package, which are plain text, into reStructuredText."""

from __future__ import annotations

import re
from typing import Iterator, List

#: The beginning of an entry, such as "temperature, top_p: numbers".
_ENTRY = re.compile(r"^\*{0,2}[a-z_][a-z0-9_]*(, \*{0,2}[a-z_][a-z0-9_]*)*: ")


def _escaped(text: str) -> str:
    """A text without the marks that reStructuredText would read; what stands in backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts = [text.replace("`", "'")]
    return "".join(f"``{part}``" if index % 2 else re.sub(r"([\\*|_])", r"\\\1", part) for index, part in enumerate(parts))


def _paragraphs(lines: List[str]) -> Iterator[List[str]]:
    found: List[str] = []
    for line in [*lines, ""]:
        if line.strip():
            found.append(line.rstrip())
        elif found:
            yield found
            found = []


def to_rst(lines: List[str]) -> List[str]:
    """Paragraphs, code (indented by four), and entries of a name and a text that may go on indented."""
    found: List[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].startswith("    "):
            found += ["::", "", *paragraph, ""]
            continue
        entry: List[str] = []
        entries: List[List[str]] = []
        for line in paragraph:
            if not entry or _ENTRY.match(line) or (_ENTRY.match(entry[0]) and not line.startswith("  ")):
                entry = [line]
                entries.append(entry)
            else:
                entry.append(line)
        text: List[str] = []
        for entry in entries:
            joined = " ".join(line.strip() for line in entry)
            if _ENTRY.match(joined):
                name, _, rest = joined.partition(": ")
                text += ["", f"- **{_escaped(name)}**: {_escaped(rest)}", ""]
            else:
                text.append(_escaped(joined))
        found += [*text, ""]
    return found
