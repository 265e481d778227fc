"""What a training run is made of: a recipe's fields, their limits and their defaults. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3convert.errors import UsageError
from k3convert.layout import parse_layout
from k3convert.training.registered_ops import OPS_FIELDS, unregistered
from k3model.parallel.layout import Layout

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# YAML has lists and texts where Python has tuples and members of enumerations.
_FROM_YAML = Field(strict=False)


class Faults(ValueError):
    """Several things that are wrong with one field."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class Part(BaseModel):
    """A block of a recipe: unknown keys and values of another type are refused, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Generated(Part):
    """A checkpoint of random values in the released layout, for runs without one; see ``k3convert make-tiny``."""

    preset: str = "tiny"
    num_layers: Positive | None = None
    num_experts: Positive | None = None
    seed: int = 0


class Model(Part):
    """Which network is trained.

    Attributes:
        checkpoint: a folder, or the hub id of a snapshot in the local cache; None generates one.
        generate: what is generated where no checkpoint is given.
        num_layers: read the first layers only.
        activation_checkpointing: keep each layer's input alone, and recompute the rest in the backward pass.
    """

    checkpoint: str | None = None
    generate: Generated | None = None
    num_layers: Positive | None = None
    activation_checkpointing: bool = True


class Compute(StrEnum):
    """The dtype of the forward and the backward pass; what stays float32 does so under bf16."""

    FP32 = "fp32"
    BF16 = "bf16"


class SyntheticData(Part):
    """Rows that can be learned in seconds: walks on a small random graph of tokens.

    Attributes:
        num_tokens: how many ids of the vocabulary occur.
        num_successors: how many ids may follow an id; the loss cannot fall below its logarithm.
        seed: of the graph and the walks.
    """

    kind: Literal["synthetic"]
    num_tokens: Positive = 32
    num_successors: Positive = 2
    seed: int = 0


class TextData(Part):
    """JSON lines: HellaSwag records (``ctx``, ``endings``, ``label``) or ``{"text": ...}``.

    Attributes:
        path: the file.
        loss_on: ``all`` tokens, or those of the right ``ending`` alone.
        limit: use the first records only.
        seed: of the order.
    """

    kind: Literal["text"]
    path: str | None = None
    loss_on: Literal["all", "ending"] = "all"
    limit: Positive | None = None
    seed: int = 0


class ConversationData(Part):
    """JSON lines of ``{"messages": [...]}``, encoded as chats; images lie in a folder.

    Attributes:
        path: the file.
        images: the folder that image names are relative to; None: the file's own.
        thinking: whether assistant turns have a think channel.
        max_image_patches: larger images are scaled down to as many patches; None keeps the checkpoint's limit.
        limit: use the first conversations only.
        seed: of the order.
    """

    kind: Literal["conversations"]
    path: str | None = None
    images: str | None = None
    thinking: bool = False
    max_image_patches: Positive | None = None
    limit: Positive | None = None
    seed: int = 0


Data = Annotated[SyntheticData | TextData | ConversationData, Field(discriminator="kind")]


class Batch(Part):
    """How tokens are put into steps.

    Attributes:
        sequence_length: tokens of a row, images expanded.
        global_rows: rows of one optimizer step, over all ranks.
        micro_rows: rows that go through the network at once; the rest is accumulated.
        packing: several documents a row, which do not see each other; otherwise one document a row.
    """

    sequence_length: Positive = 64
    global_rows: Positive = 4
    micro_rows: Positive = 4
    packing: bool = True


class Optimizer(Part):
    """AdamW with float32 moments, linear warm-up, then a cosine.

    Attributes:
        warmup_steps: the rate rises over as many steps.
        final_rate: the rate at the last step, as a part of ``learning_rate``.
        weight_decay: of matrices; vectors have none.
        max_gradient_norm: all gradients are scaled so that their one norm is at most this.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    betas: Annotated[tuple[Fraction, Fraction], _FROM_YAML] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_rate: Fraction = 0.1


class FrozenPart(StrEnum):
    """Parts of the network that can be left as they are."""

    VISION = "vision"
    EXPERTS = "experts"


class RouterBias(StrEnum):
    """What becomes of the router's correction bias: nothing, or quantile balancing after every step."""

    FROZEN = "frozen"
    QUANTILE = "quantile"


