"""Networks for the tests: the ones other implementations gave answers for, and small ones of every mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3kernels import K3Op
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import tiny_config_dict

EXPERTS = ".block_sparse_moe.experts."


def native_state(files: dict[str, Tensor], config: KimiK3Config) -> dict[str, Tensor]:
    """The tensors of an HF file under the network's names: experts decoded and stacked, A_log without its padding."""
    state: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    decode = K3Op("mxfp4", "dequantize", "eager")
    for name, tensor in files.items():
        if EXPERTS in name:
            prefix, rest = name.split(EXPERTS)
            number, matrix, leaf = rest.split(".", 2)
            if leaf == "weight_scale":
                continue
            weight = decode(tensor, files[name.replace("_packed", "_scale")]) if leaf == "weight_packed" else tensor
            stacks.setdefault(f"{prefix}{EXPERTS}{matrix}", {})[int(number)] = weight
        elif name.endswith(("A_log", "dt_bias")):
            holder, leaf = name.rsplit(".", 1)
            heads = config.text.kda.num_heads if config.text.kda else 0
            state[f"{holder}.decay.{leaf}"] = tensor[:heads] if leaf == "A_log" else tensor
        else:
            state[name] = tensor
    state |= {name: torch.stack([stack[e] for e in sorted(stack)]) for name, stack in stacks.items()}
    return state


@pytest.fixture(scope="session")
def reference_network(reference_fixtures: Path) -> Callable[..., KimiK3ForConditionalGeneration]:
    """Builds the network of a reference folder, with its weights, in a dtype."""

    def build(name: str, dtype: torch.dtype = torch.float32) -> KimiK3ForConditionalGeneration:
        folder = reference_fixtures / name
        config = KimiK3Config.from_dict(json.loads((folder / "config.json").read_text()))
        network = KimiK3ForConditionalGeneration.empty(config, dtype=dtype)
        network.load_state_dict(native_state(load_file(folder / "model.safetensors"), config))
        return network

    return build


@pytest.fixture
def tiny_network() -> Callable[..., KimiK3ForConditionalGeneration]:
    """Builds a network of the tiny preset with random weights; keyword arguments change fields of its text block."""

    def build(
        *, vision: bool = True, num_layers: int = 5, seed: int = 0, linear: dict[str, Any] | None = None, **fields: Any
    ) -> KimiK3ForConditionalGeneration:
        raw = tiny_config_dict()
        raw["text_config"] |= fields
        if linear is not None:
            raw["text_config"]["linear_attn_config"] |= linear
        if not vision:
            raw["vision_config"] = None
        torch.manual_seed(seed)
        return KimiK3ForConditionalGeneration.from_config(KimiK3Config.from_dict(raw).with_num_layers(num_layers))

    return build
