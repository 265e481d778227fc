"""What importing the package costs: nothing heavy before the first call."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from k3convert.numerics import casts, difference, digest, mxfp4_decode, mxfp4_encode, mxfp4_format, mxfp4_scales
print(*sorted({"numba", "torch"} & set(sys.modules)))
"""


def test_importing_every_public_module_imports_neither_numba_nor_torch() -> None:
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert finished.stdout.strip() == ""
