"""Which layers a pipeline stage holds. Stages are cut where the attention residuals start a new block."""

from __future__ import annotations

from itertools import accumulate, pairwise

from k3model.text_config import TextConfig


def num_blocks(config: TextConfig) -> int:
    """How many blocks the layers form; without attention residuals every layer is one."""
    return -(-config.num_hidden_layers // (config.attn_res_block_size or 1))


def max_stages(config: TextConfig) -> int:
    """The most pipeline stages: one a block, and one more that holds the output only."""
    return num_blocks(config) + 1


def stage_layers(config: TextConfig, num_stages: int) -> tuple[range, ...]:
    """The layers of every stage, whole blocks, spread evenly with the surplus on the earlier stages.

    With one stage more than blocks the last has no layers: only the last mix, the norm and the head.

    Raises:
        ValueError: there are more stages than ``max_stages`` or fewer than 1.
    """
    if not 1 <= num_stages <= max_stages(config):
        raise ValueError(f"{num_blocks(config)} blocks make 1..{max_stages(config)} stages, got {num_stages}")
    share, surplus = divmod(num_blocks(config), num_stages)
    counts = [share + (stage < surplus) for stage in range(num_stages)]
    block_size = config.attn_res_block_size or 1
    bounds = [min(blocks * block_size, config.num_hidden_layers) for blocks in accumulate(counts, initial=0)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
