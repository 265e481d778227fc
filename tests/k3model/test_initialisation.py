"""Every weight gets its value from a rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from k3model.config import KimiK3Config
from k3model.initialisation import initialise
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import tiny_config_dict

Build = Callable[..., KimiK3ForConditionalGeneration]


@pytest.mark.parametrize("block_size", [3, None])
def test_row_88_no_weight_keeps_what_was_in_memory(block_size: int | None) -> None:
    raw = tiny_config_dict()
    raw["text_config"]["attn_res_block_size"] = block_size
    network = KimiK3ForConditionalGeneration.empty(KimiK3Config.from_dict(raw).with_num_layers(5))
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.fill_(torch.nan)

    network.init_weights()

    unfilled = [name for name, tensor in network.state_dict().items() if not bool(tensor.isfinite().all())]
    assert unfilled == []


def test_row_25_a_network_from_meta_has_all_its_tensors_elsewhere() -> None:
    network = KimiK3ForConditionalGeneration.empty(KimiK3Config.from_dict(tiny_config_dict()).with_num_layers(2))

    assert {tensor.device.type for tensor in (*network.parameters(), *network.buffers())} == {"cpu"}


def test_weights_follow_their_rules(tiny_network: Build) -> None:
    network = tiny_network()
    state = network.state_dict()
    layer = "language_model.model.layers.1."

    assert float(state[f"{layer}self_attn.q_proj.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(state[f"{layer}block_sparse_moe.experts.w2"].std()) == pytest.approx(0.02, rel=0.05)
    assert bool((state[f"{layer}input_layernorm.weight"] == 1).all())
    a_log = state[f"{layer}self_attn.decay.A_log"]
    assert bool(((a_log >= 0) & (a_log <= math.log(16))).all())
    assert float(state["language_model.model.embed_tokens.weight"][511].abs().max()) == 0.0


def test_the_padding_row_gets_no_gradient(tiny_network: Build) -> None:
    network = tiny_network()
    ids = torch.tensor([[511, 3, 511, 4]])

    network(ids, labels=ids).loss.backward()

    gradient = network.language_model.model.embed_tokens.weight.grad
    assert gradient is not None
    assert float(gradient[511].abs().max()) == 0.0
    assert float(gradient[3].abs().max()) > 0.0


def test_the_same_seed_gives_the_same_weights(tiny_network: Build) -> None:
    one, two = tiny_network(seed=4).state_dict(), tiny_network(seed=4).state_dict()

    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_module_without_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="no rule says how to initialise extra"):
        initialise(nn.ModuleDict({"extra": nn.LayerNorm(4)}), 0.02)
