"""Image tokens come into their places: one placeholder an image, or one a token; padding on either side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.vision.placeholders import expand

Build = Callable[..., KimiK3ForConditionalGeneration]

P = 505  # the tiny preset's placeholder


def ids_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def layout(ids: Tensor, num_image_tokens: list[int], mask: Tensor | None = None) -> list[list[int]]:
    """The new batch as numbers: text tokens as they are, image token n as -(n + 1), padding as 0."""
    expansion = expand(ids, P, num_image_tokens, mask, None)
    flat = torch.zeros(expansion.batch * expansion.length, dtype=torch.long)
    flat[expansion.text_to] = ids.flatten()[expansion.text_from]
    flat[expansion.image_to] = -torch.arange(1, sum(num_image_tokens) + 1)
    if expansion.attention_mask is not None:
        flat[expansion.attention_mask.flatten() == 0] = 0
    return flat.view(expansion.batch, expansion.length).tolist()


@pytest.mark.parametrize(
    ("rows", "tokens", "wanted"),
    [
        ([[7, P, 8]], [3], [[7, -1, -2, -3, 8]]),
        ([[P, 7, P]], [2, 1], [[-1, -2, 7, -3]]),
        ([[P, P]], [2, 3], [[-1, -2, -3, -4, -5]]),
        ([[7, P, P, P, 8]], [3], [[7, -1, -2, -3, 8]]),
        ([[P, P, 7, P]], [2, 1], [[-1, -2, 7, -3]]),
        ([[7, 8], [P, 9]], [2], [[7, 8, 0], [-1, -2, 9]]),
        ([[P, 7, 8], [P, P, 9]], [3, 2], [[-1, -2, -3, 7, 8], [-4, -5, 9, 0, 0]]),
    ],
    ids=["one", "two", "adjacent", "repeated", "repeated_two", "row_without", "mixed_rows"],
)
def test_row_91_rows_grow_by_their_images(rows: list[list[int]], tokens: list[int], wanted: list[list[int]]) -> None:
    assert layout(ids_of(*rows), tokens) == wanted


def test_row_91_padding_stays_on_its_side() -> None:
    left = ids_of([0, 0, 7, P], [1, 2, 3, 4])
    right = ids_of([7, P, 0, 0], [1, 2, 3, 4])

    from_left = layout(left, [2], torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    from_right = layout(right, [2], torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))

    assert from_left == [[0, 0, 7, -1, -2], [0, 1, 2, 3, 4]]
    assert from_right == [[7, -1, -2, 0, 0], [1, 2, 3, 4, 0]]


def test_a_placeholder_in_padding_means_nothing() -> None:
    assert layout(ids_of([7, P, P]), [2], torch.tensor([[1, 1, 0]])) == [[7, -1, -2, 0]]


@pytest.mark.parametrize("tokens", [[], [4], [2, 4], [2, 2, 2, 4]])
def test_row_41_a_number_of_placeholders_that_fits_nothing_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=f"3 placeholders in 1 rows match neither {len(tokens)} images"):
        expand(ids_of([P, P, 7, P]), P, tokens, None, None)


def test_labels_of_image_tokens_and_padding_are_not_counted() -> None:
    ids = ids_of([7, P, 8], [1, 2, 3])
    expansion = expand(ids, P, [2], None, None)

    labels = expansion.labels(torch.tensor([[70, 71, 72], [10, 20, 30]]), -100)

    assert labels.tolist() == [[70, -100, -100, 72], [10, 20, 30, -100]]


def test_document_bounds_move_with_the_images() -> None:
    expansion = expand(ids_of([7, P, 8, P]), P, [3, 2], None, torch.tensor([0, 2, 4]))

    assert expansion.cu_seqlens is not None
    assert expansion.cu_seqlens.tolist() == [0, 4, 7]


def images(seed: int = 0) -> dict[str, Tensor]:
    """Two images of 4 x 6 and 2 x 4 patches: 6 and 2 tokens."""
    pixels = torch.randn(4 * 6 + 2 * 4, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "grid_thws": torch.tensor([[1, 4, 6], [1, 2, 4]])}


# float32: another number of rows in a matrix product, another order of sums.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@torch.no_grad()
def test_one_placeholder_and_repeated_ones_give_the_same_logits(tiny_network: Build) -> None:
    network = tiny_network()

    one = network(ids_of([7, P, 8, P, 9]), **images()).logits
    repeated = network(ids_of([7, *[P] * 6, 8, *[P] * 2, 9]), **images()).logits

    assert one.shape == (1, 11, 512)
    torch.testing.assert_close(repeated, one, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_rows_with_images_equals_the_rows_alone(tiny_network: Build, side: str) -> None:
    network = tiny_network()
    short, long = [P, 9], [7, P, 8, 10, 11, 12]
    padding = [511] * 4
    rows = ids_of(long, [*padding, *short] if side == "left" else [*short, *padding])
    mask = (rows != 511).long()
    both = images()

    out = network(rows, attention_mask=mask, labels=rows, **both)

    first = network(ids_of(long), pixel_values=both["pixel_values"][:24], grid_thws=both["grid_thws"][:1]).logits[0]
    second = network(ids_of(short), pixel_values=both["pixel_values"][24:], grid_thws=both["grid_thws"][1:]).logits[0]
    assert out.logits.shape[1] == 11
    torch.testing.assert_close(out.logits[0], first, **TOLERANCE)
    got = out.logits[1, -3:] if side == "left" else out.logits[1, :3]
    torch.testing.assert_close(got, second, **TOLERANCE)
    # Of [7 | 6 tokens | 8 10 11 12] the four after the image count, of [2 tokens | 9] the last.
    assert int(out.num_labels) == 5


@torch.no_grad()
def test_packed_documents_with_images_equal_the_documents_alone(tiny_network: Build) -> None:
    network = tiny_network()
    both = images()

    out = network(ids_of([7, P, 8, P, 9]), cu_seqlens=torch.tensor([0, 3, 5]), labels=ids_of([1, 2, 3, 4, 5]), **both)

    first = network(ids_of([7, P, 8]), pixel_values=both["pixel_values"][:24], grid_thws=both["grid_thws"][:1])
    second = network(ids_of([P, 9]), pixel_values=both["pixel_values"][24:], grid_thws=both["grid_thws"][1:])
    torch.testing.assert_close(out.logits[0], torch.cat((first.logits[0], second.logits[0])), **TOLERANCE)
    assert int(out.num_labels) == 2


def test_images_without_a_tower_or_half_given_are_refused(tiny_network: Build) -> None:
    blind, seeing = tiny_network(vision=False), tiny_network()

    with pytest.raises(ValueError, match="no vision_config"):
        blind(ids_of([7, P]), **images())
    with pytest.raises(ValueError, match="come together"):
        seeing(ids_of([7, P]), pixel_values=images()["pixel_values"])


def test_a_batch_without_images_is_a_batch_of_text(tiny_network: Build) -> None:
    network = tiny_network()
    ids = ids_of([1, 2, 3])
    none = {"pixel_values": torch.zeros(0, 3, 14, 14), "grid_thws": torch.zeros(0, 3, dtype=torch.long)}

    assert torch.equal(network(ids, **none).logits, network(ids).logits)
    with pytest.raises(ValueError, match="1 placeholders"):
        network(ids_of([1, P, 3]), **none)


def test_the_placeholder_is_an_ordinary_token_where_no_images_are_given(tiny_network: Build) -> None:
    assert tiny_network()(ids_of([7, P])).logits.shape == (1, 2, 512)


def test_gradients_reach_the_tower_through_the_text(tiny_network: Build) -> None:
    network = tiny_network()

    network(ids_of([7, P, 8, P, 9]), labels=ids_of([1, 2, 3, 4, 5]), **images()).loss.backward()

    vision = [(name, p) for name, p in network.named_parameters() if not name.startswith("language_model.")]
    assert len(vision) == 18
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for _, p in vision)
