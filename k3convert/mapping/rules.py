"""Mapping rules: how an HF name and a native FQN stand for each other. One direction is written, the other derived."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

INDEX = "e"


class Slot(NamedTuple):
    """Where one HF tensor lives natively: an FQN, and, in a stack, its expert id: the place along dim 0."""

    fqn: str
    expert: int | None


@dataclass(frozen=True)
class Rename:
    """One HF name pattern and the native FQN it stands for; ``{n}`` is a number, ``{w}`` one name part."""

    hf: str
    fqn: str

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        return _compile(self.hf), _compile(self.fqn)

    def to_fqn(self, hf_name: str) -> Slot | None:
        """The slot of an HF name, or None when the rule is not about it."""
        found = self._patterns[0].fullmatch(hf_name)
        return Slot(self.fqn.format(**found.groupdict()), None) if found else None

    def to_hf(self, fqn: str, expert: int | None) -> str | None:
        """The HF name of a slot, or None when the rule is not about it."""
        found = self._patterns[1].fullmatch(fqn)
        return self.hf.format(**found.groupdict()) if found and expert is None else None


@dataclass(frozen=True)
class Stack:
    """Tensors that differ in the index ``{e}`` alone, stacked along a new dim 0 in the order of the index."""

    hf: str
    fqn: str

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        return _compile(self.hf), _compile(self.fqn)

    def to_fqn(self, hf_name: str) -> Slot | None:
        """The slot of an HF name, or None when the rule is not about it."""
        found = self._patterns[0].fullmatch(hf_name)
        if found is None:
            return None
        fields = found.groupdict()
        expert = int(fields.pop(INDEX))
        return Slot(self.fqn.format(**fields), expert)

    def to_hf(self, fqn: str, expert: int | None) -> str | None:
        """The HF name of one place in a stack, or None when the rule is not about it."""
        found = self._patterns[1].fullmatch(fqn)
        return self.hf.format(**found.groupdict(), **{INDEX: expert}) if found and expert is not None else None

    def is_stack(self, fqn: str) -> bool:
        """Whether the FQN is a stack of this rule."""
        return self._patterns[1].fullmatch(fqn) is not None


@dataclass(frozen=True)
class Profile:
    """A framework's naming on disk: rules tried in order; a name that no rule is about keeps its name.

    ``holders`` are FQNs of modules that exist in the network alone: their parameters are stored under the first name
    of the pair, and read under either.
    """

    name: str
    rules: tuple[Rename | Stack, ...]
    holders: tuple[Rename, ...] = field(default=())

    def to_fqn(self, hf_name: str) -> Slot:
        """The slot of an HF name."""
        for rule in self.rules:
            if slot := rule.to_fqn(hf_name):
                return slot
        return Slot(hf_name, None)

    def to_hf(self, fqn: str, expert: int | None = None) -> str:
        """The HF name of a slot.

        Raises:
            KeyError: an expert was given for an FQN that is no stack.
        """
        fqn = self.without_holder(fqn)
        for rule in self.rules:
            if name := rule.to_hf(fqn, expert):
                return name
        if expert is not None:
            raise KeyError(f"{fqn} is no stack of profile {self.name}")
        return fqn

    def without_holder(self, fqn: str) -> str:
        """The stored name of a parameter whose module is a holder; any other FQN unchanged."""
        for holder in self.holders:
            if name := holder.to_hf(fqn, None):
                return name
        return fqn

    def is_stack(self, fqn: str) -> bool:
        """Whether the FQN stands for a stack of HF tensors."""
        return any(isinstance(rule, Stack) and rule.is_stack(fqn) for rule in self.rules)


# a number in the one spelling that formatting it gives back: no leading zeros, no digits of other scripts
_NUMBER = r"0|[1-9][0-9]*"
_PLACEHOLDERS = {"n": _NUMBER, INDEX: _NUMBER, "w": r"[A-Za-z0-9_]+"}


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for name, expression in _PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape("{" + name + "}"), f"(?P<{name}>{expression})")
    return re.compile(pattern)
