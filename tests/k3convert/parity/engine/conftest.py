"""A session on a small checkpoint, and its ranks, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k3convert.loading.checked_source import open_checked
from k3convert.parity.run_pools import RunPools
from k3convert.parity.session import ParitySession, SessionOptions

LIMIT_S = 240.0
# Longer than a chunk of 64 tokens, and no multiple of one.
TOKENS = 80


@pytest.fixture(scope="module")
def pools() -> Iterator[RunPools]:
    with RunPools("cpu", deterministic=False, timeout_s=LIMIT_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def session(small_source: Path, pools: RunPools) -> ParitySession:
    """Five layers of the tiny network: KDA and MLA, dense and with four experts."""
    return ParitySession(SessionOptions(small_source, open_checked(small_source).config, tokens=TOKENS), pools)
