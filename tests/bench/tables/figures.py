"""The main figures of written tables, as the README has them: python3 tests/bench/tables/figures.py FOLDER..."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

Tables = Dict[str, Dict[str, Any]]
NAMES = ("gemm", "attention", "errors", "scheduling", "kernels")


def read(folder: Path) -> Tables:
    """The tables of a folder by their names, those that are there."""
    files = [folder / f"{name}.json" for name in NAMES]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()}


def rows_of(tables: Tables, table: str, section: str) -> List[Dict[str, Any]]:
    """The rows of a section; none if the machine has no such table."""
    sections = tables.get(table, {}).get("sections", [])
    return [row for one in sections if one["name"] == section for row in one["rows"]]


def machine_of(tables: Tables) -> str:
    """Describes what was measured, when, and with which version."""
    machine = next(iter(tables.values()))["machine"]
    name = machine.get("card") or f"{machine.get('processor', 'CPU')}, {machine.get('threads', '?')} threads"
    return f"{name} ({machine['date'][:10]}, {machine['version']})"


def _number(value: Any) -> str:
    return format(value, ",.3g" if value < 1000 else ",.0f") if isinstance(value, (int, float)) else "-"


def _products(tables: Tables, dtype: str) -> str:
    rows = [row for row in rows_of(tables, "gemm", "squares") if row["dtype"] == dtype and row["m"] == 4096]
    backends = ("naive", "tiled", "blocked", "cublas", "tensor_core")
    found = [f"{name} {_number(row[name])}" for row in rows for name in backends if isinstance(row.get(name), float)]
    return ", ".join(found) or "-"


def _attention(tables: Tables, key: str) -> str:
    rows = [row for row in rows_of(tables, "attention", "prompts") if row["queries"] == 8192]
    return ", ".join(f"{row['backend']} {_number(row.get(key))}" for row in rows if row.get(key) is not None) or "-"


def _decoding(tables: Tables) -> str:
    rows = [row for row in rows_of(tables, "attention", "decoding") if (row["batch"], row["keys"]) == (1, 32768)]
    return ", ".join(f"{row['backend']} {_number(row['gb_s'])}" for row in rows if row.get("gb_s") is not None) or "-"


def _errors(tables: Tables) -> str:
    rows = rows_of(tables, "errors", "operators") + rows_of(tables, "errors", "gradients")
    right = sum(row["outcome"] == "right" for row in rows)
    wrong = sum(row["outcome"] not in ("right", "not there") for row in rows)
    return f"{right} comparisons right, {wrong} wrong"


def _scheduling(tables: Tables, key: str) -> str:
    rows = [row for row in rows_of(tables, "scheduling", "scheduling") if row["requests"] == 8]
    return ", ".join(f"{row['how']} {_number(row[key])}" for row in rows) or "-"


def _steps(tables: Tables) -> str:
    rows = rows_of(tables, "kernels", "decode")
    return ", ".join(f"{row['kernel'].removeprefix('xserv_')} {row['of_step']:.0%}" for row in rows[:3]) or "-"


FIGURES: Sequence[Tuple[str, Callable[[Tables], str]]] = (
    ("product of 4096 x 4096 x 4096, bf16, TFLOP/s", lambda tables: _products(tables, "bf16")),
    ("the same in f32", lambda tables: _products(tables, "f32")),
    ("causal attention of 8,192 tokens, bf16, TFLOP/s", lambda tables: _attention(tables, "tflop_s")),
    ("its work space, MiB", lambda tables: _attention(tables, "workspace_mib")),
    ("attention of one query over 32,768 tokens, GB/s", _decoding),
    ("8 requests, the last one's first token, ms", lambda tables: _scheduling(tables, "first_last_ms")),
    ("8 requests, tokens/s", lambda tables: _scheduling(tables, "tokens_per_second")),
    ("errors of the operators against float64", _errors),
    ("kernels with the largest parts of a step", _steps),
)


def markdown(folders: Sequence[Path]) -> str:
    """A table with a column for each folder of tables."""
    found = [read(folder) for folder in folders]
    lines = ["| | " + " | ".join(machine_of(tables) for tables in found) + " |", "|---" * (len(found) + 1) + "|"]
    lines += ["| " + " | ".join([title, *(figure(tables) for tables in found)]) + " |" for title, figure in FIGURES]
    return "\n".join(lines) + "\n"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Prints the figures of the folders named."""
    folders = [Path(one) for one in (sys.argv[1:] if arguments is None else arguments)]
    if not folders or not all(read(folder) for folder in folders):
        print("usage: figures.py FOLDER..., each with tables", file=sys.stderr)
        return 2
    print(markdown(folders), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
