"""The network against another implementation of K3, run in float32 on a GPU: logits, layers, losses, gradients.

Tolerances: the other side is an independent float32 run with other kernels. Its distance from a float64 run of this
network is 3e-5 at the logits; 1e-4 leaves room for as much again on this side. Gradients pass all layers twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3model.network import K3Output, KimiK3ForConditionalGeneration

OUTPUT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 5e-3
USUAL_GRADIENT_TOLERANCE = 1e-3
# A gradient of this norm is rounding noise; its entries are compared as they are.
NEGLIGIBLE_NORM = 1e-7
NEGLIGIBLE_ENTRY = 1e-6
NUM_LAYERS = 9
A_LOG_LENGTH = 128


@dataclass
class Case:
    """A run of the network beside the answers it has to give."""

    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    outputs: dict[str, Tensor]
    text: K3Output
    gradients: dict[str, Tensor]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.double()).norm() / want.double().norm())


def hf_gradients(network: KimiK3ForConditionalGeneration) -> dict[str, Tensor]:
    """Gradients under the names and in the shapes of the files."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if parameter.grad is None:
            continue
        if ".experts." in name:
            prefix, matrix = name.rsplit(".", 1)
            gradients |= {f"{prefix}.{e}.{matrix}.weight": grad for e, grad in enumerate(parameter.grad)}
        elif name.endswith(".decay.A_log"):
            padding = A_LOG_LENGTH - parameter.numel()
            gradients[name.replace(".decay.", ".")] = torch.nn.functional.pad(parameter.grad, (0, padding))
        else:
            gradients[name.replace(".decay.", ".")] = parameter.grad
    return gradients


@pytest.fixture(scope="module")
def case(reference_fixtures: Path, reference_network: Callable[..., KimiK3ForConditionalGeneration]) -> Case:
    folder = reference_fixtures / "automodel_tiny"
    inputs = load_file(folder / "inputs.safetensors")
    network = reference_network("automodel_tiny").train()
    outputs: dict[str, Tensor] = {}
    for number, layer in network.language_model.model.layers.items():
        for name, module in (("layer", layer), ("attn", layer.self_attn), ("mlp", layer.feed_forward)):

            def keep(
                _module: object, _args: object, out: Tensor | tuple[Tensor], key: str = f"{name}.{number}"
            ) -> None:
                outputs[key] = (out[0] if isinstance(out, tuple) else out).detach()

            module.register_forward_hook(keep)
    text = network(inputs["input_ids"], labels=inputs["labels"])
    assert text.loss is not None
    text.loss.backward()
    return Case(inputs, load_file(folder / "expected.fp32.safetensors"), dict(outputs), text, hf_gradients(network))


def test_text_logits_and_loss(case: Case) -> None:
    assert case.text.logits is not None
    assert case.text.loss is not None
    for name in ("logits", "train_logits"):
        assert relative(case.text.logits, case.expected[name]) <= OUTPUT_TOLERANCE
        assert torch.equal(case.text.logits.argmax(-1), case.expected[name].argmax(-1))
    assert case.text.loss.item() == pytest.approx(float(case.expected["train_loss"]), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", ["layer", "attn", "mlp"])
def test_e10_every_layers_output(case: Case, name: str) -> None:
    errors = {
        layer: relative(case.outputs[f"{name}.{layer}"], case.expected[f"{name}.{layer}"])
        for layer in range(NUM_LAYERS)
    }

    assert max(errors.values()) <= OUTPUT_TOLERANCE, errors


def test_text_gradients(case: Case) -> None:
    wanted = {name.removeprefix("grad."): g for name, g in case.expected.items() if name.startswith("grad.")}

    errors = compared(case.gradients, wanted)

    assert len(errors) == len(wanted)
    assert max(errors.values()) <= GRADIENT_TOLERANCE, sorted(errors.items(), key=lambda item: -item[1])[:5]
    usual = sum(error <= USUAL_GRADIENT_TOLERANCE for error in errors.values())
    assert usual >= 0.9 * len(errors), f"{usual} of {len(errors)} within {USUAL_GRADIENT_TOLERANCE}"


def compared(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, want in wanted.items():
        if float(want.norm()) <= NEGLIGIBLE_NORM:
            assert float((got[name] - want).abs().max()) <= NEGLIGIBLE_ENTRY, name
            errors[name] = 0.0
        else:
            errors[name] = relative(got[name], want)
    return errors


def test_layer_0_leaves_its_attention_mix_without_a_gradient(case: Case) -> None:
    unused = [name for name in case.gradients if "layers.0.self_attention_res" in name]

    assert unused == []


@torch.no_grad()
def test_padded_logits_and_loss(case: Case, reference_network: Callable[..., KimiK3ForConditionalGeneration]) -> None:
    inputs, expected = case.inputs, case.expected
    mask = inputs["padded_mask"]

    out = reference_network("automodel_tiny")(inputs["padded_ids"], attention_mask=mask, labels=inputs["padded_labels"])

    real = mask.bool()
    assert relative(out.logits[real], expected["padded_logits"][real]) <= OUTPUT_TOLERANCE
    assert torch.equal(out.logits[real].argmax(-1), expected["padded_logits"][real].argmax(-1))
    assert out.loss.item() == pytest.approx(float(expected["padded_loss"]), rel=LOSS_TOLERANCE)


def test_images(case: Case, reference_network: Callable[..., KimiK3ForConditionalGeneration]) -> None:
    inputs, expected = case.inputs, case.expected
    network = reference_network("automodel_tiny")

    features = network.image_features(inputs["mm_pixels"], inputs["mm_grid_thws"])
    out = network(
        inputs["mm_ids"],
        pixel_values=inputs["mm_pixels"],
        grid_thws=inputs["mm_grid_thws"],
        labels=inputs["mm_labels"],
    )
    out.loss.backward()

    assert relative(features.detach(), expected["mm_features"]) <= OUTPUT_TOLERANCE
    assert relative(out.logits.detach(), expected["mm_logits"]) <= OUTPUT_TOLERANCE
    assert torch.equal(out.logits.argmax(-1), expected["mm_logits"].argmax(-1))
    assert out.loss.item() == pytest.approx(float(expected["mm_loss"]), rel=LOSS_TOLERANCE)
    wanted = {name.removeprefix("mm_grad."): g for name, g in expected.items() if name.startswith("mm_grad.")}
    errors = compared(hf_gradients(network), wanted)
    assert len(errors) == 18
    assert max(errors.values()) <= USUAL_GRADIENT_TOLERANCE, errors
