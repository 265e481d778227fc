"""The loss of a batch that several ranks share: one sum of tokens over one count, in one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.parallel.mesh import Mesh


def mean_loss(token_losses: Sequence[Tensor], num_labels: Tensor, mesh: Mesh) -> Tensor:
    """The mean loss of a global batch, with the same bits however its tokens lie on ranks and in micro-batches.

    Shards of a row are put together and the row is summed by itself; rows are summed in ascending order of their
    sums, so that it does not matter which rank or micro-batch had which. A collective over the ranks of a stage.

    Args:
        token_losses: a micro-batch each, this rank's ``[B, T / (cp * sp)]``, 0 where not counted.
        num_labels: int64 0-d, of the global batch.
        mesh: the layout's.

    Returns:
        0-d in the dtype of the losses; 0 where nothing is counted.
    """
    sums: list[Tensor] = []
    for shard in token_losses:
        rows = _gathered(_gathered(shard, mesh, "sp", dim=1), mesh, "cp", dim=1)
        sums += [row.sum() for row in rows]
    row_sums = torch.stack(sums)
    num_rows = [int(n) for n in _gathered(num_labels.new_tensor([len(row_sums)]), mesh, "dp", dim=0)]
    padded = row_sums.new_zeros(max(num_rows))
    padded[: len(row_sums)] = row_sums
    of_ranks = _gathered(padded, mesh, "dp", dim=0).chunk(len(num_rows))
    all_rows = torch.cat([rows[:count] for rows, count in zip(of_ranks, num_rows, strict=True)])
    return all_rows.sort().values.sum() / num_labels.clamp(min=1)


def _gathered(x: Tensor, mesh: Mesh, axis: str, *, dim: int) -> Tensor:
    """The shards of all ranks of an axis, in their order."""
    group = mesh.group(axis)
    if dist.get_world_size(group) == 1:
        return x
    mine = x.contiguous()
    shards = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, mine, group=group)
    return torch.cat(shards, dim=dim)
