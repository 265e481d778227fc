"""The package's shape: rows apart from code, nothing imported early, nothing changed by importing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import k3kernels
from k3kernels.registry import builtin_rows

PACKAGE = Path(k3kernels.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

BUILTIN_ENTRIES = {
    ("attn_res", "standard", "eager", "any", None, ()),
    ("attn_res", "standard", "fla", "cuda", "NVIDIA", ("fla.ops.attnres", "triton", "einops")),
    ("cross_entropy", "chunked", "chunk_loss", "any", None, ()),
    ("cross_entropy", "chunked", "eager", "any", None, ()),
    ("cross_entropy", "standard", "eager", "any", None, ()),
    ("gated_rms_norm", "standard", "eager", "any", None, ()),
    ("gated_rms_norm", "standard", "fla", "cuda", "NVIDIA", ("fla.modules", "triton", "einops")),
    ("kda", "chunk", "eager", "any", None, ()),
    ("kda", "chunk", "fla", "cuda", "NVIDIA", ("fla.ops.kda", "triton", "einops")),
    ("kda", "recurrent", "eager", "any", None, ()),
    ("kda", "recurrent", "fla", "cuda", "NVIDIA", ("fla.ops.kda", "triton", "einops")),
    ("kda_gate", "standard", "eager", "any", None, ()),
    ("kda_gate", "standard", "fla", "cuda", "NVIDIA", ("fla.ops.kda", "triton", "einops")),
    ("mla_attention", "causal", "eager", "any", None, ()),
    ("mla_attention", "causal", "sdpa", "any", None, ()),
    ("moe_experts", "situ", "eager", "any", None, ()),
    ("moe_experts", "situ", "grouped_mm", "any", None, ()),
    ("mxfp4", "dequantize", "eager", "any", None, ()),
    ("mxfp4", "quantize", "eager", "any", None, ()),
    ("rms_norm", "standard", "eager", "any", None, ()),
    ("rms_norm", "torch", "eager", "any", None, ()),
    ("short_conv", "standard", "eager", "any", None, ()),
    ("short_conv", "standard", "fla", "cuda", "NVIDIA", ("fla.modules", "triton", "einops")),
    ("situ_and_mul", "standard", "eager", "any", None, ()),
    ("situ_and_mul", "weighted", "eager", "any", None, ()),
}


def run_python(code: str) -> object:
    """What a fresh interpreter prints, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stderr)
    return json.loads(done.stdout)


def test_row_12_the_builtin_entries_are_exactly_these() -> None:
    found = {
        (*row.triple, row.device, row.requirement.describe() if row.requirement else None, row.requires)
        for row in builtin_rows()
    }

    assert found == BUILTIN_ENTRIES


def test_row_13_every_entry_lies_where_its_names_say() -> None:
    for row in builtin_rows():
        for entry in (row.forward, row.backward, row.wrapper):
            if entry is not None:
                module, _, _ = str(entry).partition(":")
                assert module == f"k3kernels.ops.{row.op}.{row.variant}.{row.impl}"


def test_row_13_every_implementation_file_has_a_row() -> None:
    files = {
        tuple(path.relative_to(PACKAGE / "ops").with_suffix("").parts)
        for path in (PACKAGE / "ops").glob("*/*/*.py")
        if path.name != "__init__.py"
    }

    assert files == {row.triple for row in builtin_rows()}


def test_row_13_every_variant_has_an_eager_specification() -> None:
    variants = {(row.op, row.variant) for row in builtin_rows()}

    assert variants == {(row.op, row.variant) for row in builtin_rows() if row.impl == "eager"}


def test_row_4_importing_the_package_and_listing_ops_imports_no_library() -> None:
    heavy = run_python(
        "import sys, json, k3kernels, k3kernels.registry\n"
        "k3kernels.list_entries()\n"
        "print(json.dumps([m for m in ('torch', 'triton', 'fla', 'torch_npu', 'fla_npu', 'transformers')"
        " if m in sys.modules]))"
    )

    assert heavy == []


def test_row_4_listing_what_is_usable_imports_no_vendor_code() -> None:
    vendors = run_python(
        "import sys, json, k3kernels\n"
        "k3kernels.listing()\n"
        "print(json.dumps([m for m in ('triton', 'fla', 'torch_npu', 'fla_npu', 'transformers') if m in sys.modules]))"
    )

    assert vendors == []


def test_row_84_importing_every_module_changes_neither_torch_nor_transformers() -> None:
    changed = run_python(
        "import importlib, json, pkgutil, torch, torch.nn.functional, transformers.activations as activations\n"
        "watched = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.autograd, activations)\n"
        "before = [dict(vars(one)) for one in watched]\n"
        "state = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),"
        " torch.get_float32_matmul_precision())\n"
        "import k3kernels\n"
        "for found in pkgutil.walk_packages(k3kernels.__path__, 'k3kernels.'):\n"
        "    importlib.import_module(found.name)\n"
        "changed = [str(one) for one, old in zip(watched, before)\n"
        "           if any(vars(one).get(name) is not value for name, value in old.items())]\n"
        "after = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),"
        " torch.get_float32_matmul_precision())\n"
        "print(json.dumps(changed + ([] if after == state else ['torch settings'])))"
    )

    assert changed == []


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_row_85_no_import_has_a_fallback(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))

    guarded = [found for node in ast.walk(tree) if isinstance(node, ast.Try) for found in imports_of(node)]

    assert guarded == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_libraries_are_imported_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))

    at_top = {
        name.split(".")[0]
        for node in tree.body
        for found in imports_of(node)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for name in ([alias.name for alias in found.names] if isinstance(found, ast.Import) else [found.module or ""])
    }

    assert at_top.isdisjoint({"fla", "triton", "torch_npu", "transformers"})
