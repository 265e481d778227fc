"""Which layouts a network can have; nothing is allocated to find out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3convert.layout import IllegalLayout, check_layout, layout_problems, nearest_legal, parse_layout
from k3model.config import KimiK3Config
from k3model.parallel.layout import Layout
from k3model.parallel.stages import max_stages, num_blocks, stage_layers
from k3model.presets import release_config_dict, tiny_config_dict

TINY = KimiK3Config.from_dict(tiny_config_dict())
RELEASED = KimiK3Config.from_dict(release_config_dict())


def refused(text: str, config: KimiK3Config = TINY, **data: Any) -> IllegalLayout:
    with pytest.raises(IllegalLayout) as caught:
        check_layout(parse_layout(text), config, **data)
    return caught.value


@pytest.mark.parametrize("text", ["", "sp=2,ep=2", "ep=2,fsdp=4", "ep=16", "pp=6", "sp=2,ep=2,fsdp=2,pp=2,cp=2"])
def test_layouts_of_the_tiny_network_are_legal(text: str) -> None:
    check_layout(parse_layout(text), TINY, batch=16, sequence=64)


def test_row_34_heads_that_sp_does_not_divide_are_refused() -> None:
    error = refused("sp=4")

    assert error.offenders == ("sp=4 does not divide the 6 heads of the KDA layers",)
    assert error.hint == "the nearest legal layout is sp=2"


@pytest.mark.parametrize("sp", [5, 64, 128])
def test_f03_the_released_heads_refuse_other_divisors(sp: int) -> None:
    assert len(refused(f"sp={sp}", RELEASED).offenders) == 2


def test_f03_a_sequence_of_an_odd_length_is_refused_with_the_padded_length() -> None:
    error = refused("sp=2", sequence=4097)

    assert "4097 tokens" in error.offenders[0]
    assert "padded to 4098" in error.offenders[0]


@pytest.mark.parametrize("ep", [5, 3, 6])
def test_f14_experts_that_ep_does_not_divide_are_refused(ep: int) -> None:
    assert any("896 experts" in offender for offender in refused(f"ep={ep}", RELEASED).offenders)


def test_f14_more_ranks_than_experts_are_refused() -> None:
    error = refused("ep=32")

    assert error.offenders == ("ep=32 does not divide the 16 experts",)
    assert error.hint == "the nearest legal layout is ep=16"


def test_row_26_ep_takes_no_ranks_and_so_must_divide_them() -> None:
    error = refused("ep=4,sp=2")

    assert error.offenders == ("ep=4 does not divide the 2 ranks of a stage (dp x cp x sp)",)
    assert error.hint == "the nearest legal layout is sp=2,ep=2"


def test_f07_each_expert_matrix_is_checked_along_its_own_dim() -> None:
    error = refused("fsdp=64,ep=1")

    assert error.offenders == (
        "the 64 ranks that share the same experts (dp x cp x sp / ep) do not divide the 96 rows of w2",
    )


def test_row_76_more_stages_than_blocks_and_one_are_refused() -> None:
    assert "give (6)" in refused("pp=7").offenders[0]
    assert "give (9)" in refused("pp=10", RELEASED).offenders[0]


def test_f16_a_batch_that_dp_does_not_divide_is_refused() -> None:
    assert refused("fsdp=2", batch=3).offenders == ("the batch has 3 rows, which dp=2 does not divide",)


def test_all_reasons_are_given_at_once() -> None:
    error = refused("sp=5,ep=3,pp=9,fsdp=2", batch=3, sequence=7)

    assert len(error.offenders) == 7


def test_tied_embeddings_stay_on_one_stage() -> None:
    tied = replace(TINY, text=replace(TINY.text, tie_word_embeddings=True))

    assert "one parameter" in refused("pp=2", tied).offenders[0]


def test_experts_without_a_network_of_experts_are_refused() -> None:
    dense = replace(TINY, text=replace(TINY.text, moe=None))

    assert refused("ep=2", dense).offenders == ("ep=2, but the network has no experts",)


degrees = st.integers(min_value=1, max_value=20)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pp=degrees,
    dp=degrees,
    cp=degrees,
    sp=degrees,
    ep=degrees,
    batch=st.none() | st.integers(1, 20),
    sequence=st.none() | st.integers(1, 300),
)
def test_the_nearest_layout_is_legal_and_a_legal_layout_is_its_own(
    pp: int, dp: int, cp: int, sp: int, ep: int, batch: int | None, sequence: int | None
) -> None:
    layout = Layout(pp, dp, cp, sp, ep, shards_parameters=True)

    nearest = nearest_legal(layout, TINY, batch=batch, sequence=sequence)

    assert not layout_problems(nearest, TINY, batch=batch, sequence=sequence)
    if not layout_problems(layout, TINY, batch=batch, sequence=sequence):
        assert nearest == layout


@pytest.mark.parametrize("config", [TINY, RELEASED], ids=["tiny", "released"])
def test_row_76_stages_hold_whole_blocks_in_order(config: KimiK3Config) -> None:
    text = config.text
    block_size = text.attn_res_block_size
    for num_stages in range(1, max_stages(text) + 1):
        stages = stage_layers(text, num_stages)

        assert [layer for stage in stages for layer in stage] == list(range(text.num_hidden_layers))
        assert all(stage.start % block_size == 0 for stage in stages if stage)
        sizes = [-(-len(stage) // block_size) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        assert all(earlier >= later for earlier, later in pairwise(sizes))


def test_row_76_eight_stages_of_the_release_are_its_blocks_and_a_ninth_is_output_only() -> None:
    assert [(stage.start, stage.stop) for stage in stage_layers(RELEASED.text, 8)] == [
        *((start, start + 12) for start in range(0, 84, 12)),
        (84, 93),
    ]
    assert len(stage_layers(RELEASED.text, 9)[-1]) == 0


def test_without_attention_residuals_every_layer_may_be_a_stage() -> None:
    plain = replace(TINY.text, attn_res_block_size=None)

    assert num_blocks(plain) == 13
    assert stage_layers(plain, 2) == (range(7), range(7, 13))
