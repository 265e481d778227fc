"""Conversations become documents: images expanded, the assistant's words counted, what does not fit refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import PathEscape
from k3convert.training.data.conversations import Conversations, check_placeholders
from k3convert.training.data.json_lines import BadRecords
from k3model.tokenizer import KimiTokenizer
from k3model.vision.image_processing import ImageProcessor

from .conftest import write_lines


def conversation(*images: str, answer: str = "a red dog", question: str = "what is it") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def opened(path: Path, pictures: Path, tokenizer: KimiTokenizer, **options: Any) -> Conversations:
    return Conversations(path, pictures, tokenizer, ImageProcessor(), **options)


def test_an_image_has_a_placeholder_for_every_token_it_becomes(
    tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [conversation("c.png", "b.png"), conversation("a.png")])

    source = opened(path, pictures, tokenizer)
    documents = [source.document(0), source.document(1)]

    placeholder = tokenizer.special_tokens["<|media_pad|>"]
    assert [int((document.input_ids == placeholder).sum()) for document in documents] == [6 + 2, 1]
    assert documents[0].grid_thws is not None
    assert documents[0].grid_thws.tolist() == [[1, 6, 4], [1, 2, 4]]
    assert documents[0].pixel_values is not None
    assert documents[0].pixel_values.shape == (24 + 8, 3, 14, 14)
    assert source.num_tokens(0) == len(documents[0].input_ids)


def test_the_assistant_alone_is_counted(tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path) -> None:
    source = opened(write_lines(tmp_path / "x.jsonl", [conversation("a.png")]), pictures, tokenizer)

    labels = source.document(0).labels

    counted = tokenizer.decode(labels[labels != -100].tolist())
    assert counted == "<|open|>response<|sep|>a red dog<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_placeholders_in_the_text_of_a_user_are_text(tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path) -> None:
    record = conversation("a.png", question="say <|media_pad|>")

    source = opened(write_lines(tmp_path / "x.jsonl", [record]), pictures, tokenizer)

    placeholder = tokenizer.special_tokens["<|media_pad|>"]
    assert int((source.document(0).input_ids == placeholder).sum()) == 1


def test_images_that_changed_since_they_were_measured_are_refused(
    tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path
) -> None:
    source = opened(write_lines(tmp_path / "x.jsonl", [conversation("a.png")]), pictures, tokenizer)
    (pictures / "a.png").write_bytes((pictures / "b.png").read_bytes())

    with pytest.raises(ValueError, match="1 placeholders, but the images become 2 tokens"):
        source.document(0)


def test_a_count_of_placeholders_that_fits_passes() -> None:
    check_placeholders(num_placeholders=4, num_features=4)


def test_everything_that_is_wrong_is_listed(tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path) -> None:
    (pictures / "text.png").write_text("no image")
    records = [
        conversation("none.png"),
        conversation("a.png"),
        {"text": "x"},
        conversation("text.png"),
        {"messages": [{"role": "judge", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]

    with pytest.raises(BadRecords) as caught:
        opened(write_lines(tmp_path / "x.jsonl", records), pictures, tokenizer)

    assert [offender.partition(":")[0] for offender in caught.value.offenders] == [
        "line 1",
        "line 3",
        "line 4",
        "line 5",
        "line 6",
    ]


def test_names_that_leave_the_folder_are_refused(tokenizer: KimiTokenizer, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes((pictures / "a.png").read_bytes())
    (pictures / "link.png").symlink_to(tmp_path / "secret.png")
    records = [conversation("../secret.png"), conversation(str(tmp_path / "secret.png")), conversation("link.png")]

    with pytest.raises(PathEscape) as caught:
        opened(write_lines(tmp_path / "x.jsonl", records), pictures, tokenizer)

    assert len(caught.value.offenders) == 3
