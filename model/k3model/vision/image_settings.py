"""The image processor that a checkpoint's ``preprocessor_config.json`` describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3model.vision.image_processing import Chessboard, ImageProcessor

PREPROCESSOR_CONFIG = "preprocessor_config.json"


def read_image_processor(folder: Path) -> ImageProcessor:
    """Read ``preprocessor_config.json``; released limits where the folder has none.

    Raises:
        ValueError: it asks for what the released processor does not do.
    """
    path = folder / PREPROCESSOR_CONFIG
    document = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return _image_processor(document.get("media_proc_cfg", {}))


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
