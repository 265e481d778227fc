"""What ranks do in these tests. Loaded by path in every worker of a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from k3convert.loading import load_model
from k3convert.loading.checked_source import open_checked
from k3convert.training.checkpoints import saving
from k3convert.training.checkpoints.resuming import load_step
from k3convert.training.checkpoints.saving import Saver
from k3convert.training.checkpoints.state import run_state
from k3convert.training.checkpoints.step_folders import step_path
from k3convert.training.data.document import IGNORE_INDEX
from k3convert.training.data.open_source import open_source
from k3convert.training.events import Noted
from k3convert.training.recipe_reading import parse_recipe
from k3convert.training.run import train
from k3convert.training.state_digest import state_digest
from k3convert.training.trainer import Trainer
from k3model.parallel.layout import Layout
from k3model.parallel.mesh import Mesh
from k3model.parallel.state import sharded_state
from k3model.parallel.step import Batch, forward_backward


@cache
def mesh_of(layout: Layout) -> Mesh:
    return Mesh.build(layout, "cpu")


def trainer_of(recipe_yaml: str, checkpoint: str) -> Trainer:
    recipe = parse_recipe(recipe_yaml)
    checked = open_checked(Path(checkpoint))
    source = open_source(recipe, checked.config, Path(checkpoint))
    return Trainer.build(recipe, checked, source, mesh_of(recipe.degrees), torch.device("cpu"))


def run(recipe_yaml: str, checkpoint: str, out: str, *, resume: bool = False) -> dict[str, Any]:
    """A whole run; what it said, and its end."""
    said: list[str] = []
    Path(out).mkdir(exist_ok=True)
    outcome = train(
        parse_recipe(recipe_yaml),
        Path(checkpoint),
        Path(out),
        resume=resume,
        profile=False,
        tell=lambda event: said.append(event.text) if isinstance(event, Noted) else None,
    )
    return {"outcome": asdict(outcome), "said": said}


def run_and_die_in_a_save(recipe_yaml: str, checkpoint: str, out: str, *, step: int) -> None:
    """As ``run``, killed when its part of a step is written and no metadata is."""
    written = saving.save

    def save(state: dict[str, Any], *, checkpoint_id: Path, process_group: Any) -> None:
        if checkpoint_id.name == f"step-{step}.saving":
            (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        written(state, checkpoint_id=checkpoint_id, process_group=process_group)

    saving.save = save
    run(recipe_yaml, checkpoint, out)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def steps(recipe_yaml: str, checkpoint: str, num_steps: int) -> dict[str, Any]:
    """Metrics of steps, and the weights after them."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    metrics = [asdict(trainer.advance()) for _ in range(num_steps)]
    weights = {name: whole(tensor) for name, tensor in trainer.network.state_dict().items()}
    return {"metrics": metrics, "weights": weights, "layers": trainer.routers.layers}


