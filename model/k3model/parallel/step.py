"""One forward and backward pass of a global batch, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.global_loss import mean_loss
from k3model.parallel.gradients import sum_gradients
from k3model.parallel.mesh import Mesh


@dataclass(frozen=True)
class Batch:
    """One micro-batch: this ``dp`` rank's rows. All ranks of a row (cp, sp) and all stages (pp) hold the same.

    Attributes:
        input_ids: int64 ``[B, T]``.
        labels: int64 ``[B, T]``, unshifted; None counts nothing.
        attention_mask: ``[B, T]``, 0 for padding.
        cu_seqlens: ``[N + 1]``, bounds of documents packed into one row.
        pixel_values: ``[patches, 3, patch, patch]``; comes with ``grid_thws``.
        grid_thws: int64 ``[images, 3]``.
    """

    input_ids: Tensor
    labels: Tensor | None = None
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the network."""
        return dict(vars(self))


@dataclass(frozen=True)
class StepResult:
    """What a pass over a global batch computed. No tensor has a gradient.

    Attributes:
        loss: 0-d, the mean over all counted labels of the global batch, 0 where none is counted: the same bits on
            every rank, and under every layout whose forward pass has the same bits.
        num_labels: int64 0-d, how many labels the global batch counts.
        token_losses: a micro-batch each, of this rank's tokens ``[B, T / (cp * sp)]``, float32 (float64 in a float64
            network), 0 where not counted. Empty where this rank is not on the last stage.
        logits: a micro-batch each, of this rank's tokens; None where they were not asked for, or off the last stage.
    """

    loss: Tensor
    num_labels: Tensor
    token_losses: tuple[Tensor, ...]
    logits: tuple[Tensor | None, ...]


def forward_backward(
    network: KimiK3ForConditionalGeneration,
    mesh: Mesh,
    batches: Sequence[Batch],
    *,
    with_logits: bool = False,
    backward: bool = True,
) -> StepResult:
    """Run a global batch through a network in its layout. A collective: every rank calls it alike.

    Afterwards ``grad`` of every trained parameter is the gradient of the mean loss over all ranks and micro-batches,
    zeros where nothing reached it; a sharded parameter has its shard of that.

    Args:
        network: as ``parallelize`` left it.
        mesh: the layout's.
        batches: the micro-batches, as many on every rank. Shapes may differ between them.
        with_logits: keep the logits.
        backward: compute gradients too.

    Raises:
        ValueError: there are no micro-batches, or gradients of an earlier pass are still there; labels are missing in a
            pass that computes gradients.
    """
    if not batches:
        raise ValueError("a step needs at least one micro-batch")
    if backward:
        _check_ready(network, batches)
    counts = [_num_labels(network, batch) for batch in batches]
    num_labels = torch.stack(counts).sum()
    dist.all_reduce(num_labels, group=mesh.group("dp"))
    token_losses: list[Tensor] = []
    logits: list[Tensor | None] = []
    with torch.set_grad_enabled(backward):
        for batch in batches:
            output = network(**batch.inputs(), with_logits=with_logits)
            logits.append(None if output.logits is None else output.logits.detach())
            token_losses.append(output.token_losses)
            if backward:
                # Summed over ranks, not averaged: the count is that of all ranks.
                (output.loss_sum / num_labels.clamp(min=1)).backward()
    if backward:
        sum_gradients(network, mesh)
    loss = mean_loss(token_losses, num_labels, mesh)
    return StepResult(loss, num_labels, tuple(token_losses), tuple(logits))


def _check_ready(network: KimiK3ForConditionalGeneration, batches: Sequence[Batch]) -> None:
    if without := [str(number) for number, batch in enumerate(batches) if batch.labels is None]:
        raise ValueError(f"micro-batches without labels have no gradient: {', '.join(without)}")
    left = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
    if left:
        raise ValueError(
            f"{len(left)} parameters still have a gradient, which would be summed over the ranks again "
            f"({', '.join(left[:3])}): zero_grad(set_to_none=True) comes first"
        )


def _num_labels(network: KimiK3ForConditionalGeneration, batch: Batch) -> Tensor:
    """How many labels of whole rows are counted: int64 0-d."""
    shifted = network.arrange(**batch.inputs()).shifted_labels
    if shifted is None:
        return torch.zeros((), dtype=torch.int64, device=batch.input_ids.device)
    return (shifted != network.config.ignore_index).sum()
