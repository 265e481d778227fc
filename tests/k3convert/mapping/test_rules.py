"""Mapping rules: each is invertible, and no two names meet."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3convert.mapping import K3, PROFILES, Profile, Rename, Slot, Stack
from k3convert.mapping.roots import BARE, RELEASED, ROOTS, Root, detect_root

RULES = [(profile, rule) for profile in PROFILES.values() for rule in profile.rules]
HOLDERS = [(profile, holder) for profile in PROFILES.values() for holder in profile.holders]
PREFIX = "language_model.model.layers."
NUMBERS = st.sampled_from(["0", "7", "07", "00", "12", "٣", "²", "-1", "x", ""])
LEAVES = st.sampled_from(["weight", "weight_packed", "weight_scale", "bias", "weight\n", ""])
MATRICES = st.sampled_from(["w1", "w3", "9", "gate_proj", "é", ""])


def filled(template: str, **fields: object) -> str:
    return template.format(**{"n": 17, "e": 895, "w": "w3"} | fields)


@pytest.mark.parametrize(("profile", "rule"), RULES)
def test_every_rule_is_invertible(profile: Profile, rule: Rename | Stack) -> None:
    hf_name = filled(rule.hf)

    slot = rule.to_fqn(hf_name)

    assert slot is not None
    assert rule.to_hf(slot.fqn, slot.expert) == hf_name
    assert profile.to_hf(*profile.to_fqn(hf_name)) == hf_name


@pytest.mark.parametrize(("_profile", "rule"), RULES)
@pytest.mark.parametrize("number", ["017", "00", "٣", "-1", "1.0", "", "1 "])
def test_a_number_has_one_spelling(_profile: Profile, rule: Rename | Stack, number: str) -> None:
    """``007`` and ``7`` are two names; a rule that took both would not be invertible."""
    assert rule.to_fqn(filled(rule.hf, n=number)) is None
    assert rule.to_fqn(filled(rule.hf, e=number)) is None


@pytest.mark.parametrize(("_profile", "rule"), RULES)
def test_a_rule_is_about_whole_names_only(_profile: Profile, rule: Rename | Stack) -> None:
    name = filled(rule.hf)

    assert rule.to_fqn("x" + name) is None
    assert rule.to_fqn(name + "x") is None
    assert rule.to_fqn(name + "\n") is None
    assert rule.to_fqn(name.replace(".", "_", 1)) is None


@given(NUMBERS, NUMBERS, MATRICES, LEAVES)
def test_every_name_comes_back_from_its_slot(layer: str, expert: str, matrix: str, leaf: str) -> None:
    """Whether a rule is about it or it keeps its name."""
    name = f"{PREFIX}{layer}.block_sparse_moe.experts.{expert}.{matrix}.{leaf}"

    assert K3.to_hf(*K3.to_fqn(name)) == name


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["w1", "w2", "w3"]),
    st.sampled_from(["weight_packed", "weight_scale", "weight"]),
)  # fmt: skip
def test_an_expert_of_any_number_has_its_place_in_the_stack(layer: int, expert: int, matrix: str, leaf: str) -> None:
    name = f"{PREFIX}{layer}.block_sparse_moe.experts.{expert}.{matrix}.{leaf}"

    slot = K3.to_fqn(name)

    tail = "" if leaf == "weight" else f".{leaf}"
    assert slot == Slot(f"{PREFIX}{layer}.block_sparse_moe.experts.{matrix}{tail}", expert)
    assert K3.is_stack(slot.fqn)
    assert K3.to_hf(*slot) == name


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}3.self_attn.q_proj.weight",
        f"{PREFIX}3.self_attn.A_log",
        f"{PREFIX}3.block_sparse_moe.shared_experts.up_proj.weight",
        f"{PREFIX}3.block_sparse_moe.gate.weight",
        "language_model.lm_head.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    ],
)
def test_a_name_outside_the_experts_keeps_its_name(name: str) -> None:
    assert K3.to_fqn(name) == Slot(name, None)
    assert K3.to_hf(name) == name
    assert not K3.is_stack(name)


@pytest.mark.parametrize(("profile", "holder"), HOLDERS)
def test_a_holder_of_the_network_is_never_a_stored_name(profile: Profile, holder: Rename) -> None:
    stored, in_network = filled(holder.hf), filled(holder.fqn)

    assert profile.without_holder(in_network) == stored
    assert profile.without_holder(stored) == stored
    assert profile.to_hf(in_network) == stored
    assert profile.to_fqn(stored).fqn == stored


def test_an_expert_of_what_is_no_stack_is_an_error() -> None:
    with pytest.raises(KeyError, match="no stack of profile k3"):
        K3.to_hf(f"{PREFIX}3.self_attn.q_proj.weight", 4)


def test_profiles_are_found_by_their_names() -> None:
    assert {name: profile.name for name, profile in PROFILES.items()} == {name: name for name in PROFILES}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
@pytest.mark.parametrize(
    "name", ["language_model.model.layers.0.x", "language_model.lm_head.weight", "vision_tower.x", "mm_projector.y"]
)
def test_a_root_is_taken_off_and_put_back(root: Root, name: str) -> None:
    in_file = root.from_canonical(name)

    assert root.to_canonical(in_file) == name
    assert in_file == (name.removeprefix("language_model.") if root is BARE else name)


def test_a_root_is_told_from_the_text_towers_names() -> None:
    assert detect_root(["vision_tower.x", "language_model.model.norm.weight"]) is RELEASED
    assert detect_root(["mm_projector.y", "model.norm.weight", "lm_head.weight"]) is BARE


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["language_model.lm_head.weight", "model.norm.weight", "model.x"], "1 names begin with language_model. and 2"),
        (["vision_tower.x"], "no name begins with"),
        ([], "no name begins with"),
    ],
)
def test_no_root_or_two_is_an_error_with_examples(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        detect_root(names)
