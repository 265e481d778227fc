"""A DCP as a source: any chunks, any world size, under any of the prefixes that frameworks put before our names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3convert.checkpoint.dcp_blob import MAX_PAYLOAD_BYTES, blob_frame, locate_payload
from k3convert.checkpoint.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor, check_files, read_metadata
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.member_paths import resolve_member
from k3convert.errors import BadMetadata
from k3convert.mapping.roots import BARE, RELEASED
from k3convert.mapping.rules import Profile
from k3convert.planning.manifest import Manifest, has_manifest, read_manifest
from k3convert.planning.plan import Box, SourceFile

PREFIXES = ("", "model.")
BARE_MARK = "(bare root)"
NETWORK_PREFIXES = ("language_model.", "vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class DcpSource:
    """An opened DCP: its tensors under the profile's FQNs, and what else it holds.

    ``left_out`` is everything else, ``unexpected`` those tensors of it that are named as parts of the network.
    """

    folder: Path
    manifest: Manifest | None
    tensors: Mapping[str, DcpTensor]
    stored_names: Mapping[str, str]
    left_out: tuple[str, ...]
    unexpected: tuple[str, ...]
    prefix: str
    file_names: tuple[str, ...]
    files: tuple[SourceFile, ...]
    metadata_bytes: bytes


def open_dcp(folder: Path, profile: Profile, wanted: frozenset[str] | None) -> DcpSource:
    """Open a DCP folder; ``wanted`` are the FQNs that tell which prefix its names carry (None: take them as they are).

    Raises:
        BadMetadata, IncompleteCheckpoint, PathEscape, DigestMismatch: see the readers.
    """
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    manifest = read_manifest(folder) if has_manifest(folder) else None
    names, prefix = _native_names(metadata, profile, wanted)
    tensors = {native: metadata.tensors[stored] for stored, native in names.items()}
    if len(tensors) != len(names):
        doubles = sorted({native for native in names.values() if list(names.values()).count(native) > 1})
        raise BadMetadata(f"{folder}: {len(doubles)} tensors are stored under two names each", offenders=doubles)
    scalars = [native for native, tensor in tensors.items() if not tensor.shape and profile.is_stack(native)]
    if scalars:
        raise BadMetadata(f"{folder}: {len(scalars)} stacks of experts are scalars", offenders=scalars)
    left_out = (*metadata.other_entries, *(name for name in metadata.tensors if name not in names))
    return DcpSource(
        folder,
        manifest,
        tensors,
        {native: stored for stored, native in names.items()},
        tuple(sorted(left_out)),
        tuple(sorted(name for name in left_out if name in metadata.tensors and _is_of_network(name, prefix))),
        prefix,
        tuple(metadata.file_names()),
        tuple(_source_file(folder, name) for name in metadata.file_names()),
        (folder / ".metadata").read_bytes(),
    )


def _native_names(metadata: DcpMetadata, profile: Profile, wanted: frozenset[str] | None) -> tuple[dict[str, str], str]:
    """Stored name -> FQN of the profile, under the prefix and root that fit most names."""
    best: dict[str, str] = {}
    best_prefix = ""
    for prefix in PREFIXES:
        for root in (RELEASED, BARE):
            names = {
                stored: profile.without_holder(root.to_canonical(stored.removeprefix(prefix)))
                for stored in metadata.tensors
                if stored.startswith(prefix)
            }
            if wanted is not None:
                names = {stored: native for stored, native in names.items() if native in wanted}
            if len(names) > len(best):
                best, best_prefix = names, prefix + ("" if root is RELEASED else BARE_MARK)
    return best, best_prefix


def _is_of_network(name: str, prefix: str) -> bool:
    bare = prefix.endswith(BARE_MARK)
    root = BARE if bare else RELEASED
    return root.to_canonical(name.removeprefix(prefix.removesuffix(BARE_MARK))).startswith(NETWORK_PREFIXES)


def _source_file(folder: Path, name: str) -> SourceFile:
    path = resolve_member(folder, name)
    status = path.stat()
    return SourceFile(str(path), status.st_size, f"{status.st_mtime_ns}")


@dataclass(slots=True)
class ChunkReader:
    """Finds where the bytes of a tensor, or of one expert of a stack, lie."""

    source: DcpSource
    first_file: int
    _payloads: dict[tuple[str, int], int] = field(default_factory=dict)
    _by_expert: dict[str, dict[int, list[DcpChunk]]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, name in enumerate(self.source.file_names):
            self._numbers[name] = self.first_file + position

    def boxes(self, fqn: str, index: int | None) -> list[Box]:
        """The parts that make up a tensor, or expert ``index`` of a stack, in the order of their first rows.

        Raises:
            BadMetadata: an entry is not what the metadata says.
        """
        tensor = self.source.tensors[fqn]
        boxes = []
        for chunk in self._chunks(fqn, index):
            payload = self._payload(fqn, tensor, chunk)
            lo = [0] * len(chunk.sizes)
            hi = list(chunk.sizes)
            at = chunk.offsets
            if index is not None:
                lo[0] = index - chunk.offsets[0]
                hi[0] = lo[0] + 1
                at = at[1:]
            number = self._number(chunk.file)
            sizes = chunk.sizes or (1,)
            boxes.append(Box(number, payload, sizes, tuple(lo) or (0,), tuple(hi) or (1,), at or (0,)))
        boxes.sort(key=lambda box: box.at)
        return boxes

    def _number(self, file: str) -> int:
        return self._numbers[file]

    def _chunks(self, fqn: str, index: int | None) -> Sequence[DcpChunk]:
        chunks = self.source.tensors[fqn].chunks
        if index is None:
            return [chunk for chunk in chunks if 0 not in chunk.sizes]
        by_expert = self._by_expert.get(fqn)
        if by_expert is None:
            by_expert = self._by_expert[fqn] = {}
            for chunk in chunks:
                if 0 not in chunk.sizes:
                    for expert in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                        by_expert.setdefault(expert, []).append(chunk)
        return by_expert.get(index, [])

    def _payload(self, fqn: str, tensor: DcpTensor, chunk: DcpChunk) -> int:
        key = (chunk.file, chunk.offset)
        found = self._payloads.get(key)
        if found is None:
            found = self._payloads[key] = chunk.offset + self._locate(fqn, tensor, chunk)
        return found

    def _locate(self, fqn: str, tensor: DcpTensor, chunk: DcpChunk) -> int:
        nbytes = num_bytes(tensor.dtype, chunk.sizes)
        if self.source.manifest is not None and nbytes <= MAX_PAYLOAD_BYTES:
            frame = blob_frame(tensor.dtype, chunk.sizes)
            if len(frame.prefix) + nbytes + len(frame.suffix) == chunk.length:
                return len(frame.prefix)
        path = self.source.folder / chunk.file
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return locate_payload(
                lambda offset, count: os.pread(descriptor, count, chunk.offset + offset),
                chunk.length,
                tensor.dtype,
                chunk.sizes,
            )
        except ValueError as error:
            raise BadMetadata(f"{path}: the entry of {fqn} at byte {chunk.offset} {error}") from error
        finally:
            os.close(descriptor)


def contiguous_ranges(boxes: Sequence[Box], dtype: str) -> list[tuple[int, int, int]] | None:
    """Source ranges ``(file, offset, nbytes)`` whose concatenation is the tensor, or None when it is cut otherwise."""
    ranges = []
    for box in boxes:
        extra = len(box.chunk_shape) - len(box.at)
        if any(place for place in box.at[1:]):
            return None
        if any(box.lo[d] or box.hi[d] != box.chunk_shape[d] for d in range(extra, len(box.chunk_shape))):
            return None
        per_expert = num_bytes(dtype, (1, *box.chunk_shape[extra:]))
        first = box.lo[0] if extra else 0
        ranges.append((box.source, box.payload_offset + first * per_expert, per_expert))
    return ranges
