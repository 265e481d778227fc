"""What the ranks of a test do. Loaded by path in every worker, and by the tests for the run on one process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from k3convert.parity.pinned_shapes import PinnedShapes
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.context import _state_before
from k3model.parallel.exchange import gather_sequence, heads_to_sequence, sequence_to_heads
from k3model.parallel.expert_dispatch import shard_experts
from k3model.parallel.gradients import clip_gradients, gradient_norm
from k3model.parallel.layout import Layout
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import parallelize
from k3model.parallel.step import Batch, forward_backward
from k3model.presets import tiny_config_dict
from k3model.text.router import Router

NUM_LAYERS = 4
PLACEHOLDER = 505

FOUR_HEADS = {
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": False,
    },
    "num_hidden_layers": 5,
}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 500, (batch, length), generator=torch.Generator().manual_seed(11))


def dense() -> dict[str, Tensor]:
    """Four rows whose labels are counted unequally: in the second half of the rows only a few."""
    ids = tokens(4, 32)
    labels = ids.clone()
    labels[2:, 5:] = -100
    labels[0, 20:] = -100
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, Tensor]:
    """Documents in one row, of which some cross every cut."""
    ids = tokens(1, 144)
    return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": torch.tensor([0, 5, 30, 30, 100, 143, 144])}


def padded() -> dict[str, Tensor]:
    """Padding on the right, on the left, on both sides, and of more than the last half of a row."""
    ids, mask = tokens(4, 24), torch.ones(4, 24, dtype=torch.long)
    mask[0, 20:], mask[1, :13], mask[2, :2], mask[2, 22:], mask[3, 2:] = 0, 0, 0, 0, 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def images() -> dict[str, Tensor]:
    """An image a row of 24 tokens, each over the middle or a quarter of its row."""
    ids = tokens(2, 19)
    ids[0, 9] = ids[1, 3] = PLACEHOLDER
    patches = torch.rand(48, 3, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    labels = ids.masked_fill(ids == PLACEHOLDER, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": patches, "grid_thws": torch.tensor([[1, 4, 6]] * 2)}


BATCHES = {"dense": dense, "packed": packed, "padded": padded, "images": images}


def build_network(
    dtype: torch.dtype, *, fields: Mapping[str, Any] | None = None, vision: bool = False, num_layers: int = NUM_LAYERS
) -> KimiK3ForConditionalGeneration:
    """The same weights in every process, none of them where a mistake would not show (zero or one)."""
    raw = tiny_config_dict()
    raw["text_config"] |= fields or {}
    if not vision:
        raw["vision_config"] = None
    config = KimiK3Config.from_dict(raw).with_num_layers(num_layers)
    torch.manual_seed(3)
    network = KimiK3ForConditionalGeneration.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1 and not name.endswith("A_log"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
        if dtype == torch.float64:
            widen(network)
    return network.to(dtype).train()


def widen(network: torch.nn.Module) -> None:
    """What stays float32 as float64, so that nothing of a comparison is rounded to float32."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype == torch.float32:
                setattr(module, name, torch.nn.Parameter(parameter.detach().double()))


@cache
def mesh_of(layout: Layout) -> Mesh:
    return Mesh.build(layout, "cpu")


