"""Images become patches with the released arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from k3model.vision.image_processing import ImageProcessor, image_prompt

PROCESSOR = ImageProcessor()


@pytest.mark.parametrize(
    ("size", "tokens"), [((4000, 3000), 15_444), ((1861, 7041), 16_817), ((448, 448), 256), ((1, 1), 1), ((29, 28), 2)]
)
def test_published_sizes_give_published_token_counts(size: tuple[int, int], tokens: int) -> None:
    assert PROCESSOR.num_tokens(*size) == tokens


def test_no_side_exceeds_its_limit_and_nothing_is_enlarged() -> None:
    # 100,000 * (7168 / 100,000) is a hair under 7168 in floating point, and the released code cuts it off.
    assert PROCESSOR.resized(100_000, 10) == (512 * 14 - 1, 1)
    assert PROCESSOR.resized(30, 20) == (30, 20)


def test_patches_are_cut_row_by_row_with_channels_first() -> None:
    pixels = np.arange(28 * 28 * 3, dtype=np.uint32).reshape(28, 28, 3) % 251
    image = Image.fromarray(pixels.astype(np.uint8))

    patches = PROCESSOR.patches(image)

    assert patches.shape == (4, 3, 14, 14)
    want = torch.from_numpy(pixels[:14, 14:].astype(np.float32)).permute(2, 0, 1) / 255 * 2 - 1
    torch.testing.assert_close(patches[1], want)


def test_padding_on_the_right_and_below_is_black() -> None:
    image = Image.new("RGB", (30, 20), (255, 255, 255))

    patches = PROCESSOR.patches(image)

    assert PROCESSOR.grid(30, 20) == (2, 4)
    canvas = patches.view(2, 4, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert bool((canvas[:20, :30] == 1).all())
    assert bool((canvas[20:] == -1).all())
    assert bool((canvas[:, 30:] == -1).all())


def test_a_large_image_is_resized_before_it_is_cut() -> None:
    processor = ImageProcessor(max_patches=16)

    patches = processor.patches(Image.new("RGB", (280, 280), (0, 128, 255)))

    assert patches.shape == (16, 3, 14, 14)
    assert processor.resized(280, 280) == (56, 56)


def test_several_images_follow_each_other() -> None:
    processed = PROCESSOR([Image.new("L", (28, 56)), Image.new("RGBA", (56, 28))])

    assert processed.grid_thws.tolist() == [[1, 4, 2], [1, 2, 4]]
    assert processed.pixel_values.shape == (16, 3, 14, 14)


def test_transparent_pixels_show_a_chessboard_light_at_the_top_left() -> None:
    patches = PROCESSOR.patches(Image.new("RGBA", (28, 28), (10, 20, 30, 0)))

    canvas = patches.view(2, 2, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 28, 3)
    grey = 180 / 255 * 2 - 1
    for row, column, want in ((0, 0, 1.0), (7, 7, 1.0), (0, 8, grey), (8, 0, grey), (8, 8, 1.0), (27, 27, 1.0)):
        assert canvas[row, column].tolist() == pytest.approx([want] * 3)


def test_half_transparent_pixels_are_laid_over_and_cut_to_whole_numbers() -> None:
    image = Image.new("RGBA", (28, 28), (10, 20, 30, 100))

    patches = PROCESSOR.patches(image)

    alpha = np.float32(100) / 255
    want = [int(alpha * value + (1 - alpha) * 255) / 255 * 2 - 1 for value in (10, 20, 30)]
    assert patches[0, :, 0, 0].tolist() == pytest.approx(want)


def test_an_opaque_image_with_an_alpha_channel_is_the_image() -> None:
    opaque = Image.new("RGBA", (28, 28), (10, 20, 30, 255))

    assert torch.equal(PROCESSOR.patches(opaque), PROCESSOR.patches(opaque.convert("RGB")))


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        PROCESSOR([])


def test_the_prompt_names_the_original_size() -> None:
    assert image_prompt(640, 480) == "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
