"""The quirks of the release's files, one a test, read with the safetensors library or from the raw headers."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from k3model.config import KimiK3Config

LAYER_PREFIX = "language_model.model.layers."


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header(path: Path) -> dict[str, Any]:
    """The header's fields in the order of the file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    fields: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return fields


def tensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in shard_paths(folder):
        fields = header(path)
        fields.pop("__metadata__", None)
        found |= fields
    return found


def index(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return document


def test_the_tensors_are_those_of_the_census_with_their_shapes_and_dtypes(tiny: Path) -> None:
    config = KimiK3Config.from_dict(json.loads((tiny / "config.json").read_text()))

    found = tensors(tiny)

    assert {name: (fields["dtype"], tuple(fields["shape"])) for name, fields in found.items()} == {
        spec.name: (spec.dtype, spec.shapes[0]) for spec in config.census()
    }


def test_the_sizes_are_the_published_ones(tiny: Path) -> None:
    found = tensors(tiny)

    assert len(found) == 1510
    assert sum(fields["data_offsets"][1] - fields["data_offsets"][0] for fields in found.values()) == 7_262_272
    assert Counter(fields["dtype"] for fields in found.values())["F32"] == 66


def test_shard_n_is_layer_n_minus_1(tiny: Path) -> None:
    paths = shard_paths(tiny)

    counts = []
    for layer, path in enumerate(paths[:13]):
        names = [name for name in header(path) if name != "__metadata__"]
        assert all(name.startswith(f"{LAYER_PREFIX}{layer}.") for name in names)
        counts.append(len(names))

    kda, mla = 124, 118
    assert counts == [23, kda, kda, mla, kda, kda, kda, mla, kda, kda, kda, mla, mla]


def test_the_three_last_shards_hold_the_rest_of_the_text_the_projector_and_the_vision_tower(tiny: Path) -> None:
    tail = [[name for name in header(path) if name != "__metadata__"] for path in shard_paths(tiny)[13:]]

    assert sorted(tail[0]) == [
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.model.output_attn_res_norm.weight",
        "language_model.model.output_attn_res_proj.weight",
    ]
    assert [len(names) for names in tail] == [5, 3, 15]
    assert all(name.startswith("mm_projector.") for name in tail[1])
    assert all(name.startswith("vision_tower.") for name in tail[2])


def test_file_names_have_five_then_six_digits(tiny: Path) -> None:
    names = [path.name for path in shard_paths(tiny)]

    assert names == [f"model-{number:05d}-of-000016.safetensors" for number in range(1, 17)]


def test_experts_are_not_in_id_order_and_the_six_tensors_of_one_are_neighbours(tiny: Path) -> None:
    fields = header(shard_paths(tiny)[1])
    expert_tensors = [name for name in fields if ".experts." in name]
    ids = [int(re.findall(r"experts\.(\d+)\.", name)[0]) for name in expert_tensors]

    runs = [ids[first : first + 6] for first in range(0, len(ids), 6)]
    order = [run[0] for run in runs]
    assert all(len(set(run)) == 1 for run in runs)
    assert sorted(order) == list(range(16))
    assert order != sorted(order)


def test_the_tensors_of_a_file_cover_its_data_once_in_the_order_of_the_header(tiny: Path) -> None:
    for path in shard_paths(tiny):
        fields = header(path)
        length = int.from_bytes(path.read_bytes()[:8], "little")

        offsets = [tuple(entry["data_offsets"]) for entry in fields.values()]

        assert offsets[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(offsets))
        assert "__metadata__" not in fields
        assert 8 + length + offsets[-1][1] == path.stat().st_size
        assert length % 8 == 0


def test_wider_elements_come_first_so_that_all_are_aligned(tiny: Path) -> None:
    for path in shard_paths(tiny):
        fields = header(path)
        fields.pop("__metadata__", None)

        widths = [{"F32": 4, "BF16": 2, "U8": 1}[entry["dtype"]] for entry in fields.values()]

        assert widths == sorted(widths, reverse=True)


def test_the_safetensors_library_opens_every_shard_and_reads_every_tensor(tiny: Path) -> None:
    num_read = 0
    for path in shard_paths(tiny):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                num_read += file.get_tensor(name).numel() > 0

    assert num_read == 1510


@pytest.mark.parametrize(
    ("leaf", "count"),
    [
        ("A_log", 9),
        ("dt_bias", 9),
        ("o_norm.weight", 9),
        ("_conv1d.weight", 27),
        ("gate.e_score_correction_bias", 12),
    ],
)
def test_these_tensors_and_no_others_are_float32(tiny: Path, leaf: str, count: int) -> None:
    found = tensors(tiny)

    named = {name for name in found if name.endswith(leaf)}
    assert len(named) == count
    assert all(found[name]["dtype"] == "F32" for name in named)
    assert sum(fields["dtype"] == "F32" for fields in found.values()) == 9 + 9 + 9 + 27 + 12


def test_a_log_is_padded_with_zeros_to_a_multiple_of_128(tiny: Path) -> None:
    with safe_open(shard_paths(tiny)[0], framework="np") as file:
        a_log = file.get_tensor(f"{LAYER_PREFIX}0.self_attn.A_log")

    assert a_log.shape == (128,)
    assert (a_log[:6] > 0).all()
    assert a_log[6:].tobytes() == bytes(122 * 4)


def test_convolutions_have_rank_3(tiny: Path) -> None:
    shapes = [fields["shape"] for name, fields in tensors(tiny).items() if name.endswith("_conv1d.weight")]

    assert shapes == [[192, 1, 4]] * 27


def test_the_index_lists_every_tensor_with_its_shard_and_the_total_size(tiny: Path) -> None:
    document = index(tiny)

    in_shards = {name: path.name for path in shard_paths(tiny) for name in header(path) if name != "__metadata__"}
    assert document["weight_map"] == in_shards
    assert document["metadata"] == {"total_size": 7_262_272}


def test_the_index_lists_neither_shards_nor_names_in_order(tiny: Path) -> None:
    weight_map = index(tiny)["weight_map"]

    order = list(dict.fromkeys(weight_map.values()))
    assert len(order) == 16
    assert order != sorted(order)
    assert list(weight_map) != sorted(weight_map)


def test_the_index_is_two_space_json_without_a_last_newline(tiny: Path) -> None:
    text = (tiny / "model.safetensors.index.json").read_text()

    assert text == json.dumps(json.loads(text), indent=2)


def test_all_data_lie_where_the_header_says(tiny: Path) -> None:
    path = shard_paths(tiny)[12]
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    name = f"{LAYER_PREFIX}12.block_sparse_moe.experts.7.w2.weight_scale"

    begin, end = header(path)[name]["data_offsets"]

    with safe_open(path, framework="np") as file:
        assert file.get_tensor(name).tobytes() == raw[start + begin : start + end]
        assert np.frombuffer(raw[start + begin : start + end], dtype=np.uint8).max() > 100
