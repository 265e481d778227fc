"""Fail when fewer tests ran than the recorded floor: a test that is no longer collected must not go unnoticed."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main() -> int:
    floor = int(Path(sys.argv[1]).read_text())
    ran = failed = skipped = 0
    for report in sys.argv[2:]:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            ran += int(suite.get("tests", 0))
            skipped += int(suite.get("skipped", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    print(f"{ran - skipped} tests ran ({skipped} skipped, {failed} failed); the floor is {floor}")
    return 0 if ran - skipped >= floor and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
