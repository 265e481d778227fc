"""The two roots that K3 checkpoints are published under, and the canonical one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RELEASED_PREFIX = "language_model."


@dataclass(frozen=True, slots=True)
class Root:
    """How the text tower's names begin in a file; ``language_model.`` is canonical."""

    name: str
    prefix: str

    def owns(self, name: str) -> bool:
        """Whether a name of the text tower is under this root."""
        return name.startswith((f"{self.prefix}model.", f"{self.prefix}lm_head."))

    def to_canonical(self, name: str) -> str:
        """The released name of a tensor that a file of this root calls ``name``."""
        if self.prefix == RELEASED_PREFIX or not self.owns(name):
            return name
        return RELEASED_PREFIX + name[len(self.prefix) :]

    def from_canonical(self, name: str) -> str:
        """What a file of this root calls a tensor of the released name."""
        if self.prefix == RELEASED_PREFIX or not RELEASED.owns(name):
            return name
        return self.prefix + name[len(RELEASED_PREFIX) :]


RELEASED = Root("language_model", RELEASED_PREFIX)
BARE = Root("bare", "")
ROOTS = {root.name: root for root in (RELEASED, BARE)}


def detect_root(names: Iterable[str]) -> Root:
    """The root that all names share.

    Raises:
        ValueError: names of both roots, or of none.
    """
    counts = {"released": 0, "bare": 0}
    example: dict[str, str] = {}
    for name in names:
        if name.startswith(RELEASED_PREFIX):
            kind = "released"
        elif name.startswith(("model.", "lm_head.")):
            kind = "bare"
        else:
            continue
        counts[kind] += 1
        if counts[kind] == 1:
            example[kind] = name
    if len(example) == 2:
        raise ValueError(
            f"{counts['released']} names begin with {RELEASED_PREFIX} and {counts['bare']} do not, "
            f"for example {example['released']} and {example['bare']}"
        )
    if not example:
        raise ValueError(f"no name begins with {RELEASED_PREFIX}model. or with model.")
    return RELEASED if "released" in example else BARE
