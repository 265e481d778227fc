"""Where a rank's part of a module's tensor lies in the tensor of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from k3convert.parity.inputs import BatchShape
from k3model.parallel.layout import Layout
from k3model.text.decay_gate import DecayGate
from k3model.text.kda_attention import ShortConvolution
from k3model.vision.projector import Projector
from k3model.vision.tower import VisionTower


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of a global tensor.

    Attributes:
        value: the part, with rows and tokens as dims of their own.
        start: of the part in each dim.
        shape: of the global tensor.
        is_partial: whether other ranks hold other terms of the same elements, to be summed.
    """

    value: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class RankShare:
    """What of the batch a rank computes while one micro-batch goes through.

    Attributes:
        layout: degrees.
        batch: sizes of the global batch.
        first_row: of the micro-batch's rows in the global batch.
        num_rows: of the micro-batch.
        cp_place: the rank's number along ``cp``.
        sp_place: the rank's number along ``sp``.
        kda_width: channels of all heads of a KDA layer; 0 without KDA layers.
        kda_heads: heads of a KDA layer.
    """

    layout: Layout
    batch: BatchShape
    first_row: int
    num_rows: int
    cp_place: int
    sp_place: int
    kda_width: int
    kda_heads: int

    @property
    def tokens(self) -> int:
        """Tokens of a row that are this rank's own."""
        return self.batch.tokens // self.layout.sequence_parts

    @property
    def first_token(self) -> int:
        """The first of them."""
        return (self.cp_place * self.layout.sp + self.sp_place) * self.tokens

    def place(self, module: nn.Module, value: Tensor, *, is_vision: bool) -> Place | None:
        """Where a tensor that goes into or comes out of a module belongs; None where no rule says so."""
        if is_vision or isinstance(module, VisionTower | Projector):
            return self._of_patches(value)
        if isinstance(module, nn.Embedding):
            return self._of_rows(value, 0, self.batch.text_tokens, self.batch.text_tokens)
        if isinstance(module, ShortConvolution | DecayGate):
            return self._of_heads(value, self.kda_width if isinstance(module, ShortConvolution) else self.kda_heads)
        return self._of_rows(value, self.first_token, self.tokens, self.batch.tokens)

    def place_gradient(self, module: nn.Module, value: Tensor, *, is_vision: bool) -> Place | None:
        """As ``place``, of a gradient: where ranks compute the same thing, each has the terms of its own tokens."""
        place = self.place(module, value, is_vision=is_vision)
        if place is None or self.layout.sequence_parts == 1:
            return place
        is_before_cut = is_vision or isinstance(module, nn.Embedding | VisionTower | Projector)
        is_gathered = isinstance(module, ShortConvolution | DecayGate) and self._has_all_heads(module, value)
        is_whole = place.shape[1:2] == (self.batch.tokens,) and place.value.shape[1] == self.batch.tokens
        return replace(place, is_partial=is_before_cut or is_gathered or is_whole)

    def _has_all_heads(self, module: nn.Module, value: Tensor) -> bool:
        total = self.kda_width if isinstance(module, ShortConvolution) else self.kda_heads
        return self.layout.sp > 1 and value.shape[2] == total

    def _of_rows(self, value: Tensor, first_token: int, own: int, total: int) -> Place | None:
        """``[rows, own tokens, ...]``, or the same with rows and tokens in one dim, as experts see them."""
        if value.dim() < 2:
            return None
        if tuple(value.shape[:2]) == (self.num_rows, total):
            first_token = 0  # gathered: every rank has the tokens of all
        elif tuple(value.shape[:2]) != (self.num_rows, own):
            if value.shape[0] != self.num_rows * own:
                return None
            value = torch.unflatten(value, 0, (self.num_rows, own))
        rest = tuple(value.shape[2:])
        return Place(value, (self.first_row, first_token, *(0,) * len(rest)), (self.batch.rows, total, *rest))

    def _of_heads(self, value: Tensor, total: int) -> Place | None:
        """Convolutions and decay see the whole sequence of ``cp``'s part, and the heads of ``sp``'s."""
        tokens = self.batch.tokens // self.layout.cp
        if value.dim() < 3 or tuple(value.shape[:2]) != (self.num_rows, tokens):
            return None
        first = 0 if value.shape[2] == total else self.sp_place * value.shape[2]
        rest = tuple(value.shape[3:])
        return Place(
            value,
            (self.first_row, self.cp_place * tokens, first, *(0,) * len(rest)),
            (self.batch.rows, self.batch.tokens, total, *rest),
        )

    def _of_patches(self, value: Tensor) -> Place | None:
        if value.dim() < 2 or value.shape[0] % self.num_rows:
            return None
        per_row = value.shape[0] // self.num_rows
        rest = tuple(value.shape[1:])
        return Place(value, (self.first_row * per_row, *(0,) * len(rest)), (self.batch.rows * per_row, *rest))


def uncalled(layout: Layout) -> tuple[str, ...]:
    """Ends of the names of modules whose weights a layout uses without calling them, so that they have no output."""
    # of the gathered latent, each rank expands its own heads alone
    return (".self_attn.kv_b_proj",) if layout.cp > 1 and layout.sp > 1 else ()
