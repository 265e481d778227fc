"""What a checkpoint holds, and how that compares with the census of its config; headers and metadata only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import CONFIG_NAME, INDEX_NAME, Index, open_hf_folder, read_config, read_index
from k3convert.errors import IncompleteCheckpoint, UnmappedNames, UsageError
from k3convert.mapping.k3 import EXPERTS_PART, K3, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.roots import Root, detect_root
from k3convert.planning.dcp_source import DcpSource, open_dcp
from k3convert.planning.hf_sidecar import ASSET_FILES
from k3convert.planning.hf_to_dcp import no_garbage_collection
from k3convert.planning.inventory import CensusReport, SourceTensor, compare_census, decide_packed, parse_config
from k3model.census import census
from k3model.config import KimiK3Config


@dataclass(slots=True)
class ComponentTally:
    """Tensors, stored bytes and the values they stand for, of one component."""

    tensors: int = 0
    nbytes: int = 0
    values: int = 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that ``k3convert inspect`` says."""

    path: str
    kind: str
    num_files: int
    num_tensors: int
    total_bytes: int
    packed_pairs: int
    packed_values: int
    plain_values: int
    components: Mapping[str, ComponentTally]
    dtypes: Mapping[str, ComponentTally]
    census: CensusReport | None
    root: str | None
    experts: str
    quantization: str | None
    other_entries: tuple[str, ...] = ()
    kept_scales: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether the tensors are those that the config calls for."""
        return self.census is None or self.census.ok

    def document(self) -> dict[str, Any]:
        """The inspection as JSON."""
        document: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("components", "dtypes", "census", "other_entries", "notes")
        }
        for name, tallies in (("components", self.components), ("dtypes", self.dtypes)):
            document[name] = {
                key: {"tensors": tally.tensors, "bytes": tally.nbytes, "values": tally.values}
                for key, tally in tallies.items()
            }
        document["census"] = None if self.census is None else census_document(self.census)
        document["other_entries"] = list(self.other_entries)
        document["notes"] = list(self.notes)
        document["ok"] = self.ok
        return document


def census_document(report: CensusReport) -> dict[str, Any]:
    """A census as JSON: counts and every name."""
    return {
        "ok": report.ok,
        "expected": report.num_expected,
        "found": report.num_found,
        **{
            name: {"count": len(getattr(report, name)), "names": list(getattr(report, name))}
            for name in ("missing", "unexpected", "wrong_shape", "wrong_dtype")
        },
    }


def inspect_checkpoint(path: Path, *, index_only: bool = False) -> Inspection:
    """Inspect an HF folder, a DCP folder, or just config and index.

    Raises:
        BadInput: the files cannot be read as a checkpoint at all.
        UsageError: the path is no checkpoint.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    with no_garbage_collection():
        if index_only or path.is_file():
            return _inspect_index(path)
        if (path / METADATA_NAME).exists():
            return _inspect_dcp(path)
        return _inspect_hf(path)


def _inspect_hf(folder: Path) -> Inspection:
    try:
        hf = open_hf_folder(folder)
    except IncompleteCheckpoint as error:
        error.hint = error.hint or "--index-only inspects config and index without the shards"
        raise
    config = parse_config(hf.raw_config, folder)
    root = _root(folder, (entry.name for _, entry in hf.entries()))
    tensors = {
        root.to_canonical(entry.name): SourceTensor(
            root.to_canonical(entry.name), entry.dtype, entry.shape, 0, entry.offset, entry.nbytes
        )
        for _, entry in hf.entries()
    }
    packed = decide_packed(config, tensors)
    report = compare_census(config, tensors, packed=packed)
    return _inspection(folder, "hf", len(hf.shards), config, tensors, packed, report, root.name, notes=hf.notes)


