"""What the ranks of the tests of steps, states and stages do. Loaded by path in every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.global_loss import mean_loss
from k3model.parallel.gradients import gradient_norm
from k3model.parallel.layout import Layout
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import materialise, parallelize
from k3model.parallel.state import optimizer_state, sharded_state
from k3model.parallel.step import Batch, StepResult, forward_backward
from k3model.presets import tiny_config_dict


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
    layout: Layout,
    dtype: torch.dtype,
    model: Mapping[str, Any] | None = None,
    frozen_but: str = "",
    compute_dtype: torch.dtype | None = None,
) -> tuple[KimiK3ForConditionalGeneration, Mesh]:
    network, mesh = build_network(dtype, **(model or {})), mesh_of(layout)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(frozen_but in name)
    parallelize(network, mesh, compute_dtype=compute_dtype)
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
    """Everything that a test compares; gradients with their global values from one rank a stage."""
    norm = gradient_norm(network, mesh)
    gradients = {name: whole(p.grad) for name, p in network.named_parameters() if p.grad is not None}
    return {
        **vars(result),
        "norm": norm,
        "dtypes": {p.dtype for p in network.parameters()}
        | {p.grad.dtype for p in network.parameters() if p.grad is not None},
        "missing": [name for name, p in network.named_parameters() if p.grad is None and p.requires_grad],
        "gradients": gradients if mesh.place("data") == 0 else {},
    }


def step(
    layout: Layout,
    rows: Rows,
    *,
    num_pieces: int = 1,
    dtype: torch.dtype = torch.float64,
    model: Mapping[str, Any] | None = None,
    checkpointing: bool = False,
    frozen_but: str = "",
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One step; parameters are trained where their names contain ``frozen_but``."""
    network, mesh = laid_out(layout, dtype, model, frozen_but, compute_dtype)
    network.set_activation_checkpointing(checkpointing)
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
    """The mean of known token losses, of which this rank has every other row (or all) and its run of tokens."""
    mesh = mesh_of(layout)
    rows = losses_RT[mesh.place("dp") :: layout.dp]
    place = mesh.place("cp") * layout.sp + mesh.place("sp")
    mine = rows.chunk(layout.sequence_parts, dim=1)[place]
    return mean_loss(mine.chunk(num_pieces), torch.tensor(losses_RT.numel()), mesh)


def trained(
    layout: Layout, rows: Rows, model: Mapping[str, Any] | None
) -> tuple[KimiK3ForConditionalGeneration, torch.optim.Optimizer, Mesh]:
    """A network and its optimizer after one step."""
    network, mesh = laid_out(layout, torch.float64, model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=False)
    forward_backward(network, mesh, micro_batches(rows, mesh, 1))
    optimizer.step()
    return network, optimizer, mesh


def digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Of whole tensors; every rank with a part of one takes part."""
    return {name: sha256(whole(state[name]).detach().numpy().tobytes()).hexdigest() for name in sorted(state)}


def next_loss(network: KimiK3ForConditionalGeneration, mesh: Mesh, rows: Rows) -> Tensor:
    return forward_backward(network, mesh, micro_batches(rows, mesh, 1), backward=False).loss


def save(layout: Layout, rows: Rows, folder: Path, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    network, optimizer, mesh = trained(layout, rows, model)
    state = sharded_state(network, mesh), optimizer_state(network, optimizer, mesh)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    return {"model": digests(state[0]), "optimizer": digests(state[1]), "loss": next_loss(network, mesh, rows)}


def load(layout: Layout, rows: Rows, folder: Path, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Into a network of NaN with a new optimizer."""
    network = build_network(torch.float64, **(model or {}))
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data.fill_(torch.nan)
    mesh = mesh_of(layout)
    parallelize(network, mesh)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=False)
    state = {"model": sharded_state(network, mesh), "optimizer": optimizer_state(network, optimizer, mesh)}
    dcp.load(state, checkpoint_id=folder)
    found = {name: digests(part) for name, part in state.items()}
    return {**found, "loss": next_loss(network, mesh, rows)}


