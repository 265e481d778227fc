"""``k3convert/manifest.json`` and the tensor records of a DCP that this tool wrote.

Every byte under the folder is covered once: a tensor's payload by its record, the framing of a ``.distcp`` file by
the file's framing digest, any other file by its digest in the manifest, the manifest by its own root digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted
from pathlib import Path
from typing import Any, NamedTuple

from k3convert.checkpoint.json_text import dump_json, parse_json
from k3convert.checkpoint.member_paths import unsafe_reason
from k3convert.errors import BadMetadata, DigestMismatch, PathEscape
from k3convert.numerics.digest import ALGORITHM, digest_hex

FOLDER = "k3convert"
MANIFEST = f"{FOLDER}/manifest.json"
RECORDS = f"{FOLDER}/tensors"
FORMAT = "k3convert-dcp"
FORMAT_VERSION = 1


class StoredRecord(NamedTuple):
    """What the manifest says of one HF tensor.

    ``digest`` is that of its bytes in the source, ``stored_digest`` that of its bytes in the DCP where they differ.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    source: Mapping[str, Any]
    transformation: str
    fqn: str
    expert: int | None
    stored_dtype: str
    stored_digest: str | None

    def line(self) -> str:
        """The record as one line of JSON, put together by hand: half a million of them are written at once."""
        source = self.source
        expert = "" if self.expert is None else f',"expert":{self.expert}'
        stored = (
            ""
            if self.stored_digest is None
            else f',"stored":{{"dtype":"{self.stored_dtype}","digest":"{self.stored_digest}"}}'
        )
        return (
            f'{{"name":{quoted(self.name)},"dtype":"{self.dtype}","shape":[{",".join(map(str, self.shape))}],'
            f'"digest":"{self.digest}","source":{{"file":{quoted(source["file"])},"offset":{source["offset"]},'
            f'"nbytes":{source["nbytes"]}}},"transformation":"{self.transformation}","fqn":{quoted(self.fqn)}'
            f"{expert}{stored}}}\n"
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and whose root digest is right."""

    folder: Path
    document: Mapping[str, Any]

    @property
    def files(self) -> list[Mapping[str, Any]]:
        """The record of every file but the manifest itself."""
        return list(self.document["files"])

    @property
    def policy(self) -> Mapping[str, Any]:
        """What the conversion was told to do."""
        return dict(self.document["policy"])

    @property
    def source(self) -> Mapping[str, Any]:
        """What is known of the source."""
        return dict(self.document["source"])

    def records(self) -> Iterator[StoredRecord]:
        """Every tensor record, file by file.

        Raises:
            BadMetadata: a record file is missing or damaged.
        """
        for file in self.files:
            if file["name"].startswith(RECORDS + "/"):
                yield from _read_records(self.folder / file["name"])


def seal(document: Mapping[str, Any]) -> bytes:
    """The manifest's bytes: the document with format, digest algorithm and root digest added."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, "digest_algorithm": ALGORITHM, **document}
    sealed = {**body, "root_digest": digest_hex(dump_json(body))}
    return (json.dumps(sealed, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def has_manifest(folder: Path) -> bool:
    """Whether the folder was written by this tool."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and check its root digest.

    Raises:
        BadMetadata: missing, damaged, or of a format this version does not read.
        DigestMismatch: its content is not what its root digest says.
        PathEscape: it names a file outside the folder.
    """
    path = folder / MANIFEST
    try:
        document = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadMetadata(f"{path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadMetadata(f"{path}: not a manifest of this tool")
    if document.get("format_version") != FORMAT_VERSION or document.get("digest_algorithm") != ALGORITHM:
        raise BadMetadata(
            f"{path}: format {document.get('format_version')!r} with {document.get('digest_algorithm')!r} digests; "
            f"this version reads format {FORMAT_VERSION} with {ALGORITHM}"
        )
    body = {key: value for key, value in document.items() if key != "root_digest"}
    actual = digest_hex(dump_json(body))
    if actual != document.get("root_digest"):
        raise DigestMismatch(
            f"{path}: its content has digest {actual[:16]}..., its root digest says "
            f"{str(document.get('root_digest'))[:16]}..."
        )
    for field, kind in (("files", list), ("policy", dict), ("source", dict), ("counts", dict)):
        if not isinstance(document.get(field), kind):
            raise BadMetadata(f"{path}: no {field}")
    _check_files(path, document["files"])
    return Manifest(folder, document)


def _check_files(path: Path, files: list[Any]) -> None:
    """Check the records of files before one of their names becomes a path.

    Raises:
        PathEscape: names that leave the folder, all of them.
        BadMetadata: something that is no record of a file.
    """
    escapes = []
    for file in files:
        name = file.get("name") if isinstance(file, dict) else None
        if not isinstance(name, str) or type(file.get("nbytes")) is not int:
            raise BadMetadata(f"{path}: {file!r} is no record of a file")
        if not any(isinstance(file.get(kind), str) for kind in ("digest", "framing_digest")):
            raise BadMetadata(f"{path}: {name} has no digest")
        if reason := unsafe_reason(name):
            escapes.append(f"{name!r} {reason}")
    if escapes:
        raise PathEscape(f"{path}: {len(escapes)} file names leave their folder", offenders=escapes)


def write_records(path: Path, records: Iterable[StoredRecord], stacks: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Write one group's records, then its stacks; the file's size in bytes and its digest."""
    lines = [record.line() for record in records]
    lines += [json.dumps(stack, separators=(",", ":"), ensure_ascii=False) + "\n" for stack in stacks]
    data = "".join(lines).encode("utf-8")
    path.write_bytes(data)
    return len(data), digest_hex(data)


def _read_records(path: Path) -> Iterator[StoredRecord]:
    try:
        with open(path, "rb") as file:
            for line in file:
                document = json.loads(line)
                if "stack" in document:
                    continue
                stored = document.get("stored", {})
                yield StoredRecord(
                    document["name"],
                    document["dtype"],
                    tuple(document["shape"]),
                    document["digest"],
                    document["source"],
                    document["transformation"],
                    document["fqn"],
                    document.get("expert"),
                    stored.get("dtype", document["dtype"]),
                    stored.get("digest"),
                )
    except FileNotFoundError as error:
        raise BadMetadata(f"{path} is missing, though the manifest names it") from error
    except (KeyError, TypeError, ValueError) as error:
        raise BadMetadata(f"{path}: a damaged record: {error!r}") from error
