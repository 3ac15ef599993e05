"""Lets `python3 tests/bench/tables` find the modules of the repository that it uses."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
# The folder of this file, which Python puts first, would hide modules of other names.
sys.path[0] = str(_HERE.parent)
sys.path += [str(_ROOT / "examples/python"), str(_ROOT / "examples/docs")]

from tables.command import main  # noqa: E402

sys.exit(main())
