"""Padding and packed documents: nothing leaks, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.text.documents import Documents, find_documents
from k3model.text.language_head import shift_labels

Build = Callable[..., KimiK3ForConditionalGeneration]

LENGTHS = (7, 1, 70, 16)

# float32: a padded or packed batch multiplies matrices of another number of rows, which sums in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 500, (1, length), generator=generator) for length in LENGTHS]


def padded(documents: list[Tensor], side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and labels of the documents as rows."""
    longest = max(LENGTHS)
    ids, mask = torch.full((len(documents), longest), 511), torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        length = document.shape[1]
        place = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids[row, place], mask[row, place] = document[0], 1
    # Labels everywhere, padding too: whoever masks must look at the mask.
    return ids, mask, ids.clone()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_documents_alone(tiny_network: Build, documents: list[Tensor], side: str) -> None:
    network = tiny_network()
    ids, mask, _ = padded(documents, side)

    with torch.no_grad():
        logits = network(ids, attention_mask=mask).logits
        alone = [network(document).logits[0] for document in documents]

    torch.testing.assert_close(logits[mask.bool()], torch.cat(alone), **TOLERANCE)


def test_e09_packed_documents_equal_the_documents_alone(tiny_network: Build, documents: list[Tensor]) -> None:
    network = tiny_network()
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0)

    with torch.no_grad():
        packed = network(torch.cat(documents, dim=1), cu_seqlens=bounds).logits[0]
        alone = [network(document).logits[0] for document in documents]

    torch.testing.assert_close(packed, torch.cat(alone), **TOLERANCE)


def test_the_order_of_packed_documents_changes_nothing(tiny_network: Build, documents: list[Tensor]) -> None:
    network = tiny_network()
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0)
    reversed_bounds = torch.tensor((0, *reversed(LENGTHS))).cumsum(0)

    with torch.no_grad():
        one = network(torch.cat(documents, dim=1), cu_seqlens=bounds).logits[0]
        other = network(torch.cat(documents[::-1], dim=1), cu_seqlens=reversed_bounds).logits[0]

    first = other.split(list(reversed(LENGTHS)))[::-1]
    torch.testing.assert_close(one, torch.cat(first), **TOLERANCE)


def losses_and_gradients(network: KimiK3ForConditionalGeneration, **inputs: Tensor) -> tuple[float, int, Tensor]:
    network.zero_grad()
    out = network(**inputs)
    out.loss.backward()
    gradient = network.language_model.model.layers["0"].self_attn.q_proj.weight.grad
    return out.loss.item(), int(out.num_labels), gradient.clone()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_packing_have_the_same_loss_and_gradient(
    tiny_network: Build, documents: list[Tensor], side: str
) -> None:
    network = tiny_network().train()
    ids, mask, labels = padded(documents, side)
    row = torch.cat(documents, dim=1)
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0)

    from_rows = losses_and_gradients(network, input_ids=ids, attention_mask=mask, labels=labels)
    from_packed = losses_and_gradients(network, input_ids=row, cu_seqlens=bounds, labels=row.clone())

    assert from_rows[1] == from_packed[1] == sum(LENGTHS) - len(LENGTHS)
    assert from_rows[0] == pytest.approx(from_packed[0], rel=1e-5)
    torch.testing.assert_close(from_rows[2], from_packed[2], rtol=1e-3, atol=1e-7)


def test_an_empty_document_changes_nothing(tiny_network: Build, documents: list[Tensor]) -> None:
    network = tiny_network()
    row = documents[2]

    with torch.no_grad():
        plain = network(row, labels=row, cu_seqlens=torch.tensor([0, 30, 70]))
        empty = network(row, labels=row, cu_seqlens=torch.tensor([0, 0, 30, 30, 70]))

    torch.testing.assert_close(empty.logits, plain.logits, **TOLERANCE)
    assert int(empty.num_labels) == int(plain.num_labels) == 68


def test_e07_bounds_that_do_not_cover_the_row_are_refused(tiny_network: Build, documents: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        tiny_network()(documents[2], cu_seqlens=torch.tensor([0, 69]))


@pytest.mark.parametrize("with_image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("bounds", [[0, 9, 6], [0, -1, 6], [0, 3, -1], [0, 3, 5]])
def test_e07_bounds_are_checked_before_labels_or_images_are_placed_by_them(
    bounds: list[int], with_image: bool, tiny_network: Build
) -> None:
    network = tiny_network()
    ids = torch.arange(6)[None]
    ids[0, 2] = network.config.media_placeholder_token_id
    image = {"pixel_values": torch.zeros(24, 3, 14, 14), "grid_thws": torch.tensor([[1, 4, 6]])} if with_image else {}

    with pytest.raises(ValueError, match=r"cu_seqlens must (go from 0 to 6|not fall)"):
        network(ids, labels=ids, cu_seqlens=torch.tensor(bounds), **image)


def test_f02_a_batch_without_counted_labels_has_zero_loss_and_gradient(tiny_network: Build) -> None:
    network = tiny_network()
    ids = torch.arange(12)[None]

    out = network(ids, labels=torch.full_like(ids, -100))
    out.loss.backward()

    assert out.loss.item() == 0.0
    assert int(out.num_labels) == 0
    assert float(network.language_model.lm_head.weight.grad.abs().max()) == 0.0


def test_the_loss_without_logits_is_the_loss_with_them(tiny_network: Build, documents: list[Tensor]) -> None:
    network = tiny_network()

    full = network(documents[2], labels=documents[2])
    lean = network(documents[2], labels=documents[2], with_logits=False)

    assert lean.logits is None
    assert lean.loss.item() == full.loss.item()
    shifted = torch.nn.functional.cross_entropy(full.logits[0, :-1], documents[2][0, 1:])
    assert full.loss.item() == pytest.approx(shifted.item(), rel=1e-6)


def test_mask_and_bounds_together_are_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)

    with pytest.raises(ValueError, match="give one of them"):
        find_documents(ids, torch.ones_like(ids), torch.tensor([0, 4]))


@pytest.mark.parametrize(
    ("mask", "bounds", "message"),
    [(torch.ones(1, 3), None, "attention_mask must be"), (None, torch.tensor([0, 4]), "the batch has 2")],
)
def test_shapes_that_do_not_fit_are_refused(mask: Tensor | None, bounds: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_documents(torch.zeros(2, 4), mask, bounds)


def test_a_mask_without_padding_is_a_dense_batch() -> None:
    assert find_documents(torch.zeros(2, 4), torch.ones(2, 4), None) == Documents()


def test_unpacking_puts_zeros_where_padding_was() -> None:
    found = find_documents(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]]), None)
    x = torch.arange(1.0, 7.0).view(2, 3, 1)

    packed = found.pack(x)

    assert packed.flatten().tolist() == [2, 3, 4]
    assert found.unpack(packed, 2, 3).flatten().tolist() == [0, 2, 3, 4, 0, 0]


def test_shifted_labels_stop_at_documents() -> None:
    labels = torch.tensor([[10, 11, 12, 13, 14]])

    plain = shift_labels(labels, Documents(), -100)
    packed = shift_labels(labels, Documents(cu_seqlens=torch.tensor([0, 2, 5])), -100)

    assert plain.tolist() == [[11, 12, 13, 14, -100]]
    assert packed.tolist() == [[11, -100, 13, 14, -100]]
