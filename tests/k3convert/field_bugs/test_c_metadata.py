"""Field reports C1, C4 and C13: ``.metadata`` from anybody, by any version of torch."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata as torch_metadata

from k3convert.checkpoint import dcp_metadata
from k3convert.checkpoint.dcp_metadata import read_metadata
from k3convert.errors import (
    BadMetadata,
    BadQuantization,
    CensusMismatch,
    ExitCode,
    IncompleteCheckpoint,
    PathEscape,
)
from k3convert.planning.inspection import inspect_checkpoint

Convert = Callable[..., Any]
Refused = Callable[..., str]

NORM = "language_model.model.norm.weight"
STACK = "language_model.model.layers.1.block_sparse_moe.experts.w1.weight_packed"


@pytest.fixture
def foreign(dcp: Path) -> Path:
    """The same tensors as another tool would leave them: no manifest, a config beside the weights."""
    shutil.copyfile(dcp / "k3convert/assets/files/config.json", dcp / "config.json")
    shutil.rmtree(dcp / "k3convert")
    return dcp


@pytest.fixture
def edit_metadata(foreign: Path) -> Callable[[Callable[[Any], None]], Path]:
    """Change torch's own objects in ``.metadata`` and pickle them as torch does."""

    def edit(change: Callable[[Any], None]) -> Path:
        path = foreign / ".metadata"
        document = pickle.loads(path.read_bytes())
        change(document)
        path.write_bytes(pickle.dumps(document))
        return foreign

    return edit


def refused(folder: Path) -> str:
    with pytest.raises(BadMetadata) as caught:
        read_metadata(folder)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert str(folder / ".metadata") in str(caught.value)
    return "\n".join([str(caught.value), *caught.value.offenders])


def write(folder: Path, data: bytes) -> Path:
    (folder / ".metadata").write_bytes(data)
    return folder


class Payload:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def payloads(marker: Path) -> dict[str, bytes]:
    """Pickles that would make a marker file, were they run."""
    command = f"touch {marker}".encode()
    text = f"open({str(marker)!r}, 'w')"
    quoted = b"X" + len(command).to_bytes(4, "little") + command
    return {
        "reduce os.system": pickle.dumps(Payload(os.system, command.decode())),
        "reduce open": pickle.dumps(Payload(open, str(marker), "w")),
        "reduce exec": pickle.dumps(Payload(exec, text)),
        "nested in a field": pickle.dumps({"state_dict_metadata": Payload(eval, text)}),
        "protocol 0": b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.",
        "INST": b"(" + quoted + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + quoted + b"o.",
        "NEWOBJ": b"\x80\x04csubprocess\nPopen\n(" + quoted + b"t\x81.",
        "NEWOBJ_EX": b"\x80\x04csubprocess\nPopen\n(" + quoted + b"t}\x92.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + quoted + b"\x85R.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x11_utils.os.system.x\x93" + quoted + b"\x85R.",
        "attribute of an allowed module": b"ctorch\nload\n" + quoted + b"\x85R.",
        "attribute of torch.serialization": b"ctorch.serialization\nload\n" + quoted + b"\x85R.",
        "dunder of an allowed class": b"ccollections\nOrderedDict.__init__.__globals__\n.",
        "builtins": b"c__builtin__\neval\n" + quoted + b"\x85R.",
        "extension code": b"\x80\x02\x82\x01.",
        "persistent id": b"Pmarker\n.",
        "binary persistent id": b"\x80\x02" + quoted + b"Q.",
        "after a good object": pickle.dumps(torch_metadata.Metadata({}))[:-1]
        + b"0cos\nsystem\n" + quoted + b"\x85R.",
    }  # fmt: skip


@pytest.mark.parametrize("name", payloads(Path("x")))
def test_c1_a_payload_is_refused_and_never_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    write(tmp_path, payloads(marker)[name])

    refused(tmp_path)

    assert not marker.exists()


def test_c1_the_refusal_says_what_was_named(tmp_path: Path) -> None:
    message = refused(write(tmp_path, payloads(tmp_path / "marker")["reduce os.system"]))

    assert "posix.system" in message
    assert "nothing was run" in message


