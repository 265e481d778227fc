"""A DCP of ours through torch alone, and DCPs that torch wrote through us."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from k3convert.execution.conversion import ConversionReport

Convert = Callable[..., ConversionReport]

TORCH_ALONE = """
import json, re, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

source, folder = map(Path, sys.argv[1:])
reader = dcp.FileSystemReader(str(folder))
stored = reader.read_metadata().state_dict_metadata
loaded = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
dcp.load(loaded, storage_reader=reader, no_dist=True)
compared = 0
for shard in sorted(source.glob("*.safetensors")):
    with safe_open(shard, "pt") as file:
        for name in file.keys():
            expert = re.fullmatch(r"(.*experts)\\.(\\d+)\\.(w\\d)\\.(weight_packed|weight_scale)", name)
            mine = loaded[f"{expert[1]}.{expert[3]}.{expert[4]}"][int(expert[2])] if expert else loaded[name]
            want = file.get_tensor(name)
            assert want.dtype == mine.dtype and want.shape == mine.shape, name
            assert torch.equal(want.reshape(-1).view(torch.uint8), mine.reshape(-1).view(torch.uint8)), name
            compared += 1
assert "k3convert" not in sys.modules
print(compared)
"""


def test_torch_alone_finds_the_bytes_of_the_source(tiny_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    to_dcp(tiny_source, tmp_path / "dcp", chunk_bytes=20_000)

    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH_ALONE, str(tiny_source), str(tmp_path / "dcp")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "1510"


def native_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP folder through torch."""
    reader = dcp.FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an HF folder."""
    out = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            out |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return out


SAVE_FROM_RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, state_file, prefix = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state = torch.load(state_file, weights_only=True)
model = {}
for name, tensor in state.items():
    dim = 1 if tensor.dim() == 3 and ".experts." in name else 0
    placement = Shard(dim) if tensor.dim() and tensor.shape[dim] > 1 else Replicate()
    model[prefix + name] = distribute_tensor(tensor, mesh, [placement])
first = next(iter(model))
model["optim.state." + first + ".exp_avg"] = model[first]
model["step"] = 12
dcp.save(model, checkpoint_id=folder)
dist.destroy_process_group()
"""


@pytest.fixture
def save_from_ranks(tmp_path: Path) -> Callable[..., None]:
    """Save a state dict with torch from several ranks, sharded as FSDP and EP would."""

    def save(state: dict[str, torch.Tensor], folder: Path, *, ranks: int = 3, prefix: str = "") -> None:
        script, state_file = tmp_path / "save.py", tmp_path / "state.pt"
        script.write_text(SAVE_FROM_RANKS)
        torch.save(state, state_file)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run = subprocess.run(
            [*command, str(script), str(folder), str(state_file), prefix], capture_output=True, text=True, check=False
        )
        assert (folder / ".metadata").exists(), run.stderr

    return save


