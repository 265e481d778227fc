"""The verdict of a training run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GIB = 2**30


def verdict_text(document: Mapping[str, Any]) -> str:
    """The document that ``smoke-train --json`` prints, for a person."""
    lines = []
    for run in document["runs"]:
        lines.append(
            f"{run['name']}: {run['num_steps']} steps, loss {run['first_loss']:.4f} -> {run['last_loss']:.4f}, "
            f"{run['tokens_per_s']:,.0f} tokens/s, {run['step_p50_s']:.2f} s a step "
            f"(95 of 100 within {run['step_p95_s']:.2f} s), {run['allocated_bytes'] / _GIB:.2f} GiB of memory"
        )
    width = max(len(check["name"]) for check in document["checks"])
    lines += [f"  {check['result']:<8} {check['name']:<{width}}  {check['detail']}" for check in document["checks"]]
    return "\n".join([*lines, f"verdict: {document['verdict']}", f"report: {document['report']}"])
