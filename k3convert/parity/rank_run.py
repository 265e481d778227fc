"""What one rank does for a run: build, lay out, step, record."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3convert.loading import load_model
from k3convert.parity.cells import Cell, DataKind, Precision
from k3convert.parity.faults import plant
from k3convert.parity.inputs import make_batch, rows_of_rank
from k3convert.parity.peak_memory import PeakMemory
from k3convert.parity.pinned_shapes import PinnedShapes, ProductShape, find_unpinned
from k3convert.parity.placement import RankShare
from k3convert.parity.recording import Recorder, Wishes
from k3convert.parity.records import Kind, Run
from k3convert.parity.run_spec import RankAnswer, RunSpec
from k3kernels.first_config import untuned_kernels
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.gradients import clip_gradients, gradient_norm
from k3model.parallel.layout import Layout
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import parallelize
from k3model.parallel.sequence import HEAD_SHARD_VARIABLE
from k3model.parallel.step import Batch, StepResult, forward_backward

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP64: torch.float64}
# Of the optimizer at level "train": large enough to move every weight in its own dtype.
LEARNING_RATE = 1e-3
REPORTED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MAX_NCHANNELS",
    "HCCL_DETERMINISTIC",
    "TRITON_F32_DEFAULT",
)
MAX_NORM = 1.0


def run_cell(spec: RunSpec) -> RankAnswer:
    """Run one cell on this rank, and save what it recorded."""
    started = time.monotonic()
    set_flags(spec.deterministic)
    device = torch.device(spec.device_type)
    _free_memory(device)
    network = build_network(spec.checkpoint, spec.cell, device, spec.num_layers)
    mesh = mesh_of(spec.cell.layout, spec.device_type)
    # Tuning takes minutes and changes no kernel's arithmetic beyond what its configurations may.
    with untuned_kernels(), plant(spec.fault, network, mesh), _head_shard(spec.cell.shards_heads):
        parallelize(network, mesh)
        if spec.perturbs:
            network.language_model.model.embed_tokens.register_forward_hook(_next_floats)
        return _run(spec, network, mesh, device, started)


def _run(
    spec: RunSpec, network: KimiK3ForConditionalGeneration, mesh: Mesh, device: torch.device, started: float
) -> RankAnswer:
    layout, config = spec.cell.layout, network.config
    shape, micro_batches = make_batch(spec.cell.data, config, rows=spec.rows, tokens=spec.tokens, seed=spec.seed)
    own = rows_of_rank(micro_batches, layout.dp, mesh.place("dp"))
    batches = [_on_device(micro.batch, device) for micro in own]
    kda = config.text.kda
    shares = tuple(
        RankShare(
            layout, shape, micro.first_row, micro.num_rows, mesh.place("cp"), mesh.place("sp"),
            kda.width if kda is not None else 0, kda.num_heads if kda is not None else 0,
        )
        for micro in own
    )  # fmt: skip
    wishes = Wishes(
        inputs_of=spec.inputs_of,
        reference=None if spec.reference is None else Run(Path(spec.reference)),
        substituted=spec.substituted,
        forces_routing=spec.forces_routing,
    )
    is_padded = spec.cell.data is DataKind.PADDED
    pinned = PinnedShapes() if spec.pins_shapes else None
    loaded = time.monotonic()
    losses = _train(spec, network, mesh, batches, pinned)
    first: Recorder | None = None
    unsteady: set[str] = set()
    step_s, peak_bytes = 0.0, 0
    for _ in range(spec.repeats):
        network.zero_grad(set_to_none=True)
        recorder = Recorder(network, shares, (mesh.place("pp"), layout.pp), wishes, is_padded)
        recorder.attach()
        stepped = time.monotonic()
        with pinned or nullcontext(), PeakMemory(device) as memory:
            result = forward_backward(network, mesh, batches, with_logits=True)
        _record_results(recorder, result, shares)
        recorder.add(Kind.GRADIENT_NORM, gradient_norm(network, mesh))
        recorder.detach()
        recorder.add_parameter_gradients(spec.sample_above)
        if first is None:
            first, step_s, peak_bytes = recorder, time.monotonic() - stepped, memory.peak_bytes
        else:
            unsteady |= first.records.differing(recorder.records)
    if first is None:
        raise ValueError("a run has at least one step")
    first.records.save(Path(spec.folder), dist.get_rank())
    return RankAnswer(
        load_s=loaded - started,
        step_s=step_s,
        peak_bytes=peak_bytes,
        unplaced=tuple(sorted(first.unplaced)),
        unsteady=tuple(sorted(unsteady)),
        products=frozenset(pinned.shapes) if pinned is not None else frozenset(),
        losses=losses,
        flags=effective_flags(),
    )


def _train(
    spec: RunSpec,
    network: KimiK3ForConditionalGeneration,
    mesh: Mesh,
    batches: list[Batch],
    pinned: PinnedShapes | None,
) -> tuple[float, ...]:
    """The losses of some AdamW steps on the same batch."""
    if not spec.steps:
        return ()
    # One parameter at a time: some are DTensors of different meshes.
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, foreach=False)
    losses = []
    for _ in range(spec.steps):
        network.zero_grad(set_to_none=True)
        with pinned or nullcontext():
            losses.append(float(forward_backward(network, mesh, batches).loss))
        clip_gradients(network, mesh, MAX_NORM)
        optimizer.step()
    return tuple(losses)


def _free_memory(device: torch.device) -> None:
    """Let the network of the cell before go: hooks and what they hold make circles, which wait for the collector."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device.type).empty_cache()