def _inspect_index(path: Path) -> Inspection:
    """Names from the index, shapes and dtypes from the census: the shards are not there."""
    folder = path if path.is_dir() else path.parent
    config = parse_config(read_config(folder), folder)
    index = _find_index(path)
    root = _root(folder, index.weight_map)
    names = {root.to_canonical(name): None for name in index.weight_map}
    packed = decide_packed(config, names)
    specs = {spec.name: spec for spec in census(config, packed=packed)}
    tensors = {
        name: SourceTensor(name, specs[name].dtype, specs[name].shapes[0], 0, 0, specs[name].num_bytes)
        for name in names
        if name in specs
    }
    report = CensusReport(
        len(specs),
        len(names),
        tuple(name for name in specs if name not in names),
        tuple(name for name in names if name not in specs),
        (),
        (),
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    notes = ["the shards were not looked at: shapes and dtypes are those that config.json calls for"]
    if index.total_size is not None and index.total_size != total:
        notes.append(f"the index says total_size {index.total_size}, the config calls for {total}")
    num_files = len(index.shard_names)
    return _inspection(path, "index", num_files, config, tensors, packed, report, root.name, notes=tuple(notes))


def _find_index(path: Path) -> Index:
    candidates = [path] if path.is_file() else [path / INDEX_NAME, path / (INDEX_NAME + ".gz")]
    for candidate in candidates:
        if candidate.exists():
            return read_index(candidate)
    raise UsageError(f"{path} holds no {INDEX_NAME}, plain or .gz")


def _inspect_dcp(folder: Path) -> Inspection:
    source = open_dcp(folder, K3, None)
    kept = folder / ASSET_FILES if source.manifest is not None else folder
    config = parse_config(read_config(kept), kept) if (kept / CONFIG_NAME).is_file() else None
    notes = [f"the DCP's names carry the prefix {source.prefix}"] if source.prefix else []
    if config is None:
        notes.append(f"no {CONFIG_NAME} lies beside .metadata: there is no census to compare with")
        tensors, kept_scales = _unstacked(source)
        return _inspection(
            folder, "dcp", len(source.files), None, tensors, False, None, None, kept_scales=kept_scales,
            other_entries=source.left_out, notes=tuple(notes),
        )  # fmt: skip
    wanted = frozenset(K3.to_fqn(spec.name).fqn for packed in (True, False) for spec in census(config, packed=packed))
    source = open_dcp(folder, K3, wanted)
    tensors, kept_scales = _unstacked(source)
    packed = decide_packed(config, tensors)
    report = compare_census(config, tensors, packed=packed)
    root = source.manifest.source.get("root") if source.manifest is not None else None
    return _inspection(
        folder, "dcp", len(source.files), config, tensors, packed, report, root, kept_scales=kept_scales,
        other_entries=source.left_out, notes=tuple(notes),
    )  # fmt: skip


def _unstacked(source: DcpSource) -> tuple[dict[str, SourceTensor], int]:
    """The DCP's tensors under their HF names; scales kept beside decoded experts are counted, not listed."""
    tensors: dict[str, SourceTensor] = {}
    kept_scales = 0
    for fqn, tensor in source.tensors.items():
        if not (K3.is_stack(fqn) and EXPERTS_PART in fqn):
            nbytes = num_bytes(tensor.dtype, tensor.shape)
            tensors[K3.to_hf(fqn)] = SourceTensor(fqn, tensor.dtype, tensor.shape, 0, 0, nbytes)
            continue
        if fqn.endswith(SCALE_SUFFIX) and fqn.removesuffix(SCALE_SUFFIX) in source.tensors:
            kept_scales += tensor.shape[0]
            continue
        nbytes = num_bytes(tensor.dtype, tensor.shape[1:])
        for expert in range(tensor.shape[0]):
            name = K3.to_hf(fqn, expert)
            tensors[name] = SourceTensor(name, tensor.dtype, tensor.shape[1:], 0, 0, nbytes)
    return tensors, kept_scales


def _root(where: Path, names: Iterable[str]) -> Root:
    try:
        return detect_root(names)
    except ValueError as error:
        raise UnmappedNames(f"{where}: {error}") from error


def _num_values(name: str, tensor: SourceTensor) -> int:
    if name.endswith(SCALE_SUFFIX):
        return 0
    count = 1
    for dim in tensor.shape:
        count *= dim
    return 2 * count if name.endswith(PACKED_SUFFIX) else count


def _inspection(
    path: Path,
    kind: str,
    num_files: int,
    config: KimiK3Config | None,
    tensors: Mapping[str, SourceTensor],
    packed: bool,
    report: CensusReport | None,
    root: str | None,
    *,
    kept_scales: int = 0,
    other_entries: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Inspection:
    of_name = {spec.name: spec.component for spec in census(config, packed=packed)} if config is not None else {}
    components: dict[str, ComponentTally] = {}
    dtypes: dict[str, ComponentTally] = {}
    pairs = packed_values = plain_values = 0
    for name, tensor in tensors.items():
        values = _num_values(name, tensor)
        if name.endswith(PACKED_SUFFIX):
            pairs += 1
            packed_values += values
        else:
            plain_values += values
        for tallies, key in ((components, of_name.get(name, "unexpected")), (dtypes, tensor.dtype)):
            tally = tallies.setdefault(key, ComponentTally())
            tally.tensors += 1
            tally.nbytes += tensor.nbytes
            tally.values += values
    has_experts = any(EXPERTS_PART in name for name in tensors)
    plain = {tensor.dtype for name, tensor in tensors.items() if EXPERTS_PART in name and name.endswith(PLAIN_SUFFIX)}
    return Inspection(
        path=str(path),
        kind=kind,
        num_files=num_files,
        num_tensors=report.num_found if report is not None else len(tensors),
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        packed_pairs=pairs,
        packed_values=packed_values,
        plain_values=plain_values,
        components=components,
        dtypes=dtypes,
        census=report,
        root=root,
        experts="none" if not has_experts else "MXFP4" if pairs else "plain " + " and ".join(sorted(plain)),
        quantization="mxfp4-pack-quantized" if config is not None and config.quantization is not None else None,
        other_entries=other_entries,
        kept_scales=kept_scales,
        notes=notes,
    )
