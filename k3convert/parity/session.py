"""One session: every cell is run, compared with its references and, where it differs, followed to where that begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from k3convert.errors import K3Error, UsageError, WorkerDied
from k3convert.layout import check_layout, layout_problems
from k3convert.parity.cells import Cell, DataKind, Precision
from k3convert.parity.comparison import CellComparison, compare
from k3convert.parity.divergence import Divergence, find_divergence
from k3convert.parity.expectation import Expectation, expectation_of
from k3convert.parity.measure import Measure
from k3convert.parity.outcome import CellOutcome, Status, status_of
from k3convert.parity.pinned_shapes import ProductShape
from k3convert.parity.placement import uncalled
from k3convert.parity.records import Kind, Run
from k3convert.parity.run_pools import Finished, RunPools
from k3convert.parity.run_spec import Level, RunSpec
from k3kernels import OpsConfig, list_registered
from k3kernels.selection import FIELD_OPS
from k3model.config import KimiK3Config

# Of a step: the first run and one more with, hopefully, the same bits.
REPEATS = 2
# Optimizer steps at level "train", before the step that is compared.
TRAINED_STEPS = 3
# Recorded to be handed to other runs, not to be compared.
_INPUTS = frozenset({Kind.INPUT, Kind.INPUT_GRADIENT})
# These hold the mix over depth, and everything else within them.
_MIXERS = ("DecoderLayer", "TextDecoder")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What all cells of a session share.

    Attributes:
        checkpoint: folder of the weights.
        config: of the checkpoint, cut to the layers that are run.
        device_type: where cells run.
        rows: of the global batch.
        tokens: of a row.
        seed: of the batch.
        num_layers: only the first layers of the checkpoint, or all.
        level: how far errors travel.
        pins_shapes: shape-pinned mode, for references and candidates alike.
        deterministic: whether only deterministic algorithms are allowed.
        fault: a fault planted into every candidate.
        perturbs: whether every candidate's embeddings are moved by one unit in the last place.
        golden: dtype of the golden run.
        sample_above: see ``RunSpec``.
    """

    checkpoint: Path
    config: KimiK3Config
    device_type: str = "cpu"
    rows: int = 4
    tokens: int = 96
    seed: int = 0
    num_layers: int | None = None
    level: Level = Level.MODEL
    pins_shapes: bool = True
    deterministic: bool = False
    fault: str | None = None
    perturbs: bool = False
    golden: Precision = Precision.FP64
    sample_above: int | None = None