def accumulated(checkpoint: str, recipe_yaml: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Loss and gradients of one batch of rows with unequal label counts, in micro-batches of these sizes."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 400, (sum(sizes), 16), generator=generator)
    labels = ids.clone()
    for row, num_ignored in enumerate((0, 15, 9, 3)):
        labels[row, :num_ignored] = IGNORE_INDEX
    batches = [Batch(i, v) for i, v in zip(ids.split(list(sizes)), labels.split(list(sizes)), strict=True)]
    result = forward_backward(trainer.network, trainer.mesh, batches)
    gradients = {name: whole(p.grad) for name, p in trainer.network.named_parameters() if p.grad is not None}
    return {"loss": float(result.loss), "num_labels": int(result.num_labels), "gradients": gradients}


class _Unlabelled:
    """A source whose documents count nothing."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def num_tokens(self, index: int) -> int:
        return int(self.source.num_tokens(index))

    def document(self, index: int) -> Any:
        document = self.source.document(index)
        return replace(document, labels=torch.full_like(document.labels, IGNORE_INDEX))


def unlabelled_step(recipe_yaml: str, checkpoint: str) -> dict[str, Any]:
    """A step of which nothing is counted, between two others."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    trainer.advance()
    before = state_digest(trainer.network, trainer.optimizer)
    source = trainer.stream._source
    trainer.stream._source = _Unlabelled(source)
    metrics = trainer.advance()
    after = state_digest(trainer.network, trainer.optimizer)
    trainer.stream._source = source
    following = trainer.advance()
    return {"metrics": asdict(metrics), "is_unchanged": before == after, "following": asdict(following)}


def poisoned_step(recipe_yaml: str, checkpoint: str, *, parameter: str | None = None) -> dict[str, Any]:
    """A step with an infinity in a parameter, or in the output of a layer's attention."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    digest = None
    if parameter is not None:
        with torch.no_grad():
            dict(trainer.network.named_parameters())[parameter].view(-1)[0] = torch.inf
    else:
        attention = trainer.network.language_model.model.layers["2"].self_attn
        attention.o_proj.register_forward_hook(lambda module, inputs, output: output * torch.inf)
        digest = state_digest(trainer.network, trainer.optimizer)
    metrics = trainer.advance()
    is_unchanged = digest == state_digest(trainer.network, trainer.optimizer)
    return {"metrics": asdict(metrics), "is_unchanged": is_unchanged}


def optimizer_layout(recipe_yaml: str, checkpoint: str) -> dict[str, Any]:
    """How moments lie beside their parameters, after a step."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    trainer.advance()
    wrong = []
    for name, parameter in trainer.network.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            tensor = trainer.optimizer.state.get(parameter, {}).get(moment)
            if tensor is None or tensor.dtype != torch.float32 or type(tensor) is not type(parameter.data):
                wrong.append(f"{name}.{moment}")
            elif isinstance(tensor, DTensor) and tensor.placements != parameter.placements:
                wrong.append(f"{name}.{moment}: {tensor.placements}")
    return {"wrong": wrong, "dtypes": {str(parameter.dtype) for parameter in trainer.network.parameters()}}


def read_against_load_model(recipe_yaml: str, checkpoint: str) -> list[str]:
    """Names of tensors that a laid-out network reads otherwise than a whole one."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    want = load_model(checkpoint, dtype=torch.float32).state_dict()
    found = {name: whole(tensor) for name, tensor in sharded_state(trainer.network, trainer.mesh).items()}
    return [name for name in want if name not in found or not torch.equal(found[name], want[name])]


def save_while_training(recipe_yaml: str, checkpoint: str, out: str) -> dict[str, Any]:
    """A step is saved in the background while the next ones run; what is then on disk."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    trainer.advance()
    digest = state_digest(trainer.network, trainer.optimizer)
    saver = Saver(Path(out), keep=0, asynchronous=True, facts={})
    saver.save(1, run_state(trainer.network, trainer.optimizer, trainer.mesh, trainer.progress))
    trainer.advance()
    saver.wait()
    changed = state_digest(trainer.network, trainer.optimizer) != digest
    load_step(step_path(Path(out), 1), trainer.network, trainer.optimizer, trainer.mesh)
    return {"changed": changed, "is_same": state_digest(trainer.network, trainer.optimizer) == digest}


def generators_come_back(recipe_yaml: str, checkpoint: str, out: str) -> bool:
    """Whether draws after resuming are those after saving."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    torch.rand(7)
    saver = Saver(Path(out), keep=0, asynchronous=False, facts={})
    saver.save(1, run_state(trainer.network, trainer.optimizer, trainer.mesh, trainer.progress))
    want = torch.rand(5)
    load_step(step_path(Path(out), 1), trainer.network, trainer.optimizer, trainer.mesh)
    return torch.equal(torch.rand(5), want)


def routes(recipe_yaml: str, checkpoint: str) -> dict[str, Any]:
    """Routes of a step whose rows are padded, and how many tokens of it are real. Every expert is chosen here."""
    trainer = trainer_of(recipe_yaml, checkpoint)
    trainer.stream._source = _Shortened(trainer.stream._source)
    trainer.stream._lengths = [trainer.stream._source.num_tokens(i) for i in range(len(trainer.stream._lengths))]
    position = trainer.stream.position
    pad_id = trainer.network.config.text.pad_token_id
    num_real = sum(int((batch.input_ids != pad_id).sum()) for batch in trainer.stream.step())
    trainer.stream.position = position
    trainer.advance()
    assert trainer.routes is not None
    return {"counts": trainer.routes.tolist(), "num_real": num_real}


class _Shortened(_Unlabelled):
    """A source whose documents leave a tail of their row empty."""

    def num_tokens(self, index: int) -> int:
        return 11

    def document(self, index: int) -> Any:
        document = self.source.document(index)
        return replace(document, input_ids=document.input_ids[:11], labels=document.labels[:11])


def balanced_steps(recipe_yaml: str, checkpoint: str) -> dict[str, Any]:
    """Weights after a step with quantile balancing and two of four experts chosen."""
    recipe = parse_recipe(recipe_yaml, ["training.router_bias=quantile"])
    checked = open_checked(Path(checkpoint))
    text = checked.config.text
    assert text.moe is not None
    few = replace(checked.config, text=replace(text, moe=replace(text.moe, num_experts_per_token=2)))
    checked = replace(checked, config=few)
    source = open_source(recipe, few, Path(checkpoint))
    trainer = Trainer.build(recipe, checked, source, mesh_of(recipe.degrees), torch.device("cpu"))
    trainer.advance()
    return {name: whole(tensor) for name, tensor in trainer.network.state_dict().items()}


def stored(recipe_yaml: str, checkpoint: str, *, folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a saved step, by name."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=folder)
    return state
