"""The batch of a parity run: the same for every cell with the same kind of data, cut among the ranks of ``dp``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from blake3 import blake3
from torch import Tensor

from k3convert.errors import UsageError
from k3convert.parity.cells import DataKind
from k3model.config import KimiK3Config
from k3model.parallel.step import Batch

# An image of this many patches, before the merge: rows and columns differ, and both are even.
IMAGE_GRID = (1, 4, 6)
IGNORED_SHARE = 0.2
SHORTEST_ROW = 0.6


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of the global batch, and the number of the first of them."""

    first_row: int
    batch: Batch

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return self.batch.input_ids.shape[0]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of the global batch.

    Attributes:
        rows: of the global batch.
        tokens: of a row after images have come in.
        text_tokens: of a row before that: one placeholder an image.
    """

    rows: int
    tokens: int
    text_tokens: int


def make_batch(
    kind: DataKind, config: KimiK3Config, *, rows: int, tokens: int, seed: int
) -> tuple[BatchShape, tuple[MicroBatch, ...]]:
    """The global batch. It follows from the arguments alone, on any machine.

    Labels are the tokens, a fifth of them not counted, more in later rows, so that counts differ from rank to rank.
    Dense, padded and image rows are one micro-batch; packed rows, each with its own documents, are one each.

    Raises:
        UsageError: images are asked for and the network has no vision tower, or a row is too short for its image.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = config.text.vocab_size
    num_image_tokens = _image_tokens(config, tokens) if kind is DataKind.IMAGE else 0
    text_tokens = tokens - num_image_tokens + 1 if kind is DataKind.IMAGE else tokens
    input_ids = torch.randint(0, vocabulary, (rows, text_tokens), generator=generator)
    # A placeholder by chance would ask for an image.
    input_ids[input_ids == config.media_placeholder_token_id] = 0
    labels = input_ids.clone()
    share = IGNORED_SHARE * (1 + torch.arange(rows)) * 2 / (rows + 1)
    labels[torch.rand(rows, text_tokens, generator=generator) < share[:, None]] = config.ignore_index
    whole = Batch(input_ids=input_ids, labels=labels)
    shape = BatchShape(rows, tokens, text_tokens)
    if kind is DataKind.PACKED:
        return shape, tuple(
            MicroBatch(row, replace(part, cu_seqlens=_documents(tokens, row)))
            for row, part in enumerate(_rows(whole, 1))
        )
    if kind is DataKind.PADDED:
        whole = replace(whole, attention_mask=_padding(rows, tokens))
    if kind is DataKind.IMAGE:
        whole = _with_images(whole, config, generator)
    return shape, (MicroBatch(0, whole),)


def rows_of_rank(micro_batches: tuple[MicroBatch, ...], dp: int, place: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of one rank of ``dp``: its rows of the only one, or its share of several.

    Raises:
        ValueError: ``dp`` does not divide the rows.
    """
    num_rows = sum(micro.num_rows for micro in micro_batches)
    if num_rows % dp:
        raise ValueError(f"dp={dp} does not divide {num_rows} rows")
    if len(micro_batches) > 1:
        share = len(micro_batches) // dp
        return micro_batches[place * share : (place + 1) * share]
    (only,) = micro_batches
    return (MicroBatch(place * (num_rows // dp), _rows(only.batch, num_rows // dp)[place]),)


def batch_digest(micro_batches: tuple[MicroBatch, ...]) -> str:
    """BLAKE3 over names, shapes and bytes of everything in the batch."""
    hasher = blake3()
    for micro in micro_batches:
        for name, value in vars(micro.batch).items():
            if isinstance(value, Tensor):
                hasher.update(f"{micro.first_row} {name} {value.dtype} {list(value.shape)}\n".encode())
                hasher.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return str(hasher.hexdigest())


def _rows(batch: Batch, size: int) -> list[Batch]:
    """A batch in parts of ``size`` rows; images go with their rows."""
    num_parts = batch.input_ids.shape[0] // size

    def cut(value: Tensor | None) -> list[Tensor | None]:
        return [None] * num_parts if value is None else list(value.chunk(num_parts))

    columns = zip(
        cut(batch.input_ids),
        cut(batch.labels),
        cut(batch.attention_mask),
        cut(batch.pixel_values),
        cut(batch.grid_thws),
        strict=True,
    )
    return [
        Batch(input_ids=ids, labels=labels, attention_mask=mask, pixel_values=pixels, grid_thws=grids)  # type: ignore[arg-type]
        for ids, labels, mask, pixels, grids in columns
    ]


def _documents(tokens: int, row: int) -> Tensor:
    """Bounds of the documents of a packed row; cuts differ from row to row and fall on no half of it."""
    cuts = sorted({0, (tokens * (3 + row)) // 11, (tokens * (7 + row % 2)) // 10 + 1, tokens})
    return torch.tensor(cuts)


def _padding(rows: int, tokens: int) -> Tensor:
    """1 for tokens, 0 for padding: on the right of every row but the first, which is whole."""
    lengths = torch.linspace(tokens, SHORTEST_ROW * tokens, rows).long().clamp(min=1)
    return (torch.arange(tokens) < lengths[:, None]).long()


def _image_tokens(config: KimiK3Config, tokens: int) -> int:
    if config.vision is None:
        raise UsageError("data=image: the network has no vision tower")
    area = config.vision.merge_kernel_size[0] * config.vision.merge_kernel_size[1]
    num_tokens = IMAGE_GRID[1] * IMAGE_GRID[2] // area
    if tokens < 2 * num_tokens:
        raise UsageError(f"data=image: a row of {tokens} tokens; its image alone has {num_tokens}, ask for twice that")
    return num_tokens


def _with_images(batch: Batch, config: KimiK3Config, generator: torch.Generator) -> Batch:
    """One image a row, in another place in every row."""
    if config.vision is None:
        raise ValueError("the network has no vision tower")
    rows, text_tokens = batch.input_ids.shape
    places = 1 + torch.arange(rows) * (text_tokens - 2) // max(1, rows)
    input_ids = batch.input_ids.clone()
    input_ids[torch.arange(rows), places] = config.media_placeholder_token_id
    labels = (
        None
        if batch.labels is None
        else batch.labels.masked_fill(input_ids == config.media_placeholder_token_id, config.ignore_index)
    )
    patch = config.vision.patch_size
    num_patches = IMAGE_GRID[0] * IMAGE_GRID[1] * IMAGE_GRID[2]
    pixels = torch.rand(rows * num_patches, 3, patch, patch, generator=generator) * 2 - 1
    grids = torch.tensor([IMAGE_GRID] * rows)
    return replace(batch, input_ids=input_ids, labels=labels, pixel_values=pixels, grid_thws=grids)
