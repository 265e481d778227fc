"""The report as a document with a versioned schema. Everything else that is shown is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from k3convert.errors import BadInput

SCHEMA_VERSION: Final = 1
SCHEMA_FILE = "parity-report.schema.json"
# A report of a full matrix has a few megabytes.
LARGEST_BYTES = 1 << 30
_NOT_FINITE = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}

Figure = Annotated[float, WithJsonSchema(_NOT_FINITE)]
"""A number; NaN and infinities, which JSON has no numbers for, are strings."""


class BadReport(BadInput):
    """A file is no report of this tool, or of another version of its schema."""

    code = "bad-report"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class LimitDocument(_Document):
    """A threshold that was applied, and where it comes from."""

    name: str
    value: Figure
    origin: str


class GateDocument(_Document):
    """A limit applied: the figure, its largest permitted value, and one over the other."""

    limit: str
    measured: Figure
    allowed: Figure
    headroom: Figure


class TensorName(_Document):
    """Which tensor: its kind, the FQN of its module or parameter, and what made it."""

    kind: str
    name: str
    layer: int | None
    module_type: str
    impl: str
    dtype: str
    shape: tuple[int, ...]


class ErrorsDocument(_Document):
    """Errors against the golden run."""

    rms: Figure
    max_abs: Figure
    max_rel: Figure
    mean: Figure
    mean_outward: Figure
    mean_spread: Figure
    outward_spread: Figure
    cosine: Figure
    norm_ratio: Figure


class DifferenceDocument(_Document):
    """Candidate beside baseline; ``ulp_counts`` is by the classes in the report's ``ulp_classes``."""

    num_different: int
    first: int | None
    at: int | None
    candidate_value: Figure
    baseline_value: Figure
    max_abs: Figure
    ulp_counts: tuple[int, ...]
    max_ulp: int
    num_sign_flips: int
    num_non_finite: int


class TensorDocument(_Document):
    """One compared tensor."""

    tensor: TensorName
    is_bitwise: bool
    is_required_bitwise: bool
    is_outside: bool
    headroom: Figure
    gates: tuple[GateDocument, ...]
    num_values: int
    num_judged: int
    golden_rms: Figure
    candidate: ErrorsDocument
    baseline: ErrorsDocument
    difference: DifferenceDocument
    candidate_digest: str
    baseline_digest: str
    place: str | None = Field(description="Where the largest difference is; null where nothing differs.")


class PoolDocument(_Document):
    """Tensors of one kind, judged together; errors are relative to each tensor's golden rms."""

    kind: str
    layer_kind: str
    path: str
    num_tensors: int
    num_values: int
    candidate_rms: Figure
    baseline_rms: Figure
    rms_ratio: Figure
    max_ratio: Figure
    candidate_bias: Figure
    baseline_bias: Figure
    headroom: Figure
    is_outside: bool
    gates: tuple[GateDocument, ...]


class ScalarDocument(_Document):
    """A number that a run has one of: the loss, or the norm of all gradients."""

    kind: str
    golden: Figure
    baseline: Figure
    candidate: Figure


class FlipDocument(_Document):
    """A token that goes to another set of experts."""

    row: int
    position: int
    margin: Figure
    left: tuple[int, ...]
    joined: tuple[int, ...]
    is_beyond: bool


class RoutingDocument(_Document):
    """One router."""

    name: str
    layer: int | None
    num_tokens: int
    num_flips: int
    num_following: int
    num_beyond: int
    noise_bound: Figure
    smallest_margin: Figure
    flips: tuple[FlipDocument, ...]


class PredictionsDocument(_Document):
    """A run's predictions beside the golden ones."""

    mean_kl: Figure
    p99_kl: Figure
    max_kl: Figure
    mean_reverse_kl: Figure
    p99_reverse_kl: Figure
    max_reverse_kl: Figure
    top_1: Figure
    top_5: Figure
    nll_delta: Figure | None


