"""The vision tower: positions, isolation of images, clips, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.config import KimiK3Config, VisionConfig
from k3model.initialisation import initialise
from k3model.presets import tiny_config_dict
from k3model.vision.positions import PositionGrid, rotate, rotation_angles, time_embedding
from k3model.vision.projector import Projector
from k3model.vision.tower import VisionTower

CPU = torch.device("cpu")


@pytest.fixture
def config() -> VisionConfig:
    vision = KimiK3Config.from_dict(tiny_config_dict()).vision
    assert vision is not None
    return vision


@pytest.fixture
def tower(config: VisionConfig) -> VisionTower:
    torch.manual_seed(0)
    tower = VisionTower(config)
    initialise(tower, 0.2)
    return tower


def pixels(num_patches: int, seed: int = 1) -> Tensor:
    return torch.randn(num_patches, 3, 14, 14, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_images_do_not_see_each_other(tower: VisionTower) -> None:
    x = pixels(24 + 8)

    together = tower(x, torch.tensor([[1, 4, 6], [1, 2, 4]]))

    first = tower(x[:24], torch.tensor([[1, 4, 6]]))
    second = tower(x[24:], torch.tensor([[1, 2, 4]]))
    torch.testing.assert_close(together, torch.cat((first, second)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("frames", [2, 3, 4])
def test_a_clip_of_equal_frames_differs_by_its_time_embedding_alone(tower: VisionTower, frames: int) -> None:
    image = pixels(8)
    clip = image.repeat(frames, 1, 1, 1)

    embedded = tower.patch_embed(clip, [(frames, 2, 4)])

    still = tower.patch_embed(image, [(1, 2, 4)])
    time = time_embedding(frames, 32, CPU)
    for frame in range(frames):
        torch.testing.assert_close(embedded[8 * frame : 8 * (frame + 1)], still + time[frame])
    assert tower(clip, torch.tensor([[frames, 2, 4]])).shape == (2, 4, 32)


def test_a_clip_in_bf16_stays_in_bf16(tower: VisionTower) -> None:
    out = tower.bfloat16()(pixels(16), torch.tensor([[2, 2, 4]]))

    assert out.dtype == torch.bfloat16


def test_a_cast_after_a_forward_spoils_no_table(tower: VisionTower) -> None:
    grid = torch.tensor([[2, 2, 4]])
    tower(pixels(16), grid)

    late = tower.bfloat16()(pixels(16), grid)

    assert bool(late.isfinite().all())
    assert list(tower.buffers()) == []


@torch.no_grad()
def test_the_learned_grid_is_used_as_it_is_at_its_own_size(config: VisionConfig) -> None:
    grid = PositionGrid(config)

    assert torch.equal(grid(1, 8, 8), grid.weight.flatten(0, 1))


@torch.no_grad()
def test_another_size_interpolates_between_neighbours(config: VisionConfig) -> None:
    grid = PositionGrid(config)
    rows = torch.arange(8.0)[:, None, None].expand(8, 8, 32)
    grid.weight.copy_(rows)

    halved = grid(1, 4, 8).view(4, 8, 32)

    # Half as many rows: each is the mean of two.
    torch.testing.assert_close(halved[:, 0, 0], torch.tensor([0.5, 2.5, 4.5, 6.5]))


def test_the_time_embedding_is_sines_then_cosines() -> None:
    table = time_embedding(3, 8, CPU)

    assert table[0].tolist() == [0.0] * 4 + [1.0] * 4
    assert float(table[2, 1]) == pytest.approx(math.sin(2 / 10000 ** (1 / 4)), rel=1e-6)
    assert float(table[2, 7]) == pytest.approx(math.cos(2 / 10000 ** (3 / 4)), rel=1e-6)


def test_even_pairs_turn_with_the_column_and_odd_pairs_with_the_row() -> None:
    angles = rotation_angles([(1, 2, 3)], 8, CPU).view(2, 3, 2, 2)

    assert angles[1, 2, :, 0].tolist() == pytest.approx([2.0, 2 * 10000**-0.5])
    assert angles[1, 2, :, 1].tolist() == pytest.approx([1.0, 10000**-0.5])


def test_a_rotation_keeps_lengths_and_turns_by_the_angle() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])

    turned = rotate(x, torch.tensor([[math.pi / 2, math.pi]]))

    torch.testing.assert_close(turned, torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]), atol=1e-6, rtol=0)


@torch.no_grad()
def test_merging_brings_two_by_two_patches_together_row_by_row(tower: VisionTower) -> None:
    x = torch.arange(16.0)[:, None].expand(16, 32)

    merged = tower._merge(x, (1, 4, 4))

    assert merged[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@torch.no_grad()
def test_merging_a_clip_averages_its_frames(tower: VisionTower) -> None:
    x = torch.cat((torch.zeros(4, 32), torch.full((4, 32), 3.0)))

    assert torch.equal(tower._merge(x, (2, 2, 2)), torch.full((1, 4, 32), 1.5))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([1, 3, 4], "3 x 4 patches does not split into 2 x 2"),
        ([5, 2, 4], "5 frames; the tower takes 1..4"),
        ([0, 2, 4], "0 frames"),
        ([1, 2, 2], "describe 4 patches, pixel_values has 12"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(tower: VisionTower, grid: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tower(pixels(12), torch.tensor([grid]))


@pytest.mark.parametrize("changes", [{}, {"merge_kernel_size": [1, 2]}])
def test_the_projector_takes_what_the_tower_gives(changes: dict[str, Any]) -> None:
    raw = tiny_config_dict()
    raw["vision_config"] |= changes
    vision = KimiK3Config.from_dict(raw).vision
    assert vision is not None

    features = Projector(vision)(VisionTower(vision)(pixels(8), torch.tensor([[1, 2, 4]])))

    assert features.shape == (8 // (vision.merge_kernel_size[0] * vision.merge_kernel_size[1]), 128)
