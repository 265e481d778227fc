"""The files of a checkpoint that hold no weights. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from k3convert.checkpoint.hf_folder import CONFIG_NAME, read_config
from k3convert.errors import UsageError
from k3convert.planning.hf_sidecar import ASSET_FILES
from k3convert.planning.inventory import parse_config
from k3model.config import KimiK3Config


def folder_of(name: str, checkpoint: Path) -> Path:
    """Where a checkpoint keeps a file: a DCP may have it among the files of its source."""
    kept = checkpoint / ASSET_FILES
    return kept if (kept / name).is_file() else checkpoint


def checkpoint_config(checkpoint: Path, num_layers: int | None) -> KimiK3Config:
    """The config of an HF or a DCP folder, cut to its first layers.

    Raises:
        BadConfig: it has none, or one that describes no K3 network.
        UsageError: no folder, or ``num_layers`` is not in 1..num_hidden_layers.
    """
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is not a folder")
    folder = folder_of(CONFIG_NAME, checkpoint)
    config = parse_config(read_config(folder), folder)
    depth = config.text.num_hidden_layers
    if num_layers is None:
        return config
    if num_layers > depth:
        raise UsageError(f"model.num_layers {num_layers}: {checkpoint} has layers 1 to {depth}")
    return config.with_num_layers(num_layers)
