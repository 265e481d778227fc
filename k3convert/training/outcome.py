"""What a run leaves beside its steps. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpTrace:
    """What one implementation did in a step.

    Attributes:
        name: ``op/variant/impl``.
        num_calls: of forward passes, recomputed ones too.
        kernels: names of device kernels in its ranges; on the CPU, of torch's ops.
    """

    name: str
    num_calls: int
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The ops of a profiled step, and what is wrong with them."""

    step: int
    ops: tuple[OpTrace, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeCheck:
    """The step after the last, done by the run that was there and by one that read the last step's checkpoint.

    Attributes:
        losses: of both.
        is_bitwise: whether losses, parameters, buffers and moments have the same bits on every rank.
    """

    step: int
    losses: tuple[float, float]
    is_bitwise: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run's first rank knows at the end; steps are in ``metrics.jsonl``.

    Attributes:
        resumed_from: the step that the run went on from, 0 for a new one.
        vocab_size: of the network.
        num_parameters: of the network, and how many of them are trained.
        planned_bytes: parameters, gradients and moments of the rank that has most of them.
        resume_check: None where nothing was saved or the run was not finite.
        kernels: of the profiled step, where one was asked for.
        routes: tokens an expert got in the last step, a layer a row, and the numbers of these layers.
    """

    resumed_from: int
    vocab_size: int
    num_parameters: tuple[int, int]
    planned_bytes: int
    resume_check: ResumeCheck | None
    kernels: KernelReport | None
    routes: tuple[tuple[int, ...], ...]
    routed_layers: tuple[int, ...]