@contextmanager
def environment(**variables: str) -> Any:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def step(
    layout: Layout | None,
    batch: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    model: Mapping[str, Any] | None = None,
    checkpointing: bool = False,
    max_norm: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Loss, logits, every parameter's gradient and the norm: on one process where the layout is None."""
    network = build_network(dtype, **(model or {}))
    network.set_activation_checkpointing(checkpointing)
    if layout is None:
        out = network(**batch)
        assert out.loss is not None
        out.loss.backward()
        gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        return {"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": gradients, "norm": norm}
    mesh = mesh_of(layout)
    with environment(**(variables or {})):
        parallelize(network, mesh)
    result = forward_backward(network, mesh, [Batch(**rows_of_rank(batch, mesh))], with_logits=True)
    norm = gradient_norm(network, mesh) if max_norm is None else clip_gradients(network, mesh, max_norm)
    gradients = {name: whole(p.grad) for name, p in network.named_parameters() if p.grad is not None}
    return {
        "loss": result.loss,
        "logits": result.logits[0],
        "gradients": gradients if dist.get_rank() == 0 else None,
        "norm": norm,
        "dtypes": {name: p.dtype for name, p in network.named_parameters()},
        "num_labels": int((result.token_losses[0] != 0).sum()),
    }


def step_of_own_batches(layout: Layout | None, batches_of_dp: Sequence[Sequence[Mapping[str, Tensor]]]) -> Any:
    """Loss and gradients where every rank of dp has batches of its own; all of them on one process without a layout."""
    network = build_network(torch.float64)
    network.set_activation_checkpointing(True)
    if layout is None:
        outs = [network(**batch) for batches in batches_of_dp for batch in batches]
        loss = sum(out.loss_sum for out in outs) / sum(out.num_labels for out in outs)
        loss.backward()
        return {"loss": loss.detach(), "gradients": {n: p.grad for n, p in network.named_parameters()}}
    mesh = mesh_of(layout)
    parallelize(network, mesh)
    result = forward_backward(network, mesh, [Batch(**batch) for batch in batches_of_dp[mesh.place("dp")]])
    gradients = {name: whole(p.grad) for name, p in network.named_parameters()}
    return {"loss": result.loss, "gradients": gradients if dist.get_rank() == 0 else None}


def pinned_forward(layout: Layout, batch: str, dtype: torch.dtype, model: Mapping[str, Any] | None = None) -> Any:
    """Loss and logits, where the row count of every product is padded to a multiple of 16."""
    network, mesh = build_network(dtype, **(model or {})), mesh_of(layout)
    parallelize(network, mesh)
    rows = rows_of_rank(BATCHES[batch](), mesh)
    with PinnedShapes():
        result = forward_backward(network, mesh, [Batch(**rows)], with_logits=True, backward=False)
    return {"loss": result.loss, "logits": result.logits[0]}


def routings(layout: Layout, batch: Mapping[str, Tensor]) -> list[tuple[str, list[Tensor]]]:
    """What each router chose, forward and when its layer was computed again, by name."""
    network, mesh = build_network(torch.float32), mesh_of(layout)
    network.set_activation_checkpointing(True)
    parallelize(network, mesh)
    chosen: dict[str, list[Tensor]] = {}
    for name, module in network.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _m, _a, out, name=name: chosen.setdefault(name, []).append(out[0]))
    forward_backward(network, mesh, [Batch(**rows_of_rank(batch, mesh))])
    return list(chosen.items())


