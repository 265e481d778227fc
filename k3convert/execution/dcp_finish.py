"""The last step of HF -> DCP: sidecar, records, manifest, and ``.metadata`` when all else is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.dcp_pickle import encode_metadata
from k3convert.checkpoint.json_text import parse_json
from k3convert.errors import BadInput
from k3convert.numerics import digest
from k3convert.planning.hf_to_dcp import DcpFinish
from k3convert.planning.inventory import Inventory
from k3convert.planning.manifest import FOLDER, MANIFEST, RECORDS, StoredRecord, seal, write_records
from k3convert.planning.plan import ConversionPlan, RecordRun
from k3convert.version import __version__

PIECE_BYTES = 1 << 20


def finish_dcp(plan: ConversionPlan, result: Path, digests: Mapping[int, str]) -> dict[str, Any]:
    """Write everything beside the chunks; what the report says of it.

    Raises:
        BadInput: tied weights differ, or an asset cannot be read.
    """
    finish: DcpFinish = plan.finish
    _check_tied(plan, finish, digests)
    files: list[dict[str, Any]] = _framing_records(plan, finish)
    files += write_small_files(plan, result)
    files += _write_records(plan, result, finish, digests)
    metadata = encode_metadata(finish.tensors)
    manifest = seal(
        {
            "tool": {"name": "k3convert", "version": __version__},
            "profile": finish.profile,
            "policy": finish.policy,
            "source": _source(finish),
            "counts": dict(plan.counts),
            "files": sorted(
                [*files, {"name": METADATA_NAME, "nbytes": len(metadata), "digest": digest.digest_hex(metadata)}],
                key=lambda file: str(file["name"]),
            ),
        }
    )
    (result / FOLDER).mkdir(exist_ok=True)
    (result / MANIFEST).write_bytes(manifest)
    (result / METADATA_NAME).write_bytes(metadata)
    return {"root_digest": parse_json(manifest)["root_digest"]}


def write_small_files(plan: ConversionPlan, result: Path) -> list[dict[str, Any]]:
    """Copy the plan's assets and write its small files; one record a file.

    Raises:
        BadInput: an asset cannot be read.
    """
    files = []
    for source, name in plan.asset_copies:
        path = result / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nbytes, value = _copy(Path(source), path)
        files.append({"name": name, "nbytes": nbytes, "digest": value})
    for name, data in plan.small_files.items():
        path = result / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files.append({"name": name, "nbytes": len(data), "digest": digest.digest_hex(data)})
    return files


def _copy(source: Path, destination: Path) -> tuple[int, str]:
    hasher = digest.new()
    nbytes = 0
    try:
        with open(source, "rb") as reader, open(destination, "wb") as writer:
            while piece := reader.read(PIECE_BYTES):
                hasher.update(piece)
                writer.write(piece)
                nbytes += len(piece)
    except (FileNotFoundError, PermissionError) as error:
        raise BadInput(f"{source} cannot be copied: {error.strerror}") from error
    return nbytes, hasher.hexdigest()


def _check_tied(plan: ConversionPlan, finish: DcpFinish, digests: Mapping[int, str]) -> None:
    for one, other in finish.must_be_equal:
        if digests[one] != digests[other]:
            raise BadInput(
                f"tie_word_embeddings is true, yet {plan.slot_name(one)} and {plan.slot_name(other)} differ",
                hint="one of the two is right; remove the other, or set tie_word_embeddings to false",
            )


def _framing_records(plan: ConversionPlan, finish: DcpFinish) -> list[dict[str, Any]]:
    records = []
    for file in plan.files:
        hasher = digest.new()
        for _, data in sorted(finish.framing[file.name]):
            hasher.update(data)
        records.append({"name": file.name, "nbytes": file.nbytes, "framing_digest": hasher.hexdigest()})
    return records


def _write_records(
    plan: ConversionPlan, result: Path, finish: DcpFinish, digests: Mapping[int, str]
) -> list[dict[str, Any]]:
    (result / RECORDS).mkdir(parents=True, exist_ok=True)
    files = []
    for group, runs in groupby(plan.records, key=lambda run: run.group):
        of_group = list(runs)
        name = f"{RECORDS}/{group}.jsonl"
        records = (record for run in of_group for record in _stored(run, finish.inventory, digests))
        stacks = _stacks(finish, {run.fqn for run in of_group}, digests)
        nbytes, value = write_records(result / name, records, stacks)
        files.append({"name": name, "nbytes": nbytes, "digest": value})
    return files


def _stored(run: RecordRun, inventory: Inventory, digests: Mapping[int, str]) -> Iterator[StoredRecord]:
    shards = [shard.path.name for shard in inventory.hf.shards]
    for place, tensor in enumerate(run.tensors):
        yield StoredRecord(
            inventory.root.from_canonical(tensor.name),
            tensor.dtype,
            tensor.shape,
            digests[run.slots[place]],
            {"file": shards[tensor.shard], "offset": tensor.offset, "nbytes": tensor.nbytes},
            run.transformation,
            run.fqn,
            place if run.is_stack else None,
            run.stored_dtype,
            None if run.stored_slots is None else digests[run.stored_slots[place]],
        )


def _stacks(finish: DcpFinish, fqns: set[str], digests: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for fqn, slots in finish.stacks.items():
        if fqn in fqns:
            tensor = finish.tensors[fqn]
            yield {
                "stack": fqn,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "digest": digest.stack_digest([digests[slot] for slot in slots]),
            }


def _source(finish: DcpFinish) -> dict[str, Any]:
    inventory = finish.inventory
    hf = inventory.hf
    return {
        "root": inventory.root.name,
        "has_index": hf.index is not None,
        "packed": inventory.packed,
        "shards": [
            {"name": shard.path.name, "nbytes": shard.file_bytes, "header_digest": digest.digest_hex(shard.raw)}
            for shard in hf.shards
        ],
    }
