"""The code of model/README.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "model" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "register()" not in block])
def test_the_readmes_code_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_the_block_that_registers_is_tried_elsewhere() -> None:
    assert len([block for block in BLOCKS if "register()" in block]) == 1
