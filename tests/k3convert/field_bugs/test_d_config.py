"""Field reports C14 and D1 to D10: configs that shift, misspell or contradict, through the commands that read them.

How each field is read is tested beside the config; here a whole checkpoint stands beside it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadConfig, BadInput, CensusMismatch
from k3convert.planning.inspection import inspect_checkpoint

Change = Callable[[dict[str, Any]], None]
Convert = Callable[..., Any]
EditJson = Callable[[Path, Change], None]
EditTensors = Callable[[Path, Change], None]
Refused = Callable[..., str]


@pytest.fixture
def edit_config(small: Path, edit_json: EditJson) -> Callable[[Change], Path]:
    """Change the small checkpoint's config."""

    def edit(change: Change) -> Path:
        edit_json(small / "config.json", change)
        return small

    return edit


@pytest.fixture
def refused_everywhere(small_dcp: Path, tmp_path: Path, refused_by_hf_to_dcp: Refused) -> Callable[[Path], str]:
    """Demand that inspect, hf-to-dcp and the DCP with this config beside it refuse; what hf-to-dcp said."""

    def check(folder: Path) -> str:
        message = refused_by_hf_to_dcp(folder, BadConfig)
        foreign = Path(shutil.copytree(small_dcp, tmp_path / "foreign"))
        shutil.rmtree(foreign / "k3convert")
        shutil.copyfile(folder / "config.json", foreign / "config.json")
        for path in (folder, foreign):
            with pytest.raises(BadConfig) as caught:
                inspect_checkpoint(path)
            assert all(reason in message for reason in caught.value.offenders)
        with pytest.raises(BadConfig):
            inspect_checkpoint(folder, index_only=True)
        return message

    return check


def text(**changes: Any) -> Change:
    """Change fields of the text block; ``...`` removes one."""

    def change(config: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is ...:
                del config["text_config"][name]
            else:
                config["text_config"][name] = value

    return change


def linear(**changes: Any) -> Change:
    """Change fields of the KDA block; ``...`` removes one."""

    def change(config: dict[str, Any]) -> None:
        text(**changes)({"text_config": config["text_config"]["linear_attn_config"]})

    return change


@pytest.mark.parametrize(
    ("kda", "full", "words"),
    [
        ([0, 1, 2], [3, 4], "[0] are outside 1..5"),
        ([1, 2, 3, 4], [4, 5], "[4] are named twice"),
        ([1, 2], [4, 5], "[3] are in neither"),
        ([1, 2, 3], [4, 5, 6], "[6] are outside 1..5"),
        ([1, 2, 3], ..., "full_attn_layers is missing"),
        (..., [4, 5], "kda_layers is missing"),
        ([1, 2, 3], None, "full_attn_layers is missing"),
        ([1, 2, "3"], [4, 5], "kda_layers"),
        ([1, 2, 2, 3], [4, 5], "[2] are named twice"),
        ([1, 2, 3], [4, 5, -1], "[-1] are outside 1..5"),
    ],
)
def test_d1_layer_lists_that_do_not_cover_the_layers_once_are_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], kda: Any, full: Any, words: str
) -> None:
    folder = edit_config(linear(kda_layers=kda, full_attn_layers=full))

    assert words in refused_everywhere(folder)


def test_d1_zero_based_lists_that_look_whole_do_not_match_the_tensors(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused
) -> None:
    """Read as 0-based and shifted into range, the lists are a partition, but of other layers."""
    folder = edit_config(linear(kda_layers=[1, 2, 5], full_attn_layers=[3, 4]))

    message = refused_by_hf_to_dcp(folder, CensusMismatch)
    report = inspect_checkpoint(folder).census

    assert report is not None
    assert not report.ok
    assert "missing: language_model.model.layers.2.self_attn.kv_b_proj.weight" in message
    assert "unexpected: language_model.model.layers.2.self_attn.A_log" in message
    shared = "language_model.model.layers.2.self_attn.o_proj.weight"
    assert shared not in "\n".join((*report.missing, *report.unexpected))


