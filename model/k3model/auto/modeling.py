"""The network as transformers' Auto classes build it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from k3model.auto.configuration import KimiK3AutoConfig, KimiK3TextAutoConfig
from k3model.auto.weights import fill
from k3model.network import KimiK3ForConditionalGeneration

# What the Auto classes hand on that says nothing about a local folder.
_IGNORED = frozenset(
    (
        "_commit_hash",
        "_from_auto",
        "adapter_kwargs",
        "cache_dir",
        "force_download",
        "local_files_only",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
    )
)


class KimiK3AutoModel(KimiK3ForConditionalGeneration):
    """The native network, built from a folder or from a transformers config. It has no ``generate`` and no cache."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        config: KimiK3AutoConfig | KimiK3TextAutoConfig,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: str | torch.device | None = None,
        ops: Mapping[str, str] | None = None,
        **others: Any,
    ) -> KimiK3AutoModel:
        """Build the network and read its weights from a local folder, in evaluation mode.

        Raises:
            TypeError: an option that means nothing here.
            FileNotFoundError: the folder has no weights.
            ValueError: the weights and the config do not belong together.
        """
        if unknown := sorted(set(others) - _IGNORED):
            raise TypeError(f"from_pretrained of K3 has no option {', '.join(unknown)}")
        network = _empty(cls, config, dtype if dtype is not None else torch_dtype, device_map, ops)
        fill(network, Path(folder))
        network.eval()
        return network

    @classmethod
    def _from_config(
        cls,
        config: KimiK3AutoConfig | KimiK3TextAutoConfig,
        *,
        dtype: torch.dtype | str | None = None,
        ops: Mapping[str, str] | None = None,
        **others: Any,
    ) -> KimiK3AutoModel:
        if unknown := sorted(set(others) - _IGNORED):
            raise TypeError(f"from_config of K3 has no option {', '.join(unknown)}")
        network = _empty(cls, config, dtype, None, ops)
        network.init_weights()
        return network


def _empty(
    kind: type[KimiK3AutoModel],
    config: KimiK3AutoConfig | KimiK3TextAutoConfig,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    ops: Mapping[str, str] | None,
) -> KimiK3AutoModel:
    native = config.native()
    wanted = native.dtype if dtype in (None, "auto") else dtype
    resolved = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    network = kind.empty(native, dtype=resolved, device="cpu" if device is None else device, ops=ops)
    if not isinstance(network, KimiK3AutoModel):
        raise TypeError(f"{kind.__name__}.empty built a {type(network).__name__}")
    return network
