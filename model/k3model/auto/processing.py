"""Conversations with images, ready for the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import BatchEncoding

from k3model.auto.tokenization import TikTokenTokenizer
from k3model.vision.image_processing import ImageProcessor, image_prompt
from k3model.vision.image_settings import read_image_processor


class KimiK3Processor:
    """A tokenizer and an image processor together."""

    def __init__(self, tokenizer: TikTokenTokenizer, image_processor: ImageProcessor) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_: Any) -> KimiK3Processor:
        """Read the tokenizer and ``preprocessor_config.json`` (released limits where it is missing)."""
        return cls(TikTokenTokenizer.from_pretrained(folder), read_image_processor(Path(folder)))

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, return_tensors: str | None = "pt", **options: Any
    ) -> BatchEncoding:
        """Encode one conversation; a content part ``{"type": "image", "image": ...}`` holds a PIL image or a path.

        Args:
            conversation: messages.
            return_tensors: ``"pt"`` for tensors with a batch dim, None for lists.
            options: those of the tokenizer's ``apply_chat_template``.

        Returns:
            ``input_ids`` and ``attention_mask``, and with images ``pixel_values`` and ``grid_thws``.
        """
        images = [_opened(part) for message in conversation for part in _image_parts(message)]
        prompts = [image_prompt(*image.size) for image in images]
        encoded = self.tokenizer.apply_chat_template(
            conversation, return_tensors=return_tensors, image_prompts=prompts, **options
        )
        if images:
            encoded["pixel_values"], encoded["grid_thws"] = self.image_processor(images)
        return encoded


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [] if content is None or isinstance(content, str) else [part for part in content if part["type"] == "image"]


def _opened(part: Mapping[str, Any]) -> Any:
    from PIL import Image

    image = part["image"]
    return Image.open(image) if isinstance(image, str | Path) else image
