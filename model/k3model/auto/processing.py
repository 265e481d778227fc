"""Conversations with images, ready for the network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import BatchEncoding

from k3model.auto.tokenization import TikTokenTokenizer
from k3model.vision.image_processing import Chessboard, ImageProcessor, image_prompt

PREPROCESSOR_CONFIG = "preprocessor_config.json"


class KimiK3Processor:
    """A tokenizer and an image processor together."""

    def __init__(self, tokenizer: TikTokenTokenizer, image_processor: ImageProcessor) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_: Any) -> KimiK3Processor:
        """Read the tokenizer and ``preprocessor_config.json`` (released limits where it is missing)."""
        path = Path(folder) / PREPROCESSOR_CONFIG
        document = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return cls(TikTokenTokenizer.from_pretrained(folder), _image_processor(document.get("media_proc_cfg", {})))

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


def _image_processor(settings: Mapping[str, Any]) -> ImageProcessor:
    released = ImageProcessor()
    return ImageProcessor(
        patch_size=settings.get("patch_size", released.patch_size),
        merge_size=settings.get("merge_kernel_size", released.merge_size),
        max_patches=settings.get("in_patch_limit", released.max_patches),
        max_patches_per_side=settings.get("patch_limit_on_one_side", released.max_patches_per_side),
        mean=_one_value("image_mean", settings.get("image_mean", released.mean)),
        std=_one_value("image_std", settings.get("image_std", released.std)),
        background=_background(settings),
    )


def _background(settings: Mapping[str, Any]) -> Chessboard:
    """The background of transparent images; only the released kind exists here.

    Raises:
        ValueError: another pattern, another corner, or filled before resizing.
    """
    released = Chessboard()
    block = settings.get("transparent_bg_config") or {}
    wanted = {"pattern": "chessboard", "chessboard_square_on_top_left": True}
    wrong = [f"{name} {block[name]!r}" for name, value in wanted.items() if block.get(name, value) != value]
    if settings.get("transparent_bg_fill_stage", "after_resize") != "after_resize":
        wrong.append(f"transparent_bg_fill_stage {settings['transparent_bg_fill_stage']!r}")
    if wrong:
        raise ValueError(f"{PREPROCESSOR_CONFIG}: not the released way to fill transparent images: {', '.join(wrong)}")
    return Chessboard(
        square_size=block.get("chessboard_square_size", released.square_size),
        light=block.get("chessboard_white_value", released.light),
        dark=block.get("chessboard_gray_value", released.dark),
    )


def _one_value(name: str, value: float | Sequence[float]) -> float:
    values = set(value) if isinstance(value, Sequence) else {value}
    if len(values) != 1:
        raise ValueError(f"{name} must be the same for every channel, got {value}")
    return float(values.pop())


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [] if content is None or isinstance(content, str) else [part for part in content if part["type"] == "image"]


def _opened(part: Mapping[str, Any]) -> Any:
    from PIL import Image

    image = part["image"]
    return Image.open(image) if isinstance(image, str | Path) else image