@pytest.mark.parametrize("command", ["inspect", "dcp-to-hf", "verify", "diff", "load"])
def test_c1_no_way_into_a_folder_runs_its_pickle(dcp: Path, tmp_path: Path, to_hf: Convert, command: str) -> None:
    from k3convert.execution.value_diff import diff_checkpoints
    from k3convert.execution.verification import verify_checkpoint
    from k3convert.loading import load_model

    marker = tmp_path / "marker"
    write(dcp, payloads(marker)["reduce os.system"])
    ways: dict[str, Callable[[], object]] = {
        "inspect": lambda: inspect_checkpoint(dcp),
        "dcp-to-hf": lambda: to_hf(dcp, tmp_path / "hf"),
        "verify": lambda: verify_checkpoint(dcp),
        "diff": lambda: diff_checkpoints(dcp, dcp),
        "load": lambda: load_model(dcp),
    }

    with pytest.raises(BadMetadata):
        ways[command]()

    assert not marker.exists()
    assert not (tmp_path / "hf").exists()


BUILD_TARGETS = [
    b"ctorch\nSize\n",
    b"ctorch.serialization\n_get_layout\n",
    b"cpathlib\nPosixPath\n",
    b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
    b"ccollections\nOrderedDict\n",
    b"ctorch\nfloat32\n",
]
BUILD_STATES = [
    b"}X\x0c\x00\x00\x00__defaults__(K\x07K\x08tsb",
    b"N}X\x0c\x00\x00\x00__defaults__(K\x07K\x08ts\x86b",
    b"N}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xs\x86b",
    b"N}X\x07\x00\x00\x00__doc__X\x01\x00\x00\x00xs\x86b",
]


@pytest.mark.parametrize("state", BUILD_STATES)
@pytest.mark.parametrize("target", BUILD_TARGETS)
def test_c1_a_pickle_changes_nothing_in_this_process(tmp_path: Path, target: bytes, state: bytes) -> None:
    def facts() -> list[object]:
        names = ("__defaults__", "__name__", "__doc__")
        return [[getattr(thing, name, None) for name in names] for thing in dcp_metadata._ALLOWED.values()] + [
            dict(getattr(thing, "__dict__", {})) for thing in dcp_metadata._ALLOWED.values()
        ]

    before = facts()

    refused(write(tmp_path, b"\x80\x02" + target + state + b"."))

    assert facts() == before


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x13\x00\x00\x00state_dict_metadataK\x05sb.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81K\x05b.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81]b.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        b"\x80\x02ctorch\nfloat32\n.",
        b"\x80\x02ctorch\nSize\nK\x05\x85R.",
        b"(" * 100_000,
    ],
)
def test_c1_objects_put_together_by_hand_are_refused(tmp_path: Path, data: bytes) -> None:
    refused(write(tmp_path, data))


@pytest.mark.parametrize("field", ["fqn", "offset"])
def test_c1_a_key_that_changes_after_it_was_used_is_refused(tmp_path: Path, field: str) -> None:
    """BUILD on a memoised key: the dictionary would hold a key that no longer hashes."""
    module = b"ctorch.distributed.checkpoint."

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    index = (
        module + b"metadata\nMetadataIndex\n)\x81q\x00}(" + text("fqn") + text("a")
        + text("offset") + b"ctorch\nSize\n(K\x00t\x85R" + b"ub"
    )  # fmt: skip
    info = module + b"filesystem\n_StorageInfo\n)\x81}(" + text("relative_path") + text("x") + b"ub"
    storage = b"}" + index + info + b"sh\x00}" + text(field) + b"]sb0"
    data = (
        b"\x80\x02" + module + b"metadata\nMetadata\n)\x81}(" + text("state_dict_metadata") + b"}"
        + text("storage_data") + storage + b"ub."
    )  # fmt: skip

    refused(write(tmp_path, data))


