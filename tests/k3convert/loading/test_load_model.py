"""Checkpoints of every form load to the same network; damaged ones are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3convert.errors import BadConfig, BadInput, BadQuantization, CensusMismatch, UnrepresentableBlocks, UsageError
from k3convert.execution.conversion import RunOptions, run_conversion
from k3convert.loading import load_model, load_with_report, to_hf_state_dict
from k3convert.loading.tensor_reader import TensorReader
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp
from k3convert.planning.logical_tensors import open_logical
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEPT = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an HF folder as stock safetensors reads them."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def decoded(packed: Tensor, scale: Tensor) -> Tensor:
    """MXFP4 in double precision, element by element."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float64)[codes]
    return torch.ldexp(values, scale.repeat_interleave(32, dim=1).int() - 127)


def wanted_values(folder: Path) -> dict[str, Tensor]:
    """Every tensor under its released name; a packed pair as one matrix."""
    stored = stored_tensors(folder)
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_packed"):
            out[name.removesuffix("_packed")] = decoded(tensor, stored[name.replace("_packed", "_scale")])
        elif not name.endswith("_scale"):
            out[name] = tensor
    return out


def assert_holds(network: KimiK3ForConditionalGeneration, wanted: dict[str, Tensor]) -> None:
    got = to_hf_state_dict(network.state_dict(), network.config)
    assert set(got) == set(wanted)
    for name, tensor in got.items():
        assert torch.equal(tensor.double(), wanted[name].double().view(tensor.shape)), name


def plain_folder(source: Path, destination: Path, *, dtype: torch.dtype, indexed: bool, padded: bool = True) -> Path:
    """The same values in an HF folder without packed experts."""
    destination.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (destination / "config.json").write_text(json.dumps(raw))
    config = KimiK3Config.from_dict(raw)
    assert config.text.kda is not None
    tensors: dict[str, Tensor] = {}
    for name, tensor in wanted_values(source).items():
        if name.endswith(".A_log") and not padded:
            tensor = tensor[: config.text.kda.num_heads].clone()
        tensors[name] = (tensor if name.endswith(KEPT) else tensor.to(dtype)).contiguous()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    if not indexed:
        save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
        return destination
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, destination / shard, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index))
    return destination


def dcp_folder(source: Path, destination: Path, **options: Any) -> Path:
    run_conversion(plan_hf_to_dcp(source, destination, ToDcpOptions(**options)), RunOptions())
    return destination


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_experts_load_exactly(small_source: Path, dtype: torch.dtype) -> None:
    network = load_model(small_source, dtype=dtype)

    assert_holds(network, wanted_values(small_source))
    for name, tensor in network.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(KEPT) else dtype), name


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "one_file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_experts_load_exactly(small_source: Path, tmp_path: Path, dtype: torch.dtype, indexed: bool) -> None:
    folder = plain_folder(small_source, tmp_path / "plain", dtype=dtype, indexed=indexed)

    assert_holds(load_model(folder, dtype=dtype), wanted_values(small_source))


def test_an_unpadded_a_log_loads(small_source: Path, tmp_path: Path) -> None:
    folder = plain_folder(small_source, tmp_path / "plain", dtype=torch.bfloat16, indexed=False, padded=False)

    assert_holds(load_model(folder), wanted_values(small_source))


