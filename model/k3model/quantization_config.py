"""The ``quantization_config`` block: MXFP4 as compressed-tensors writes it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from k3model.config_reading import FieldReader

BLOCK_SIZE = 32
_FORMAT = "mxfp4-pack-quantized"
_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": BLOCK_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "actorder": None,
    "block_structure": None,
    "zp_dtype": None,
}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """MXFP4: blocks of 32 E2M1 elements along the input dim, one E8M0 scale byte a block.

    The block says that a checkpoint may hold packed experts; whether a tensor is packed is decided by the tensors.

    Attributes:
        ignore: patterns of modules that are not packed, in HF names; ``re:`` starts a regular expression.
    """

    format: str = _FORMAT
    group_size: int = BLOCK_SIZE
    ignore: tuple[str, ...] = ()

    def is_ignored(self, hf_module_name: str) -> bool:
        """Whether a pattern exempts the module with this HF name (without the final ``.weight``)."""
        return any(
            re.match(pattern[3:], hf_module_name) if pattern.startswith("re:") else pattern == hf_module_name
            for pattern in self.ignore
        )


def read_quantization(raw: Mapping[str, Any], where: str, reasons: list[str]) -> QuantizationConfig:
    """Read one block; every field that is not MXFP4's is a reason."""
    reader = FieldReader(raw, where, reasons)
    reader.fixed({"quant_method": "compressed-tensors", "format": _FORMAT, "quantization_status": "compressed"})
    reader.nothing(("kv_cache_scheme", "global_compression_ratio"), "only weights are packed")
    reader.ignored(("version", "sparsity_config", "transform_config"))
    patterns: list[str] = []
    for name in ("ignore", "modules_to_not_convert"):
        found = reader.value(name)
        if found is not None and not (isinstance(found, list) and all(isinstance(item, str) for item in found)):
            reader.refuse(f"{name} must be a list of names and patterns, got {found!r}")
        patterns += found if isinstance(found, list) else []
    groups = reader.block("config_groups")
    for group_name, group in (groups or {}).items():
        _read_group(group, f"{where}.config_groups.{group_name}", reasons)
    # A flat group size is how other quantizers write it; it has to agree all the same.
    reader.fixed({"group_size": BLOCK_SIZE})
    reader.close()
    return QuantizationConfig(ignore=tuple(dict.fromkeys(patterns)))


def _read_group(group: object, where: str, reasons: list[str]) -> None:
    if not isinstance(group, Mapping):
        reasons.append(f"{where}: must be an object, got {group!r}")
        return
    reader = FieldReader(group, where, reasons)
    reader.fixed({"format": _FORMAT, "targets": ["Linear"]})
    reader.nothing(("input_activations", "output_activations"), "activations are not quantized")
    weights = reader.block("weights") or {}
    weight_reader = FieldReader(weights, f"{where}.weights", reasons)
    weight_reader.fixed(_WEIGHTS)
    weight_reader.ignored(("observer", "observer_kwargs"))
    weight_reader.close()
    reader.close()


def differences(left: QuantizationConfig, right: QuantizationConfig) -> list[str]:
    """The fields in which two blocks differ, as ``name: left against right``."""
    return [
        f"{field.name}: {getattr(left, field.name)!r} against {getattr(right, field.name)!r}"
        for field in fields(QuantizationConfig)
        if getattr(left, field.name) != getattr(right, field.name)
    ]
