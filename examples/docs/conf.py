"""The configuration of Sphinx, which makes the documentation. examples/docs/build runs it."""

import re
import sys
from pathlib import Path
from typing import List

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY / "examples" / "python")]

import figures  # noqa: E402
import reference_c  # noqa: E402
import reference_cpp  # noqa: E402
from docstrings import to_rst  # noqa: E402

project = "xserv"
author = "the authors of xserv"
version = release = re.search(r'^version = "(.*)"', (REPOSITORY / "Cargo.toml").read_text(), re.MULTILINE).group(1)
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_show_copyright = False
html_title = f"xserv {release}"
smartquotes = False
nitpicky = True
# Names of Python and of other packages have no page here.
nitpick_ignore_regex = [("py:.*", r"(?!xserv\.Model$|xserv\.plan$).*")]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
toc_object_entries_show_parents = "hide"
suppress_warnings = ["myst.header"]


def write_pages(_app: object) -> None:
    """Writes the pages of the headers, and the figures, before Sphinx reads its pages."""
    folder, include = HERE / "generated", REPOSITORY / "include"
    folder.mkdir(exist_ok=True)
    headers = [include / "xserv.h", include / "xserv_ops.h"]
    known = reference_c.names_of(headers)
    pages = {header.stem + "_c": reference_c.page(header, known) for header in headers}
    pages["xserv_cpp"] = reference_cpp.page(include / "xserv.hpp", known)
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    figures.draw_all(REPOSITORY / "README.md", folder / "figures")


def read_docstring(_app: object, _what: str, _name: str, _object: object, _options: object, lines: List[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", read_docstring)  # type: ignore[attr-defined]
    app.connect("builder-inited", write_pages)  # type: ignore[attr-defined]
