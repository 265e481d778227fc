"""From a raw forward/backward pair to an op that autograd understands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a raw forward leaves for its raw backward.

    Attributes:
        tensors: Tensors (or None) kept through autograd's own saving, so that checkpointing and offloading see them.
        metadata: Everything else: shapes, constants, flags.
        needs_grad: Filled in before the backward: which positional tensors want a gradient.
    """

    tensors: Sequence[Tensor | None]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    needs_grad: tuple[bool, ...] = ()

    def present(self) -> tuple[Tensor, ...]:
        """The saved tensors, for a pair that always saves all of them.

        Raises:
            ValueError: one of them is None.
        """
        found = tuple(tensor for tensor in self.tensors if tensor is not None)
        if len(found) != len(self.tensors):
            raise ValueError(f"{len(self.tensors) - len(found)} of {len(self.tensors)} saved tensors are missing")
        return found


RawForward = Callable[..., tuple[Any, SavedState]]
RawBackward = Callable[..., Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class PairSignature:
    """A raw forward's parameters: positional tensors, then keyword-only attributes."""

    signature: inspect.Signature
    name: str

    @classmethod
    def of(cls, forward: RawForward, name: str) -> PairSignature:
        """Read the signature of a raw forward.

        Raises:
            TypeError: it takes ``**kwargs``, or a positional default other than None.
        """
        signature = inspect.signature(forward)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                raise TypeError(f"{name}: a raw forward names its attributes; **{parameter.name} is not allowed")
            positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if positional and parameter.default not in (parameter.empty, None):
                raise TypeError(f"{name}: positional parameters are tensors; {parameter.name} must default to None")
        return cls(signature, name)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Split a call into all positional tensors, omitted ones as None, and all attributes.

        Raises:
            TypeError: wrong arguments, or a positional argument that is neither a tensor nor None.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for position, tensor in enumerate(bound.args):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.name}: positional argument {position} must be a tensor, got {type(tensor).__name__}"
                )
        return bound.args, bound.kwargs


def differentiable_op(forward: RawForward, backward: RawBackward, *, name: str) -> Callable[..., Any]:
    """Generate the autograd Function of a pair and return a function with the raw forward's signature.

    Args:
        forward: ``forward(*tensors, **attributes) -> (output, SavedState)``; the output is a tensor or a tuple of
            tensors and None. Tensors are positional, attributes keyword-only.
        backward: ``backward(saved, *grad_outputs) -> gradients``: one gradient (or None) per positional tensor.
            ``grad_outputs`` has one entry per output; an output that was not used has None.
        name: Name of the op in error messages and in the autograd graph.

    Returns:
        A differentiable function. It is differentiable once.

    Raises:
        TypeError: the raw forward's signature breaks the contract; at call time, a return value that does.
    """
    signature = PairSignature.of(forward, name)

    def run_forward(ctx: Any, attributes: dict[str, Any], *tensors: Tensor | None) -> Any:
        returned = forward(*tensors, **attributes)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], SavedState)):
            raise TypeError(f"{name}: forward must return (output, SavedState), got {type(returned).__name__}")
        output, saved = returned
        outputs = output if isinstance(output, tuple) else (output,)
        if wrong := [type(o).__name__ for o in outputs if o is not None and not isinstance(o, Tensor)]:
            raise TypeError(f"{name}: outputs must be tensors or None, got {', '.join(wrong)}")
        ctx.save_for_backward(*saved.tensors)
        ctx.op_metadata = saved.metadata
        ctx.set_materialize_grads(False)
        return output

    def run_backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad = tuple(ctx.needs_input_grad[1:])
        if all(grad is None for grad in grad_outputs):
            return (None,) * (1 + len(needs_grad))
        grads = backward(SavedState(ctx.saved_tensors, ctx.op_metadata, needs_grad), *grad_outputs)
        if not isinstance(grads, (tuple, list)) or len(grads) != len(needs_grad):
            got = len(grads) if isinstance(grads, (tuple, list)) else type(grads).__name__
            raise TypeError(f"{name}: backward must return {len(needs_grad)} gradients, got {got}")
        if wrong := [type(g).__name__ for g in grads if g is not None and not isinstance(g, Tensor)]:
            raise TypeError(f"{name}: gradients must be tensors or None, got {', '.join(wrong)}")
        return (None, *grads)

    function: Any = type(
        name,
        (torch.autograd.Function,),
        {"forward": staticmethod(run_forward), "backward": staticmethod(once_differentiable(run_backward))},
    )

    def op(*args: Any, **kwargs: Any) -> Any:
        tensors, attributes = signature.bind(args, kwargs)
        return function.apply(attributes, *tensors)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = forward.__doc__
    op.__signature__ = signature.signature  # type: ignore[attr-defined]
    return op
