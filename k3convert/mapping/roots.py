"""The two roots that K3 checkpoints are published under, and the canonical one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

VISION_PREFIXES = ("vision_tower.", "mm_projector.")


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
        return RELEASED.prefix + name[len(self.prefix) :] if self.owns(name) else name

    def from_canonical(self, name: str) -> str:
        """What a file of this root calls a tensor of the released name."""
        return self.prefix + name[len(RELEASED.prefix) :] if RELEASED.owns(name) else name


RELEASED = Root("language_model", "language_model.")
BARE = Root("bare", "")
ROOTS = {root.name: root for root in (RELEASED, BARE)}


def detect_root(names: Iterable[str]) -> Root:
    """The root that all names share.

    Raises:
        ValueError: names of both roots, or of none.
    """
    counts = {RELEASED: 0, BARE: 0}
    example: dict[Root, str] = {}
    for name in names:
        for root in counts:
            if root.owns(name):
                counts[root] += 1
                example.setdefault(root, name)
    found = [root for root, count in counts.items() if count]
    if len(found) == 2:
        raise ValueError(
            f"{counts[RELEASED]} names begin with language_model. and {counts[BARE]} do not, "
            f"for example {example[RELEASED]} and {example[BARE]}"
        )
    if not found:
        raise ValueError("no name begins with language_model.model. or with model.")
    return found[0]