def test_c1_a_pickle_of_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """``torch.Size`` of ``torch.Size`` of ... doubles at each step; the file stays small."""
    steps = b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(200))
    write(tmp_path, b"\x80\x02(K\x01K\x02tq\x00" + steps + b".")
    started = time.monotonic()

    refused(tmp_path)

    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "cut short"),
        (pickle.dumps(7), "holds a int"),
        (pickle.dumps(None), "holds a NoneType"),
        (b"not a pickle at all", "not a DCP"),
        (b"\x80\xff.", "protocol"),
    ],
)
def test_c4_what_is_no_metadata_is_refused_with_its_cause(
    dcp: Path, refused_by_dcp_to_hf: Refused, data: bytes, word: str
) -> None:
    write(dcp, data)

    message = refused_by_dcp_to_hf(dcp, BadMetadata)

    assert str(dcp / ".metadata") in message
    assert word in message or f"{len(data)} bytes" in message


@pytest.mark.parametrize("keep", [1, 100, 10_000, -1])
def test_c4_a_truncated_metadata_is_refused(dcp: Path, refused_by_dcp_to_hf: Refused, keep: int) -> None:
    write(dcp, (dcp / ".metadata").read_bytes()[:keep])

    assert str(dcp / ".metadata") in refused_by_dcp_to_hf(dcp, BadMetadata)


def test_c4_a_missing_metadata_is_refused_by_name(dcp: Path, refused_by_dcp_to_hf: Refused) -> None:
    (dcp / ".metadata").unlink()

    message = refused_by_dcp_to_hf(dcp, BadMetadata)

    assert f"{dcp / '.metadata'} is missing" in message
    assert "not a finished checkpoint" in message


def test_c4_a_folder_of_another_tool_without_metadata_is_no_checkpoint(
    foreign: Path, refused_by_dcp_to_hf: Refused
) -> None:
    (foreign / ".metadata").unlink()
    (foreign / "config.json").unlink()

    assert ".metadata is missing" in refused_by_dcp_to_hf(foreign, BadMetadata)


def test_c4_metadata_that_is_a_folder_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / ".metadata").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / ".metadata")

    assert "a folder" in refused(tmp_path / "a")
    assert "not a regular file" in refused(tmp_path / "b")


def test_c6_a_data_file_that_is_missing_or_cut_is_named(dcp: Path, refused_by_dcp_to_hf: Refused) -> None:
    (dcp / "__0_1.distcp").unlink()
    os.truncate(dcp / "__0_2.distcp", 1000)

    message = refused_by_dcp_to_hf(dcp, IncompleteCheckpoint)

    assert "2 of 6" in message
    assert "__0_1.distcp is missing" in message
    assert "__0_2.distcp has 1000 bytes" in message


def set_fields(fqn: str, **values: object) -> Callable[[Any], None]:
    """Change the places of a tensor's chunks."""

    def change(document: Any) -> None:
        for index, info in document.storage_data.items():
            if index.fqn == fqn:
                for name, value in values.items():
                    setattr(info, name, value)

    return change


@pytest.mark.parametrize(
    "file", ["../evil.distcp", "/etc/passwd", "a/../../x", "x\0", "..\\x", "", None, 5, b"x", ["x"]]
)
def test_c1_a_chunk_outside_the_folder_is_refused(
    edit_metadata: Callable[[Callable[[Any], None]], Path], file: object
) -> None:
    folder = edit_metadata(set_fields(NORM, relative_path=file))

    with pytest.raises(PathEscape) as caught:
        read_metadata(folder)

    assert repr(file) in caught.value.offenders[0]


def test_c1_a_data_file_that_is_a_link_out_of_the_folder_is_refused(
    dcp: Path, tmp_path: Path, refused_by_dcp_to_hf: Refused
) -> None:
    shutil.move(dcp / "__0_1.distcp", tmp_path / "evil")
    (dcp / "__0_1.distcp").symlink_to(tmp_path / "evil")

    assert "__0_1.distcp" in refused_by_dcp_to_hf(dcp, PathEscape)


