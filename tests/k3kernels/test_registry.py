"""The registry's contract: what may be registered, what is resolved, and what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3kernels import (
    GpuKernelRequirement,
    K3Op,
    MluKernelRequirement,
    NpuKernelRequirement,
    Registry,
    Row,
    list_available,
    list_entries,
    list_registered,
    listing,
    register_op,
    resolve,
)
from k3kernels.row import is_discoverable


class MetCuda(GpuKernelRequirement):
    """A CUDA requirement that this machine satisfies, whatever it is."""

    def unmet(self) -> str | None:
        return None


class MetNpu(NpuKernelRequirement):
    """An Ascend requirement that this machine satisfies."""

    def unmet(self) -> str | None:
        return None


def on_any() -> str:
    return "any"


def on_cuda() -> str:
    return "cuda"


def a_row(impl: str = "mine", **changes: Any) -> Row:
    return Row("op", "standard", impl, **{"wrapper": on_any, "description": "a test row", **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"forward": on_any, "backward": on_any}, "not both"),
        ({"wrapper": None, "forward": on_any}, "come together"),
        ({"wrapper": None, "backward": on_any}, "come together"),
        ({"wrapper": None}, "needs a forward/backward pair or a wrapper"),
        ({"description": " "}, "description"),
        ({"impl": ""}, "must not be empty"),
    ],
)
def test_row_1_illegal_combinations_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        a_row(**changes)


def test_row_1_all_problems_of_a_row_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"empty.*description.*not both"):
        a_row(impl="", description="", forward=on_any, backward=on_any)


def test_row_1_the_description_is_keyword_only_and_required(fresh_registry: Registry) -> None:
    with pytest.raises(TypeError, match="description"):
        register_op("op", "standard", "mine", wrapper=on_any)  # type: ignore[call-arg]


def test_row_1_the_device_comes_from_the_requirement() -> None:
    assert a_row().device == "any"
    assert a_row(requirement=GpuKernelRequirement()).device == "cuda"
    assert a_row(requirement=NpuKernelRequirement()).device == "npu"
    assert a_row(requirement=MluKernelRequirement()).device == "mlu"


def test_row_1_one_impl_may_have_a_row_per_device_and_a_duplicate_names_the_device() -> None:
    registry = Registry([a_row(), a_row(requirement=GpuKernelRequirement())])

    with pytest.raises(ValueError, match=r"op/standard/mine is already registered for device 'cuda'"):
        registry.add(a_row(requirement=GpuKernelRequirement()))


def test_row_3_the_exact_device_comes_before_any() -> None:
    registry = Registry([a_row(), a_row(wrapper=on_cuda, requirement=MetCuda())])

    assert registry.resolve("op", "standard", "mine", "cuda") is on_cuda
    assert registry.resolve("op", "standard", "mine", "npu") is on_any


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nope", "standard", "mine"), "no op 'nope'; there are: op"),
        (("op", "nope", "mine"), "op has no variant 'nope'; it has: standard"),
        (("op", "standard", "nope"), "op/standard has no impl 'nope'; it has: mine, other"),
    ],
)
def test_row_3_an_unknown_name_lists_what_exists(names: tuple[str, str, str], message: str) -> None:
    registry = Registry([a_row(), a_row("other")])

    with pytest.raises(KeyError, match=message):
        registry.resolve(*names, "cpu")


def test_row_3_known_for_other_devices_only_is_an_error_that_names_them() -> None:
    registry = Registry([a_row(requirement=MetCuda()), a_row(requirement=MetNpu())])

    with pytest.raises(RuntimeError, match=r"op/standard/mine is registered for cuda, npu, not for cpu"):
        registry.resolve("op", "standard", "mine", "cpu")


def test_row_3_an_unmet_exact_row_never_falls_back_to_any() -> None:
    registry = Registry([a_row(), a_row(wrapper=on_cuda, requires=("no_such_module",), requirement=MetCuda())])

    with pytest.raises(RuntimeError, match=r"cannot run on cuda: not installed: no_such_module"):
        registry.resolve("op", "standard", "mine", "cuda")


def test_row_3_a_broken_implementation_raises_its_own_error() -> None:
    registry = Registry([a_row(wrapper="k3kernels.no_such_module:function")])

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.resolve("op", "standard", "mine", "cpu")


def test_row_4_requires_looks_for_modules_without_importing_them() -> None:
    assert is_discoverable("xml.dom.minidom")
    assert not is_discoverable("xml.no_such_part.deeper")
    assert not is_discoverable("no_such_module.part")
    assert is_discoverable("wsgiref.simple_server")
    assert "wsgiref" not in sys.modules


def test_row_6_handles_are_interned_by_their_names() -> None:
    first = K3Op("kda", "chunk", "eager")

    assert K3Op("kda", "chunk", "eager") is first
    assert copy.deepcopy(first) is first
    assert pickle.loads(pickle.dumps(first)) is first
    assert repr(first).startswith("K3Op('kda', 'chunk', 'eager'")


def test_row_6_handles_of_two_impls_live_side_by_side(fresh_registry: Registry) -> None:
    register_op("op", "standard", "one", wrapper=lambda: 1, description="one")
    register_op("op", "standard", "two", wrapper=lambda: 2, description="two")

    one, two = K3Op("op", "standard", "one"), K3Op("op", "standard", "two")

    assert (one(), two(), one()) == (1, 2, 1)


def test_row_6_a_handle_is_resolved_at_construction() -> None:
    with pytest.raises(KeyError, match="no impl 'nope'"):
        K3Op("kda", "chunk", "nope")
    with pytest.raises(RuntimeError, match="kda/chunk/fla"):
        K3Op("kda", "chunk", "fla", device="cpu")


def test_row_8_the_lists_tell_names_usable_names_and_rows(fresh_registry: Registry) -> None:
    register_op("op", "standard", "here", wrapper=on_any, description="runs here")
    register_op("op", "standard", "gone", wrapper=on_any, description="does not", requires=("no_such_module",))

    assert list_registered("op") == (("op", "standard", "gone"), ("op", "standard", "here"))
    assert list_available("op") == (("op", "standard", "here"),)
    assert [row.description for row in list_entries("op")] == ["does not", "runs here"]
    with pytest.raises(KeyError, match="no op 'nope'"):
        list_entries("nope")


def test_row_8_a_listing_says_what_is_usable_or_why_not(fresh_registry: Registry) -> None:
    register_op("op", "standard", "here", wrapper=on_any, description="runs here")
    register_op("op", "standard", "gone", wrapper=on_any, description="does not", requires=("no_such_module",))
    register_op("op", "standard", "npu", wrapper=on_any, description="elsewhere", requirement=MetNpu())

    gone, here, npu = listing("op", device="cpu")

    assert (here.usable, here.reason) == (True, None)
    assert (gone.usable, gone.reason) == (False, "not installed: no_such_module")
    assert (npu.usable, npu.reason) == (False, "needs a npu device, this is cpu")
    assert here.document()["requires"] == []
    assert here.document()["description"] == "runs here"


def test_a_third_party_pair_is_resolved_as_a_differentiable_op(fresh_registry: Registry) -> None:
    from k3kernels.pair import SavedState

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, SavedState]:
        return 2 * x, SavedState(())

    def backward(saved: SavedState, grad: torch.Tensor) -> tuple[torch.Tensor]:
        return (3 * grad,)  # wrong on purpose, so that it cannot come from autograd

    register_op("op", "standard", "pair", forward, backward, description="a pair")
    x = torch.ones(2, requires_grad=True)

    resolve("op", "standard", "pair")(x).sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_entries_may_be_functions_or_names() -> None:
    registry = Registry([a_row(wrapper="operator:add"), a_row("direct", wrapper=on_any)])

    add: Callable[[int, int], int] = registry.resolve("op", "standard", "mine", "cpu")

    assert add(1, 2) == 3
    assert registry.resolve("op", "standard", "direct", "cpu") is on_any