@pytest.mark.parametrize("prefix", ["", "model."])
def test_only_the_changed_blocks_of_a_trained_dcp_differ(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert, save_from_ranks: Callable, prefix: str
) -> None:
    to_dcp(small_source, tmp_path / "ours", experts="bf16", keep_scales=False)
    state = native_state(tmp_path / "ours")
    stack = "language_model.model.layers.2.block_sparse_moe.experts.w3"
    state[stack][1, 5, 40] = 1.25
    state["language_model.model.layers.1.self_attn.A_log"] = state["language_model.model.layers.1.self_attn.A_log"][:6]
    save_from_ranks(state, tmp_path / "trained", prefix=prefix)

    report = to_hf(tmp_path / "trained", tmp_path / "hf", like=small_source)

    before, after = all_tensors(small_source), all_tensors(tmp_path / "hf")
    different = [name for name in before if not torch.equal(before[name], after[name])]
    module = "language_model.model.layers.2.block_sparse_moe.experts.1.w3"
    assert sorted(before) == sorted(after)
    assert set(different) <= {f"{module}.weight_packed", f"{module}.weight_scale"}
    packed = (before[f"{module}.weight_packed"] != after[f"{module}.weight_packed"]).nonzero()
    assert {(int(row), int(column) // 16) for row, column in packed} == {(5, 1)}
    figures = report.details["mxfp4"]
    assert (figures["blocks_changed"], figures["matrices_changed"]) == (1, 1)
    assert "step" in report.details["left_out"]
    assert any(name.startswith("optim.state.") for name in report.details["left_out"])


def test_fp32_masters_are_rounded_once_to_nearest_even(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    to_dcp(small_source, tmp_path / "ours", experts="bf16", keep_scales=False)
    state = {name: tensor.float() for name, tensor in native_state(tmp_path / "ours").items()}
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    state[name][0, :4] = torch.tensor([1.00390625, 1.01171875, 1.0039064, -0.0])
    state["language_model.model.layers.1.self_attn.dt_bias"][:] = 1.0000001
    dcp.save(state, checkpoint_id=str(tmp_path / "masters"), no_dist=True)

    to_hf(tmp_path / "masters", tmp_path / "hf", like=small_source)

    after = all_tensors(tmp_path / "hf")
    assert after[name].dtype == torch.bfloat16
    assert after[name][0, :4].tolist() == [1.0, 1.015625, 1.0078125, -0.0]
    assert torch.equal(after[name], state[name].bfloat16())
    bias = after["language_model.model.layers.1.self_attn.dt_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, state["language_model.model.layers.1.self_attn.dt_bias"])


def test_a_dcp_with_a_config_beside_it_gets_fresh_shards(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    to_dcp(small_source, tmp_path / "ours", experts="bf16", keep_scales=False)
    dcp.save(native_state(tmp_path / "ours"), checkpoint_id=str(tmp_path / "foreign"), no_dist=True)
    (tmp_path / "foreign" / "config.json").write_bytes((small_source / "config.json").read_bytes())

    to_hf(tmp_path / "foreign", tmp_path / "plain")
    to_hf(tmp_path / "foreign", tmp_path / "packed", experts="packed", max_shard_bytes=1 << 20)

    plain, packed, source = (all_tensors(folder) for folder in (tmp_path / "plain", tmp_path / "packed", small_source))
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert "quantization_config" in (tmp_path / "packed" / "config.json").read_text()
    assert sorted(packed) == sorted(source)
    assert not any("weight_packed" in name for name in plain)
    sizes = [path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors")]
    assert len(sizes) > 1
    others = [name for name in source if ".experts." not in name]
    assert all(torch.equal(source[name], packed[name]) for name in others)


def test_a_dcp_that_says_nothing_of_its_looks_is_refused(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    from k3convert.errors import ExitCode, UsageError

    to_dcp(small_source, tmp_path / "ours")
    dcp.save(native_state(tmp_path / "ours"), checkpoint_id=str(tmp_path / "foreign"), no_dist=True)

    with pytest.raises(UsageError) as caught:
        to_hf(tmp_path / "foreign", tmp_path / "hf")

    assert caught.value.exit_code == ExitCode.USAGE
    assert "--like" in str(caught.value.hint)


def test_packed_stacks_saved_by_torch_come_back_byte_for_byte(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert, assert_same_folders: Callable
) -> None:
    to_dcp(small_source, tmp_path / "ours")
    dcp.save(native_state(tmp_path / "ours"), checkpoint_id=str(tmp_path / "foreign"), no_dist=True)

    to_hf(tmp_path / "foreign", tmp_path / "hf", like=tmp_path / "ours")

    assert_same_folders(small_source, tmp_path / "hf")


def test_packed_stacks_decode_on_the_way_back(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    to_dcp(small_source, tmp_path / "packed")
    to_dcp(small_source, tmp_path / "bf16", experts="bf16")

    to_hf(tmp_path / "packed", tmp_path / "one", experts="bf16")
    to_hf(tmp_path / "bf16", tmp_path / "other", experts="bf16")

    one, other = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "other")
    assert sorted(one) == sorted(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "quantization_config" not in (tmp_path / "one" / "config.json").read_text()