@pytest.mark.parametrize("values", [{"offset": -1}, {"length": -5}, {"offset": "0"}, {"length": 1.0}, {"offset": True}])
def test_c4_places_that_are_no_byte_counts_are_refused(
    edit_metadata: Callable[[Callable[[Any], None]], Path], values: dict[str, object]
) -> None:
    message = refused(edit_metadata(set_fields(NORM, **values)))

    assert f"{NORM}: offset" in message


@pytest.mark.parametrize("values", [{"offset": 10}, {"length": 700}])
def test_c4_an_entry_that_is_not_there_is_refused(
    edit_metadata: Callable[[Callable[[Any], None]], Path], refused_by_dcp_to_hf: Refused, values: dict[str, object]
) -> None:
    message = refused_by_dcp_to_hf(edit_metadata(set_fields(NORM, **values)), BadMetadata)

    assert f"the entry of {NORM}" in message


def test_c4_a_stored_transformation_is_refused_by_name(edit_metadata: Callable[[Callable[[Any], None]], Path]) -> None:
    assert "zstd" in refused(edit_metadata(set_fields(NORM, transform_descriptors=["zstd"])))


def chunks_of(document: Any, fqn: str) -> list[Any]:
    found: list[Any] = document.state_dict_metadata[fqn].chunks
    return found


