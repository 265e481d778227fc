"""Text records become documents whose counted tokens read as what is to be predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3convert.errors import UsageError
from k3convert.training.data.json_lines import BadRecords
from k3convert.training.data.text_lines import TextLines
from k3model.tokenizer import KimiTokenizer

from .conftest import write_lines

RECORDS = [
    {"ctx": "A man is on a roof. He", "endings": ["sings.", " sleeps.", "pulls up tiles.", "flies."], "label": "2"},
    {"ctx": "The dog", "endings": ["is cooked.", "barks."], "label": 1},
    {"text": "the and of"},
]


def test_a_hellaswag_record_reads_as_its_context_and_its_right_ending(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    source = TextLines(write_lines(tmp_path / "x.jsonl", RECORDS), tokenizer)

    texts = [tokenizer.decode(source.document(index).input_ids.tolist()) for index in range(len(source))]

    assert texts == [
        "A man is on a roof. He pulls up tiles.[EOS]",
        "The dog barks.[EOS]",
        "the and of[EOS]",
    ]
    assert [source.num_tokens(index) for index in range(3)] == [
        len(source.document(index).input_ids) for index in range(3)
    ]


def test_loss_on_the_ending_counts_the_ending_and_its_end(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    source = TextLines(write_lines(tmp_path / "x.jsonl", RECORDS), tokenizer, counts_context=False)

    counted = [source.document(index).labels for index in range(3)]

    assert [tokenizer.decode(labels[labels != -100].tolist()) for labels in counted] == [
        " pulls up tiles.[EOS]",
        " barks.[EOS]",
        "the and of[EOS]",
    ]


def test_special_tokens_written_in_a_text_are_text(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    source = TextLines(write_lines(tmp_path / "x.jsonl", [{"text": "<|media_pad|>"}]), tokenizer)

    ids = source.document(0).input_ids.tolist()

    assert tokenizer.special_tokens["<|media_pad|>"] not in ids


def test_all_wrong_records_are_listed_with_their_lines(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    wrong = [
        RECORDS[0] | {"label": ""},
        RECORDS[0],
        RECORDS[0] | {"label": 4},
        {"ctx": "x"},
        RECORDS[0] | {"label": True},
    ]
    path = write_lines(tmp_path / "x.jsonl", wrong)

    with pytest.raises(BadRecords) as caught:
        TextLines(path, tokenizer)

    assert [offender.partition(":")[0] for offender in caught.value.offenders] == [
        "line 1",
        "line 3",
        "line 4",
        "line 5",
    ]


@pytest.mark.parametrize("content", ["{", "[1]", '{"text": "a", "text": "b"}', "\udcff", ""])
def test_a_file_that_is_no_json_lines_is_bad_input(tokenizer: KimiTokenizer, tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(BadRecords):
        TextLines(path, tokenizer)


def test_the_limit_reads_the_first_records_alone(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*RECORDS, "no record"])

    assert len(TextLines(path, tokenizer, limit=2)) == 2


def test_a_missing_file_is_named(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        TextLines(tmp_path / "none.jsonl", tokenizer)