@pytest.mark.parametrize("options", [{"experts": "packed"}, {"experts": "bf16"}, {"chunk_bytes": 4096}], ids=str)
def test_our_dcp_loads_exactly(small_source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = dcp_folder(small_source, tmp_path / "dcp", **options)

    assert_holds(load_model(folder), wanted_values(small_source))


def saved_by_torch(folder: Path, source: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A DCP that stock torch writes, of the network's own names, with a config beside it."""
    import torch.distributed.checkpoint as dcp

    state = dict(load_model(source).state_dict())
    change(state)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_of_stock_torch_loads_and_a_training_runs_state_is_named(small_source: Path, tmp_path: Path) -> None:
    state_name = "optimizer.state.language_model.model.norm.weight.exp_avg"
    folder = saved_by_torch(tmp_path / "dcp", small_source, lambda state: state.update({state_name: torch.zeros(128)}))

    network, report = load_with_report(folder)

    assert_holds(network, wanted_values(small_source))
    assert report.left_out == (state_name,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c03_a_dcp_with_a_tensor_too_many_and_one_too_few_is_refused_with_both(
    small_source: Path, tmp_path: Path
) -> None:
    def change(state: dict[str, Tensor]) -> None:
        state["language_model.model.extra.weight"] = state.pop("language_model.model.norm.weight")

    folder = saved_by_torch(tmp_path / "dcp", small_source, change)

    with pytest.raises(CensusMismatch) as caught:
        load_model(folder)

    assert "missing: language_model.model.norm.weight" in caught.value.offenders
    assert "unexpected: language_model.model.extra.weight" in caught.value.offenders


def test_only_config_and_weights_are_needed(small: Path) -> None:
    for path in small.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "model.safetensors.index.json"):
            path.unlink()

    assert_holds(load_model(small), wanted_values(small))


def test_the_dtype_of_the_config_is_the_default(small_source: Path) -> None:
    network = load_model(small_source)

    assert network.language_model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("num_layers", [1, 3])
def test_row_65_the_first_layers_load_alone(small_source: Path, num_layers: int) -> None:
    network, report = load_with_report(small_source, num_layers=num_layers)

    kept = {
        name: tensor
        for name, tensor in wanted_values(small_source).items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
    }
    assert_holds(network, kept)
    assert network.config.text.num_hidden_layers == num_layers
    assert report.num_tensors == len(kept)
    assert all(int(name.split(".layers.")[1].split(".")[0]) >= num_layers for name in report.dropped)
    assert network(torch.arange(4)[None]).logits.shape == (1, 4, 512)


def test_row_65_the_first_layers_of_a_dcp_load_alone(small_source: Path, tmp_path: Path) -> None:
    folder = dcp_folder(small_source, tmp_path / "dcp")

    two = load_model(folder, num_layers=2)

    whole = load_model(small_source).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in two.state_dict().items())


@pytest.mark.parametrize("num_layers", [0, 6])
def test_layers_that_are_not_there_are_refused(small_source: Path, num_layers: int) -> None:
    with pytest.raises(UsageError, match="layers 1 to 5"):
        load_model(small_source, num_layers=num_layers)


def test_f13_nothing_keeps_what_was_in_memory(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = KimiK3ForConditionalGeneration.empty.__func__  # type: ignore[attr-defined]

    def poisoned(cls: type, *args: Any, **kwargs: Any) -> KimiK3ForConditionalGeneration:
        network: KimiK3ForConditionalGeneration = empty(cls, *args, **kwargs)
        with torch.no_grad():
            for tensor in network.state_dict().values():
                tensor.fill_(torch.nan)
        return network

    monkeypatch.setattr(KimiK3ForConditionalGeneration, "empty", classmethod(poisoned))

    network = load_model(small_source)

    assert [name for name, tensor in network.state_dict().items() if not bool(tensor.isfinite().all())] == []


def test_a_small_chunk_gives_the_same_network(small_source: Path) -> None:
    whole = load_model(small_source).state_dict()

    pieces, _ = load_with_report(small_source, chunk_bytes=512)

    assert all(torch.equal(tensor, whole[name]) for name, tensor in pieces.state_dict().items())


def test_ops_are_chosen_by_field(small_source: Path) -> None:
    network = load_model(small_source, ops={"moe": "grouped_mm"}, num_layers=2)

    assert network.language_model.model.layers["1"].feed_forward.experts.moe_experts.impl == "grouped_mm"


def test_a18_renamed_experts_are_refused_with_both_lists(small: Path, edit_tensors: Callable[..., None]) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.2." in name and ".w1." in name]:
            tensors[name.replace(".w1.", ".gate_proj.")] = tensors.pop(name)

    edit_tensors(small, rename)

    with pytest.raises(BadInput) as caught:
        load_model(small)

    assert any("missing" in line and ".w1." in line for line in caught.value.offenders)
    assert any("unexpected" in line and ".gate_proj." in line for line in caught.value.offenders)


def edit_text(folder: Path, **fields: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= fields
    (folder / "config.json").write_text(json.dumps(raw))


def test_d04_a_missing_a_log_is_an_error(small: Path, edit_tensors: Callable[..., None]) -> None:
    name = "language_model.model.layers.0.self_attn.A_log"
    edit_tensors(small, lambda tensors: tensors.pop(name))

    with pytest.raises(CensusMismatch) as caught:
        load_model(small)

    assert caught.value.offenders == (f"missing: {name}",)


def test_d10_attention_residuals_in_the_file_and_not_in_the_config_are_refused(small: Path) -> None:
    edit_text(small, attn_res_block_size=None)

    with pytest.raises(CensusMismatch) as caught:
        load_model(small)

    assert len(caught.value.offenders) == 4 * 5 + 2
    assert all("unexpected" in line and "_res_" in line for line in caught.value.offenders)


def test_d10_attention_residuals_in_the_config_and_not_in_the_file_are_refused(
    small: Path, edit_tensors: Callable[..., None]
) -> None:
    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_res_" in name]:
            del tensors[name]

    edit_tensors(small, remove)

    with pytest.raises(CensusMismatch) as caught:
        load_model(small)

    assert all("missing" in line and "_res_" in line for line in caught.value.offenders)


def test_d01_layer_kinds_that_do_not_match_the_tensors_are_refused(small: Path) -> None:
    lists = {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5]}
    raw = json.loads((small / "config.json").read_text())
    edit_text(small, linear_attn_config=raw["text_config"]["linear_attn_config"] | lists)

    with pytest.raises(CensusMismatch) as caught:
        load_model(small)

    assert any("layers.2.self_attn.kv_b_proj" in line for line in caught.value.offenders)
    assert any("layers.3.self_attn.A_log" in line for line in caught.value.offenders)


def test_a20_a_folder_of_the_bare_root_loads_and_mixed_roots_are_refused(
    small: Path, edit_tensors: Callable[..., None]
) -> None:
    wanted = wanted_values(small)

    def bare(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    edit_tensors(small, bare)
    assert_holds(load_model(small), wanted)

    name = "model.norm.weight"
    edit_tensors(small, lambda tensors: tensors.update({f"language_model.{name}": tensors.pop(name)}))

    with pytest.raises(BadInput, match="language_model"):
        load_model(small)


def test_b05_half_a_packed_pair_is_refused(small: Path, edit_tensors: Callable[..., None]) -> None:
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"
    edit_tensors(small, lambda tensors: tensors.pop(name))

    with pytest.raises(BadQuantization) as caught:
        load_model(small)

    assert any("experts.2.w3" in line for line in caught.value.offenders)


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_row_72_padding_of_a_log_that_is_not_zero_is_refused(
    small: Path, edit_tensors: Callable[..., None], value: float
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        stored = tensors["language_model.model.layers.0.self_attn.A_log"]
        stored.data = stored.data[:-4] + torch.tensor([value]).numpy().tobytes()

    edit_tensors(small, spoil)

    with pytest.raises(BadInput, match="A_log: 1 of the 122 entries behind its 6 heads are not zero"):
        load_model(small)


def test_a_block_without_a_finite_value_is_refused(small: Path, edit_tensors: Callable[..., None]) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        stored = tensors["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"]
        stored.data = b"\xff" + stored.data[1:]

    edit_tensors(small, spoil)

    with pytest.raises(UnrepresentableBlocks) as caught:
        load_model(small)

    assert caught.value.offenders == ("row 0, block 0, scale byte 255",)


def test_c02_a_tensor_of_another_dtype_is_refused_not_cast(small: Path, edit_tensors: Callable[..., None]) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        stored = tensors["language_model.model.layers.0.self_attn.dt_bias"]
        stored.dtype, stored.data = "BF16", stored.data[: len(stored.data) // 2]

    edit_tensors(small, spoil)

    with pytest.raises(CensusMismatch) as caught:
        load_model(small)

    assert any("dt_bias: found BF16, wanted F32" in line for line in caught.value.offenders)


def test_a_folder_without_a_config_is_refused(small: Path) -> None:
    (small / "config.json").unlink()

    with pytest.raises(BadConfig):
        load_model(small)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_model(tmp_path / "nothing")


def tie(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("kept", ["embed_tokens", "lm_head", "both"])
def test_a15_tied_weights_load_under_either_name(small: Path, edit_tensors: Callable[..., None], kept: str) -> None:
    embed, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors[head].data = tensors[embed].data
        if kept != "both":
            del tensors[embed if kept == "lm_head" else head]

    wanted = stored_tensors(small)[embed]
    tie(small)
    edit_tensors(small, change)

    network = load_model(small)

    assert torch.equal(network.language_model.lm_head.weight, wanted)
    assert network.language_model.lm_head.weight is network.language_model.model.embed_tokens.weight


def test_a15_tied_weights_that_differ_are_refused(small: Path) -> None:
    tie(small)

    with pytest.raises(CensusMismatch, match="differ"):
        load_model(small)


def test_gradients_map_to_released_names_and_shapes(small_source: Path) -> None:
    network = load_model(small_source, dtype=torch.float32)
    ids = torch.arange(16)[None]
    network(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    mapped = to_hf_state_dict(gradients, network.config)

    stored = wanted_values(small_source)
    assert all(tuple(gradient.shape) == tuple(stored[name].shape) for name, gradient in mapped.items())
    a_log = mapped["language_model.model.layers.0.self_attn.A_log"]
    assert torch.equal(a_log[:6], gradients["language_model.model.layers.0.self_attn.decay.A_log"])
    assert not bool(a_log[6:].any())
    expert = mapped["language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert torch.equal(expert, gradients["language_model.model.layers.1.block_sparse_moe.experts.w2"][3])


def test_names_and_shapes_that_do_not_fit_are_refused_together(small_source: Path) -> None:
    config = load_model(small_source, num_layers=1).config
    native = {"language_model.nonsense": torch.zeros(1), "language_model.model.norm.weight": torch.zeros(3)}

    with pytest.raises(ValueError, match=r"2 of 2 tensors do not fit.*nonsense.*norm\.weight"):
        to_hf_state_dict(native, config)


def test_the_peak_is_the_network_and_one_chunk(tmp_path: Path) -> None:
    from k3convert.synthesis import make_checkpoint

    folder = tmp_path / "many"
    make_checkpoint(folder, preset="tiny", num_experts=192, num_layers=2)
    script = f"""
import resource, torch
from k3convert.loading.load_model import load_with_report
load_with_report({str(folder)!r}, num_layers=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
network, _ = load_with_report({str(folder)!r}, dtype=torch.float32, chunk_bytes=1 << 20)
size = sum(t.nbytes for t in network.state_dict().values())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before * 1024, size)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    grown, size = map(int, result.stdout.split())
    # The chunk, and the records of the file's tensors.
    assert grown < size + (24 << 20)


def test_a_tensor_reader_reads_single_tensors(small_source: Path) -> None:
    reader = TensorReader(open_logical(small_source))
    out = torch.empty(128)

    reader.read_into("language_model.model.norm.weight", out)
    reader.close()

    assert torch.equal(out, stored_tensors(small_source)["language_model.model.norm.weight"].float())
