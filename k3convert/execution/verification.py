"""``verify``: structure and digests of one checkpoint, alone or against another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3convert.checkpoint.dcp_blob import blob_frame
from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import open_hf_folder
from k3convert.errors import BadMetadata, UsageError
from k3convert.execution.events import EventSink, ignore_event
from k3convert.execution.hashing import HashJob, hash_jobs
from k3convert.mapping.k3 import K3
from k3convert.mapping.roots import ROOTS
from k3convert.numerics.digest import digest_hex
from k3convert.planning.dcp_source import ChunkReader, DcpSource, contiguous_ranges, open_dcp
from k3convert.planning.hf_to_dcp import LEFT_OUT, no_garbage_collection, source_file
from k3convert.planning.inventory import take_inventory
from k3convert.planning.manifest import MANIFEST, RECORDS, Manifest, StoredRecord

FRAMING = "framing of "


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict on one checkpoint, and on how it compares with another."""

    path: str
    against: str | None
    kind: str
    num_tensors: int
    num_bytes: int
    digests_known: bool
    content_digest: str
    faults: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and nothing differs."""
        return not self.faults and not self.differences

    def document(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in self.__slots__},
            "faults": list(self.faults),
            "differences": list(self.differences),
        }


@dataclass(frozen=True, slots=True)
class _Checked:
    kind: str
    digests: Mapping[str, str]
    num_bytes: int
    digests_known: bool
    faults: tuple[str, ...]


def verify_checkpoint(path: Path, *, against: Path | None = None, on_event: EventSink = ignore_event) -> Verification:
    """Read every byte of ``path`` and check it; compare its HF tensors' digests with those of ``against``.

    A DCP of ours is checked against its manifest. Of a folder without recorded digests the structure is checked, and
    its digests serve for the comparison. ``against`` is read in full too, unless its manifest tells its digests.

    Raises:
        BadInput: a side is no readable checkpoint.
    """
    with no_garbage_collection():
        checked = _check(path, on_event)
        differences: list[str] = []
        if against is not None:
            differences = _differences(checked.digests, _recorded(against) or _check(against, on_event).digests)
    content = digest_hex(*(f"{name} {value}\n".encode() for name, value in sorted(checked.digests.items())))
    return Verification(
        str(path),
        None if against is None else str(against),
        checked.kind,
        len(checked.digests),
        checked.num_bytes,
        checked.digests_known,
        content,
        checked.faults,
        tuple(differences),
    )


def _differences(mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [
        *(f"only in the first: {name}" for name in mine if name not in other),
        *(f"only in the second: {name}" for name in other if name not in mine),
        *(f"different bytes: {name}" for name, value in mine.items() if other.get(name, value) != value),
    ]


def _check(path: Path, on_event: EventSink) -> _Checked:
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder")
    if not (path / METADATA_NAME).exists():
        return _check_hf(path, on_event)
    source = open_dcp(path, K3, None)
    return (
        _check_foreign(source, on_event) if source.manifest is None else _check_own(source, source.manifest, on_event)
    )


def _check_hf(folder: Path, on_event: EventSink) -> _Checked:
    inventory = take_inventory(open_hf_folder(folder))
    files = [source_file(inventory.hf, position) for position in range(len(inventory.hf.shards))]
    jobs = [
        HashJob(tensor.name, ((tensor.shard, tensor.offset, tensor.nbytes),))
        for tensor in sorted(inventory.tensors(), key=lambda tensor: (tensor.shard, tensor.offset))
    ]
    digests = hash_jobs(files, jobs, on_event=on_event)
    return _Checked("hf", digests, inventory.hf.payload_bytes, False, ())


def _check_foreign(source: DcpSource, on_event: EventSink) -> _Checked:
    """A DCP of another tool: every entry must be where the metadata says; there are no digests to compare with."""
    reader = ChunkReader(source, 0)
    jobs = []
    for fqn, tensor in source.tensors.items():
        ranges = contiguous_ranges(reader.boxes(fqn, None), tensor.dtype)
        if ranges is not None:
            jobs.append(HashJob(fqn, tuple(ranges)))
    digests = hash_jobs(source.files, jobs, on_event=on_event)
    return _Checked("dcp", digests, sum(job.nbytes for job in jobs), False, ())


def _check_own(source: DcpSource, manifest: Manifest, on_event: EventSink) -> _Checked:
    faults = _check_files(source, manifest)
    records = list(manifest.records())
    reader = ChunkReader(source, 0)
    jobs: list[HashJob] = []
    wanted: dict[str, str] = {}
    for record in records:
        if record.transformation == LEFT_OUT:
            continue
        if record.fqn not in source.tensors:
            faults.append(f"{record.fqn} is recorded but not in {METADATA_NAME}")
            continue
        tensor = source.tensors[record.fqn]
        ranges = contiguous_ranges(reader.boxes(record.fqn, record.expert), tensor.dtype)
        if ranges is None:
            raise BadMetadata(f"{source.folder}: {record.fqn} is cut otherwise than this tool does")
        jobs.append(HashJob(record.name, tuple(ranges)))
        wanted[record.name] = record.stored_digest or record.digest
    framing_jobs, uncovered = _framing_jobs(source, manifest)
    faults += uncovered
    wanted |= {
        FRAMING + str(file["name"]): str(file["framing_digest"]) for file in manifest.files if "framing_digest" in file
    }
    jobs = sorted(jobs, key=lambda job: job.ranges[:1]) + framing_jobs
    found = hash_jobs(source.files, jobs, on_event=on_event)
    faults += [
        f"{name}: digest {found[name][:16]}..., recorded {value[:16]}..."
        for name, value in wanted.items()
        if name in found and found[name] != value
    ]
    faults += [f"{name} is recorded but was not found" for name in wanted if name not in found]
    nbytes = sum(job.nbytes for job in jobs)
    return _Checked("dcp", _canonical(records, manifest), nbytes, True, tuple(faults))


def _check_files(source: DcpSource, manifest: Manifest) -> list[str]:
    """Every file that the manifest names, none else, of the recorded size; small ones of the recorded digest."""
    folder = source.folder
    faults = []
    known = {str(file["name"]): file for file in manifest.files}
    present = {
        (Path(parent) / name).relative_to(folder).as_posix() for parent, _, files in os.walk(folder) for name in files
    }
    faults += [f"{name} is not in the manifest" for name in sorted(present - set(known) - {MANIFEST})]
    for name, file in known.items():
        path = folder / name
        if name not in present:
            faults.append(f"{name} is missing")
        elif path.stat().st_size != file["nbytes"]:
            faults.append(f"{name} has {path.stat().st_size} bytes, recorded {file['nbytes']}")
        elif "digest" in file and (found := _file_digest(path)) != file["digest"]:
            faults.append(f"{name}: digest {found[:16]}..., recorded {str(file['digest'])[:16]}...")
    return faults


def _file_digest(path: Path) -> str:
    from k3convert.numerics import digest

    hasher = digest.new()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


def _framing_jobs(source: DcpSource, manifest: Manifest) -> tuple[list[HashJob], list[str]]:
    """One job a file over all bytes that belong to no payload, and the files whose entries leave bytes uncovered."""
    by_file: dict[str, list[tuple[int, int, int, int]]] = {}
    for tensor in source.tensors.values():
        for chunk in tensor.chunks:
            frame = blob_frame(tensor.dtype, chunk.sizes)
            nbytes = num_bytes(tensor.dtype, chunk.sizes)
            by_file.setdefault(chunk.file, []).append((chunk.offset, len(frame.prefix), nbytes, chunk.length))
    numbers = {name: number for number, name in enumerate(source.file_names)}
    sizes = {str(file["name"]): int(file["nbytes"]) for file in manifest.files}
    jobs, faults = [], []
    for name, entries in by_file.items():
        ranges: list[tuple[int, int, int]] = []
        position = 0
        for offset, prefix, nbytes, length in sorted(entries):
            if offset != position:
                faults.append(f"{name}: bytes {position} to {offset} belong to no entry")
            ranges.append((numbers[name], offset, prefix))
            ranges.append((numbers[name], offset + prefix + nbytes, length - prefix - nbytes))
            position = offset + length
        if position != sizes.get(name):
            faults.append(f"{name}: its entries end at byte {position}, it has {sizes.get(name)}")
        jobs.append(HashJob(FRAMING + name, tuple(ranges)))
    return jobs, faults


def _recorded(path: Path) -> dict[str, str] | None:
    """The digests that a DCP of ours records of its source's tensors, or None for anything else."""
    if not (path / MANIFEST).is_file():
        return None
    source = open_dcp(path, K3, None)
    assert source.manifest is not None
    faults = [fault for fault in _check_files(source, source.manifest) if RECORDS in fault]
    if faults:
        raise BadMetadata(f"{path}: {len(faults)} faults in its records", offenders=faults)
    return _canonical(list(source.manifest.records()), source.manifest)


def _canonical(records: list[StoredRecord], manifest: Manifest) -> dict[str, str]:
    root = ROOTS.get(str(manifest.source.get("root")))
    if root is None:
        raise BadMetadata(f"{manifest.folder}: unknown root {manifest.source.get('root')!r}")
    return {root.to_canonical(record.name): record.digest for record in records}
