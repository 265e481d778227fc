"""A cell: one way to run the network, as text and as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from k3convert.errors import UsageError
from k3convert.layout import LayoutSyntax, format_layout, parse_layout
from k3convert.layout.text import AXES
from k3kernels.selection import EAGER, FIELD_OPS
from k3model.parallel.layout import Layout

IMPL_PREFIX = "impl."


class CellSyntax(UsageError):
    """The text names no cell."""

    code = "cell-syntax"


class DataKind(StrEnum):
    """What a batch holds: whole rows, documents packed into one row, padded rows, rows with images."""

    DENSE = "dense"
    PACKED = "packed"
    PADDED = "padded"
    IMAGE = "image"


class Precision(StrEnum):
    """The dtype of the network; what stays float32 does so under bf16. fp64 widens everything."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP64 = "fp64"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run the network.

    Attributes:
        layout: degrees of the parallel layout.
        impls: implementation by config field without ``_implementation``; fields left out are eager.
        dtype: of the network.
        data: of the batch.
        recomputes: activation checkpointing.
        shards_heads: KDA under ``sp`` by heads; false is the gather-everything path (``K3_KDA_HEAD_SHARD=0``).
    """

    layout: Layout = field(default_factory=Layout)
    impls: Mapping[str, str] = field(default_factory=dict)
    dtype: Precision = Precision.FP32
    data: DataKind = DataKind.DENSE
    recomputes: bool = False
    shards_heads: bool = True

    @property
    def fused(self) -> dict[str, str]:
        """The implementations that are not eager."""
        return {name: impl for name, impl in self.impls.items() if impl != EAGER}

    def __str__(self) -> str:
        parts = [format_layout(self.layout)] if format_layout(self.layout) else []
        parts += [f"{IMPL_PREFIX}{name}={impl}" for name, impl in sorted(self.fused.items())]
        parts += [f"dtype={self.dtype}", f"data={self.data}"]
        if self.recomputes:
            parts.append("ac=on")
        if not self.shards_heads:
            parts.append("head_shard=0")
        return ",".join(parts)


_SWITCHES = {"on": True, "off": False, "1": True, "0": False}
IMPL_FIELDS = tuple(name.removesuffix("_implementation") for name in FIELD_OPS)
# Short names that people type for the fields of these ops.
IMPL_ALIASES = {"kda": "chunk_kda", "situ": "situ_and_mul"}


def parse_cell(text: str) -> Cell:
    """Read a cell such as ``sp=2,ep=2,impl.kda=fla,dtype=bf16,data=packed,ac=on,head_shard=0``.

    Whatever is left out is one rank, eager, fp32, dense, without recomputation, KDA sharded by heads.

    Raises:
        CellSyntax: with every part that cannot be read.
    """
    layout_parts: list[str] = []
    impls: dict[str, str] = {}
    values: dict[str, object] = {}
    faults: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in AXES:
            layout_parts.append(part)
        elif key.startswith(IMPL_PREFIX):
            name = key.removeprefix(IMPL_PREFIX)
            name = IMPL_ALIASES.get(name, name)
            if name not in IMPL_FIELDS:
                faults.append(f"{part!r}: the ops are {', '.join((*IMPL_ALIASES, *IMPL_FIELDS))}")
            impls[name] = value
        elif key == "dtype" and value in set(Precision):
            values["dtype"] = Precision(value)
        elif key == "data" and value in set(DataKind):
            values["data"] = DataKind(value)
        elif key == "ac" and value in _SWITCHES:
            values["recomputes"] = _SWITCHES[value]
        elif key == "head_shard" and value in _SWITCHES:
            values["shards_heads"] = _SWITCHES[value]
        else:
            faults.append(
                f"{part!r}: a part is a degree ({', '.join(AXES)}), impl.OP=NAME, dtype={'|'.join(Precision)}, "
                f"data={'|'.join(DataKind)}, ac=on|off or head_shard=0|1"
            )
    try:
        layout = parse_layout(",".join(layout_parts))
    except LayoutSyntax as error:
        faults += error.offenders
        layout = Layout()
    if faults:
        raise CellSyntax(f"{text!r} is no cell", offenders=faults)
    return Cell(layout=layout, impls=impls, **values)  # type: ignore[arg-type]
