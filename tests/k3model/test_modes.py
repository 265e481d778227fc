"""Every mode of the config builds, runs in training mode, and trains every parameter it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.census import census
from k3model.network import KimiK3ForConditionalGeneration

Build = Callable[..., KimiK3ForConditionalGeneration]

TOKENS = 19
MODES: dict[str, dict[str, Any]] = {
    "release": {},
    "plain_residual_stream": {"attn_res_block_size": None},
    "softplus_gate": {"linear": {"gate_lower_bound": None}},
    "low_rank_output_gate": {"linear": {"use_full_rank_gate": False}},
    "no_latent": {"routed_expert_hidden_size": None},
    "no_latent_norm": {"latent_moe_use_norm": False},
    "expert_groups": {"num_expert_group": 4, "topk_group": 2},
    "softmax_router": {"moe_router_activation_func": "softmax"},
    "scaled_unnormalised_routing": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "no_shared_experts": {"num_shared_experts": 0},
    "no_vision": {"vision": False},
    "dense_only": {"num_experts": None, "num_experts_per_token": None, "moe_intermediate_size": None},
    "mla_only": {"linear_attn_config": None},
    "kda_only": {"linear": {"kda_layers": [*range(1, 14)], "full_attn_layers": []}},
    "no_mla_gate": {"mla_use_output_gate": False},
    "unbounded_linear_branch": {"activation_situ_linear_beta": None},
    "tied_embeddings": {"tie_word_embeddings": True},
    "block_size_divides": {"attn_res_block_size": 2, "num_layers": 4},
    "one_layer": {"num_layers": 1},
}


def batch(batch_size: int = 2, tokens: int = TOKENS, seed: int = 3) -> Tensor:
    return torch.randint(0, 500, (batch_size, tokens), generator=torch.Generator().manual_seed(seed))


def build_mode(tiny_network: Build, mode: str) -> KimiK3ForConditionalGeneration:
    fields = dict(MODES[mode])
    if mode == "tied_embeddings":
        # The preset says "untied" at the top as well; both places have to agree.
        from k3model.config import KimiK3Config
        from k3model.presets import tiny_config_dict

        raw = tiny_config_dict() | {"tie_word_embeddings": True}
        raw["text_config"]["tie_word_embeddings"] = True
        torch.manual_seed(0)
        return KimiK3ForConditionalGeneration.from_config(KimiK3Config.from_dict(raw).with_num_layers(5))
    return tiny_network(**fields)


@pytest.mark.parametrize("mode", MODES)
def test_row_88_every_mode_initialises_runs_and_trains(tiny_network: Build, mode: str) -> None:
    network = build_mode(tiny_network, mode).train()
    ids = batch()

    out = network(ids, labels=ids)
    out.loss.backward()

    assert out.logits.shape == (2, TOKENS, 512)
    assert bool(out.logits.isfinite().all())
    # Vision parameters need images; an expert without tokens and layer 0's attention mix get nothing.
    text_parameters = [
        (name, parameter)
        for name, parameter in network.named_parameters()
        if name.startswith("language_model.") and "layers.0.self_attention_res" not in name
    ]
    without = [name for name, parameter in text_parameters if parameter.grad is None]
    assert without == []
    assert all(bool(parameter.grad.isfinite().all()) for _, parameter in text_parameters if parameter.grad is not None)
    assert out.loss.item() == pytest.approx(6.24, abs=0.2)  # log(512): random weights know nothing


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_exactly_the_parameters_of_its_census(tiny_network: Build, mode: str) -> None:
    network = build_mode(tiny_network, mode)

    counted: dict[str, tuple[int, ...]] = {}
    for spec in census(network.config, packed=False):
        name, shape = spec.name, spec.shapes[-1 if spec.name.endswith("A_log") else 0]
        if spec.expert_index is not None:
            prefix, rest = name.split(".experts.")
            name = f"{prefix}.experts.{rest.split('.')[1]}"
            stacked = counted.get(name, (0, *shape))
            shape = (stacked[0] + 1, *shape)
        counted[name.replace("A_log", "decay.A_log").replace("dt_bias", "decay.dt_bias")] = shape
    state = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if network.config.text.tie_word_embeddings:
        del state["language_model.lm_head.weight"]
    assert state == counted


@pytest.mark.parametrize("mode", ["release", "plain_residual_stream", "mla_only", "kda_only"])
def test_activation_checkpointing_changes_no_bit(tiny_network: Build, mode: str) -> None:
    network = build_mode(tiny_network, mode)
    ids = batch()
    kept = gradients(network, ids)
    network.set_activation_checkpointing(True)

    recomputed = gradients(network, ids)

    for name, gradient in kept.items():
        assert torch.equal(recomputed[name], gradient), name


def gradients(network: KimiK3ForConditionalGeneration, ids: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    network(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_row_37_recomputed_routing_equals_the_first(tiny_network: Build) -> None:
    network = tiny_network().train()
    network.set_activation_checkpointing(True)
    routed: dict[int, list[Tensor]] = {}
    for index, layer in network.language_model.model.layers.items():
        if layer.is_moe:
            hook = routed.setdefault(int(index), []).append
            layer.feed_forward.gate.register_forward_hook(lambda _m, _a, out, hook=hook: hook(out[0].clone()))
    ids = batch()

    network(ids, labels=ids).loss.backward()

    assert len(routed) == 4
    for layer_index, calls in routed.items():
        assert len(calls) == 2, layer_index
        assert torch.equal(calls[0], calls[1])


def test_training_and_evaluation_compute_the_same(tiny_network: Build) -> None:
    network = tiny_network()
    ids = batch()

    with torch.no_grad():
        trained, evaluated = network.train()(ids).logits, network.eval()(ids).logits

    assert torch.equal(trained, evaluated)


def test_the_future_does_not_change_the_past(tiny_network: Build) -> None:
    network = tiny_network()
    ids = batch()
    changed = ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 500

    with torch.no_grad():
        before, after = network(ids).logits, network(changed).logits

    # Not to the bit: an expert that gets one token more or less sums its matrix product in another order.
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-5, atol=1e-6)
    assert float((before[:, 12:] - after[:, 12:]).abs().amax(-1).min()) > 1e-3


def test_e18_a_nan_reaches_no_other_row(tiny_network: Build) -> None:
    network = tiny_network()
    embed = network.language_model.model.embed_tokens

    def poison(_module: object, _args: object, out: Tensor) -> Tensor:
        out[0, 9, 5] = torch.nan
        return out

    embed.register_forward_hook(poison)

    with torch.no_grad():
        logits = network(batch()).logits

    assert not bool(logits[0, 9:].isfinite().any())
    assert bool(logits[1].isfinite().all())


def test_row_83_grouped_experts_equal_eager_ones_forward_and_backward(tiny_network: Build) -> None:
    eager = tiny_network()
    grouped = KimiK3ForConditionalGeneration(eager.config, ops={"moe": "grouped_mm"})
    grouped.load_state_dict(eager.state_dict())
    ids = batch()
    wanted = gradients(eager, ids)

    got = gradients(grouped, ids)

    assert eager.language_model.model.layers["1"].feed_forward.experts.moe_experts.impl == "eager"
    assert grouped.language_model.model.layers["1"].feed_forward.experts.moe_experts.impl == "grouped_mm"
    for name, want in wanted.items():
        # float32 sums in another order, through five layers of routing.
        torch.testing.assert_close(got[name], want, rtol=1e-3, atol=1e-6, msg=name)


def test_handles_are_resolved_once_and_refuse_what_does_not_exist(tiny_network: Build) -> None:
    config = tiny_network().config

    with pytest.raises(KeyError, match="nonsense"):
        KimiK3ForConditionalGeneration(config, ops={"moe": "nonsense"})
    with pytest.raises(KeyError, match="no_such_field"):
        KimiK3ForConditionalGeneration(config, ops={"no_such_field": "eager"})
