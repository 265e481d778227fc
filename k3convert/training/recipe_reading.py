"""Recipes from YAML: shipped ones by name, others by path, with single values set on the command line."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from k3convert.errors import BadInput, UsageError
from k3convert.training.recipe import Faults, Recipe

SUFFIX = ".yaml"
# As in YAML 1.2: 1e-5 is a number. The library follows YAML 1.1, where it is a text.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class BadRecipe(BadInput):
    """The recipe is no YAML, or fields of it are wrong; all of them are listed."""

    code = "bad-recipe"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """Plain data alone, every key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubles = sorted({str(key) for key in keys if keys.count(key) > 1})
        if doubles:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {', '.join(doubles)} is there twice", node.start_mark
            )
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def shipped() -> dict[str, Traversable]:
    """The recipes of the package by name."""
    folder = files("k3convert") / "recipes"
    found = {file.name.removesuffix(SUFFIX): file for file in folder.iterdir() if file.name.endswith(SUFFIX)}
    return dict(sorted(found.items()))


def load_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name: of a shipped one, or the path of a YAML file.
        settings: ``key=value`` texts, the key dotted, the value YAML: ``optimizer.learning_rate=1e-4``.

    Raises:
        UsageError: no such recipe, or a setting without ``=``.
        BadRecipe: it cannot be read, or fields are wrong.
    """
    return parse_recipe(_text(name), settings, where=name)


def parse_recipe(text: str, settings: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """A recipe's text as a recipe; see ``load_recipe``."""
    document = _parsed(text, where)
    if not isinstance(document, dict):
        raise BadRecipe(f"{where} is no YAML mapping")
    for setting in settings:
        _set(document, setting)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        offenders = [offender for found in error.errors() for offender in _offenders(found)]
        raise BadRecipe(
            f"{where}: {len(offenders)} fields are wrong" if len(offenders) > 1 else f"{where}: a field is wrong",
            offenders=offenders,
        ) from error


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with every field, which reads as the same recipe."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    return text


def _text(name: str) -> str:
    recipes = shipped()
    if name in recipes:
        return recipes[name].read_text("utf-8")
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no recipe {name!r}", hint=f"there are {', '.join(recipes)}, or name a {SUFFIX} file")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecipe(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BadRecipe(f"{where} is no YAML: {' '.join(str(error).split())}") from error


def _set(document: dict[str, Any], setting: str) -> None:
    key, separator, value = setting.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise UsageError(f"--set {setting}: write KEY=VALUE, for example optimizer.learning_rate=1e-4")
    block = document
    for name in path[:-1]:
        inner = block.setdefault(name, {})
        if inner is None:
            inner = block[name] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"--set {setting}: {name} is {inner!r}, no block")
        block = inner
    block[path[-1]] = _parsed(value, f"--set {key}")


def _offenders(found: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one field: where, what, and the value found."""
    # The kind of data is part of pydantic's path, not of the recipe's.
    location = [str(part) for part in found["loc"] if part not in ("synthetic", "text", "conversations")]
    where = ".".join(location) or "recipe"
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, Faults):
        yield from (f"{where}: {fault}" for fault in cause.faults)
        return
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        message = "no such field"
    given = found["input"]
    shown = "" if isinstance(given, dict) or found["type"] in ("missing", "value_error") else f", got {given!r}"
    yield f"{where}: {message}{shown}"
