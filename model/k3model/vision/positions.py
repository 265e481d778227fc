"""Positions of patches: a learned grid, a fixed code for time, and a rotation in two dimensions.

Nothing here is a buffer: tables are small, computed in float32 when they are needed, and no cast can spoil them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3model.vision_config import VisionConfig

_BASE = 10000.0


class PositionGrid(nn.Module):
    """A learned embedding for every place of a grid, interpolated to an image's own grid, plus a code for time."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.position_rows, config.position_columns, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, frames: int, rows: int, columns: int) -> Tensor:
        """Embeddings of one image or clip, ``[frames * rows * columns, hidden]``; a single frame has no time."""
        grid: Tensor = self.weight
        if (rows, columns) != tuple(grid.shape[:2]):
            channels_first = grid.permute(2, 0, 1)[None]
            resized = nn.functional.interpolate(channels_first, size=(rows, columns), mode="bilinear")
            grid = resized[0].permute(1, 2, 0)
        flat = grid.flatten(0, 1)
        if frames == 1:
            return flat
        time = time_embedding(frames, flat.shape[-1], flat.device)
        return (flat[None].float() + time[:, None]).to(flat.dtype).flatten(0, 1)


def time_embedding(frames: int, size: int, device: torch.device) -> Tensor:
    """Sines, then cosines, of the frame number at falling frequencies: float32 ``[frames, size]``."""
    half = size // 2
    frequency = _BASE ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angle = torch.arange(frames, dtype=torch.float32, device=device)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def rotation_angles(grids: list[tuple[int, int, int]], head_dim: int, device: torch.device) -> Tensor:
    """The angle of every pair of channels of every patch: float32 ``[patches, head_dim / 2]``.

    Pair ``2i`` turns with the column, pair ``2i + 1`` with the row, at the frequency ``10000 ** (-4i / head_dim)``;
    frames of a clip turn alike.
    """
    quarter = head_dim // 4
    frequency = _BASE ** (-4 * torch.arange(quarter, dtype=torch.float32, device=device) / head_dim)
    angles = []
    for frames, rows, columns in grids:
        row = torch.arange(rows, dtype=torch.float32, device=device)[:, None, None].expand(rows, columns, 1)
        column = torch.arange(columns, dtype=torch.float32, device=device)[None, :, None].expand(rows, columns, 1)
        pairs = torch.stack((column * frequency, row * frequency), dim=-1).reshape(rows * columns, 2 * quarter)
        angles.append(pairs.repeat(frames, 1))
    return torch.cat(angles)


def rotate(x_LHK: Tensor, angles_LP: Tensor) -> Tensor:
    """Turn adjacent pairs of channels by their angles, in float32, and cast back."""
    dtype = torch.promote_types(x_LHK.dtype, torch.float32)
    first, second = torch.unflatten(x_LHK.to(dtype), -1, (-1, 2)).unbind(-1)
    cosine, sine = (table.to(dtype)[:, None] for table in (angles_LP.cos(), angles_LP.sin()))
    turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return turned.flatten(-2).to(x_LHK.dtype)
