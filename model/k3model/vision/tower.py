"""MoonViT3d: patches of images and short clips to one feature a patch, then to merged groups of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3model.norms import TorchRMSNorm
from k3model.vision.positions import PositionGrid, rotate, rotation_angles
from k3model.vision_config import VisionConfig

CHANNELS = 3
Grid = tuple[int, int, int]


class PatchEmbedding(nn.Module):
    """One linear map a patch, plus its position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(CHANNELS, config.hidden_size, kernel_size=side, stride=side, bias=False)
        self.pos_emb = PositionGrid(config)

    def forward(self, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
        """``[L, 3, patch, patch]`` to ``[L, hidden]``."""
        x = self.proj(pixel_values.to(self.proj.weight.dtype)).flatten(1)
        out: Tensor = x + torch.cat([self.pos_emb(*grid) for grid in grids])
        return out


class VisionMlp(nn.Module):
    """Two linear maps around the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[L, hidden]`` to ``[L, hidden]``."""
        out: Tensor = self.fc1(nn.functional.gelu(self.fc0(x), approximate="tanh"))
        return out


class VisionBlock(nn.Module):
    """Full attention among the patches of one image or clip, then the feed-forward block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm0 = TorchRMSNorm(config.hidden_size)
        self.norm1 = TorchRMSNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.qkv_size, bias=False)
        self.wo = nn.Linear(config.qkv_size, config.hidden_size, bias=False)
        self.mlp = VisionMlp(config)

    def forward(self, x_LD: Tensor, angles_LP: Tensor, lengths: list[int]) -> Tensor:
        """``[L, hidden]`` to ``[L, hidden]``; ``lengths`` are the patches of each image in the row."""
        x_LD = x_LD + self.wo(self._attend(self.norm0(x_LD), angles_LP, lengths))
        out: Tensor = x_LD + self.mlp(self.norm1(x_LD))
        return out

    def _attend(self, x_LD: Tensor, angles_LP: Tensor, lengths: list[int]) -> Tensor:
        q, k, v = self.wqkv(x_LD).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = rotate(q, angles_LP), rotate(k, angles_LP)
        attended = []
        for q_LHK, k_LHK, v_LHK in zip(*(part.split_with_sizes(lengths) for part in (q, k, v)), strict=True):
            q_HLK, k_HLK, v_HLK = (part.transpose(0, 1)[None] for part in (q_LHK, k_LHK, v_LHK))
            o_HLK = nn.functional.scaled_dot_product_attention(q_HLK, k_HLK, v_HLK)
            attended.append(o_HLK[0].transpose(0, 1).flatten(1))
        return torch.cat(attended)


class VisionEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = TorchRMSNorm(config.hidden_size)

    def forward(self, x_LD: Tensor, grids: list[Grid]) -> Tensor:
        """``[L, hidden]`` to ``[L, hidden]``."""
        angles = rotation_angles(grids, self.head_dim, x_LD.device)
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        for block in self.blocks:
            x_LD = block(x_LD, angles, lengths)
        out: Tensor = self.final_layernorm(x_LD)
        return out


class VisionTower(nn.Module):
    """Patches to features, a group of merged patches per token of the text decoder.

    Source: Kimi K3 report, section 2.4; the temporal part follows the released code: one attention over all frames.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.encoder = VisionEncoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixel_values: ``[L, 3, patch, patch]``, the patches of all images one after the other, row by row.
            grid_thws: int64 ``[images, 3]``: frames, rows and columns of patches of each image.

        Returns:
            ``[tokens, kernel rows * kernel columns, hidden]``, tokens in image order, row by row.

        Raises:
            ValueError: the grids do not fit the patches, the kernel or the longest clip.
        """
        grids = checked_grids(self.config, pixel_values, grid_thws)
        x_LD = self.encoder(self.patch_embed(pixel_values, grids), grids)
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        merged = [self._merge(x, grid) for x, grid in zip(x_LD.split_with_sizes(lengths), grids, strict=True)]
        return torch.cat(merged)

    def _merge(self, x_LD: Tensor, grid: Grid) -> Tensor:
        """Average over frames, and bring the patches of one kernel together, row by row."""
        frames, rows, columns = grid
        kernel_rows, kernel_columns = self.config.merge_kernel_size
        x = x_LD.view(frames, rows // kernel_rows, kernel_rows, columns // kernel_columns, kernel_columns, -1)
        averaged = x.permute(0, 1, 3, 2, 4, 5).mean(dim=0)
        return averaged.flatten(2, 3).flatten(0, 1)


def checked_grids(config: VisionConfig, pixel_values: Tensor, grid_thws: Tensor) -> list[Grid]:
    """The grids as numbers.

    Raises:
        ValueError: the grids do not fit the patches, the kernel or the longest clip.
    """
    grids: list[Grid] = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    kernel_rows, kernel_columns = config.merge_kernel_size
    for frames, rows, columns in grids:
        if not 1 <= frames <= config.max_frames:
            raise ValueError(f"an image of {frames} frames; the tower takes 1..{config.max_frames}")
        if rows < 1 or columns < 1 or rows % kernel_rows or columns % kernel_columns:
            raise ValueError(
                f"a grid of {rows} x {columns} patches does not split into {kernel_rows} x {kernel_columns}"
            )
    num_patches = sum(frames * rows * columns for frames, rows, columns in grids)
    if num_patches != pixel_values.shape[0]:
        raise ValueError(f"the grids describe {num_patches} patches, pixel_values has {pixel_values.shape[0]}")
    return grids


def num_image_tokens(config: VisionConfig, grids: list[Grid]) -> list[int]:
    """Tokens of the text decoder that each image becomes."""
    area = config.merge_kernel_size[0] * config.merge_kernel_size[1]
    return [rows * columns // area for _, rows, columns in grids]
