"""Conversations with images, encoded as the released chat encoder does, the assistant's words counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3convert.checkpoint.member_paths import resolve_member
from k3convert.errors import PathEscape
from k3convert.training.data.document import IGNORE_INDEX, Document
from k3convert.training.data.json_lines import read_objects, refuse
from k3model.chat import render
from k3model.tokenizer import KimiTokenizer
from k3model.vision.image_processing import ImageProcessor, image_prompt

MEDIA_PAD = "<|media_pad|>"


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A conversation with its images still on disk."""

    input_ids: list[int]
    is_counted: list[bool]
    images: tuple[Path, ...]


class Conversations:
    """Every record of ``{"messages": [...]}`` as one document.

    A content part ``{"type": "image", "image": NAME}`` names a file in the images' folder. All conversations are
    encoded at once; pixels are read when a document is asked for.

    Args:
        path: JSON lines.
        images: the folder that names are relative to.
        thinking: whether assistant turns have a think channel.
        limit: use the first records only.

    Raises:
        UsageError: there is no such file.
        BadRecords: records that cannot be encoded, images that are missing or cannot be read: all of them.
        PathEscape: names of images that leave the folder, all of them.
    """

    def __init__(
        self,
        path: Path,
        images: Path,
        tokenizer: KimiTokenizer,
        processor: ImageProcessor,
        *,
        thinking: bool = False,
        limit: int | None = None,
    ) -> None:
        self._tokenizer, self._processor, self._thinking = tokenizer, processor, thinking
        self._placeholder = tokenizer.special_tokens[MEDIA_PAD]
        self._encoded: list[_Encoded] = []
        faults: list[str] = []
        escapes: list[str] = []
        num_records = 0
        for number, record in read_objects(path, limit):
            num_records += 1
            try:
                self._encoded.append(self._encode(record, images))
            except PathEscape as error:
                escapes.append(f"line {number}: {error}")
            except (ValueError, KeyError, TypeError, OSError) as error:
                faults.append(f"line {number}: {error}")
        if escapes:
            raise PathEscape(f"{path}: {len(escapes)} images lie outside {images}", offenders=escapes)
        refuse(path, faults, num_records)

    def __len__(self) -> int:
        return len(self._encoded)

    def num_tokens(self, index: int) -> int:
        """Its tokens, images expanded."""
        return len(self._encoded[index].input_ids)

    def document(self, index: int) -> Document:
        """One conversation with its pixels.

        Raises:
            ValueError: its images become another number of tokens than it has placeholders for.
        """
        from PIL import Image

        encoded = self._encoded[index]
        input_ids = torch.tensor(encoded.input_ids)
        labels = input_ids.masked_fill(~torch.tensor(encoded.is_counted), IGNORE_INDEX)
        if not encoded.images:
            return Document(input_ids, labels)
        with ExitStack() as opened:
            images = [opened.enter_context(Image.open(path)) for path in encoded.images]
            pixel_values, grid_thws = self._processor(images)
        check_placeholders(
            num_placeholders=int((input_ids == self._placeholder).sum()),
            num_features=int(grid_thws.prod(-1).sum()) // self._processor.merge_size**2,
        )
        return Document(input_ids, labels, pixel_values, grid_thws)

    def _encode(self, record: Mapping[str, Any], folder: Path) -> _Encoded:
        messages = record["messages"]
        images = tuple(resolve_member(folder, name) for name in image_names(messages))
        sizes = [_size(image) for image in images]
        rendered = render(
            messages,
            thinking=self._thinking,
            add_generation_prompt=False,
            image_prompts=[image_prompt(*size) for size in sizes],
        )
        encoded = self._tokenizer.encode_segments(rendered)
        tokens_left = iter([self._processor.num_tokens(*size) for size in sizes])
        input_ids: list[int] = []
        is_counted: list[bool] = []
        for token_id, counts in zip(encoded.input_ids, encoded.loss_mask, strict=True):
            is_image = token_id == self._placeholder
            width = next(tokens_left, 0) if is_image else 1
            input_ids += [token_id] * width
            # An image is nothing to predict, wherever it stands.
            is_counted += [counts and not is_image] * width
        if not any(is_counted):
            raise ValueError("the assistant says nothing")
        return _Encoded(input_ids, is_counted, images)


def image_names(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all images, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [str(part["image"]) for part in parts if part["type"] == "image"]


def check_placeholders(*, num_placeholders: int, num_features: int) -> None:
    """Refuse images that do not fill their places.

    Raises:
        ValueError: with both numbers.
    """
    if num_placeholders != num_features:
        raise ValueError(f"{num_placeholders} placeholders, but the images become {num_features} tokens")


def _size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the file's header."""
    from PIL import Image

    if not path.is_file():
        raise ValueError(f"the image {path.name} is missing")
    with Image.open(path) as image:
        width, height = image.size
    return int(width), int(height)
