"""Tests of the tables, at their smallest size and on the CPU: python3 tests/bench/tables/test_tables.py FOLDER

FOLDER has a small model.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

_HERE = Path(__file__).resolve().parent
sys.path[0] = str(_HERE.parent)
sys.path += [str(_HERE.parents[2] / "examples/python"), str(_HERE.parents[2] / "examples/docs")]

import numpy as np  # noqa: E402
from tables import command, figures, trace, work  # noqa: E402
from tables.units import error_in_units  # noqa: E402
from xserv import ops  # noqa: E402

MODEL = ""


def run(*arguments: str) -> Tuple[int, Dict[str, Any]]:
    """Runs the command; returns its exit code and its tables, after a look at their files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        with contextlib.redirect_stderr(io.StringIO()):
            code = command.main([*arguments, "--tiny", "--threads", "1", "--out", folder])
        tables = {}
        for line in said.getvalue().splitlines():
            told = json.loads(line)
            name = told["table"]
            tables[name] = json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
            assert tables[name]["outcome"] == told["outcome"]
            page = Path(folder, f"{name}.md").read_text(encoding="utf-8")
            for key in ("date", "version", "processor", "size"):
                assert f"\n- {key}: " in page, page
            pictures = [file for file in told["files"] if file.endswith(".svg")]
            assert f"{folder}/{name}.svg" in pictures, pictures
            for file in pictures:
                assert xml.etree.ElementTree.parse(file).getroot().tag.endswith("svg")
    return code, tables


class Tables(unittest.TestCase):
    """The command."""

    def test_all_are_made(self) -> None:
        code, tables = run("all", "--model", MODEL)
        self.assertEqual(code, 0, {name: table["failures"] for name, table in tables.items()})
        self.assertEqual(set(tables), set(command.TABLES))
        self.assertEqual(tables.pop("kernels")["outcome"], "skipped")
        for name, table in tables.items():
            self.assertEqual(table["outcome"], "passed", name)
            for section in table["sections"]:
                self.assertTrue(section["rows"], f"{name}: {section['title']}")
        operators = {row["operator"] for row in tables["errors"]["sections"][0]["rows"]}
        self.assertEqual(operators, set(ops._OPERATORS))

    def test_a_wrong_operator_is_told(self) -> None:
        right = ops.Context.silu

        def wrong(self: ops.Context, x: Any, out: Any) -> None:
            right(self, x, out)
            if isinstance(out, np.ndarray) and out.dtype == np.float32:
                out[3, 5] *= 1.001

        with unittest.mock.patch.object(ops.Context, "silu", wrong):
            code, tables = run("errors", "gemm")
        self.assertEqual(code, 1)
        rows = tables["errors"]["sections"][0]["rows"]
        self.assertEqual([(r["operator"], r["dtype"]) for r in rows if r["outcome"] != "right"], [("silu", "f32")])
        self.assertEqual(len(tables["errors"]["failures"]), 1)
        self.assertIn("silu", tables["errors"]["failures"][0])
        self.assertEqual(tables["gemm"]["outcome"], "passed")

    def test_a_wrong_gradient_is_told(self) -> None:
        right = ops.Context.gemm_backward

        def wrong(self: ops.Context, a: Any, b: Any, dc: Any, da: Any, db: Any) -> None:
            right(self, a, b, dc, da, db)
            if da.shape == (9, 17):  # that of the finite differences
                da[2, 4] += 1

        with unittest.mock.patch.object(ops.Context, "gemm_backward", wrong):
            code, tables = run("errors")
        self.assertEqual(code, 1)
        row = tables["errors"]["sections"][1]["rows"][0]
        self.assertEqual((row["outcome"], row["worst"], row["failed"]), ("WRONG", "[2, 4]", 1))

    def test_wrong_attention_is_told(self) -> None:
        right = ops.Context.attention

        def wrong(self: ops.Context, q: Any, k: Any, v: Any, out: Any, **options: Any) -> None:
            right(self, q, k, v, out, **dict(options, causal=False))

        with unittest.mock.patch.object(ops.Context, "attention", wrong):
            code, tables = run("attention")
        self.assertEqual(code, 1)
        rows = tables["attention"]["sections"][2]["rows"]
        self.assertEqual([row["outcome"] for row in rows], ["WRONG" if row["causal"] else "right" for row in rows])

    def test_a_table_that_raises_stops_no_other(self) -> None:
        code, tables = run("scheduling", "gemm", "--model", "/no/such/folder")
        self.assertEqual(code, 1)
        self.assertEqual([tables[name]["outcome"] for name in ("scheduling", "gemm")], ["failed", "passed"])
        self.assertIn("/no/such/folder", tables["scheduling"]["failures"][0])


