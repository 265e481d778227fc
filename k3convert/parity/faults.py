"""Faults planted into a candidate, each of which a comparison must find, and find at the right place.

Every one is a mistake that a converter or a training framework has made in public. They change the network of one run
in memory; nothing on disk is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from k3convert.errors import UsageError
from k3convert.parity.records import Kind
from k3kernels import K3Op
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.gradients import sum_gradients
from k3model.parallel.mesh import Mesh
from k3model.text.moe import Experts, SparseMoe

# The layer that faults of one layer are planted in: KDA with experts in the tiny network. MLA faults take the next.
FAULTY_LAYER = 2
FAULTY_MLA_LAYER = 3
_EXPERTS = f"language_model.model.layers.{FAULTY_LAYER}.block_sparse_moe.experts"
_GATE = f"language_model.model.layers.{FAULTY_LAYER}.block_sparse_moe.gate"
_KDA = f"language_model.model.layers.{FAULTY_LAYER}.self_attn"
_ROUTING = (Kind.ROUTING_SCORES, Kind.ROUTED_EXPERTS)
_MLA = f"language_model.model.layers.{FAULTY_MLA_LAYER}.self_attn"


@dataclass(frozen=True, slots=True)
class NetworkFault:
    """A fault of the network.

    Attributes:
        description: what goes wrong, in one line.
        plant: changes the network, before it is laid out, for as long as the context lasts.
        name: where the first difference must be found.
        kinds: of the tensors that may differ there first.
        cell: the cell that shows it, beside dtype and data.
    """

    description: str
    plant: Callable[[KimiK3ForConditionalGeneration, Mesh], AbstractContextManager[Any]]
    name: str
    kinds: tuple[Kind, ...] = (Kind.OUTPUT,)
    cell: str = ""


def plant(fault: str | None, network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    """Plant a fault for as long as the context lasts; None plants nothing.

    Raises:
        UsageError: there is no such fault.
    """
    if fault is None:
        return nullcontext()
    if fault not in NETWORK_FAULTS:
        raise UsageError(f"no fault {fault!r}; there are: {', '.join(NETWORK_FAULTS)}")
    return NETWORK_FAULTS[fault].plant(network, mesh)


def _changes_experts(change: Callable[[Experts], None]) -> Callable[..., AbstractContextManager[Any]]:
    """A fault that changes the expert weights of one layer."""

    def plant_it(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
        with torch.no_grad():
            change(_moe(network).experts)
        return nullcontext()

    return plant_it


def _swap_nibbles(experts: Experts) -> None:
    experts.w1.copy_(torch.unflatten(experts.w1, -1, (-1, 2)).flip(-1).flatten(-2))


def _swap_gate_and_up(experts: Experts) -> None:
    gate = experts.w1.clone()
    experts.w1.copy_(experts.w3)
    experts.w3.copy_(gate)


def _read_transposed(experts: Experts) -> None:
    shape = experts.w2.shape
    experts.w2.copy_(experts.w2.clone().reshape(shape[0], shape[2], shape[1]).transpose(1, 2))


def _permute(experts: Experts) -> None:
    """Every second expert first, as when both meshes shard the expert dim and the parts are joined in mesh order."""
    for matrix in (experts.w1, experts.w3, experts.w2):
        matrix.copy_(torch.unflatten(matrix, 0, (-1, 2)).transpose(0, 1).flatten(0, 1))


def _lose_one(experts: Experts) -> None:
    for matrix in (experts.w1, experts.w3, experts.w2):
        matrix[0] = 0


def _shift_scale(experts: Experts) -> None:
    experts.w1[0, 0, :32] *= 2


def _drop_correction_bias(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    _moe(network).gate.e_score_correction_bias.zero_()
    return nullcontext()


def _round_correction_bias(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    _round(_moe(network).gate.e_score_correction_bias)
    return nullcontext()


def _round_decay(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    attention: Any = network.language_model.model.layers[str(FAULTY_LAYER)].self_attn
    with torch.no_grad():
        _round(attention.decay.A_log)
    return nullcontext()


def _round(tensor: Tensor) -> None:
    tensor.copy_(tensor.to(torch.bfloat16))


def _weigh_before_down(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    """The router's weight multiplies the activation, before the down projection rounds."""
    moe = _moe(network).experts
    activate = K3Op("situ_and_mul", "standard", "eager")

    def wrong(z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, **scalars: Any) -> Tensor:
        total = torch.zeros_like(z)
        for expert, weight in zip(ids.T, weights.to(z.dtype).T, strict=True):
            gate, up = (torch.einsum("nd,nid->ni", z, matrix[expert]) for matrix in (w1, w3))
            total = total + torch.einsum("ni,ndi->nd", activate(gate, up, **scalars) * weight[:, None], w2[expert])
        return total

    moe.moe_experts = wrong  # type: ignore[assignment]
    return nullcontext()


