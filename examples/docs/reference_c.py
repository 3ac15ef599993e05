"""Writes the reference pages of the C headers from their comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Set, Tuple

NAME = re.compile(r"\b(?:xserv_[a-z0-9_]+|XSERV_[A-Z0-9_]+)\b")
#: The same, as a text may write a function.
CALLED = re.compile(NAME.pattern + r"(?:\(\))?")
RULE = "/* ---------------------------------------------------------------------- */"


class Item(NamedTuple):
    """A declaration with its comment, and those of its fields."""

    name: str
    comment: str
    code: str
    fields: List[Tuple[str, str]]


class Section(NamedTuple):
    title: str
    items: List[Item]


def anchor(name: str) -> str:
    """The anchor of a name. Anchors do not tell capital letters from small ones."""
    return ("c-const-" if name.isupper() else "c-") + name.lower().replace("_", "-")


def _plain(comment: str) -> str:
    """The text of a comment without its frame."""
    lines = comment.strip().removeprefix("/**").removeprefix("/*").removesuffix("*/").split("\n")
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in lines).strip("\n").strip(" ").rstrip()


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_<>\[\]{}#|~$])", r"\\\1", text)


def _words(text: str, known: Set[str], own: Optional[str]) -> str:
    """A line as Markdown: the names that have an entry lead there."""

    def link(match: "re.Match[str]") -> str:
        name, shown = match.group(0).removesuffix("()"), match.group(0)
        return f"[`{shown}`](#{anchor(name)})" if name in known and name != own else f"`{shown}`"

    parts = text.split("`")
    if len(parts) % 2 == 0:
        return _escaped(text)
    found = []
    for index, part in enumerate(parts):
        if index % 2:
            whole = CALLED.fullmatch(part)
            found.append(link(whole) if whole else f"`{part}`")
            continue
        end = 0
        for match in CALLED.finditer(part):
            found.append(_escaped(part[end : match.start()]) + link(match))
            end = match.end()
        found.append(_escaped(part[end:]))
    return "".join(found)


def markdown(comment: str, known: Set[str], own: Optional[str] = None) -> str:
    """A comment as Markdown: paragraphs, lists, and code that is indented by four."""
    lines, in_code, found = _plain(comment).split("\n"), False, []
    for line in lines:
        is_code = line.startswith("    ") or (in_code and not line.strip())
        if is_code and not in_code:
            found.append("\n```c")
        elif in_code and not is_code:
            found.append("```\n")
        in_code = is_code
        if is_code:
            found.append(line[4:])
        elif line.startswith("# "):
            found.append(f"**{line[2:]}.**")
        else:
            bullet = re.match(r"^(- |  )", line)
            mark = bullet.group(1) if bullet else ""
            found.append(mark + _words(line[len(mark) :], known, own))
    return "\n".join([*found, "```"] if in_code else found)


def _fields(code: str) -> Tuple[str, List[Tuple[str, str]]]:
    """The declaration without comments, and its fields or values with theirs."""
    found = re.findall(r"  (/\*\*\n.*?\*/)\n  ([^\n]+(?:\n    [^\n]+)*)", code, re.DOTALL)
    bare = re.sub(r"  /\*\*\n.*?\*/\n", "", code, flags=re.DOTALL)
    return bare, [(declaration.rstrip(",;").strip(), comment) for comment, declaration in found]


def _items(text: str) -> Iterator[Item]:
    for match in re.finditer(r"^(/\*\*\n.*?^ \*/)\n(?=\S)", text, re.DOTALL | re.MULTILINE):
        rest = text[match.end() :]
        if rest.startswith("#define"):
            code = rest.split("\n", 1)[0]
        elif re.match(r"typedef (struct|enum)[^;]*\{", rest):
            code = rest[: re.search(r"^\}[^\n]*", rest, re.MULTILINE).end()]  # type: ignore[union-attr]
        elif rest.startswith("static inline"):
            code = rest.split(" {", 1)[0] + ";"
        else:
            code = rest.split(";", 1)[0] + ";"
        bare, fields = _fields(code)
        bare = bare.replace("XSERV_MUST_USE\n", "")
        closing = re.search(r"\}\s*(\w+);", bare)
        called = re.search(r"\(\*(xserv_\w+)\)|\b(xserv_\w+)\(", bare)
        names = NAME.findall(bare)
        if closing:
            name = closing.group(1)
        elif called and not bare.startswith("#define"):
            name = called.group(1) or called.group(2)
        else:
            name = names[0] if bare.startswith("#define") else names[-1]
        yield Item(name, match.group(1), bare, fields)


def sections_of(header: Path) -> List[Section]:
    parts = header.read_text(encoding="utf-8").split(RULE)
    first = [Section("Constants.", list(_items(parts[0])))]
    found = []
    for part in parts[1:]:
        title = re.match(r"\s*/\* ([^*]+?) \*/", part)
        items = list(_items(part))
        if title and items:
            found.append(Section(" ".join(title.group(1).split()), items))
    return [section for section in first if section.items] + found


def names_of(headers: List[Path]) -> Set[str]:
    items = [item for header in headers for section in sections_of(header) for item in section.items]
    return {item.name for item in items} | {
        name for item in items if " enum" in item.code[:14] for field, _ in item.fields for name in NAME.findall(field)[:1]
    }


def page(header: Path, known: Set[str]) -> str:
    """The page of a header."""
    text = header.read_text(encoding="utf-8")
    found = [f"# {header.name}\n"]
    found.append(markdown(text[: text.index("*/") + 2].replace("Generated by cbindgen from src/ffi; do not edit.", ""), known))
    for section in sections_of(header):
        found.append(f"\n## {section.title.rstrip('.')}\n")
        for item in section.items:
            found.append(f"({anchor(item.name)})=\n### `{item.name}`\n")
            found.append(f"```c\n{item.code}\n```\n")
            found.append(markdown(item.comment, known, item.name) + "\n")
            is_enum = item.code.startswith("typedef enum")
            for declaration, comment in item.fields:
                if is_enum:
                    found.append(f"({anchor(NAME.findall(declaration)[0])})=")
                body = markdown(comment, known, item.name).replace("\n", "\n  ")
                found.append(f"`{declaration}`\n: {body}\n")
    return "\n".join(found)
