"""What an execution tells while it runs; the command line draws a bar from it, tests collect it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """The first byte is about to be read. ``resumed_bytes`` were written by an earlier run."""

    job: str
    total_bytes: int
    resumed_bytes: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """So many bytes are written, counted from the beginning of the job."""

    done_bytes: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that the user should know and that stops nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The destination is complete under its final name, or this part is."""

    elapsed_s: float


Event = Started | Advanced | Noted | Ended
EventSink = Callable[[Event], None]


def ignore_event(_event: Event) -> None:
    """An event sink that keeps nothing."""