def test_d1_a_layer_count_that_is_not_the_tensors_is_refused(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused
) -> None:
    def deeper(config: dict[str, Any]) -> None:
        text(num_hidden_layers=6)(config)
        linear(full_attn_layers=[4, 5, 6])(config)

    message = refused_by_hf_to_dcp(edit_config(deeper), CensusMismatch)

    assert "missing: language_model.model.layers.5.input_layernorm.weight" in message
    assert "0 unexpected" in message


@pytest.mark.parametrize("bound", [-5.0, None, ..., -1.5])
def test_d2_either_gate_converts_and_the_file_is_kept_as_it_is(
    edit_config: Callable[[Change], Path], tmp_path: Path, to_dcp: Convert, to_hf: Convert, bound: Any
) -> None:
    folder = edit_config(linear(gate_lower_bound=bound))

    to_dcp(folder, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert (tmp_path / "hf" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("bound", [0.0, 1.0, "-5"])
def test_d2_a_bound_that_is_none_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], bound: Any
) -> None:
    assert "gate_lower_bound" in refused_everywhere(edit_config(linear(gate_lower_bound=bound)))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_d4_a_missing_decay_is_an_error_whatever_the_gate(
    edit_config: Callable[[Change], Path], edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused, bound: float | None
) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".A_log")]:
            del tensors[name]

    folder = edit_config(linear(gate_lower_bound=bound))
    edit_tensors(folder, drop)

    message = refused_by_hf_to_dcp(folder, CensusMismatch)

    assert "3 missing" in message
    assert "missing: language_model.model.layers.0.self_attn.A_log" in message


@pytest.mark.parametrize("value", [False, None, ...])
def test_d5_a_rotary_network_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], value: Any
) -> None:
    assert "mla_use_nope" in refused_everywhere(edit_config(text(mla_use_nope=value)))


def test_d6_a_dropout_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str]
) -> None:
    assert "attention_dropout" in refused_everywhere(edit_config(text(attention_dropout=0.1)))


def test_d7_kda_heads_are_not_taken_from_the_attention(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused
) -> None:
    message = refused_by_hf_to_dcp(edit_config(text(num_attention_heads=8, num_key_value_heads=8)), CensusMismatch)

    assert "layers.3.self_attn.q_b_proj.weight: found [192, 48], wanted [384, 48]" in message
    assert "layers.0.self_attn" not in message


def test_d7_the_attention_is_not_taken_from_the_kda_heads(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused
) -> None:
    message = refused_by_hf_to_dcp(edit_config(linear(num_heads=8)), CensusMismatch)

    assert "layers.0.self_attn.q_proj.weight: found [192, 128], wanted [256, 128]" in message
    assert "layers.3.self_attn" not in message


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("num_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
        ("moe_router_activation_func", "scoring_func"),
    ],
)
def test_d8_the_spelling_of_another_family_is_refused_by_both_names(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], right: str, wrong: str
) -> None:
    def respell(config: dict[str, Any]) -> None:
        config["text_config"][wrong] = config["text_config"].pop(right)

    message = refused_everywhere(edit_config(respell))

    assert repr(wrong) in message
    assert repr(right) in message


def test_d8_every_reason_is_counted(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str]
) -> None:
    message = refused_everywhere(edit_config(text(num_experts_per_token=99, vocab_size="many", hidden_act="silu")))

    assert "for 3 reasons" in message


@pytest.mark.parametrize(("num_shared", "rows"), [(1, 64), (3, 192)])
def test_d9_shared_experts_count_by_their_width(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused, num_shared: int, rows: int
) -> None:
    message = refused_by_hf_to_dcp(edit_config(text(num_shared_experts=num_shared)), CensusMismatch)

    assert "12 of wrong shape" in message
    assert f"shared_experts.gate_proj.weight: found [128, 128], wanted [{rows}, 128]" in message


@pytest.mark.parametrize("value", [0, -1, "12", 2.5])
def test_d10_a_block_size_that_is_none_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], value: Any
) -> None:
    assert "attn_res_block_size" in refused_everywhere(edit_config(text(attn_res_block_size=value)))


