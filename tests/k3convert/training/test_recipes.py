"""Recipes: what is shipped reads, what is wrong is named, and values can be set one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k3convert.errors import UsageError
from k3convert.training.recipe import Compute, FrozenPart, Recipe
from k3convert.training.recipe_reading import BadRecipe, load_recipe, parse_recipe, recipe_yaml, shipped

SMALLEST = "description: d\ndata: {kind: synthetic}\n"
# Their rows are registered with the kernels; until then the recipe names what is missing and does not run.
WAITING_FOR_KERNELS = {"multimodal_coco_ascend"}


def faults(text: str, *settings: str) -> tuple[str, ...]:
    with pytest.raises(BadRecipe) as caught:
        parse_recipe(text, settings)
    return caught.value.offenders


def test_five_recipes_are_shipped() -> None:
    assert list(shipped()) == [
        "gpu_layer_slice",
        "multimodal_coco",
        "multimodal_coco_ascend",
        "text_hellaswag",
        "tiny_cpu",
    ]


@pytest.mark.parametrize("name", sorted(set(shipped()) - WAITING_FOR_KERNELS))
def test_a_shipped_recipe_reads_and_survives_being_written(name: str) -> None:
    recipe = load_recipe(name)

    assert parse_recipe(recipe_yaml(recipe)) == recipe


@pytest.mark.parametrize("name", sorted(WAITING_FOR_KERNELS))
def test_a_recipe_for_absent_kernels_is_refused_for_these_alone(name: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        load_recipe(name)

    assert caught.value.offenders
    assert all("has no impl" in offender for offender in caught.value.offenders)


def test_every_wrong_field_is_listed_with_its_path_and_value() -> None:
    found = faults(
        SMALLEST,
        "optimizer.learning_rate=fast",
        "batch.micro_rows=0",
        "training.freeze=[vision, head]",
        "compute=fp8",
        "layout=tp=2",
        "saving.evry=5",
        "ops.moe_implementation=magic",
        "ops.mo_implementation=eager",
    )

    assert len(found) == 9
    assert any("optimizer.learning_rate" in fault and "'fast'" in fault for fault in found)
    assert any("training.freeze.1" in fault and "'head'" in fault for fault in found)
    assert any(fault == "saving.evry: no such field, got 5" for fault in found)
    assert any("moe_experts/situ has no impl 'magic'" in fault for fault in found)
    assert any("no field mo_implementation" in fault for fault in found)
    assert any("'tp=2'" in fault for fault in found)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("batch.packing=1", "a number is no truth value"),
        ("training.steps=4.0", "a fraction is no count"),
        ("training.steps='4'", "a text is no number"),
        ("optimizer.learning_rate=.nan", "no rate at all"),
        ("data.kind=files", "no such kind"),
        ("data.path=x.jsonl", "synthetic data have no file"),
    ],
)
def test_values_of_another_type_are_refused(setting: str, why: str) -> None:
    assert len(faults(SMALLEST, setting)) == 1, why


def test_rows_that_do_not_divide_name_all_three_numbers() -> None:
    (fault,) = faults(SMALLEST, "batch={global_rows: 6, micro_rows: 2}", "layout=fsdp=2")

    assert "6" in fault
    assert "micro_rows 2" in fault
    assert "2 parts" in fault


def test_settings_replace_single_values() -> None:
    recipe = parse_recipe(
        SMALLEST, ["optimizer.learning_rate=1e-3", "training.freeze=[experts]", "compute=fp32", "model.checkpoint=x"]
    )

    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.training.freeze == (FrozenPart.EXPERTS,)
    assert recipe.compute is Compute.FP32
    assert recipe.model.checkpoint == "x"


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-05", ".00001"])
def test_a_rate_in_exponents_is_a_number(text: str) -> None:
    recipe = parse_recipe(f"{SMALLEST}optimizer: {{learning_rate: {text}}}\n")

    assert recipe.optimizer.learning_rate == 1e-5


@pytest.mark.parametrize("setting", ["training.steps", "=3", "training..steps=3", "description.x=1"])
def test_a_setting_that_names_nothing_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_recipe(SMALLEST, [setting])


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "a: 1\na: 2", "!!python/object:os.system x", "- a\nb: c", ""])
def test_text_that_is_no_recipe_is_bad_input(text: str) -> None:
    with pytest.raises(BadRecipe):
        parse_recipe(text)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("tiny")

    assert "tiny_cpu" in str(caught.value.hint)


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALLEST)

    assert load_recipe(str(path)) == Recipe.model_validate({"description": "d", "data": {"kind": "synthetic"}})


def test_reading_recipes_needs_no_torch() -> None:
    code = "import sys; from k3convert.training.recipe_reading import load_recipe; load_recipe('tiny_cpu')"

    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False)

    assert done.returncode == 0
