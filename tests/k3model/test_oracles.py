"""Single modules against an independent implementation's inputs, weights and outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3model.config import KimiK3Config, MlaConfig
from k3model.presets import tiny_config_dict
from k3model.text.documents import Documents
from k3model.text.mla_attention import MlaAttention
from k3model.text.router import Router


def tensor_of(block: dict[str, Any]) -> Tensor:
    return torch.tensor(block["data"]).view(block["shape"])


def oracle(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The oracle and the tolerances of its manifest."""
    tolerance = json.loads((folder / "op_oracles" / "MANIFEST.json").read_text())["tolerance"]
    values = json.loads((folder / "op_oracles" / f"{name}.json").read_text())
    return values, {"atol": tolerance["fp32_abs"], "rtol": tolerance["fp32_rel"]}


@torch.no_grad()
def test_d5_mla_rotates_nothing_and_gates_its_output(reference_fixtures: Path) -> None:
    values, tolerance = oracle(reference_fixtures, "mla")
    config = MlaConfig(
        num_heads=values["n_heads"],
        q_lora_rank=values["q_lora"],
        kv_lora_rank=values["kv_lora"],
        qk_nope_head_dim=values["qk_nope"],
        qk_rope_head_dim=values["qk_rope"],
        v_head_dim=values["v_head"],
        use_output_gate=True,
    )
    attention = MlaAttention(config, values["in"]["shape"][-1])
    weights = {name.removesuffix("_weight") + ".weight": value for name, value in values.items() if "_weight" in name}
    attention.load_state_dict({name: tensor_of(value) for name, value in weights.items()})
    # The oracle was made with this eps in the two latent norms.
    attention.q_a_layernorm.eps = attention.kv_a_layernorm.eps = values["rms_eps"]

    out = attention(tensor_of(values["in"]), Documents())

    torch.testing.assert_close(out, tensor_of(values["out"]), **tolerance)


@torch.no_grad()
def test_e13_the_bias_selects_and_the_plain_score_weighs(reference_fixtures: Path) -> None:
    values, tolerance = oracle(reference_fixtures, "router")
    moe = KimiK3Config.from_dict(tiny_config_dict()).text.moe
    assert moe is not None
    router = Router(
        replace(moe, num_experts=values["n_experts"], num_experts_per_token=values["top_k"]), values["in"]["shape"][-1]
    )
    router.load_state_dict(
        {"weight": tensor_of(values["gate_weight"]), "e_score_correction_bias": tensor_of(values["bias"])}
    )

    ids, weights = router(tensor_of(values["in"]))

    # The order of a token's experts means nothing.
    by_id = ids.argsort(dim=-1)
    wanted_ids = tensor_of(values["topk_idx"]).long()
    wanted_by_id = wanted_ids.argsort(dim=-1)
    assert torch.equal(ids.gather(1, by_id), wanted_ids.gather(1, wanted_by_id))
    wanted_weights = tensor_of(values["topk_weight"]).gather(1, wanted_by_id)
    torch.testing.assert_close(weights.gather(1, by_id), wanted_weights, **tolerance)
    assert values["rows_where_bias_changed_selection"] > 0
