"""All names of the release, through the profile and back."""

from __future__ import annotations

from collections import Counter

import pytest

from k3convert.mapping import K3, Slot
from k3convert.mapping.roots import BARE
from k3model.census import TensorSpec, census
from k3model.config import KimiK3Config
from k3model.presets import release_config_dict

NUM_TENSORS, NUM_EXPERT_TENSORS = 497_220, 494_592
NUM_MOE_LAYERS, NUM_EXPERTS = 92, 896


@pytest.fixture(scope="module")
def specs() -> list[TensorSpec]:
    return list(census(KimiK3Config.from_dict(release_config_dict()), packed=True))


@pytest.fixture(scope="module")
def slots(specs: list[TensorSpec]) -> list[Slot]:
    return [K3.to_fqn(spec.name) for spec in specs]


def test_every_released_name_comes_back(specs: list[TensorSpec], slots: list[Slot]) -> None:
    back = [K3.to_hf(*slot) for slot in slots]

    assert len(specs) == NUM_TENSORS
    assert back == [spec.name for spec in specs]


def test_no_two_released_names_share_a_place(slots: list[Slot]) -> None:
    assert len(set(slots)) == NUM_TENSORS


def test_the_experts_fill_six_stacks_a_layer_in_the_order_of_their_ids(
    specs: list[TensorSpec], slots: list[Slot]
) -> None:
    experts = [(spec, slot) for spec, slot in zip(specs, slots, strict=True) if spec.expert_index is not None]
    stacks = Counter(slot.fqn for _, slot in experts)

    assert len(experts) == NUM_EXPERT_TENSORS
    assert len(stacks) == 6 * NUM_MOE_LAYERS
    assert set(stacks.values()) == {NUM_EXPERTS}
    assert all(slot.expert == spec.expert_index for spec, slot in experts)
    assert all(K3.is_stack(fqn) for fqn in stacks)


def test_what_is_no_expert_keeps_its_name(specs: list[TensorSpec], slots: list[Slot]) -> None:
    others = [(spec, slot) for spec, slot in zip(specs, slots, strict=True) if spec.expert_index is None]

    assert len(others) == NUM_TENSORS - NUM_EXPERT_TENSORS
    assert all(slot == Slot(spec.name, None) for spec, slot in others)
    assert not any(K3.is_stack(slot.fqn) for _, slot in others)


def test_no_stored_name_is_that_of_a_holder(slots: list[Slot]) -> None:
    fqns = {slot.fqn for slot in slots}

    assert all(K3.without_holder(fqn) == fqn for fqn in fqns)
    assert not any(".decay." in fqn for fqn in fqns)


def test_plain_experts_fill_three_stacks_a_layer() -> None:
    plain = census(KimiK3Config.from_dict(release_config_dict()).with_num_layers(3), packed=False)

    stacks = Counter(K3.to_fqn(spec.name).fqn for spec in plain if spec.expert_index is not None)

    assert sorted(stacks) == [
        f"language_model.model.layers.{layer}.block_sparse_moe.experts.{matrix}"
        for layer in (1, 2)
        for matrix in ("w1", "w2", "w3")
    ]
    assert set(stacks.values()) == {NUM_EXPERTS}


def test_the_bare_root_is_a_bijection_too(specs: list[TensorSpec]) -> None:
    bare = [BARE.from_canonical(spec.name) for spec in specs]

    assert len(set(bare)) == NUM_TENSORS
    assert not any(name.startswith("language_model.") for name in bare)
    assert [BARE.to_canonical(name) for name in bare] == [spec.name for spec in specs]