@dataclass
class ParitySession:
    """Runs cells and judges them. References are made once and kept.

    Args:
        options: what all cells share.
        pools: what runs them.
        on_cell: hears of every cell before it runs.
    """

    options: SessionOptions
    pools: RunPools
    on_cell: Callable[[Cell], None] = lambda cell: None
    _baselines: dict[tuple[Precision, DataKind], Finished] = field(default_factory=dict)
    _goldens: dict[DataKind, Finished] = field(default_factory=dict)
    _routed_goldens: dict[tuple[Precision, DataKind], Finished] = field(default_factory=dict)
    _unpinned: dict[ProductShape, bool] = field(default_factory=dict)
    _cut: dict[DataKind, frozenset[str]] = field(default_factory=dict)
    _known: dict[tuple[Precision, DataKind], dict[tuple[Kind, str], Measure]] = field(default_factory=dict)

    def run(self, cells: tuple[Cell, ...]) -> Iterator[CellOutcome]:
        """Judge cells one after another; cells of one world size together, so that few ranks are idle.

        Raises:
            RanksFailed, RanksSilent: a reference could not be run; without it nothing can be said.
        """
        for cell in sorted(cells, key=lambda cell: cell.layout.world_size):
            self.on_cell(cell)
            reason = self.why_not_here(cell)
            yield CellOutcome(cell, Status.NOT_RUN, reason) if reason else self.judge(cell, self.options.fault)

    def why_not_here(self, cell: Cell) -> str | None:
        """Why a cell cannot run on this machine, or None."""
        options = self.options
        if problems := layout_problems(cell.layout, options.config, batch=options.rows, sequence=options.tokens):
            return "; ".join(problem.reason for problem in problems)
        if problem := OpsConfig.of(cell.impls).problems(options.device_type):
            return "; ".join(problem)
        if cell.data is DataKind.IMAGE and options.config.vision is None:
            return "the network has no vision tower"
        launched = self.pools.launched
        if launched is not None and cell.layout.world_size not in (1, launched.world_size):
            return f"{cell.layout.world_size} ranks, and the launcher started {launched.world_size}"
        if options.device_type != "cpu" and launched is None:
            num_devices = torch.get_device_module(options.device_type).device_count()
            if cell.layout.world_size > num_devices:
                return f"{cell.layout.world_size} ranks need as many devices, there are {num_devices}"
        return None

    def check(self, cell: Cell) -> None:
        """Refuse a cell that was asked for by name and can mean nothing.

        Raises:
            IllegalLayout: the layout does not fit the network or the batch; with the nearest that does.
            UsageError: an implementation that nobody registered.
        """
        check_layout(cell.layout, self.options.config, batch=self.options.rows, sequence=self.options.tokens)
        for name, impl in cell.fused.items():
            known = known_impls(name)
            if impl not in known:
                raise UsageError(f"impl.{name}={impl}: there are {', '.join(known)}")

    def judge(self, cell: Cell, fault: str | None = None) -> CellOutcome:
        """Run a cell that can run here, with a fault planted into it or none, and compare it.

        Raises:
            RanksFailed, RanksSilent: a reference could not be run.
        """
        started = time.monotonic()
        baseline = self.baseline(cell)
        spec = self._candidate_spec(cell, fault)
        if self._cut:
            spec = self._cut_off(spec, baseline)
        try:
            candidate = self.pools.run(spec)
        except WorkerDied as error:
            return CellOutcome(cell, Status.DIED, str(error), error=error, elapsed_s=time.monotonic() - started)
        except K3Error as error:
            return CellOutcome(cell, Status.REFUSED, str(error), error=error, elapsed_s=time.monotonic() - started)
        try:
            return self._compare(cell, spec, baseline, candidate, started)
        finally:
            self.pools.forget(candidate)

    def _compare(
        self, cell: Cell, spec: RunSpec, baseline: Finished, candidate: Finished, started: float
    ) -> CellOutcome:
        expectation = self._expectation(cell, baseline)
        free = (self.golden(cell).run, baseline.run, candidate.run)
        judged, own = candidate, spec
        if not _route_alike(baseline.run, candidate.run):
            own = replace(spec, forces_routing=True, reference=str(baseline.run.folder), repeats=1)
            judged = self.pools.run(own)
        comparison = compare(
            cell, _view(self.routed_golden(cell), cell), _view(baseline, cell), _view(judged, cell), expectation,
            device=comparing_device(self.options.device_type), free_runs=free,
            known=self._known.setdefault((cell.dtype, cell.data), {}),
        )  # fmt: skip
        divergence = self._follow(cell, own, comparison)
        if judged is not candidate:
            self.pools.forget(judged)
        answer = candidate.answers[0]
        return CellOutcome(
            cell,
            status_of(comparison, candidate.unsteady),
            expectation.reason,
            comparison=comparison,
            divergence=divergence,
            unsteady=candidate.unsteady,
            elapsed_s=time.monotonic() - started,
            step_s=max(answer.step_s for answer in candidate.answers),
            baseline_step_s=baseline.answers[0].step_s,
            peak_bytes=max(answer.peak_bytes for answer in candidate.answers),
            flags=answer.flags,
        )

    def _follow(self, cell: Cell, spec: RunSpec, comparison: CellComparison) -> Divergence | None:
        first = comparison.first_outside
        if comparison.passed or first is None:
            return None
        return find_divergence(self.pools, self._baseline_spec(cell), spec, first)

    def run_forced(self, cell: Cell) -> Finished:
        """Run a cell that can run here, its tokens sent where the baseline sends them.

        Raises:
            RanksFailed, RanksSilent: ranks failed, or did not answer.
        """
        spec = self._candidate_spec(cell, self.options.fault)
        return self.pools.run(replace(spec, forces_routing=True, reference=str(self.baseline(cell).run.folder)))

    def baseline(self, cell: Cell) -> Finished:
        """The eager run of a cell's dtype and data on one rank."""
        key = (cell.dtype, cell.data)
        if key not in self._baselines:
            spec = self._baseline_spec(cell)
            if self.options.level in (Level.OP, Level.LAYER) and cell.data not in self._cut:
                whole = self.pools.run(replace(spec, repeats=1))
                self._cut[cell.data] = modules_of(whole.run, self.options.level)
                self.pools.forget(whole)
            self._baselines[key] = self.pools.run(replace(spec, inputs_of=self._cut.get(cell.data, frozenset())))
        return self._baselines[key]

    def golden(self, cell: Cell) -> Finished:
        """The golden run of a cell's data, with its own routing."""
        if cell.data not in self._goldens:
            self._goldens[cell.data] = self.pools.run(self._golden_spec(cell))
        return self._goldens[cell.data]

    def routed_golden(self, cell: Cell) -> Finished:
        """The golden run that sends tokens where the baseline of a cell's dtype sends them."""
        key = (cell.dtype, cell.data)
        if key not in self._routed_goldens:
            baseline, golden = self.baseline(cell), self.golden(cell)
            if not _route_alike(baseline.run, golden.run):
                spec = replace(self._golden_spec(cell), forces_routing=True, reference=str(baseline.run.folder))
                golden = self.pools.run(spec)
            self._routed_goldens[key] = golden
        return self._routed_goldens[key]

    def _cut_off(self, spec: RunSpec, baseline: Finished) -> RunSpec:
        """The run with the baseline's inputs, and gradients of outputs, at the modules where errors stop."""
        cut = self._cut.get(spec.cell.data, frozenset())
        return replace(spec, inputs_of=cut, substituted=cut, reference=str(baseline.run.folder))

    def _spec(self, cell: Cell) -> RunSpec:
        options = self.options
        return RunSpec(
            checkpoint=str(options.checkpoint),
            cell=cell,
            folder="",
            device_type=options.device_type,
            rows=options.rows,
            tokens=options.tokens,
            seed=options.seed,
            num_layers=options.num_layers,
            pins_shapes=options.pins_shapes,
            deterministic=options.deterministic,
            sample_above=options.sample_above,
            steps=TRAINED_STEPS if options.level is Level.TRAIN else 0,
        )

    def _baseline_spec(self, cell: Cell) -> RunSpec:
        return replace(self._spec(Cell(dtype=cell.dtype, data=cell.data)), repeats=REPEATS)

    def _golden_spec(self, cell: Cell) -> RunSpec:
        return self._spec(Cell(dtype=self.options.golden, data=cell.data))

    def _candidate_spec(self, cell: Cell, fault: str | None) -> RunSpec:
        return replace(self._spec(cell), repeats=REPEATS, fault=fault, perturbs=self.options.perturbs)

    def _expectation(self, cell: Cell, baseline: Finished) -> Expectation:
        """What must be bitwise, once the products in use have been probed."""
        new = baseline.products - self._unpinned.keys()
        if new:
            unpinned = set(self.pools.probe(frozenset(new)))
            self._unpinned |= {product: product in unpinned for product in new}
        found = [product for product in baseline.products if self._unpinned[product]]
        return expectation_of(cell, pins_shapes=self.options.pins_shapes, unpinned=found)


