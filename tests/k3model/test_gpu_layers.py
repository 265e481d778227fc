"""One layer of each kind at the released size on a CUDA device: library ops against eager ones, time and memory.

Run with ``pytest -m gpu tests/k3model/test_gpu_layers.py``; every case prints one JSON line. With 896 experts the
layer's weights and gradients are 118 GB, so there is one copy of each: what is compared of the experts' gradients is
a few experts, copied out between the two runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import OpsConfig, using
from k3model.config import KimiK3Config, TextConfig
from k3model.initialisation import initialise
from k3model.presets import release_config_dict
from k3model.text.decoder_layer import DecoderLayer
from k3model.text.documents import Documents
from k3model.text.router import Router

pytestmark = pytest.mark.gpu

TOKENS = 4096
NUM_BLOCKS = 4
KDA_LAYER, MLA_LAYER = 13, 15
SAMPLED_EXPERTS = (0, 7, 31, 63)
LIBRARY = {
    "chunk_kda": "fla",
    "kda_gate": "fla",
    "short_conv": "fla",
    "gated_rms_norm": "fla",
    "attn_res": "fla",
    "moe": "grouped_mm",
    "attn": "sdpa",
}
# The full score matrices of eager attention do not fit beside 118 GB of weights and gradients.
EAGER_BESIDE_896 = {"attn": "sdpa"}

# bf16: every product's operands carry 2 ** -9; a layer rounds about ten times in a row, its backward twice as often.
OUTPUT_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 5e-2


@dataclass
class Run:
    """What one forward and backward pass gave."""

    outputs: dict[str, Tensor]
    forward_s: float
    backward_s: float
    peak_gb: float


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def text_config(num_experts: int) -> TextConfig:
    text = KimiK3Config.from_dict(release_config_dict()).text
    assert text.moe is not None
    return replace(text, moe=replace(text.moe, num_experts=num_experts))


def build(config: TextConfig, layer_index: int, ops: dict[str, str], device: str) -> DecoderLayer:
    with torch.device("meta"), using(OpsConfig.of(ops)):
        layer = DecoderLayer(config, layer_index)
    return layer.to(torch.bfloat16).to_empty(device=device)


def inputs_of(config: TextConfig, tokens: int, device: str) -> list[Tensor]:
    """The running sum and the finished blocks."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, tokens, config.hidden_size)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(1 + NUM_BLOCKS)]


def run(layer: DecoderLayer, inputs: list[Tensor]) -> Run:
    """One pass; experts' gradients are kept for a few experts alone, then all gradients are freed."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = layer(*leaves, documents=Documents())[0]
    torch.cuda.synchronize()
    forwarded = time.perf_counter()
    out.backward(torch.ones_like(out) / out.numel() ** 0.5)
    torch.cuda.synchronize()
    finished = time.perf_counter()
    outputs = {"out": out.detach().clone()}
    for number, leaf in enumerate(leaves):
        assert leaf.grad is not None
        outputs[f"grad.input.{number}"] = leaf.grad
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            sampled = list(SAMPLED_EXPERTS) if ".experts." in name else slice(None)
            outputs[f"grad.{name}"] = parameter.grad[sampled].clone()
        parameter.grad = None
    peak = torch.cuda.max_memory_allocated() / 1e9
    return Run(outputs, forwarded - started, finished - forwarded, peak)


def fix_routing(router: Router, ids: Tensor) -> None:
    """Make the router choose these experts: a near tie must not decide what is compared."""
    router._within_groups = lambda choice: torch.zeros_like(choice).scatter(1, ids, 1.0)  # type: ignore[method-assign]


def compare(config: TextConfig, layer_index: int, eager_ops: dict[str, str], tokens: int) -> dict[str, Any]:
    """Both runs on one set of weights; the errors, times and peaks."""
    layer = build(config, layer_index, eager_ops, "cuda")
    torch.manual_seed(0)
    initialise(layer, config.initializer_range)
    inputs = inputs_of(config, tokens, "cuda")
    routed: list[Tensor] = []
    handle = layer.block_sparse_moe.gate.register_forward_hook(lambda _m, _a, out: routed.append(out[0]))
    wanted = run(layer, inputs)
    handle.remove()
    library = build(config, layer_index, LIBRARY, "meta")
    library.load_state_dict(layer.state_dict(), assign=True)
    fix_routing(library.block_sparse_moe.gate, routed[0])
    run(library, inputs)  # compiles kernels
    got = run(library, inputs)
    errors = {
        name: float((got.outputs[name].double() - want.double()).norm() / want.double().norm())
        for name, want in wanted.outputs.items()
    }
    return {
        "errors": errors,
        "eager": {"forward_s": wanted.forward_s, "backward_s": wanted.backward_s, "peak_gb": wanted.peak_gb},
        "library": {"forward_s": got.forward_s, "backward_s": got.backward_s, "peak_gb": got.peak_gb},
    }


@pytest.mark.parametrize("num_experts", [64, 896])
@pytest.mark.parametrize("layer_index", [KDA_LAYER, MLA_LAYER], ids=["kda", "mla"])
def test_library_ops_equal_eager_ones_at_the_released_size(
    capsys: pytest.CaptureFixture[str], layer_index: int, num_experts: int
) -> None:
    config = text_config(num_experts)
    if problems := OpsConfig.of(LIBRARY).problems("cuda"):
        pytest.skip(f"not run: {'; '.join(problems)}")

    found = compare(config, layer_index, EAGER_BESIDE_896 if num_experts == 896 else {}, TOKENS)

    with capsys.disabled():
        record = {"device": torch.cuda.get_device_name(), "layer": layer_index, "experts": num_experts, **found}
        print("\n" + json.dumps(record), flush=True)
    errors = found["errors"]
    assert errors.pop("out") <= OUTPUT_TOLERANCE
    assert max(errors.values()) <= GRADIENT_TOLERANCE, sorted(errors.items(), key=lambda item: -item[1])[:5]
