"""Processes of one process group, and what they answer."""

from k3convert.ranks.pool import RankPool, RanksFailed, RanksSilent

__all__ = ["RankPool", "RanksFailed", "RanksSilent"]
