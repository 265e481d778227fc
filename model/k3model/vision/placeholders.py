"""Where image tokens go: one placeholder an image becomes the image's whole block of tokens.

A row may hold one placeholder for each of its images, as released prompts do, or a placeholder for every token, as
serving engines write them. What a row means follows from its number of placeholders and the images that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expansion:
    """How a batch grows when its images come in. Rows of unequal length are padded on the side the caller pads.

    Attributes:
        length: tokens in a row afterwards.
        text_from: int64, flat places in the old batch of the tokens that stay.
        text_to: int64, their flat places in the new batch.
        image_to: int64, flat places of image tokens in the new batch, in image order.
        attention_mask: int64 ``[B, length]``, or None where no row is padded.
        cu_seqlens: int64, document bounds in the new row, or None where there were none.
    """

    batch: int
    length: int
    text_from: Tensor
    text_to: Tensor
    image_to: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None

    def embeddings(self, embeddings_BTD: Tensor, features_ND: Tensor) -> Tensor:
        """Text embeddings and image features in their places; a place that nothing fills is zero."""
        size = embeddings_BTD.shape[-1]
        out = embeddings_BTD.new_zeros(self.batch * self.length, size)
        out = out.index_copy(0, self.text_to, embeddings_BTD.flatten(0, 1)[self.text_from])
        out = out.index_copy(0, self.image_to, features_ND.to(out.dtype))
        return torch.unflatten(out, 0, (self.batch, self.length))

    def labels(self, labels_BT: Tensor, ignore_index: int) -> Tensor:
        """Labels in their places; image tokens and padding are not counted."""
        out = labels_BT.new_full((self.batch * self.length,), ignore_index)
        out = out.index_copy(0, self.text_to, labels_BT.flatten()[self.text_from])
        return torch.unflatten(out, 0, (self.batch, self.length))


def expand(
    input_ids: Tensor,
    placeholder_id: int,
    num_image_tokens: Sequence[int],
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Expansion:
    """Plan how image tokens come into a batch.

    Args:
        input_ids: ``[B, T]``.
        placeholder_id: the token that stands for an image.
        num_image_tokens: tokens of each image, in the order of rows and of placeholders in a row.
        attention_mask: ``[B, T]`` or None; 0 is padding, where a placeholder means nothing.
        cu_seqlens: ``[N + 1]`` or None.

    Raises:
        ValueError: placeholders and images do not match in number.
    """
    batch = input_ids.shape[0]
    is_real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    is_placeholder = (input_ids == placeholder_id) & is_real
    counts = is_placeholder.sum(dim=1).tolist()

    # How many tokens each old token becomes: 1, or all of an image at its only placeholder.
    widths = torch.ones_like(input_ids)
    for row, images in enumerate(_images_of_rows(counts, num_image_tokens)):
        if len(images) == counts[row]:
            widths[row, is_placeholder[row]] = widths.new_tensor([num_image_tokens[image] for image in images])
    lengths = widths.sum(dim=1)
    length = int(lengths.max())
    pads_left = attention_mask is not None and bool((attention_mask[:, 0] == 0).any())
    row_start = torch.arange(batch, device=input_ids.device) * length
    if pads_left:
        row_start = row_start + length - lengths
    start = widths.cumsum(1) - widths + row_start[:, None]

    text_from = (~is_placeholder).flatten().nonzero().flatten()
    first, width = start[is_placeholder], widths[is_placeholder]
    within = torch.arange(int(width.sum()), device=width.device) - (width.cumsum(0) - width).repeat_interleave(width)
    mask = None
    if attention_mask is not None or bool((lengths != length).any()):
        flat_mask = torch.zeros(batch * length, dtype=torch.long, device=input_ids.device)
        flat_mask[start.flatten()[text_from]] = is_real.flatten()[text_from].long()
        flat_mask[first.repeat_interleave(width) + within] = 1
        mask = torch.unflatten(flat_mask, 0, (batch, length))
    return Expansion(
        batch=batch,
        length=length,
        text_from=text_from,
        text_to=start.flatten()[text_from],
        image_to=first.repeat_interleave(width) + within,
        attention_mask=mask,
        cu_seqlens=None if cu_seqlens is None else _moved_bounds(cu_seqlens, widths[0]),
    )


def _moved_bounds(cu_seqlens: Tensor, widths_T: Tensor) -> Tensor:
    ends = torch.cat((widths_T.new_zeros(1), widths_T.cumsum(0)))
    return ends[cu_seqlens.long()]


def _images_of_rows(counts: Sequence[int], num_image_tokens: Sequence[int]) -> list[range]:
    """The images of each row, given how many placeholders it holds: one for each image, or one for each token.

    All rows together must use up all images; of several readings, the one with one placeholder an image comes first.
    """
    num_images = len(num_image_tokens)
    # first image that is left -> a reading of the rows so far that leaves it
    readings: dict[int, list[range]] = {0: []}
    for count in counts:
        longer: dict[int, list[range]] = {}
        for first, reading in readings.items():
            for stop in (first + count, _stop_of_tokens(first, count, num_image_tokens)):
                if stop is not None and stop <= num_images:
                    longer.setdefault(stop, [*reading, range(first, stop)])
        readings = longer
    if num_images not in readings:
        raise ValueError(
            f"{sum(counts)} placeholders in {len(counts)} rows match neither {num_images} images nor their "
            f"{sum(num_image_tokens)} tokens"
        )
    return readings[num_images]


def _stop_of_tokens(first: int, count: int, num_image_tokens: Sequence[int]) -> int | None:
    """The image after those from ``first`` on that have ``count`` tokens together, or None where none have."""
    stop = first
    while count > 0 and stop < len(num_image_tokens):
        count -= num_image_tokens[stop]
        stop += 1
    return stop if count == 0 else None
