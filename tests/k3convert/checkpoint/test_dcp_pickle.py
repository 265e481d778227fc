"""``.metadata`` files that are written here, read by torch and by ourselves."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata

from k3convert.checkpoint.dcp_metadata import DcpChunk, DcpTensor, read_metadata
from k3convert.checkpoint.dcp_pickle import encode_metadata
from k3convert.checkpoint.dtypes import TORCH_NAMES


def tensor(dtype: str = "BF16", rows: int = 6, columns: int = 4, cut: int = 2, offset: int = 0) -> DcpTensor:
    chunks = (
        DcpChunk((0, 0), (cut, columns), "__0_0.distcp", offset, 1700),
        DcpChunk((cut, 0), (rows - cut, columns), "__0_1.distcp", offset + 7, 1701),
    )
    return DcpTensor(dtype, (rows, columns), chunks)


SCALAR = DcpTensor("I64", (), (DcpChunk((), (), "__0_0.distcp", 0, 1600),))


@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_torch_reads_its_own_objects(dtype: str) -> None:
    wanted = {"a": tensor(dtype), "b": SCALAR}

    found = pickle.loads(encode_metadata(wanted))

    assert isinstance(found, torch_metadata.Metadata)
    assert found.version == "1.0.0"
    entry = found.state_dict_metadata["a"]
    assert isinstance(entry, torch_metadata.TensorStorageMetadata)
    assert entry.properties.dtype == getattr(torch, TORCH_NAMES[dtype])
    assert entry.properties.layout == torch.strided
    assert entry.properties.memory_format == torch.contiguous_format
    assert entry.size == torch.Size([6, 4])
    assert [tuple(chunk.sizes) for chunk in entry.chunks] == [(2, 4), (4, 4)]
    index = torch_metadata.MetadataIndex("a", torch.Size([2, 0]), 1)
    assert found.storage_data[index].relative_path == "__0_1.distcp"
    assert found.planner_data == {"a": ("a",), "b": ("b",)}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
SIZES = st.sampled_from([0, 1, 2, 255, 256, 2**31 - 1, 2**31, 2**40])


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(TORCH_NAMES)), SIZES, SIZES), max_size=12))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("dcp")
    wanted = {
        name: DcpTensor(dtype, (rows, 4), (DcpChunk((0, 0), (rows, 4), "__0_0.distcp", offset, 9),))
        for name, (dtype, rows, offset) in drawn.items()
    }

    (folder / ".metadata").write_bytes(encode_metadata(wanted))

    found = read_metadata(folder)
    assert found.tensors == wanted
    assert list(found.tensors) == list(wanted)
    assert found.other_entries == ()


def test_the_bytes_depend_on_the_content_alone() -> None:
    assert encode_metadata({"a": tensor(), "b": SCALAR}) == encode_metadata({"a": tensor(), "b": SCALAR})


def test_thousands_of_names_need_more_than_one_byte_of_memo(tmp_path: Path) -> None:
    wanted = {f"layers.{number}.weight": tensor(offset=number) for number in range(3000)}

    (tmp_path / ".metadata").write_bytes(encode_metadata(wanted))

    assert read_metadata(tmp_path).tensors == wanted
