"""One forward and backward pass of a global batch, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.network import Arrangement, K3Output, KimiK3ForConditionalGeneration
from k3model.parallel.global_loss import mean_loss
from k3model.parallel.gradients import sum_gradients
from k3model.parallel.mesh import Mesh
from k3model.parallel.pipeline import StageLink, one_forward_one_backward


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
        ValueError: there are no micro-batches, ranks have unequally many, or stages have other ones; gradients of an
            earlier pass are still there; labels are missing in a pass that computes gradients.
    """
    if not batches:
        raise ValueError("a step needs at least one micro-batch")
    if backward:
        _check_ready(network, batches)
    arranged = [network.arrange(**batch.inputs()) for batch in batches]
    _check_same_batches(mesh, batches, arranged)
    num_labels = torch.stack([_num_labels(network, one, batches[0].input_ids.device) for one in arranged]).sum()
    dist.all_reduce(num_labels, group=mesh.group("dp"))
    tokens = [one.tokens // mesh.layout.sequence_parts for one in arranged]
    run = _Pass(network, StageLink(mesh), batches, tokens, num_labels, with_logits=with_logits, backward=backward)
    with torch.set_grad_enabled(backward):
        for turn in one_forward_one_backward(mesh.layout.pp, mesh.place("pp"), len(batches)):
            if turn.is_forward:
                run.forward(turn.micro_batch)
            elif backward:
                run.backward(turn.micro_batch)
    run.link.finish()
    if backward:
        sum_gradients(network, mesh)
    return StepResult(run.mean_loss(), num_labels, tuple(run.token_losses), tuple(run.logits))


class _Pass:
    """One rank's forward and backward passes of the micro-batches of a step."""

    def __init__(
        self,
        network: KimiK3ForConditionalGeneration,
        link: StageLink,
        batches: Sequence[Batch],
        tokens: Sequence[int],
        num_labels: Tensor,
        *,
        with_logits: bool,
        backward: bool,
    ) -> None:
        self.network, self.link, self.num_labels = network, link, num_labels
        self.batches, self.tokens = batches, tokens
        self.with_logits, self.has_backward = with_logits, backward
        self.token_losses: list[Tensor] = []
        self.logits: list[Tensor | None] = []
        self.loss_dtype = torch.float32
        # Of the micro-batches between their forward and their backward pass: what came in, what goes out.
        self._open: dict[int, tuple[Tensor | None, Tensor]] = {}

    def forward(self, number: int) -> None:
        """Of one micro-batch."""
        batch = self.batches[number]
        received = None
        if not self.network.is_first_stage:
            received = self.link.receive_stream(batch.input_ids.device).requires_grad_(self.has_backward)
        stream = () if received is None else received.unbind()
        output: K3Output = self.network(**batch.inputs(), with_logits=self.with_logits, stream=stream)
        self.logits.append(None if output.logits is None else output.logits.detach())
        if not self.network.is_last_stage:
            sent = torch.stack(output.stream)
            self.loss_dtype = torch.promote_types(torch.float32, sent.dtype)
            self.link.send_stream(sent)
            self._open[number] = (received, sent)
        elif output.token_losses is not None and output.loss_sum is not None:
            self.token_losses.append(output.token_losses)
            # Summed over ranks, not averaged: the count is that of all ranks.
            self._open[number] = (received, output.loss_sum / self.num_labels.clamp(min=1))
        else:
            losses = torch.zeros(batch.input_ids.shape[0], self.tokens[number], device=batch.input_ids.device)
            self.token_losses.append(losses)
        if not self.has_backward:
            self._open.clear()

    def backward(self, number: int) -> None:
        """Of the same micro-batch; nothing of it is kept."""
        received, result = self._open.pop(number)
        gradient = None if self.network.is_last_stage else self.link.receive_gradient(result)
        if result.requires_grad:
            torch.autograd.backward(result, gradient)
        if received is not None:
            self.link.send_gradient(torch.zeros_like(received) if received.grad is None else received.grad)

    def mean_loss(self) -> Tensor:
        """The loss of the global batch on every rank of every stage."""
        mesh = self.link.mesh
        if self.network.is_last_stage:
            loss = mean_loss(self.token_losses, self.num_labels, mesh)
        else:
            loss = torch.empty((), dtype=self.loss_dtype, device=self.num_labels.device)
        dist.broadcast(loss, group=mesh.group("pp"), group_src=mesh.layout.pp - 1)
        return loss


def _check_ready(network: KimiK3ForConditionalGeneration, batches: Sequence[Batch]) -> None:
    if without := [str(number) for number, batch in enumerate(batches) if batch.labels is None]:
        raise ValueError(f"micro-batches without labels have no gradient: {', '.join(without)}")
    left = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
    if left:
        raise ValueError(
            f"{len(left)} parameters still have a gradient, which would be summed over the ranks again "
            f"({', '.join(left[:3])}): zero_grad(set_to_none=True) comes first"
        )


def _check_same_batches(mesh: Mesh, batches: Sequence[Batch], arranged: Sequence[Arrangement]) -> None:
    """Refuse on all ranks what would leave some of them waiting for others."""
    device = batches[0].input_ids.device
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(mesh.layout.world_size)]
    dist.all_gather(counts, torch.tensor([len(batches)], device=device))
    numbers = torch.cat(counts).tolist()
    if len(set(numbers)) > 1:
        raise ValueError(f"ranks have {numbers} micro-batches: a step needs as many on every rank")
    if mesh.layout.pp == 1:
        return
    mine = torch.tensor(
        [(batch.input_ids.shape[0], one.tokens) for batch, one in zip(batches, arranged, strict=True)], device=device
    )
    of_stages = [torch.empty_like(mine) for _ in range(mesh.layout.pp)]
    dist.all_gather(of_stages, mine, group=mesh.group("pp"))
    if any(not torch.equal(shapes, of_stages[0]) for shapes in of_stages):
        raise ValueError(
            f"stages have micro-batches of {[shapes.tolist() for shapes in of_stages]} rows and tokens: "
            "every stage gets the same"
        )


def _num_labels(network: KimiK3ForConditionalGeneration, arranged: Arrangement, device: torch.device) -> Tensor:
    """How many labels of whole rows are counted: int64 0-d."""
    if arranged.shifted_labels is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (arranged.shifted_labels != network.config.ignore_index).sum()
