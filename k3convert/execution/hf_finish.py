"""The last step of DCP -> HF: the files beside the shards. Until the rename none of them has its final place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3convert.errors import DigestMismatch
from k3convert.execution.dcp_finish import write_small_files
from k3convert.planning.dcp_to_hf import HfFinish
from k3convert.planning.plan import ConversionPlan


def finish_hf(plan: ConversionPlan, result: Path, _digests: Mapping[int, str]) -> dict[str, Any]:
    """Copy and write the files beside the shards; what the report says of it.

    Raises:
        DigestMismatch: a copied file is not what the source's manifest recorded.
    """
    finish: HfFinish = plan.finish
    wrong = [
        f"{file['name']}: {str(file['digest'])[:16]}..., recorded {finish.asset_digests[file['name']][:16]}..."
        for file in write_small_files(plan, result)
        if file["name"] in finish.asset_digests
        and file["name"] not in finish.small_files
        and file["digest"] != finish.asset_digests[file["name"]]
    ]
    if wrong:
        raise DigestMismatch(f"{len(wrong)} kept files differ from their recorded digests", offenders=wrong)
    return {"left_out": list(finish.left_out)}
