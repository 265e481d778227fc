"""Whether a network can be laid out so: all reasons at once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3model.config import KimiK3Config
from k3model.parallel.layout import Layout
from k3model.parallel.stages import max_stages, num_blocks


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason against a layout.

    Attributes:
        axis: the degree to change: ``pp``, ``dp``, ``cp``, ``sp`` or ``ep``.
        reason: what does not divide what, with both numbers.
    """

    axis: str
    reason: str


def network_problems(layout: Layout, config: KimiK3Config) -> tuple[Problem, ...]:
    """Every reason why a network cannot be laid out so; empty when it can."""
    return (
        *_head_problems(layout, config),
        *_stage_problems(layout, config),
        *_expert_problems(layout, config),
    )


def _head_problems(layout: Layout, config: KimiK3Config) -> Iterator[Problem]:
    for kind, block in (("KDA", config.text.kda), ("MLA", config.text.mla)):
        if block is not None and block.num_heads % layout.sp:
            yield Problem("sp", f"sp={layout.sp} does not divide the {block.num_heads} heads of the {kind} layers")


def _stage_problems(layout: Layout, config: KimiK3Config) -> Iterator[Problem]:
    limit = max_stages(config.text)
    if layout.pp > limit:
        yield Problem(
            "pp",
            f"pp={layout.pp} needs more stages than the {num_blocks(config.text)} blocks of "
            f"{config.text.attn_res_block_size or 1} layers and one output-only stage give ({limit})",
        )
    if layout.pp > 1 and config.text.tie_word_embeddings:
        yield Problem("pp", f"pp={layout.pp} puts the embedding and the head on two stages, but they are one parameter")


def _expert_problems(layout: Layout, config: KimiK3Config) -> Iterator[Problem]:
    moe, ranks = config.text.moe, layout.ranks_per_stage
    divides = ranks % layout.ep == 0
    if not divides:
        yield Problem("ep", f"ep={layout.ep} does not divide the {ranks} ranks of a stage (dp x cp x sp)")
    if moe is None:
        if layout.ep > 1:
            yield Problem("ep", f"ep={layout.ep}, but the network has no experts")
        return
    if moe.num_experts % layout.ep:
        yield Problem("ep", f"ep={layout.ep} does not divide the {moe.num_experts} experts")
    if layout.shards_parameters and divides:
        # Each matrix is cut along its own dim 1, and FSDP2 cuts dims other than 0 evenly only.
        for name, rows in (("w1 and w3", moe.intermediate_size), ("w2", config.text.expert_input_size)):
            if rows % layout.ep_fsdp:
                yield Problem(
                    "ep",
                    f"the {layout.ep_fsdp} ranks that share the same experts (dp x cp x sp / ep) do not divide the "
                    f"{rows} rows of {name}",
                )
