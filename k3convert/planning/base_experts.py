"""Where the packed experts of a base lie: the scales that changed weights are quantised on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from k3convert.mapping.k3 import EXPERTS_PART, PACKED_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.rules import Profile
from k3convert.planning.dcp_source import ChunkReader, DcpSource, contiguous_ranges
from k3convert.planning.hf_target import HfTarget

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BaseExperts:
    """``places(module)``: file and offset of the scales and of the packed bytes of one expert matrix, where known."""

    places: Callable[[str], tuple[Place | None, Place | None]]


def no_experts() -> BaseExperts:
    """A base without packed experts: every scale comes by rule."""
    return BaseExperts(lambda _module: (None, None))


def experts_of_folder(target: HfTarget, first_file: int) -> BaseExperts:
    """The packed experts of an HF folder whose shards are the source files from ``first_file`` on."""
    known: dict[str, Place] = {}
    for number, shard in enumerate(target.shards, start=first_file):
        for entry in shard.entries:
            if EXPERTS_PART in entry.name:
                known[target.root.to_canonical(entry.name)] = (number, entry.offset)
    return BaseExperts(lambda module: (known.get(module + SCALE_SUFFIX), known.get(module + PACKED_SUFFIX)))


def experts_of_dcp(source: DcpSource, first_file: int, profile: Profile) -> BaseExperts:
    """The packed experts, or the kept scales, of a DCP whose files are the source files from ``first_file`` on."""
    reader = ChunkReader(source, first_file)

    def place(name: str) -> Place | None:
        fqn, index = profile.to_fqn(name)
        tensor = source.tensors.get(fqn)
        if tensor is None:
            return None
        ranges = contiguous_ranges(reader.boxes(fqn, index), tensor.dtype)
        return ranges[0][:2] if ranges and len(ranges) == 1 else None

    return BaseExperts(lambda module: (place(module + SCALE_SUFFIX), place(module + PACKED_SUFFIX)))
