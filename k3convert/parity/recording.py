"""Hooks that record what every module computes, forward and backward, and that hand it other inputs where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from k3convert.parity.placement import Place, RankShare
from k3convert.parity.records import Entry, Kind, RankRecords, Run
from k3kernels import K3Op
from k3model.network import KimiK3ForConditionalGeneration
from k3model.text.kda_attention import KdaAttention
from k3model.text.language_head import HeadOutput
from k3model.text.router import Router
from k3model.vision.positions import PositionGrid

LAYERS = "language_model.model.layers."
VISION = ("vision_tower", "mm_projector")
# Between two stages of a pipeline, so that orders of one kind follow the stages.
STAGE_STRIDE = 1_000_000


@dataclass(frozen=True)
class Wishes:
    """What a run records beside outputs and gradients, and what it replaces.

    Attributes:
        inputs_of: modules whose inputs are recorded, with the gradients that go back to them.
        reference: the run whose tensors replace this one's.
        substituted: modules that get the reference's inputs instead of their own, and in the backward pass the
            gradients of the reference's outputs.
        forces_routing: whether every router sends tokens where the reference sent them.
    """

    inputs_of: frozenset[str] = frozenset()
    reference: Run | None = None
    substituted: frozenset[str] = frozenset()
    forces_routing: bool = False


@dataclass
class Recorder:
    """Records one pass of one rank.

    Args:
        network: in its layout, on this rank.
        shares: this rank's part of every micro-batch, in order.
        stage: number of the pipeline stage, and how many there are.
        wishes: what else is recorded, and what is replaced.
        is_padded: whether rows are padded. KDA takes padding out, differently in every layout, so that what is inside
            its layers has no common shape and is not recorded.

    Attributes:
        records: what was recorded.
        unplaced: modules whose tensors fit no rule of ``placement``, and are not recorded.
    """

    network: KimiK3ForConditionalGeneration
    shares: tuple[RankShare, ...]
    stage: tuple[int, int] = (0, 1)
    wishes: Wishes = field(default_factory=Wishes)
    is_padded: bool = False
    records: RankRecords = field(default_factory=RankRecords)
    unplaced: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._orders: dict[tuple[Kind, str], int] = {}
        self._recomputed: dict[str, int] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook every module with a forward of its own."""
        for name, module in self._modules():
            # A position grid is called once an image, and is part of what the patch embedding gives out.
            if not name or isinstance(module, nn.ModuleDict | nn.ModuleList | PositionGrid):
                continue
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
            if isinstance(module, Router) and self.wishes.forces_routing:
                module.select = self._forced(name)  # type: ignore[assignment,method-assign]

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        inside = ""
        for name, module in self.network.named_modules():
            if inside and name.startswith(inside):
                continue
            yield name, module
            if self.is_padded and isinstance(module, KdaAttention):
                inside = f"{name}."

    def detach(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add_parameter_gradients(self, sample_above: int | None = None) -> None:
        """Record this rank's part of every parameter's gradient; of larger ones a sample, see ``RunSpec``."""
        modules = dict(self.network.named_modules())
        for order, (name, parameter) in enumerate(self.network.named_parameters()):
            gradient = parameter.grad
            if gradient is None:
                continue
            if sample_above is not None and gradient.numel() > sample_above:
                gradient = gradient.flatten()[:: -(-gradient.numel() // sample_above)]
            owner = modules[name.rpartition(".")[0]]
            entry = Entry(
                Kind.PARAMETER_GRADIENT, name, self.stage[0] * STAGE_STRIDE + order, class_name(owner),
                layer_of(name), impls_of(owner), _dtype(gradient.dtype), tuple(gradient.shape),
            )  # fmt: skip
            if not isinstance(gradient, DTensor):
                self.records.add(entry, gradient)
                continue
            # how DCP learns which part of the global tensor a rank has
            for chunk in gradient.__create_chunk_list__():  # type: ignore[no-untyped-call]
                self.records.add(entry, gradient.to_local(), tuple(chunk.offsets))

    def add(self, kind: Kind, value: Tensor, place: Place | None = None) -> None:
        """Record a tensor that belongs to the run, not to a module."""
        shape = tuple(value.shape) if place is None else place.shape
        entry = Entry(kind, str(kind), 0, "", None, "", _dtype(value.dtype), shape)
        self.records.add(entry, value if place is None else place.value, None if place is None else place.start)

    def _before(self, name: str) -> Callable[..., Any]:
        wants = name in self.wishes.inputs_of
        reference = self.wishes.reference if name in self.wishes.substituted else None

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not wants and reference is None:
                return None
            share = self._share(name)
            new_args = list(args)
            for number, value in enumerate(args):
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                place, key = share.place(module, value, is_vision=_is_vision(name)), f"{name}#{number}"
                if place is None:
                    self.unplaced.add(key)
                    continue
                if reference is not None:
                    new_args[number] = _replaced(value, _part(reference.tensor(Kind.INPUT, key), place, value))
                if wants and not _recomputing():
                    self._add_at(Kind.INPUT, key, module, place, number)
                    self._watch_gradient(Kind.INPUT_GRADIENT, key, name, module, share, new_args[number])
            return (tuple(new_args), kwargs) if reference is not None else None

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _recomputing():
                self._recomputed[name] = self._recomputed.get(name, 0) + 1
                return
            share = self._share(name)
            self._calls[name] = self._calls.get(name, 0) + 1
            if isinstance(module, Router):
                self._add_routing(name, module, share, args[0], output)
            elif isinstance(output, HeadOutput):
                if output.logits is not None and (place := share.place(module, output.logits, is_vision=False)):
                    self.add(Kind.LOGITS, output.logits, place)
            else:
                # of a layer: its running sum; what its bank holds was recorded before
                value = output[0] if isinstance(output, tuple) else output
                if isinstance(value, Tensor):
                    self._add_output(name, module, share, value)

        return hook

    def _share(self, name: str) -> RankShare:
        """Of the micro-batch that a module works on: its next one, or the next one that it computes again."""
        return self.shares[(self._recomputed if _recomputing() else self._calls).get(name, 0)]

    def _add_output(self, name: str, module: nn.Module, share: RankShare, value: Tensor) -> None:
        place = share.place(module, value, is_vision=_is_vision(name))
        if place is None:
            self.unplaced.add(name)
            return
        self._add_at(Kind.OUTPUT, name, module, place, self._order(Kind.OUTPUT, name))
        self._watch_gradient(Kind.OUTPUT_GRADIENT, name, name, module, share, value)

    def _watch_gradient(
        self, kind: Kind, key: str, name: str, module: nn.Module, share: RankShare, value: Tensor
    ) -> None:
        """Record the gradient that reaches a tensor; where the module is substituted, put the reference's there."""
        if not value.requires_grad:
            return
        is_replaced = kind is Kind.OUTPUT_GRADIENT and name in self.wishes.substituted

        def hook(gradient: Tensor) -> Tensor | None:
            place = share.place_gradient(module, gradient, is_vision=_is_vision(name))
            if place is None:
                self.unplaced.add(key)
                return None
            self._add_at(kind, key, module, place, self._order(kind, key))
            reference = self.wishes.reference
            if not is_replaced or reference is None:
                return None
            return _part(reference.tensor(kind, key), place, gradient)

        value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _add_at(self, kind: Kind, name: str, module: nn.Module, place: Place, order: int) -> None:
        entry = Entry(
            kind, name, order, class_name(module), layer_of(name), impls_of(module), _dtype(place.value.dtype),
            place.shape,
        )  # fmt: skip
        self.records.add(entry, place.value, place.start, is_partial=place.is_partial)

    def _add_routing(
        self, name: str, router: Router, share: RankShare, x_ND: Tensor, output: tuple[Tensor, Tensor]
    ) -> None:
        """The chosen experts as they are chosen, their weights by ascending expert, and what selected them."""
        # Nothing here may be part of the graph: a recomputation, which has no hooks, would save less.
        with torch.no_grad():
            ids_NK, weights_NK = output
            choice_NE = router.choice(router.scores(x_ND))
            weights_NK = weights_NK.gather(1, ids_NK.argsort(dim=-1))
        for kind, value in (
            (Kind.ROUTED_EXPERTS, ids_NK),
            (Kind.ROUTING_SCORES, choice_NE),
            (Kind.OUTPUT, weights_NK),
        ):
            place = share.place(router, value, is_vision=False)
            if place is None:
                self.unplaced.add(name)
            else:
                self._add_at(kind, name, router, place, self._order(kind, name))

    def _forced(self, name: str) -> Callable[[Tensor], Tensor]:
        if self.wishes.reference is None:
            raise ValueError("forced routing needs a reference run")
        ids = self.wishes.reference.tensor(Kind.ROUTED_EXPERTS, name)

        def select(choice_NE: Tensor) -> Tensor:
            share = self._share(name)
            own = ids.narrow(0, share.first_row, share.num_rows).narrow(1, share.first_token, share.tokens)
            return own.flatten(0, 1).to(choice_NE.device)

        return select

    def _order(self, kind: Kind, name: str) -> int:
        """The place of the first record of a name; a backward pass begins at the last stage."""
        stage, num_stages = self.stage
        turn = num_stages - 1 - stage if kind is Kind.OUTPUT_GRADIENT else stage
        return self._orders.setdefault((kind, name), turn * STAGE_STRIDE + len(self._orders))


def class_name(module: nn.Module) -> str:
    """The class that the network gave a module; FSDP2 puts one of its own in front."""
    cls = type(module)
    return cls.__mro__[2].__name__ if isinstance(module, FSDPModule) else cls.__name__


def impls_of(module: nn.Module) -> str:
    """The ops that a module itself holds: ``op/variant/impl``, joined by ``+``."""
    handles = [value for value in vars(module).values() if isinstance(value, K3Op)]
    handles += [
        nested for value in vars(module).values() if hasattr(value, "attn_res")
        for nested in vars(value).values() if isinstance(nested, K3Op)
    ]  # fmt: skip
    return "+".join(f"{handle.op}/{handle.variant}/{handle.impl}" for handle in handles)


def layer_of(name: str) -> int | None:
    """The text decoder's layer that a name belongs to."""
    if not name.startswith(LAYERS):
        return None
    # "#0" behind a module's name is its first input
    return int(name.removeprefix(LAYERS).partition(".")[0].partition("#")[0])


def _is_vision(name: str) -> bool:
    return name.startswith(VISION)


def _recomputing() -> bool:
    """Whether this is a backward pass, in which a forward can only be a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(whole: Tensor, place: Place, like: Tensor) -> Tensor:
    """A rank's part of the reference's tensor, in the shape, dtype and on the device of its own."""
    for dim, (start, size) in enumerate(zip(place.start, place.value.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole.reshape(like.shape).to(like.device, like.dtype)


class _Replace(torch.autograd.Function):
    """Other values in place of a tensor; the gradient goes to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _replaced(own: Tensor, values: Tensor) -> Tensor:
    out: Tensor = _Replace.apply(own, values)  # type: ignore[no-untyped-call]
    return out