def rows_of_rank(batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    dp, place = mesh.layout.dp, mesh.place("dp")
    if dp == 1:
        return dict(batch)
    return {name: value.chunk(dp)[place] for name, value in batch.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def exchange_and_back(x: Tensor) -> dict[str, Tensor]:
    """Sequence shards to heads and back, and gathered, with the gradient of a sum of squares."""
    group = dist.group.WORLD
    mine = x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    heads = sequence_to_heads(mine, group)
    back = heads_to_sequence(heads, group)
    gathered = gather_sequence(mine, group)
    (back.square().sum() + gathered.sum()).backward()
    return {"heads": heads.detach(), "back": back.detach(), "gathered": gathered.detach(), "grad": mine.grad}


def chain_states(
    lefts: Tensor, transitions: Tensor, weights: Tensor, first_ranks: tuple[int, ...]
) -> dict[str, Tensor]:
    """Every rank's state from all ranks' maps, and the gradients of a weighted sum of all states."""
    rank = dist.get_rank()
    left, transition = lefts[rank].clone().requires_grad_(), transitions[rank].clone().requires_grad_()
    state = _state_before(left, transition, first_ranks, dist.group.WORLD)
    (state * weights[rank]).sum().backward()
    return {"state": state.detach(), "grad_left": left.grad, "grad_transition": transition.grad}


def places(layout: Layout) -> dict[str, Any]:
    mesh = mesh_of(layout)
    axes = ("pp", "dp", "cp", "sp", "ep_fsdp", "ep", "data")
    return {axis: (mesh.place(axis), dist.get_process_group_ranks(mesh.group(axis))) for axis in axes}


def fail_on_rank_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank one fails")
    return dist.get_rank()


def hang_on_rank_one() -> int:
    if dist.get_rank() == 1:
        time.sleep(600)
    return dist.get_rank()


def kda_path(layout: Layout, variables: Mapping[str, str]) -> str:
    network = build_network(torch.float32, num_layers=1)
    with environment(**variables):
        parallelize(network, mesh_of(layout))
    return type(network.language_model.model.layers["0"].self_attn.parallel_forward).__name__


def written_forward(layout: Layout, variables: Mapping[str, str], forbids_timing: bool = False) -> str:
    """What a forward pass writes to stderr, where making a timer and waiting for a device may be forbidden."""

    def forbidden(*_: Any) -> None:
        raise AssertionError("a timer was made, or a device waited for")

    network = build_network(torch.float32)
    with ExitStack() as stack:
        if forbids_timing:
            stack.enter_context(mock.patch("k3model.parallel.sequence.KdaTiming", forbidden))
            stack.enter_context(mock.patch("torch.accelerator.synchronize", forbidden))
        written = stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(environment(**variables))
        parallelize(network, mesh_of(layout))
        network(tokens(1, 16))
    return written.getvalue()


def state_against_whole(layout: Layout) -> list[str]:
    """Names of the tensors that a checkpoint of this layout would hold with other values or another shape."""
    network, reference = build_network(torch.float32), build_network(torch.float32)
    parallelize(network, mesh_of(layout))
    state, want = network.state_dict(), reference.state_dict()
    gathered = {name: whole(tensor) for name, tensor in state.items()}
    wrong = [name for name in want if name not in gathered or not torch.equal(gathered[name], want[name])]
    return wrong + sorted(set(gathered) - set(want))


def expert_placements(layout: Layout) -> set[tuple[Any, ...]]:
    network = build_network(torch.float32, num_layers=2)
    parallelize(network, mesh_of(layout))
    return {tuple(p.placements) for name, p in network.named_parameters() if ".experts." in name}


def dispatch_to_one_rank() -> dict[str, Tensor]:
    """Rank 1 has no tokens, and the experts of rank 1 get all of rank 0's; against all experts on one process."""
    mesh = mesh_of(Layout(dp=2, ep=2))
    experts, alone = (build_network(torch.float64).language_model.model.layers["1"] for _ in range(2))
    experts, alone = experts.block_sparse_moe.experts, alone.block_sparse_moe.experts
    shard_experts(experts, mesh.expert["ep"])
    num_tokens = 20 if dist.get_rank() == 0 else 0
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(num_tokens, 96, dtype=torch.float64, generator=generator)
    weights = torch.rand(num_tokens, 4, dtype=torch.float64, generator=generator)
    ids = 8 + torch.rand(num_tokens, 8, generator=generator).argsort(-1)[:, :4]
    found = {}
    for prefix, module in (("", experts), ("want_", alone)):
        z_in, weights_in = z.clone().requires_grad_(), weights.clone().requires_grad_()
        out = module(z_in, ids, weights_in)
        out.square().sum().backward()
        found |= {f"{prefix}grad_z": z_in.grad, f"{prefix}grad_weights": weights_in.grad}
        found[prefix.rstrip("_") or "out"] = out.detach()
    return found


def norm_without_gradients(layout: Layout) -> float:
    network, mesh = build_network(torch.float64, num_layers=1), mesh_of(layout)
    parallelize(network, mesh)
    return float(gradient_norm(network, mesh))
