"""What the ranks of the tests of steps, states and stages do. Loaded by path in every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.global_loss import mean_loss
from k3model.parallel.gradients import gradient_norm
from k3model.parallel.layout import Layout
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import parallelize
from k3model.parallel.step import Batch, StepResult, forward_backward


def _load_jobs() -> Any:
    spec = spec_from_file_location("jobs", Path(__file__).with_name("jobs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_network = _load_jobs().build_network

Rows = Mapping[str, Tensor]


@cache
def mesh_of(layout: Layout) -> Mesh:
    return Mesh.build(layout, "cpu")


def laid_out(
    layout: Layout, dtype: torch.dtype, model: Mapping[str, Any] | None = None
) -> tuple[KimiK3ForConditionalGeneration, Mesh]:
    network, mesh = build_network(dtype, **(model or {})), mesh_of(layout)
    parallelize(network, mesh)
    return network, mesh


def micro_batches(rows: Rows, mesh: Mesh, num_pieces: int) -> list[Batch]:
    """This rank's rows of a batch, in pieces."""
    dp, place = mesh.layout.dp, mesh.place("dp")
    mine = {name: value.chunk(dp)[place] if dp > 1 else value for name, value in rows.items()}
    return [
        Batch(**{name: value.chunk(num_pieces)[piece] if num_pieces > 1 else value for name, value in mine.items()})
        for piece in range(num_pieces)
    ]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def answer(network: KimiK3ForConditionalGeneration, mesh: Mesh, result: StepResult) -> dict[str, Any]:
    """Everything that a test compares; gradients and their global values on rank 0 alone."""
    norm = gradient_norm(network, mesh)
    gradients = {name: whole(p.grad) for name, p in network.named_parameters() if p.grad is not None}
    return {
        **vars(result),
        "norm": norm,
        "missing": [name for name, p in network.named_parameters() if p.grad is None],
        "gradients": gradients if dist.get_rank() == 0 else None,
    }


def step(
    layout: Layout,
    rows: Rows,
    *,
    num_pieces: int = 1,
    dtype: torch.dtype = torch.float64,
    model: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    network, mesh = laid_out(layout, dtype, model)
    result = forward_backward(network, mesh, micro_batches(rows, mesh, num_pieces), **options)
    return answer(network, mesh, result)


def plain_step(layout: Layout, rows: Rows) -> dict[str, Any]:
    """Without this package: the network's own loss."""
    network = build_network(torch.float64)
    out = network(**rows)
    out.loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "gradients": gradients}


def step_of_own_rows(
    layout: Layout, rows_of_dp: Sequence[Sequence[Rows]], model: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Every dp rank has micro-batches of its own."""
    network, mesh = laid_out(layout, torch.float64, model)
    batches = [Batch(**rows) for rows in rows_of_dp[mesh.place("dp")]]
    return answer(network, mesh, forward_backward(network, mesh, batches))


def second_step(layout: Layout, rows: Rows) -> None:
    network, mesh = laid_out(layout, torch.float64)
    for _ in range(2):
        forward_backward(network, mesh, micro_batches(rows, mesh, 1))


def loss_of_tokens(layout: Layout, losses_RT: Tensor, num_pieces: int) -> Tensor:
    """The mean of known token losses, of which this rank has its rows and its run of tokens."""
    mesh = mesh_of(layout)
    rows = losses_RT.chunk(layout.dp)[mesh.place("dp")]
    place = mesh.place("cp") * layout.sp + mesh.place("sp")
    mine = rows.chunk(layout.sequence_parts, dim=1)[place]
    return mean_loss(mine.chunk(num_pieces), torch.tensor(losses_RT.numel()), mesh)
