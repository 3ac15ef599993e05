"""Looks at every link inside the built documentation:  links.py FOLDER REPOSITORY"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The anchors of a page, and what it leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: Set[str] = set()
        self.targets: List[str] = []

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def main() -> int:
    folder, repository = (Path(argument).resolve() for argument in sys.argv[1:])
    pages: Dict[Path, _Page] = {}
    for file in sorted(folder.rglob("*.html")):
        pages[file] = _Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    wrong, count = [], 0
    for file, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not there.exists() or not there.is_relative_to(folder):
                wrong.append(f"{file.name}: {target}")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                wrong.append(f"{file.name}: {target}")
    # The files of the repository that pages name, as `examples/...`, exist.
    for page_file in sorted((repository / "examples" / "docs").glob("*.md")):
        for word in page_file.read_text(encoding="utf-8").replace("\n", " ").split("`")[1::2]:
            path = word.split(" ")[0]
            if path.startswith(("examples/", "include/", "csrc/", "tests/", "src/")) and not (repository / path).exists():
                wrong.append(f"{page_file.name}: {path}")
    print("\n".join(wrong) or f"{count} links in {len(pages)} pages", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong or count < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
