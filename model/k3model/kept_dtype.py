"""Parameters that stay float32 whatever the rest of the network is cast to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from torch import Tensor, nn


class KeptDtype(nn.Module):
    """A module whose tensors keep their dtype under ``.to``, ``.half``, ``.bfloat16`` and the like; devices do move.

    The decay, the short convolutions, the head norm and the router's correction bias are stored in float32, and a
    rounding of any of them cannot be undone by a later cast. Only ``_apply`` is overridden, the one place through
    which every such call goes.
    """

    def kept_tensors(self) -> Iterable[Tensor]:
        """The tensors that keep their dtype: all of the module's own and its children's."""
        yield from self.parameters()
        yield from self.buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept: set[int] = set()
        for tensor in self.kept_tensors():
            kept.add(id(tensor))
            if tensor.grad is not None:
                kept.add(id(tensor.grad))

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                # The cast value is thrown away: casting it back would keep its rounding.
                return tensor.to(moved.device)
            return moved

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self
