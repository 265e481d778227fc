"""Planted faults: each is caught, and found where it was planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3convert.errors import UsageError
from k3convert.parity.cells import parse_cell
from k3convert.parity.faults import NETWORK_FAULTS
from k3convert.parity.selftest import fault_names, selftest
from k3convert.parity.stored_faults import STORED_FAULTS, find_refusal


@pytest.mark.parametrize("name", list(STORED_FAULTS))
def test_a_damaged_checkpoint_is_refused_by_the_right_name(name: str, small_source: Path, tmp_path: Path) -> None:
    is_refused, is_named, said = find_refusal(STORED_FAULTS[name], small_source, tmp_path)

    assert is_refused
    assert is_named, said


def test_an_undamaged_checkpoint_is_not_refused(small_source: Path, tmp_path: Path) -> None:
    harmless = STORED_FAULTS["cut-shard"]

    found = find_refusal(type(harmless)("nothing is done", lambda folder: None, harmless.names), small_source, tmp_path)

    assert found[0] is False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_fault_is_caught_and_localised_and_the_control_is_not_accused() -> None:
    report = selftest()

    missed = {fault.name: fault.found for fault in report.faults if not fault.passed}
    assert report.control_passed
    assert missed == {}
    assert len(report.faults) == len(fault_names())


def test_every_trap_of_the_field_has_a_fault() -> None:
    traps = {
        "swapped-nibbles", "swapped-w1-w3", "transposed-w2", "decay-tail", "missing-expert", "twofold-expert",
        "cut-scale", "permuted-experts", "bf16-decay", "dropped-correction-bias", "unsummed-sp-gradient",
        "doubled-sp-gradient", "router-weight-before-down", "mean-over-ranks", "lost-shared-expert",
        "stale-metadata", "exchanged-layer-types", "latent-norm-eps", "cut-shard",
    }  # fmt: skip

    assert traps <= set(fault_names())


def test_cells_of_faults_can_be_read() -> None:
    assert all(parse_cell(fault.cell) for fault in NETWORK_FAULTS.values())


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no-such-fault") as refused:
        selftest(["no-such-fault"])

    assert "swapped-nibbles" in str(refused.value.hint)
