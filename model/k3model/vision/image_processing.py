"""Images to patches: resize, fill what is transparent, pad, normalise, cut.

Source: the released image processor's published arithmetic (``media_proc_cfg`` of the checkpoint).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Chessboard:
    """What shows through transparent pixels: squares of two greys, the lighter one at the top left."""

    square_size: int = 8
    light: int = 255
    dark: int = 180

    def pixels(self, rows: int, columns: int) -> NDArray[np.float32]:
        """float32 ``[rows, columns, 1]``."""
        row, column = np.ogrid[:rows, :columns]
        is_dark = (row // self.square_size + column // self.square_size) % 2 == 1
        return np.where(is_dark, self.dark, self.light).astype(np.float32)[..., None]


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """The released preprocessing, with the released limits.

    Attributes:
        max_patches: patches of an image at most (``in_patch_limit``).
        max_patches_per_side: patches along one side at most (``patch_limit_on_one_side``).
        mean: subtracted from every channel after scaling to 0..1; ``std`` divides.
        background: stands behind transparent pixels, after resizing.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 65536
    max_patches_per_side: int = 512
    mean: float = 0.5
    std: float = 0.5
    background: Chessboard = Chessboard()

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, in pixels; images are never enlarged."""
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        longest = self.max_patches_per_side * self.patch_size
        scale = min(1.0, sqrt(self.max_patches / patches), longest / width, longest / height)
        return tuple(min(longest, max(1, int(side * scale))) for side in (width, height))  # type: ignore[return-value]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of this size, padding included."""
        block = self.patch_size * self.merge_size
        new_width, new_height = self.resized(width, height)
        return -(-new_height // block) * self.merge_size, -(-new_width // block) * self.merge_size

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of the text decoder that an image of this size becomes."""
        rows, columns = self.grid(width, height)
        return rows * columns // self.merge_size**2

    def patches(self, image: Image) -> Tensor:
        """One image as float32 ``[rows * columns, 3, patch, patch]``, row by row; padding is black."""
        from PIL.Image import Resampling

        is_transparent = image.has_transparency_data
        image = image.convert("RGBA" if is_transparent else "RGB")
        rows, columns = self.grid(image.width, image.height)
        new_size = self.resized(image.width, image.height)
        if new_size != image.size:
            image = image.resize(new_size, Resampling.BICUBIC)
        side = self.patch_size
        pixels = np.zeros((rows * side, columns * side, 3), dtype=np.uint8)
        pixels[: image.height, : image.width] = self._opaque(np.asarray(image))
        scaled = (torch.from_numpy(pixels).float() / 255 - self.mean) / self.std
        cut = scaled.view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3)
        return cut.reshape(rows * columns, 3, side, side)

    def _opaque(self, pixels_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Lay pixels with an alpha channel over the background; fractions are cut off, not rounded."""
        if pixels_HWC.shape[-1] == 3:
            return pixels_HWC
        alpha = pixels_HWC[..., 3:].astype(np.float32) / 255
        behind = self.background.pixels(*pixels_HWC.shape[:2])
        return (alpha * pixels_HWC[..., :3] + (1 - alpha) * behind).astype(np.uint8)

    def __call__(self, images: Sequence[Image]) -> ProcessedImages:
        """Several images one after the other."""
        if not images:
            raise ValueError("no images to process")
        grids = [(1, *self.grid(image.width, image.height)) for image in images]
        return ProcessedImages(torch.cat([self.patches(image) for image in images]), torch.tensor(grids))


class ProcessedImages(NamedTuple):
    """What the network reads.

    Attributes:
        pixel_values: float32 ``[patches, 3, patch, patch]``.
        grid_thws: int64 ``[images, 3]``.
    """

    pixel_values: Tensor
    grid_thws: Tensor


def image_prompt(width: int, height: int) -> str:
    """The text that stands for an image of this original size; the one placeholder in it becomes the image."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