def build_network(
    checkpoint: str, cell: Cell, device: torch.device, num_layers: int | None
) -> KimiK3ForConditionalGeneration:
    """The network of a cell, with the checkpoint's weights whole on this rank."""
    weights = _weights(checkpoint, num_layers)
    network = KimiK3ForConditionalGeneration.empty(
        weights.config, dtype=DTYPES[cell.dtype], device=device, ops=cell.impls
    )
    if cell.dtype is Precision.FP64:
        _widen(network)
    with torch.no_grad():
        stored = weights.state_dict()
        for name, tensor in network.state_dict().items():
            tensor.copy_(stored[name])
    network.set_activation_checkpointing(cell.recomputes)
    return network.train()


@cache
def _weights(checkpoint: str, num_layers: int | None) -> KimiK3ForConditionalGeneration:
    """In the checkpoint's dtype, kept for the next cells of this process."""
    return load_model(checkpoint, num_layers=num_layers)


@cache
def mesh_of(layout: Layout, device_type: str) -> Mesh:
    """The groups of a layout; made once, since every one of them costs a connection."""
    return Mesh.build(layout, device_type)


def probe(shapes: frozenset[ProductShape], device_type: str) -> tuple[ProductShape, ...]:
    """The products that padding does not pin on this rank's device."""
    set_flags(deterministic=False)
    return find_unpinned(shapes, device_type)


def set_flags(deterministic: bool) -> None:
    """Arithmetic without reduced-precision shortcuts, and deterministic algorithms where they are asked for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(deterministic)


def effective_flags() -> dict[str, str]:
    """What is in effect in this process, read back rather than assumed."""
    flags = {
        "threads": str(torch.get_num_threads()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }
    if torch.cuda.is_available():
        flags |= {
            "tf32": str(torch.backends.cuda.matmul.allow_tf32).lower(),
            "bf16_reduced_precision_reduction": str(
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
            ).lower(),
        }
    return flags | {name: os.environ[name] for name in REPORTED_VARIABLES if name in os.environ}


def _record_results(recorder: Recorder, result: StepResult, shares: tuple[RankShare, ...]) -> None:
    recorder.add(Kind.LOSS, result.loss)
    for share, token_loss in zip(shares, result.token_losses, strict=False):
        if place := share.place(nn.Identity(), token_loss, is_vision=False):
            recorder.add(Kind.TOKEN_LOSS, token_loss, place)


def _on_device(batch: Batch, device: torch.device) -> Batch:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(batch).items()}
    return Batch(**moved)


def _widen(network: nn.Module) -> None:
    """What stays float32 as float64: nothing of the golden run is rounded to float32."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype == torch.float32:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=torch.float64)))


def _next_floats(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Every element moved by one unit in the last place, away from zero and towards it in turn."""
    away = torch.arange(output.numel(), device=output.device).view_as(output) % 2 == 0
    limit = torch.full_like(output, torch.inf)
    return torch.where(away, torch.nextafter(output, limit), torch.nextafter(output, -limit))


@contextmanager
def _head_shard(enabled: bool) -> Iterator[None]:
    before = os.environ.get(HEAD_SHARD_VARIABLE)
    os.environ[HEAD_SHARD_VARIABLE] = "1" if enabled else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HEAD_SHARD_VARIABLE]
        else:
            os.environ[HEAD_SHARD_VARIABLE] = before