def _lose_shared_expert(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    _moe(network).shared_experts = None
    return nullcontext()


def _use_config_eps(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    """The config's epsilon in the norms of MLA's latents, which are built with another."""
    attention: Any = network.language_model.model.layers[str(FAULTY_MLA_LAYER)].self_attn
    attention.q_a_layernorm.eps = attention.kv_a_layernorm.eps = network.config.text.rms_norm_eps
    return nullcontext()


def _rotate_keys(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    """The shared key channels are rotated, though the network has no positions."""
    attention: Any = network.language_model.model.layers[str(FAULTY_MLA_LAYER)].self_attn
    right = attention.compress

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = right(x)
        angle = torch.arange(shared.shape[1], device=shared.device, dtype=shared.dtype)[:, None] * 0.01
        first, second = shared.chunk(2, dim=-1)
        turned = (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos())
        return latent, torch.cat(turned, dim=-1)

    attention.compress = wrong
    return nullcontext()


def _use_softplus_gate(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    attention: Any = network.language_model.model.layers[str(FAULTY_LAYER)].self_attn
    attention.decay.lower_bound = None
    return nullcontext()


def _leak_documents(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    """One layer's convolutions and recurrence run across the documents of a packed row."""
    attention: Any = network.language_model.model.layers[str(FAULTY_LAYER)].self_attn
    right = attention.mix
    attention.mix = lambda streams, cu_seqlens, **keywords: right(streams, None, **keywords)
    return nullcontext()


def _bound_activation(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> AbstractContextManager[Any]:
    _moe(network).experts.linear_beta = None
    return nullcontext()


@contextmanager
def _sum_gradients_times(times: int) -> Iterator[None]:
    def wrong(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
        for _ in range(times):
            sum_gradients(network, mesh)

    with patch("k3model.parallel.step.sum_gradients", wrong):
        yield


@contextmanager
def _drop_state(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> Iterator[None]:
    """What the ranks of cp before leave behind is not taken over."""
    from k3model.parallel.context import _state_before as right

    with patch("k3model.parallel.context._state_before", lambda *arguments: right(*arguments) * 0):
        yield


@contextmanager
def _lose_border_label(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> Iterator[None]:
    """Labels are shifted inside each rank's share, so that the last token of a share has none."""
    from k3model.parallel.sequence import SequenceShare

    right = SequenceShare.__call__

    def wrong(share: SequenceShare, x: Tensor) -> Tensor:
        own = right(share, x)
        if x.is_floating_point():
            return own
        own = own.clone()
        own[:, -1] = network.config.ignore_index
        return own

    with patch.object(SequenceShare, "__call__", wrong):
        yield


@contextmanager
def _average_over_ranks(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> Iterator[None]:
    """The loss is the mean of every rank's own mean, though ranks count different numbers of labels."""

    def wrong(token_losses: Sequence[Tensor], num_labels: Tensor, mesh: Mesh) -> Tensor:
        own = torch.cat([losses.flatten() for losses in token_losses])
        mean = own.sum() / (own != 0).sum().clamp(min=1)
        dist.all_reduce(mean, group=mesh.group("data"))
        return mean / mesh.layout.ranks_per_stage

    with patch("k3model.parallel.step.mean_loss", wrong):
        yield


def _moe(network: KimiK3ForConditionalGeneration) -> SparseMoe:
    layers = dict(network.language_model.model.layers.items())
    moe = getattr(layers.get(str(FAULTY_LAYER)), "block_sparse_moe", None)
    if not isinstance(moe, SparseMoe):
        raise UsageError(f"this fault needs experts in layer {FAULTY_LAYER}, and the network has none there")
    return moe


NETWORK_FAULTS: Mapping[str, NetworkFault] = {
    "swapped-nibbles": NetworkFault(
        "the high nibble of every packed byte is taken for the even column", _changes_experts(_swap_nibbles), _EXPERTS
    ),
    "swapped-w1-w3": NetworkFault(
        "gate and up projections change places", _changes_experts(_swap_gate_and_up), _EXPERTS
    ),
    "transposed-w2": NetworkFault(
        "the down projections are read with their dims exchanged", _changes_experts(_read_transposed), _EXPERTS
    ),
    "permuted-experts": NetworkFault("experts are stored in another order", _changes_experts(_permute), _EXPERTS),
    "lost-expert": NetworkFault("one expert of one layer holds zeros", _changes_experts(_lose_one), _EXPERTS),
    "shifted-scale": NetworkFault("one block's scale is off by one", _changes_experts(_shift_scale), _EXPERTS),
    "dropped-correction-bias": NetworkFault(
        "experts are selected without the correction bias", _drop_correction_bias, _GATE, _ROUTING
    ),
    "bf16-correction-bias": NetworkFault(
        "the float32 correction bias went through bf16", _round_correction_bias, _GATE, _ROUTING
    ),
    "bf16-decay": NetworkFault("the float32 A_log went through bf16", _round_decay, f"{_KDA}.decay"),
    "router-weight-before-down": NetworkFault(
        "the router's weight multiplies before the down projection rounds", _weigh_before_down, _EXPERTS
    ),
    "lost-shared-expert": NetworkFault(
        "the shared expert is left out", _lose_shared_expert, _EXPERTS.replace(".experts", ".shared_experts*")
    ),
    "latent-norm-eps": NetworkFault(
        "the norms of MLA's latents use the config's epsilon", _use_config_eps, f"{_MLA}.q_a_layernorm"
    ),
    "rotated-keys": NetworkFault("the shared key channels of MLA are rotated", _rotate_keys, f"{_MLA}.o_proj"),
    "softplus-decay": NetworkFault("the decay has no lower bound", _use_softplus_gate, f"{_KDA}.decay"),
    "leaking-documents": NetworkFault(
        "packed documents leak into the next through KDA", _leak_documents, f"{_KDA}.q_conv1d", cell="data=packed"
    ),
    "unbounded-activation": NetworkFault("SiTU's up branch is not bounded", _bound_activation, _EXPERTS),
    "unsummed-sp-gradient": NetworkFault(
        "gradients are not summed over the ranks of sp",
        lambda network, mesh: _sum_gradients_times(0),
        "*",
        (Kind.PARAMETER_GRADIENT,),
        cell="sp=2",
    ),
    "doubled-sp-gradient": NetworkFault(
        "gradients are summed twice over the ranks of sp",
        lambda network, mesh: _sum_gradients_times(2),
        "*",
        (Kind.PARAMETER_GRADIENT,),
        cell="sp=2",
    ),
    "dropped-cp-state": NetworkFault(
        "the state of the ranks before is dropped",
        _drop_state,
        "language_model.model.layers.0.self_attn.o_norm",
        cell="cp=2",
    ),
    "lost-border-label": NetworkFault(
        "the label that is the next rank's first token is lost",
        _lose_border_label,
        "token_loss",
        (Kind.TOKEN_LOSS,),
        cell="sp=2",
    ),
    "mean-over-ranks": NetworkFault(
        "the loss is the mean of the ranks' means", _average_over_ranks, "loss", (Kind.LOSS,), cell="ep=2"
    ),
}
"""Faults by name."""
