"""Which implementation each op of a network uses: plain names, read once while the network is built.

    with using(OpsConfig(moe_implementation="grouped_mm")):
        model = build()

A handle that was made inside keeps its implementation; leaving the block or installing another config changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields

from k3kernels.handle import K3Op
from k3kernels.registry import current_device, default_registry

EAGER = "eager"


@dataclass(frozen=True, slots=True)
class OpsConfig:
    """One implementation name per op. Names are plain strings, so that registered third-party impls can be chosen."""

    chunk_kda_implementation: str = EAGER
    recurrent_kda_implementation: str = EAGER
    kda_gate_implementation: str = EAGER
    short_conv_implementation: str = EAGER
    gated_rms_norm_implementation: str = EAGER
    rms_norm_implementation: str = EAGER
    attn_res_implementation: str = EAGER
    situ_and_mul_implementation: str = EAGER
    moe_implementation: str = EAGER
    attn_implementation: str = EAGER
    cross_entropy_implementation: str = EAGER

    @classmethod
    def of(cls, choices: Mapping[str, str]) -> OpsConfig:
        """Read choices by field name, or by the field name without ``_implementation``.

        Raises:
            KeyError: a name is no field; all of them are listed.
        """
        known = {field.name for field in fields(cls)}
        full = {name if name in known else f"{name}_implementation": impl for name, impl in choices.items()}
        if unknown := sorted(set(full) - known):
            raise KeyError(f"no ops field {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        return cls(**full)

    def problems(self, device: str | None = None) -> tuple[str, ...]:
        """Why choices cannot be used on a device of this machine, one reason a choice; empty when all can."""
        wanted = current_device() if device is None else device
        found = []
        for field, impl in asdict(self).items():
            op, variant = FIELD_OPS[field]
            try:
                row = default_registry().find(op, variant, _actual(field, impl), wanted)
            except (KeyError, RuntimeError) as error:
                found.append(f"{field}={impl}: {error.args[0]}")
                continue
            if reason := row.unmet():
                found.append(f"{field}={impl}: {reason}")
        return tuple(found)


FIELD_OPS: Mapping[str, tuple[str, str]] = {
    "chunk_kda_implementation": ("kda", "chunk"),
    "recurrent_kda_implementation": ("kda", "recurrent"),
    "kda_gate_implementation": ("kda_gate", "standard"),
    "short_conv_implementation": ("short_conv", "standard"),
    "gated_rms_norm_implementation": ("gated_rms_norm", "standard"),
    "rms_norm_implementation": ("rms_norm", "standard"),
    "attn_res_implementation": ("attn_res", "standard"),
    "situ_and_mul_implementation": ("situ_and_mul", "standard"),
    "moe_implementation": ("moe_experts", "situ"),
    "attn_implementation": ("mla_attention", "causal"),
    "cross_entropy_implementation": ("cross_entropy", "chunked"),
}
"""The op and variant that each config field chooses an impl for."""

ALIASES: Mapping[tuple[str, str], str] = {("cross_entropy_implementation", "npu"): "chunk_loss"}
"""Names that recipes of other frameworks use for an impl of ours, by field."""

_installed: ContextVar[OpsConfig | None] = ContextVar("k3kernels_ops_config", default=None)


@contextmanager
def using(config: OpsConfig) -> Iterator[OpsConfig]:
    """Install a config for the network built inside the block."""
    token = _installed.set(config)
    try:
        yield config
    finally:
        _installed.reset(token)


def resolve_op_impl(field: str) -> str:
    """The impl name that the installed config chooses for a field; eager when no config is installed.

    Raises:
        KeyError: there is no such field.
    """
    if field not in FIELD_OPS:
        raise KeyError(f"no ops field {field!r}; there are: {', '.join(sorted(FIELD_OPS))}")
    config = _installed.get()
    return EAGER if config is None else _actual(field, str(getattr(config, field)))


def selected(field: str) -> K3Op:
    """The handle that the installed config chooses for a field.

    Raises:
        KeyError: unknown field, or an impl that nobody registered.
        RuntimeError: the impl is registered but not usable here.
    """
    impl = resolve_op_impl(field)
    return K3Op(*FIELD_OPS[field], impl)


def _actual(field: str, impl: str) -> str:
    return ALIASES.get((field, impl), impl)