def uneven_rows(layout: Layout, num_rows: int, folder: Path, saves: bool) -> dict[str, str]:
    """A matrix of few rows under FSDP, and its moments: made and saved, or loaded into NaN."""
    mesh = mesh_of(layout)
    module = torch.nn.Linear(3, num_rows, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(module.weight, torch.nan)
    if saves:
        module.weight.data.copy_(torch.arange(num_rows * 3).view(num_rows, 3))
    fully_shard(module, mesh=mesh.data)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if saves:
        (module(torch.arange(3.0, dtype=torch.float64)) ** 2).sum().backward()
        optimizer.step()
    moments = optimizer_state(module, optimizer, mesh)
    state = {"model": dict(module.state_dict()), "optimizer": moments}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
    return digests(state["model"]) | digests(state["optimizer"])


def begin_optimizer(layout: Layout) -> dict[str, Any]:
    """What a new optimizer's state does to the network and to a step that one of two parameters has made."""
    network, mesh = laid_out(layout, torch.float32, {"num_layers": 1})
    before = digests(sharded_state(network, mesh))
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
    parameters[0].grad = torch.ones_like(parameters[0])
    stepped = {name: value for name, value in network.named_parameters() if value is parameters[0]}
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    state = optimizer_state(network, optimizer, mesh)
    return {
        "unchanged": digests(sharded_state(network, mesh)) == before,
        "steps": {name: int(value) for name, value in state.items() if name.endswith(".step") and value != 0},
        "stepped": list(stepped),
        "gradients": [name for name, p in network.named_parameters() if p.grad is not None],
        "lr": optimizer.param_groups[0]["lr"],
    }


def doubly_cut(layout: Layout) -> None:
    """Experts cut along dim 0 by both axes, as a plan without a second dim would."""
    network, mesh = laid_out(layout, torch.float32, {"num_layers": 2})
    experts = network.language_model.model.layers["1"].feed_forward.experts
    local = experts.w1.to_local()
    wrong = DTensor.from_local(local, mesh.expert["ep_fsdp", "ep"], [Shard(0), Shard(0)])
    experts.w1 = torch.nn.Parameter(wrong)
    sharded_state(network, mesh)


def foreign_optimizer(layout: Layout) -> None:
    network, mesh = laid_out(layout, torch.float32, {"num_layers": 1})
    other = torch.nn.Linear(2, 2)
    optimizer_state(network, torch.optim.AdamW(other.parameters()), mesh)


def names_of_stage(layout: Layout, model: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what a stage holds of a network that every rank has initialised alike."""
    network, mesh = laid_out(layout, torch.float32, model)
    return digests(sharded_state(network, mesh))


def other_batch_on_the_last_stage(layout: Layout, rows: Rows, model: Mapping[str, Any]) -> None:
    network, mesh = laid_out(layout, torch.float32, model)
    mine = {name: value[:, : value.shape[1] - mesh.place("pp")] for name, value in rows.items()}
    forward_backward(network, mesh, [Batch(**mine)], backward=False)


def config_of(*, num_layers: int, tied: bool = False, fields: Mapping[str, Any] | None = None) -> KimiK3Config:
    raw = tiny_config_dict()
    raw["text_config"] |= {**(fields or {}), "tie_word_embeddings": tied}
    raw |= {"tie_word_embeddings": tied, "vision_config": None}
    return KimiK3Config.from_dict(raw).with_num_layers(num_layers)


def bf16_logits(layout: Layout, rows: Rows, model: Mapping[str, Any]) -> Tensor:
    """Of a network that is stored in bfloat16."""
    with torch.no_grad():
        return build_network(torch.float32, **model).to(torch.bfloat16)(**rows).logits


def save_weights(layout: Layout, rows: Rows, folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    network, mesh = KimiK3ForConditionalGeneration.from_config(config_of(**model)), mesh_of(layout)
    parallelize(network, mesh)
    state = sharded_state(network, mesh)
    dcp.save({"model": state}, checkpoint_id=folder)
    return {"tensors": digests(state), "loss": next_loss(network, mesh, rows)}


def load_from_meta(
    layout: Layout, rows: Rows, folder: Path, model: Mapping[str, Any], compute_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """A network that no rank ever holds whole: what it is before and after a checkpoint is loaded."""
    with torch.device("meta"):
        network = KimiK3ForConditionalGeneration(config_of(**model))
    mesh = mesh_of(layout)
    parallelize(network, mesh, compute_dtype=compute_dtype)
    on_meta = all(tensor.is_meta for tensor in (*network.parameters(), *network.buffers()))
    materialise(network, "cpu")
    state = sharded_state(network, mesh)
    poisoned = all(whole(tensor).isnan().all() for tensor in state.values())
    dcp.load({"model": state}, checkpoint_id=folder)
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    return {
        "on_meta": on_meta,
        "poisoned": poisoned,
        "tensors": digests({name: tensors[name] for name in tensors}),
        "left": [name for name, tensor in tensors.items() if whole(tensor).isnan().any()],
        "loss": next_loss(network, mesh, rows),
        "is_tied": network.is_last_stage
        and network.is_first_stage
        and network.language_model.lm_head.weight is network.language_model.model.embed_tokens.weight,
    }


def refused_layout(layout: Layout, asked: Layout, model: Mapping[str, Any]) -> dict[str, Any]:
    """What ``parallelize`` says to a layout whose ranks are not there; only the layout is read before it refuses."""
    network = KimiK3ForConditionalGeneration(config_of(**model))
    before = [(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()]
    mesh = replace(mesh_of(layout), layout=asked)
    try:
        parallelize(network, mesh)
    except ValueError as error:
        reasons = str(error).partition(": ")[2].split("; ")
    after = [(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()]
    return {"reasons": reasons, "unchanged": after == before}


def moments_of_masters(layout: Layout, rows: Rows, model: Mapping[str, Any]) -> dict[str, tuple[str, torch.dtype]]:
    """What an optimizer of float32 masters remembers beside its counters: kind of tensor and dtype by name."""
    network, mesh = laid_out(layout, torch.float32, model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
    forward_backward(network, mesh, micro_batches(rows, mesh, 1))
    optimizer.step()
    state = optimizer_state(network, optimizer, mesh)
    return {name: (type(value).__name__, value.dtype) for name, value in state.items() if not name.endswith(".step")}
