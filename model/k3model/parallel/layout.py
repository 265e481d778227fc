"""A parallel layout: how many ranks each axis has, and what follows from that. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of a parallel layout.

    Ranks are numbered with ``pp`` outermost and ``sp`` innermost. Experts take no ranks of their own: the
    ``dp * cp * sp`` ranks of a stage are counted again as ``ep_fsdp * ep``, ``ep`` innermost.

    Attributes:
        pp: pipeline stages.
        dp: parts of the batch.
        cp: contiguous parts of the sequence, each with all heads; the state of KDA is handed on.
        sp: parts that the sequence is split into once more; attention exchanges them for heads (Ulysses).
        ep: parts of the experts.
        shards_parameters: whether parameters are sharded (FSDP2) over ``dp * cp * sp``, or replicated there.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    sp: int = 1
    ep: int = 1
    shards_parameters: bool = False

    def __post_init__(self) -> None:
        wrong = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if getattr(self, field.name) < 1]
        wrong = [text for text in wrong if not text.startswith("shards_parameters")]
        if wrong:
            raise ValueError(f"degrees are at least 1, got {', '.join(wrong)}")

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """How many ranks hold the same layers: ``dp * cp * sp``."""
        return self.dp * self.cp * self.sp

    @property
    def sequence_parts(self) -> int:
        """How many ranks share one row of the batch."""
        return self.cp * self.sp

    @property
    def ep_fsdp(self) -> int:
        """How many ranks share the same experts.

        Raises:
            ValueError: ``ep`` does not divide the ranks of a stage.
        """
        if self.ranks_per_stage % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {self.ranks_per_stage} ranks of a stage")
        return self.ranks_per_stage // self.ep
