"""Writes a generated checkpoint in the released layout, as one folder that appears when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3convert.errors import DestinationExists, NoSpace, UsageError
from k3convert.synthesis.assets import write_assets
from k3convert.synthesis.index import write_index
from k3convert.synthesis.presets import config_dict, find_preset
from k3convert.synthesis.shards import measure, shards, write_shard
from k3model.config import ConfigError, KimiK3Config

Progress = Callable[[int, int], None]
"""Called with payload bytes done and in all."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written."""

    destination: str
    preset: str
    seed: int
    sparse: bool
    num_shards: int
    num_tensors: int
    total_bytes: int
    """Payload of all tensors: the index's ``total_size``."""
    file_bytes: int
    """Shards with their headers; holes count."""

    def document(self) -> dict[str, Any]:
        """The summary as a JSON object."""
        return asdict(self)


def make_checkpoint(
    destination: Path,
    *,
    preset: str,
    num_layers: int | None = None,
    num_experts: int | None = None,
    seed: int = 0,
    sparse: bool = False,
    on_progress: Progress | None = None,
) -> Summary:
    """Write a checkpoint of generated values with every quirk of the release's layout.

    A tensor's bytes depend on the seed and its name alone. The folder is written under a temporary name beside the
    destination and renamed at the end; it is not synced to the disk, since it can be made again.

    Args:
        destination: a folder that does not exist; its parent does.
        preset: a key of ``PRESETS``.
        num_layers: decoder layers, instead of the preset's.
        num_experts: routed experts of a layer, instead of the preset's.
        seed: of all random values.
        sparse: write headers and leave the data as holes of the file system, which read as zeros.
        on_progress: hears of payload bytes done and in all.

    Raises:
        UsageError: no such preset; numbers that make no K3 network; no parent folder.
        DestinationExists: the destination is there.
        NoSpace: the file system cannot hold the data, or runs full.
    """
    raw_config = config_dict(preset, num_layers=num_layers, num_experts=num_experts)
    try:
        config = KimiK3Config.from_dict(raw_config)
    except ConfigError as error:
        raise UsageError(f"no K3 network has these numbers: {error}", offenders=error.reasons) from error
    if destination.exists() or destination.is_symlink():
        raise DestinationExists(f"{destination} exists", hint="name a folder that does not, or remove this one")
    if not destination.parent.is_dir():
        raise UsageError(f"{destination.parent} is not a folder")
    extent = measure(config)
    if not sparse:
        _require_space(destination.parent, extent.total_bytes)
    folder = destination.with_name(f".{destination.name}.making-{os.getpid()}")
    folder.mkdir()
    try:
        progress = _Progress(extent.total_bytes, on_progress)
        names_of_shard: dict[str, list[str]] = {}
        file_bytes = 0
        for shard in shards(config, extent.num_shards):
            names_of_shard[shard.name] = [spec.name for spec in shard.specs]
            path = folder / shard.name
            file_bytes += write_shard(path, shard, config, seed, sparse=sparse, advance=progress.advance)
        write_index(folder, names_of_shard, extent.total_bytes, seed)
        write_assets(folder, raw_config, find_preset(preset).special_tokens)
        os.rename(folder, destination)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise NoSpace(f"{destination.parent} ran full; {extent.total_bytes} bytes were to be written") from error
        raise
    return Summary(
        destination=str(destination),
        preset=preset,
        seed=seed,
        sparse=sparse,
        num_shards=extent.num_shards,
        num_tensors=sum(map(len, names_of_shard.values())),
        total_bytes=extent.total_bytes,
        file_bytes=file_bytes,
    )


class _Progress:
    """Counts bytes and tells."""

    def __init__(self, total_bytes: int, tell: Progress | None) -> None:
        self.done_bytes, self.total_bytes, self.tell = 0, total_bytes, tell

    def advance(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self.tell is not None:
            self.tell(self.done_bytes, self.total_bytes)


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoSpace(
            f"the checkpoint needs {needed} bytes, {folder} has {free} free",
            hint="--sparse writes the headers and leaves the data as holes",
        )
