"""Inputs for every op of the table, by op and variant, so that tests can be parametrised from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import handle, registry


@dataclass(frozen=True)
class Size:
    """The sizes that the inputs of all ops are made from; those of ``small`` suit every impl (multiples of 8)."""

    tokens: int
    heads: int
    key: int
    value: int
    hidden: int
    latent: int
    intermediate: int
    experts: int
    slots: int
    blocks: int
    vocabulary: int


SIZES = {
    "tiny": Size(5, 1, 3, 2, 4, 4, 3, 3, 2, 2, 5),
    "small": Size(70, 3, 16, 24, 40, 32, 48, 6, 3, 3, 50),
    "layer": Size(4096, 96, 128, 128, 7168, 3584, 3072, 64, 16, 8, 163840),
}


@dataclass
class OpInputs:
    """A call of an op: positional tensors and keyword-only attributes."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> tuple[Tensor, ...]:
        """The arguments as fresh leaves; floating ones want a gradient."""
        return tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in self.args)

    def run(self, op: Callable[..., Any], *, seed: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the gradients of all floating arguments for random gradients of the outputs.

        The random gradients are bfloat16 numbers, so that every dtype gets the same ones.
        """
        leaves = self.leaves()
        returned = op(*leaves, **self.kwargs)
        outputs = [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]
        differentiable = [x for x in outputs if x.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        if not differentiable:
            return outputs, []
        generator = torch.Generator(outputs[0].device).manual_seed(seed)
        grads = [
            torch.randn(x.shape, device=x.device, generator=generator).bfloat16().to(x.dtype) for x in differentiable
        ]
        return [x.detach() for x in outputs], list(torch.autograd.grad(differentiable, wanted, grads))


class InputMaker:
    """Makes the inputs of one op from a size, a dtype and a device; the same seed gives the same numbers."""

    def __init__(self, size: Size, dtype: torch.dtype, device: str, seed: int) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.inside = torch.promote_types(dtype, torch.float32)
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, dtype=self.inside, device=self.device, generator=self.generator)
        return drawn.mul_(scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.rand(shape, dtype=self.inside, device=self.device, generator=self.generator)
        return (low + (high - low) * drawn).to(dtype or self.inside)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device, generator=self.generator)

    def kda(self) -> OpInputs:
        s = self.size
        beta = self.uniform(1, s.tokens, s.heads, low=0.05, high=0.95)
        return OpInputs(
            (
                self.normal(1, s.tokens, s.heads, s.key),
                self.normal(1, s.tokens, s.heads, s.key),
                self.normal(1, s.tokens, s.heads, s.value),
                self.uniform(1, s.tokens, s.heads, s.key, low=-5.0, high=-1e-3),
                beta,
                self.normal(2, s.heads, s.key, s.value, dtype=self.inside),
            ),
            {
                "output_final_state": True,
                "cu_seqlens": torch.tensor([0, s.tokens // 3, s.tokens], device=self.device),
                "lower_bound": -5.0,
            },
        )

    def kda_gate(self) -> OpInputs:
        s = self.size
        return OpInputs(
            (
                self.normal(1, s.tokens, s.heads, s.key),
                self.uniform(s.heads, low=0.0, high=2.7),
                self.normal(s.heads * s.key, scale=0.5, dtype=self.inside),
            ),
            {"lower_bound": -5.0},
        )

    def short_conv(self) -> OpInputs:
        s, channels = self.size, self.size.heads * self.size.key
        return OpInputs(
            (
                self.normal(1, s.tokens, channels),
                self.normal(channels, 1, 4, scale=0.5, dtype=self.inside),
                self.normal(2, channels, 3),
            ),
            {
                "output_final_state": True,
                "cu_seqlens": torch.tensor([0, s.tokens // 3, s.tokens], device=self.device),
            },
        )

    def gated_rms_norm(self) -> OpInputs:
        s = self.size
        shape = (1, s.tokens, s.heads, s.value)
        return OpInputs(
            (self.normal(*shape), self.normal(*shape), self.uniform(s.value, low=0.8, high=1.2)), {"eps": 1e-5}
        )

    def rms_norm(self) -> OpInputs:
        s = self.size
        weight = self.uniform(s.hidden, low=0.8, high=1.2, dtype=self.dtype)
        return OpInputs((self.normal(s.tokens, s.hidden), weight), {"eps": 1e-5})

    def attn_res(self) -> OpInputs:
        s = self.size
        return OpInputs(
            (
                self.normal(1, s.tokens, s.hidden),
                self.uniform(s.hidden, low=0.8, high=1.2, dtype=self.dtype),
                self.normal(1, s.hidden, scale=s.hidden**-0.5),
                *(self.normal(1, s.tokens, s.hidden) for _ in range(s.blocks)),
            ),
            {"eps": 1e-5},
        )

    def situ_and_mul(self) -> OpInputs:
        s = self.size
        return OpInputs(
            (self.normal(s.tokens, s.intermediate, scale=4.0), self.normal(s.tokens, s.intermediate, scale=9.0)),
            {"beta": 4.0, "linear_beta": 25.0},
        )

    def situ_and_mul_weighted(self) -> OpInputs:
        plain = self.situ_and_mul()
        return OpInputs((*plain.args, self.uniform(self.size.tokens)), plain.kwargs)

    def moe_experts(self) -> OpInputs:
        s = self.size
        # the last expert is never chosen, as most are in a real batch of few tokens
        choice = self.uniform(s.tokens, s.experts - 1).argsort(-1)[:, : s.slots]
        up_scale, down_scale = s.latent**-0.5, s.intermediate**-0.5
        return OpInputs(
            (
                self.normal(s.tokens, s.latent),
                choice,
                self.uniform(s.tokens, s.slots),
                self.normal(s.experts, s.intermediate, s.latent, scale=up_scale),
                self.normal(s.experts, s.intermediate, s.latent, scale=up_scale),
                self.normal(s.experts, s.latent, s.intermediate, scale=down_scale),
            ),
            {"beta": 4.0, "linear_beta": 25.0},
        )

    def mla_attention(self) -> OpInputs:
        s = self.size
        key = s.key + s.key // 2
        return OpInputs(
            (
                self.normal(1, s.tokens, s.heads, key),
                self.normal(1, s.tokens, s.heads, key),
                self.normal(1, s.tokens, s.heads, s.key),
            ),
            {"scale": key**-0.5, "cu_seqlens": torch.tensor([0, s.tokens // 3, s.tokens], device=self.device)},
        )

    def mxfp4_dequantize(self) -> OpInputs:
        s = self.size
        packed = self.integers(256, s.hidden, 16 * s.blocks).to(torch.uint8)
        return OpInputs((packed, self.integers(253, s.hidden, s.blocks).to(torch.uint8)))

    def mxfp4_quantize(self) -> OpInputs:
        return OpInputs((self.normal(self.size.hidden, 32 * self.size.blocks),), {"rule": "ocp-floor"})

    def cross_entropy(self) -> OpInputs:
        s = self.size
        labels = self.integers(s.vocabulary, s.tokens)
        labels[::3] = -100
        return OpInputs((self.normal(s.tokens, s.vocabulary), labels))

    def cross_entropy_chunked(self) -> OpInputs:
        s = self.size
        labels = self.integers(s.vocabulary, s.tokens)
        labels[: s.tokens // 2] = -100
        hidden = self.normal(s.tokens, s.hidden)
        head = self.normal(s.vocabulary, s.hidden, scale=s.hidden**-0.5)
        return OpInputs((hidden, head, labels), {"chunk_size": 1024 if s.tokens > 1024 else 16})


@pytest.fixture(scope="session")
def op_inputs() -> Callable[..., OpInputs]:
    """``op_inputs(op, variant, size, dtype=..., device=..., seed=...)``: a call of an op."""

    def make(
        op: str,
        variant: str,
        size: str,
        *,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        seed: int = 0,
        **changes: int,
    ) -> OpInputs:
        resized = Size(**{**vars(SIZES[size]), **changes})
        maker = InputMaker(resized, dtype, device, seed)
        method: Callable[[], OpInputs] = getattr(maker, f"{op}_{variant}", None) or getattr(maker, op)
        return method()

    return make


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[registry.Registry]:
    """This process's registry with the built-in rows alone, put back afterwards."""
    registry.default_registry.cache_clear()
    monkeypatch.setattr(handle.K3Op, "_interned", {})
    yield registry.default_registry()
    registry.default_registry.cache_clear()
