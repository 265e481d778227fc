"""A compact record of a run that can be carried to another machine: digests, moments and samples of every tensor.

A capture is two files: ``capture.json`` and ``values.safetensors``. It is read as what it is, a file from elsewhere:
every field and every tensor is checked against what this version would have written, and nothing in it names a path.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3convert.checkpoint.json_text import DuplicateKey, parse_json
from k3convert.checkpoint.safetensors_header import read_header
from k3convert.errors import BadInput
from k3convert.parity.measure import tensor_digest
from k3convert.parity.records import Entry, Kind, Run
from k3convert.parity.report.document import Figure
from k3convert.parity.sampling import sample, sampled_shape

SCHEMA_VERSION: Final = 1
JSON_NAME = "capture.json"
VALUES_NAME = "values.safetensors"
LARGEST_JSON_BYTES = 1 << 28
_HF_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32"}
_SHORTENED = torch.int32  # expert numbers


class BadCapture(BadInput):
    """A capture is damaged, or no capture at all."""

    code = "bad-capture"


class CaptureMismatch(BadInput):
    """A capture is of other weights, other inputs or another way to run than what it is to be compared with."""

    code = "capture-mismatch"


class Identity(BaseModel):
    """What must be the same for two runs to be comparable.

    Attributes:
        weights_digest: of all weights.
        inputs_digest: of the batch.
        seed: of the batch.
        rows: of the batch.
        tokens: of a row.
        num_layers: only the first layers, or all.
        cell: how the run was made; ``dtype`` and ``data`` decide which references it is compared with.
        routing: whether routers chose by themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weights_digest: str
    inputs_digest: str
    seed: int
    rows: int
    tokens: int
    num_layers: int | None
    cell: str
    routing: Literal["free", "forced"] = "free"