class Units(unittest.TestCase):
    """Errors in units of rounding."""

    def test_units_are_neighbours(self) -> None:
        for size in (1.0, 1.5, 3e-5, 4096.0, 0.0):
            want = np.array([float(np.float32(size))])
            got = np.array([float(np.nextafter(np.float32(size), np.float32(np.inf)))])
            least = 2.0**-149 if size == 0 else float(np.spacing(np.float32(size)))
            self.assertEqual(error_in_units(got, want, "f32", "element").max_error, least)
            self.assertEqual(error_in_units(got, want, "f32", "element").max_units, 1.0)

    def test_what_is_not_finite(self) -> None:
        want = np.array([np.inf, np.nan, 1.0])
        self.assertEqual(error_in_units(want, want, "bf16", "rms").max_units, 0.0)
        found = error_in_units(np.array([np.inf, np.nan, np.nan]), want, "bf16", "rms")
        self.assertEqual((found.max_units, found.place), (np.inf, 2))

    def test_the_size_of_a_row(self) -> None:
        want = np.array([[8.0, 0.0], [0.125, 0.0]])
        got = want + np.array([[0.0, 2.0**-21], [0.0, 2.0**-27]])
        self.assertEqual(error_in_units(got, want, "f32", "row").max_units, 1.0)
        # By the size of all elements, an error of the smaller row is a small part of a unit.
        got[0] = want[0]
        self.assertEqual(error_in_units(got, want, "f32", "row").max_units, 1.0)
        self.assertLess(error_in_units(got, want, "f32", "rms").max_units, 0.1)


