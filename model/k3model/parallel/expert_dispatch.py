"""Expert parallelism: latent tokens travel to the ranks that hold their experts, and the results travel back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from k3kernels.ops.moe_experts.situ.eager import ExpertRows, combine_slots, combine_slots_backward, sum_slots
from k3kernels.pair import SavedState, differentiable_op
from k3model.parallel.exchange import all_to_all_rows
from k3model.text.moe import Experts

MATRICES = ("w1", "w3", "w2")


def _spread_forward(z: Tensor, *, num_slots: int) -> tuple[Tensor, SavedState]:
    """One copy of every token a slot: ``[N, D]`` to ``[N, S, D]``."""
    return z[:, None].expand(-1, num_slots, -1).contiguous(), SavedState(())


def _spread_backward(saved: SavedState, grad: Tensor) -> tuple[Tensor]:
    return (sum_slots(grad),)


def _combine_forward(y: Tensor, weights: Tensor) -> tuple[Tensor, SavedState]:
    """The weighted sum over slots, in slot order: ``[N, S, D]`` and ``[N, S]`` to ``[N, D]``."""
    return combine_slots(y, weights), SavedState((y, weights))


def _combine_backward(saved: SavedState, grad: Tensor) -> tuple[Tensor, Tensor]:
    y, weights = saved.present()
    return combine_slots_backward(grad, y, weights)


_spread = differentiable_op(_spread_forward, _spread_backward, name="SpreadSlots")
_combine = differentiable_op(_combine_forward, _combine_backward, name="CombineSlots")


class ExpertDispatch:
    """Runs the experts of a layer that lie on the ranks of one group, a run of consecutive experts on each.

    Every (token, slot) is a row. Rows are sent to their expert's rank, computed there by the op of the layer with a
    weight of one, and sent back to their slot. The router's weights never travel: they multiply at home, so that
    their gradient is complete there, and slots are summed in their order as on one rank.
    A rank without tokens, or whose experts got none, takes part in every collective all the same.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, experts: Experts, z_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum of every token's experts: ``[N, D]``."""
        w1, w3, w2 = (_here(getattr(experts, name)) for name in MATRICES)
        num_ranks, num_local = dist.get_world_size(self.group), w1.shape[0]
        rows = ExpertRows.of(ids_NK, num_ranks * num_local)
        counts_to = rows.counts.view(num_ranks, num_local)
        counts_from = torch.empty_like(counts_to)
        dist.all_to_all_single(counts_from, counts_to, group=self.group)
        sent, received = counts_to.sum(1).tolist(), counts_from.sum(1).tolist()

        x_RD = rows.from_slots(_spread(z_ND, num_slots=ids_NK.shape[1]))
        arrived = all_to_all_rows(x_RD, sent, received, self.group)
        local_ids = (
            torch.arange(num_local, device=z_ND.device).repeat(num_ranks).repeat_interleave(counts_from.flatten())
        )
        y = experts.moe_experts(
            arrived,
            local_ids[:, None],
            torch.ones_like(local_ids[:, None], dtype=weights_NK.dtype),
            w1,
            w3,
            w2,
            beta=experts.beta,
            linear_beta=experts.linear_beta,
        )
        y_RD = all_to_all_rows(y, received, sent, self.group)
        out: Tensor = _combine(rows.to_slots(y_RD), weights_NK)
        return out


def shard_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this rank's run of experts, and have the layer dispatch to the others.

    Args:
        experts: with all experts of the layer.
        mesh: one axis, over the ranks that divide them. The parameters become DTensors with ``Shard(0)`` on it, whose
            shape, and so a checkpoint's, is still that of all experts.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    num_experts, num_ranks = experts.w1.shape[0], mesh.size()
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts do not divide into {num_ranks} ranks")
    share = num_experts // num_ranks
    first = mesh.get_local_rank() * share
    for name in MATRICES:
        whole = getattr(experts, name)
        local = whole.detach()[first : first + share].clone()
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, torch.nn.Parameter(sharded, requires_grad=whole.requires_grad))
    experts.parallel_forward = ExpertDispatch(mesh.get_group())


def _here(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
