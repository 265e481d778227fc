"""Which implementations a list names, and whether their curves stay together."""

from __future__ import annotations

import pytest

from k3convert.errors import UsageError
from k3convert.training.comparison import judge_envelope, variants
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import parse_recipe
from k3convert.training.verdict import Result

from .builders import steps


def recipe() -> Recipe:
    return parse_recipe("description: d\ndata: {kind: synthetic}\n", ["ops.cross_entropy_implementation=chunk_loss"])


def test_names_stand_for_choices_of_ops() -> None:
    found = variants(recipe(), "eager, recipe,fla,moe=grouped_mm+attn_implementation=sdpa")

    kept = {"cross_entropy_implementation": "chunk_loss"}
    assert {name: one.ops for name, one in found.items() if name != "fla"} == {
        "eager": {},
        "recipe": kept,
        "moe=grouped_mm+attn_implementation=sdpa": kept
        | {"moe_implementation": "grouped_mm", "attn_implementation": "sdpa"},
    }
    assert found["fla"].ops["chunk_kda_implementation"] == "fla"
    assert found["fla"].ops.keys() >= kept.keys()
    assert "moe_implementation" not in found["fla"].ops


@pytest.mark.parametrize(
    ("names", "num_faults"), [("eager,magic,moe=magic,mo=eager", 3), ("eager", 0), ("eager,eager", 0), ("", 0)]
)
def test_names_that_stand_for_nothing_and_single_names_are_refused(names: str, num_faults: int) -> None:
    with pytest.raises(UsageError) as caught:
        variants(recipe(), names)

    assert len(caught.value.offenders) == num_faults


def test_curves_within_the_envelope_at_every_step_pass() -> None:
    runs = {"eager": steps([6.0, 5.0, 4.0]), "near": steps([6.0, 5.2, 4.0]), "far": steps([6.0, 5.0, 4.5])}

    near, far = judge_envelope(runs, 0.05)

    assert (near.name, near.result) == ("near follows eager", Result.PASSED)
    assert far.result is Result.FAILED
    assert "12.50% apart (step 3)" in far.detail