@pytest.mark.parametrize("value", [None, ...])
def test_d10_residual_tensors_without_a_block_size_are_refused(
    edit_config: Callable[[Change], Path], refused_by_hf_to_dcp: Refused, value: Any
) -> None:
    message = refused_by_hf_to_dcp(edit_config(text(attn_res_block_size=value)), BadInput)

    assert "attn_res" in message or "_res_norm.weight" in message


def test_d10_a_block_size_without_residual_tensors_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_res_" in name]:
            del tensors[name]

    edit_tensors(small, drop)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert "22 missing" in message
    assert "missing: language_model.model.output_attn_res_norm.weight" in message


def test_d10_the_value_under_another_key_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str]
) -> None:
    def respell(config: dict[str, Any]) -> None:
        config["text_config"]["attn_res_blocksize"] = config["text_config"].pop("attn_res_block_size")

    assert "'attn_res_blocksize'" in refused_everywhere(edit_config(respell))


@pytest.mark.parametrize("value", [0, None, ...])
def test_c14_no_next_token_layers_is_written_in_three_ways(
    edit_config: Callable[[Change], Path], tmp_path: Path, to_dcp: Convert, value: Any
) -> None:
    report = to_dcp(edit_config(text(num_nextn_predict_layers=value)), tmp_path / "dcp")

    assert report.complete


def test_c14_a_next_token_layer_is_refused(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str]
) -> None:
    assert "num_nextn_predict_layers" in refused_everywhere(edit_config(text(num_nextn_predict_layers=1)))


def test_c14_tensors_of_a_next_token_layer_are_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    def add(tensors: dict[str, Any]) -> None:
        like = tensors["language_model.model.norm.weight"]
        for name in ("language_model.model.layers.5.eh_proj.weight", "language_model.mtp.0.norm.weight"):
            tensors[name] = like

    edit_tensors(small, add)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert "2 unexpected" in message
    assert "unexpected: language_model.mtp.0.norm.weight" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_d_a_config_that_is_none_is_refused_by_name(small: Path, refused_by_hf_to_dcp: Refused, content: bytes) -> None:
    (small / "config.json").write_bytes(content)

    assert str(small / "config.json") in refused_by_hf_to_dcp(small, BadConfig)


JUNK: list[Any] = [None, True, -1, 0, 2.5, float("nan"), "x", [], {}, [1], 10**30]


def paths_of(block: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = []
    for name, value in block.items():
        out.append((*before, name))
        if isinstance(value, dict) and value:
            out += paths_of(value, (*before, name))
    return out


def test_d_no_value_of_any_field_is_more_than_a_refusal(small_source: Path) -> None:
    """Each field of the file set to each of eleven wrong values, and left out: a config or a refusal, never a crash."""
    from k3convert.planning.inventory import parse_config
    from k3model.census import census

    raw = json.loads((small_source / "config.json").read_text())

    for path in paths_of(raw):
        for value in (*JUNK, ...):
            config = json.loads(json.dumps(raw))
            block = config
            for name in path[:-1]:
                block = block[name]
            if value is ...:
                del block[path[-1]]
            else:
                block[path[-1]] = value
            try:
                parsed = parse_config(config, "here")
            except BadConfig:
                continue
            assert sum(1 for _ in islice(census(parsed), 1000)) > 0, (path, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (text(num_hidden_layers=10**30), "layers [6, 7, 8"),
        (text(num_hidden_layers=10**9, linear_attn_config=None), "num_hidden_layers is 1,000,000,000"),
        (text(num_experts=10**9), "num_experts is 5,000,000,000"),
        (lambda config: config["vision_config"].update(vt_num_hidden_layers=10**9), "vt_num_hidden_layers is 1,000"),
    ],
)
def test_d_counts_that_no_checkpoint_has_are_refused_at_once(
    edit_config: Callable[[Change], Path], refused_everywhere: Callable[[Path], str], change: Change, words: str
) -> None:
    started = time.monotonic()

    message = refused_everywhere(edit_config(change))

    assert words in message
    assert time.monotonic() - started < 5
