"""Digests of buffers and of stacks."""

from __future__ import annotations

import hashlib

import pytest

from k3convert.numerics.digest import ALGORITHM, digest_hex, new, stack_digest


def test_the_algorithm_is_blake3_with_its_published_empty_digest() -> None:
    assert ALGORITHM == "blake3"
    assert new().hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_the_split_into_buffers_does_not_matter() -> None:
    data = bytes(range(256)) * 9

    assert digest_hex(data[:5], memoryview(data)[5:100], bytearray(data[100:])) == digest_hex(data)


def test_a_stack_is_the_digest_of_its_experts_digests_in_the_order_given() -> None:
    first, second = digest_hex(b"expert 0"), digest_hex(b"expert 1")

    assert stack_digest([first, second]) == digest_hex(bytes.fromhex(first), bytes.fromhex(second))
    assert stack_digest([first, second]) != stack_digest([second, first])


def test_a_digest_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expert 1 has 20 bytes, wanted 32"):
        stack_digest([digest_hex(b"expert 0"), hashlib.sha1(b"expert 1").hexdigest()])