class Training(Part):
    """What a step changes.

    Attributes:
        steps: optimizer steps of the whole run, over all resumptions.
        seed: of torch's generators.
        freeze: parts that are not trained.
        router_bias: see ``RouterBias``.
        fake_quantization: compute with expert weights rounded to MXFP4, with straight-through gradients.
    """

    steps: Positive = 40
    seed: int = 0
    freeze: Annotated[tuple[Annotated[FrozenPart, _FROM_YAML], ...], _FROM_YAML] = ()
    router_bias: Annotated[RouterBias, _FROM_YAML] = RouterBias.FROZEN
    fake_quantization: bool = False


class Saving(Part):
    """Checkpoints of the run.

    Attributes:
        every: steps between two; 0 saves none, and the verdict says that resuming was not tried.
        keep: how many complete ones stay; 0 keeps all.
        asynchronous: write while the next steps run.
    """

    every: Annotated[int, Field(ge=0)] = 20
    keep: Annotated[int, Field(ge=0)] = 2
    asynchronous: bool = True


class Expectations(Part):
    """What the verdict holds the run to.

    Attributes:
        fall: how much of the first loss is gone at the end, at least.
        first_loss: bounds of the first loss; None: within ``first_loss_band`` of a uniform guess's.
        first_loss_band: nats around the logarithm of the vocabulary's size.
        gradient_norm_ratio: the largest norm of the second half over the run's median, at most.
        activation_gib: memory beyond parameters, gradients and moments, at most; the plan is their sum.
        envelope: relative distance of the loss curves of ``--compare-impl`` at every step, at most.
    """

    fall: Fraction = 0.0
    first_loss: Annotated[tuple[float, float] | None, _FROM_YAML] = None
    first_loss_band: Annotated[float, Field(gt=0)] = 2.0
    gradient_norm_ratio: Annotated[float, Field(gt=1)] = 10.0
    activation_gib: Annotated[float, Field(gt=0)] = 4.0
    envelope: Annotated[float, Field(gt=0)] = 0.05


class Recipe(Part):
    """A whole training run.

    Attributes:
        device: ``cpu``, ``cuda`` or ``npu``.
        ops: implementation by config field; fields left out are eager.
        layout: degrees by axis, e.g. ``sp=2,ep=2,fsdp=2``; empty is one rank.
        step_timeout_s: a run whose ranks are silent for so long, times its steps, is ended.
    """

    description: str
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    model: Model = Model()
    ops: dict[str, str] = Field(default_factory=dict)
    compute: Annotated[Compute, _FROM_YAML] = Compute.BF16
    layout: str = ""
    data: Data
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    saving: Saving = Saving()
    expect: Expectations = Expectations()
    step_timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @field_validator("ops")
    @classmethod
    def _registered(cls, ops: dict[str, str]) -> dict[str, str]:
        faults = [f"no field {name}; there are: {', '.join(OPS_FIELDS)}" for name in ops if name not in OPS_FIELDS]
        faults += [fault for name, impl in ops.items() if name in OPS_FIELDS and (fault := unregistered(name, impl))]
        if faults:
            raise Faults(faults)
        return ops

    @field_validator("layout")
    @classmethod
    def _readable(cls, text: str) -> str:
        try:
            parse_layout(text)
        except UsageError as error:
            raise Faults((str(error), *error.offenders)) from error
        return text

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        batch, dp = self.batch, self.degrees.dp
        if batch.global_rows % (batch.micro_rows * dp):
            raise ValueError(
                f"batch.global_rows {batch.global_rows} is no multiple of batch.micro_rows {batch.micro_rows} "
                f"times the {dp} parts of the batch in layout {self.layout!r}"
            )
        return self

    @property
    def degrees(self) -> Layout:
        """The layout."""
        return parse_layout(self.layout)

    @property
    def accumulated(self) -> int:
        """How many micro-batches a rank accumulates in a step."""
        return self.batch.global_rows // (self.batch.micro_rows * self.degrees.dp)

    def data_path(self) -> Path:
        """The file of the data.

        Raises:
            UsageError: the data are synthetic, or no file is named.
        """
        if isinstance(self.data, SyntheticData) or self.data.path is None:
            raise UsageError(
                f"data of kind {self.data.kind} needs a file", hint="name it with --set data.path=FILE.jsonl"
            )
        return Path(self.data.path)
