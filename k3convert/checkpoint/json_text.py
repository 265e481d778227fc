"""JSON that may come from anybody: duplicate keys, depth and encoding are checked."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKey(ValueError):
    """An object names the same key twice."""


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"duplicate key {key!r}")
            seen.add(key)
    return out


def parse_json(data: bytes) -> Any:
    """Decode one JSON document.

    Raises:
        DuplicateKey: an object has a key twice.
        ValueError: not UTF-8, not JSON, or nested too deep.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def dump_json(document: object) -> bytes:
    """One canonical line: sorted keys, no spaces; the form that digests are taken of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
