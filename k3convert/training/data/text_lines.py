"""Text records: HellaSwag's, or plain ``{"text": ...}``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from k3convert.training.data.document import IGNORE_INDEX, Document
from k3convert.training.data.json_lines import read_objects, refuse
from k3model.tokenizer import KimiTokenizer

END_OF_TEXT = "[EOS]"


class TextLines:
    """Every record as one document, ended by ``[EOS]``.

    A HellaSwag record is its context and its right ending. With ``counts_context`` false only the ending and the token
    that ends it are counted.

    Raises:
        UsageError: there is no such file.
        BadRecords: records are neither of the two kinds, all of them.
    """

    def __init__(
        self, path: Path, tokenizer: KimiTokenizer, *, counts_context: bool = True, limit: int | None = None
    ) -> None:
        self._ids: list[list[int]] = []
        self._num_context: list[int] = []
        faults: list[str] = []
        end = tokenizer.special_tokens[END_OF_TEXT]
        num_records = 0
        for number, record in read_objects(path, limit):
            num_records += 1
            try:
                context, ending = context_and_ending(record)
            except ValueError as error:
                faults.append(f"line {number}: {error}")
                continue
            context_ids = tokenizer.encode(context)
            self._ids.append([*context_ids, *tokenizer.encode(ending), end])
            self._num_context.append(0 if counts_context else len(context_ids))
        refuse(path, faults, num_records)

    def __len__(self) -> int:
        return len(self._ids)

    def num_tokens(self, index: int) -> int:
        """Its tokens and the one that ends it."""
        return len(self._ids[index])

    def document(self, index: int) -> Document:
        """One record."""
        input_ids = torch.tensor(self._ids[index])
        labels = input_ids.clone()
        labels[: self._num_context[index]] = IGNORE_INDEX
        return Document(input_ids, labels)


def context_and_ending(record: Mapping[str, Any]) -> tuple[str, str]:
    """What is read first and what is to be predicted; a plain text has no context.

    Raises:
        ValueError: the record is of neither kind.
    """
    text = record.get("text")
    if isinstance(text, str) and text:
        return "", text
    context, endings, label = record.get("ctx"), record.get("endings"), record.get("label")
    if not isinstance(context, str) or not isinstance(endings, list):
        raise ValueError("neither ctx and endings nor a text")
    # Published as a number and as its text; the test split has none.
    position = int(label) if type(label) is int or (isinstance(label, str) and label.isdecimal()) else -1
    if not 0 <= position < len(endings) or not isinstance(endings[position], str):
        raise ValueError(f"label {label!r} names none of its {len(endings)} endings")
    return context, f" {endings[position].strip()}"