def test_c4_chunks_with_a_gap_or_an_overlap_are_refused(edit_metadata: Callable[[Callable[[Any], None]], Path]) -> None:
    import torch

    def change(document: Any) -> None:
        chunk = torch_metadata.ChunkStorageMetadata
        size = document.state_dict_metadata[NORM].size
        half = torch.Size([size[0] // 2])
        document.state_dict_metadata[NORM].chunks = [chunk(torch.Size([0]), half)]
        document.state_dict_metadata[STACK].chunks = [chunk(torch.Size([0, 0, 0]), torch.Size([4, 64, 48]))] * 2

    message = refused(edit_metadata(change))

    assert "2 of" in message
    assert f"{NORM}: its 1 chunks hold" in message
    assert f"{STACK}: its 2 chunks hold" in message


def test_c4_a_chunk_that_leaves_its_tensor_is_refused(edit_metadata: Callable[[Callable[[Any], None]], Path]) -> None:
    import torch

    def change(document: Any) -> None:
        chunks_of(document, NORM)[0].sizes = torch.Size([4096])

    assert "leaves the tensor" in refused(edit_metadata(change))


def test_c4_a_tensor_without_a_place_is_refused(edit_metadata: Callable[[Callable[[Any], None]], Path]) -> None:
    def change(document: Any) -> None:
        for index in [index for index in document.storage_data if index.fqn == NORM]:
            del document.storage_data[index]

    assert f"{NORM}: no file holds its chunk" in refused(edit_metadata(change))


def test_c4_a_stack_of_another_rank_is_refused(
    edit_metadata: Callable[[Callable[[Any], None]], Path], small_source: Path, refused_by_dcp_to_hf: Refused
) -> None:
    import torch

    def change(document: Any) -> None:
        entry = document.state_dict_metadata[NORM]
        document.state_dict_metadata[STACK] = entry
        for index, info in list(document.storage_data.items()):
            if index.fqn == NORM:
                document.storage_data[torch_metadata.MetadataIndex(STACK, torch.Size([0]), 0)] = info

    folder = edit_metadata(change)

    message = refused_by_dcp_to_hf(folder, CensusMismatch, like=small_source)

    assert f"{STACK.replace('experts.', 'experts.0.')}: stored" in message
    with pytest.raises(BadQuantization):
        inspect_checkpoint(folder)


def test_c4_a_stack_that_is_a_scalar_is_refused(
    edit_metadata: Callable[[Callable[[Any], None]], Path], small_source: Path, refused_by_dcp_to_hf: Refused
) -> None:
    import torch

    def change(document: Any) -> None:
        nothing = torch.Size([])
        document.state_dict_metadata[STACK].size = nothing
        document.state_dict_metadata[STACK].chunks = [torch_metadata.ChunkStorageMetadata(nothing, nothing)]
        info = next(info for index, info in document.storage_data.items() if index.fqn == STACK)
        document.storage_data[torch_metadata.MetadataIndex(STACK, nothing, 0)] = info

    folder = edit_metadata(change)

    assert STACK in refused_by_dcp_to_hf(folder, BadMetadata, like=small_source)
    with pytest.raises(BadMetadata, match="1 stacks of experts are scalars"):
        inspect_checkpoint(folder)


def test_c4_two_folders_files_of_one_name_are_two_files(
    edit_metadata: Callable[[Callable[[Any], None]], Path],
    foreign: Path,
    small_source: Path,
    tmp_path: Path,
    to_hf: Convert,
) -> None:
    def change(document: Any) -> None:
        for info in document.storage_data.values():
            if info.relative_path in ("__0_1.distcp", "__0_2.distcp"):
                info.relative_path = f"{info.relative_path[4]}/data.distcp"

    folder = edit_metadata(change)
    for number in "12":
        (foreign / number).mkdir()
        (foreign / f"__0_{number}.distcp").rename(foreign / number / "data.distcp")

    to_hf(folder, tmp_path / "hf", like=small_source)

    for path in small_source.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_c13_metadata_of_every_writer_reads_alike(
    edit_metadata: Callable[[Callable[[Any], None]], Path], foreign: Path
) -> None:
    """torch before 2.4 had no planner_data map and torch 2.13 has; later ones may add fields."""
    wanted = read_metadata(foreign)

    def older(document: Any) -> None:
        document.planner_data = None
        document.storage_meta = None
        del document.__dict__["version"]

    def newer(document: Any) -> None:
        document.flattening = {"kind": "nested", "levels": (1, 2)}
        document.storage_meta.__dict__["region"] = "x"
        for entry in document.state_dict_metadata.values():
            entry.__dict__["sharding_hint"] = None
        for info in document.storage_data.values():
            info.__dict__["checksum"] = 7

    read = [read_metadata(edit_metadata(change)) for change in (newer, older)]

    assert [found.tensors for found in read] == [wanted.tensors, wanted.tensors]
    assert [found.version for found in read] == [wanted.version, None]


def test_c13_an_unknown_version_is_refused_with_the_known_ones(
    edit_metadata: Callable[[Callable[[Any], None]], Path],
) -> None:
    def change(document: Any) -> None:
        document.version = "2.0.0"

    message = refused(edit_metadata(change))

    assert "'2.0.0'" in message
    assert "1.0.0" in message


@pytest.mark.parametrize("flatten_lists", [True, False], ids=["today", "before 2.4"])
def test_c13_nested_training_state_of_either_flattening_is_left_out_by_name(
    small_source: Path, small_dcp: Path, tmp_path: Path, to_hf: Convert, flatten_lists: bool
) -> None:
    import torch
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(str(small_dcp))
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()
    }
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    groups = [{"lr": torch.tensor(0.1), "betas": [0.9, 0.95]}, {"lr": torch.tensor(0.2), "betas": [0.9, 0.95]}]
    if flatten_lists:
        state["optim"] = {"state": {"0": {"step": torch.tensor(3.0)}}, "param_groups": groups}
    else:
        state |= {"optim.state.0.step": torch.tensor(3.0), "optim.param_groups": groups}
    checkpoint.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)

    report = to_hf(tmp_path / "saved", tmp_path / "hf", like=small_source)

    assert "optim.state.0.step" in report.details["left_out"]
    assert any(name.startswith("optim.param_groups") for name in report.details["left_out"])
    assert all(name.startswith("optim.") for name in report.details["left_out"])
    for path in small_source.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_c13_the_versions_are_recorded_beside_the_checkpoint(small_dcp: Path) -> None:
    import json

    manifest = json.loads((small_dcp / "k3convert" / "manifest.json").read_text())

    assert read_metadata(small_dcp).version == "1.0.0"
    assert manifest["tool"]["name"] == "k3convert"
    assert manifest["tool"]["version"]
    assert manifest["format_version"] == 1
