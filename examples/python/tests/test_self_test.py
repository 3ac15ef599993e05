"""The self-test of the operators, on the CPU."""

import subprocess
import sys
import unittest

import xserv
from xserv.self_test import Comparison, self_test


class SelfTest(unittest.TestCase):
    def test_every_comparison_is_returned_and_reported(self):
        reported = []
        made = self_test("cpu", num_threads=1, report=reported.append)
        self.assertEqual(made, reported)
        self.assertGreater(len(made), 200)
        self.assertLessEqual({"rms_norm", "gemm", "attention"}, {one.operator for one in made})
        for one in made:
            self.assertIsInstance(one, Comparison)
            if one.outcome == "unsupported":  # a variant that this machine has not
                self.assertTrue(str(one).startswith("unsupported ") and one.message, str(one))
                continue
            self.assertEqual((one.outcome, one.reference, one.message), ("passed", "float64", ""))
            self.assertLessEqual(one.max_error, one.bound)
            self.assertTrue(str(one).startswith(f"ok          {one.operator} {one.what}, "), str(one))

    def test_what_the_report_raises_ends_it(self):
        seen = []

        def report(comparison):
            seen.append(comparison)
            raise KeyError("mine")

        with self.assertRaises(KeyError):
            self_test("cpu", report=report)
        self.assertEqual(len(seen), 1)

    def test_wrong_arguments(self):
        with self.assertRaises(ValueError):
            self_test("tpu")
        with self.assertRaises(xserv.NoDeviceError):
            self_test("cpu", device_index=3)

    def test_as_a_program(self):
        def run(*arguments):
            command = [sys.executable, "-m", "xserv.self_test", *arguments]
            return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

        done = run("--device", "cpu")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^\d+ comparisons of \d+ operators, none failed\n$")
        verbose = run("--device", "cpu", "--verbose")
        self.assertIn("ok          rms_norm f32 ", verbose.stdout)
        refused = run("--device", "cpu", "--device-index", "3")
        self.assertEqual(refused.returncode, 1)
        self.assertTrue(refused.stderr.startswith("xserv.self_test: "), refused.stderr)


if __name__ == "__main__":
    unittest.main()