class Moments(BaseModel):
    """Of the finite values of a whole tensor, in float64, and how many are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    mean: Figure
    rms: Figure
    abs_max: Figure
    num_nan: int = Field(ge=0)
    num_infinite: int = Field(ge=0)


class _Tensor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    kind: Kind
    name: str
    order: int
    module_type: str
    layer: int | None
    impl: str
    dtype: Literal["bfloat16", "float16", "float32", "float64", "int64"]
    shape: tuple[int, ...] = Field(max_length=8)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    moments: Moments | None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1]
    identity: Identity
    environment: dict[str, str]
    tensors: tuple[_Tensor, ...]


@dataclass(frozen=True)
class Capture:
    """A capture in memory: like a run, but a tensor is its samples; see ``sampling.sample``.

    Attributes:
        identity: what it is of.
        environment: of the machine that made it.
        entries: with the shapes of whole tensors.
        digests: of whole tensors.
        moments: of whole tensors; none of those that are not floating.
    """

    identity: Identity
    environment: dict[str, str]
    entries: dict[tuple[Kind, str], Entry]
    digests: dict[tuple[Kind, str], str]
    moments: dict[tuple[Kind, str], Moments]
    samples: dict[tuple[Kind, str], Tensor]

    def tensor(self, kind: Kind, name: str) -> Tensor:
        """The samples of a tensor."""
        return self.samples[kind, name]


def write_capture(run: Run, folder: Path, identity: Identity, environment: dict[str, str]) -> None:
    """Capture a run.

    Args:
        run: what its ranks recorded.
        folder: made where it is not there; a capture in it is replaced.
        identity: what the run is of.
        environment: of this machine.
    """
    rows, values = [], {}
    for number, (key, entry) in enumerate(sorted(run.entries.items())):
        tensor = run.tensor(*key)
        is_floating = tensor.is_floating_point()
        fields = asdict(entry) | {"dtype": str(tensor.dtype).removeprefix("torch.")}
        rows.append(
            _Tensor(**fields, digest=tensor_digest(tensor), moments=moments_of(tensor) if is_floating else None)
        )
        kept = sample(entry, tensor)
        values[str(number)] = kept.contiguous() if is_floating else kept.to(_SHORTENED).contiguous()
    file = _File(schema_version=SCHEMA_VERSION, identity=identity, environment=environment, tensors=tuple(rows))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(values, folder / VALUES_NAME)
    (folder / JSON_NAME).write_text(file.model_dump_json() + "\n", encoding="utf-8")


def read_capture(folder: Path) -> Capture:
    """Read and check a capture.

    Raises:
        BadCapture: it is none, damaged, or of another version; every fault is listed.
        BadShard, IncompleteCheckpoint: its file of values breaks the format or is missing.
    """
    file = _read_json(folder / JSON_NAME)
    header = read_header(folder / VALUES_NAME)
    found = {entry.name: (entry.dtype, entry.shape) for entry in header.entries}
    entries, faults = {}, []
    for number, row in enumerate(file.tensors):
        entry = Entry(row.kind, row.name, row.order, row.module_type, row.layer, row.impl, row.dtype, row.shape)
        if entry.key in entries:
            faults.append(f"{row.name} ({row.kind}) is there twice")
            continue
        entries[entry.key] = entry
        dtype = "I32" if row.dtype == "int64" else _HF_DTYPES[row.dtype]
        if any(size < 0 for size in row.shape) or found.get(str(number)) != (dtype, sampled_shape(entry)):
            faults.append(
                f"{row.name} ({row.kind}): samples are {found.get(str(number))}, and of {list(row.shape)} they are "
                f"{(dtype, sampled_shape(entry))}"
            )
    if len(found) != len(file.tensors):
        faults.append(f"{len(found)} tensors of samples for {len(file.tensors)} tensors")
    if faults:
        raise BadCapture(f"{folder} is no capture: {len(faults)} of its tensors are wrong", offenders=faults)
    with safe_open(folder / VALUES_NAME, framework="pt") as values:
        samples = {
            key: values.get_tensor(str(number)).to(getattr(torch, entry.dtype))
            for number, (key, entry) in enumerate(entries.items())
        }
    return Capture(
        identity=file.identity,
        environment=file.environment,
        entries=entries,
        digests={(row.kind, row.name): row.digest for row in file.tensors},
        moments={(row.kind, row.name): row.moments for row in file.tensors if row.moments is not None},
        samples=samples,
    )


def check_identity(capture: Capture, expected: Identity) -> None:
    """Refuse a capture of anything else.

    Raises:
        CaptureMismatch: with every field that differs, and both values.
    """
    own, wanted = capture.identity.model_dump(), expected.model_dump()
    faults = [
        f"{name}: the capture has {own[name]!r}, here it is {wanted[name]!r}"
        for name in own
        if own[name] != wanted[name]
    ]
    if faults:
        raise CaptureMismatch(
            f"the capture is of another run: {len(faults)} of {len(own)} facts differ",
            offenders=faults,
            hint="run the comparison with the options that the capture was made with",
        )


def moments_of(tensor: Tensor) -> Moments:
    """Moments of a whole tensor, in float64."""
    value = tensor.double().flatten()
    finite = value[value.isfinite()]
    num = max(1, finite.numel())
    return Moments(
        mean=float(finite.sum()) / num,
        rms=math.sqrt(float(finite.dot(finite)) / num),
        abs_max=float(finite.abs().max()) if finite.numel() else 0.0,
        num_nan=int(value.isnan().sum()),
        num_infinite=int(value.isinf().sum()),
    )


def _read_json(path: Path) -> _File:
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON_BYTES:
            raise BadCapture(f"{path}: {size:,} bytes, and a capture's has {LARGEST_JSON_BYTES:,} at most")
        raw = parse_json(path.read_bytes())
    except OSError as error:
        raise BadCapture(f"{path} cannot be read", cause=error.strerror) from error
    except (ValueError, RecursionError, DuplicateKey) as error:
        raise BadCapture(f"{path}: not JSON", cause=str(error)) from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise BadCapture(f"{path}: schema_version is {version!r}, and this version reads {SCHEMA_VERSION}")
    try:
        return _File.model_validate(raw)
    except ValidationError as error:
        offenders = [".".join(map(str, fault["loc"])) + ": " + fault["msg"] for fault in error.errors()]
        raise BadCapture(f"{path}: {len(offenders)} fields are wrong", offenders=offenders) from error
