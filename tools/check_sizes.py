"""Check the sizes of the source files: median, 90th percentile and ceiling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

MEDIAN, P90, CEILING, KERNEL_CEILING = 200, 400, 600, 900
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if (ROOT / name).exists()]
    sizes = {name: len((ROOT / name).read_text().splitlines()) for name in names}
    counts = [size for name, size in sizes.items() if not name.endswith("__init__.py")]
    faults = [
        f"{name}: {size} lines"
        for name, size in sizes.items()
        if size > (KERNEL_CEILING if name.startswith("kernels/") else CEILING)
    ]
    middle, ninth = median(counts), quantiles(counts, n=10)[8]
    if middle > MEDIAN:
        faults.append(f"the median file has {middle} lines, at most {MEDIAN} are wanted")
    if ninth > P90:
        faults.append(f"nine in ten files have up to {ninth:.0f} lines, at most {P90} are wanted")
    print(f"{len(counts)} files, median {middle:.0f} lines, 90th percentile {ninth:.0f}, largest {max(counts)}")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
