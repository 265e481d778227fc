"""The batch of a run."""

from __future__ import annotations

import pytest
import torch

from k3convert.errors import UsageError
from k3convert.parity.cells import DataKind
from k3convert.parity.inputs import batch_digest, make_batch, rows_of_rank
from k3model.config import KimiK3Config
from k3model.presets import tiny_config_dict

CONFIG = KimiK3Config.from_dict(tiny_config_dict())
ROWS, TOKENS = 4, 96


@pytest.mark.parametrize("kind", list(DataKind))
def test_the_ranks_of_dp_have_every_row_once_and_in_order(kind: DataKind) -> None:
    _, whole = make_batch(kind, CONFIG, rows=ROWS, tokens=TOKENS, seed=3)

    parts = [part for place in range(2) for part in rows_of_rank(whole, 2, place)]

    assert [part.first_row for part in parts] == ([0, 1, 2, 3] if kind is DataKind.PACKED else [0, 2])
    for name in ("input_ids", "labels", "pixel_values"):
        values = [getattr(micro.batch, name) for micro in whole]
        if values[0] is not None:
            assert torch.equal(torch.cat([getattr(part.batch, name) for part in parts]), torch.cat(values))


def test_ranks_count_different_numbers_of_labels() -> None:
    _, whole = make_batch(DataKind.DENSE, CONFIG, rows=ROWS, tokens=TOKENS, seed=3)

    counts = [int((rows_of_rank(whole, ROWS, place)[0].batch.labels != -100).sum()) for place in range(ROWS)]

    assert len(set(counts)) > 1


def test_images_make_rows_as_long_as_asked() -> None:
    shape, (micro,) = make_batch(DataKind.IMAGE, CONFIG, rows=ROWS, tokens=TOKENS, seed=3)

    num_placeholders = int((micro.batch.input_ids == CONFIG.media_placeholder_token_id).sum())

    assert num_placeholders == ROWS
    assert shape.text_tokens - 1 + 6 == TOKENS  # 4 x 6 patches are 6 tokens


def test_a_row_that_is_too_short_for_its_image_is_refused() -> None:
    with pytest.raises(UsageError, match="a row of 8 tokens"):
        make_batch(DataKind.IMAGE, CONFIG, rows=1, tokens=8, seed=0)


def test_the_digest_follows_the_seed_and_nothing_else() -> None:
    batches = [make_batch(DataKind.PACKED, CONFIG, rows=2, tokens=64, seed=seed)[1] for seed in (1, 1, 2)]

    digests = [batch_digest(batch) for batch in batches]

    assert digests[0] == digests[1] != digests[2]