class Kernels(unittest.TestCase):
    """Traces and marks."""

    def test_what_limits_a_kernel(self) -> None:
        chip = trace.Multiprocessor()
        cases = {
            ((9999,), (256,), 24, 0): (8, "threads"),
            ((9999,), (128,), 255, 0): (2, "registers"),
            ((9999,), (128,), 32, 200 << 10): (1, "shared memory"),
            ((9999,), (32,), 16, 0): (32, "blocks"),
            ((132,), (256,), 32, 0): (1, "grid"),
        }
        for given, wanted in cases.items():
            found = trace.occupancy(*given, chip)
            self.assertEqual((found.blocks, found.limit), wanted, given)

    def test_kernels_of_a_trace(self) -> None:
        def event(name: str, ts: float, dur: float) -> Dict[str, Any]:
            sizes = {"grid": [264, 1, 1], "block": [128, 1, 1], "registers per thread": 64, "shared memory": 1024}
            return dict(cat="kernel", name=name, ts=ts, dur=dur, args=sizes)

        events = [event("xserv_linear_gemv_swiglu_1_1_bf16", 30, 4), event("void a::b<int>(int*)", 10, 1)]
        events.append(event("xserv_linear_gemv_swiglu_1_1_bf16", 40, 4))
        found = trace.kernels_of(dict(traceEvents=[*events, dict(cat="cpu_op", name="x", ts=1)]))
        self.assertEqual([one["ts"] for one in found], [10, 30, 40])
        start = trace.after_prompt(found, found[:1])
        self.assertEqual(start, 1)
        rows = trace.rows_of(found[start:], 2, trace.Multiprocessor())
        self.assertEqual((rows[0]["us"], rows[0]["launches"], rows[0]["limit"]), (4.0, 1.0, "grid"))
        shape = work.Shape(1, 10, 20, 1_000_000, 40, 50, 8, 16, 100)
        work.add_work(rows, shape, 1, 0.0, work.Ceilings(1000.0, 100.0), 2)
        self.assertEqual((rows[0]["mb"], rows[0]["of_ceiling"]), (2.0, 0.5))

    def test_work_of_kernels(self) -> None:
        # Layers, weights of one and of the output matrix, hidden size, width of the heads, vocabulary.
        shape = work.Shape(3, 10, 20, 30, 40, 50, 8, 16, 100)

        def work_of(name: str, launches: int, tokens: int) -> Optional[work.Work]:
            return work.work_of(name, launches, shape, tokens, 1000.0, 2, 64)

        self.assertEqual(work_of("xserv_linear_gemv_mma_residual_bf16", 6, 1), (3 * 60 * 2, 3 * 60 * 2))
        self.assertEqual(work_of("xserv_linear_gemv_mma_residual_bf16", 3, 1), (3 * 40 * 2, 3 * 40 * 2))
        self.assertEqual(work_of("xserv_linear_gemv_norm_1_1_bf16", 1, 1), (100, 100))
        self.assertEqual(work_of("xserv_linear_prefill_swiglu_128x192_m_bf16", 2, 5), (2 * 30 * 2, 2 * 30 * 2 * 5))
        self.assertEqual(work_of("xserv_attention_fused_project_2_bf16", 3, 1), (1000 + 3 * 20 * 2, 3 * 20 * 2))
        # 15 pairs of queries and keys, two products of 16 elements each.
        self.assertEqual(
            work_of("xserv_attention_flash_wgmma_128_bf16", 3, 5), (1000 + 2 * 16 * 5 * 3 * 2, 15 * 2 * 2 * 16 * 3)
        )
        self.assertEqual(work_of("xserv_add_rms_norm_rounded_vec_bf16", 7, 5), (4 * (5 * 5 + 2) * 8 * 2, 0))
        self.assertEqual(work_of("xserv_sample_scan_bf16", 1, 1), (200, 0))
        self.assertEqual(work_of("xserv_sample_choose_bf16", 1, 1), (64 * 8, 0))
        self.assertEqual(work_of("xserv_embedding_i32_b16", 2, 5), (2 * 2 * 8 * 2, 0))
        self.assertEqual(work_of("xserv_linear_skinny_plain_64x16_bf16", 2, 5), (60 * 2, 60 * 2))
        self.assertEqual(work_of("xserv_linear_skinny_plain_192x16_bf16", 1, 5), (50 * 2, 50 * 2))
        self.assertEqual(work_of("nvjet_sm90_tst_64x64", 4, 5), (2 * 60 * 2, 2 * 60 * 2 * 5))
        self.assertIsNone(work_of("nvjet_sm90_tst_64x64", 5, 5))

    def test_figures_are_those_of_the_tables(self) -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
            with contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(figures.main([folder]), 2)
            machine = dict(date="2026-11-25T08:00:00+00:00", version="1.2.3", card="a card")
            row = dict(dtype="bf16", m=4096, naive=0.5, tiled=12.34, cublas=1234.5, tensor_core="not for this type")
            table = dict(machine=machine, sections=[dict(name="squares", rows=[row])])
            Path(folder, "gemm.json").write_text(json.dumps(table), encoding="utf-8")
            self.assertEqual(figures.main([folder, folder]), 0)
        lines = said.getvalue().splitlines()
        self.assertEqual(lines[0], "| | a card (2026-11-25, 1.2.3) | a card (2026-11-25, 1.2.3) |")
        found = "naive 0.5, tiled 12.3, cublas 1,234"
        self.assertEqual(lines[2], f"| product of 4096 x 4096 x 4096, bf16, TFLOP/s | {found} | {found} |")
        self.assertEqual(lines[3], "| the same in f32 | - | - |")

    def test_the_readme_has_the_figures(self) -> None:
        root = _HERE.parents[2]
        readme = (root / "README.md").read_text(encoding="utf-8")
        folders = sorted(path for path in (_HERE / "results").iterdir() if path.is_dir())
        self.assertIn(figures.markdown(folders), readme)

    def test_parts_by_marks(self) -> None:
        part = dict(metric="decode 1 x 512", part="down", count=28, us=20.0, bytes=4e7, flops=1e6, limit_us=10.0, queue_us=1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "steps.json")
            file.write_text("NVIDIA: loaded\n" + json.dumps(part) + "\n", encoding="utf-8")
            code, tables = run("kernels", "--steps", str(file))
            row = tables["kernels"]["sections"][0]["rows"][0]
            self.assertEqual((code, row["part"], row["mb"], row["of_ceiling"]), (0, "down", 40.0, 0.5))
            file.write_text("nothing\n", encoding="utf-8")
            self.assertEqual(run("kernels", "--steps", str(file))[0], 1)


if __name__ == "__main__":
    MODEL = sys.argv.pop(1)
    unittest.main()
