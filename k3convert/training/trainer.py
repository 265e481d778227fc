"""The loop: one object that holds a run on this rank, and moves it on step by step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from k3convert.loading.checked_source import CheckedSource
from k3convert.training.checkpoints.resuming import load_step
from k3convert.training.checkpoints.state import Progress
from k3convert.training.data.document import Source
from k3convert.training.data.stream import Stream
from k3convert.training.memory import MemoryWatch, StateBytes
from k3convert.training.metrics import ExpertLoad, StepMetrics
from k3convert.training.network_building import build_network
from k3convert.training.nonfinite import find_nonfinite
from k3convert.training.optimizer import build_optimizer, set_learning_rate
from k3convert.training.parameter_groups import group_norms
from k3convert.training.recipe import Recipe, RouterBias
from k3convert.training.router_watch import RouterWatch
from k3convert.training.schedule import learning_rate
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.gradients import clip_gradients
from k3model.parallel.mesh import Mesh
from k3model.parallel.step import Batch, forward_backward


@dataclass
class Trainer:
    """A run on this rank.

    Attributes:
        routes: tokens that every expert got in the last step, int64 ``[layers, experts]``.
    """

    recipe: Recipe
    mesh: Mesh
    device: torch.device
    network: KimiK3ForConditionalGeneration
    optimizer: torch.optim.AdamW
    stream: Stream
    routers: RouterWatch
    memory: MemoryWatch
    progress: Progress
    state_bytes: StateBytes
    routes: Tensor | None = None

    @classmethod
    def build(
        cls, recipe: Recipe, checkpoint: CheckedSource, source: Source, mesh: Mesh, device: torch.device
    ) -> Trainer:
        """Load the checkpoint, lay it out, and stand before the first step. A collective."""
        memory = MemoryWatch(device.type)
        torch.manual_seed(recipe.training.seed)
        network = build_network(recipe, checkpoint, mesh, device)
        batch, pad_id = recipe.batch, network.config.text.pad_token_id
        stream = Stream(
            source,
            row_length=batch.sequence_length,
            global_rows=batch.global_rows,
            micro_rows=batch.micro_rows,
            packing=batch.packing,
            pad_id=0 if pad_id is None else pad_id,
            seed=recipe.data.seed,
            place=mesh.place("dp"),
            parts=mesh.layout.dp,
        )
        balances = recipe.training.router_bias is RouterBias.QUANTILE
        return cls(
            recipe,
            mesh,
            device,
            network,
            build_optimizer(network, recipe.optimizer, device.type),
            stream,
            RouterWatch(network, pad_id=pad_id, balances=balances),
            memory,
            Progress(),
            StateBytes.of(network),
        )

    def resume(self, folder: Path) -> None:
        """Go to where a saved step left. A collective."""
        self.progress = load_step(folder, self.network, self.optimizer, self.mesh)
        self.stream.position = self.progress.position

    def advance(self) -> StepMetrics:
        """Do the next step. A collective.

        A step that is not finite changes no parameter, nor does one without a counted label.
        """
        started = time.perf_counter()
        settings, step = self.recipe.optimizer, self.progress.step + 1
        batches = [_on_device(batch, self.device) for batch in self.stream.step()]
        num_tokens = self.recipe.batch.global_rows * self.recipe.batch.sequence_length
        result = forward_backward(self.network, self.mesh, batches)
        norms = group_norms(self.network, self.mesh)
        norm = float(clip_gradients(self.network, self.mesh, settings.max_gradient_norm))
        loss, num_labels = float(result.loss), int(result.num_labels)
        rate = learning_rate(settings, step, self.recipe.training.steps)
        self.routes = self.routers.take_counts()
        nonfinite = None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            nonfinite = find_nonfinite(self.network, self.mesh, batches)
            self.routers.discard()
        elif num_labels:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.routers.balance()
        else:
            self.routers.discard()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress = Progress(step, self.stream.position, self.progress.num_tokens + num_tokens)
        peaks = torch.tensor(self.memory.peaks(), device=self.device)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        allocated, reserved = peaks.tolist()
        return StepMetrics(
            step=step,
            loss=loss,
            num_labels=num_labels,
            num_tokens=num_tokens,
            learning_rate=rate,
            gradient_norm=norm,
            group_norms=norms,
            step_s=time.perf_counter() - started,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            expert_load=ExpertLoad.of(self.routes.tolist()),
            nonfinite=nonfinite,
        )


def _on_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    moved: dict[str, Tensor] = {name: value.to(device) for name, value in vars(batch).items() if value is not None}
    return replace(batch, **moved)
