"""Generated checkpoints in the released layout: for demonstrations, tests and benchmarks."""

from k3convert.synthesis.generated_checkpoint import Summary, make_checkpoint

__all__ = ["Summary", "make_checkpoint"]
