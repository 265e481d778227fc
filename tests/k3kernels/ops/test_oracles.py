"""Single ops against the inputs and outputs of an independent implementation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

pytestmark = pytest.mark.fixtures


@pytest.fixture
def oracle(reference_fixtures: Path) -> Callable[[str], dict[str, Any]]:
    """Read one oracle; arrays become float32 tensors of their stated shape."""

    def load(name: str) -> dict[str, Any]:
        content = json.loads((reference_fixtures / "op_oracles" / f"{name}.json").read_text(encoding="utf-8"))
        return {
            key: torch.tensor(value["data"]).reshape(value["shape"]) if isinstance(value, dict) else value
            for key, value in content.items()
        }

    return load


@pytest.fixture
def assert_within(reference_fixtures: Path) -> Callable[[Tensor, Tensor], None]:
    """The comparison that the oracles' own manifest asks for."""
    manifest = json.loads((reference_fixtures / "op_oracles" / "MANIFEST.json").read_text(encoding="utf-8"))
    absolute, relative = manifest["tolerance"]["fp32_abs"], manifest["tolerance"]["fp32_rel"]
    return lambda got, want: torch.testing.assert_close(got, want, atol=absolute, rtol=relative)


Load = Callable[[str], dict[str, Any]]
Compare = Callable[[Tensor, Tensor], None]


def test_rms_norm(oracle: Load, assert_within: Compare) -> None:
    data = oracle("rmsnorm")

    assert_within(K3Op("rms_norm", "standard", "eager")(data["in"], data["weight"], eps=data["eps"]), data["out"])


def test_situ_and_mul(oracle: Load, assert_within: Compare) -> None:
    data = oracle("situ_glu")
    gate, up = data["in"].chunk(2, -1)

    got = K3Op("situ_and_mul", "standard", "eager")(gate, up, beta=data["beta"], linear_beta=data["linear_beta"])

    assert_within(got, data["out"])


def test_kda_gate(oracle: Load, assert_within: Compare) -> None:
    data = oracle("kda_decay")
    z = data["z"].reshape(data["g"].shape)

    got = K3Op("kda_gate", "standard", "eager")(z, data["A_log"], data["dt_bias"], lower_bound=data["lower_bound"])

    assert_within(got, data["g"])
    assert_within(got.exp(), data["alpha"])


def test_short_conv_and_its_next_step(oracle: Load, assert_within: Compare) -> None:
    data = oracle("shortconv")
    conv = K3Op("short_conv", "standard", "eager")

    got, state = conv(data["in"], data["weight"], output_final_state=True)
    following, _ = conv(data["in_next"].reshape(1, 1, -1), data["weight"], state)

    assert_within(got, data["out"])
    assert_within(following, data["out_next"].reshape(1, 1, -1))
    assert torch.equal(state, data["state_after"].reshape(state.shape))


def test_mla_attention_inside_its_layer(oracle: Load, assert_within: Compare) -> None:
    data = oracle("mla")
    x, heads, nope = data["in"], data["n_heads"], data["qk_nope"]
    norm, attention = K3Op("rms_norm", "standard", "eager"), K3Op("mla_attention", "causal", "eager")
    shape = (*x.shape[:2], heads, -1)

    q = (norm(x @ data["q_a_proj_weight"].T, data["q_a_layernorm_weight"], eps=data["rms_eps"])) @ data[
        "q_b_proj_weight"
    ].T
    latent, shared_key = (x @ data["kv_a_proj_with_mqa_weight"].T).split((data["kv_lora"], data["qk_rope"]), -1)
    kv = norm(latent, data["kv_a_layernorm_weight"], eps=data["rms_eps"]) @ data["kv_b_proj_weight"].T
    k, v = kv.reshape(shape).split((nope, data["v_head"]), -1)
    k = torch.cat((k, shared_key[:, :, None].expand(*k.shape[:3], -1)), -1)
    out = attention(q.reshape(shape), k, v, scale=data["scale"]).flatten(2)
    gated = out * torch.sigmoid(x @ data["g_proj_weight"].T)

    assert_within(gated @ data["o_proj_weight"].T, data["out"])
