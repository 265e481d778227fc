"""Pipeline stages: which modules a stage keeps, what it hands on, and when it does what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.parallel.stages import stage_layers

# What a stream may be made of, by the number that its header has for it.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Turn(NamedTuple):
    """One thing that a stage does: the forward or the backward pass of a micro-batch."""

    is_forward: bool
    micro_batch: int


def one_forward_one_backward(num_stages: int, stage: int, num_micro_batches: int) -> Iterator[Turn]:
    """The turns of a stage: as many forward passes as stages follow, then one backward pass after each forward pass.

    A stage never keeps more micro-batches than there are stages from it to the last. One stage alone goes forward and
    backward by turns.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (arXiv 2104.04473), 2.2.
    """
    ahead = min(num_stages - stage - 1, num_micro_batches)
    yield from (Turn(True, number) for number in range(ahead))
    for number in range(num_micro_batches):
        if number + ahead < num_micro_batches:
            yield Turn(True, number + ahead)
        yield Turn(False, number)


def keep_stage(network: KimiK3ForConditionalGeneration, stage: int, num_stages: int) -> None:
    """Drop every module that other stages hold, in place; what is left keeps its name.

    Embedding, vision tower and projector are the first stage's; the last mix, the norm and the head are the last's.

    Raises:
        ValueError: the blocks do not make so many stages.
    """
    layers = stage_layers(network.config.text, num_stages)[stage]
    text, decoder = network.language_model, network.language_model.model
    for name in [name for name in decoder.layers if int(name) not in layers]:
        del decoder.layers[name]
    network.is_first_stage, network.is_last_stage = stage == 0, stage == num_stages - 1
    if not network.is_first_stage:
        del decoder.embed_tokens
        if network.config.vision is not None:
            del network.vision_tower, network.mm_projector
    if not network.is_last_stage:
        del text.lm_head, decoder.norm
        if decoder.mixes_depth:
            del decoder.output_attn_res_norm, decoder.output_attn_res_proj


@dataclass
class StageLink:
    """Sends streams to the next stage and gradients to the one before, and receives theirs.

    A stream, the running sum and the finished blocks, travels as one tensor ``[1 + blocks, B, T, hidden]`` after a
    header with its dtype and shape, so that every micro-batch may have another. Streams and gradients have process
    groups of their own: in one, a stage that sends a stream would wait for one that sends a gradient.
    Nothing that is sent is waited for before ``finish``.
    """

    mesh: Mesh
    _in_flight: list[tuple[Tensor, dist.Work]] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.mesh.place("pp")

    def send_stream(self, stream: Tensor) -> None:
        """To the next stage."""
        header = torch.tensor([DTYPES.index(stream.dtype), *stream.shape], device=stream.device)
        for message in (header, stream):
            self._send(message, "pp", self.stage + 1)

    def receive_stream(self, device: torch.device) -> Tensor:
        """From the stage before: ``[1 + blocks, B, T, hidden]``."""
        header = torch.empty(5, dtype=torch.int64, device=device)
        dist.recv(header, group=self.mesh.group("pp"), group_src=self.stage - 1)
        dtype, *shape = header.tolist()
        stream = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        dist.recv(stream, group=self.mesh.group("pp"), group_src=self.stage - 1)
        return stream

    def send_gradient(self, gradient: Tensor) -> None:
        """Of the stream that was received, to the stage that sent it."""
        self._send(gradient, "pp_back", self.stage - 1)

    def receive_gradient(self, stream: Tensor) -> Tensor:
        """Of a stream that was sent."""
        gradient = torch.empty_like(stream)
        dist.recv(gradient, group=self.mesh.group("pp_back"), group_src=self.stage + 1)
        return gradient

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for _, work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _send(self, message: Tensor, axis: str, stage: int) -> None:
        kept = message.detach().contiguous()
        work = dist.isend(kept, group=self.mesh.group(axis), group_dst=stage)
        if work is not None:
            self._in_flight.append((kept, work))
