"""What the expert block does to its input, and which sublayer reads which depth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from k3model.network import KimiK3ForConditionalGeneration
from k3model.text.documents import Documents

Build = Callable[..., KimiK3ForConditionalGeneration]


def layers_of(network: KimiK3ForConditionalGeneration) -> dict[str, nn.Module]:
    return dict(network.language_model.model.layers.items())


def test_e15_the_expert_block_leaves_its_input_alone(tiny_network: Build) -> None:
    block = tiny_network().language_model.model.layers["1"].feed_forward
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0))
    before = x.clone()

    with torch.no_grad():
        first, second = block(x), block(x)

    assert torch.equal(x, before)
    assert torch.equal(first, second)


def test_e14_the_router_reads_the_full_width_and_the_experts_the_latent(tiny_network: Build) -> None:
    block = tiny_network().language_model.model.layers["1"].feed_forward
    seen: dict[str, int] = {}
    block.gate.register_forward_hook(lambda _m, args, _o: seen.__setitem__("router", args[0].shape[-1]))
    block.experts.register_forward_hook(lambda _m, args, _o: seen.__setitem__("experts", args[0].shape[-1]))
    block.shared_experts.register_forward_hook(lambda _m, args, _o: seen.__setitem__("shared", args[0].shape[-1]))

    block(torch.zeros(1, 3, 128))

    assert seen == {"router": 128, "experts": 96, "shared": 128}


@torch.no_grad()
def test_row_83_the_block_is_the_masked_sum_over_all_experts(tiny_network: Build) -> None:
    block = tiny_network().language_model.model.layers["1"].feed_forward
    x = torch.randn(11, 128, generator=torch.Generator().manual_seed(1))

    got = block(x[None])[0]

    ids, weights = block.gate(x)
    dense = torch.zeros(11, 16).scatter(1, ids, weights)
    z = block.routed_expert_down_proj(x)
    gate, up = (torch.einsum("nd,eid->nei", z, stack) for stack in (block.experts.w1, block.experts.w3))
    situ = 4 * torch.tanh(gate / 4) * gate.sigmoid() * 25 * torch.tanh(up / 25)
    y = torch.einsum("nei,edi,ne->nd", situ, block.experts.w2, dense)
    want = block.routed_expert_up_proj(block.routed_expert_norm(y)) + block.shared_experts(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_layers", "block_size"), [(13, 3), (12, 3), (1, 3), (5, 1), (6, 12)])
def test_e20_every_sublayer_reads_the_blocks_before_it_and_the_running_sum(
    tiny_network: Build, num_layers: int, block_size: int
) -> None:
    network = tiny_network(num_layers=num_layers, attn_res_block_size=block_size)
    decoder = network.language_model.model
    num_sources: list[tuple[str, int]] = []

    def counting(name: str, mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(prefix: Tensor, norm: Tensor, query: Tensor, *bank: Tensor, eps: float) -> Tensor:
            num_sources.append((name, len(bank) + 1))
            return mix(prefix, norm, query, *bank, eps=eps)

        return call

    for index, layer in layers_of(network).items():
        layer.mix.attn_res = counting(index, layer.mix.attn_res)
    decoder.mix.attn_res = counting("output", decoder.mix.attn_res)

    with torch.no_grad():
        network(torch.arange(4)[None])

    wanted: list[tuple[str, int]] = []
    for layer in range(num_layers):
        # Blocks finished before the layer, the embedding among them; layer 0 has none and mixes nothing.
        finished = -(-layer // block_size)
        wanted += [(str(layer), finished + 1)] * (layer > 0)
        wanted.append((str(layer), layer // block_size + 2))
    wanted.append(("output", (num_layers - 1) // block_size + 2))
    assert num_sources == wanted


@torch.no_grad()
def test_a_layer_adds_its_sublayers_to_the_running_sum(tiny_network: Build) -> None:
    network = tiny_network()
    layer = network.language_model.model.layers["1"]
    outputs: list[Tensor] = []
    layer.self_attn.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    layer.feed_forward.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    prefix, block = torch.randn(2, 1, 6, 128, generator=torch.Generator().manual_seed(2))

    new_prefix, *bank = layer(prefix, block, documents=Documents())

    assert torch.equal(new_prefix, prefix + outputs[0] + outputs[1])
    assert len(bank) == 1
    assert bank[0] is block


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_e19_a_chain_of_stages_is_the_whole_network_to_the_bit(tiny_network: Build, cut: int) -> None:
    network = tiny_network()
    decoder = network.language_model.model
    ids = torch.arange(10)[None]
    layers = layers_of(network)
    with torch.no_grad():
        whole = network(ids).logits
        embedded = decoder.embed_tokens(ids)

        decoder.layers = nn.ModuleDict(dict(list(layers.items())[:cut]))
        between = decoder.run_layers((embedded,), Documents())
        decoder.layers = nn.ModuleDict(dict(list(layers.items())[cut:]))
        chained = network.language_model.lm_head(decoder.finish(*decoder.run_layers(between, Documents()))).logits

    # What a stage hands on: the running sum and every block begun before the cut.
    assert len(between) == 1 + -(-cut // 3)
    assert torch.equal(chained, whole)


def test_e19_backward_through_a_bank_that_many_layers_read_runs_once_and_again(tiny_network: Build) -> None:
    network = tiny_network()
    ids = torch.arange(10)[None]

    for _ in range(2):
        network.zero_grad()
        network(ids, labels=ids).loss.backward()

    assert network.language_model.model.embed_tokens.weight.grad is not None