def comparing_device(device_type: str) -> str:
    """Where runs of a device are compared: there, unless it may lack float64."""
    return device_type if device_type == "cuda" else "cpu"


def _view(finished: Finished, cell: Cell) -> Run:
    """A run as it is compared: without inputs, and without what the cell's layout has no counterpart of."""
    return Run(finished.run.folder, uncalled(cell.layout), _INPUTS)


def _route_alike(a: Run, b: Run) -> bool:
    """Whether both runs chose the same experts, in the same order: weights are summed in it."""
    return all(torch.equal(a.tensor(*entry.key), b.tensor(*entry.key)) for entry in a.of_kind(Kind.ROUTED_EXPERTS))


def known_impls(name: str) -> list[str]:
    """Implementations of an op, by its config field without ``_implementation``."""
    op, variant = FIELD_OPS[f"{name}_implementation"]
    return sorted({impl for _, other, impl in list_registered(op) if other == variant})


def modules_of(run: Run, level: Level) -> frozenset[str]:
    """The modules at which errors stop: every decoder layer, and at level ``op`` every holder of an op within them."""
    outputs = list(run.of_kind(Kind.OUTPUT))
    layers = frozenset(entry.name for entry in outputs if entry.module_type == "DecoderLayer")
    if level is Level.LAYER:
        return layers
    holders = {entry.name for entry in outputs if entry.impl and entry.module_type not in _MIXERS}
    return layers | frozenset(
        name for name in holders if not any(name.startswith(f"{other}.") for other in holders if other != name)
    )
