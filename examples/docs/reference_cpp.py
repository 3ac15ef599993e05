"""Writes the reference page of the C++ header from its comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator, List, NamedTuple, Set, Tuple

from reference_c import markdown


class Declaration(NamedTuple):
    comment: str
    code: str
    #: The text between its braces.
    body: str


def _end_of_braces(text: str, start: int) -> int:
    """The position after the brace that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[{}]|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])+'|/\*.*?\*/", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(0), 0)
        if depth == 0:
            return start + match.end()
    raise ValueError("a brace is not closed")


def _head(code: str) -> str:
    """A declaration without the initialisers of a constructor."""
    depth = 0
    for index, char in enumerate(code):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0 and char == ")" and re.match(r"\)\s*(noexcept )?\s*:\s", code[index:]):
            return code[: index + 1]
    return code


def _declarations(text: str) -> Iterator[Declaration]:
    """The declarations of a scope, with the comments before or after them on the line."""
    found: List[Declaration] = []
    position, comment = 0, ""
    while position < len(text):
        if text[position].isspace():
            if text.startswith("\n\n", position):
                comment = ""
            position += 1
        elif text[position] == "#":
            position = text.index("\n", position)
        elif text.startswith("/*", position):
            end = text.index("*/", position) + 2
            line = text[text.rfind("\n", 0, position) + 1 : position]
            if line.strip() and found:
                found[-1] = found[-1]._replace(comment=found[-1].comment or text[position:end])
            else:
                comment = text[position:end]
            position = end
        elif text.startswith("//", position):
            position = text.index("\n", position)
        elif re.match(r"(public|private|protected):", text[position:]):
            end = text.index(":", position) + 1
            found.append(Declaration("", text[position:end], ""))
            position, comment = end, ""
        else:
            start, depth, body = position, 0, ""
            while True:
                char = text[position]
                depth += {"(": 1, ")": -1}.get(char, 0)
                if depth == 0 and char == ";":
                    code = text[start:position]
                    position += 1
                    break
                if depth == 0 and char == "{":
                    code, end = text[start:position], _end_of_braces(text, position)
                    rest = text[end:].lstrip()
                    if rest[:1] in ("{", ",") and ")" in code:  # the braces of an initialiser
                        position = end
                        continue
                    body, position = text[position + 1 : end - 1], end
                    if re.match(r"\s*;", text[end:]):
                        position = text.index(";", end) + 1
                    elif re.match(r"\s*catch", text[end:]):
                        position = _end_of_braces(text, text.index("{", end))
                    break
                position += 1
            found.append(Declaration(comment, _head(code.strip()), body))
            comment = ""
    return iter(found)


def _is_class(code: str) -> bool:
    return re.match(r"(template <[^{]*>\s*)?(class|struct) \w+", code) is not None and "(" not in code.split(":")[0]


def _members(declaration: Declaration) -> List[Tuple[str, str]]:
    """The public members that a user may name, and their comments."""
    is_public = "struct " in declaration.code.split(":")[0]
    found = []
    for member in _declarations(declaration.body):
        if member.code in ("public:", "private:", "protected:"):
            is_public = member.code == "public:"
        elif is_public and not re.match(r"friend|static_assert|using detail|typedef", member.code):
            code = re.sub(r"\n\s+", "\n    ", member.code)
            found.append((code, member.comment))
    return found


def page(header: Path, known: Set[str]) -> str:
    """The page of the header."""
    text = header.read_text(encoding="utf-8")
    found = [f"# {header.name}\n", markdown(text[: text.index("*/") + 2], known), ""]
    inside = text[text.index("namespace xserv {") + len("namespace xserv {") : text.rindex("}  // namespace xserv")]
    functions: List[Declaration] = []
    for declaration in _declarations(inside):
        code = declaration.code
        if code.startswith("namespace") or "DTypeIs" in code or "MemoryO" in code or "MemoryF" in code or "Enable" in code:
            continue
        if not _is_class(code):
            functions.append(declaration)
            continue
        name = re.search(r"(?:class|struct) (\w+)", code).group(1)  # type: ignore[union-attr]
        found += [f"## `xserv::{name}`\n", markdown(declaration.comment, known), ""]
        shared: List[str] = []
        for member, comment in _members(declaration):
            if comment and shared:
                found += ["```cpp", *shared, "```", ""]
                shared = []
            if comment:
                found += [f"```cpp\n{member};\n```", markdown(comment, known), ""]
            else:
                shared.append(member + ";")
        if shared:
            found += ["```cpp", *shared, "```", ""]
    found += ["## Functions and names", ""]
    for declaration in functions:
        found += [f"```cpp\n{declaration.code};\n```", markdown(declaration.comment, known) if declaration.comment else "", ""]
    return "\n".join(found)
