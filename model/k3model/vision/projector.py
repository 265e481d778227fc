"""From merged patches of the vision tower to the width of the text decoder."""

from __future__ import annotations

from torch import Tensor, nn

from k3model.norms import TorchRMSNorm
from k3model.vision_config import VisionConfig


class Projector(nn.Module):
    """Patches of one kernel side by side, two linear maps around the exact GELU, and a norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.Linear(config.merged_size, config.merged_size, bias=False),
            nn.GELU(),
            nn.Linear(config.merged_size, config.text_hidden_size, bias=False),
        )
        self.post_norm = TorchRMSNorm(config.text_hidden_size, config.projector_norm_eps)

    def forward(self, x_NMD: Tensor) -> Tensor:
        """``[tokens, merged patches, vision hidden]`` to ``[tokens, text hidden]``."""
        out: Tensor = self.post_norm(self.proj(x_NMD.flatten(1)))
        return out
