"""What a run is asked to do, and what its ranks say of it: plain data that travels to the ranks and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from k3convert.parity.cells import Cell
from k3convert.parity.pinned_shapes import ProductShape


class Level(StrEnum):
    """How far an error may travel before it is compared: a module, a layer, the whole network, or several updates."""

    OP = "op"
    LAYER = "layer"
    MODEL = "model"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of one cell.

    Attributes:
        checkpoint: folder of the weights.
        cell: how the network runs.
        folder: where the ranks save their records.
        device_type: ``cpu``, ``cuda`` or ``npu``.
        rows: of the global batch.
        tokens: of a row, images expanded.
        seed: of the batch.
        num_layers: only the first layers of the checkpoint, or all.
        pins_shapes: whether matrix products are padded; see ``pinned_shapes``.
        repeats: how often the step is run; all must have the same bits.
        steps: optimizer steps, at level ``train``; the records are those of the last.
        fault: a planted fault of the network; see ``faults``.
        perturbs: whether the embeddings are moved by one unit in the last place.
        inputs_of: modules whose inputs are recorded.
        reference: folder of the run whose tensors replace this one's.
        substituted: modules that get the reference's inputs.
        forces_routing: whether tokens go to the reference's experts.
        deterministic: whether torch may only use deterministic algorithms.
        sample_above: of a parameter's gradient with more elements than this, as many at even distances are recorded;
            None records all. On one rank only.
    """

    checkpoint: str
    cell: Cell
    folder: str
    device_type: str = "cpu"
    rows: int = 4
    tokens: int = 96
    seed: int = 0
    num_layers: int | None = None
    pins_shapes: bool = True
    repeats: int = 1
    steps: int = 0
    fault: str | None = None
    perturbs: bool = False
    inputs_of: frozenset[str] = frozenset()
    reference: str | None = None
    substituted: frozenset[str] = frozenset()
    forces_routing: bool = False
    deterministic: bool = False
    sample_above: int | None = None


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a rank says of its run.

    Attributes:
        load_s: seconds until the network was in its layout.
        step_s: seconds of the first forward and backward pass.
        peak_bytes: of this process or its device while the step ran.
        unplaced: modules whose tensors could not be recorded.
        unsteady: tensors that had other bits when the step was repeated.
        products: matrix products that were padded.
        losses: of every optimizer step, at level ``train``.
        flags: what was in effect.
    """

    load_s: float
    step_s: float
    peak_bytes: int
    unplaced: tuple[str, ...]
    unsteady: tuple[str, ...]
    products: frozenset[ProductShape]
    losses: tuple[float, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