class LogitsDocument(_Document):
    """How alike the next tokens are predicted."""

    num_tokens: int
    candidate: PredictionsDocument
    baseline: PredictionsDocument
    gates: tuple[GateDocument, ...]


class FaultDocument(_Document):
    """A tensor that could not be compared as it should be."""

    kind: str
    name: str
    reason: str


class ComparisonDocument(_Document):
    """A cell beside its references.

    ``tensors`` holds the worst ones; ``digests`` has one digest over the digests of all tensors of a kind, in order.
    """

    verdict: str
    headroom: Figure
    num_tensors: int
    num_bitwise: int
    bitwise_kinds: tuple[str, ...]
    bitwise_reason: str
    first_outside: TensorName | None
    first_different: TensorName | None
    layer_headroom: dict[Literal["forward", "backward"], dict[str, Figure]]
    ulp_counts: dict[str, tuple[int, ...]]
    digests: dict[str, str]
    pools: tuple[PoolDocument, ...]
    tensors: tuple[TensorDocument, ...]
    routing: tuple[RoutingDocument, ...]
    logits: LogitsDocument | None
    scalars: tuple[ScalarDocument, ...]
    faults: tuple[FaultDocument, ...]
    notes: tuple[str, ...]


class IsolatedDocument(_Document):
    """A tensor of the first differing module, run again on the reference's inputs."""

    tensor: TensorName
    place: str
    candidate_value: Figure
    baseline_value: Figure
    ulps: int | None
    num_different: int
    num_values: int


class DivergenceDocument(_Document):
    """Where the difference begins."""

    first: TensorName
    module: str
    origin: str
    differences: tuple[IsolatedDocument, ...]


class CellDocument(_Document):
    """One cell: how it ran and what became of it."""

    cell: str
    status: Literal["passed", "failed", "nondeterministic", "refused", "died", "not run"]
    reason: str
    error: dict[str, Any] | None
    elapsed_s: float
    step_s: float
    baseline_step_s: float
    peak_bytes: int
    flags: dict[str, str]
    unsteady: tuple[str, ...]
    comparison: ComparisonDocument | None
    divergence: DivergenceDocument | None


class SessionDocument(_Document):
    """What all cells shared."""

    checkpoint: str
    weights_digest: str
    seed: int
    rows: int
    tokens: int
    num_layers: int | None
    level: str
    device: str
    golden_dtype: str
    pins_shapes: bool
    deterministic: bool
    fault: str | None
    perturbs: bool


class ParityReport(_Document):
    """A whole report.

    ``passed`` is true where every cell that ran passed, and at least one did; ``counts`` has the cells by status.
    """

    schema_version: Literal[1]
    tool: str
    passed: bool
    counts: dict[str, int]
    session: SessionDocument
    environment: dict[str, str]
    ulp_classes: tuple[str, ...]
    limits: tuple[LimitDocument, ...]
    cells: tuple[CellDocument, ...]


def json_text(report: ParityReport) -> str:
    """The report as JSON, its keys in the order of the schema."""
    return report.model_dump_json(indent=1) + "\n"


def write_json(report: ParityReport, path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(json_text(report), encoding="utf-8")


def read_json(path: Path) -> ParityReport:
    """Read a report.

    Raises:
        BadReport: it is none, or of another version of the schema.
    """
    if path.stat().st_size > LARGEST_BYTES:
        raise BadReport(f"{path}: {path.stat().st_size:,} bytes, and a report has {LARGEST_BYTES:,} at most")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadReport(f"{path}: not JSON", cause=str(error)) from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise BadReport(f"{path}: schema_version is {version!r}, and this version reads {SCHEMA_VERSION}")
    try:
        return ParityReport.model_validate(raw)
    except ValidationError as error:
        offenders = [".".join(map(str, fault["loc"])) + ": " + fault["msg"] for fault in error.errors()]
        raise BadReport(f"{path}: {len(offenders)} fields are wrong", offenders=offenders) from error


def schema_text() -> str:
    """The JSON schema of the report."""
    return json.dumps(ParityReport.model_json_schema(mode="serialization"), indent=2) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
